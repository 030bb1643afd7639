// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// mHC pre of the first layer, where the four residual streams are still one: the embedding.
///
/// Its weight is the sum of `hc_attn_fn` over the streams (StreamSum), kept in a StableBuffer, so
/// that graphs which captured this operation read the new weight after a refit.

#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/operands.cuh"
#include "holdfast/mhc/shapes.cuh"
#include "holdfast/mhc/sinkhorn.cuh"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <string>

namespace holdfast::mhc {

/// The tensors and constants of pre_broadcast, for each token with x = its row:
///
///     rms      = 1 / sqrt(sum_h x[h]^2 / hidden + rms_eps)
///     mixes[o] = rms * sum_h x[h] * fn_broadcast[o][h]
///     pre[i]   = sigmoid(mixes[i] * scale[0] + base[i]) + pre_eps
///     post[i]  = post_mult * sigmoid(mixes[4 + i] * scale[1] + base[4 + i])
///     comb     = sinkhorn(mixes[8...] * scale[2] + base[8...]), [old stream][new stream]
///     y[h]     = pre[0] * x[h] + pre[1] * x[h] + pre[2] * x[h] + pre[3] * x[h]
///     layer_input[h]     = bf16(y[h]), or with norm_weight, rho = 1 / sqrt(mean y^2 + norm_eps):
///                          bf16(bf16(y[h]) * rho * norm_weight[h])
///     residual_out[i][h] = x[h], bit for bit
///
/// The equations are those of DeepSeek V4 with its four streams equal. Defaults are its constants.
/// The kernel takes this struct by value, so a captured graph holds these addresses.
struct PreBroadcast {
  Activations<const bf16> x{};                      ///< [tokens, hidden], the embeddings
  View<const float, kMixes, kOpen> fn_broadcast{};  ///< [24, hidden], hc_attn_fn summed
  View<const float, 3> scale{};                     ///< hc_attn_scale: of pre, post and comb
  View<const float, kMixes> base{};                 ///< hc_attn_base
  View<const bf16, kOpen> norm_weight{};            ///< [hidden], attn_norm; without it no RMSNorm
  Residual<bf16> residual_out{};                    ///< [tokens, 4, hidden]; may be left out
  View<float, kOpen, kStreams> post{};              ///< [tokens, 4]
  View<float, kOpen, kStreams, kStreams> comb{};    ///< [tokens, 4, 4]
  Activations<bf16> layer_input{};                  ///< [tokens, hidden]
  View<float, kOpen, kMixes> mixes{};               ///< [tokens, 24]; may be left out
  float rms_eps = 1e-6F;
  float pre_eps = 1e-6F;
  float sinkhorn_eps = 1e-6F;
  float norm_eps = 1e-6F;
  float post_mult = 2.0F;
  int sinkhorn_iterations = 20;
  NormSquares norm_squares = NormSquares::unrounded;
};

namespace detail {

inline constexpr int kPreBroadcastThreads = 256;

/// The sum of each of `Count` values over the block, in every thread. The tree is fixed: lanes by
/// halves, then warps in order. `scratch` is the block's, and free again after the next barrier.
template <int Count, int Threads>
__device__ void block_sum(float (&values)[Count], float (&scratch)[Threads / 32][Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      values[i] += __shfl_xor_sync(0xFFFFFFFFU, values[i], lanes);
    }
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < Count; ++i) scratch[threadIdx.x / 32][i] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    float sum = scratch[0][i];
    for (int warp = 1; warp < Threads / 32; ++warp) sum += scratch[warp][i];
    values[i] = sum;
  }
}

/// One token by one block of kPreBroadcastThreads threads, with its weight at `fn`.
__device__ inline void pre_broadcast_token(const PreBroadcast& op, const float* fn,
                                           std::int64_t token) {
  const int hidden = static_cast<int>(op.x.extent(1));
  const int packs = hidden / kWidth;
  const bf16* x = op.x.row(token);
  const int thread = static_cast<int>(threadIdx.x);

  // base and then scale, a thread for each: on their way while the sums are made.
  constexpr int kConstants = kMixes + 3;
  float constant = 0;
  if (thread < kMixes) {
    constant = op.base.data()[thread];
  } else if (thread < kConstants) {
    constant = op.scale.data()[thread - kMixes];
  }

  // The last value is the sum of squares.
  float sums[kMixes + 1] = {};
  for (int pack = thread; pack < packs; pack += kPreBroadcastThreads) {
    const Values packed = holdfast::detail::load<kWidth>(x + pack * kWidth);
    float values[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      values[i] = __bfloat162float(packed.values[i]);
      sums[kMixes] = fmaf(values[i], values[i], sums[kMixes]);
    }
#pragma unroll
    for (int mix = 0; mix < kMixes; ++mix) {
      const auto weights = holdfast::detail::load<kWidth>(fn + mix * hidden + pack * kWidth);
      for (int i = 0; i < kWidth; ++i) sums[mix] = fmaf(values[i], weights.values[i], sums[mix]);
    }
  }
  __shared__ float constants[kConstants];
  if (thread < kConstants) constants[thread] = constant;  // seen after the next barrier
  const float* const base = constants;
  const float* const scale = constants + kMixes;
  __shared__ float partial_sums[kPreBroadcastThreads / 32][kMixes + 1];
  block_sum<kMixes + 1, kPreBroadcastThreads>(sums, partial_sums);
  const float rms =
      inverse_root(__fadd_rn(__fdiv_rn(sums[kMixes], static_cast<float>(hidden)), op.rms_eps));
#pragma unroll
  for (int mix = 0; mix < kMixes; ++mix) sums[mix] *= rms;

  float pre[kStreams];
  for (int i = 0; i < kStreams; ++i) {
    pre[i] = sigmoid(logit(sums[i], scale[0], base[i])) + op.pre_eps;
  }
  const auto collapse = [&pre](bf16 value) {
    const float stream = __bfloat162float(value);
    float y = pre[0] * stream;
    for (int i = 1; i < kStreams; ++i) y = fmaf(pre[i], stream, y);
    return y;
  };

  float rho = 1;
  if (op.norm_weight.exists()) {
    float squares[1] = {};
    for (int pack = thread; pack < packs; pack += kPreBroadcastThreads) {
      const Values packed = holdfast::detail::load<kWidth>(x + pack * kWidth);
      for (int i = 0; i < kWidth; ++i) {
        float y = collapse(packed.values[i]);
        if (op.norm_squares == NormSquares::rounded) y = __bfloat162float(__float2bfloat16_rn(y));
        squares[0] = fmaf(y, y, squares[0]);
      }
    }
    __shared__ float partial_squares[kPreBroadcastThreads / 32][1];
    block_sum<1, kPreBroadcastThreads>(squares, partial_squares);
    rho = inverse_root(__fadd_rn(__fdiv_rn(squares[0], static_cast<float>(hidden)), op.norm_eps));
  }
  for (int pack = thread; pack < packs; pack += kPreBroadcastThreads) {
    const Values packed = holdfast::detail::load<kWidth>(x + pack * kWidth);
    Values result;
    for (int i = 0; i < kWidth; ++i) {
      result.values[i] = __float2bfloat16_rn(collapse(packed.values[i]));
    }
    if (op.norm_weight.exists()) {
      const Values weights = holdfast::detail::load<kWidth>(op.norm_weight.data() + pack * kWidth);
      for (int i = 0; i < kWidth; ++i) {
        result.values[i] = __float2bfloat16_rn(__bfloat162float(result.values[i]) * rho *
                                               __bfloat162float(weights.values[i]));
      }
    }
    holdfast::detail::store(op.layer_input.row(token) + pack * kWidth, result);
    if (op.residual_out.exists()) {
      for (int i = 0; i < kStreams; ++i) {
        holdfast::detail::store(op.residual_out.row(token) + (i * packs + pack) * kWidth, packed);
      }
    }
  }

  // Last, since nothing here waits for it.
  if (thread == 0) {
    if (op.mixes.exists()) {
#pragma unroll
      for (int mix = 0; mix < kMixes; ++mix) op.mixes.row(token)[mix] = sums[mix];
    }
    for (int i = 0; i < kStreams; ++i) {
      op.post.row(token)[i] =
          op.post_mult * sigmoid(logit(sums[kStreams + i], scale[1], base[kStreams + i]));
    }
    float comb[kStreams * kStreams];
    for (int i = 0; i < kStreams * kStreams; ++i) {
      comb[i] = logit(sums[2 * kStreams + i], scale[2], base[2 * kStreams + i]);
    }
    sinkhorn(comb, op.sinkhorn_iterations, op.sinkhorn_eps);
    for (int i = 0; i < kStreams * kStreams; ++i) op.comb.row(token)[i] = comb[i];
  }
}

/// Grid: one block per token.
template <class Op, class Key = holdfast::detail::KernelKey>
__global__ void __launch_bounds__(kPreBroadcastThreads)
    pre_broadcast_kernel(const __grid_constant__ Op op) {
  pre_broadcast_token(op, op.fn_broadcast.data(), blockIdx.x);
}

/// \throws ContractError, see pre_broadcast.
inline void validate(const PreBroadcast& op) {
  const std::int64_t tokens = op.x.extent(0);
  const std::int64_t hidden = op.x.extent(1);
  Operands operands("pre_broadcast", tokens, hidden);
  operands.add("x", op.x, tokens, hidden);
  operands.add("fn_broadcast", op.fn_broadcast, kMixes, hidden);
  operands.add("scale", op.scale, 3);
  operands.add("base", op.base, kMixes);
  if (op.norm_weight.exists()) operands.add("norm_weight", op.norm_weight, hidden);
  if (op.residual_out.exists()) {
    operands.add("residual_out", op.residual_out, tokens, kStreams, hidden);
  }
  operands.add("post", op.post, tokens, kStreams);
  operands.add("comb", op.comb, tokens, kStreams, kStreams);
  operands.add("layer_input", op.layer_input, tokens, hidden);
  if (op.mixes.exists()) operands.add("mixes", op.mixes, tokens, kMixes);
  operands.expect_disjoint();
  operands.add_constant("rms_eps", op.rms_eps, 0);
  operands.add_constant("pre_eps", op.pre_eps, 0);
  operands.add_constant("sinkhorn_eps", op.sinkhorn_eps, 0);
  operands.add_constant("norm_eps", op.norm_eps, 0);
  operands.add_constant("post_mult", op.post_mult, std::numeric_limits<float>::lowest());
  operands.add_iterations(op.sinkhorn_iterations);
}

}  // namespace detail

/// Enqueues PreBroadcast, whose equations it computes.
///
/// \code
/// holdfast::mhc::pre_broadcast(
///     {.x = {embeddings, tokens, hidden},
///      .fn_broadcast = {broadcast.data(), hidden},  // of a StableBuffer
///      .scale = {hc_attn_scale}, .base = {hc_attn_base}, .norm_weight = {attn_norm, hidden},
///      .residual_out = {residual, tokens, hidden}, .post = {post, tokens}, .comb = {comb, tokens},
///      .layer_input = {layer_input, tokens, hidden}},
///     stream);
/// \endcode
///
/// - Accuracy: the projection is f32; against the equations in f64, with weights of deviation 0.02
///   and hidden up to 16384, mixes are within 5e-7 (relative, root mean square), post and comb
///   within 5e-6, and layer_input is correctly rounded but for what these explain. Each doubling of
///   hidden beyond that lengthens a thread's chain of additions, and the error by at most as much.
/// - A token's results have the same bits in every batch, eager and replayed, run to run: the order
///   of each sum depends on hidden alone.
/// - hidden is a multiple of 8, up to 2^20. Addresses and row strides of tensors whose rows are
///   whole multiples of 16 bytes are multiples of 16 bytes, of others of one element. Results lie
///   in memory of their own. No tokens: no launch.
/// \stream enqueues only; allowed while capturing: yes
/// \cost one launch; no allocation, no workspace
/// \throws ContractError shape_mismatch, unsupported_shape, null_pointer, misaligned,
///   not_contiguous, size_overflow, overlapping, invalid_parameter; CudaError if the launch is
///   refused. Nothing is enqueued then.
template <class File = holdfast::detail::ThisFile>
void pre_broadcast(const PreBroadcast& op, cuda::stream_ref stream) {
  detail::validate(op);
  const std::int64_t tokens = op.x.extent(0);
  if (tokens == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tokens));
  config.blockDim = dim3(detail::kPreBroadcastThreads);
  config.stream = holdfast::detail::native(stream);
  holdfast::throw_on_error(
      cudaLaunchKernelEx(&config, detail::pre_broadcast_kernel<PreBroadcast>, op),
      [tokens] { return "mhc::pre_broadcast of " + std::to_string(tokens) + " tokens: launch"; });
}

}  // namespace holdfast::mhc
