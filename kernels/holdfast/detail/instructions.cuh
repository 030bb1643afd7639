// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Single instructions of the device that C++ has no word for.

#include <cuda_runtime.h>

namespace holdfast::detail {

/// 1 / x to one unit in the last place.
[[nodiscard]] __device__ inline float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace holdfast::detail
