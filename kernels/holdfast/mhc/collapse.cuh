// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// From the partial sums of a token's projection to its results: the four streams collapsed to one,
/// with or without RMSNorm, and the coefficients with which post will mix the streams.

#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/instructions.cuh"
#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/projection.cuh"
#include "holdfast/mhc/shapes.cuh"
#include "holdfast/mhc/sinkhorn.cuh"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace holdfast::mhc::detail {

/// Where post and comb go, and the constants that shape them.
struct MixingResults {
  View<float, kOpen, kStreams> post;            ///< [tokens, 4]
  View<float, kOpen, kStreams, kStreams> comb;  ///< [tokens, 4, 4]
  float post_mult;
  float sinkhorn_eps;
  int sinkhorn_iterations;
};

/// The last collapse of a model: no post follows.
struct NoMixingResults {};

/// Kernel argument. With Rows = kMixes a token has all its coefficients, with kStreams only pre.
template <int Rows>
struct Collapse {
  static_assert(Rows == kMixes || Rows == kStreams);
  Residual<const bf16> residual;  ///< [tokens, 4, hidden]
  PartialSums sums;               ///< of the projection of residual
  const float* scale;             ///< of pre, and then of post and comb
  const float* base;              ///< [rows]
  const bf16* norm_weight;        ///< [hidden]; null: no RMSNorm
  std::conditional_t<Rows == kMixes, MixingResults, NoMixingResults> mixing;
  Activations<bf16> collapsed;     ///< [tokens, hidden], the result
  View<float, kOpen, Rows> mixes;  ///< [tokens, rows]; may be left out
  float rms_eps;
  float pre_eps;
  float norm_eps;
  NormSquares norm_squares;
};

inline constexpr int kCollapseThreads = 256;
/// With post and comb a warp more: Sinkhorn, which nothing here waits for, beside the collapse.
template <int Rows>
inline constexpr int kCollapseBlock = kCollapseThreads + (Rows == kMixes ? kWarp : 0);

/// The sum of `value` over the collapsing threads, in each of them. The tree is fixed: lanes by
/// halves, then warps in order.
__device__ inline float collapse_sum(float value) {
  __shared__ float warps[kCollapseThreads / kWarp];
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFU, value, lanes);
  }
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  holdfast::detail::barrier(1, kCollapseThreads);
  float sum = warps[0];
  for (int warp = 1; warp < kCollapseThreads / kWarp; ++warp) sum += warps[warp];
  return sum;
}

/// What coefficient `mix` is made of, loaded before its mix is known.
template <int Rows>
struct CoefficientConstants {
  float scale;
  float base;

  __device__ static CoefficientConstants of(const Collapse<Rows>& op, int mix) {
    const int kind = mix < kStreams ? 0 : mix < 2 * kStreams ? 1 : 2;  // pre, post, comb
    return {op.scale[kind], op.base[mix]};
  }
};

/// Coefficient `mix` of a token by one thread: pre, post (which is also written), or a logit of
/// comb.
template <int Rows>
[[nodiscard]] __device__ float coefficient(const Collapse<Rows>& op, std::int64_t token, int mix,
                                           float logit) {
  if (mix < kStreams) return sigmoid(logit) + op.pre_eps;
  if constexpr (Rows == kMixes) {
    if (mix < 2 * kStreams) {
      return op.mixing.post.row(token)[mix - kStreams] = op.mixing.post_mult * sigmoid(logit);
    }
  }
  return logit;
}

/// By one thread: comb of a token from its logits.
__device__ inline void write_comb(const Collapse<kMixes>& op, std::int64_t token,
                                  const float* logits) {
  float comb[kStreams * kStreams];
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i) comb[i] = logits[i];
  sinkhorn(comb, op.mixing.sinkhorn_iterations, op.mixing.sinkhorn_eps);
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i) op.mixing.comb.row(token)[i] = comb[i];
}

/// One token by one block of kCollapseBlock<Rows> threads.
template <int Rows>
__device__ void collapse_token(const Collapse<Rows>& op, std::int64_t token) {
  const int hidden = static_cast<int>(op.residual.extent(2));
  const int thread = static_cast<int>(threadIdx.x);
  CoefficientConstants<Rows> constants{};
  if (thread < Rows) constants = CoefficientConstants<Rows>::of(op, thread);
  const float total = total_of<Rows, kCollapseBlock<Rows>>(op.sums, token);
  __shared__ float coefficients[Rows];
  if (thread < kWarp) {
    const float squares = __shfl_sync(0xFFFFFFFFU, total, Rows);
    const float rms = inverse_root(__fadd_rn(
        __fdiv_rn(squares, static_cast<float>(kStreams) * static_cast<float>(hidden)), op.rms_eps));
    if (thread < Rows) {
      const float mix = total * rms;
      if (op.mixes.exists()) op.mixes.row(token)[thread] = mix;
      coefficients[thread] =
          coefficient(op, token, thread, logit(mix, constants.scale, constants.base));
    }
  }
  __syncthreads();
  if constexpr (Rows == kMixes) {
    if (thread == kCollapseThreads) write_comb(op, token, coefficients + 2 * kStreams);
    if (thread >= kCollapseThreads) return;
  }

  float pre[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) pre[i] = coefficients[i];
  const ResidualSource source{op.residual};
  // y of pack `pack`, in f32.
  const auto collapse = [&](int pack, float(&y)[kWidth]) {
    Values streams[kStreams];
    source.load(token, pack * kWidth, streams);
#pragma unroll
    for (int h = 0; h < kWidth; ++h) {
      y[h] = pre[0] * __bfloat162float(streams[0].values[h]);
      for (int i = 1; i < kStreams; ++i) {
        y[h] = fmaf(pre[i], __bfloat162float(streams[i].values[h]), y[h]);
      }
    }
  };
  const auto rounded = [](const float(&y)[kWidth]) {
    Values result;
    for (int h = 0; h < kWidth; ++h) result.values[h] = __float2bfloat16_rn(y[h]);
    return result;
  };
  bf16* out = op.collapsed.row(token);
  const int packs = hidden / kWidth;
  if (op.norm_weight == nullptr) {
    for (int pack = thread; pack < packs; pack += kCollapseThreads) {
      float y[kWidth];
      collapse(pack, y);
      holdfast::detail::store(out + pack * kWidth, rounded(y));
    }
    return;
  }

  // The first few packs stay in registers until the norm is known, all of them up to hidden 8192;
  // of a longer row the rest is collapsed twice.
  constexpr int kKept = 4;
  Values kept[kKept];
  float squares = 0;
  const auto count = [&](const float(&y)[kWidth], const Values& result) {
    for (int h = 0; h < kWidth; ++h) {
      const float value =
          op.norm_squares == NormSquares::rounded ? __bfloat162float(result.values[h]) : y[h];
      squares = fmaf(value, value, squares);
    }
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int pack = thread + i * kCollapseThreads;
    if (pack >= packs) continue;
    float y[kWidth];
    collapse(pack, y);
    kept[i] = rounded(y);
    count(y, kept[i]);
  }
  for (int pack = thread + kKept * kCollapseThreads; pack < packs; pack += kCollapseThreads) {
    float y[kWidth];
    collapse(pack, y);
    count(y, rounded(y));
  }
  const float mean = __fdiv_rn(collapse_sum(squares), static_cast<float>(hidden));
  const float rho = inverse_root(__fadd_rn(mean, op.norm_eps));
  const auto finish = [&](int pack, Values result) {
    const Values weights = holdfast::detail::load<kWidth>(op.norm_weight + pack * kWidth);
    for (int h = 0; h < kWidth; ++h) {
      result.values[h] = __float2bfloat16_rn(__bfloat162float(result.values[h]) * rho *
                                             __bfloat162float(weights.values[h]));
    }
    holdfast::detail::store(out + pack * kWidth, result);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int pack = thread + i * kCollapseThreads;
    if (pack < packs) finish(pack, kept[i]);
  }
  for (int pack = thread + kKept * kCollapseThreads; pack < packs; pack += kCollapseThreads) {
    float y[kWidth];
    collapse(pack, y);
    finish(pack, rounded(y));
  }
}

/// Grid: one block per token, the last token first: of a large batch L2 still holds the end of what
/// the projection read.
template <int Rows, class Key = holdfast::detail::KernelKey>
__global__ void __launch_bounds__(kCollapseBlock<Rows>)
    collapse_kernel(const __grid_constant__ Collapse<Rows> op) {
  collapse_token(op, op.residual.extent(0) - 1 - blockIdx.x);
}

/// Enqueues the collapse of at least one token. `what` names the operation in an error.
template <class File, int Rows, MessageText Text>
void launch_collapse(const Collapse<Rows>& op, cuda::stream_ref stream, const Text& what) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(op.residual.extent(0)));
  config.blockDim = dim3(kCollapseBlock<Rows>);
  config.stream = holdfast::detail::native(stream);
  holdfast::throw_on_error(cudaLaunchKernelEx(&config, collapse_kernel<Rows>, op), what);
}

}  // namespace holdfast::mhc::detail
