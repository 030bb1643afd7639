// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Relayout: the recipe that lays a strided view out contiguously, and casts it on the way.
///
/// Transposes, slices, padded rows and broadcasts are all views; so is a tile shuffle, as
/// TensorView::unflatten and permute. This file reads one and writes row-major.

#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/detail/target.cuh"
#include "holdfast/error.hpp"
#include "holdfast/recipe.hpp"
#include "holdfast/tensor_view.hpp"

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace holdfast {

namespace detail {

/// A view with its axes of one element dropped and neighbours merged where they walk as one.
struct MergedAxes {
  std::int64_t extents[kMaxRank];  // innermost first; beyond `count`: 1
  std::int64_t strides[kMaxRank];  // elements; beyond `count`: 0
  int count;
};

[[nodiscard]] inline MergedAxes merge_axes(const Shape& shape, const Strides& strides) {
  MergedAxes merged{{1, 1, 1, 1, 1}, {0, 0, 0, 0, 0}, 0};
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    if (shape[axis] == 1) continue;
    if (merged.count > 0) {
      std::int64_t& extent = merged.extents[merged.count - 1];
      const std::int64_t stride = merged.strides[merged.count - 1];
      // stride * extent == strides[axis], without the product, which may overflow
      if (strides[axis] % extent == 0 && strides[axis] / extent == stride) {
        extent *= shape[axis];
        continue;
      }
    }
    merged.extents[merged.count] = shape[axis];
    merged.strides[merged.count++] = strides[axis];
  }
  return merged;
}

/// The same bits where the types are the same, else through f32.
template <class To, class From>
[[nodiscard]] __host__ __device__ To convert(From value) {
  if constexpr (std::same_as<To, From>) {
    return value;
  } else {
    return from_float<To>(to_float(value));
  }
}

/// out[row, i] = x[row, i] for the `Width` elements i of a column, where a row is one walk along
/// the innermost merged axis. The last column of a row may hold fewer. `Number` holds every row:
/// rows are divided to find where they start, and in 32 bits that takes a quarter of the time.
template <class To, class From, int Width, std::unsigned_integral Number>
struct RelayoutWork {
  using Index = std::int64_t;

  const From* source;
  To* out;
  Index rows;                   // the outer axes together
  Index columns;                // of Width elements
  Index length;                 // elements of a row
  Index stride;                 // elements; 1 if Width is above 1
  Index extents[kMaxRank - 1];  // of the outer axes, innermost first
  Index strides[kMaxRank - 1];
  int outer;  // number of outer axes

  struct Line {
    const From* source;
    To* out;
  };

  [[nodiscard]] __host__ __device__ Line line(Index row) const {
    return {source + offset(row), out + row * length};
  }

  __host__ __device__ void operator()(const Line& line, Index column) const {
    const Index first = column * Width;
    if (Width == 1 || length - first >= Width) {
      move<Width>(line.source + first * stride, line.out + first);
    } else {
      for (Index i = first; i < length; ++i) move<1>(line.source + i, line.out + i);
    }
  }

 private:
  template <int Count>
  static __host__ __device__ void move(const From* from, To* to) {
    const Pack<Element<From>, Count> taken = load<Count>(from);
    Pack<To, Count> converted;
    for (int i = 0; i < Count; ++i) converted.values[i] = convert<To>(taken.values[i]);
    store(to, converted);
  }

  /// Where row `number` starts in the source.
  [[nodiscard]] __host__ __device__ Index offset(Index number) const {
    auto row = static_cast<Number>(number);
    Index offset = 0;
    for (int axis = 0; axis + 1 < outer; ++axis) {
      const auto extent = static_cast<Number>(extents[axis]);
      offset += static_cast<Index>(row % extent) * strides[axis];
      row /= extent;
    }
    return outer > 0 ? offset + static_cast<Index>(row) * strides[outer - 1] : offset;
  }
};

}  // namespace detail

/// Copies a strided view into a contiguous tensor of the same shape, and casts it to another
/// floating type if asked to.
///
///     out[i, j, ...] = round_To(x[i, j, ...])
///
/// \code
/// // weight [out, in] bf16, wanted transposed
/// transposed.finalize(holdfast::Relayout<__nv_bfloat16>{weight.permute({1, 0})}, stream);
/// // 16 x 16 tiles one after the other
/// tiled.finalize(holdfast::Relayout<float>{
///     weight.unflatten(1, {in / 16, 16}).unflatten(0, {out / 16, 16}).permute({0, 2, 1, 3})},
///     stream);
/// \endcode
///
/// - Any rank from 0 to 5 and any strides, zero (broadcast) and negative too.
/// - Copies within one type keep every bit, those of a NaN too. Casts round once, to nearest even;
///   beyond the range of To the result is infinity; which NaN a NaN becomes is not promised.
/// - Where the innermost axis is contiguous and the source, its other strides and the rows of the
///   result are aligned to 16 bytes, every access is 16 bytes wide; elsewhere it is one element. A
///   transpose is of the second kind: right, not fast.
/// - A source in a packed buffer (TensorView::packed) may lie at any byte: where that is not
///   aligned to its type it is read byte by byte, in the same launch and with the same bits.
///
/// To and From: the same one of float, __nv_bfloat16, __half, uint8_t, int32_t, int64_t; or two of
/// the first three.
template <class To, class From = To, class File = detail::ThisFile>
class Relayout {
  static_assert(
      (std::same_as<To, From> && kElementType<To> != ElementType::opaque) ||
          (detail::Floating<To> && detail::Floating<From>),
      "Relayout copies within one element type, or casts among float, __nv_bfloat16 and __half");

 public:
  /// \param source any shape, From.
  /// \throws ContractError type_mismatch (elements are not From), size_overflow (the result has too
  ///   many bytes).
  explicit Relayout(const TensorView& source) : source_(source) {
    throw_unless(source.element_type() == kElementType<From>, Rule::type_mismatch, [&] {
      return name() + ": the elements are " + to_string(source.element_type()) + "; expected " +
             to_string(kElementType<From>) + "; name the source type in Relayout<To, From>";
    });
    throw_unless(detail::multiply(shape().elements(), sizeof(To)) >= 0, Rule::size_overflow, [&] {
      return name() + ": the result has more bytes than fit 63 bits; split the tensor";
    });
  }

  /// The shape of the source.
  [[nodiscard]] const Shape& shape() const noexcept { return source_.shape(); }

  /// The hull of the source.
  [[nodiscard]] std::array<ByteRange, 1> sources() const noexcept { return {source_.hull()}; }

  /// Writes every element of `out`, of the source's shape, To, row-major.
  /// \stream enqueues only; allowed while capturing: yes
  /// \cost one launch (empty result: nothing); no allocation
  /// \throws ContractError null_pointer, misaligned (`out` for To), source_overlaps_target;
  ///   CudaError if the launch is refused. Nothing is enqueued then.
  void operator()(To* out, cuda::stream_ref stream) const;

 private:
  // A copy does not look at its elements: types of one size share their kernels.
  static constexpr bool kCopies = std::same_as<To, From>;
  using Target = std::conditional_t<kCopies, detail::Raw<sizeof(To)>, To>;
  using Source = std::conditional_t<kCopies, detail::Raw<sizeof(From)>, From>;

  template <int Width, std::unsigned_integral Number, class Taken = Source>
  void launch(const detail::MergedAxes& axes, To* out, cuda::stream_ref stream) const;
  [[nodiscard]] std::string name() const { return "relayout of " + to_string(source_.shape()); }

  TensorView source_;  // as many To as its elements fit int64 bytes
};

template <class To, class From, class File>
void Relayout<To, From, File>::operator()(To* out, cuda::stream_ref stream) const {
  const std::int64_t bytes = shape().elements() * static_cast<std::int64_t>(sizeof(To));
  if (bytes == 0) return;
  detail::expects_target(out, bytes, source_.hull(), [this] { return name(); });

  constexpr int kWidth = detail::kPackWidth<To, From>;
  const detail::MergedAxes axes = detail::merge_axes(source_.shape(), source_.strides());
  const std::int64_t length = axes.extents[0];
  bool wide = axes.count > 0 && axes.strides[0] == 1 && length >= kWidth &&
              detail::is_aligned(out) && detail::is_aligned(source_.data()) &&
              (axes.count == 1 || detail::is_aligned<To>(length));
  for (int axis = 1; axis < axes.count; ++axis) {
    wide = wide && detail::is_aligned<From>(axes.strides[axis]);
  }
  if constexpr (alignof(From) > 1) {
    if (!source_.is_aligned()) {  // one kernel, whose loads cost more than what Number saves
      launch<1, std::uint64_t, detail::Unaligned<Source>>(axes, out, stream);
      return;
    }
  }
  if (shape().elements() / length > std::int64_t{(std::numeric_limits<std::uint32_t>::max)()}) {
    launch<1, std::uint64_t>(axes, out, stream);
  } else if (wide) {
    launch<kWidth, std::uint32_t>(axes, out, stream);
  } else {
    launch<1, std::uint32_t>(axes, out, stream);
  }
}

template <class To, class From, class File>
template <int Width, std::unsigned_integral Number, class Taken>
void Relayout<To, From, File>::launch(const detail::MergedAxes& axes, To* out,
                                      cuda::stream_ref stream) const {
  detail::RelayoutWork<Target, Taken, Width, Number> work{
      .source = static_cast<const Taken*>(source_.data()),
      .out = reinterpret_cast<Target*>(out),
      .rows = shape().elements() / axes.extents[0],
      .columns = (axes.extents[0] - 1) / Width + 1,
      .length = axes.extents[0],
      .stride = axes.strides[0],
      .extents = {},
      .strides = {},
      .outer = axes.count > 1 ? axes.count - 1 : 0,
  };
  for (int axis = 1; axis < kMaxRank; ++axis) {
    work.extents[axis - 1] = axes.extents[axis];
    work.strides[axis - 1] = axes.strides[axis];
  }
  detail::launch(work, stream, [&] { return name() + ": launch"; });
}

static_assert(Recipe<Relayout<float>, float>);
static_assert(Recipe<Relayout<__nv_bfloat16, float>, __nv_bfloat16>);
static_assert(Recipe<Relayout<std::int64_t>, std::int64_t>);

}  // namespace holdfast
