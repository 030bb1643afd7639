// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The tensors of the calls that are timed: as many sets of them as a cold L2 needs.

#include <holdfast/error.hpp>

#include "device.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace holdfast::bench {

inline constexpr std::int64_t kDistinct = 64;  // tokens that a batch repeats
inline constexpr std::size_t kColdBytes = 130'000'000;

enum class L2 : std::uint8_t { warm, cold };

/// Where a tensor lies in each set.
template <class T>
struct Tensor {
  std::size_t offset;
  std::size_t row;  // elements
};

/// Adds to `*differing` how many 16-byte words differ between `rows` rows of `a` and of `b`, which
/// begin `pitch` words apart.
static __global__ void __launch_bounds__(256)
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

}  // namespace holdfast::bench
