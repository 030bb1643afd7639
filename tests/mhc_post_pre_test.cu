// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// mhc::post_pre against the f64 oracle, and bit for bit against post and then pre; eager and
/// replayed. In the simulation the kernels run on the host, thread for thread.

#include "holdfast/mhc/post.cuh"
#include "holdfast/mhc/post_pre.cuh"
#include "holdfast/mhc/pre.cuh"

#include "support/mhc_batches.hpp"
#include "support/mhc_oracle.hpp"
#include "support/mhc_rows.hpp"
#include "support/refusal.hpp"
#include "support/runtime.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using holdfast::Rule;
using holdfast::mhc::bf16;
using holdfast::mhc::NormSquares;
using holdfast::mhc::PostPre;
using test::DeviceArray;
using test::mhc::Coefficients;
using test::mhc::Constants;
using test::mhc::from_bits;
using test::mhc::kMixes;
using test::mhc::kStreams;
using test::mhc::Rows;
using test::mhc::to_bits;
using test::mhc::token_of;
using test::mhc::Weights;

struct Results {
  std::vector<std::uint16_t> residual_out;
  std::vector<float> post;
  std::vector<float> comb;
  std::vector<std::uint16_t> layer_input;
  std::vector<float> mixes;

  friend bool operator==(const Results&, const Results&) = default;
};

/// What a batch holds on the host.
struct Batch {
  std::vector<float> x;         ///< [tokens, hidden]
  std::vector<float> residual;  ///< [tokens, 4, hidden]
  Coefficients before;
};

/// One op on the device: weights, a batch and poisoned results, each row `gap` elements longer than
/// it need be.
class Problem {
 public:
  Problem(const Weights& w, Batch batch, std::int64_t hidden, std::int64_t gap = 0)
      : tokens_(static_cast<std::int64_t>(batch.x.size()) / hidden),
        hidden_(hidden),
        weights_(w),
        batch_(std::move(batch)),
        x_(to_bits(batch_.x), hidden, gap),
        residual_(to_bits(batch_.residual), kStreams * hidden, gap),
        post_(batch_.before.post, kStreams, gap),
        comb_(batch_.before.comb, kStreams * kStreams, gap),
        fn_(w.fn),
        scale_(w.scale),
        base_(w.base),
        norm_(to_bits(w.norm_weight), hidden, 0),
        residual_out_(tokens_, kStreams * hidden, gap),
        post_out_(tokens_, kStreams, gap),
        comb_out_(tokens_, kStreams * kStreams, gap),
        layer_input_(tokens_, hidden, gap),
        mixes_(tokens_, kMixes, gap),
        workspace_(holdfast::mhc::post_pre_workspace_bytes(tokens_, hidden) / sizeof(float)) {
    poison();
  }

  [[nodiscard]] PostPre op() const {
    PostPre op{
        .x = {x_.data(), tokens_, hidden_},
        .residual = {residual_.data(), tokens_, hidden_},
        .post = {post_.data(), tokens_},
        .comb = {comb_.data(), tokens_},
        .fn = {fn_.data(), hidden_},
        .scale = {scale_.data()},
        .base = {base_.data()},
        .residual_out = {residual_out_.data(), tokens_, hidden_},
        .post_out = {post_out_.data(), tokens_},
        .comb_out = {comb_out_.data(), tokens_},
        .layer_input = {layer_input_.data(), tokens_, hidden_},
        .mixes = {mixes_.data(), tokens_},
        .workspace = {workspace_.data(), workspace_.bytes()},
    };
    if (!weights_.norm_weight.empty()) op.norm_weight = {norm_.data(), hidden_};
    op.x = op.x.with_row_stride(x_.stride());
    op.residual = op.residual.with_row_stride(residual_.stride());
    op.post = op.post.with_row_stride(post_.stride());
    op.comb = op.comb.with_row_stride(comb_.stride());
    op.residual_out = op.residual_out.with_row_stride(residual_out_.stride());
    op.post_out = op.post_out.with_row_stride(post_out_.stride());
    op.comb_out = op.comb_out.with_row_stride(comb_out_.stride());
    op.layer_input = op.layer_input.with_row_stride(layer_input_.stride());
    op.mixes = op.mixes.with_row_stride(mixes_.stride());
    return op;
  }
  void poison() const {
    residual_out_.poison();
    post_out_.poison();
    comb_out_.poison();
    layer_input_.poison();
    mixes_.poison();
    workspace_.poison();
  }
  [[nodiscard]] Results results() const {
    return {residual_out_.results(), post_out_.results(), comb_out_.results(),
            layer_input_.results(), mixes_.results()};
  }

  /// Every output of every `step`-th token against the oracle.
  void expect_right(const PostPre& op, const Results& got, std::int64_t step = 1) const {
    const Constants constants{.rms_eps = op.rms_eps,
                              .pre_eps = op.pre_eps,
                              .sinkhorn_eps = op.sinkhorn_eps,
                              .norm_eps = op.norm_eps,
                              .post_mult = op.post_mult,
                              .iterations = op.sinkhorn_iterations,
                              .rounded_squares = op.norm_squares == NormSquares::rounded};
    test::mhc::RelativeRms rms;
    const auto hidden = static_cast<std::size_t>(hidden_);
    for (std::int64_t t = 0; t < tokens_ && !::testing::Test::HasFailure(); t += step) {
      const auto mixed = test::mhc::post(
          token_of(batch_.x, t, hidden), token_of(batch_.residual, t, kStreams * hidden),
          token_of(batch_.before.post, t, kStreams), token_of(batch_.before.comb, t, 16));
      const std::vector<float> streams =
          from_bits(token_of(got.residual_out, t, kStreams * hidden));
      const std::vector<float> layer_input = from_bits(token_of(got.layer_input, t, hidden));
      EXPECT_EQ(test::mhc::difference(
                    mixed, weights_, constants, streams,
                    {token_of(got.post, t, kStreams), token_of(got.comb, t, 16), layer_input}),
                "")
          << "token " << t;
      rms.add(test::mhc::pre(streams, weights_, constants).mixes, token_of(got.mixes, t, kMixes));
    }
    EXPECT_LE(rms.value(), test::mhc::kMixesBound);
  }

 private:
  std::int64_t tokens_;
  std::int64_t hidden_;
  Weights weights_;
  Batch batch_;
  Rows<std::uint16_t> x_;
  Rows<std::uint16_t> residual_;
  Rows<float> post_;
  Rows<float> comb_;
  DeviceArray<float> fn_;
  DeviceArray<float> scale_;
  DeviceArray<float> base_;
  Rows<std::uint16_t> norm_;
  Rows<std::uint16_t> residual_out_;
  Rows<float> post_out_;
  Rows<float> comb_out_;
  Rows<std::uint16_t> layer_input_;
  Rows<float> mixes_;
  DeviceArray<float> workspace_;
};

Batch make_batch(std::int64_t tokens, std::int64_t hidden, std::uint64_t seed) {
  const auto elements = static_cast<std::size_t>(tokens * hidden);
  return {test::mhc::make_activations(elements, seed),
          test::mhc::make_activations(kStreams * elements, seed + 1),
          test::mhc::make_coefficients(tokens, seed + 2)};
}

Problem problem(std::int64_t tokens, std::int64_t hidden, std::int64_t gap = 0, bool norm = true,
                std::uint64_t seed = 1, double deviation = 0.02) {
  const auto width = static_cast<std::size_t>(hidden);
  Weights w = test::mhc::make_weights(kStreams * width, width, seed, deviation);
  if (!norm) w.norm_weight.clear();
  return {w, make_batch(tokens, hidden, seed + 1), hidden, gap};
}

/// The same by the two ops that it stands for.
void post_then_pre(const PostPre& op, cudaStream_t stream) {
  holdfast::mhc::post({.x = op.x,
                       .residual = op.residual,
                       .post = op.post,
                       .comb = op.comb,
                       .residual_out = op.residual_out},
                      stream);
  holdfast::mhc::pre({.residual = op.residual_out,
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
                      .norm_squares = op.norm_squares},
                     stream);
}

using MhcPostPre = test::Cuda;

// --- Numbers

TEST_F(MhcPostPre, EveryHiddenAndModeAgainstTheOracle) {
  for (const std::int64_t hidden :
       {8, 24, 64, 128, 136, 1280, 1536, 2560, 4096, 5120, 7168, 8192, 8200}) {
    for (const int variant : {0, 1, 2}) {  // no norm, both modes
      if (test::simulated() && hidden > 2000 && variant == 1) continue;
      const Problem in = problem(7, hidden, 0, variant > 0, static_cast<std::uint64_t>(hidden));
      PostPre op = in.op();
      op.norm_squares = variant == 2 ? NormSquares::rounded : NormSquares::unrounded;
      for (const test::Mode mode : test::kModes) {
        SCOPED_TRACE("hidden " + std::to_string(hidden) + ", variant " + std::to_string(variant) +
                     ", " + to_string(mode));
        in.poison();
        test::run(mode, stream, [&] { post_pre(op, stream); });
        in.expect_right(op, in.results());
      }
    }
  }
}

TEST_F(MhcPostPre, IsPostThenPreBitForBit) {
  for (const std::int64_t hidden : {8, 136, 552, 4096, 7168}) {
    for (const std::int64_t tokens : {1, 5, 64, 300}) {
      if (test::simulated() && hidden > 552 && tokens > 5) continue;
      const Problem in = problem(tokens, hidden, 8, true, 20);
      PostPre op = in.op();
      op.pre_eps = 1e-2F;  // each constant reaches its place
      op.rms_eps = 1e-3F;
      op.sinkhorn_eps = 1e-4F;
      op.norm_eps = 1e-5F;
      op.post_mult = 1.5F;
      op.sinkhorn_iterations = 3;
      op.norm_squares = NormSquares::rounded;
      post_then_pre(op, stream);
      const Results want = in.results();
      for (const test::Mode mode : test::kModes) {
        in.poison();
        test::run(mode, stream, [&] { post_pre(op, stream); });
        EXPECT_TRUE(in.results() == want)
            << "hidden " << hidden << ", " << tokens << " tokens, " << to_string(mode);
      }
    }
  }
}

TEST_F(MhcPostPre, ConstantsAreTheCallers) {
  const Problem in = problem(5, 256);
  PostPre op = in.op();
  op.rms_eps = 0.5F;
  op.pre_eps = 1e-2F;
  op.sinkhorn_eps = 1e-3F;
  op.norm_eps = 0.25F;
  op.post_mult = 1.0F;
  for (const int iterations : {1, 2, 3, 20}) {
    op.sinkhorn_iterations = iterations;
    in.poison();
    post_pre(op, stream);
    in.expect_right(op, in.results());
  }
}

TEST_F(MhcPostPre, ZeroRowsAndTinyEps) {
  const std::int64_t hidden = 512;
  Batch batch = make_batch(3, hidden, 11);
  std::fill_n(batch.x.begin() + 512, 512, 0.0F);
  std::fill_n(batch.residual.begin() + 4 * 512, 4 * 512, 0.0F);
  const Problem in(test::mhc::make_weights(4 * 512, 512, 12), batch, hidden);
  PostPre op = in.op();
  op.rms_eps = 1e-20F;
  op.norm_eps = 1e-20F;
  post_pre(op, stream);
  const Results got = in.results();
  in.expect_right(op, got);
  for (const float mix : token_of(got.mixes, 1, kMixes)) EXPECT_EQ(mix, 0.0F);
  for (const std::uint16_t bits : token_of(got.layer_input, 1, 512)) EXPECT_EQ(bits & 0x7FFFU, 0U);
}

TEST_F(MhcPostPre, StrongLogits) {
  // The promise for coefficients is relative to logits of order 1; what holds for any is compared.
  const Problem in = problem(16, 1024, 0, true, 13, 3.0);
  post_pre(in.op(), stream);
  const Results got = in.results();
  test::mhc::RelativeRms rms;
  for (std::int64_t t = 0; t < 16; ++t) {
    const std::vector<float> streams = from_bits(token_of(got.residual_out, t, 4 * 1024));
    rms.add(test::mhc::pre(streams, test::mhc::make_weights(4 * 1024, 1024, 13, 3.0), {}).mixes,
            token_of(got.mixes, t, kMixes));
    const auto comb = token_of(got.comb, t, 16);
    for (std::size_t j = 0; j < kStreams; ++j) {
      double column = 0;
      for (std::size_t i = 0; i < kStreams; ++i) {
        EXPECT_GE(comb[kStreams * i + j], 0);
        column += comb[kStreams * i + j];
      }
      EXPECT_NEAR(column, 1, 5e-6);  // 2e-6 of the iteration, and f32
    }
    for (const float post : token_of(got.post, t, kStreams)) {
      EXPECT_TRUE(post >= 0 && post <= 2) << post;
    }
  }
  EXPECT_LE(rms.value(), test::mhc::kMixesBound);
}

// --- Bits

TEST_F(MhcPostPre, ATokensBitsDoNotDependOnTheBatch) {
  // In the workspace of the largest batch.
  const std::int64_t hidden = 552;
  const std::vector<std::int64_t> batches = test::mhc::batches();
  const std::int64_t most = batches.back();
  const Problem whole = problem(most, hidden, 0, true, 14);
  post_pre(whole.op(), stream);
  const Results want = whole.results();
  whole.expect_right(whole.op(), want, most / 16);
  for (const std::int64_t tokens : batches) {
    for (const std::int64_t first : {std::int64_t{0}, most - tokens}) {
      const auto part = [&](const auto& view) { return test::mhc::part(view, first, tokens); };
      PostPre op = whole.op();
      op.x = part(op.x);
      op.residual = part(op.residual);
      op.post = part(op.post);
      op.comb = part(op.comb);
      op.residual_out = part(op.residual_out);
      op.post_out = part(op.post_out);
      op.comb_out = part(op.comb_out);
      op.layer_input = part(op.layer_input);
      op.mixes = part(op.mixes);
      for (const test::Mode mode : test::kModes) {
        if (test::simulated() && mode == test::Mode::captured && tokens > 17) continue;
        SCOPED_TRACE(std::to_string(tokens) + " tokens from " + std::to_string(first) + ", " +
                     to_string(mode));
        whole.poison();
        test::run(mode, stream, [&] { post_pre(op, stream); });
        EXPECT_TRUE(test::mhc::same_bits(op.residual_out, want.residual_out, first));
        EXPECT_TRUE(test::mhc::same_bits(op.post_out, want.post, first));
        EXPECT_TRUE(test::mhc::same_bits(op.comb_out, want.comb, first));
        EXPECT_TRUE(test::mhc::same_bits(op.layer_input, want.layer_input, first));
        EXPECT_TRUE(test::mhc::same_bits(op.mixes, want.mixes, first));
      }
    }
  }
}

TEST_F(MhcPostPre, EverySpreadGivesTheSameBits) {
  const Problem in = problem(140, 1064);
  const PostPre op = in.op();
  post_pre(op, stream);
  const Results want = in.results();
  in.poison();
  test::mhc::run_every_spread<kMixes>(op, holdfast::mhc::detail::source_of(op), 140, stream,
                                      [&](const std::string& what) {
                                        EXPECT_TRUE(in.results() == want) << what;
                                        in.poison();
                                      });
}

TEST_F(MhcPostPre, RunToRunTheBitsAreTheSame) {
  const Problem in = problem(test::simulated() ? 5 : 300, 640);
  const test::Graph graph(stream, [&] { post_pre(in.op(), stream); });
  post_pre(in.op(), stream);
  const Results first = in.results();
  for (int run = 0; run < (test::simulated() ? 2 : 50); ++run) {
    in.poison();
    graph.launch(stream);
    EXPECT_TRUE(in.results() == first);
  }
}

// --- Tensors

TEST_F(MhcPostPre, OptionalTensorsChangeNoOtherBits) {
  const Problem in = problem(9, 512);
  post_pre(in.op(), stream);
  const Results whole = in.results();
  PostPre op = in.op();
  op.mixes = {};
  in.poison();
  post_pre(op, stream);
  const Results got = in.results();
  EXPECT_EQ(got.residual_out, whole.residual_out);
  EXPECT_EQ(got.post, whole.post);
  EXPECT_EQ(got.comb, whole.comb);
  EXPECT_EQ(got.layer_input, whole.layer_input);
  for (const float mix : got.mixes) EXPECT_EQ(test::bits<std::uint32_t>(mix), 0xCBCBCBCBU);
}

TEST_F(MhcPostPre, RowsMayLieApart) {
  const Problem dense = problem(6, 264);
  post_pre(dense.op(), stream);
  for (const std::int64_t gap : {8, 24}) {
    const Problem apart = problem(6, 264, gap);
    for (const test::Mode mode : test::kModes) {
      apart.poison();
      test::run(mode, stream, [&] { post_pre(apart.op(), stream); });
      EXPECT_TRUE(apart.results() == dense.results()) << gap;
    }
  }
}

TEST_F(MhcPostPre, OffsetsBeyondTheReachOfInt32) {
  if (test::simulated()) GTEST_SKIP() << "needs 4 GiB of device memory";
  for (const std::int64_t tokens : {2, 257}) {
    const Problem in = problem(tokens, 520);
    const PostPre near = in.op();
    test::mhc::FarRows rows(tokens);
    PostPre op = near;
    op.x = rows.far(near.x);
    op.residual = rows.far(near.residual);
    op.residual_out = rows.far(near.residual_out);
    op.layer_input = rows.far(near.layer_input);
    post_pre(op, stream);
    test::mhc::FarRows::copy(op.residual_out, near.residual_out);
    test::mhc::FarRows::copy(op.layer_input, near.layer_input);
    in.expect_right(op, in.results());
  }
}

TEST_F(MhcPostPre, NoTokensLaunchNothing) {
  const Problem in = problem(0, 64);
  const test::Graph graph(stream, [&] { post_pre(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 0U);
  EXPECT_EQ(holdfast::mhc::post_pre_workspace_bytes(0, 64), 0U);
}

TEST_F(MhcPostPre, TwoLaunches) {
  const Problem in = problem(3, 64);
  const test::Graph graph(stream, [&] { post_pre(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 2U);
}

TEST_F(MhcPostPre, AWorkspaceServesEverySmallerBatch) {
  test::mhc::expect_enough_for_smaller_batches<kMixes>(&holdfast::mhc::post_pre_workspace_bytes);
}

// --- Refusals

TEST_F(MhcPostPre, RefusesWhatIsNotTheOp) {
  const std::int64_t hidden = 64;
  const Problem in = problem(4, hidden);
  const PostPre raw = in.op();
  in.poison();
  const Results untouched = in.results();
  const auto refused = [&](Rule rule, const std::string& text,
                           const std::function<void(PostPre&)>& spoil) {
    SCOPED_TRACE(text);
    PostPre op = raw;
    spoil(op);
    test::expect_refused(rule, "mhc::post_pre of", text, [&] { post_pre(op, stream); });
    test::ok(cudaStreamSynchronize(stream));
    EXPECT_TRUE(in.results() == untouched);
  };
  for (const std::int64_t wrong : {0, 4, 7, 12, 1 << 21}) {
    refused(Rule::unsupported_shape, "hidden must be a multiple of 8", [&](PostPre& op) {
      op.x = {raw.x.data(), 4, wrong};
    });
  }
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    refused(Rule::unsupported_shape, "tokens", [&](PostPre& op) {
      op.x = {raw.x.data(), wrong, hidden};
    });
  }
  // Extents, and tensors that are not there
  refused(Rule::shape_mismatch, "residual is [4, 4, 72]; expected [4, 4, 64]", [&](PostPre& op) {
    op.residual = {raw.residual.data(), 4, 72};
  });
  refused(Rule::shape_mismatch, ": post is", [](PostPre& op) { op.post = {}; });
  refused(Rule::shape_mismatch, ": comb is", [&](PostPre& op) { op.comb = {raw.comb.data(), 3}; });
  refused(Rule::shape_mismatch, "fn is [24, 4, 72]; expected [24, 4, 64]", [&](PostPre& op) {
    op.fn = {raw.fn.data(), 72};
  });
  refused(Rule::shape_mismatch, "scale", [](PostPre& op) { op.scale = {}; });
  refused(Rule::shape_mismatch, "base", [](PostPre& op) { op.base = {}; });
  refused(Rule::shape_mismatch, "norm_weight", [&](PostPre& op) {
    op.norm_weight = {raw.norm_weight.data(), 56};
  });
  refused(Rule::shape_mismatch, "residual_out", [&](PostPre& op) {
    op.residual_out = {raw.residual_out.data(), 5, hidden};
  });
  refused(Rule::shape_mismatch, "post_out", [&](PostPre& op) {
    op.post_out = {raw.post_out.data(), 5};
  });
  refused(Rule::shape_mismatch, "comb_out", [](PostPre& op) { op.comb_out = {}; });
  refused(Rule::shape_mismatch, "layer_input", [&](PostPre& op) {
    op.layer_input = {raw.layer_input.data(), 4, 72};
  });
  refused(Rule::shape_mismatch, "mixes", [&](PostPre& op) { op.mixes = {raw.mixes.data(), 2}; });
  // Addresses and rows
  refused(Rule::null_pointer, "x has no address", [&](PostPre& op) {
    op.x = {nullptr, 4, hidden};
  });
  refused(Rule::null_pointer, "the workspace has no address",
          [](PostPre& op) { op.workspace.data = nullptr; });
  refused(Rule::misaligned, "residual: address", [&](PostPre& op) {
    op.residual = {raw.residual.data() + 1, 4, hidden};
  });
  refused(Rule::misaligned, "x: address",
          [&](PostPre& op) { op.x = raw.x.with_row_stride(hidden + 4); });
  refused(Rule::misaligned, "the address of the workspace",
          [](PostPre& op) { op.workspace.data = static_cast<char*>(op.workspace.data) + 4; });
  refused(Rule::invalid_parameter, "post_pre_workspace_bytes",
          [](PostPre& op) { --op.workspace.bytes; });
  refused(Rule::not_contiguous, "fn",
          [&](PostPre& op) { op.fn = raw.fn.with_row_stride(4 * hidden + 8); });
  refused(Rule::size_overflow, "residual: rows",
          [&](PostPre& op) { op.residual = raw.residual.with_row_stride(std::int64_t{1} << 61); });
  refused(Rule::overlapping, "residual_out has rows",
          [&](PostPre& op) { op.residual_out = raw.residual_out.with_row_stride(4 * hidden - 8); });
  // Shared memory: nothing in place
  refused(Rule::overlapping, "residual_out and residual share memory", [&](PostPre& op) {
    op.residual_out = {const_cast<bf16*>(raw.residual.data()), 4, hidden};
  });
  refused(Rule::overlapping, "layer_input and x share memory", [&](PostPre& op) {
    op.layer_input = {const_cast<bf16*>(raw.x.data()), 4, hidden};
  });
  refused(Rule::overlapping, "post_out and post share memory", [&](PostPre& op) {
    op.post_out = {const_cast<float*>(raw.post.data()), 4};
  });
  refused(Rule::overlapping, "comb_out and comb share memory", [&](PostPre& op) {
    op.comb_out = {const_cast<float*>(raw.comb.data()), 4};
  });
  refused(Rule::overlapping, "the workspace and residual_out", [&](PostPre& op) {
    op.workspace = {raw.residual_out.data(), std::size_t{1} << 20};
  });
  // Numbers
  refused(Rule::invalid_parameter, "Sinkhorn iterations",
          [](PostPre& op) { op.sinkhorn_iterations = 0; });
  for (const float wrong : {-1e-6F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refused(Rule::invalid_parameter, "rms_eps", [&](PostPre& op) { op.rms_eps = wrong; });
    refused(Rule::invalid_parameter, "pre_eps", [&](PostPre& op) { op.pre_eps = wrong; });
    refused(Rule::invalid_parameter, "norm_eps", [&](PostPre& op) { op.norm_eps = wrong; });
    refused(Rule::invalid_parameter, "sinkhorn_eps", [&](PostPre& op) { op.sinkhorn_eps = wrong; });
  }
  refused(Rule::invalid_parameter, "post_mult", [](PostPre& op) { op.post_mult = std::nanf(""); });
}

}  // namespace
