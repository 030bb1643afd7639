// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// mhc::head against the f64 oracle, eager and replayed. In the simulation the kernels run on the
/// host, thread for thread.

#include "holdfast/mhc/head.cuh"
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
using holdfast::mhc::Head;
using holdfast::mhc::NormSquares;
using test::DeviceArray;
using test::mhc::Constants;
using test::mhc::from_bits;
using test::mhc::kStreams;
using test::mhc::Rows;
using test::mhc::to_bits;
using test::mhc::token_of;
using test::mhc::Weights;

struct Results {
  std::vector<std::uint16_t> hidden_states;
  std::vector<float> mixes;

  friend bool operator==(const Results&, const Results&) = default;
};

/// One op on the device: weights, a batch and poisoned results, each row `gap` elements longer than
/// it need be.
class Problem {
 public:
  Problem(const Weights& w, std::vector<float> residual, std::int64_t hidden, std::int64_t gap = 0)
      : tokens_(static_cast<std::int64_t>(residual.size()) / (kStreams * hidden)),
        hidden_(hidden),
        weights_(w),
        values_(std::move(residual)),
        residual_(to_bits(values_), kStreams * hidden, gap),
        fn_(w.fn),
        scale_(w.scale),
        base_(w.base),
        norm_(to_bits(w.norm_weight), hidden, 0),
        hidden_states_(tokens_, hidden, gap),
        mixes_(tokens_, kStreams, gap),
        workspace_(holdfast::mhc::head_workspace_bytes(tokens_, hidden) / sizeof(float)) {
    poison();
  }

  [[nodiscard]] Head op() const {
    Head op{
        .residual = {residual_.data(), tokens_, hidden_},
        .fn = {fn_.data(), hidden_},
        .scale = {scale_.data()},
        .base = {base_.data()},
        .hidden_states = {hidden_states_.data(), tokens_, hidden_},
        .mixes = {mixes_.data(), tokens_},
        .workspace = {workspace_.data(), workspace_.bytes()},
    };
    if (!weights_.norm_weight.empty()) op.norm_weight = {norm_.data(), hidden_};
    op.residual = op.residual.with_row_stride(residual_.stride());
    op.hidden_states = op.hidden_states.with_row_stride(hidden_states_.stride());
    op.mixes = op.mixes.with_row_stride(mixes_.stride());
    return op;
  }
  void poison() const {
    hidden_states_.poison();
    mixes_.poison();
    workspace_.poison();
  }
  [[nodiscard]] Results results() const { return {hidden_states_.results(), mixes_.results()}; }

  /// Every output of every `step`-th token against the oracle.
  void expect_right(const Head& op, const Results& got, std::int64_t step = 1) const {
    const Constants constants{.rms_eps = op.rms_eps,
                              .pre_eps = op.pre_eps,
                              .norm_eps = op.norm_eps,
                              .rounded_squares = op.norm_squares == NormSquares::rounded};
    test::mhc::RelativeRms rms;
    const auto hidden = static_cast<std::size_t>(hidden_);
    for (std::int64_t t = 0; t < tokens_ && !::testing::Test::HasFailure(); t += step) {
      const auto want =
          test::mhc::head(token_of(values_, t, kStreams * hidden), weights_, constants);
      EXPECT_EQ(test::mhc::head_difference(want, weights_, constants,
                                           from_bits(token_of(got.hidden_states, t, hidden))),
                "")
          << "token " << t;
      rms.add(want.mixes, token_of(got.mixes, t, kStreams));
    }
    EXPECT_LE(rms.value(), test::mhc::kMixesBound);
  }

 private:
  std::int64_t tokens_;
  std::int64_t hidden_;
  Weights weights_;
  std::vector<float> values_;
  Rows<std::uint16_t> residual_;
  DeviceArray<float> fn_;
  DeviceArray<float> scale_;
  DeviceArray<float> base_;
  Rows<std::uint16_t> norm_;
  Rows<std::uint16_t> hidden_states_;
  Rows<float> mixes_;
  DeviceArray<float> workspace_;
};

Weights weights(std::int64_t hidden, bool norm, std::uint64_t seed, double deviation = 0.02) {
  const auto width = static_cast<std::size_t>(hidden);
  Weights w = test::mhc::head_of(test::mhc::make_weights(kStreams * width, width, seed, deviation));
  if (!norm) w.norm_weight.clear();
  return w;
}

Problem problem(std::int64_t tokens, std::int64_t hidden, std::int64_t gap = 0, bool norm = true,
                std::uint64_t seed = 1, double deviation = 0.02) {
  const auto count = static_cast<std::size_t>(tokens * kStreams * hidden);
  return {weights(hidden, norm, seed, deviation), test::mhc::make_activations(count, seed + 1),
          hidden, gap};
}

using MhcHead = test::Cuda;

// --- Numbers

TEST_F(MhcHead, EveryHiddenAndModeAgainstTheOracle) {
  for (const std::int64_t hidden :
       {8, 24, 64, 128, 136, 1280, 1536, 2560, 4096, 5120, 7168, 8192, 8200}) {
    for (const int variant : {0, 1, 2}) {  // no norm, both modes
      const Problem in = problem(7, hidden, 0, variant > 0, static_cast<std::uint64_t>(hidden));
      Head op = in.op();
      op.norm_squares = variant == 2 ? NormSquares::rounded : NormSquares::unrounded;
      for (const test::Mode mode : test::kModes) {
        SCOPED_TRACE("hidden " + std::to_string(hidden) + ", variant " + std::to_string(variant) +
                     ", " + to_string(mode));
        in.poison();
        test::run(mode, stream, [&] { head(op, stream); });
        in.expect_right(op, in.results());
      }
    }
  }
}

TEST_F(MhcHead, ConstantsAreTheCallers) {
  const Problem in = problem(5, 256);
  Head op = in.op();
  op.rms_eps = 0.5F;
  op.pre_eps = 1e-2F;
  op.norm_eps = 0.25F;
  head(op, stream);
  in.expect_right(op, in.results());
}

TEST_F(MhcHead, TheNormModesDiffer) {
  // As in the test of the comparison: numbers that all round the same way.
  const std::int64_t hidden = 2048;
  const Weights w = weights(hidden, true, 8);
  std::vector<float> residual(4 * 2048);
  double error = 0;
  for (float value = 1; value < 2 && error < 1e-3; value += 0x1p-4F) {
    for (std::size_t k = 0; k < residual.size(); ++k) residual[k] = k % 2048 % 3 == 0 ? 0 : value;
    const double y = test::mhc::head(residual, w, {}).collapsed[1];
    error = std::abs(test::mhc::round_bf16(y) / y - 1);
  }
  ASSERT_GE(error, 1e-3);
  const Problem in(w, residual, hidden);
  Head op = in.op();
  Results results[2];
  for (const bool rounded : {false, true}) {
    op.norm_squares = rounded ? NormSquares::rounded : NormSquares::unrounded;
    in.poison();
    head(op, stream);
    results[rounded] = in.results();
    in.expect_right(op, results[rounded]);
  }
  EXPECT_NE(results[0].hidden_states, results[1].hidden_states);
}

TEST_F(MhcHead, ZeroRowsAndTinyEps) {
  const std::int64_t hidden = 512;
  std::vector<float> residual = test::mhc::make_activations(3 * 4 * 512, 11);
  std::fill_n(residual.begin() + 4 * 512, 4 * 512, 0.0F);
  const Problem in(weights(hidden, true, 12), residual, hidden);
  Head op = in.op();
  op.rms_eps = 1e-20F;
  op.norm_eps = 1e-20F;
  head(op, stream);
  const Results got = in.results();
  in.expect_right(op, got);
  for (const float mix : token_of(got.mixes, 1, kStreams)) EXPECT_EQ(mix, 0.0F);
  for (const std::uint16_t bits : token_of(got.hidden_states, 1, 512)) {
    EXPECT_EQ(bits & 0x7FFFU, 0U);
  }
}

TEST_F(MhcHead, StrongLogits) {
  // Mixes up to 100 and more: sigmoids at their ends, where an error of a mix does not show.
  const Problem in = problem(16, 1024, 0, true, 13, 3.0);
  head(in.op(), stream);
  in.expect_right(in.op(), in.results());
}

TEST_F(MhcHead, IsPreOfItsRows) {
  // With the rows of pre from a weight for all 24 mixes: the same bits of what both give.
  const std::int64_t hidden = 520;
  const Weights all = test::mhc::make_weights(4 * 520, 520, 16);
  const Problem in(test::mhc::head_of(all), test::mhc::make_activations(5 * 4 * 520, 17), hidden);
  const Head op = in.op();
  head(op, stream);
  const Results got = in.results();
  const DeviceArray<float> fn(all.fn);
  const DeviceArray<float> scale(all.scale);
  const DeviceArray<float> base(all.base);
  const Rows<float> post(5, 4, 0);
  const Rows<float> comb(5, 16, 0);
  const DeviceArray<float> memory(holdfast::mhc::pre_workspace_bytes(5, hidden) / sizeof(float));
  in.poison();
  holdfast::mhc::pre({.residual = op.residual,
                      .fn = {fn.data(), hidden},
                      .scale = {scale.data()},
                      .base = {base.data()},
                      .norm_weight = op.norm_weight,
                      .post = {post.data(), 5},
                      .comb = {comb.data(), 5},
                      .layer_input = op.hidden_states,
                      .workspace = {memory.data(), memory.bytes()}},
                     stream);
  EXPECT_EQ(in.results().hidden_states, got.hidden_states);
}

// --- Bits

TEST_F(MhcHead, ATokensBitsDoNotDependOnTheBatch) {
  // In the workspace of the largest batch.
  const std::int64_t hidden = 552;
  const std::vector<std::int64_t> batches = test::mhc::batches();
  const std::int64_t most = batches.back();
  const Problem whole = problem(most, hidden, 0, true, 14);
  head(whole.op(), stream);
  const Results want = whole.results();
  whole.expect_right(whole.op(), want, most / 16);
  for (const std::int64_t tokens : batches) {
    for (const std::int64_t first : {std::int64_t{0}, most - tokens}) {
      Head op = whole.op();
      op.residual = test::mhc::part(op.residual, first, tokens);
      op.hidden_states = test::mhc::part(op.hidden_states, first, tokens);
      op.mixes = test::mhc::part(op.mixes, first, tokens);
      for (const test::Mode mode : test::kModes) {
        whole.poison();
        test::run(mode, stream, [&] { head(op, stream); });
        EXPECT_TRUE(test::mhc::same_bits(op.hidden_states, want.hidden_states, first))
            << tokens << ' ' << first;
        EXPECT_TRUE(test::mhc::same_bits(op.mixes, want.mixes, first)) << tokens << ' ' << first;
      }
    }
  }
}

TEST_F(MhcHead, EverySpreadGivesTheSameBits) {
  const Problem in = problem(140, 1064);
  const Head op = in.op();
  head(op, stream);
  const Results want = in.results();
  in.poison();
  test::mhc::run_every_spread<kStreams>(op, holdfast::mhc::detail::ResidualSource{op.residual}, 140,
                                        stream, [&](const std::string& what) {
                                          EXPECT_TRUE(in.results() == want) << what;
                                          in.poison();
                                        });
}

TEST_F(MhcHead, RunToRunTheBitsAreTheSame) {
  const Problem in = problem(test::simulated() ? 5 : 300, 640);
  const test::Graph graph(stream, [&] { head(in.op(), stream); });
  head(in.op(), stream);
  const Results first = in.results();
  for (int run = 0; run < (test::simulated() ? 2 : 50); ++run) {
    in.poison();
    graph.launch(stream);
    EXPECT_TRUE(in.results() == first);
  }
}

// --- Tensors

TEST_F(MhcHead, OptionalTensorsChangeNoOtherBits) {
  const Problem in = problem(9, 512);
  head(in.op(), stream);
  const Results whole = in.results();
  Head op = in.op();
  op.mixes = {};
  in.poison();
  head(op, stream);
  const Results got = in.results();
  EXPECT_EQ(got.hidden_states, whole.hidden_states);
  for (const float mix : got.mixes) EXPECT_EQ(test::bits<std::uint32_t>(mix), 0xCBCBCBCBU);
}

TEST_F(MhcHead, RowsMayLieApart) {
  const Problem dense = problem(6, 264);
  head(dense.op(), stream);
  for (const std::int64_t gap : {8, 24}) {
    const Problem apart = problem(6, 264, gap);
    for (const test::Mode mode : test::kModes) {
      apart.poison();
      test::run(mode, stream, [&] { head(apart.op(), stream); });
      EXPECT_TRUE(apart.results() == dense.results()) << gap;
    }
  }
}

TEST_F(MhcHead, OffsetsBeyondTheReachOfInt32) {
  if (test::simulated()) GTEST_SKIP() << "needs 4 GiB of device memory";
  for (const std::int64_t tokens : {2, 257}) {
    const Problem in = problem(tokens, 520);
    const Head near = in.op();
    test::mhc::FarRows rows(tokens);
    Head op = near;
    op.residual = rows.far(near.residual);
    op.hidden_states = rows.far(near.hidden_states);
    head(op, stream);
    test::mhc::FarRows::copy(op.hidden_states, near.hidden_states);
    in.expect_right(op, in.results());
  }
}

TEST_F(MhcHead, NoTokensLaunchNothing) {
  const Problem in = problem(0, 64);
  const test::Graph graph(stream, [&] { head(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 0U);
  EXPECT_EQ(holdfast::mhc::head_workspace_bytes(0, 64), 0U);
}

TEST_F(MhcHead, TwoLaunches) {
  const Problem in = problem(3, 64);
  const test::Graph graph(stream, [&] { head(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 2U);
}

TEST_F(MhcHead, AWorkspaceServesEverySmallerBatch) {
  test::mhc::expect_enough_for_smaller_batches<kStreams>(&holdfast::mhc::head_workspace_bytes);
}

// --- Refusals

TEST_F(MhcHead, RefusesWhatIsNotTheOp) {
  const std::int64_t hidden = 64;
  const Problem in = problem(4, hidden);
  const Head raw = in.op();
  in.poison();
  const Results untouched = in.results();
  const auto refused = [&](Rule rule, const std::string& text,
                           const std::function<void(Head&)>& spoil) {
    SCOPED_TRACE(text);
    Head op = raw;
    spoil(op);
    test::expect_refused(rule, "mhc::head of", text, [&] { head(op, stream); });
    test::ok(cudaStreamSynchronize(stream));
    EXPECT_TRUE(in.results() == untouched);
  };
  for (const std::int64_t wrong : {0, 4, 7, 12, 1 << 21}) {
    refused(Rule::unsupported_shape, "hidden must be a multiple of 8", [&](Head& op) {
      op.residual = {raw.residual.data(), 4, wrong};
    });
  }
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    refused(Rule::unsupported_shape, "tokens", [&](Head& op) {
      op.residual = {raw.residual.data(), wrong, hidden};
    });
  }
  refused(Rule::shape_mismatch, "fn is [4, 4, 72]; expected [4, 4, 64]", [&](Head& op) {
    op.fn = {raw.fn.data(), 72};
  });
  refused(Rule::shape_mismatch, "fn", [](Head& op) { op.fn = {}; });
  refused(Rule::shape_mismatch, "scale", [](Head& op) { op.scale = {}; });
  refused(Rule::shape_mismatch, "base", [](Head& op) { op.base = {}; });
  refused(Rule::shape_mismatch, "norm_weight", [&](Head& op) {
    op.norm_weight = {raw.norm_weight.data(), 56};
  });
  refused(Rule::shape_mismatch, "hidden_states", [](Head& op) { op.hidden_states = {}; });
  refused(Rule::shape_mismatch, "hidden_states", [&](Head& op) {
    op.hidden_states = {raw.hidden_states.data(), 3, hidden};
  });
  refused(Rule::shape_mismatch, "mixes", [&](Head& op) { op.mixes = {raw.mixes.data(), 2}; });
  refused(Rule::null_pointer, "residual has no address", [&](Head& op) {
    op.residual = {nullptr, 4, hidden};
  });
  refused(Rule::null_pointer, "norm_weight has no address", [&](Head& op) {
    op.norm_weight = {nullptr, hidden};
  });
  refused(Rule::null_pointer, "the workspace has no address",
          [](Head& op) { op.workspace.data = nullptr; });
  refused(Rule::misaligned, "residual: address", [&](Head& op) {
    op.residual = {raw.residual.data() + 1, 4, hidden};
  });
  refused(Rule::misaligned, "hidden_states: address",
          [&](Head& op) { op.hidden_states = raw.hidden_states.with_row_stride(hidden + 4); });
  refused(Rule::misaligned, "the address of the workspace",
          [](Head& op) { op.workspace.data = static_cast<char*>(op.workspace.data) + 4; });
  refused(Rule::invalid_parameter, "head_workspace_bytes", [](Head& op) { --op.workspace.bytes; });
  refused(Rule::not_contiguous, "fn",
          [&](Head& op) { op.fn = raw.fn.with_row_stride(4 * hidden + 8); });
  refused(Rule::size_overflow, "residual: rows",
          [&](Head& op) { op.residual = raw.residual.with_row_stride(std::int64_t{1} << 61); });
  refused(Rule::overlapping, "hidden_states has rows",
          [&](Head& op) { op.hidden_states = raw.hidden_states.with_row_stride(hidden - 8); });
  refused(Rule::overlapping, "hidden_states and residual", [&](Head& op) {
    op.hidden_states = {const_cast<bf16*>(raw.residual.data()), 4, hidden};
  });
  refused(Rule::overlapping, "the workspace and mixes", [&](Head& op) {
    op.workspace = {raw.mixes.data(), std::size_t{1} << 20};
  });
  for (const float wrong : {-1e-6F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refused(Rule::invalid_parameter, "rms_eps", [&](Head& op) { op.rms_eps = wrong; });
    refused(Rule::invalid_parameter, "pre_eps", [&](Head& op) { op.pre_eps = wrong; });
    refused(Rule::invalid_parameter, "norm_eps", [&](Head& op) { op.norm_eps = wrong; });
  }
}

}  // namespace
