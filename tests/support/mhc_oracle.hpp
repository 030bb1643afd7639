// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// DeepSeek V4's mHC in f64, one token at a time; the comparison that holds a kernel to it; inputs
/// that expose what a kernel may get wrong; and the mistakes which that comparison must reject.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace test::mhc {

inline constexpr int kStreams = 4;
inline constexpr int kMixes = 24;

/// To the nearest bf16, ties to even; beyond the range to infinity.
[[nodiscard]] inline double round_bf16(double value) {
  constexpr double kLeastNormal = 0x1p-126;
  constexpr double kLeastStep = 0x1p-133;
  if (!std::isfinite(value)) return value;
  if (std::abs(value) < kLeastNormal) return std::nearbyint(value / kLeastStep) * kLeastStep;
  constexpr unsigned kDropped = 52 - 7;
  auto bits = std::bit_cast<std::uint64_t>(value);
  const std::uint64_t odd = bits >> kDropped & 1U;
  bits += (std::uint64_t{1} << (kDropped - 1)) - 1 + odd;
  bits &= ~((std::uint64_t{1} << kDropped) - 1);
  const auto rounded = std::bit_cast<double>(bits);
  return std::abs(rounded) < 0x1p128
             ? rounded
             : std::copysign(std::numeric_limits<double>::infinity(), value);
}

/// The bits of a value that bf16 has.
[[nodiscard]] inline std::uint16_t bf16_bits(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16U);
}
[[nodiscard]] inline float from_bf16_bits(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16U);
}

// --- What is computed

struct Constants {
  double rms_eps = 1e-6;
  double pre_eps = 1e-6;
  double sinkhorn_eps = 1e-6;
  double norm_eps = 1e-6;
  double post_mult = 2;
  int iterations = 20;
  bool rounded_squares = false;  ///< the RMSNorm's mean square is over the bf16 collapse
};

struct Weights {
  std::vector<float> fn;           ///< [rows, width], width = hidden or 4 * hidden
  std::vector<float> scale;        ///< [3], of the head [1]
  std::vector<float> base;         ///< [rows], 24 or, of the head, 4
  std::vector<float> norm_weight;  ///< [hidden], values of bf16; empty: no norm
};

/// A mistake that a kernel might make.
enum class Mutant : std::uint8_t {
  none,
  projection_dropped,
  one_iteration,
  comb_transposed,
  pre_eps_missing,
  post_factor_one,
  scales_swapped,  ///< those of post and comb
  streams_permuted,
  hidden_tail_dropped,    ///< the last 8 take no part in the projection
  mean_over_all_streams,  ///< the broadcast's mean square is divided by 4 * hidden
  norm_weight_ignored,
  norm_mode_swapped,
  unrounded_residual_projected,  ///< by post_pre: the mixes are of f32 streams
  old_residual_collapsed,        ///< by post_pre
};

/// What one token's operation gives. The vectors are over hidden.
struct Outcome {
  std::vector<double> mixes;  ///< after the RMS scale, before scale and base
  std::array<double, kStreams> pre{};
  std::array<double, kStreams> post{};  ///< like comb, zero of the head
  std::array<double, kStreams * kStreams> comb{};
  std::vector<double> collapsed;  ///< y, unrounded
  std::vector<double> reach;      ///< sum_i |R[i][h]|: what an error of pre does to y
  std::vector<double> size;       ///< sum_i |pre[i] R[i][h]|
};

/// In place on logits [4][4].
inline void sinkhorn(std::array<double, kStreams * kStreams>& c, int iterations, double eps) {
  const auto at = [&c](int i, int j) -> double& {
    return c[static_cast<std::size_t>(kStreams * i + j)];
  };
  for (int i = 0; i < kStreams; ++i) {
    double most = at(i, 0);
    for (int j = 1; j < kStreams; ++j) most = std::max(most, at(i, j));
    double sum = 0;
    for (int j = 0; j < kStreams; ++j) sum += at(i, j) = std::exp(at(i, j) - most);
    for (int j = 0; j < kStreams; ++j) at(i, j) = at(i, j) / sum + eps;
  }
  for (int iteration = 0; iteration < iterations; ++iteration) {
    for (int i = 0; iteration > 0 && i < kStreams; ++i) {
      double sum = eps;
      for (int j = 0; j < kStreams; ++j) sum += at(i, j);
      for (int j = 0; j < kStreams; ++j) at(i, j) /= sum;
    }
    for (int j = 0; j < kStreams; ++j) {
      double sum = eps;
      for (int i = 0; i < kStreams; ++i) sum += at(i, j);
      for (int i = 0; i < kStreams; ++i) at(i, j) /= sum;
    }
  }
}

namespace detail {

/// The mixes are of `projected`, their collapse is of `residual`. `streams` is 4, or 1 where they
/// are one stream that stands for four equal ones.
[[nodiscard]] inline Outcome run(std::span<const double> projected, std::span<const float> residual,
                                 std::size_t streams, const Weights& w, const Constants& constants,
                                 Mutant mutant) {
  const std::size_t width = projected.size();
  const std::size_t hidden = width / streams;
  const std::size_t rows = w.base.size();
  Outcome out;

  double squares = 0;
  for (const double value : projected) squares += value * value;
  double terms = static_cast<double>(width);
  if (mutant == Mutant::mean_over_all_streams) terms *= kStreams;
  const double rms = 1 / std::sqrt(squares / terms + constants.rms_eps);
  for (std::size_t mix = 0; mix < rows; ++mix) {
    double sum = 0;
    for (std::size_t k = 0; k < width; ++k) {
      if (mutant == Mutant::hidden_tail_dropped && k % hidden + 8 >= hidden) continue;
      sum += projected[k] * w.fn[mix * width + k];
    }
    out.mixes.push_back(mutant == Mutant::projection_dropped ? 0 : sum * rms);
  }

  const bool swapped = mutant == Mutant::scales_swapped;
  const auto logit = [&](std::size_t mix, std::size_t scale) {
    return out.mixes[mix] * w.scale[scale] + w.base[mix];
  };
  const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
  for (std::size_t i = 0; i < kStreams; ++i) {
    out.pre[i] = sigmoid(logit(i, 0));
    if (mutant != Mutant::pre_eps_missing) out.pre[i] += constants.pre_eps;
    if (rows == kStreams) continue;
    out.post[i] = sigmoid(logit(kStreams + i, swapped ? 2 : 1));
    if (mutant != Mutant::post_factor_one) out.post[i] *= constants.post_mult;
  }
  if (rows == kMixes) {
    for (std::size_t i = 0; i < out.comb.size(); ++i) {
      out.comb[i] = logit(2 * kStreams + i, swapped ? 1 : 2);
    }
    sinkhorn(out.comb, mutant == Mutant::one_iteration ? 1 : constants.iterations,
             constants.sinkhorn_eps);
  }
  const auto comb = out.comb;
  const auto pre = out.pre;
  const auto post = out.post;
  for (std::size_t i = 0; i < kStreams; ++i) {
    for (std::size_t j = 0; j < kStreams; ++j) {
      if (mutant == Mutant::comb_transposed) out.comb[kStreams * i + j] = comb[kStreams * j + i];
      if (mutant == Mutant::streams_permuted) {
        out.comb[kStreams * i + j] = comb[kStreams * ((i + 1) % kStreams) + (j + 1) % kStreams];
      }
    }
    if (mutant == Mutant::streams_permuted) {
      out.pre[i] = pre[(i + 1) % kStreams];
      out.post[i] = post[(i + 1) % kStreams];
    }
  }

  out.collapsed.assign(hidden, 0);
  out.reach.assign(hidden, 0);
  out.size.assign(hidden, 0);
  for (std::size_t i = 0; i < kStreams; ++i) {
    const std::span<const float> stream = residual.subspan(streams == 1 ? 0 : i * hidden, hidden);
    for (std::size_t h = 0; h < hidden; ++h) {
      out.collapsed[h] += out.pre[i] * stream[h];
      out.reach[h] += std::abs(stream[h]);
      out.size[h] += std::abs(out.pre[i] * stream[h]);
    }
  }
  return out;
}

/// The outcome where what is projected is what is collapsed.
[[nodiscard]] inline Outcome run(std::span<const float> p, std::size_t streams, const Weights& w,
                                 const Constants& constants, Mutant mutant) {
  return run(std::vector<double>(p.begin(), p.end()), p, streams, w, constants, mutant);
}

}  // namespace detail

/// mHC pre of one token, `residual` [4 * hidden] with stream after stream.
[[nodiscard]] inline Outcome pre(std::span<const float> residual, const Weights& w,
                                 const Constants& constants, Mutant mutant = Mutant::none) {
  return detail::run(residual, kStreams, w, constants, mutant);
}

/// mHC head of one token, the same with weights of 4 rows and no post or comb. What pre calls
/// layer_input is its result.
[[nodiscard]] inline Outcome head(std::span<const float> residual, const Weights& w,
                                  const Constants& constants, Mutant mutant = Mutant::none) {
  return detail::run(residual, kStreams, w, constants, mutant);
}

/// The same where all streams are `x` [hidden], with fn [24, hidden] summed over the streams.
[[nodiscard]] inline Outcome pre_broadcast(std::span<const float> x, const Weights& w,
                                           const Constants& constants,
                                           Mutant mutant = Mutant::none) {
  return detail::run(x, 1, w, constants, mutant);
}

/// layer_input as bf16 has it: the rounded collapse, or with a norm weight
/// bf16(bf16(y) * rho * weight).
[[nodiscard]] inline std::vector<float> layer_input(const Outcome& outcome, const Weights& w,
                                                    const Constants& constants,
                                                    Mutant mutant = Mutant::none) {
  const std::size_t hidden = outcome.collapsed.size();
  const bool rounded = constants.rounded_squares != (mutant == Mutant::norm_mode_swapped);
  std::vector<float> result(hidden);
  double squares = 0;
  for (const double y : outcome.collapsed) {
    const double value = rounded ? round_bf16(y) : y;
    squares += value * value;
  }
  const double rho = 1 / std::sqrt(squares / static_cast<double>(hidden) + constants.norm_eps);
  for (std::size_t h = 0; h < hidden; ++h) {
    double value = round_bf16(outcome.collapsed[h]);
    if (!w.norm_weight.empty()) {
      const double weight = mutant == Mutant::norm_weight_ignored ? 1 : w.norm_weight[h];
      value = round_bf16(value * rho * weight);
    }
    result[h] = static_cast<float>(value);
  }
  return result;
}

/// What post gives for one token, [4 * hidden] with stream after stream.
struct Mixed {
  std::vector<double> values;  ///< unrounded
  std::vector<double> size;    ///< the sum of the terms' magnitudes
};

/// mHC post of one token with x [hidden], residual [4 * hidden], post [4], comb [old][new stream].
[[nodiscard]] inline Mixed post(std::span<const float> x, std::span<const float> residual,
                                std::span<const float> post, std::span<const float> comb,
                                Mutant mutant = Mutant::none) {
  const std::size_t hidden = x.size();
  Mixed out{std::vector<double>(residual.size()), std::vector<double>(residual.size())};
  for (std::size_t j = 0; j < kStreams; ++j) {
    for (std::size_t h = 0; h < hidden; ++h) {
      double& value = out.values[j * hidden + h];
      double& size = out.size[j * hidden + h];
      const auto add = [&](double term) {
        value += term;
        size += std::abs(term);
      };
      const std::size_t from = mutant == Mutant::streams_permuted ? (j + 1) % kStreams : j;
      const bool dropped = mutant == Mutant::hidden_tail_dropped && h + 8 >= hidden;
      if (!dropped) add(double{post[from]} * x[h] * (mutant == Mutant::post_factor_one ? 0.5 : 1));
      for (std::size_t i = 0; i < kStreams; ++i) {
        const std::size_t at =
            mutant == Mutant::comb_transposed ? kStreams * from + i : kStreams * i + from;
        add(double{comb[at]} * residual[i * hidden + h]);
      }
    }
  }
  return out;
}

/// The new streams as bf16 has them.
[[nodiscard]] inline std::vector<float> residual_out(const Mixed& mixed) {
  std::vector<float> result;
  for (const double value : mixed.values) result.push_back(static_cast<float>(round_bf16(value)));
  return result;
}

/// What post_pre gives for one token.
struct MixedOutcome {
  Mixed mixed;
  Outcome outcome;
};

/// mHC post of one token and pre of its result, rounded to bf16. Of mistakes, comb_transposed is
/// made in the mixing, all others in pre.
[[nodiscard]] inline MixedOutcome post_pre(std::span<const float> x,
                                           std::span<const float> residual,
                                           std::span<const float> post_values,
                                           std::span<const float> comb, const Weights& w,
                                           const Constants& constants,
                                           Mutant mutant = Mutant::none) {
  const bool in_mixing = mutant == Mutant::comb_transposed;
  MixedOutcome out;
  out.mixed = post(x, residual, post_values, comb, in_mixing ? mutant : Mutant::none);
  const std::vector<float> streams = residual_out(out.mixed);
  const std::vector<double> rounded(streams.begin(), streams.end());
  out.outcome = detail::run(
      mutant == Mutant::unrounded_residual_projected ? out.mixed.values : rounded,
      mutant == Mutant::old_residual_collapsed ? residual : std::span<const float>(streams),
      kStreams, w, constants, in_mixing ? Mutant::none : mutant);
  return out;
}

// --- The comparison

/// What a kernel promises, absolute, for pre, post and comb.
inline constexpr double kCoefficientBound = 5e-6;
/// What it promises for mixes, relative, as a root mean square over many.
inline constexpr double kMixesBound = 5e-7;

/// What a kernel gave for one token. layer_input holds the values of bf16.
struct Given {
  std::span<const float> post;
  std::span<const float> comb;
  std::span<const float> layer_input;
};

namespace detail {

struct Interval {
  double low;
  double high;
};

/// All values of x * y; y is positive.
[[nodiscard]] inline Interval scaled(Interval x, Interval y) {
  return {x.low * (x.low < 0 ? y.high : y.low), x.high * (x.high < 0 ? y.low : y.high)};
}

[[nodiscard]] inline Interval widened(Interval x, double relative) {
  return {x.low - std::abs(x.low) * relative, x.high + std::abs(x.high) * relative};
}

[[nodiscard]] inline Interval squared(Interval x) {
  const double a = x.low * x.low;
  const double b = x.high * x.high;
  const bool through_zero = x.low < 0 && x.high > 0;
  return {through_zero ? 0 : std::min(a, b), std::max(a, b)};
}

[[nodiscard]] inline std::string text(const char* what, std::size_t index, double found,
                                      Interval expected) {
  char numbers[96];  // std::to_string would print 1e-20 as 0.000000
  (void)std::snprintf(numbers, sizeof numbers, "%.9g, expected %.9g to %.9g", found, expected.low,
                      expected.high);
  return std::string(what) + "[" + std::to_string(index) + "] is " + numbers;
}

[[nodiscard]] inline bool holds(Interval interval, double value) {  // no NaN
  return value >= interval.low && value <= interval.high;
}

/// Whether a kernel that keeps its promises can have collapsed the streams to `got`, which `what`
/// names. It has no tolerance of its own: it must be the correctly rounded result of intermediates
/// that the promise allows. With u = 2^-24:
/// - y is off by at most kCoefficientBound * sum |R[i]| (an error of each pre[i]) plus 4 u times
///   sum |pre[i] R[i]| (one rounding for each of the 4 terms that f32 adds).
/// - The mean square adds `hidden` positive terms. A relative error of u for each addition that a
///   term goes through: at most 64 in any sensible tree, so 64 u; the division and eps add 2 u.
/// - rho = 1 / sqrt: the root halves that; the root and the division round once each. 4 u.
/// - The two products round once each, 2 u, before the result is rounded to bf16.
/// Rounding is monotonic, so the ends of an interval give the ends of its image.
[[nodiscard]] inline std::string difference(const char* what, const Outcome& want, const Weights& w,
                                            const Constants& constants,
                                            std::span<const float> got) {
  constexpr double u = 0x1p-24;
  const std::size_t hidden = want.collapsed.size();
  if (got.size() != hidden) return "sizes differ";
  std::vector<Interval> rounded(hidden);  // bf16(y)
  Interval squares{0, 0};
  for (std::size_t h = 0; h < hidden; ++h) {
    const double error = kCoefficientBound * want.reach[h] + 4 * u * want.size[h];
    const Interval y{want.collapsed[h] - error, want.collapsed[h] + error};
    rounded[h] = {round_bf16(y.low), round_bf16(y.high)};
    const Interval square = squared(constants.rounded_squares ? rounded[h] : y);
    squares.low += square.low;
    squares.high += square.high;
  }
  Interval rho{1, 1};
  if (!w.norm_weight.empty()) {
    const Interval mean = widened(
        {squares.low / static_cast<double>(hidden), squares.high / static_cast<double>(hidden)},
        66 * u);
    rho = widened({1 / std::sqrt(mean.high + constants.norm_eps),
                   1 / std::sqrt(mean.low + constants.norm_eps)},
                  4 * u);
  }
  for (std::size_t h = 0; h < hidden; ++h) {
    Interval allowed = rounded[h];
    if (!w.norm_weight.empty()) {
      const double weight = w.norm_weight[h];
      allowed = scaled(allowed, rho);
      allowed = weight < 0 ? Interval{allowed.high * weight, allowed.low * weight}
                           : Interval{allowed.low * weight, allowed.high * weight};
      allowed = widened(allowed, 2 * u);
      allowed = {round_bf16(allowed.low), round_bf16(allowed.high)};
    }
    if (!holds(allowed, got[h])) return text(what, h, got[h], allowed);
  }
  return {};
}

}  // namespace detail

/// Whether a kernel that keeps its promises can have given `got`. Empty, or the first difference in
/// one line. post and comb: within kCoefficientBound; layer_input: see above.
[[nodiscard]] inline std::string difference(const Outcome& want, const Weights& w,
                                            const Constants& constants, const Given& got) {
  if (got.post.size() != want.post.size() || got.comb.size() != want.comb.size()) {
    return "sizes differ";
  }
  const auto around = [](double value) {
    return detail::Interval{value - kCoefficientBound, value + kCoefficientBound};
  };
  for (std::size_t i = 0; i < want.post.size(); ++i) {
    if (!detail::holds(around(want.post[i]), got.post[i])) {
      return detail::text("post", i, got.post[i], around(want.post[i]));
    }
  }
  for (std::size_t i = 0; i < want.comb.size(); ++i) {
    if (!detail::holds(around(want.comb[i]), got.comb[i])) {
      return detail::text("comb", i, got.comb[i], around(want.comb[i]));
    }
  }
  return detail::difference("layer_input", want, w, constants, got.layer_input);
}

/// Why `hidden_states` of one token are not what head promises, or an empty string.
[[nodiscard]] inline std::string head_difference(const Outcome& want, const Weights& w,
                                                 const Constants& constants,
                                                 std::span<const float> hidden_states) {
  return detail::difference("hidden_states", want, w, constants, hidden_states);
}

/// Why what post gave for one token is not what it promises, or an empty string. `got` [4 * hidden]
/// are values of bf16. With u = 2^-24, a product and four fused additions round once each, by at
/// most u times the sum of the terms' magnitudes; then it is rounded to bf16, which is monotonic.
[[nodiscard]] inline std::string difference(const Mixed& want, std::span<const float> got) {
  constexpr double u = 0x1p-24;
  if (got.size() != want.values.size()) return "sizes differ";
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = 5 * u * want.size[i];
    const detail::Interval allowed{round_bf16(want.values[i] - error),
                                   round_bf16(want.values[i] + error)};
    if (!detail::holds(allowed, got[i])) return detail::text("residual_out", i, got[i], allowed);
  }
  return {};
}

/// Why what post_pre gave for one token is not what it promises, or an empty string. What follows
/// from the new streams is compared with pre of those that were given: where f64 and f32 round one
/// to different bf16, all mixes differ by more than the promise.
[[nodiscard]] inline std::string difference(const Mixed& want, const Weights& w,
                                            const Constants& constants,
                                            std::span<const float> residual_out, const Given& got) {
  const std::string text = difference(want, residual_out);
  return text.empty() ? difference(pre(residual_out, w, constants), w, constants, got) : text;
}

/// sqrt(sum (got - want)^2 / sum want^2) over everything added.
class RelativeRms {
 public:
  void add(std::span<const double> want, std::span<const float> got) {
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double error = got[i] - want[i];
      error_ += error * error;
      size_ += want[i] * want[i];
    }
  }
  [[nodiscard]] double value() const { return std::sqrt(error_ / size_); }

 private:
  double error_ = 0;
  double size_ = 0;
};

// --- Inputs

/// Independent numbers of N(0, 1), the same everywhere.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : state_(seed) {}

  [[nodiscard]] double operator()() {  // Box-Muller
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * 3.14159265358979323846 * uniform());
  }

 private:
  [[nodiscard]] double uniform() {  // splitmix64, to [0, 1)
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return static_cast<double>((z ^ (z >> 31U)) >> 11U) * 0x1p-53;
  }

  std::uint64_t state_;
};

/// Of order-1 logits: fn of deviation 0.02, scale (0.5, 0.25, 1), base of deviation 1, a norm
/// weight around 1. With weaker ones (fn 1e-4, as some test suites have) a kernel that leaves the
/// projection out is within its tolerance.
[[nodiscard]] inline Weights make_weights(std::size_t width, std::size_t hidden, std::uint64_t seed,
                                          double deviation = 0.02) {
  Normal normal(seed);
  Weights w;
  w.fn.resize(kMixes * width);
  for (float& value : w.fn) value = static_cast<float>(deviation * normal());
  w.scale = {0.5F, 0.25F, 1.0F};
  w.base.resize(kMixes);
  for (float& value : w.base) value = static_cast<float>(normal());
  w.norm_weight.resize(hidden);
  for (float& value : w.norm_weight) {
    value = static_cast<float>(round_bf16(1 + 0.25 * normal()));
  }
  return w;
}

/// The part of `w` that a head has: its scale, and the rows of pre.
[[nodiscard]] inline Weights head_of(Weights w) {
  w.fn.resize(w.fn.size() / kMixes * kStreams);
  w.base.resize(kStreams);
  w.scale.resize(1);
  return w;
}

/// post and comb of several tokens as pre gives them: of order 1 and not symmetric.
struct Coefficients {
  std::vector<float> post;  ///< [tokens, 4]
  std::vector<float> comb;  ///< [tokens, 4, 4]
};
[[nodiscard]] inline Coefficients make_coefficients(std::int64_t tokens, std::uint64_t seed) {
  Normal normal(seed);
  Coefficients result;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < kStreams; ++i) {
      result.post.push_back(static_cast<float>(2 / (1 + std::exp(-normal()))));
    }
    std::array<double, kStreams * kStreams> matrix{};
    for (double& value : matrix) value = normal();
    sinkhorn(matrix, 20, 1e-6);
    for (const double value : matrix) result.comb.push_back(static_cast<float>(value));
  }
  return result;
}

/// fn [24, 4 * hidden] summed over the streams in f32, in their order.
[[nodiscard]] inline std::vector<float> stream_sum(std::span<const float> fn, std::size_t hidden) {
  std::vector<float> result(fn.size() / kStreams);
  for (std::size_t i = 0; i < result.size(); ++i) {
    const std::size_t first = i / hidden * kStreams * hidden + i % hidden;
    for (std::size_t s = 0; s < kStreams; ++s) result[i] += fn[first + s * hidden];
  }
  return result;
}

/// N(0, 1), rounded to bf16. After a million they repeat, with a prime period: no two tokens are
/// the same, and large batches do not take minutes.
[[nodiscard]] inline std::vector<float> make_activations(std::size_t count, std::uint64_t seed) {
  constexpr std::size_t kPeriod = 1'000'003;
  Normal normal(seed);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = i < kPeriod ? static_cast<float>(round_bf16(normal())) : values[i - kPeriod];
  }
  return values;
}

}  // namespace test::mhc
