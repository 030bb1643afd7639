// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Stands in for kernels/holdfast/detail/instructions.cuh where a host compiler compiles kernels.

namespace holdfast::detail {

inline float approximate_reciprocal(float x) { return 1 / x; }

}  // namespace holdfast::detail
