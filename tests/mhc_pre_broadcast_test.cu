// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// mhc::pre_broadcast against the f64 oracle, eager and replayed. In the simulation the kernel runs
/// on the host, thread for thread.

#include "holdfast/holdfast.hpp"
#include "holdfast/mhc/pre_broadcast.cuh"
#include "holdfast/stream_sum.cuh"

#include "support/mhc_batches.hpp"
#include "support/mhc_oracle.hpp"
#include "support/runtime.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace {

using holdfast::ContractError;
using holdfast::Rule;
using holdfast::mhc::bf16;
using holdfast::mhc::NormSquares;
using holdfast::mhc::PreBroadcast;
using test::DeviceArray;
using test::mhc::Constants;
using test::mhc::kMixes;
using test::mhc::kStreams;
using test::mhc::Weights;

std::vector<std::uint16_t> to_bits(std::span<const float> values) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) bits.push_back(test::mhc::bf16_bits(value));
  return bits;
}

std::vector<float> from_bits(std::span<const std::uint16_t> bits) {
  std::vector<float> values;
  for (const std::uint16_t value : bits) values.push_back(test::mhc::from_bf16_bits(value));
  return values;
}

bf16* as_bf16(const DeviceArray<std::uint16_t>& array) {
  return reinterpret_cast<bf16*>(array.data());
}

/// The results of a call, of all tokens, as they lie.
struct Results {
  std::vector<std::uint16_t> residual_out;
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
  Problem(const Weights& w, std::vector<float> x, std::int64_t hidden, std::int64_t gap = 0)
      : tokens_(static_cast<std::int64_t>(x.size()) / hidden),
        hidden_(hidden),
        gap_(gap),
        weights_(w),
        x_values_(std::move(x)),
        x_(spread()),
        fn_(w.fn),
        scale_(w.scale),
        base_(w.base),
        norm_(to_bits(w.norm_weight)),
        residual_out_(rows(kStreams * hidden)),
        post_(rows(kStreams)),
        comb_(rows(kStreams * kStreams)),
        layer_input_(rows(hidden)),
        mixes_(rows(kMixes)) {
    poison();
  }

  [[nodiscard]] PreBroadcast op() const {
    PreBroadcast op{
        .x = {as_bf16(x_), tokens_, hidden_},
        .fn_broadcast = {fn_.data(), hidden_},
        .scale = {scale_.data()},
        .base = {base_.data()},
        .residual_out = {as_bf16(residual_out_), tokens_, hidden_},
        .post = {post_.data(), tokens_},
        .comb = {comb_.data(), tokens_},
        .layer_input = {as_bf16(layer_input_), tokens_, hidden_},
        .mixes = {mixes_.data(), tokens_},
    };
    if (!weights_.norm_weight.empty()) op.norm_weight = {as_bf16(norm_), hidden_};
    op.x = op.x.with_row_stride(hidden_ + gap_);
    op.residual_out = op.residual_out.with_row_stride(kStreams * hidden_ + gap_);
    op.post = op.post.with_row_stride(kStreams + gap_);
    op.comb = op.comb.with_row_stride(kStreams * kStreams + gap_);
    op.layer_input = op.layer_input.with_row_stride(hidden_ + gap_);
    op.mixes = op.mixes.with_row_stride(kMixes + gap_);
    return op;
  }

  void poison() const {
    residual_out_.poison();
    post_.poison();
    comb_.poison();
    layer_input_.poison();
    mixes_.poison();
  }

  /// Without the gaps, which must be as the poison left them.
  [[nodiscard]] Results results() const {
    return {collect(residual_out_, kStreams * hidden_), collect(post_, kStreams),
            collect(comb_, kStreams * kStreams), collect(layer_input_, hidden_),
            collect(mixes_, kMixes)};
  }

  [[nodiscard]] const Weights& weights() const { return weights_; }
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  [[nodiscard]] std::span<const float> x(std::int64_t token) const {
    return std::span(x_values_).subspan(static_cast<std::size_t>(token * hidden_),
                                        static_cast<std::size_t>(hidden_));
  }

 private:
  [[nodiscard]] std::size_t rows(std::int64_t length) const {
    return static_cast<std::size_t>(tokens_ * (length + gap_));
  }
  [[nodiscard]] std::vector<std::uint16_t> spread() const {
    std::vector<std::uint16_t> bits(rows(hidden_), 0x7FFF);  // NaN between the rows
    for (std::int64_t t = 0; t < tokens_; ++t) {
      std::ranges::copy(to_bits(x(t)), bits.begin() + t * (hidden_ + gap_));
    }
    return bits;
  }
  template <class T>
  [[nodiscard]] std::vector<T> collect(const DeviceArray<T>& array, std::int64_t length) const {
    const std::vector<T> all = array.download();
    std::vector<T> result;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const auto row = all.begin() + t * (length + gap_);
      result.insert(result.end(), row, row + length);
      for (std::int64_t i = length; i < length + gap_; ++i) {
        T untouched;
        std::memset(&untouched, 0xCB, sizeof untouched);
        EXPECT_EQ(std::memcmp(&row[i], &untouched, sizeof untouched), 0)
            << "a write between the rows, token " << t;
      }
    }
    return result;
  }

  std::int64_t tokens_;
  std::int64_t hidden_;
  std::int64_t gap_;
  Weights weights_;
  std::vector<float> x_values_;
  DeviceArray<std::uint16_t> x_;
  DeviceArray<float> fn_;
  DeviceArray<float> scale_;
  DeviceArray<float> base_;
  DeviceArray<std::uint16_t> norm_;
  DeviceArray<std::uint16_t> residual_out_;
  DeviceArray<float> post_;
  DeviceArray<float> comb_;
  DeviceArray<std::uint16_t> layer_input_;
  DeviceArray<float> mixes_;
};

Constants constants_of(const PreBroadcast& op) {
  return {.rms_eps = op.rms_eps,
          .pre_eps = op.pre_eps,
          .sinkhorn_eps = op.sinkhorn_eps,
          .norm_eps = op.norm_eps,
          .post_mult = op.post_mult,
          .iterations = op.sinkhorn_iterations,
          .rounded_squares = op.norm_squares == NormSquares::rounded};
}

/// Every output of every `step`-th token against the oracle. Returns the relative rms of mixes.
double expect_right(const Problem& problem, const PreBroadcast& op, const Results& got,
                    std::int64_t step = 1) {
  const Constants constants = constants_of(op);
  test::mhc::RelativeRms rms;
  for (std::int64_t t = 0; t < problem.tokens(); t += step) {
    const auto part = [t](const auto& all, std::size_t length) {
      return std::span(all).subspan(static_cast<std::size_t>(t) * length, length);
    };
    const std::span<const float> x = problem.x(t);
    const auto want = test::mhc::pre_broadcast(x, problem.weights(), constants);
    const std::vector<float> layer_input = from_bits(part(got.layer_input, x.size()));
    EXPECT_EQ(test::mhc::difference(want, problem.weights(), constants,
                                    {part(got.post, kStreams), part(got.comb, 16), layer_input}),
              "")
        << "token " << t;
    rms.add(want.mixes, part(got.mixes, kMixes));
    const std::vector<std::uint16_t> bits = to_bits(x);
    for (std::size_t i = 0; i < kStreams; ++i) {
      EXPECT_TRUE(std::ranges::equal(
          part(got.residual_out, kStreams * x.size()).subspan(i * x.size(), x.size()), bits))
          << "residual_out, token " << t << ", stream " << i;
    }
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_LE(rms.value(), test::mhc::kMixesBound);
  return rms.value();
}

Problem problem(std::int64_t tokens, std::int64_t hidden, std::int64_t gap = 0, bool norm = true,
                std::uint64_t seed = 1, double deviation = 0.02) {
  const auto width = static_cast<std::size_t>(hidden);
  Weights w = test::mhc::make_weights(width, width, seed, deviation);
  if (!norm) w.norm_weight.clear();
  return {w, test::mhc::make_activations(static_cast<std::size_t>(tokens) * width, seed + 1),
          hidden, gap};
}

using MhcPreBroadcast = test::Cuda;

// --- Numbers

TEST_F(MhcPreBroadcast, EveryHiddenAndModeAgainstTheOracle) {
  for (const std::int64_t hidden :
       {8, 64, 128, 136, 1280, 1536, 2056, 2560, 4096, 5120, 7168, 8192}) {
    for (const int variant : {0, 1, 2}) {  // no norm, both modes
      const Problem in = problem(7, hidden, 0, variant > 0, static_cast<std::uint64_t>(hidden));
      PreBroadcast op = in.op();
      op.norm_squares = variant == 2 ? NormSquares::rounded : NormSquares::unrounded;
      for (const test::Mode mode : test::kModes) {
        SCOPED_TRACE("hidden " + std::to_string(hidden) + ", variant " + std::to_string(variant) +
                     ", " + to_string(mode));
        in.poison();
        test::run(mode, stream, [&] { pre_broadcast(op, stream); });
        expect_right(in, op, in.results());
      }
    }
  }
}

TEST_F(MhcPreBroadcast, MixesKeepThePromise) {
  for (const std::int64_t hidden : {4096, 5120, 7168}) {
    const Problem in = problem(64, hidden);
    pre_broadcast(in.op(), stream);
    const double rms = expect_right(in, in.op(), in.results());
    RecordProperty("mixes_rel_rms_in_1e-9_" + std::to_string(hidden), std::lround(rms * 1e9));
  }
}

TEST_F(MhcPreBroadcast, ConstantsAreTheCallers) {
  const Problem in = problem(5, 256);
  PreBroadcast op = in.op();
  op.rms_eps = 0.5F;
  op.pre_eps = 1e-2F;
  op.sinkhorn_eps = 1e-3F;
  op.norm_eps = 0.25F;
  op.post_mult = 1.0F;
  for (const int iterations : {1, 2, 3, 20}) {
    op.sinkhorn_iterations = iterations;
    in.poison();
    pre_broadcast(op, stream);
    expect_right(in, op, in.results());
  }
}

TEST_F(MhcPreBroadcast, TheNormModesDiffer) {
  // As in the test of the comparison: numbers that all round the same way.
  const std::int64_t hidden = 2048;
  Weights w = test::mhc::make_weights(2048, 2048, 8);
  std::vector<float> x(2048);
  double error = 0;
  for (float value = 1; value < 2 && error < 1e-3; value += 0x1p-4F) {
    for (std::size_t k = 0; k < x.size(); ++k) x[k] = k % 3 == 0 ? 0 : value;
    const double y = test::mhc::pre_broadcast(x, w, {}).collapsed[1];
    error = std::abs(test::mhc::round_bf16(y) / y - 1);
  }
  ASSERT_GE(error, 1e-3);
  const Problem in(w, x, hidden);
  PreBroadcast op = in.op();
  Results results[2];
  for (const bool rounded : {false, true}) {
    op.norm_squares = rounded ? NormSquares::rounded : NormSquares::unrounded;
    in.poison();
    pre_broadcast(op, stream);
    results[rounded] = in.results();
    expect_right(in, op, results[rounded]);
  }
  EXPECT_NE(results[0].layer_input, results[1].layer_input);
}

TEST_F(MhcPreBroadcast, ZeroRowsAndTinyEps) {
  const std::int64_t hidden = 4096;
  std::vector<float> x = test::mhc::make_activations(3 * 4096, 11);
  std::fill(x.begin() + hidden, x.begin() + 2 * hidden, 0.0F);
  const Problem in(test::mhc::make_weights(4096, 4096, 10), x, hidden);
  PreBroadcast op = in.op();
  op.rms_eps = 1e-20F;
  op.norm_eps = 1e-20F;
  pre_broadcast(op, stream);
  const Results got = in.results();
  expect_right(in, op, got);
  EXPECT_TRUE(std::all_of(got.mixes.begin() + kMixes, got.mixes.begin() + 2 * kMixes,
                          [](float mix) { return mix == 0; }));
}

TEST_F(MhcPreBroadcast, StrongLogits) {
  // Mixes up to 400: sigmoids at their ends, comb near permutations. The promise is relative to
  // order-1 logits, so only what saturates exactly is compared: the bounds that hold for any logit.
  const Problem in = problem(16, 1024, 0, true, 12, 3.0);
  pre_broadcast(in.op(), stream);
  const Results got = in.results();
  test::mhc::RelativeRms rms;
  for (std::int64_t t = 0; t < in.tokens(); ++t) {
    const auto want = test::mhc::pre_broadcast(in.x(t), in.weights(), {});
    rms.add(want.mixes, std::span(got.mixes).subspan(static_cast<std::size_t>(t) * kMixes, kMixes));
    for (std::size_t j = 0; j < 4; ++j) {
      double column = 0;
      for (std::size_t i = 0; i < 4; ++i) {
        const float c = got.comb[static_cast<std::size_t>(t) * 16 + 4 * i + j];
        EXPECT_GE(c, 0);
        column += c;
      }
      EXPECT_NEAR(column, 1, 5e-6);  // 2e-6 of the iteration, and f32
      const float post = got.post[static_cast<std::size_t>(t) * 4 + j];
      EXPECT_GE(post, 0);
      EXPECT_LE(post, 2);
    }
  }
  EXPECT_LE(rms.value(), test::mhc::kMixesBound);
}

// --- Bits

TEST_F(MhcPreBroadcast, ATokensBitsDoNotDependOnTheBatch) {
  const std::int64_t hidden = test::simulated() ? 64 : 4096;
  const std::int64_t most = test::simulated() ? 64 : 16384;
  const Problem all = problem(most, hidden);
  pre_broadcast(all.op(), stream);
  const Results whole = all.results();
  expect_right(all, all.op(), whole, most / 32);
  for (const std::int64_t tokens : {1, 2, 7, 8, 16, 17, 33, 64, 100, 128, 257, 1024, 4096}) {
    if (tokens >= most) break;
    // From the end, so that a token has another place than in the whole batch.
    const std::int64_t first = most - tokens;
    const std::span<const float> x(all.x(first).data(), static_cast<std::size_t>(tokens * hidden));
    const Problem part(all.weights(), {x.begin(), x.end()}, hidden);
    for (const test::Mode mode : test::kModes) {
      part.poison();
      test::run(mode, stream, [&] { pre_broadcast(part.op(), stream); });
      const Results got = part.results();
      const auto same = [&](const auto& a, const auto& b, std::int64_t length) {
        return std::ranges::equal(std::as_bytes(std::span(a)),
                                  std::as_bytes(std::span(b).subspan(
                                      static_cast<std::size_t>(first * length), a.size())));
      };
      EXPECT_TRUE(same(got.post, whole.post, kStreams)) << tokens;
      EXPECT_TRUE(same(got.comb, whole.comb, 16)) << tokens;
      EXPECT_TRUE(same(got.mixes, whole.mixes, kMixes)) << tokens;
      EXPECT_TRUE(same(got.layer_input, whole.layer_input, hidden)) << tokens;
      EXPECT_TRUE(same(got.residual_out, whole.residual_out, kStreams * hidden)) << tokens;
    }
  }
}

TEST_F(MhcPreBroadcast, RunToRunTheBitsAreTheSame) {
  const Problem in = problem(64, 1280);
  const test::Graph graph(stream, [&] { pre_broadcast(in.op(), stream); });
  pre_broadcast(in.op(), stream);
  const Results first = in.results();
  for (int run = 0; run < (test::simulated() ? 2 : 50); ++run) {
    in.poison();
    graph.launch(stream);
    EXPECT_TRUE(in.results() == first);
  }
}

TEST_F(MhcPreBroadcast, OptionalTensorsChangeNoOtherBits) {
  const Problem in = problem(9, 512);
  pre_broadcast(in.op(), stream);
  const Results whole = in.results();
  PreBroadcast op = in.op();
  op.mixes = {};
  op.residual_out = {};
  in.poison();
  pre_broadcast(op, stream);
  const Results got = in.results();
  EXPECT_EQ(got.post, whole.post);
  EXPECT_EQ(got.comb, whole.comb);
  EXPECT_EQ(got.layer_input, whole.layer_input);
  for (const float mix : got.mixes) EXPECT_EQ(test::bits<std::uint32_t>(mix), 0xCBCBCBCBU);
  for (const std::uint16_t value : got.residual_out) EXPECT_EQ(value, 0xCBCBU);
}

TEST_F(MhcPreBroadcast, RowsMayLieApart) {
  const Problem dense = problem(6, 264);
  pre_broadcast(dense.op(), stream);
  for (const std::int64_t gap : {8, 24}) {
    const Problem apart = problem(6, 264, gap);
    for (const test::Mode mode : test::kModes) {
      apart.poison();
      test::run(mode, stream, [&] { pre_broadcast(apart.op(), stream); });
      EXPECT_TRUE(apart.results() == dense.results()) << gap;
    }
  }
}

TEST_F(MhcPreBroadcast, OffsetsBeyondTheReachOfInt32) {
  if (test::simulated()) GTEST_SKIP() << "needs 4 GiB of device memory";
  for (const std::int64_t tokens : {2, 257}) {
    const Problem in = problem(tokens, 520);
    const PreBroadcast near = in.op();
    test::mhc::FarRows rows(tokens);
    PreBroadcast op = near;
    op.x = rows.far(near.x);
    op.residual_out = rows.far(near.residual_out);
    op.layer_input = rows.far(near.layer_input);
    pre_broadcast(op, stream);
    test::mhc::FarRows::copy(op.residual_out, near.residual_out);
    test::mhc::FarRows::copy(op.layer_input, near.layer_input);
    expect_right(in, op, in.results());
  }
}

// --- With a StableBuffer

TEST_F(MhcPreBroadcast, AReplayReadsTheRefittedWeight) {
  const std::int64_t hidden = 256;
  const auto width = static_cast<std::size_t>(hidden);
  Problem in = problem(5, hidden);
  const Weights old_weights = test::mhc::make_weights(4 * width, width, 20);
  const Weights new_weights = test::mhc::make_weights(4 * width, width, 21);
  const DeviceArray<float> fn(old_weights.fn);
  const holdfast::TensorView view(fn.data(), {kMixes, kStreams, hidden}, 0);
  holdfast::DeviceResource memory;
  holdfast::StableBuffer<float> broadcast{"hc_attn_fn_broadcast", memory};
  broadcast.finalize(holdfast::StreamSum<float>{view}, stream);
  PreBroadcast op = in.op();
  op.fn_broadcast = {broadcast.data(), hidden};
  const test::Graph graph(stream, [&] { pre_broadcast(op, stream); });
  for (const Weights* weights : {&old_weights, &new_weights}) {
    fn.upload(weights->fn);
    broadcast.finalize(holdfast::StreamSum<float>{view}, stream);
    in.poison();
    graph.launch(stream);
    sync();
    Weights now = in.weights();
    now.fn = test::mhc::stream_sum(weights->fn, width);
    const Results got = in.results();
    for (std::int64_t t = 0; t < in.tokens(); ++t) {
      const auto want = test::mhc::pre_broadcast(in.x(t), now, {});
      const auto at = static_cast<std::size_t>(t);
      EXPECT_EQ(
          test::mhc::difference(
              want, now, {},
              {std::span(got.post).subspan(at * 4, 4), std::span(got.comb).subspan(at * 16, 16),
               from_bits(std::span(got.layer_input).subspan(at * width, width))}),
          "");
    }
  }
}

TEST_F(MhcPreBroadcast, ViewsComeFromTensorViews) {
  const Problem in = problem(3, 64);
  pre_broadcast(in.op(), stream);
  const Results want = in.results();
  const auto view = [](auto* data, holdfast::Shape shape) {
    return holdfast::TensorView(data, shape, 0);
  };
  const PreBroadcast raw = in.op();
  PreBroadcast op;
  op.x = holdfast::mhc::Activations<const bf16>(view(raw.x.data(), {3, 64}));
  op.fn_broadcast = decltype(op.fn_broadcast)(view(raw.fn_broadcast.data(), {24, 64}));
  op.scale = decltype(op.scale)(view(raw.scale.data(), {3}));
  op.base = decltype(op.base)(view(raw.base.data(), {24}));
  op.norm_weight = decltype(op.norm_weight)(view(raw.norm_weight.data(), {64}));
  op.residual_out = decltype(op.residual_out)(view(raw.residual_out.data(), {3, 4, 64}));
  op.post = decltype(op.post)(view(raw.post.data(), {3, 4}));
  op.comb = decltype(op.comb)(view(raw.comb.data(), {3, 4, 4}));
  op.layer_input = decltype(op.layer_input)(view(raw.layer_input.data(), {3, 64}));
  op.mixes = decltype(op.mixes)(view(raw.mixes.data(), {3, 24}));
  in.poison();
  pre_broadcast(op, stream);
  EXPECT_TRUE(in.results() == want);
}

// --- Refusals

/// Refused with `rule` and `text`, and nothing written.
void expect_refused(const Problem& in, Rule rule, const std::string& text,
                    const std::function<void(PreBroadcast&)>& spoil, cudaStream_t stream) {
  PreBroadcast op = in.op();
  spoil(op);
  in.poison();
  const Results before = in.results();
  try {
    pre_broadcast(op, stream);
    ADD_FAILURE() << "accepted: " << text;
  } catch (const ContractError& error) {
    EXPECT_EQ(error.rule(), rule) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("mhc::pre_broadcast"), std::string::npos);
  }
  test::ok(cudaStreamSynchronize(stream));
  const Results after = in.results();
  EXPECT_EQ(std::memcmp(before.post.data(), after.post.data(), before.post.size() * 4), 0);
  EXPECT_EQ(before.layer_input, after.layer_input);
}

TEST_F(MhcPreBroadcast, RefusesWhatIsNotTheOp) {
  const std::int64_t hidden = 64;
  const Problem in = problem(4, hidden);
  const auto refused = [&](Rule rule, const std::string& text, const auto& spoil) {
    SCOPED_TRACE(text);
    expect_refused(in, rule, text, spoil, stream);
  };
  const PreBroadcast raw = in.op();
  // Extents
  for (const std::int64_t wrong : {0, 4, 7, 12, 1 << 21}) {
    refused(Rule::unsupported_shape, "hidden must be a multiple of 8", [&](PreBroadcast& op) {
      op.x = {raw.x.data(), 4, wrong};
    });
  }
  refused(Rule::unsupported_shape, "tokens", [&](PreBroadcast& op) {
    op.x = {raw.x.data(), std::int64_t{1} << 31, hidden};
  });
  refused(Rule::unsupported_shape, "tokens", [&](PreBroadcast& op) {
    op.x = {raw.x.data(), -1, hidden};
  });
  refused(Rule::shape_mismatch, "fn_broadcast is [24, 72]; expected [24, 64]",
          [&](PreBroadcast& op) {
            op.fn_broadcast = {raw.fn_broadcast.data(), 72};
          });
  refused(Rule::shape_mismatch, "norm_weight", [&](PreBroadcast& op) {
    op.norm_weight = {raw.norm_weight.data(), 56};
  });
  refused(Rule::shape_mismatch, "residual_out", [&](PreBroadcast& op) {
    op.residual_out = {raw.residual_out.data(), 3, hidden};
  });
  refused(Rule::shape_mismatch, "post", [&](PreBroadcast& op) { op.post = {raw.post.data(), 5}; });
  refused(Rule::shape_mismatch, "comb", [&](PreBroadcast& op) { op.comb = {raw.comb.data(), 3}; });
  refused(Rule::shape_mismatch, "layer_input", [&](PreBroadcast& op) {
    op.layer_input = {raw.layer_input.data(), 4, 72};
  });
  refused(Rule::shape_mismatch, "mixes", [&](PreBroadcast& op) {
    op.mixes = {raw.mixes.data(), 2};
  });
  // Required tensors that are not there
  refused(Rule::shape_mismatch, "fn_broadcast", [](PreBroadcast& op) { op.fn_broadcast = {}; });
  refused(Rule::shape_mismatch, "scale", [](PreBroadcast& op) { op.scale = {}; });
  refused(Rule::shape_mismatch, "base", [](PreBroadcast& op) { op.base = {}; });
  refused(Rule::shape_mismatch, "post", [](PreBroadcast& op) { op.post = {}; });
  refused(Rule::shape_mismatch, "comb", [](PreBroadcast& op) { op.comb = {}; });
  refused(Rule::shape_mismatch, "layer_input", [](PreBroadcast& op) { op.layer_input = {}; });
  // Addresses
  refused(Rule::null_pointer, "x has no address", [](PreBroadcast& op) {
    op.x = {nullptr, 4, 64};
  });
  refused(Rule::null_pointer, "scale", [](PreBroadcast& op) { op.scale = {nullptr}; });
  refused(Rule::null_pointer, "norm_weight", [](PreBroadcast& op) {
    op.norm_weight = {nullptr, 64};
  });
  refused(Rule::misaligned, "x: address", [&](PreBroadcast& op) {
    op.x = {raw.x.data() + 1, 4, hidden};
  });
  refused(Rule::misaligned, "fn_broadcast", [&](PreBroadcast& op) {
    op.fn_broadcast = {raw.fn_broadcast.data() + 2, hidden};
  });
  refused(Rule::misaligned, "norm_weight", [&](PreBroadcast& op) {
    op.norm_weight = {raw.norm_weight.data() + 4, hidden};
  });
  refused(Rule::misaligned, "x: address",
          [&](PreBroadcast& op) { op.x = raw.x.with_row_stride(hidden + 4); });
  refused(Rule::misaligned, "scale", [&](PreBroadcast& op) {
    op.scale = {
        reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(raw.scale.data()) + 2)};
  });
  // Rows
  refused(Rule::overlapping, "layer_input has rows",
          [&](PreBroadcast& op) { op.layer_input = raw.layer_input.with_row_stride(hidden - 8); });
  refused(Rule::overlapping, "x has rows",
          [&](PreBroadcast& op) { op.x = raw.x.with_row_stride(-8); });
  refused(Rule::size_overflow, "x: rows",
          [&](PreBroadcast& op) { op.x = raw.x.with_row_stride(std::int64_t{1} << 61); });
  refused(Rule::not_contiguous, "fn_broadcast", [&](PreBroadcast& op) {
    op.fn_broadcast = raw.fn_broadcast.with_row_stride(hidden + 8);
  });
  refused(Rule::not_contiguous, "norm_weight",
          [&](PreBroadcast& op) { op.norm_weight = raw.norm_weight.with_row_stride(2); });
  // Shared memory
  refused(Rule::overlapping, "share memory", [&](PreBroadcast& op) {
    op.layer_input = {const_cast<bf16*>(raw.x.data()), 4, hidden};
  });
  refused(Rule::overlapping, "comb and post", [&](PreBroadcast& op) {
    op.comb = {raw.post.data(), 4};
  });
  refused(Rule::overlapping, "layer_input and residual_out", [&](PreBroadcast& op) {
    op.layer_input = {raw.residual_out.data() + 3 * 4 * hidden, 4, hidden};
  });
  // Numbers
  for (const int iterations : {0, -1}) {
    refused(Rule::invalid_parameter, "Sinkhorn iterations",
            [&](PreBroadcast& op) { op.sinkhorn_iterations = iterations; });
  }
  for (const float wrong : {-1e-6F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refused(Rule::invalid_parameter, "rms_eps", [&](PreBroadcast& op) { op.rms_eps = wrong; });
    refused(Rule::invalid_parameter, "pre_eps", [&](PreBroadcast& op) { op.pre_eps = wrong; });
    refused(Rule::invalid_parameter, "norm_eps", [&](PreBroadcast& op) { op.norm_eps = wrong; });
    refused(Rule::invalid_parameter, "sinkhorn_eps",
            [&](PreBroadcast& op) { op.sinkhorn_eps = wrong; });
  }
  refused(Rule::invalid_parameter, "post_mult",
          [&](PreBroadcast& op) { op.post_mult = std::nanf(""); });
}

TEST_F(MhcPreBroadcast, ARefusalLeavesACaptureValid) {
  const Problem in = problem(2, 64);
  const test::Graph graph(stream, [&] {
    PreBroadcast op = in.op();
    op.sinkhorn_iterations = 0;
    EXPECT_THROW(pre_broadcast(op, stream), ContractError);
    pre_broadcast(in.op(), stream);
  });
  EXPECT_EQ(graph.nodes(), 1U);
  graph.launch(stream);
  sync();
  expect_right(in, in.op(), in.results());
}

TEST_F(MhcPreBroadcast, ColumnsOfOneMatrixDoNotOverlap) {
  const std::int64_t hidden = 64;
  const Problem in = problem(3, hidden);
  pre_broadcast(in.op(), stream);
  const Results want = in.results();
  // [tokens, 2 * hidden]: x on the left, layer_input on the right.
  const DeviceArray<std::uint16_t> both(3 * 128);
  for (std::int64_t t = 0; t < 3; ++t) {
    test::ok(cudaMemcpy(both.data() + t * 128, in.op().x.row(t), 128, cudaMemcpyDeviceToDevice));
  }
  test::ok(cudaDeviceSynchronize());
  PreBroadcast op = in.op();
  op.x = holdfast::mhc::Activations<const bf16>{as_bf16(both), 3, hidden}.with_row_stride(128);
  op.layer_input =
      holdfast::mhc::Activations<bf16>{as_bf16(both) + 64, 3, hidden}.with_row_stride(128);
  pre_broadcast(op, stream);
  const std::vector<std::uint16_t> got = both.download();
  for (std::size_t t = 0; t < 3; ++t) {
    EXPECT_TRUE(std::ranges::equal(std::span(got).subspan(t * 128 + 64, 64),
                                   std::span(want.layer_input).subspan(t * 64, 64)));
  }
  op.layer_input =
      holdfast::mhc::Activations<bf16>{as_bf16(both) + 56, 3, hidden}.with_row_stride(128);
  EXPECT_THROW(pre_broadcast(op, stream), ContractError);
}

TEST_F(MhcPreBroadcast, NoTokensLaunchNothing) {
  const Problem in = problem(0, 64);
  const test::Graph graph(stream, [&] { pre_broadcast(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 0U);
}

TEST_F(MhcPreBroadcast, ATensorViewThatDoesNotFitIsRefused) {
  using Comb = holdfast::mhc::View<float, holdfast::mhc::kOpen, 4, 4>;
  const DeviceArray<float> memory(96);
  const auto refused = [](Rule rule, const auto& make) {
    try {
      make();
      ADD_FAILURE() << "accepted";
    } catch (const ContractError& error) {
      EXPECT_EQ(error.rule(), rule) << error.what();
    }
  };
  const float* read_only = memory.data();
  refused(Rule::shape_mismatch, [&] { Comb{holdfast::TensorView(memory.data(), {2, 4, 3}, 0)}; });
  refused(Rule::shape_mismatch, [&] { Comb{holdfast::TensorView(memory.data(), {2, 16}, 0)}; });
  refused(Rule::read_only, [&] { Comb{holdfast::TensorView(read_only, {2, 4, 4}, 0)}; });
  refused(Rule::type_mismatch, [&] {
    Comb{holdfast::TensorView(reinterpret_cast<int*>(memory.data()), {2, 4, 4}, 0)};
  });
  refused(Rule::not_contiguous, [&] {
    Comb{holdfast::TensorView(memory.data(), {2, 4, 4}, holdfast::Strides{16, 1, 4}, 0)};
  });
  EXPECT_EQ(Comb{holdfast::TensorView(memory.data(), {2, 4, 4}, holdfast::Strides{32, 4, 1}, 0)}
                .row_stride(),
            32);
}

}  // namespace
