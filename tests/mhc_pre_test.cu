// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// mhc::pre against the f64 oracle, eager and replayed. In the simulation the kernels run on the
/// host, thread for thread, where a large case takes seconds.

#include "holdfast/mhc/pre.cuh"
#include "holdfast/mhc/pre_broadcast.cuh"

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
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using holdfast::Rule;
using holdfast::mhc::bf16;
using holdfast::mhc::NormSquares;
using holdfast::mhc::Pre;
using test::DeviceArray;
using test::mhc::Constants;
using test::mhc::from_bits;
using test::mhc::kMixes;
using test::mhc::kStreams;
using test::mhc::Rows;
using test::mhc::to_bits;
using test::mhc::token_of;
using test::mhc::Weights;

struct Results {
  std::vector<float> post;
  std::vector<float> comb;
  std::vector<std::uint16_t> layer_input;
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
        norm_(to_bits(w.norm_weight), std::max<std::int64_t>(hidden, 1), 0),
        post_(tokens_, kStreams, gap),
        comb_(tokens_, kStreams * kStreams, gap),
        layer_input_(tokens_, hidden, gap),
        mixes_(tokens_, kMixes, gap),
        workspace_(holdfast::mhc::pre_workspace_bytes(tokens_, hidden) / sizeof(float)) {
    poison();
  }

  [[nodiscard]] Pre op() const {
    Pre op{
        .residual = {residual_.data(), tokens_, hidden_},
        .fn = {fn_.data(), hidden_},
        .scale = {scale_.data()},
        .base = {base_.data()},
        .post = {post_.data(), tokens_},
        .comb = {comb_.data(), tokens_},
        .layer_input = {layer_input_.data(), tokens_, hidden_},
        .mixes = {mixes_.data(), tokens_},
        .workspace = {workspace_.data(), workspace_.size() * sizeof(float)},
    };
    if (!weights_.norm_weight.empty()) op.norm_weight = {norm_.data(), hidden_};
    op.residual = op.residual.with_row_stride(residual_.stride());
    op.post = op.post.with_row_stride(post_.stride());
    op.comb = op.comb.with_row_stride(comb_.stride());
    op.layer_input = op.layer_input.with_row_stride(layer_input_.stride());
    op.mixes = op.mixes.with_row_stride(mixes_.stride());
    return op;
  }
  void poison() const {
    post_.poison();
    comb_.poison();
    layer_input_.poison();
    mixes_.poison();
    workspace_.poison();
  }
  [[nodiscard]] Results results() const {
    return {post_.results(), comb_.results(), layer_input_.results(), mixes_.results()};
  }
  [[nodiscard]] const Weights& weights() const { return weights_; }
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  [[nodiscard]] std::int64_t hidden() const { return hidden_; }
  [[nodiscard]] std::span<const float> residual(std::int64_t token) const {
    return token_of(values_, token, static_cast<std::size_t>(kStreams * hidden_));
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
  Rows<float> post_;
  Rows<float> comb_;
  Rows<std::uint16_t> layer_input_;
  Rows<float> mixes_;
  DeviceArray<float> workspace_;
};

/// Every output of every `step`-th token against the oracle. Returns the relative rms of mixes.
double expect_right(const Problem& problem, const Pre& op, const Results& got,
                    std::int64_t step = 1) {
  const Constants constants{.rms_eps = op.rms_eps,
                            .pre_eps = op.pre_eps,
                            .sinkhorn_eps = op.sinkhorn_eps,
                            .norm_eps = op.norm_eps,
                            .post_mult = op.post_mult,
                            .iterations = op.sinkhorn_iterations,
                            .rounded_squares = op.norm_squares == NormSquares::rounded};
  test::mhc::RelativeRms rms;
  const auto hidden = static_cast<std::size_t>(problem.hidden());
  for (std::int64_t t = 0; t < problem.tokens(); t += step) {
    const auto want = test::mhc::pre(problem.residual(t), problem.weights(), constants);
    EXPECT_EQ(test::mhc::difference(want, problem.weights(), constants,
                                    {token_of(got.post, t, kStreams), token_of(got.comb, t, 16),
                                     from_bits(token_of(got.layer_input, t, hidden))}),
              "")
        << "token " << t;
    rms.add(want.mixes, token_of(got.mixes, t, kMixes));
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_LE(rms.value(), test::mhc::kMixesBound);
  return rms.value();
}

Problem problem(std::int64_t tokens, std::int64_t hidden, std::int64_t gap = 0, bool norm = true,
                std::uint64_t seed = 1, double deviation = 0.02) {
  const auto width = static_cast<std::size_t>(hidden);
  Weights w = test::mhc::make_weights(kStreams * width, width, seed, deviation);
  if (!norm) w.norm_weight.clear();
  return {
      w, test::mhc::make_activations(static_cast<std::size_t>(tokens) * kStreams * width, seed + 1),
      hidden, gap};
}

using MhcPre = test::Cuda;

// --- Numbers

TEST_F(MhcPre, EveryHiddenAndModeAgainstTheOracle) {
  std::vector<std::int64_t> sizes{8, 24, 64, 128, 136, 520, 1280};
  if (!test::simulated()) {
    for (const int more : {1536, 2056, 2560, 4096, 5120, 7168, 8192, 8200, 16384}) {
      sizes.push_back(more);
    }
  }
  for (const std::int64_t hidden : sizes) {
    for (const int variant : {0, 1, 2}) {  // no norm, both modes
      if (test::simulated() && hidden > 600 && variant == 1) continue;
      const Problem in = problem(7, hidden, 0, variant > 0, static_cast<std::uint64_t>(hidden));
      Pre op = in.op();
      op.norm_squares = variant == 2 ? NormSquares::rounded : NormSquares::unrounded;
      for (const test::Mode mode : test::kModes) {
        SCOPED_TRACE("hidden " + std::to_string(hidden) + ", variant " + std::to_string(variant) +
                     ", " + to_string(mode));
        in.poison();
        test::run(mode, stream, [&] { pre(op, stream); });
        expect_right(in, op, in.results());
      }
    }
  }
}

TEST_F(MhcPre, RowsLongerThanAThreadKeeps) {
  // Above hidden 8192 a part of the row is collapsed twice.
  const Problem in = problem(1, 8216);
  pre(in.op(), stream);
  expect_right(in, in.op(), in.results());
}

TEST_F(MhcPre, MixesKeepThePromise) {
  const std::vector<std::int64_t> sizes =
      test::simulated() ? std::vector<std::int64_t>{2048}
                        : std::vector<std::int64_t>{1280, 4096, 5120, 7168, 8192};
  for (const std::int64_t hidden : sizes) {
    const Problem in = problem(test::simulated() ? 16 : 64, hidden);
    pre(in.op(), stream);
    const double rms = expect_right(in, in.op(), in.results());
    EXPECT_GT(rms, 0);
    RecordProperty("mixes_rel_rms_in_1e-9_" + std::to_string(hidden), std::lround(rms * 1e9));
  }
}

TEST_F(MhcPre, ConstantsAreTheCallers) {
  const Problem in = problem(5, 256);
  Pre op = in.op();
  op.rms_eps = 0.5F;
  op.pre_eps = 1e-2F;
  op.sinkhorn_eps = 1e-3F;
  op.norm_eps = 0.25F;
  op.post_mult = 1.0F;
  for (const int iterations : {1, 2, 3, 20}) {
    op.sinkhorn_iterations = iterations;
    in.poison();
    pre(op, stream);
    expect_right(in, op, in.results());
  }
}

TEST_F(MhcPre, ZeroRowsAndTinyEps) {
  const std::int64_t hidden = 512;
  std::vector<float> residual = test::mhc::make_activations(3 * 4 * 512, 11);
  std::fill_n(residual.begin() + 4 * 512, 4 * 512, 0.0F);
  const Problem in(test::mhc::make_weights(4 * 512, 512, 12), residual, hidden);
  Pre op = in.op();
  op.rms_eps = 1e-20F;
  op.norm_eps = 1e-20F;
  pre(op, stream);
  const Results got = in.results();
  expect_right(in, op, got);
  for (const float mix : token_of(got.mixes, 1, kMixes)) EXPECT_EQ(mix, 0.0F);
  for (const std::uint16_t bits : token_of(got.layer_input, 1, 512)) EXPECT_EQ(bits & 0x7FFFU, 0U);
}

TEST_F(MhcPre, StrongLogits) {
  for (const double deviation : {0.2, 2.0}) {
    const Problem in = problem(4, 256, 0, true, 13, deviation);
    pre(in.op(), stream);
    for (const float value : in.results().comb) {
      EXPECT_TRUE(value >= 0 && value <= 1.001F) << value;
    }
  }
}

// --- Bits

TEST_F(MhcPre, ATokensBitsDoNotDependOnTheBatch) {
  // In the workspace of the largest batch.
  for (const std::int64_t hidden : {552, 4096}) {
    if (test::simulated() && hidden > 600) continue;
    const std::vector<std::int64_t> batches = test::mhc::batches();
    const std::int64_t most = batches.back();
    const Problem whole = problem(most, hidden, 0, true, 14);
    pre(whole.op(), stream);
    const Results want = whole.results();
    expect_right(whole, whole.op(), want, most / 16);
    for (const std::int64_t tokens : batches) {
      for (const std::int64_t first : {std::int64_t{0}, most - tokens}) {
        const auto part = [&](const auto& view) { return test::mhc::part(view, first, tokens); };
        Pre op = whole.op();
        op.residual = part(op.residual);
        op.post = part(op.post);
        op.comb = part(op.comb);
        op.layer_input = part(op.layer_input);
        op.mixes = part(op.mixes);
        for (const test::Mode mode : test::kModes) {
          if (test::simulated() && mode == test::Mode::captured && tokens > 17) continue;
          SCOPED_TRACE(std::to_string(tokens) + " tokens from " + std::to_string(first) + ", " +
                       to_string(mode));
          whole.poison();
          test::run(mode, stream, [&] { pre(op, stream); });
          EXPECT_TRUE(test::mhc::same_bits(op.post, want.post, first));
          EXPECT_TRUE(test::mhc::same_bits(op.comb, want.comb, first));
          EXPECT_TRUE(test::mhc::same_bits(op.layer_input, want.layer_input, first));
          EXPECT_TRUE(test::mhc::same_bits(op.mixes, want.mixes, first));
        }
      }
    }
  }
}

TEST_F(MhcPre, EverySpreadGivesTheSameBits) {
  const Problem in = problem(140, 1064);
  const Pre op = in.op();
  pre(op, stream);
  const Results want = in.results();
  in.poison();
  test::mhc::run_every_spread<kMixes>(op, holdfast::mhc::detail::ResidualSource{op.residual}, 140,
                                      stream, [&](const std::string& what) {
                                        EXPECT_TRUE(in.results() == want) << what;
                                        in.poison();
                                      });
}

TEST_F(MhcPre, RunToRunTheBitsAreTheSame) {
  const Problem in = problem(test::simulated() ? 5 : 300, 640);
  const test::Graph graph(stream, [&] { pre(in.op(), stream); });
  pre(in.op(), stream);
  const Results first = in.results();
  for (int run = 0; run < (test::simulated() ? 2 : 50); ++run) {
    in.poison();
    graph.launch(stream);
    EXPECT_TRUE(in.results() == first);
  }
}

TEST_F(MhcPre, AgreesWithPreBroadcastOnEqualStreams) {
  // fn is a multiple of 2^-12, so its sum over the streams is exact: the two differ by the rounding
  // of f32 sums alone, and both keep the promise.
  const std::int64_t hidden = 256;
  Weights w = test::mhc::make_weights(4 * 256, 256, 16);
  for (float& value : w.fn) value = std::round(value * 4096) / 4096;
  const std::vector<float> x = test::mhc::make_activations(3 * 256, 17);
  std::vector<float> residual;
  for (std::int64_t t = 0; t < 3; ++t) {
    for (int i = 0; i < kStreams; ++i) {
      const auto row = token_of(x, t, 256);
      residual.insert(residual.end(), row.begin(), row.end());
    }
  }
  const Problem in(w, residual, hidden);
  const Pre op = in.op();
  pre(op, stream);
  const Results got = in.results();
  expect_right(in, op, got);

  const DeviceArray<float> summed(test::mhc::stream_sum(w.fn, 256));
  const Rows<std::uint16_t> x_rows(to_bits(x), hidden, 0);
  in.poison();
  holdfast::mhc::pre_broadcast({.x = {x_rows.data(), 3, hidden},
                                .fn_broadcast = {summed.data(), hidden},
                                .scale = op.scale,
                                .base = op.base,
                                .norm_weight = op.norm_weight,
                                .post = op.post,
                                .comb = op.comb,
                                .layer_input = op.layer_input,
                                .mixes = op.mixes},
                               stream);
  const Results other = in.results();
  // Each sum of up to 1024 products is within kMixesBound of mixes of order 1 (at most 8 here).
  for (std::size_t i = 0; i < got.mixes.size(); ++i) {
    EXPECT_NEAR(got.mixes[i], other.mixes[i], 2 * 8 * test::mhc::kMixesBound) << i;
  }
  for (std::size_t i = 0; i < got.comb.size(); ++i) {
    EXPECT_NEAR(got.comb[i], other.comb[i], 2 * test::mhc::kCoefficientBound) << i;
  }
}

// --- Tensors

TEST_F(MhcPre, OptionalTensorsChangeNoOtherBits) {
  const Problem in = problem(9, 512);
  pre(in.op(), stream);
  const Results whole = in.results();
  Pre op = in.op();
  op.mixes = {};
  in.poison();
  pre(op, stream);
  const Results got = in.results();
  EXPECT_EQ(got.post, whole.post);
  EXPECT_EQ(got.comb, whole.comb);
  EXPECT_EQ(got.layer_input, whole.layer_input);
  for (const float mix : got.mixes) EXPECT_EQ(test::bits<std::uint32_t>(mix), 0xCBCBCBCBU);
}

TEST_F(MhcPre, RowsMayLieApart) {
  const Problem dense = problem(6, 264);
  pre(dense.op(), stream);
  for (const std::int64_t gap : {8, 24}) {
    const Problem apart = problem(6, 264, gap);
    for (const test::Mode mode : test::kModes) {
      apart.poison();
      test::run(mode, stream, [&] { pre(apart.op(), stream); });
      EXPECT_TRUE(apart.results() == dense.results()) << gap;
    }
  }
}

TEST_F(MhcPre, OffsetsBeyondTheReachOfInt32) {
  if (test::simulated()) GTEST_SKIP() << "needs 4 GiB of device memory";
  for (const std::int64_t tokens : {2, 257}) {
    const Problem in = problem(tokens, 520);
    const Pre near = in.op();
    test::mhc::FarRows rows(tokens);
    Pre op = near;
    op.residual = rows.far(near.residual);
    op.layer_input = rows.far(near.layer_input);
    pre(op, stream);
    test::mhc::FarRows::copy(op.layer_input, near.layer_input);
    expect_right(in, op, in.results());
  }
}

TEST_F(MhcPre, NoTokensLaunchNothing) {
  const Problem in = problem(0, 64);
  const test::Graph graph(stream, [&] { pre(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 0U);
  EXPECT_EQ(holdfast::mhc::pre_workspace_bytes(0, 64), 0U);
}

TEST_F(MhcPre, AWorkspaceServesEverySmallerBatch) {
  test::mhc::expect_enough_for_smaller_batches<kMixes>(&holdfast::mhc::pre_workspace_bytes);
}

// --- Refusals

TEST_F(MhcPre, RefusesWhatIsNotTheOp) {
  const std::int64_t hidden = 64;
  const Problem in = problem(4, hidden);
  const Pre raw = in.op();
  const auto refused = [&](Rule rule, const std::string& text,
                           const std::function<void(Pre&)>& spoil) {
    SCOPED_TRACE(text);
    Pre op = raw;
    spoil(op);
    in.poison();
    const Results before = in.results();
    test::expect_refused(rule, "mhc::pre of", text, [&] { pre(op, stream); });
    test::ok(cudaStreamSynchronize(stream));
    EXPECT_TRUE(in.results() == before);
  };
  for (const std::int64_t wrong : {0, 4, 7, 12, 1 << 21}) {
    refused(Rule::unsupported_shape, "hidden must be a multiple of 8", [&](Pre& op) {
      op.residual = {raw.residual.data(), 4, wrong};
    });
  }
  refused(Rule::unsupported_shape, "tokens", [&](Pre& op) {
    op.residual = {raw.residual.data(), std::int64_t{1} << 31, hidden};
  });
  refused(Rule::shape_mismatch, "fn is [24, 4, 72]; expected [24, 4, 64]", [&](Pre& op) {
    op.fn = {raw.fn.data(), 72};
  });
  refused(Rule::shape_mismatch, "fn", [](Pre& op) { op.fn = {}; });
  refused(Rule::shape_mismatch, "scale", [](Pre& op) { op.scale = {}; });
  refused(Rule::shape_mismatch, "base", [](Pre& op) { op.base = {}; });
  refused(Rule::shape_mismatch, "norm_weight", [&](Pre& op) {
    op.norm_weight = {raw.norm_weight.data(), 56};
  });
  refused(Rule::shape_mismatch, "post", [&](Pre& op) { op.post = {raw.post.data(), 5}; });
  refused(Rule::shape_mismatch, "comb", [&](Pre& op) { op.comb = {raw.comb.data(), 3}; });
  refused(Rule::shape_mismatch, "layer_input", [&](Pre& op) {
    op.layer_input = {raw.layer_input.data(), 4, 72};
  });
  refused(Rule::shape_mismatch, "mixes", [&](Pre& op) { op.mixes = {raw.mixes.data(), 2}; });
  refused(Rule::null_pointer, "residual has no address", [&](Pre& op) {
    op.residual = {nullptr, 4, hidden};
  });
  refused(Rule::null_pointer, "the workspace has no address",
          [](Pre& op) { op.workspace.data = nullptr; });
  refused(Rule::misaligned, "residual: address", [&](Pre& op) {
    op.residual = {raw.residual.data() + 1, 4, hidden};
  });
  refused(Rule::misaligned, "the address of the workspace",
          [](Pre& op) { op.workspace.data = static_cast<char*>(op.workspace.data) + 4; });
  refused(Rule::invalid_parameter, "pre_workspace_bytes", [](Pre& op) { --op.workspace.bytes; });
  refused(Rule::not_contiguous, "fn",
          [&](Pre& op) { op.fn = raw.fn.with_row_stride(4 * hidden + 8); });
  refused(Rule::overlapping, "share memory", [&](Pre& op) {
    op.layer_input = {const_cast<bf16*>(raw.residual.data()), 4, hidden};
  });
  refused(Rule::overlapping, "the workspace and post", [&](Pre& op) {
    op.workspace = {raw.post.data(), std::size_t{1} << 20};
  });
  refused(Rule::invalid_parameter, "Sinkhorn iterations",
          [](Pre& op) { op.sinkhorn_iterations = 0; });
  for (const float wrong : {-1e-6F, std::nanf("")}) {
    refused(Rule::invalid_parameter, "rms_eps", [&](Pre& op) { op.rms_eps = wrong; });
    refused(Rule::invalid_parameter, "pre_eps", [&](Pre& op) { op.pre_eps = wrong; });
    refused(Rule::invalid_parameter, "norm_eps", [&](Pre& op) { op.norm_eps = wrong; });
    refused(Rule::invalid_parameter, "sinkhorn_eps", [&](Pre& op) { op.sinkhorn_eps = wrong; });
  }
  refused(Rule::invalid_parameter, "rms_eps is -9.99999968e-21; expected a finite number of at",
          [](Pre& op) { op.rms_eps = -1e-20F; });
  refused(Rule::invalid_parameter, "post_mult", [](Pre& op) { op.post_mult = std::nanf(""); });
}

}  // namespace
