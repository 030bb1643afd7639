// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// From a token's mixes to its coefficients pre, post and comb: f32, one thread for each.

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
///
/// From step to step only scales change: after the softmax the matrix m stays, and stands for
/// row[i] * m[i][j] * column[j]. To divide column j by its sum + eps is to make
///
///     1 / column[j] = sum_i row[i] * m[i][j] + eps * (1 / column[j] as it was)
///
/// and rows likewise. That is the same iteration in half the instructions. With eps = 0 nothing
/// bounds the scales: logits of a row some 80 apart that cannot be balanced make them overflow, and
/// the result NaN.
__device__ inline void sinkhorn(float (&m)[kStreams * kStreams], int iterations, float eps) {
  static_assert(kStreams == 4);
  for (int i = 0; i < 16; i += 4) {
    const float most = fmaxf(fmaxf(m[i], m[i + 1]), fmaxf(m[i + 2], m[i + 3]));
    for (int j = i; j < i + 4; ++j) m[j] = expf(m[j] - most);
    const float scale = approximate_reciprocal((m[i] + m[i + 1]) + (m[i + 2] + m[i + 3]));
    for (int j = i; j < i + 4; ++j) m[j] = fmaf(m[j], scale, eps);
  }
  // 1 / row and 1 / column, and what they become.
  float row_sums[4] = {1, 1, 1, 1};
  float column_sums[4] = {1, 1, 1, 1};
  float rows[4] = {1, 1, 1, 1};
  float columns[4];
  // The first term does not wait for the reciprocals before it.
  const auto sum = [eps](float before, const float(&scales)[4], float a, float b, float c,
                         float d) {
    return fmaf(scales[1], b, fmaf(scales[0], a, eps * before)) + fmaf(scales[3], d, scales[2] * c);
  };
  for (int iteration = 0;; ++iteration) {
    for (int j = 0; j < 4; ++j) {
      column_sums[j] = sum(column_sums[j], rows, m[j], m[j + 4], m[j + 8], m[j + 12]);
      columns[j] = approximate_reciprocal(column_sums[j]);
    }
    if (iteration + 1 >= iterations) break;
    for (int i = 0; i < 4; ++i) {
      const float* const at = m + 4 * i;
      row_sums[i] = sum(row_sums[i], columns, at[0], at[1], at[2], at[3]);
      rows[i] = approximate_reciprocal(row_sums[i]);
    }
  }
  for (int i = 0; i < 16; ++i) m[i] = rows[i / 4] * m[i] * columns[i % 4];
}

}  // namespace holdfast::mhc::detail
