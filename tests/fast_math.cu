// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Compiled to PTX with --use_fast_math; a test looks there for sums that would flush subnormals.

#include "holdfast/stream_sum.cuh"

template class holdfast::StreamSum<float>;
template class holdfast::StreamSum<__nv_bfloat16, float>;
