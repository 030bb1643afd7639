// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The mHC operations that are timed: their tensors, bytes and calls, and what their results must
/// be.

#include <holdfast/kernels.cuh>

#include "device.hpp"
#include "mhc/sets.cuh"
#include "support/mhc_oracle.hpp"

#include <cuda/stream_ref>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace holdfast::bench {

using mhc::bf16;
using mhc::kStreams;

struct Shape {
  std::int64_t hidden;
  std::int64_t tokens;
};

inline std::vector<bf16> to_bf16(std::span<const float> values) {
  std::vector<bf16> result;
  result.reserve(values.size());
  for (const float value : values) result.push_back(__float2bfloat16_rn(value));
  return result;
}

inline std::vector<float> to_float(std::span<const bf16> values) {
  std::vector<float> result;
  result.reserve(values.size());
  for (const bf16 value : values) result.push_back(__bfloat162float(value));
  return result;
}

/// Row `index` of a matrix whose rows have `length` elements.
template <class T>
std::span<const T> row_of(const std::vector<T>& matrix, std::int64_t index, std::int64_t length) {
  return std::span(matrix).subspan(static_cast<std::size_t>(index * length),
                                   static_cast<std::size_t>(length));
}

// --- Inputs, and what they must lead to

/// Weights of one operation, and what the oracle makes of each of the distinct tokens.
struct Reference {
  test::mhc::Weights weights;
  std::vector<bf16> norm_weight;
  std::vector<test::mhc::Outcome> outcomes;
};

/// All of one hidden. The values of activations are those of bf16.
struct Inputs {
  std::vector<float> x;         // [kDistinct, hidden]
  std::vector<float> residual;  // [kDistinct, 4, hidden]
  std::vector<bf16> x_bf16;
  std::vector<bf16> residual_bf16;
  Reference pre;
  Reference pre_broadcast;
  Reference head;
  std::vector<float> post;  // [kDistinct, 4], what pre gives, for the operations that take it
  std::vector<float> comb;  // [kDistinct, 4, 4], likewise

  /// Made once, since the oracle takes its time, and kept.
  static const Inputs& of(std::int64_t hidden) {
    static std::map<std::int64_t, std::unique_ptr<const Inputs>> made;
    auto& inputs = made[hidden];
    if (inputs == nullptr) inputs = std::make_unique<const Inputs>(make(hidden));
    return *inputs;
  }

 private:
  static Inputs make(std::int64_t hidden) {
    const auto width = static_cast<std::size_t>(hidden);
    Inputs in;
    in.x = test::mhc::make_activations(kDistinct * width, 1);
    in.residual = test::mhc::make_activations(kDistinct * kStreams * width, 2);
    in.x_bf16 = to_bf16(in.x);
    in.residual_bf16 = to_bf16(in.residual);
    in.pre.weights = test::mhc::make_weights(kStreams * width, width, 3);
    in.pre_broadcast.weights = test::mhc::make_weights(width, width, 4);
    in.head.weights = test::mhc::head_of(test::mhc::make_weights(kStreams * width, width, 5));
    for (Reference* reference : {&in.pre, &in.pre_broadcast, &in.head}) {
      reference->norm_weight = to_bf16(reference->weights.norm_weight);
    }
    for (std::int64_t token = 0; token < kDistinct; ++token) {
      const auto residual = row_of(in.residual, token, kStreams * hidden);
      in.pre.outcomes.push_back(test::mhc::pre(residual, in.pre.weights, test::mhc::Constants{}));
      in.head.outcomes.push_back(
          test::mhc::head(residual, in.head.weights, test::mhc::Constants{}));
      in.pre_broadcast.outcomes.push_back(test::mhc::pre_broadcast(
          row_of(in.x, token, hidden), in.pre_broadcast.weights, test::mhc::Constants{}));
      const test::mhc::Outcome& outcome = in.pre.outcomes.back();
      for (const double value : outcome.post) in.post.push_back(static_cast<float>(value));
      for (const double value : outcome.comb) in.comb.push_back(static_cast<float>(value));
    }
    return in;
  }
};

/// The weights of an operation that projects.
struct DeviceWeights {
  Tensor<float> fn;
  Tensor<float> scale;
  Tensor<float> base;
  Tensor<bf16> norm_weight;

  DeviceWeights(Sets& sets, const Reference& reference)
      : fn(sets.weight(reference.weights.fn)),
        scale(sets.weight(reference.weights.scale)),
        base(sets.weight(reference.weights.base)),
        norm_weight(sets.weight(reference.norm_weight)) {}
};

/// The results of pre, likewise.
struct PreResults {
  Tensor<float> post;
  Tensor<float> comb;
  Tensor<bf16> layer_input;

  PreResults(Sets& sets, std::int64_t hidden)
      : post(sets.results<float>(kStreams)),
        comb(sets.results<float>(kStreams * kStreams)),
        layer_input(sets.results<bf16>(hidden)) {}

  /// Empty, or the first difference from what the oracle allows.
  [[nodiscard]] std::string difference(const Sets& sets, const Shape& shape,
                                       const std::vector<test::mhc::Outcome>& want,
                                       const test::mhc::Weights& weights) const {
    const auto got_post = sets.download(post);
    const auto got_comb = sets.download(comb);
    const auto got_input = sets.download(layer_input);
    for (std::int64_t token = 0; token < std::min(shape.tokens, kDistinct); ++token) {
      const std::string found = test::mhc::difference(
          want[static_cast<std::size_t>(token)], weights, test::mhc::Constants{},
          {row_of(got_post, token, kStreams), row_of(got_comb, token, kStreams * kStreams),
           to_float(row_of(got_input, token, shape.hidden))});
      if (!found.empty()) return "token " + std::to_string(token) + ": " + found;
    }
    return {};
  }
};

// --- The operations. Of each: its tensors; bytes() if each input is read once and each output
// written once, less what does not grow with hidden or tokens, and norm weights; launch() on one
// set, with mixes [tokens, kMixes] unless null; difference() of the first set from the oracle; and
// outcomes of the distinct tokens where there are mixes.

template <bool Norm>
class Pre {
 public:
  static constexpr int kMixes = mhc::kMixes;

  Pre(Sets& sets, const Shape& shape)
      : sets_(sets),
        shape_(shape),
        inputs_(Inputs::of(shape.hidden)),
        residual_(sets.activations(inputs_.residual_bf16)),
        weights_(sets, inputs_.pre),
        results_(sets, shape.hidden),
        workspace_(sets.workspace(bytes_of_workspace())) {}

  [[nodiscard]] double bytes() const {
    return static_cast<double>(10 * shape_.hidden * shape_.tokens + 384 * shape_.hidden +
                               80 * shape_.tokens);
  }
  void launch(int set, float* mixes, cuda::stream_ref stream) const {
    const auto at = sets_.set(set);
    const auto [hidden, tokens] = shape_;
    holdfast::mhc::Pre op{.residual = {at(residual_), tokens, hidden},
                          .fn = {at(weights_.fn), hidden},
                          .scale = {at(weights_.scale)},
                          .base = {at(weights_.base)},
                          .post = {at(results_.post), tokens},
                          .comb = {at(results_.comb), tokens},
                          .layer_input = {at(results_.layer_input), tokens, hidden},
                          .workspace = {at(workspace_), bytes_of_workspace()}};
    if (Norm) op.norm_weight = {at(weights_.norm_weight), hidden};
    if (mixes != nullptr) op.mixes = {mixes, tokens};
    holdfast::mhc::pre(op, stream);
  }
  [[nodiscard]] std::string difference() const {
    return results_.difference(sets_, shape_, outcomes(),
                               Norm ? inputs_.pre.weights : test::mhc::Weights{});
  }
  [[nodiscard]] const std::vector<test::mhc::Outcome>& outcomes() const {
    return inputs_.pre.outcomes;
  }

 private:
  [[nodiscard]] std::size_t bytes_of_workspace() const {
    return holdfast::mhc::pre_workspace_bytes(shape_.tokens, shape_.hidden);
  }

  const Sets& sets_;
  Shape shape_;
  const Inputs& inputs_;
  Tensor<bf16> residual_;
  DeviceWeights weights_;
  PreResults results_;
  Tensor<std::byte> workspace_;
};

class PreBroadcast {
 public:
  static constexpr int kMixes = mhc::kMixes;

  PreBroadcast(Sets& sets, const Shape& shape)
      : sets_(sets),
        shape_(shape),
        inputs_(Inputs::of(shape.hidden)),
        x_(sets.activations(inputs_.x_bf16)),
        weights_(sets, inputs_.pre_broadcast),
        results_(sets, shape.hidden),
        residual_out_(sets.results<bf16>(kStreams * shape.hidden)) {}

  [[nodiscard]] double bytes() const {
    return static_cast<double>(12 * shape_.hidden * shape_.tokens + 96 * shape_.hidden +
                               80 * shape_.tokens);
  }
  void launch(int set, float* mixes, cuda::stream_ref stream) const {
    const auto at = sets_.set(set);
    const auto [hidden, tokens] = shape_;
    holdfast::mhc::PreBroadcast op{.x = {at(x_), tokens, hidden},
                                   .fn_broadcast = {at(weights_.fn), hidden},
                                   .scale = {at(weights_.scale)},
                                   .base = {at(weights_.base)},
                                   .norm_weight = {at(weights_.norm_weight), hidden},
                                   .residual_out = {at(residual_out_), tokens, hidden},
                                   .post = {at(results_.post), tokens},
                                   .comb = {at(results_.comb), tokens},
                                   .layer_input = {at(results_.layer_input), tokens, hidden}};
    if (mixes != nullptr) op.mixes = {mixes, tokens};
    holdfast::mhc::pre_broadcast(op, stream);
  }
  [[nodiscard]] std::string difference() const {
    const std::vector<bf16> copies = sets_.download(residual_out_);
    std::vector<bf16> want;
    for (std::size_t stream = 0; stream < copies.size() / x_.row; ++stream) {
      const auto token = static_cast<std::int64_t>(stream) / kStreams;
      const auto row = row_of(inputs_.x_bf16, token, shape_.hidden);
      want.insert(want.end(), row.begin(), row.end());
    }
    if (!same_bytes(copies, want)) return "residual_out differs from x";
    return results_.difference(sets_, shape_, outcomes(), inputs_.pre_broadcast.weights);
  }
  [[nodiscard]] const std::vector<test::mhc::Outcome>& outcomes() const {
    return inputs_.pre_broadcast.outcomes;
  }

 private:
  const Sets& sets_;
  Shape shape_;
  const Inputs& inputs_;
  Tensor<bf16> x_;
  DeviceWeights weights_;
  PreResults results_;
  Tensor<bf16> residual_out_;
};

/// Empty, or the first difference of new streams [tokens, 4, hidden] from what the oracle allows.
inline std::string residual_difference(const std::vector<bf16>& got, const Inputs& in,
                                       const Shape& shape) {
  const std::int64_t width = kStreams * shape.hidden;
  for (std::int64_t token = 0; token < std::min(shape.tokens, kDistinct); ++token) {
    const test::mhc::Mixed want = test::mhc::post(
        row_of(in.x, token, shape.hidden), row_of(in.residual, token, width),
        row_of(in.post, token, kStreams), row_of(in.comb, token, kStreams * kStreams));
    const std::string found = test::mhc::difference(want, to_float(row_of(got, token, width)));
    if (!found.empty()) return "token " + std::to_string(token) + ": " + found;
  }
  return {};
}

class Post {
 public:
  static constexpr int kMixes = 0;

  Post(Sets& sets, const Shape& shape)
      : sets_(sets),
        shape_(shape),
        inputs_(Inputs::of(shape.hidden)),
        x_(sets.activations(inputs_.x_bf16)),
        residual_(sets.activations(inputs_.residual_bf16)),
        post_(sets.activations(inputs_.post)),
        comb_(sets.activations(inputs_.comb)),
        residual_out_(sets.results<bf16>(kStreams * shape.hidden)) {}

  [[nodiscard]] double bytes() const {
    return static_cast<double>(18 * shape_.hidden * shape_.tokens + 80 * shape_.tokens);
  }
  void launch(int set, float* /*mixes*/, cuda::stream_ref stream) const {
    const auto at = sets_.set(set);
    const auto [hidden, tokens] = shape_;
    holdfast::mhc::post({.x = {at(x_), tokens, hidden},
                         .residual = {at(residual_), tokens, hidden},
                         .post = {at(post_), tokens},
                         .comb = {at(comb_), tokens},
                         .residual_out = {at(residual_out_), tokens, hidden}},
                        stream);
  }
  [[nodiscard]] std::string difference() const {
    return residual_difference(sets_.download(residual_out_), inputs_, shape_);
  }

 private:
  const Sets& sets_;
  Shape shape_;
  const Inputs& inputs_;
  Tensor<bf16> x_;
  Tensor<bf16> residual_;
  Tensor<float> post_;
  Tensor<float> comb_;
  Tensor<bf16> residual_out_;
};

class PostPre {
 public:
  static constexpr int kMixes = mhc::kMixes;

  PostPre(Sets& sets, const Shape& shape)
      : sets_(sets),
        shape_(shape),
        inputs_(Inputs::of(shape.hidden)),
        x_(sets.activations(inputs_.x_bf16)),
        residual_(sets.activations(inputs_.residual_bf16)),
        post_(sets.activations(inputs_.post)),
        comb_(sets.activations(inputs_.comb)),
        weights_(sets, inputs_.pre),
        residual_out_(sets.results<bf16>(kStreams * shape.hidden)),
        results_(sets, shape.hidden),
        workspace_(sets.workspace(bytes_of_workspace())) {}

  [[nodiscard]] double bytes() const {
    return static_cast<double>(20 * shape_.hidden * shape_.tokens + 384 * shape_.hidden +
                               160 * shape_.tokens);
  }
  void launch(int set, float* mixes, cuda::stream_ref stream) const {
    const auto at = sets_.set(set);
    const auto [hidden, tokens] = shape_;
    holdfast::mhc::PostPre op{.x = {at(x_), tokens, hidden},
                              .residual = {at(residual_), tokens, hidden},
                              .post = {at(post_), tokens},
                              .comb = {at(comb_), tokens},
                              .fn = {at(weights_.fn), hidden},
                              .scale = {at(weights_.scale)},
                              .base = {at(weights_.base)},
                              .norm_weight = {at(weights_.norm_weight), hidden},
                              .residual_out = {at(residual_out_), tokens, hidden},
                              .post_out = {at(results_.post), tokens},
                              .comb_out = {at(results_.comb), tokens},
                              .layer_input = {at(results_.layer_input), tokens, hidden},
                              .workspace = {at(workspace_), bytes_of_workspace()}};
    if (mixes != nullptr) op.mixes = {mixes, tokens};
    holdfast::mhc::post_pre(op, stream);
  }
  [[nodiscard]] std::string difference() const {
    const std::string found = residual_difference(sets_.download(residual_out_), inputs_, shape_);
    if (!found.empty()) return found;
    return results_.difference(sets_, shape_, outcomes(), inputs_.pre.weights);
  }
  /// Of the new streams that the operation returned: where f32 and f64 round one to different bf16,
  /// all mixes differ by more than the promise.
  [[nodiscard]] std::vector<test::mhc::Outcome> outcomes() const {
    const std::int64_t width = kStreams * shape_.hidden;
    const std::vector<float> streams = to_float(sets_.download(residual_out_));
    std::vector<test::mhc::Outcome> result;
    for (std::int64_t token = 0; token < std::min(shape_.tokens, kDistinct); ++token) {
      result.push_back(test::mhc::pre(row_of(streams, token, width), inputs_.pre.weights,
                                      test::mhc::Constants{}));
    }
    return result;
  }

 private:
  [[nodiscard]] std::size_t bytes_of_workspace() const {
    return holdfast::mhc::post_pre_workspace_bytes(shape_.tokens, shape_.hidden);
  }

  const Sets& sets_;
  Shape shape_;
  const Inputs& inputs_;
  Tensor<bf16> x_;
  Tensor<bf16> residual_;
  Tensor<float> post_;
  Tensor<float> comb_;
  DeviceWeights weights_;
  Tensor<bf16> residual_out_;
  PreResults results_;
  Tensor<std::byte> workspace_;
};

class Head {
 public:
  static constexpr int kMixes = kStreams;

  Head(Sets& sets, const Shape& shape)
      : sets_(sets),
        shape_(shape),
        inputs_(Inputs::of(shape.hidden)),
        residual_(sets.activations(inputs_.residual_bf16)),
        weights_(sets, inputs_.head),
        hidden_states_(sets.results<bf16>(shape.hidden)),
        workspace_(sets.workspace(bytes_of_workspace())) {}

  [[nodiscard]] double bytes() const {
    return static_cast<double>(10 * shape_.hidden * shape_.tokens + 64 * shape_.hidden);
  }
  void launch(int set, float* mixes, cuda::stream_ref stream) const {
    const auto at = sets_.set(set);
    const auto [hidden, tokens] = shape_;
    holdfast::mhc::Head op{.residual = {at(residual_), tokens, hidden},
                           .fn = {at(weights_.fn), hidden},
                           .scale = {at(weights_.scale)},
                           .base = {at(weights_.base)},
                           .hidden_states = {at(hidden_states_), tokens, hidden},
                           .workspace = {at(workspace_), bytes_of_workspace()}};
    if (mixes != nullptr) op.mixes = {mixes, tokens};
    holdfast::mhc::head(op, stream);
  }
  [[nodiscard]] std::string difference() const {
    const auto got = sets_.download(hidden_states_);
    for (std::int64_t token = 0; token < std::min(shape_.tokens, kDistinct); ++token) {
      const std::string found = test::mhc::head_difference(
          outcomes()[static_cast<std::size_t>(token)], test::mhc::Weights{}, test::mhc::Constants{},
          to_float(row_of(got, token, shape_.hidden)));
      if (!found.empty()) return "token " + std::to_string(token) + ": " + found;
    }
    return {};
  }
  [[nodiscard]] const std::vector<test::mhc::Outcome>& outcomes() const {
    return inputs_.head.outcomes;
  }

 private:
  [[nodiscard]] std::size_t bytes_of_workspace() const {
    return holdfast::mhc::head_workspace_bytes(shape_.tokens, shape_.hidden);
  }

  const Sets& sets_;
  Shape shape_;
  const Inputs& inputs_;
  Tensor<bf16> residual_;
  DeviceWeights weights_;
  Tensor<bf16> hidden_states_;
  Tensor<std::byte> workspace_;
};

}  // namespace holdfast::bench
