// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Compiled to PTX; a test looks there for stores of bf16 that are narrower than 16 bytes. Written
/// element by element, post takes three times as many write transactions in L2.

#include "holdfast/kernels.cuh"

namespace holdfast {

template __global__ void detail::work_kernel<mhc::detail::PostWork>(
    const __grid_constant__ mhc::detail::PostWork);
template __global__ void
mhc::detail::project_kernel<mhc::kMixes, 1, 4, true, mhc::detail::MixSource>(
    const __grid_constant__ mhc::detail::Projection<mhc::detail::MixSource>);
template __global__ void
mhc::detail::project_kernel<mhc::kMixes, 1, 8, false, mhc::detail::MixSource>(
    const __grid_constant__ mhc::detail::Projection<mhc::detail::MixSource>);
template __global__ void mhc::detail::collapse_kernel<mhc::kMixes>(
    const __grid_constant__ mhc::detail::Collapse<mhc::kMixes>);
template __global__ void mhc::detail::collapse_kernel<mhc::kStreams>(
    const __grid_constant__ mhc::detail::Collapse<mhc::kStreams>);
template __global__ void mhc::detail::pre_broadcast_kernel<mhc::PreBroadcast>(
    const __grid_constant__ mhc::PreBroadcast);

}  // namespace holdfast
