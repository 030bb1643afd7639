// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Whether what a graph computed is fresh or stale: every element of every output against the f64
/// oracle.

#include "support/mhc_oracle.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace graph_replay {

enum class Verdict : std::uint8_t {
  fresh,  ///< every element is right for the new weights
  stale,  ///< every element is right for the old ones, and some are then wrong for the new
  wrong,  ///< neither
};

[[nodiscard]] constexpr const char* to_string(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::fresh: return "fresh";
    case Verdict::stale: return "STALE";
    case Verdict::wrong: return "WRONG";
  }
  return "unknown";
}

/// What a graph left of one token; bf16 as bits.
struct TokenResults {
  std::span<const float> post;
  std::span<const float> comb;
  std::span<const std::uint16_t> layer_input;
  std::span<const std::uint16_t> residual_out;
  std::span<const std::uint16_t> passed_on;  ///< a copy of layer_input by the graph's other nodes
};

/// Tells results of new weights from results of old ones.
class Judge {
 public:
  /// \param embeddings [tokens, hidden].
  Judge(const std::vector<float>& embeddings, const test::mhc::Weights& old_weights,
        const test::mhc::Weights& new_weights)
      : hidden_(old_weights.norm_weight.size()),
        embeddings_(embeddings),
        sides_{Side{old_weights, {}, {}}, Side{new_weights, {}, {}}} {
    const std::size_t tokens = embeddings.size() / hidden_;
    for (std::size_t token = 0; token < tokens; ++token) {
      for (Side& side : sides_) {
        side.wanted.push_back(test::mhc::pre_broadcast(x(token), side.weights, {}));
      }
      std::size_t telling = 0;
      const auto count = [&telling](const auto& a, const auto& b) {
        for (std::size_t i = 0; i < a.size(); ++i) {
          telling += std::abs(a[i] - b[i]) > 2 * test::mhc::kCoefficientBound ? 1U : 0U;
        }
      };
      count(sides_[0].wanted[token].post, sides_[1].wanted[token].post);
      count(sides_[0].wanted[token].comb, sides_[1].wanted[token].comb);
      telling_ += telling;
      blind_tokens_ += telling == 0 ? 1U : 0U;
    }
    for (Side& side : sides_) side.accepted.resize(tokens);
  }

  /// Coefficients, of all tokens, that old and new weights put further apart than two bounds: no
  /// value is right for both.
  [[nodiscard]] std::size_t telling() const { return telling_; }
  [[nodiscard]] std::size_t coefficients() const {
    return sides_[0].wanted.size() *
           (test::mhc::kStreams + test::mhc::kStreams * test::mhc::kStreams);
  }
  /// Tokens that cannot be judged, having no such coefficient.
  [[nodiscard]] std::size_t blind_tokens() const { return blind_tokens_; }

  /// The verdict on one token. The reason for `wrong` goes to `why`.
  [[nodiscard]] Verdict judge(std::size_t token, const TokenResults& got, std::string& why) {
    for (std::size_t i = 0; i < got.residual_out.size(); ++i) {
      if (got.residual_out[i] != test::mhc::bf16_bits(x(token)[i % hidden_])) {
        why = "residual_out[" + std::to_string(i) + "] is not the embedding";
        return Verdict::wrong;
      }
    }
    if (!std::ranges::equal(got.passed_on, got.layer_input)) {
      why = "the last node of the graph did not leave layer_input";
      return Verdict::wrong;
    }
    const std::string not_new = difference(sides_[1], token, got);
    if (not_new.empty()) return Verdict::fresh;
    const std::string not_old = difference(sides_[0], token, got);
    if (not_old.empty()) return Verdict::stale;
    why = "by the new weights " + not_new + "; by the old ones " + not_old;
    return Verdict::wrong;
  }

 private:
  struct Side {
    test::mhc::Weights weights;
    std::vector<test::mhc::Outcome> wanted;
    std::vector<std::vector<unsigned char>> accepted;  // of a token: the bits last found right
  };

  [[nodiscard]] std::span<const float> x(std::size_t token) const {
    return std::span(embeddings_).subspan(token * hidden_, hidden_);
  }

  /// Empty if right. Graphs of all sizes should give the same bits, so those are compared first.
  [[nodiscard]] std::string difference(Side& side, std::size_t token, const TokenResults& got) {
    std::vector<unsigned char> bits;
    const auto append = [&bits](const auto& values) {
      const auto bytes = std::as_bytes(values);
      std::ranges::transform(bytes, std::back_inserter(bits),
                             [](std::byte byte) { return std::to_integer<unsigned char>(byte); });
    };
    append(got.post);
    append(got.comb);
    append(got.layer_input);
    if (bits == side.accepted.at(token)) return {};
    std::vector<float> layer_input;
    for (const std::uint16_t value : got.layer_input) {
      layer_input.push_back(test::mhc::from_bf16_bits(value));
    }
    std::string found = test::mhc::difference(side.wanted.at(token), side.weights, {},
                                              {got.post, got.comb, layer_input});
    if (found.empty()) side.accepted.at(token) = std::move(bits);
    return found;
  }

  std::size_t hidden_;
  std::vector<float> embeddings_;
  std::array<Side, 2> sides_;  // old, new
  std::size_t telling_ = 0;
  std::size_t blind_tokens_ = 0;
};

}  // namespace graph_replay
