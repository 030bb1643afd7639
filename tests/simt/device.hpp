// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The words of device code for a host compiler, so that it compiles the body of a kernel. The
/// build includes it before everything else, in files that launch nothing.

#include "simt/simt.hpp"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstring>

// Static, so that the threads of a block share it; blocks run one after another. Its contents are
// left over from the block before, as on a GPU.
#undef __shared__
#define __shared__ static
#define __launch_bounds__(...)

inline const uint3& threadIdx = simt::here.thread;
inline const uint3& blockIdx = simt::here.block;
inline const dim3& blockDim = simt::here.block_extent;
inline const dim3& gridDim = simt::here.grid_extent;

inline void __syncthreads() { simt::barrier(0, 0); }
inline void __syncwarp() {
  const char nothing = 0;
  (void)simt::exchange(&nothing, 1);
}
template <class T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int lanes) {
  const auto given = simt::exchange(&value, sizeof value);
  const unsigned lane = (threadIdx.x % 32) ^ static_cast<unsigned>(lanes);
  std::memcpy(&value, given.data() + lane * simt::kMostExchanged, sizeof value);
  return value;
}
template <class T>
T __shfl_sync(unsigned /*mask*/, T value, int lane) {
  const auto given = simt::exchange(&value, sizeof value);
  std::memcpy(&value, given.data() + static_cast<unsigned>(lane) % 32 * simt::kMostExchanged,
              sizeof value);
  return value;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline unsigned __float_as_uint(float a) { return std::bit_cast<unsigned>(a); }
inline float __uint_as_float(unsigned a) { return std::bit_cast<float>(a); }
