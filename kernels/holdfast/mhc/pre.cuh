// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// mHC pre: from a token's residual streams to the input of the sublayer, and to the coefficients
/// with which post will mix the streams.

#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/instructions.cuh"
#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/operands.cuh"
#include "holdfast/mhc/projection.cuh"
#include "holdfast/mhc/shapes.cuh"
#include "holdfast/mhc/sinkhorn.cuh"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace holdfast::mhc {

/// The tensors and constants of pre, for each token with R = its residual:
///
///     rms      = 1 / sqrt(sum_ih R[i][h]^2 / (4 * hidden) + rms_eps)
///     mixes[o] = rms * sum_ih R[i][h] * fn[o][i][h]
///     pre[i]   = sigmoid(mixes[i] * scale[0] + base[i]) + pre_eps
///     post[i]  = post_mult * sigmoid(mixes[4 + i] * scale[1] + base[4 + i])
///     comb     = sinkhorn(mixes[8...] * scale[2] + base[8...]), [old stream][new stream]
///     y[h]     = pre[0] * R[0][h] + pre[1] * R[1][h] + pre[2] * R[2][h] + pre[3] * R[3][h]
///     layer_input[h] = bf16(y[h]), or with norm_weight, rho = 1 / sqrt(mean y^2 + norm_eps):
///                      bf16(bf16(y[h]) * rho * norm_weight[h])
///
/// The equations are those of DeepSeek V4. Defaults are its constants. The kernels take this struct
/// by value, so a captured graph holds these addresses.
struct Pre {
  Residual<const bf16> residual{};                  ///< [tokens, 4, hidden]
  View<const float, kMixes, kStreams, kOpen> fn{};  ///< [24, 4, hidden], hc_attn_fn or hc_ffn_fn
  View<const float, 3> scale{};                     ///< of pre, post and comb
  View<const float, kMixes> base{};
  View<const bf16, kOpen> norm_weight{};          ///< [hidden]; without it no RMSNorm
  View<float, kOpen, kStreams> post{};            ///< [tokens, 4]
  View<float, kOpen, kStreams, kStreams> comb{};  ///< [tokens, 4, 4]
  Activations<bf16> layer_input{};                ///< [tokens, hidden]
  View<float, kOpen, kMixes> mixes{};             ///< [tokens, 24]; may be left out
  Workspace workspace{};                          ///< of pre_workspace_bytes
  float rms_eps = 1e-6F;
  float pre_eps = 1e-6F;
  float sinkhorn_eps = 1e-6F;
  float norm_eps = 1e-6F;
  float post_mult = 2.0F;
  int sinkhorn_iterations = 20;
  NormSquares norm_squares = NormSquares::unrounded;
};

/// Bytes of workspace that pre needs for a batch of `tokens`.
[[nodiscard]] inline std::size_t pre_workspace_bytes(std::int64_t tokens, std::int64_t hidden) {
  return detail::partial_bytes<kMixes>(tokens, hidden);
}

namespace detail {

inline constexpr int kCollapseThreads = 256;
/// A warp more: Sinkhorn, which nothing here waits for, beside the collapse.
inline constexpr int kPreThreads = kCollapseThreads + kWarp;

/// The streams of a token where they lie.
struct ResidualSource {
  Residual<const bf16> residual;

  __device__ void load(std::int64_t token, int h, Values (&streams)[kStreams]) const {
    const bf16* row = residual.row(token) + h;
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      streams[i] = holdfast::detail::load<kWidth>(row + i * residual.extent(2));
    }
  }
};

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

/// What one thread computes of post, comb and mixes of a token.
__device__ inline void write_coefficients(const Pre& op, const float (&mixes)[kMixes],
                                          std::int64_t token) {
  if (op.mixes.exists()) {
    for (int mix = 0; mix < kMixes; ++mix) op.mixes.row(token)[mix] = mixes[mix];
  }
  for (int i = 0; i < kStreams; ++i) {
    op.post.row(token)[i] = op.post_mult * sigmoid(logit(mixes[kStreams + i], op.scale.data()[1],
                                                         op.base.data()[kStreams + i]));
  }
  float comb[kStreams * kStreams];
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i) {
    comb[i] = logit(mixes[2 * kStreams + i], op.scale.data()[2], op.base.data()[2 * kStreams + i]);
  }
  sinkhorn(comb, op.sinkhorn_iterations, op.sinkhorn_eps);
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i) op.comb.row(token)[i] = comb[i];
}

/// The second half of pre, one token by one block of kPreThreads threads: from the partial sums on.
__device__ inline void collapse_token(const Pre& op, const Spread& spread, std::int64_t token) {
  const int hidden = static_cast<int>(op.residual.extent(2));
  const SumTree tree = SumTree::of(hidden);
  const float* partials = static_cast<const float*>(op.workspace.data) +
                          token * spread.partials(tree) * kPartialFloats<kMixes>;
  __shared__ float totals[kMixes + 1];
  add_partials<kMixes, kPreThreads>(partials, tree, spread, totals);
  const float rms = inverse_root(__fadd_rn(
      __fdiv_rn(totals[kMixes], static_cast<float>(kStreams) * static_cast<float>(hidden)),
      op.rms_eps));

  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kCollapseThreads) {
    if (thread > kCollapseThreads) return;
    float mixes[kMixes];
#pragma unroll
    for (int mix = 0; mix < kMixes; ++mix) mixes[mix] = totals[mix] * rms;
    write_coefficients(op, mixes, token);
    return;
  }

  float pre[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    pre[i] = sigmoid(logit(totals[i] * rms, op.scale.data()[0], op.base.data()[i])) + op.pre_eps;
  }
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
  bf16* out = op.layer_input.row(token);
  const int packs = hidden / kWidth;
  if (!op.norm_weight.exists()) {
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
    const Values weights = holdfast::detail::load<kWidth>(op.norm_weight.data() + pack * kWidth);
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

/// Grid: one block per token.
template <class Architectures>
__global__ void __launch_bounds__(kPreThreads)
    collapse_kernel(const __grid_constant__ Pre op, const __grid_constant__ Spread spread) {
  collapse_token(op, spread, blockIdx.x);
}

/// \throws ContractError, see pre.
inline void check(const Pre& op) {
  const std::int64_t tokens = op.residual.extent(0);
  const std::int64_t hidden = op.residual.extent(2);
  Operands operands("pre", tokens, hidden);
  operands.add("residual", op.residual, tokens, kStreams, hidden);
  operands.add("fn", op.fn, kMixes, kStreams, hidden);
  operands.add("scale", op.scale, 3);
  operands.add("base", op.base, kMixes);
  if (op.norm_weight.exists()) operands.add("norm_weight", op.norm_weight, hidden);
  operands.add("post", op.post, tokens, kStreams);
  operands.add("comb", op.comb, tokens, kStreams, kStreams);
  operands.add("layer_input", op.layer_input, tokens, hidden);
  if (op.mixes.exists()) operands.add("mixes", op.mixes, tokens, kMixes);
  operands.add(op.workspace, pre_workspace_bytes(tokens, hidden), "pre_workspace_bytes");
  operands.expect_disjoint();
  operands.add_constant("rms_eps", op.rms_eps, 0);
  operands.add_constant("pre_eps", op.pre_eps, 0);
  operands.add_constant("sinkhorn_eps", op.sinkhorn_eps, 0);
  operands.add_constant("norm_eps", op.norm_eps, 0);
  operands.add_constant("post_mult", op.post_mult, std::numeric_limits<float>::lowest());
  operands.add_iterations(op.sinkhorn_iterations);
}

}  // namespace detail

/// Enqueues Pre, whose equations it computes.
///
/// \code
/// holdfast::mhc::pre(
///     {.residual = {residual, tokens, hidden}, .fn = {hc_ffn_fn, hidden}, .scale = {hc_ffn_scale},
///      .base = {hc_ffn_base}, .norm_weight = {ffn_norm, hidden}, .post = {post, tokens},
///      .comb = {comb, tokens}, .layer_input = {layer_input, tokens, hidden},
///      .workspace = {memory, holdfast::mhc::pre_workspace_bytes(tokens, hidden)}},
///     stream);
/// \endcode
///
/// - Accuracy: as pre_broadcast's. The projection has f32 accuracy on tensor cores; see
///   projection.cuh. A weight that is not finite makes the mixes of its row NaN.
/// - A token's results have the same bits in every batch, eager and replayed, run to run.
/// - hidden is a multiple of 8, up to 2^20. Addresses and row strides of tensors whose rows are
///   whole multiples of 16 bytes are multiples of 16 bytes, of others of one element. Results lie
///   in memory of their own, and so does the workspace. No tokens: no launch.
/// \stream enqueues only; allowed while capturing: yes
/// \cost two launches; no allocation
/// \throws ContractError shape_mismatch, unsupported_shape, null_pointer, misaligned,
///   not_contiguous, size_overflow, overlapping, invalid_parameter; CudaError if a launch is
///   refused. With a ContractError nothing is enqueued.
template <class Architectures = holdfast::detail::CompiledFor>
void pre(const Pre& op, cuda::stream_ref stream) {
  detail::check(op);
  const std::int64_t tokens = op.residual.extent(0);
  if (tokens == 0) return;
  const auto what = [tokens] {
    return "mhc::pre of " + std::to_string(tokens) + " tokens: launch";
  };
  const auto hidden = static_cast<int>(op.residual.extent(2));
  const detail::SumTree tree = detail::SumTree::of(hidden);
  const detail::Spread spread = detail::spread_of(tokens, tree);
  detail::launch_projection<Architectures, kMixes>(
      detail::Projection<detail::ResidualSource>{{op.residual},
                                                 op.fn.data(),
                                                 static_cast<float*>(op.workspace.data),
                                                 tokens,
                                                 hidden,
                                                 tree,
                                                 spread},
      stream, what);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tokens));
  config.blockDim = dim3(detail::kPreThreads);
  config.stream = holdfast::detail::native(stream);
  holdfast::check(cudaLaunchKernelEx(&config, detail::collapse_kernel<Architectures>, op, spread),
                  what);
}

}  // namespace holdfast::mhc
