// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Single instructions of the device that C++ has no word for.

#include "holdfast/detail/cxx20.hpp"

#include <cuda_runtime.h>

#include <cstdint>

namespace holdfast::detail {

/// 1 / x to one unit in the last place. Subnormal x count as 0, and subnormal results are 0.
[[nodiscard]] __device__ inline float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// d += a * b by one warp: a is 16 x 16 and b 16 x 8 of bf16, two in a word with the lower index
/// lower, d is 16 x 8 of f32. With g = lane / 4 and q = lane % 4 a lane holds of
/// a: rows g, g + 8, g, g + 8 at columns 2q, 2q, 2q + 8, 2q + 8 (and the next one);
/// b: rows 2q and 2q + 8 (and the next one) of column g;
/// d: row g at columns 2q and 2q + 1, row g + 8 at the same.
/// Tensor cores round the sum toward zero, so a chain of these is to be short. From sm_80 on; traps
/// on older devices.
__device__ inline void multiply_accumulate(float (&d)[4], const std::uint32_t (&a)[4],
                                           const std::uint32_t (&b)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

/// Waits until `threads` threads of the block, whole warps, have come to barrier `id`, 1 to 15.
__device__ inline void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

}  // namespace holdfast::detail
