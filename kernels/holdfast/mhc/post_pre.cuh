// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// mHC post of one sublayer and pre of the next, in one pass over the residual streams.

#include "holdfast/detail/launch.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/collapse.cuh"
#include "holdfast/mhc/operands.cuh"
#include "holdfast/mhc/post.cuh"
#include "holdfast/mhc/pre.cuh"
#include "holdfast/mhc/projection.cuh"
#include "holdfast/mhc/shapes.cuh"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace holdfast::mhc {

/// The tensors and constants of post_pre: the equations of Post give residual_out from x, residual,
/// post and comb, and those of Pre give the rest from residual_out:
///
///     residual_out[j][h] = bf16(post[j] * x[h] + sum_i comb[i][j] * residual[i][h])
///     post_out, comb_out, layer_input, mixes = the post, comb, layer_input, mixes of
///                                              pre(residual_out, fn, scale, base, norm_weight)
///
/// post and comb are what the pre before the sublayer gave; post_out and comb_out are for the post
/// after the next one. No tensor shares memory with another that is written, so both residuals and
/// both pairs of coefficients have memory of their own. The kernels take this struct by value, so a
/// captured graph holds these addresses.
struct PostPre {
  Activations<const bf16> x{};                          ///< [tokens, hidden], of the sublayer
  Residual<const bf16> residual{};                      ///< [tokens, 4, hidden]
  View<const float, kOpen, kStreams> post{};            ///< [tokens, 4]
  View<const float, kOpen, kStreams, kStreams> comb{};  ///< [tokens, 4, 4], [old][new stream]
  View<const float, kMixes, kStreams, kOpen> fn{};      ///< [24, 4, hidden], of the next sublayer
  View<const float, 3> scale{};                         ///< of pre, post and comb
  View<const float, kMixes> base{};
  View<const bf16, kOpen> norm_weight{};              ///< [hidden]; without it no RMSNorm
  Residual<bf16> residual_out{};                      ///< [tokens, 4, hidden]
  View<float, kOpen, kStreams> post_out{};            ///< [tokens, 4]
  View<float, kOpen, kStreams, kStreams> comb_out{};  ///< [tokens, 4, 4]
  Activations<bf16> layer_input{};                    ///< [tokens, hidden]
  View<float, kOpen, kMixes> mixes{};                 ///< [tokens, 24]; may be left out
  Workspace workspace{};                              ///< of post_pre_workspace_bytes
  float rms_eps = 1e-6F;
  float pre_eps = 1e-6F;
  float sinkhorn_eps = 1e-6F;
  float norm_eps = 1e-6F;
  float post_mult = 2.0F;
  int sinkhorn_iterations = 20;
  NormSquares norm_squares = NormSquares::unrounded;
};

/// Bytes of workspace that are enough for post_pre of every batch of up to `tokens` tokens.
[[nodiscard]] inline std::size_t post_pre_workspace_bytes(std::int64_t tokens,
                                                          std::int64_t hidden) {
  return detail::partial_bytes<kMixes>(tokens, hidden);
}

namespace detail {

/// The streams of a token as post mixes them, rounded to bf16. Whoever asks for them writes them
/// too, so each is to be asked for once.
struct MixSource {
  Post op;

  __device__ void load(std::int64_t token, int h, Values (&streams)[kStreams]) const {
    mix_streams(op, Mixing::of(op, token), token, h, streams);
  }
};

[[nodiscard]] inline MixSource source_of(const PostPre& op) {
  return {{.x = op.x,
           .residual = op.residual,
           .post = op.post,
           .comb = op.comb,
           .residual_out = op.residual_out}};
}

/// The collapse that ends `op`: that of a pre of the new streams.
[[nodiscard]] inline Collapse<kMixes> collapse_of(const PostPre& op, const PartialSums& sums) {
  const Pre pre{.residual = op.residual_out,
                .fn = op.fn,
                .scale = op.scale,
                .base = op.base,
                .norm_weight = op.norm_weight,
                .post = op.post_out,
                .comb = op.comb_out,
                .layer_input = op.layer_input,
                .mixes = op.mixes,
                .workspace = op.workspace,
                .rms_eps = op.rms_eps,
                .pre_eps = op.pre_eps,
                .sinkhorn_eps = op.sinkhorn_eps,
                .norm_eps = op.norm_eps,
                .post_mult = op.post_mult,
                .sinkhorn_iterations = op.sinkhorn_iterations,
                .norm_squares = op.norm_squares};
  return collapse_of(pre, sums);
}

/// \throws ContractError, see post_pre.
inline void validate(const PostPre& op) {
  const std::int64_t tokens = op.x.extent(0);
  const std::int64_t hidden = op.x.extent(1);
  Operands operands("post_pre", tokens, hidden);
  operands.add("x", op.x, tokens, hidden);
  operands.add("residual", op.residual, tokens, kStreams, hidden);
  operands.add("post", op.post, tokens, kStreams);
  operands.add("comb", op.comb, tokens, kStreams, kStreams);
  operands.add("fn", op.fn, kMixes, kStreams, hidden);
  operands.add("scale", op.scale, 3);
  operands.add("base", op.base, kMixes);
  if (op.norm_weight.exists()) operands.add("norm_weight", op.norm_weight, hidden);
  operands.add("residual_out", op.residual_out, tokens, kStreams, hidden);
  operands.add("post_out", op.post_out, tokens, kStreams);
  operands.add("comb_out", op.comb_out, tokens, kStreams, kStreams);
  operands.add("layer_input", op.layer_input, tokens, hidden);
  if (op.mixes.exists()) operands.add("mixes", op.mixes, tokens, kMixes);
  operands.add(op.workspace, post_pre_workspace_bytes(tokens, hidden), "post_pre_workspace_bytes");
  operands.expect_disjoint();
  operands.add_constant("rms_eps", op.rms_eps, 0);
  operands.add_constant("pre_eps", op.pre_eps, 0);
  operands.add_constant("sinkhorn_eps", op.sinkhorn_eps, 0);
  operands.add_constant("norm_eps", op.norm_eps, 0);
  operands.add_constant("post_mult", op.post_mult, std::numeric_limits<float>::lowest());
  operands.add_iterations(op.sinkhorn_iterations);
}

}  // namespace detail

/// Enqueues PostPre, whose equations it computes.
///
/// \code
/// holdfast::mhc::post_pre(
///     {.x = {attention_output, tokens, hidden}, .residual = {residual, tokens, hidden},
///      .post = {post, tokens}, .comb = {comb, tokens}, .fn = {hc_ffn_fn, hidden},
///      .scale = {hc_ffn_scale}, .base = {hc_ffn_base}, .norm_weight = {ffn_norm, hidden},
///      .residual_out = {next_residual, tokens, hidden}, .post_out = {next_post, tokens},
///      .comb_out = {next_comb, tokens}, .layer_input = {layer_input, tokens, hidden},
///      .workspace = {memory, holdfast::mhc::post_pre_workspace_bytes(tokens, hidden)}},
///     stream);
/// \endcode
///
/// - The results are those of post and then pre, bit for bit: the mixes are of residual_out as it
///   is written, rounded to bf16. So accuracy is that of the two.
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
void post_pre(const PostPre& op, cuda::stream_ref stream) {
  detail::validate(op);
  const std::int64_t tokens = op.x.extent(0);
  if (tokens == 0) return;
  const auto what = [tokens] {
    return "mhc::post_pre of " + std::to_string(tokens) + " tokens: launch";
  };
  const std::int64_t hidden = op.x.extent(1);
  const auto sums = detail::PartialSums::in(op.workspace, tokens, hidden);
  detail::launch_projection<File, kMixes>(
      detail::Projection<detail::MixSource>{detail::source_of(op), op.fn.data(), sums, tokens,
                                            static_cast<int>(hidden)},
      stream, what);
  detail::launch_collapse<File>(detail::collapse_of(op, sums), stream, what);
}

}  // namespace holdfast::mhc
