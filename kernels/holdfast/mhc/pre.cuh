// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// mHC pre: from a token's residual streams to the input of the sublayer, and to the coefficients
/// with which post will mix the streams.

#include "holdfast/detail/launch.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/collapse.cuh"
#include "holdfast/mhc/operands.cuh"
#include "holdfast/mhc/projection.cuh"
#include "holdfast/mhc/shapes.cuh"

#include <cuda/stream_ref>

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

/// Bytes of workspace that are enough for pre of every batch of up to `tokens` tokens.
[[nodiscard]] inline std::size_t pre_workspace_bytes(std::int64_t tokens, std::int64_t hidden) {
  return detail::partial_bytes<kMixes>(tokens, hidden);
}

namespace detail {

/// The collapse that ends `op`.
[[nodiscard]] inline Collapse<kMixes> collapse_of(const Pre& op, const PartialSums& sums) {
  return {.residual = op.residual,
          .sums = sums,
          .scale = op.scale.data(),
          .base = op.base.data(),
          .norm_weight = op.norm_weight.data(),
          .mixing = {op.post, op.comb, op.post_mult, op.sinkhorn_eps, op.sinkhorn_iterations},
          .collapsed = op.layer_input,
          .mixes = op.mixes,
          .rms_eps = op.rms_eps,
          .pre_eps = op.pre_eps,
          .norm_eps = op.norm_eps,
          .norm_squares = op.norm_squares};
}

/// \throws ContractError, see pre.
inline void validate(const Pre& op) {
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
template <class File = holdfast::detail::ThisFile>
void pre(const Pre& op, cuda::stream_ref stream) {
  detail::validate(op);
  const std::int64_t tokens = op.residual.extent(0);
  if (tokens == 0) return;
  const auto what = [tokens] {
    return "mhc::pre of " + std::to_string(tokens) + " tokens: launch";
  };
  const std::int64_t hidden = op.residual.extent(2);
  const auto sums = detail::PartialSums::in(op.workspace, tokens, hidden);
  detail::launch_projection<File, kMixes>(
      detail::Projection<detail::ResidualSource>{
          {op.residual}, op.fn.data(), sums, tokens, static_cast<int>(hidden)},
      stream, what);
  detail::launch_collapse<File>(detail::collapse_of(op, sums), stream, what);
}

}  // namespace holdfast::mhc
