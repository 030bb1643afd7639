// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// From a token's mixes to its coefficients pre, post and comb: f32, by one thread, in the order of
/// operations of DeepSeek V4.

#include "holdfast/detail/instructions.cuh"
#include "holdfast/mhc/shapes.cuh"

#include <cuda_runtime.h>

namespace holdfast::mhc::detail {

// The correctly rounded reciprocal costs four times as much, in a chain of 2 * iterations.
using holdfast::detail::approximate_reciprocal;

/// 1 / sqrt(x), correctly rounded twice; for x from 1e-38 on, so for an eps of 1e-20 as well.
[[nodiscard]] __device__ inline float inverse_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }

/// 1 / (1 + e^-x): 0 and 1 at the ends, never NaN for a number.
[[nodiscard]] __device__ inline float sigmoid(float x) {
  return approximate_reciprocal(1.0F + expf(-x));
}

/// mix * scale + base.
[[nodiscard]] __device__ inline float logit(float mix, float scale, float base) {
  return fmaf(mix, scale, base);
}

/// Logits [4][4], row-major, to a matrix whose columns sum to 1 and whose rows nearly do. A softmax
/// of each row and + eps; then columns, rows, columns, ..., each divided by its sum + eps:
/// `iterations` times columns, one time less rows. At least one iteration.
__device__ inline void sinkhorn(float (&c)[kStreams * kStreams], int iterations, float eps) {
  static_assert(kStreams == 4);
  const auto sum = [](float a, float b, float d, float e) { return (a + b) + (d + e); };
  for (int i = 0; i < 16; i += 4) {
    const float most = fmaxf(fmaxf(c[i], c[i + 1]), fmaxf(c[i + 2], c[i + 3]));
    for (int j = i; j < i + 4; ++j) c[j] = expf(c[j] - most);
    const float scale = approximate_reciprocal(sum(c[i], c[i + 1], c[i + 2], c[i + 3]));
    for (int j = i; j < i + 4; ++j) c[j] = fmaf(c[j], scale, eps);
  }
  for (int iteration = 0;; ++iteration) {
    for (int j = 0; j < 4; ++j) {
      const float scale = approximate_reciprocal(sum(c[j], c[j + 4], c[j + 8], c[j + 12]) + eps);
      for (int i = j; i < 16; i += 4) c[i] *= scale;
    }
    if (iteration + 1 >= iterations) return;
    for (int i = 0; i < 16; i += 4) {
      const float scale = approximate_reciprocal(sum(c[i], c[i + 1], c[i + 2], c[i + 3]) + eps);
      for (int j = i; j < i + 4; ++j) c[j] *= scale;
    }
  }
}

}  // namespace holdfast::mhc::detail
