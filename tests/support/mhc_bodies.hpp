// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The mHC kernels on the host, thread for thread.

#include <holdfast/mhc/head.cuh>
#include <holdfast/mhc/post_pre.cuh>
#include <holdfast/mhc/pre.cuh>
#include <holdfast/mhc/pre_broadcast.cuh>

#include <vector_types.h>

namespace test {

/// With the weight at `fn`.
void run_pre_broadcast(dim3 grid, dim3 block, const holdfast::mhc::PreBroadcast& op,
                       const float* fn);

template <int Rows, int Tiles, int Warps, bool OneChunk, class Source>
void run_project(dim3 grid, dim3 block, const holdfast::mhc::detail::Projection<Source>& op);

template <int Rows>
void run_collapse(dim3 grid, dim3 block, const holdfast::mhc::detail::Collapse<Rows>& op);

}  // namespace test
