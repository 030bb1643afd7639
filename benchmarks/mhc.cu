// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// What the mHC operations cost on this GPU.
///
///     holdfast.bench.mhc --benchmark_out=mhc.json
///     holdfast.bench.mhc --benchmark_filter='^pre/.*/tokens:(1|64)/'
///
/// op/hidden:H/tokens:T/l2:warm|cold, where op is
/// - pre, and pre_norm with RMSNorm;
/// - pre_broadcast, with RMSNorm and residual_out;
/// - post;
/// - post_pre, with RMSNorm;
/// - head.
///
/// The time is that of one call: a chain of dependent calls on one stream, 20 or more, between two
/// events, divided by their number; behind a first replay, so that the host is ahead. `warm`: all
/// calls use the same tensors, which lie within 30 MB where the shape permits. `cold`: they go
/// around sets of tensors, weights included, of more than 120 MB. The median over 101 samples, or
/// 31 from 4096 tokens on, is the number to quote; the JSON has its name without what Google
/// Benchmark appends.
///
/// - bytes_per_second, percent_of_copy: if each input were read once and each output written once,
///   beside copy_rate, which every run measures and which can make it void (see copy_rate.cuh).
/// - floor_us: those bytes at 4.3 TB/s.
/// - mixes_rel_rms: the error of mixes against the f64 oracle, relative, root mean square over up
///   to 64 tokens; of one more call, with the optional output that the timed calls leave out. Those
///   of post_pre are of the residual that it returned, in bf16.
///
/// A batch repeats 64 tokens of N(0, 1). After the last sample every result is checked: those of
/// the first 64 tokens must be what the oracle allows, and all others have the bits of these.

#include <holdfast/holdfast.hpp>
#include <holdfast/kernels.cuh>

#include "chain.hpp"
#include "copy_rate.cuh"
#include "device.hpp"
#include "report.hpp"
#include "result.hpp"
#include "support/mhc_oracle.hpp"

#include <cuda/stream_ref>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace {

using holdfast::throw_on_error;
using holdfast::bench::add;
using holdfast::bench::Array;
using holdfast::bench::Chain;
using holdfast::bench::compare_with_copy;
using holdfast::bench::copy_rate;
using holdfast::bench::kSamples;
using holdfast::bench::Result;
using holdfast::bench::same_bytes;
using holdfast::bench::Stream;
using holdfast::mhc::bf16;
using holdfast::mhc::kMixes;
using holdfast::mhc::kStreams;

constexpr std::int64_t kDistinct = 64;  // tokens that a batch repeats
constexpr double kFloorRate = 4.3e12;   // bytes per second
constexpr std::size_t kColdBytes = 130'000'000;

struct Shape {
  std::int64_t hidden;
  std::int64_t tokens;
};

enum class L2 : std::uint8_t { warm, cold };

std::vector<bf16> to_bf16(std::span<const float> values) {
  std::vector<bf16> result;
  result.reserve(values.size());
  for (const float value : values) result.push_back(__float2bfloat16_rn(value));
  return result;
}

std::vector<float> to_float(std::span<const bf16> values) {
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

// --- Tensors

/// Where a tensor lies in each set.
template <class T>
struct Tensor {
  std::size_t offset;
  std::size_t row;  // elements
};

/// Adds to `*differing` how many 16-byte words differ between `rows` rows of `a` and of `b`, which
/// begin `pitch` words apart.
__global__ void __launch_bounds__(256)
    count_differences(const uint4* a, const uint4* b, std::size_t row, std::size_t rows,
                      std::size_t pitch, unsigned long long* differing) {
  unsigned long long count = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < row * rows;
       i += step) {
    const std::size_t at = i / row * pitch + i % row;
    const uint4 x = a[at];
    const uint4 y = b[at];
    if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) ++count;
  }
  if (count != 0) atomicAdd(differing, count);
}

/// The tensors of one call, as often as it takes to go around them: first they are named, then all
/// sets are allocated at once, filled alike.
class Sets {
 public:
  explicit Sets(std::int64_t tokens) : tokens_(static_cast<std::size_t>(tokens)) {}

  /// `values` must outlive the call of allocate, here and below.
  template <class T>
  Tensor<T> weight(const std::vector<T>& values) {
    const Tensor<T> tensor = place<T>(1, values.size());
    inputs_.push_back({tensor.offset, std::as_bytes(std::span(values)), values.size() * sizeof(T)});
    return tensor;
  }
  /// One row for each token, which are `distinct` over and over.
  template <class T>
  Tensor<T> activations(const std::vector<T>& distinct) {
    const Tensor<T> tensor = place<T>(tokens_, distinct.size() / kDistinct);
    inputs_.push_back(
        {tensor.offset, std::as_bytes(std::span(distinct)), tokens_ * tensor.row * sizeof(T)});
    return tensor;
  }
  /// One row of `row` elements for each token; its size is a multiple of 16 bytes.
  template <class T>
  Tensor<T> results(std::int64_t row) {
    const Tensor<T> tensor = place<T>(tokens_, static_cast<std::size_t>(row));
    results_.push_back({tensor.offset, tensor.row * sizeof(T)});
    return tensor;
  }
  Tensor<std::byte> workspace(std::size_t bytes) { return place<std::byte>(1, bytes); }

  void allocate(L2 l2) {
    count_ = l2 == L2::warm ? 1 : kColdBytes / bytes_ + 1;
    memory_.emplace(bytes_ * count_);
    for (const Input& input : inputs_) {
      const std::size_t uploaded = std::min(input.values.size(), input.bytes);
      std::byte* data = memory_->data() + input.offset;
      throw_on_error(cudaMemcpy(data, input.values.data(), uploaded, cudaMemcpyHostToDevice),
                     "upload");
      repeat(data, uploaded, input.bytes);
    }
    repeat(memory_->data(), bytes_, bytes_ * count_);
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
  }
  [[nodiscard]] int count() const { return static_cast<int>(count_); }

  /// The addresses in one set, by tensor.
  [[nodiscard]] auto set(int index) const {
    return [base = memory_->data() + static_cast<std::size_t>(index) * bytes_]<class T>(
               const Tensor<T>& tensor) { return reinterpret_cast<T*>(base + tensor.offset); };
  }

  /// The rows of the distinct tokens, in the first set.
  template <class T>
  [[nodiscard]] std::vector<T> download(const Tensor<T>& tensor) const {
    std::vector<T> values(distinct() * tensor.row);
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
    throw_on_error(cudaMemcpy(values.data(), set(0)(tensor), values.size() * sizeof(T),
                              cudaMemcpyDeviceToHost),
                   "download");
    return values;
  }

  /// The results of the first set become NaN.
  void poison_results() const {
    for (const Rows& rows : results_) {
      throw_on_error(cudaMemset(memory_->data() + rows.offset, 0xFF, tokens_ * rows.bytes),
                     "poison");
    }
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
  }

  /// Whether all sets have the same results, and tokens that are the same have. Empty, or what is
  /// wrong.
  [[nodiscard]] std::string difference() const {
    const Array<unsigned long long> differing(std::vector<unsigned long long>{0});
    const auto count = [&](std::size_t offset, std::size_t distance, std::size_t row,
                           std::size_t rows, std::size_t pitch) {
      if (row == 0 || rows == 0) return;
      const std::byte* a = memory_->data() + offset;
      count_differences<<<1024, 256>>>(
          reinterpret_cast<const uint4*>(a), reinterpret_cast<const uint4*>(a + distance),
          row / sizeof(uint4), rows, pitch / sizeof(uint4), differing.data());
      throw_on_error(cudaGetLastError(), "launch of the comparison");
    };
    for (const Rows& rows : results_) {
      const std::size_t period = distinct() * rows.bytes;
      count(rows.offset, period, tokens_ * rows.bytes - period, 1, 0);
      count(rows.offset, bytes_, tokens_ * rows.bytes, count_ - 1, bytes_);
    }
    const unsigned long long found = differing.download().front();
    if (found == 0) return {};
    return std::to_string(found) +
           " words of 16 bytes differ from those of the same token in "
           "another set or elsewhere in the batch";
  }

 private:
  struct Input {
    std::size_t offset;
    std::span<const std::byte> values;
    std::size_t bytes;  // on the device
  };
  struct Rows {
    std::size_t offset;
    std::size_t bytes;  // of one row
  };

  [[nodiscard]] std::size_t distinct() const {
    return std::min(tokens_, static_cast<std::size_t>(kDistinct));
  }

  template <class T>
  Tensor<T> place(std::size_t rows, std::size_t row) {
    constexpr std::size_t kAlignment = 256;
    const Tensor<T> tensor{bytes_, row};
    bytes_ += (rows * row * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return tensor;
  }

  /// Fills `bytes` at `data` with the first `period` over and over.
  static void repeat(std::byte* data, std::size_t period, std::size_t bytes) {
    for (std::size_t filled = period; filled < bytes; filled *= 2) {
      throw_on_error(cudaMemcpy(data + filled, data, std::min(filled, bytes - filled),
                                cudaMemcpyDeviceToDevice),
                     "repeat");
    }
  }

  std::size_t tokens_;
  std::size_t bytes_ = 0;  // of one set
  std::size_t count_ = 0;
  std::vector<Input> inputs_;
  std::vector<Rows> results_;
  std::optional<Array<std::byte>> memory_;
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
  static constexpr int kMixes = ::kMixes;

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
  static constexpr int kMixes = ::kMixes;

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
std::string residual_difference(const std::vector<bf16>& got, const Inputs& in,
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
  static constexpr int kMixes = ::kMixes;

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

// --- The measurement

/// What the two ends of a chain take must be little beside its nodes, and each set have its turn.
int nodes_of(const Shape& shape, int sets) {
  const int least = shape.tokens <= 64 ? 200 : shape.tokens <= 1024 ? 60 : 20;
  return (least - 1) / sets * sets + sets;
}

/// Less where a sample takes long; the times of such samples hardly differ.
int samples_of(const Shape& shape) { return shape.tokens < 4096 ? kSamples : 31; }

/// The error of the mixes [tokens, Op::kMixes]: of up to kDistinct tokens, from all over the batch
/// and no two of them the same.
template <class Op>
double error_of_mixes(const Op& op, const std::vector<float>& mixes, const Shape& shape) {
  const std::int64_t count = std::min(shape.tokens, kDistinct);
  const std::int64_t apart = (shape.tokens / count - 1) | 1;  // odd, as kDistinct is a power of 2
  const auto& outcomes = op.outcomes();
  test::mhc::RelativeRms rms;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t token = i * apart;
    const auto& want = outcomes[static_cast<std::size_t>(token % kDistinct)].mixes;
    rms.add(std::span(want).first(Op::kMixes), row_of(mixes, token, Op::kMixes));
  }
  return rms.value();
}

template <class Op>
Result measure(const Shape& shape, L2 l2) {
  if (!copy_rate().error.empty()) return {{}, {}, copy_rate().error};
  const Stream stream;
  Sets sets(shape.tokens);
  const Op op(sets, shape);
  sets.allocate(l2);
  const Chain chain(stream, nodes_of(shape, sets.count()),
                    [&](int node) { op.launch(node % sets.count(), nullptr, stream.ref()); });
  Result result{chain.samples(samples_of(shape)), {}, {}};
  compare_with_copy(result, op.bytes());
  result.counters["floor_us"].assign(result.seconds.size(), 1e6 * op.bytes() / kFloorRate);

  const auto check_results = [&] {
    if (result.error.empty()) result.error = sets.difference();
    if (result.error.empty()) result.error = op.difference();
  };
  check_results();
  if constexpr (Op::kMixes > 0) {
    const Array<float> mixes(static_cast<std::size_t>(shape.tokens * Op::kMixes));
    sets.poison_results();
    op.launch(0, mixes.data(), stream.ref());
    stream.wait();
    check_results();
    const double error = error_of_mixes(op, mixes.download(), shape);
    result.counters["mixes_rel_rms"].assign(result.seconds.size(), error);
    if (result.error.empty() && !(error <= test::mhc::kMixesBound)) {
      result.error = "the relative error of mixes is " + std::to_string(error * 1e6) + "e-6";
    }
  }
  return result;
}

template <class Op>
void add_shapes(const std::string& name) {
  for (const std::int64_t hidden : {4096, 7168}) {
    for (const std::int64_t tokens : {1, 8, 64, 256, 1024, 4096, 16384}) {
      for (const L2 l2 : {L2::warm, L2::cold}) {
        const Shape shape{hidden, tokens};
        add(
            name + "/hidden:" + std::to_string(hidden) + "/tokens:" + std::to_string(tokens) +
                (l2 == L2::warm ? "/l2:warm" : "/l2:cold"),
            [shape, l2] { return measure<Op>(shape, l2); }, samples_of(shape));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return holdfast::bench::run(argc, argv, [] {
    add("copy_rate", copy_rate);
    add_shapes<Pre<false>>("pre");
    add_shapes<Pre<true>>("pre_norm");
    add_shapes<PreBroadcast>("pre_broadcast");
    add_shapes<Post>("post");
    add_shapes<PostPre>("post_pre");
    add_shapes<Head>("head");
  });
}
