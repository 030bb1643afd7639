// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// mHC head: after the last layer a token's residual streams become one again.

#include "holdfast/detail/launch.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/collapse.cuh"
#include "holdfast/mhc/operands.cuh"
#include "holdfast/mhc/projection.cuh"
#include "holdfast/mhc/shapes.cuh"

#include <cuda/stream_ref>

#include <cstddef>
#include <cstdint>
#include <string>

namespace holdfast::mhc {

/// The tensors and constants of head, for each token with R = its residual:
///
///     rms      = 1 / sqrt(sum_ih R[i][h]^2 / (4 * hidden) + rms_eps)
///     mixes[o] = rms * sum_ih R[i][h] * fn[o][i][h]
///     pre[i]   = sigmoid(mixes[i] * scale[0] + base[i]) + pre_eps
///     y[h]     = pre[0] * R[0][h] + pre[1] * R[1][h] + pre[2] * R[2][h] + pre[3] * R[3][h]
///     hidden_states[h] = bf16(y[h]), or with norm_weight, rho = 1 / sqrt(mean y^2 + norm_eps):
///                        bf16(bf16(y[h]) * rho * norm_weight[h])
///
/// This is pre without post and comb, with weights of its own. The equations are those of DeepSeek
/// V4, defaults its constants. The kernels take this struct by value, so a captured graph holds
/// these addresses.
struct Head {
  Residual<const bf16> residual{};                    ///< [tokens, 4, hidden]
  View<const float, kStreams, kStreams, kOpen> fn{};  ///< [4, 4, hidden], hc_head_fn
  View<const float, 1> scale{};                       ///< hc_head_scale
  View<const float, kStreams> base{};                 ///< hc_head_base
  View<const bf16, kOpen> norm_weight{};              ///< [hidden]; without it no RMSNorm
  Activations<bf16> hidden_states{};                  ///< [tokens, hidden]
  View<float, kOpen, kStreams> mixes{};               ///< [tokens, 4]; may be left out
  Workspace workspace{};                              ///< of head_workspace_bytes
  float rms_eps = 1e-6F;
  float pre_eps = 1e-6F;
  float norm_eps = 1e-6F;
  NormSquares norm_squares = NormSquares::unrounded;
};

/// Bytes of workspace that are enough for head of every batch of up to `tokens` tokens.
[[nodiscard]] inline std::size_t head_workspace_bytes(std::int64_t tokens, std::int64_t hidden) {
  return detail::partial_bytes<kStreams>(tokens, hidden);
}

namespace detail {

/// The collapse that ends `op`.
[[nodiscard]] inline Collapse<kStreams> collapse_of(const Head& op, const PartialSums& sums) {
  return {.residual = op.residual,
          .sums = sums,
          .scale = op.scale.data(),
          .base = op.base.data(),
          .norm_weight = op.norm_weight.data(),
          .mixing = {},
          .collapsed = op.hidden_states,
          .mixes = op.mixes,
          .rms_eps = op.rms_eps,
          .pre_eps = op.pre_eps,
          .norm_eps = op.norm_eps,
          .norm_squares = op.norm_squares};
}

/// \throws ContractError, see head.
inline void validate(const Head& op) {
  const std::int64_t tokens = op.residual.extent(0);
  const std::int64_t hidden = op.residual.extent(2);
  Operands operands("head", tokens, hidden);
  operands.add("residual", op.residual, tokens, kStreams, hidden);
  operands.add("fn", op.fn, kStreams, kStreams, hidden);
  operands.add("scale", op.scale, 1);
  operands.add("base", op.base, kStreams);
  if (op.norm_weight.exists()) operands.add("norm_weight", op.norm_weight, hidden);
  operands.add("hidden_states", op.hidden_states, tokens, hidden);
  if (op.mixes.exists()) operands.add("mixes", op.mixes, tokens, kStreams);
  operands.add(op.workspace, head_workspace_bytes(tokens, hidden), "head_workspace_bytes");
  operands.expect_disjoint();
  operands.add_constant("rms_eps", op.rms_eps, 0);
  operands.add_constant("pre_eps", op.pre_eps, 0);
  operands.add_constant("norm_eps", op.norm_eps, 0);
}

}  // namespace detail

/// Enqueues Head, whose equations it computes.
///
/// \code
/// holdfast::mhc::head(
///     {.residual = {residual, tokens, hidden}, .fn = {hc_head_fn, hidden},
///      .scale = {hc_head_scale}, .base = {hc_head_base},
///      .hidden_states = {hidden_states, tokens, hidden},
///      .workspace = {memory, holdfast::mhc::head_workspace_bytes(tokens, hidden)}},
///     stream);
/// \endcode
///
/// - Accuracy: as pre's. A weight that is not finite makes the mixes of its row NaN.
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
void head(const Head& op, cuda::stream_ref stream) {
  detail::validate(op);
  const std::int64_t tokens = op.residual.extent(0);
  if (tokens == 0) return;
  const auto what = [tokens] {
    return "mhc::head of " + std::to_string(tokens) + " tokens: launch";
  };
  const std::int64_t hidden = op.residual.extent(2);
  const auto sums = detail::PartialSums::in(op.workspace, tokens, hidden);
  detail::launch_projection<File, kStreams>(
      detail::Projection<detail::ResidualSource>{
          {op.residual}, op.fn.data(), sums, tokens, static_cast<int>(hidden)},
      stream, what);
  detail::launch_collapse<File>(detail::collapse_of(op, sums), stream, what);
}

}  // namespace holdfast::mhc
