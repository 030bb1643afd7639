// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What every mHC operation checks about its tensors and constants before it launches.

#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/shapes.cuh"
#include "holdfast/tensor_view.hpp"

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>

namespace holdfast::mhc::detail {

/// What the general path takes. Up to the largest one, int32 counts every element of a token and of
/// a weight.
inline constexpr std::int64_t kHiddenStep = 8;  // bf16 of one 16-byte access
inline constexpr std::int64_t kMaxHidden = std::int64_t{1} << 20;

/// The tensors of one call, checked one by one, and then against each other.
class Operands {
 public:
  /// \throws ContractError unsupported_shape.
  Operands(const char* operation, std::int64_t tokens, std::int64_t hidden)
      : operation_(operation), tokens_(tokens), hidden_(hidden) {
    throw_unless(tokens >= 0 && tokens <= kMaxTokens, Rule::unsupported_shape,
                 [this] { return subject() + ": expected 0 to 2^31 - 1 tokens; split the batch"; });
    throw_unless(hidden >= kHiddenStep && hidden <= kMaxHidden && hidden % kHiddenStep == 0,
                 Rule::unsupported_shape, [this] {
                   return subject() + ": hidden must be a multiple of " +
                          std::to_string(kHiddenStep) + ", from " + std::to_string(kHiddenStep) +
                          " to " + std::to_string(kMaxHidden);
                 });
  }

  /// The extents of `view` are `expected`, and its memory can be accessed as the kernels do: in
  /// accesses of 16 bytes where a row is a multiple of them, else element by element. A tensor of T
  /// that is not const is written.
  /// \throws ContractError shape_mismatch, null_pointer, misaligned, size_overflow, overlapping
  ///   (rows that are written and overlap).
  template <class T, std::int64_t... Extents, std::convertible_to<std::int64_t>... Sizes>
  void add(const char* name, const View<T, Extents...>& view, Sizes... expected) {
    static_assert(sizeof...(Sizes) == sizeof...(Extents));
    using Element = std::remove_const_t<T>;
    const std::array<std::int64_t, sizeof...(Sizes)> want{static_cast<std::int64_t>(expected)...};
    bool fits = true;
    for (std::size_t axis = 0; axis < want.size(); ++axis) {
      fits = fits && view.extent(static_cast<int>(axis)) == want[axis];
    }
    const auto what = [this, name] { return subject() + ": " + name; };
    throw_unless(fits, Rule::shape_mismatch, [&what, &view, &want] {
      std::string shape = " is [";
      std::string wanted = "expected [";
      for (std::size_t axis = 0; axis < want.size(); ++axis) {
        const char* separator = axis == 0 ? "" : ", ";
        shape += separator + std::to_string(view.extent(static_cast<int>(axis)));
        wanted += separator + std::to_string(want[axis]);
      }
      return what() + shape + "]; " + wanted + "]";
    });
    std::int64_t rows = view.extent(0);
    std::int64_t row_elements = view.row_elements();
    if constexpr (!View<T, Extents...>::kTokenMajor) {  // a weight is one piece
      throw_unless(view.row_stride() == row_elements, Rule::not_contiguous, [&what] {
        return what() + " has gaps between its rows; make it contiguous with Relayout first";
      });
      row_elements *= rows;
      rows = 1;
    }
    if (rows == 0) return;
    throw_unless(view.data() != nullptr, Rule::null_pointer,
                 [&what] { return what() + " has no address"; });

    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Element));
    constexpr bool kWritten = !std::is_const_v<T>;
    const std::int64_t row_bytes = row_elements * kBytes;
    // The stride of a single row means nothing.
    const std::int64_t stride = rows > 1 ? view.row_stride() : row_elements;
    throw_unless(
        stride >= (kWritten ? row_elements : 0), Rule::overlapping, [&what, row_elements, stride] {
          return what() + " has rows of " + std::to_string(row_elements) + " elements that begin " +
                 std::to_string(stride) +
                 " apart; expected at least the length of a row (0 or more where it is read)";
        });
    const std::int64_t span = holdfast::detail::multiply(rows - 1, stride);
    throw_unless(span >= 0 && span <= (kMaxSpan - row_bytes) / kBytes, Rule::size_overflow,
                 [&what, stride] {
                   return what() + ": rows that begin " + std::to_string(stride) +
                          " elements apart span more than 2^62 bytes";
                 });
    const bool wide = row_bytes % holdfast::detail::kAccessBytes == 0;
    const std::int64_t alignment = wide ? holdfast::detail::kAccessBytes : kBytes;
    const auto address = reinterpret_cast<std::uintptr_t>(view.data());
    throw_unless(
        address % static_cast<std::uintptr_t>(alignment) == 0 && stride * kBytes % alignment == 0,
        Rule::misaligned, [&what, alignment] {
          return what() + ": address and row stride must be multiples of " +
                 std::to_string(alignment) + " bytes";
        });
    operands_.at(count_++) = {name,      address,         span * kBytes + row_bytes,
                              row_bytes, stride * kBytes, kWritten};
  }

  /// Memory for intermediate results, which is written.
  /// \throws ContractError invalid_parameter (too small), null_pointer, misaligned.
  void add(const Workspace& workspace, std::size_t needed, const char* function) {
    throw_unless(workspace.bytes >= needed, Rule::invalid_parameter, [&] {
      return subject() + ": the workspace has " + std::to_string(workspace.bytes) +
             " bytes; expected at least the " + std::to_string(needed) + " of " + function;
    });
    if (needed == 0) return;
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
    throw_unless(address != 0, Rule::null_pointer,
                 [this] { return subject() + ": the workspace has no address"; });
    throw_unless(address % holdfast::detail::kAccessBytes == 0, Rule::misaligned, [this] {
      return subject() + ": the address of the workspace must be a multiple of " +
             std::to_string(holdfast::detail::kAccessBytes) + " bytes";
    });
    const auto bytes = static_cast<std::int64_t>(needed);
    operands_.at(count_++) = {"the workspace", address, bytes, bytes, bytes, true};
  }

  /// \throws ContractError invalid_parameter.
  void add_constant(const char* name, float value, float least) const {
    // By its bits: under -ffast-math a compiler takes std::isfinite for true.
    constexpr std::uint32_t kExponent = 0x7F80'0000U;
    const bool finite = (std::bit_cast<std::uint32_t>(value) & kExponent) != kExponent;
    throw_unless(finite && value >= least, Rule::invalid_parameter, [&] {
      char numbers[96];  // std::to_string would print 1e-20 as 0.000000
      (void)std::snprintf(numbers, sizeof numbers,
                          "%.9g; expected a finite number of at least %.9g", value, least);
      return subject() + ": " + name + " is " + numbers;
    });
  }

  /// \throws ContractError invalid_parameter.
  void add_iterations(int iterations) const {
    throw_unless(iterations >= 1, Rule::invalid_parameter, [this, iterations] {
      return subject() + ": " + std::to_string(iterations) +
             " Sinkhorn iterations; expected 1 or more";
    });
  }

  /// What is written shares no memory with anything else.
  /// \throws ContractError overlapping.
  void expect_disjoint() const {
    for (std::size_t i = 0; i < count_; ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        const Operand& a = operands_.at(i);
        const Operand& b = operands_.at(j);
        throw_unless(!(a.written || b.written) || !overlap(a, b), Rule::overlapping, [&] {
          return subject() + ": " + a.name + " and " + b.name +
                 " share memory; expected results in memory of their own";
        });
      }
    }
  }

 private:
  struct Operand {
    const char* name;
    std::uintptr_t address;
    std::int64_t bytes;  // from the first row's first to the last row's last
    std::int64_t row_bytes;
    std::int64_t stride_bytes;
    bool written;
  };

  static constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 31) - 1;
  static constexpr std::int64_t kMaxSpan = std::int64_t{1} << 62;

  static bool overlap(const Operand& a, const Operand& b) {
    if (a.address >= b.address + static_cast<std::uintptr_t>(b.bytes) ||
        b.address >= a.address + static_cast<std::uintptr_t>(a.bytes)) {
      return false;
    }
    // Columns of one matrix: rows of both lie between each other.
    if (a.stride_bytes != b.stride_bytes || a.stride_bytes == 0) return true;
    const Operand& first = a.address <= b.address ? a : b;
    const Operand& second = a.address <= b.address ? b : a;
    const auto offset = static_cast<std::int64_t>((second.address - first.address) %
                                                  static_cast<std::uintptr_t>(a.stride_bytes));
    return offset < first.row_bytes || offset + second.row_bytes > a.stride_bytes;
  }

  [[nodiscard]] std::string subject() const {
    return std::string("mhc::") + operation_ + " of " + std::to_string(tokens_) +
           " tokens, hidden " + std::to_string(hidden_);
  }

  const char* operation_;
  std::int64_t tokens_;
  std::int64_t hidden_;
  std::array<Operand, 16> operands_{};
  std::size_t count_ = 0;
};

}  // namespace holdfast::mhc::detail
