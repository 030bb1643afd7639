// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The axes of DeepSeek V4's mHC (manifold-constrained hyper-connections), and typed views of its
/// tensors.
///
/// tokens: rows of a batch. streams: the 4 residual streams. hidden: the width of one stream.
/// mixes: the 24 numbers to which a token's residual is projected: 4 for pre, 4 for post and 16 for
/// comb, whose element [i][j] at 8 + 4 * i + j leads from the old stream i to the new stream j.

#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/tensor_view.hpp"

#include <cuda_bf16.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace holdfast::mhc {

using bf16 = __nv_bfloat16;

inline constexpr int kStreams = 4;
inline constexpr int kMixes = kStreams * (2 + kStreams);

/// Over what the RMSNorm of layer_input takes its mean square. The two differ by up to a few units
/// in the sixth digit, and much more where all elements round the same way.
enum class NormSquares : std::uint8_t {
  unrounded,  ///< the f32 collapse; vLLM and SGLang with DeepSeek V4
  rounded,    ///< the bf16 collapse; DeepSeek's reference, and V4.1
};

/// An extent that the type leaves open.
inline constexpr std::int64_t kOpen = -1;

/// A row-major tensor of T on the device, with the extents that the model fixes in the type. Its
/// rows (the first axis) may lie apart; everything else is without gaps. Owns nothing. One that was
/// default-constructed stands for a tensor that is not there.
template <class T, std::int64_t... Extents>
class View {
 public:
  static constexpr int kRank = sizeof...(Extents);
  static constexpr int kOpenExtents = (0 + ... + (Extents == kOpen ? 1 : 0));
  /// Whether the rows are tokens, of one number or more each.
  static constexpr bool kTokenMajor =
      kRank >= 2 && std::array<std::int64_t, sizeof...(Extents)>{Extents...}[0] == kOpen;

  constexpr View() = default;

  /// Without gaps; `sizes` are the extents that the type leaves open, in their order.
  template <std::convertible_to<std::int64_t>... Sizes>
  requires(sizeof...(Sizes) == kOpenExtents) constexpr View(T* data, Sizes... sizes)
      : data_(data), shape_{Extents...} {
    const std::int64_t open[] = {static_cast<std::int64_t>(sizes)..., 0};
    int next = 0;
    for (std::int64_t& extent : shape_) {
      if (extent == kOpen) extent = open[next++];
    }
    row_stride_ = row_elements();
  }

  /// Which device the tensor is on is not kept: a kernel runs on the device of its stream.
  /// \throws ContractError type_mismatch, read_only (where T is not const), shape_mismatch (rank or
  ///   a fixed extent differs), not_contiguous (gaps inside a row).
  explicit View(const TensorView& tensor) : data_(address(tensor)), shape_{Extents...} {
    bool fits = tensor.shape().rank() == kRank;
    for (int axis = 0; fits && axis < kRank; ++axis) {
      fits = shape_[axis] == kOpen || shape_[axis] == tensor.shape()[axis];
      shape_[axis] = tensor.shape()[axis];
    }
    throw_unless(fits, Rule::shape_mismatch, [&tensor] {
      return "mhc view of tensor " + to_string(tensor.shape()) + ": expected " + type_name() +
             ", * being any extent";
    });
    row_stride_ = tensor.strides()[0];
    throw_unless(tensor.shape().elements() == 0 || tensor.slice(0, 0, 1).is_contiguous(),
                 Rule::not_contiguous, [&tensor] {
                   return "mhc view of tensor " + to_string(tensor.shape()) + " with strides " +
                          to_string(tensor.strides()) +
                          ": expected rows without gaps; make it contiguous with Relayout first";
                 });
  }

  /// What may be written may be read.
  template <class U>
  requires(std::is_const_v<T>&& std::same_as<U, std::remove_const_t<T>>) constexpr View(
      const View<U, Extents...>& other)
      : data_(other.data_), row_stride_(other.row_stride_) {
    for (int axis = 0; axis < kRank; ++axis) shape_[axis] = other.shape_[axis];
  }

  /// The same with rows that begin `stride` elements apart.
  [[nodiscard]] constexpr View with_row_stride(std::int64_t stride) const {
    View result = *this;
    result.row_stride_ = stride;
    return result;
  }

  [[nodiscard]] __host__ __device__ constexpr T* data() const { return data_; }
  [[nodiscard]] __host__ __device__ constexpr T* row(std::int64_t index) const {
    return data_ + index * row_stride_;
  }
  [[nodiscard]] __host__ __device__ constexpr std::int64_t extent(int axis) const {
    return shape_[axis];
  }
  [[nodiscard]] __host__ __device__ constexpr std::int64_t row_stride() const {
    return row_stride_;
  }
  /// Whether there is a tensor. One without elements need not have an address.
  [[nodiscard]] __host__ __device__ constexpr bool exists() const {
    return data_ != nullptr || row_stride_ != 0;
  }
  /// Elements of one row.
  [[nodiscard]] constexpr std::int64_t row_elements() const {
    std::int64_t count = 1;
    for (int axis = 1; axis < kRank; ++axis) count *= shape_[axis];
    return count;
  }

  /// What the type fixes: `bf16 [*, 4, *]`.
  [[nodiscard]] static std::string type_name() {
    std::string text = holdfast::to_string(kElementType<std::remove_const_t<T>>);
    const char* separator = " [";
    for (const std::int64_t extent : {Extents...}) {
      text += separator + (extent == kOpen ? std::string("*") : std::to_string(extent));
      separator = ", ";
    }
    return text + "]";
  }

 private:
  template <class, std::int64_t...>
  friend class View;

  static T* address(const TensorView& tensor) {
    if constexpr (std::is_const_v<T>) {
      return tensor.data_as<std::remove_const_t<T>>();
    } else {
      return tensor.writable_data_as<T>();
    }
  }

  T* data_ = nullptr;
  std::int64_t shape_[kRank] = {};
  std::int64_t row_stride_ = 0;
};

/// Device memory of the caller for what an operation computes on its way. Its contents need not be
/// set before, and mean nothing after; calls that may run at the same time need one each.
struct Workspace {
  void* data = nullptr;  ///< at a multiple of 16 bytes
  std::size_t bytes = 0;
};

/// [tokens, hidden]: one stream, before or after the sublayer.
template <class T>
using Activations = View<T, kOpen, kOpen>;
/// [tokens, streams, hidden].
template <class T>
using Residual = View<T, kOpen, kStreams, kOpen>;

namespace detail {

inline constexpr int kWidth = 8;  // bf16 of one access
using Values = holdfast::detail::Pack<bf16, kWidth>;

}  // namespace detail

}  // namespace holdfast::mhc
