// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Tensors of mHC tests on the device: rows with gaps between them, whose every element is looked
/// at.

#include "support/mhc_oracle.hpp"
#include "support/runtime.hpp"

#include <cuda_bf16.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace test::mhc {

[[nodiscard]] inline std::vector<std::uint16_t> to_bits(std::span<const float> values) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) bits.push_back(bf16_bits(value));
  return bits;
}

[[nodiscard]] inline std::vector<float> from_bits(std::span<const std::uint16_t> bits) {
  std::vector<float> values;
  for (const std::uint16_t value : bits) values.push_back(from_bf16_bits(value));
  return values;
}

/// The elements of one token of a dense array.
template <class T>
[[nodiscard]] std::span<const T> token_of(const std::vector<T>& all, std::int64_t token,
                                          std::size_t length) {
  return std::span(all).subspan(static_cast<std::size_t>(token) * length, length);
}

/// [tokens, length] of f32, or of bf16 as uint16, whose rows begin length + gap apart.
template <class T>
class Rows {
 public:
  /// Poisoned.
  Rows(std::int64_t tokens, std::int64_t length, std::int64_t gap)
      : tokens_(tokens),
        length_(length),
        gap_(gap),
        memory_(static_cast<std::size_t>(tokens * (length + gap))) {
    poison();
  }
  /// `dense`, and NaN between the rows.
  Rows(const std::vector<T>& dense, std::int64_t length, std::int64_t gap)
      : tokens_(static_cast<std::int64_t>(dense.size()) / length),
        length_(length),
        gap_(gap),
        memory_(spread(dense)) {}

  /// As the kernels see it.
  [[nodiscard]] auto* data() const {
    using Element = std::conditional_t<std::is_same_v<T, std::uint16_t>, __nv_bfloat16, T>;
    return reinterpret_cast<Element*>(memory_.data());
  }
  [[nodiscard]] std::int64_t stride() const { return length_ + gap_; }
  void poison() const { memory_.poison(); }

  /// Without the gaps, which must be as the poison left them.
  [[nodiscard]] std::vector<T> results() const {
    const std::vector<T> all = memory_.download();
    std::vector<T> result;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const auto row = all.begin() + t * stride();
      result.insert(result.end(), row, row + length_);
      for (std::int64_t i = length_; i < stride(); ++i) {
        T untouched;
        std::memset(&untouched, 0xCB, sizeof untouched);
        EXPECT_EQ(std::memcmp(&row[i], &untouched, sizeof untouched), 0)
            << "a write between the rows, token " << t;
      }
    }
    return result;
  }

 private:
  [[nodiscard]] std::vector<T> spread(const std::vector<T>& dense) const {
    T nan;
    std::memset(&nan, 0x7F, sizeof nan);
    std::fill_n(reinterpret_cast<unsigned char*>(&nan), sizeof nan - 1, 0xFF);
    std::vector<T> all(static_cast<std::size_t>(tokens_ * stride()), nan);
    for (std::int64_t t = 0; t < tokens_; ++t) {
      std::copy_n(dense.begin() + t * length_, length_, all.begin() + t * stride());
    }
    return all;
  }

  std::int64_t tokens_;
  std::int64_t length_;
  std::int64_t gap_;
  DeviceArray<T> memory_;
};

}  // namespace test::mhc
