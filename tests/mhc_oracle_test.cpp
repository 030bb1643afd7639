// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The oracle against values that were computed apart from it, and the comparison against mistakes:
/// a test of a kernel is worth what these show.

#include "support/mhc_oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace test::mhc;  // NOLINT(google-build-using-namespace): all of it is under test

// --- Values of a small case: 4 streams, hidden 4

struct Small {
  std::vector<float> residual;
  std::vector<float> x;
  Weights weights;  // over all streams
};

Small small() {
  constexpr int kHidden = 4;
  Small result;
  for (int s = 0; s < kStreams; ++s) {
    for (int h = 0; h < kHidden; ++h) {
      result.residual.push_back(static_cast<float>((7 * s + 3 * h) % 11 - 5) / 4);
    }
  }
  for (int h = 0; h < kHidden; ++h) {
    result.x.push_back(static_cast<float>(2 * h - 3) / 4);
    result.weights.norm_weight.push_back(1 + static_cast<float>(h) / 8);
  }
  result.weights.scale = {0.5F, 0.75F, 1.25F};
  for (int o = 0; o < kMixes; ++o) {
    result.weights.base.push_back(static_cast<float>(3 * o % 7 - 3) / 8);
    for (int s = 0; s < kStreams; ++s) {
      for (int h = 0; h < kHidden; ++h) {
        result.weights.fn.push_back(static_cast<float>((5 * o + 3 * s + 2 * h) % 13 - 6) / 16);
      }
    }
  }
  return result;
}

Weights summed(const Weights& weights) {
  Weights result = weights;
  result.fn = stream_sum(weights.fn, weights.norm_weight.size());
  return result;
}

template <class Values>
std::vector<float> floats(const Values& values) {
  return {values.begin(), values.end()};
}

template <class Values>
void expect_near(const Values& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-11) << i;
}

TEST(MhcOracle, StreamSumsOfTheSmallCase) {
  const std::vector<float> sums = stream_sum(small().weights.fn, 4);
  const auto row = [&sums](std::size_t o) {
    return std::vector<float>(sums.begin() + static_cast<std::ptrdiff_t>(4 * o),
                              sums.begin() + static_cast<std::ptrdiff_t>(4 * o + 4));
  };
  EXPECT_EQ(row(0), (std::vector<float>{-0.375F, 0.125F, -0.1875F, 0.3125F}));
  EXPECT_EQ(row(1), (std::vector<float>{0.0625F, -0.25F, 0.25F, -0.0625F}));
  EXPECT_EQ(row(23), (std::vector<float>{-0.0625F, -0.375F, 0.125F, -0.1875F}));
}

TEST(MhcOracle, PreOfTheSmallCase) {
  const Small in = small();
  const Outcome out = pre(in.residual, in.weights, {});
  expect_near(out.pre, {0.416793002825, 0.487802355564, 0.433100510945, 0.714923122016});
  expect_near(out.post, {1.26493894668, 0.452024908994, 1.07698862526, 0.519026944562});
  expect_near(out.comb, {0.142048593187, 0.182603816154, 0.014023855904, 0.66132224766,
                         0.0630955347596, 0.396204974665, 0.384946443767, 0.155752968439,
                         0.768508715249, 0.0843080098657, 0.0292931817535, 0.117887299283,
                         0.0263461568069, 0.336882199315, 0.571735518574, 0.0650364846179});
  expect_near(out.collapsed, {0.400013571298, -0.0265607707339, 0.171446994979, 0.519884833392});
  Weights plain = in.weights;
  plain.norm_weight.clear();
  EXPECT_EQ(layer_input(out, plain, {}),
            (std::vector<float>{0.400390625F, -0.026611328125F, 0.171875F, 0.51953125F}));
  for (const bool rounded : {false, true}) {
    EXPECT_EQ(layer_input(out, in.weights, {.rounded_squares = rounded}),
              (std::vector<float>{1.1796875F, -0.08837890625F, 0.6328125F, 2.109375F}));
  }
}

TEST(MhcOracle, PreBroadcastOfTheSmallCase) {
  const Small in = small();
  const Outcome out = pre_broadcast(in.x, summed(in.weights), {});
  expect_near(out.pre, {0.504078727082, 0.506988246358, 0.682723407717, 0.475757726296});
  expect_near(out.post, {1.0097026249, 0.896336839631, 0.947251932565, 0.706129775512});
  expect_near(out.comb, {0.213450626935, 0.283240496359, 0.29942204927, 0.203885827436,
                         0.132428966736, 0.435865492635, 0.117954266582, 0.313750274047,
                         0.400839645811, 0.140788314144, 0.357026936021, 0.101344104024,
                         0.253279760518, 0.140104696862, 0.225595748127, 0.381018794493});
  expect_near(out.collapsed, {-1.62716108059, -0.542387026863, 0.542387026863, 1.62716108059});
  EXPECT_EQ(layer_input(out, in.weights, {}),
            (std::vector<float>{-1.34375F, -0.50390625F, 0.55859375F, 1.84375F}));
}

TEST(MhcOracle, HeadOfTheSmallCase) {
  const Small in = small();
  Weights w = head_of(in.weights);
  ASSERT_EQ(w.fn.size(), 4U * 16);
  ASSERT_EQ(w.base.size(), 4U);
  ASSERT_EQ(w.scale, std::vector<float>{0.5F});
  const Outcome out = head(in.residual, w, {});
  ASSERT_EQ(out.mixes.size(), 4U);
  expect_near(out.pre, {0.416793002825, 0.487802355564, 0.433100510945, 0.714923122016});
  expect_near(out.collapsed, {0.400013571298, -0.0265607707339, 0.171446994979, 0.519884833392});
  EXPECT_EQ(layer_input(out, w, {}),
            (std::vector<float>{1.1796875F, -0.08837890625F, 0.6328125F, 2.109375F}));
  w.norm_weight.clear();
  EXPECT_EQ(layer_input(out, w, {}),
            (std::vector<float>{0.400390625F, -0.026611328125F, 0.171875F, 0.51953125F}));
}

TEST(MhcOracle, PostOfTheSmallCase) {
  const Small in = small();
  const Outcome out = pre(in.residual, in.weights, {});
  const std::vector<float> post_values(out.post.begin(), out.post.end());
  const std::vector<float> comb(out.comb.begin(), out.comb.end());
  const std::vector<double> want{
      -1.44603884573,   -0.136022053606, 1.07293394915,    0.342003705551,
      0.00977777960488, 0.0593634359856, -0.0541885398457, 0.68997613752,
      0.067224740402,   -0.21655437305,  0.0133364692185,  1.22127378202,
      -1.11569457765,   -0.285032188064, 0.296159871009,   0.981482520262};
  // The coefficients are rounded to f32 here: 5 terms of magnitude below 2, each off by 2^-24.
  const auto expect = [](const std::vector<double>& got, const std::vector<double>& wanted) {
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-6) << i;
  };
  expect(post(in.x, in.residual, post_values, comb).values, want);
  expect(post(in.x, in.residual, post_values, comb, Mutant::comb_transposed).values,
         {-0.215322161792, -0.65148998484, 0.228817878755, 1.57272063304});
}

TEST(MhcOracle, PostPreOfTheSmallCase) {
  // post of the coefficients above, rounded by hand, and pre of that.
  const Small in = small();
  const Outcome before = pre(in.residual, in.weights, {});
  const MixedOutcome out =
      post_pre(in.x, in.residual, floats(before.post), floats(before.comb), in.weights, {});
  const std::vector<float> streams{-1.4453125F,   -0.1357421875F,  1.0703125F,        0.341796875F,
                                   0.009765625F,  0.059326171875F, -0.05419921875F,   0.69140625F,
                                   0.0673828125F, -0.216796875F,   0.01336669921875F, 1.21875F,
                                   -1.1171875F,   -0.28515625F,    0.296875F,         0.98046875F};
  EXPECT_EQ(residual_out(out.mixed), streams);
  const Outcome want = pre(streams, in.weights, {});
  EXPECT_EQ(out.outcome.mixes, want.mixes);
  EXPECT_EQ(out.outcome.comb, want.comb);
  EXPECT_EQ(out.outcome.collapsed, want.collapsed);
}

// --- Properties

std::vector<float> replicated(std::span<const float> x) {
  std::vector<float> result;
  for (int s = 0; s < kStreams; ++s) result.insert(result.end(), x.begin(), x.end());
  return result;
}

TEST(MhcOracle, BroadcastIsPreOfEqualStreams) {
  constexpr std::size_t kHidden = 256;
  // Multiples of 2^-12, whose sums are exact.
  Weights all = make_weights(4 * kHidden, kHidden, 1);
  for (float& value : all.fn) value = std::round(value * 4096) / 4096;
  const std::vector<float> x = make_activations(kHidden, 2);
  const Outcome a = pre_broadcast(x, summed(all), {});
  const Outcome b = pre(replicated(x), all, {});
  for (std::size_t i = 0; i < kMixes; ++i) EXPECT_NEAR(a.mixes[i], b.mixes[i], 1e-12);
  for (std::size_t i = 0; i < a.comb.size(); ++i) EXPECT_NEAR(a.comb[i], b.comb[i], 1e-12);
  for (std::size_t h = 0; h < kHidden; ++h) EXPECT_NEAR(a.collapsed[h], b.collapsed[h], 1e-12);
}

TEST(MhcOracle, ColumnsSumToOneAndStrongLogitsStayFinite) {
  for (const double strength : {0.1, 1.0, 8.0, 100.0}) {
    Normal normal(3);
    for (int trial = 0; trial < 100; ++trial) {
      std::array<double, 16> c{};
      for (double& value : c) value = strength * normal();
      sinkhorn(c, 20, 1e-6);
      for (std::size_t j = 0; j < 4; ++j) {
        EXPECT_NEAR(c[j] + c[4 + j] + c[8 + j] + c[12 + j], 1, 2e-6);
        for (std::size_t i = 0; i < 4; ++i) EXPECT_GE(c[4 * i + j], 0);
      }
    }
  }
}

TEST(MhcOracle, OneIterationIsASoftmaxAndOneColumnStep) {
  std::array<double, 16> c{};
  c[0] = std::log(3.0);  // the first row's softmax is 3/6 1/6 1/6 1/6, the others are 1/4
  sinkhorn(c, 1, 0);
  EXPECT_NEAR(c[0], 0.5 / 1.25, 1e-12);
  EXPECT_NEAR(c[4], 0.25 / 1.25, 1e-12);
  EXPECT_NEAR(c[1], (1.0 / 6) / (1.0 / 6 + 0.75), 1e-12);
}

TEST(MhcOracle, ZeroRowsGiveTheCoefficientsOfTheBase) {
  const Weights w = make_weights(64, 64, 4);
  for (const double eps : {1e-6, 1e-20}) {
    const std::vector<float> zero(64, 0);
    const Outcome out = pre_broadcast(zero, w, {.rms_eps = eps});
    for (const double mix : out.mixes) EXPECT_EQ(mix, 0);
    EXPECT_NEAR(out.pre[1], 1 / (1 + std::exp(-double{w.base[1]})) + 1e-6, 1e-15);
    for (const float value : layer_input(out, w, {})) EXPECT_EQ(value, 0);
  }
}

TEST(MhcOracle, ScaleOfTheActivationsDoesNotMatter) {
  const Weights w = make_weights(64, 64, 5);
  std::vector<float> x = make_activations(64, 6);
  const Outcome a = pre_broadcast(x, w, {.rms_eps = 1e-20});
  for (float& value : x) value *= 1024;
  const Outcome b = pre_broadcast(x, w, {.rms_eps = 1e-20});
  for (std::size_t i = 0; i < kMixes; ++i) EXPECT_NEAR(a.mixes[i], b.mixes[i], 1e-12);
}

TEST(MhcOracle, RoundsToBf16WithTiesToEven) {
  EXPECT_EQ(round_bf16(1 + 0x1p-8), 1);                   // a tie, down to even
  EXPECT_EQ(round_bf16(1 + 3 * 0x1p-8), 1 + 2 * 0x1p-7);  // a tie, up to even
  EXPECT_EQ(round_bf16(1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-7);
  EXPECT_EQ(round_bf16(-(1 + 0x1p-8 + 0x1p-40)), -(1 + 0x1p-7));
  EXPECT_EQ(round_bf16(0x1p-134), 0);
  EXPECT_EQ(round_bf16(0x1p-133 * 1.5), 0x1p-132);
  EXPECT_EQ(round_bf16(0x1.FFp127), std::numeric_limits<double>::infinity());
  EXPECT_EQ(round_bf16(-0x1.FFp127), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(round_bf16(std::nan(""))));
  EXPECT_EQ(from_bf16_bits(bf16_bits(-1.5F)), -1.5F);
}

// --- The comparison

/// What a kernel leaves of a token. Of the head, layer_input is its result.
struct Left {
  std::vector<float> mixes;
  std::vector<float> post;
  std::vector<float> comb;
  std::vector<float> layer_input;

  [[nodiscard]] Given given() const { return {post, comb, layer_input}; }
};

/// A perfect kernel with one mistake in it.
Left perfect(const Outcome& out, const Weights& w, const Constants& constants,
             Mutant mutant = Mutant::none) {
  return {floats(out.mixes), floats(out.post), floats(out.comb),
          layer_input(out, w, constants, mutant)};
}

/// sum a[k] * b[k] in f32: `strands` chains side by side, then added by halves. A power of two.
float dot(std::span<const float> a, std::span<const float> b, std::size_t strands) {
  std::vector<float> sums(strands, 0);
  for (std::size_t k = 0; k < a.size(); ++k) {
    sums[k % strands] = std::fma(a[k], b[k], sums[k % strands]);
  }
  for (std::size_t half = strands / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

/// An honest kernel: f32 throughout.
Left honest(std::span<const float> p, std::size_t streams, const Weights& w,
            const Constants& constants, std::size_t strands) {
  const std::size_t hidden = p.size() / streams;
  float squares = dot(p, p, strands);
  const float rms =
      1 / std::sqrt(squares / static_cast<float>(p.size()) + static_cast<float>(constants.rms_eps));
  Left left;
  for (std::size_t mix = 0; mix < w.base.size(); ++mix) {
    const std::span<const float> row = std::span(w.fn).subspan(mix * p.size(), p.size());
    left.mixes.push_back(dot(p, row, strands) * rms);
  }
  const auto logit = [&](std::size_t mix, std::size_t scale) {
    return left.mixes[mix] * w.scale[scale] + w.base[mix];
  };
  std::vector<float> pre;
  for (std::size_t i = 0; i < kStreams; ++i) {
    pre.push_back(1 / (1 + std::exp(-logit(i, 0))) + static_cast<float>(constants.pre_eps));
    if (w.base.size() == kStreams) continue;
    left.post.push_back(static_cast<float>(constants.post_mult) /
                        (1 + std::exp(-logit(kStreams + i, 1))));
  }
  if (w.base.size() == kMixes) {
    std::array<double, 16> comb{};
    for (std::size_t i = 0; i < comb.size(); ++i) comb[i] = logit(2 * kStreams + i, 2);
    sinkhorn(comb, constants.iterations, constants.sinkhorn_eps);
    left.comb = floats(comb);
  }

  std::vector<float> y(hidden, 0);
  for (std::size_t i = 0; i < kStreams; ++i) {
    for (std::size_t h = 0; h < hidden; ++h) {
      y[h] = std::fma(pre[i], p[(streams == 1 ? 0 : i * hidden) + h], y[h]);
    }
  }
  const auto bf16 = [](float value) { return static_cast<float>(round_bf16(value)); };
  std::vector<float> counted = y;
  for (float& value : counted) value = constants.rounded_squares ? bf16(value) : value;
  squares = dot(counted, counted, strands);
  const float rho =
      1 / std::sqrt(squares / static_cast<float>(hidden) + static_cast<float>(constants.norm_eps));
  for (std::size_t h = 0; h < hidden; ++h) {
    left.layer_input.push_back(w.norm_weight.empty() ? bf16(y[h])
                                                     : bf16(bf16(y[h]) * rho * w.norm_weight[h]));
  }
  return left;
}

struct Case {
  std::size_t streams;
  std::size_t hidden;
  bool norm;
  bool rounded_squares;
};

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const std::size_t streams : {1U, 4U}) {
    for (const std::size_t hidden : {64U, 136U, 2048U}) {
      result.push_back({streams, hidden, false, false});
      result.push_back({streams, hidden, true, false});
      result.push_back({streams, hidden, true, true});
    }
  }
  return result;
}

Weights weights_of(const Case& c, std::uint64_t seed) {
  Weights w = make_weights(c.streams * c.hidden, c.hidden, seed);
  if (!c.norm) w.norm_weight.clear();
  return w;
}

Outcome run(const Case& c, std::span<const float> p, const Weights& w, const Constants& constants,
            Mutant mutant = Mutant::none) {
  return c.streams == 1 ? pre_broadcast(p, w, constants, mutant) : pre(p, w, constants, mutant);
}

TEST(MhcComparison, AcceptsWhatKeepsThePromise) {
  for (const Case& c : cases()) {
    const Weights w = weights_of(c, 7);
    const Constants constants{.rounded_squares = c.rounded_squares};
    RelativeRms rms;
    for (std::uint64_t token = 0; token < 20; ++token) {
      const std::vector<float> p = make_activations(c.streams * c.hidden, 100 + token);
      const Outcome want = run(c, p, w, constants);
      EXPECT_EQ(difference(want, w, constants, perfect(want, w, constants).given()), "");
      const Left left = honest(p, c.streams, w, constants, 256);
      EXPECT_EQ(difference(want, w, constants, left.given()), "") << c.streams << ' ' << c.hidden;
      rms.add(want.mixes, left.mixes);
    }
    EXPECT_LT(rms.value(), kMixesBound);
    EXPECT_GT(rms.value(), 0);
  }
}

TEST(MhcComparison, OfTheHeadAcceptsWhatKeepsThePromise) {
  for (const Case& c : cases()) {
    if (c.streams == 1) continue;
    const Weights w = head_of(weights_of(c, 7));
    const Constants constants{.rounded_squares = c.rounded_squares};
    RelativeRms rms;
    for (std::uint64_t token = 0; token < 20; ++token) {
      const std::vector<float> p = make_activations(4 * c.hidden, 100 + token);
      const Outcome want = head(p, w, constants);
      EXPECT_EQ(head_difference(want, w, constants, layer_input(want, w, constants)), "");
      const Left left = honest(p, 4, w, constants, 256);
      EXPECT_EQ(head_difference(want, w, constants, left.layer_input), "") << c.hidden;
      rms.add(want.mixes, left.mixes);
    }
    EXPECT_LT(rms.value(), kMixesBound);
    EXPECT_GT(rms.value(), 0);
  }
}

TEST(MhcComparison, MixesShowASumInOneChain) {
  const Case c{4, 2048, false, false};
  const Weights w = weights_of(c, 7);
  RelativeRms rms;
  for (std::uint64_t token = 0; token < 20; ++token) {
    const std::vector<float> p = make_activations(c.streams * c.hidden, 100 + token);
    rms.add(run(c, p, w, {}).mixes, honest(p, c.streams, w, {}, 1).mixes);
  }
  EXPECT_GT(rms.value(), kMixesBound);
}

/// Where the comparison finds a mistake, at constants that make each visible: pre_eps is 1e-2.
std::string found(const Case& c, Mutant mutant, std::span<const float> p) {
  const Weights w = weights_of(c, 8);
  const Constants constants{.pre_eps = 1e-2, .rounded_squares = c.rounded_squares};
  const Outcome wrong = run(c, p, w, constants, mutant);
  return difference(run(c, p, w, constants), w, constants,
                    perfect(wrong, w, constants, mutant).given());
}

TEST(MhcComparison, RejectsEveryMistake) {
  for (const Case& c : cases()) {
    const std::vector<float> p = make_activations(c.streams * c.hidden, 200);
    const auto expect_at = [&](Mutant mutant, const char* output) {
      const std::string text = found(c, mutant, p);
      EXPECT_EQ(text.rfind(output, 0), 0U)
          << "mutant " << static_cast<int>(mutant) << ", streams " << c.streams << ", hidden "
          << c.hidden << ": " << (text.empty() ? "accepted" : text);
    };
    EXPECT_EQ(found(c, Mutant::none, p), "");
    expect_at(Mutant::projection_dropped, "post");
    expect_at(Mutant::one_iteration, "comb");
    expect_at(Mutant::comb_transposed, "comb");
    expect_at(Mutant::post_factor_one, "post");
    expect_at(Mutant::scales_swapped, "post");
    expect_at(Mutant::streams_permuted, "post");
    expect_at(Mutant::hidden_tail_dropped, "post");
    if (c.streams == 1) expect_at(Mutant::mean_over_all_streams, "post");
    // The norm of four equal streams takes a common factor out again: without it, or with streams
    // that differ, layer_input shows a missing eps.
    if (!c.norm || c.streams == 4) expect_at(Mutant::pre_eps_missing, "layer_input");
    if (c.norm) expect_at(Mutant::norm_weight_ignored, "layer_input");
  }
}

TEST(MhcComparison, OfPostRejectsEveryMistake) {
  for (const std::size_t hidden : {64U, 136U, 2048U}) {
    const std::vector<float> x = make_activations(hidden, 400);
    const std::vector<float> residual = make_activations(4 * hidden, 401);
    const Weights w = make_weights(4 * hidden, hidden, 402);
    const Outcome before = pre(residual, w, {});
    const std::vector<float> post_values = floats(before.post);
    const std::vector<float> comb = floats(before.comb);
    const Mixed want = post(x, residual, post_values, comb);
    const auto left = [&](Mutant mutant) {
      std::vector<float> values;
      for (const double value : post(x, residual, post_values, comb, mutant).values) {
        values.push_back(static_cast<float>(round_bf16(value)));
      }
      return values;
    };
    std::vector<float> got = left(Mutant::none);
    EXPECT_EQ(difference(want, got), "");
    for (const Mutant mutant : {Mutant::comb_transposed, Mutant::post_factor_one,
                                Mutant::streams_permuted, Mutant::hidden_tail_dropped}) {
      EXPECT_NE(difference(want, left(mutant)), "") << static_cast<int>(mutant);
    }
    for (const std::size_t i : {std::size_t{0}, hidden, 4 * hidden - 1}) {  // one element off
      const float right = got[i];
      got[i] = from_bf16_bits(static_cast<std::uint16_t>(bf16_bits(right) + 2));
      EXPECT_NE(difference(want, got), "") << i;
      got[i] = std::nanf("");
      EXPECT_NE(difference(want, got), "") << i;
      got[i] = right;
    }
  }
}

TEST(MhcComparison, OfTheHeadRejectsEveryMistake) {
  for (const Case& c : cases()) {
    if (c.streams == 1) continue;
    const Weights w = head_of(weights_of(c, 8));
    const Constants constants{.pre_eps = 1e-2, .rounded_squares = c.rounded_squares};
    const std::vector<float> p = make_activations(4 * c.hidden, 200);
    const Outcome want = head(p, w, constants);
    const auto text = [&](Mutant mutant) {
      return head_difference(want, w, constants,
                             layer_input(head(p, w, constants, mutant), w, constants, mutant));
    };
    EXPECT_EQ(text(Mutant::none), "");
    std::vector<Mutant> mistakes{Mutant::projection_dropped, Mutant::pre_eps_missing,
                                 Mutant::streams_permuted, Mutant::hidden_tail_dropped};
    if (c.norm) mistakes.push_back(Mutant::norm_weight_ignored);
    for (const Mutant mutant : mistakes) {
      EXPECT_EQ(text(mutant).rfind("hidden_states", 0), 0U)
          << "mutant " << static_cast<int>(mutant) << ", hidden " << c.hidden;
    }
    std::vector<float> got = layer_input(want, w, constants);
    got.back() = std::nanf("");
    EXPECT_NE(head_difference(want, w, constants, got), "");
    got.pop_back();
    EXPECT_NE(head_difference(want, w, constants, got), "");
  }
}

TEST(MhcComparison, OfPostPreRejectsEveryMistake) {
  for (const Case& c : cases()) {
    if (c.streams == 1) continue;
    const Weights w = weights_of(c, 8);
    const Constants constants{.pre_eps = 1e-2, .rounded_squares = c.rounded_squares};
    const std::vector<float> x = make_activations(c.hidden, 500);
    const std::vector<float> residual = make_activations(4 * c.hidden, 501);
    const Coefficients before = make_coefficients(1, 502);
    const auto of = [&](Mutant mutant) {
      return post_pre(x, residual, before.post, before.comb, w, constants, mutant);
    };
    const MixedOutcome want = of(Mutant::none);
    const auto text = [&](Mutant mutant) {
      const MixedOutcome wrong = of(mutant);
      return difference(want.mixed, w, constants, residual_out(wrong.mixed),
                        perfect(wrong.outcome, w, constants, mutant).given());
    };
    EXPECT_EQ(text(Mutant::none), "");
    const auto expect_at = [&](Mutant mutant, const char* output) {
      EXPECT_EQ(text(mutant).rfind(output, 0), 0U)
          << "mutant " << static_cast<int>(mutant) << ", hidden " << c.hidden << ": "
          << text(mutant);
    };
    expect_at(Mutant::comb_transposed, "residual_out");
    expect_at(Mutant::unrounded_residual_projected, "post");
    expect_at(Mutant::old_residual_collapsed, "layer_input");
    expect_at(Mutant::projection_dropped, "post");
    expect_at(Mutant::one_iteration, "comb");
    expect_at(Mutant::pre_eps_missing, "layer_input");
    expect_at(Mutant::post_factor_one, "post");
    expect_at(Mutant::scales_swapped, "post");
    expect_at(Mutant::streams_permuted, "post");
    expect_at(Mutant::hidden_tail_dropped, "post");
    if (c.norm) expect_at(Mutant::norm_weight_ignored, "layer_input");
  }
}

TEST(MhcComparison, ShowsSmallNumbers) {
  const Mixed want{{1e-20}, {0}};
  const std::vector<float> got{3e-20F};
  EXPECT_NE(difference(want, got).find("is 2.9999999e-20, expected 1.000"), std::string::npos)
      << difference(want, got);
}

TEST(MhcComparison, TellsTheNormModesApart) {
  // Equal numbers round the same way, so the mean squares differ as much as a number from its bf16.
  // Every third element is zero: without them the norm gives 1, and the weights come out as they
  // are in both modes.
  for (const bool rounded : {false, true}) {
    for (const std::size_t streams : {1U, 4U}) {
      const Case c{streams, 2048, true, rounded};
      std::vector<float> p;
      double error = 0;
      for (float value = 1; value < 2 && error < 1e-3; value += 0x1p-4F) {
        p.resize(streams * c.hidden);
        for (std::size_t k = 0; k < p.size(); ++k) p[k] = k % c.hidden % 3 == 0 ? 0 : value;
        const double y = run(c, p, weights_of(c, 8), {.pre_eps = 1e-2}).collapsed[1];
        error = std::abs(round_bf16(y) / y - 1);
      }
      ASSERT_GE(error, 1e-3);
      EXPECT_EQ(found(c, Mutant::none, p), "");
      EXPECT_EQ(found(c, Mutant::norm_mode_swapped, p).rfind("layer_input", 0), 0U);
    }
    // The head collapses with weights of its own: again numbers that all round the same way.
    const Case c{4, 2048, true, rounded};
    const Weights w = head_of(weights_of(c, 8));
    const Constants constants{.rounded_squares = rounded};
    std::vector<float> p(4 * c.hidden);
    double error = 0;
    for (float value = 1; value < 2 && error < 1e-3; value += 0x1p-4F) {
      for (std::size_t k = 0; k < p.size(); ++k) p[k] = k % c.hidden % 3 == 0 ? 0 : value;
      const double y = head(p, w, constants).collapsed[1];
      error = std::abs(round_bf16(y) / y - 1);
    }
    ASSERT_GE(error, 1e-3);
    const Outcome want = head(p, w, constants);
    EXPECT_EQ(head_difference(want, w, constants, layer_input(want, w, constants)), "");
    EXPECT_NE(head_difference(want, w, constants,
                              layer_input(want, w, constants, Mutant::norm_mode_swapped)),
              "");
  }
}

TEST(MhcComparison, RejectsOneWrongElementOfAnyOutput) {
  const Case c{1, 136, true, false};
  const Weights w = weights_of(c, 9);
  const std::vector<float> p = make_activations(c.hidden, 300);
  const Outcome want = run(c, p, w, {});
  const Left good = perfect(want, w, {});
  const auto expect_rejected = [&](const Left& left, const char* output) {
    EXPECT_EQ(difference(want, w, {}, left.given()).rfind(output, 0), 0U) << output;
  };
  for (std::size_t i = 0; i < good.comb.size(); ++i) {
    Left left = good;
    left.comb[i] += 1e-5F;
    expect_rejected(left, "comb[");
    left.comb[i] = std::nanf("");
    expect_rejected(left, "comb[");
  }
  for (std::size_t i = 0; i < good.post.size(); ++i) {
    Left left = good;
    left.post[i] -= 1e-5F;
    expect_rejected(left, "post[");
    left.post[i] = std::nanf("");
    expect_rejected(left, "post[");
  }
  std::size_t explained = 0;  // elements so near a tie that both neighbours are right
  for (std::size_t h = 0; h < good.layer_input.size(); ++h) {
    Left left = good;
    left.layer_input[h] = std::nanf("");
    expect_rejected(left, "layer_input[");
    for (const int step : {-1, 1}) {
      left.layer_input[h] =
          from_bf16_bits(static_cast<std::uint16_t>(bf16_bits(good.layer_input[h]) + step));
      explained += difference(want, w, {}, left.given()).empty() ? 1U : 0U;
    }
  }
  EXPECT_LE(explained, 3U);
}

}  // namespace
