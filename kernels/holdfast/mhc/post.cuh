// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// mHC post: the sublayer's output goes back into the residual streams, which are mixed.

#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/operands.cuh"
#include "holdfast/mhc/shapes.cuh"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace holdfast::mhc {

/// The tensors of post, for each token with R = its residual and x = the sublayer's output:
///
///     residual_out[j][h] = bf16(post[j] * x[h] + sum_i comb[i][j] * R[i][h])
///
/// in f32, in the order written, i ascending; rounded once. The equation is that of DeepSeek V4.
/// post and comb are those that pre gave before the sublayer.
struct Post {
  Activations<const bf16> x{};                          ///< [tokens, hidden]
  Residual<const bf16> residual{};                      ///< [tokens, 4, hidden]
  View<const float, kOpen, kStreams> post{};            ///< [tokens, 4]
  View<const float, kOpen, kStreams, kStreams> comb{};  ///< [tokens, 4, 4], [old][new stream]
  Residual<bf16> residual_out{};                        ///< [tokens, 4, hidden]
};

namespace detail {

/// The coefficients with which one token's streams are mixed.
struct Mixing {
  float post[kStreams];
  float comb[kStreams][kStreams];  // [old][new]

  [[nodiscard]] static __host__ __device__ Mixing of(const Post& op, std::int64_t token) {
    constexpr int kFloats = 4;  // of one access
    Mixing mixing;
    const auto post = holdfast::detail::load<kFloats>(op.post.row(token));
    for (int j = 0; j < kStreams; ++j) mixing.post[j] = post.values[j];
    for (int i = 0; i < kStreams; ++i) {
      const auto comb = holdfast::detail::load<kFloats>(op.comb.row(token) + i * kStreams);
      for (int j = 0; j < kStreams; ++j) mixing.comb[i][j] = comb.values[j];
    }
    return mixing;
  }

  /// kWidth elements of the new stream `j`.
  [[nodiscard]] __host__ __device__ Values stream(int j, const Values& x,
                                                  const Values (&old)[kStreams]) const {
    Values result;
    for (int h = 0; h < kWidth; ++h) {
      float sum = post[j] * __bfloat162float(x.values[h]);
      for (int i = 0; i < kStreams; ++i) {
        sum = fmaf(comb[i][j], __bfloat162float(old[i].values[h]), sum);
      }
      result.values[h] = __float2bfloat16_rn(sum);
    }
    return result;
  }
};

/// kWidth elements from `h` of each new stream of a token: computed and written.
__host__ __device__ inline void mix_streams(const Post& op, const Mixing& mixing,
                                            std::int64_t token, std::int64_t h,
                                            Values (&streams)[kStreams]) {
  const std::int64_t hidden = op.x.extent(1);
  const bf16* row = op.residual.row(token) + h;
  Values old[kStreams];
  for (int i = 0; i < kStreams; ++i) old[i] = holdfast::detail::load<kWidth>(row + i * hidden);
  const Values x = holdfast::detail::load<kWidth>(op.x.row(token) + h);
  bf16* out = op.residual_out.row(token) + h;
  for (int j = 0; j < kStreams; ++j) {
    streams[j] = mixing.stream(j, x, old);
    holdfast::detail::store(out + j * hidden, streams[j]);
  }
}

/// An item is kWidth hidden of one token.
struct PostWork {
  using Index = std::int64_t;
  Post op;
  Index rows;     // tokens
  Index columns;  // packs of a stream

  struct Line {
    Mixing mixing;
    Index token;
  };
  [[nodiscard]] __host__ __device__ Line line(Index row) const {
    return {Mixing::of(op, row), row};
  }
  __host__ __device__ void operator()(const Line& line, Index column) const {
    Values streams[kStreams];
    mix_streams(op, line.mixing, line.token, column * kWidth, streams);
  }
};

/// \throws ContractError, see post.
inline void validate(const Post& op) {
  const std::int64_t tokens = op.x.extent(0);
  const std::int64_t hidden = op.x.extent(1);
  Operands operands("post", tokens, hidden);
  operands.add("x", op.x, tokens, hidden);
  operands.add("residual", op.residual, tokens, kStreams, hidden);
  operands.add("post", op.post, tokens, kStreams);
  operands.add("comb", op.comb, tokens, kStreams, kStreams);
  operands.add("residual_out", op.residual_out, tokens, kStreams, hidden);
  operands.expect_disjoint();
}

}  // namespace detail

/// Enqueues Post, whose equation it computes.
///
/// \code
/// holdfast::mhc::post(
///     {.x = {attention_output, tokens, hidden}, .residual = {residual, tokens, hidden},
///      .post = {post, tokens}, .comb = {comb, tokens},
///      .residual_out = {next_residual, tokens, hidden}},
///     stream);
/// \endcode
///
/// - Accuracy: f32, one rounding to bf16. A token's results have the same bits in every batch.
/// - hidden is a multiple of 8, up to 2^20. Addresses and row strides are multiples of 16 bytes.
///   residual_out lies in memory of its own. No tokens: no launch.
/// \stream enqueues only; allowed while capturing: yes
/// \cost one launch; no allocation, no workspace
/// \throws ContractError shape_mismatch, unsupported_shape, null_pointer, misaligned,
///   size_overflow, overlapping; CudaError if the launch is refused. Nothing is enqueued then.
template <class File = holdfast::detail::ThisFile>
void post(const Post& op, cuda::stream_ref stream) {
  detail::validate(op);
  const std::int64_t tokens = op.x.extent(0);
  holdfast::detail::launch(
      detail::PostWork{op, tokens, op.x.extent(1) / detail::kWidth}, stream,
      [tokens] { return "mhc::post of " + std::to_string(tokens) + " tokens: launch"; });
}

}  // namespace holdfast::mhc
