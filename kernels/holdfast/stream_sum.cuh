// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// StreamSum: the recipe that sums a weight over its stream axis.
///
/// DeepSeek V4 derives `hc_attn_fn_broadcast` [24, hidden] from `hc_attn_fn` [24, streams * hidden]
/// this way, for the first layer, whose streams are all equal. The order of the sum is part of the
/// contract: the same source gives the same bits on any device, in any launch, and in f32 with four
/// streams and hidden above 1 the bits of PyTorch's `view(rows, 4, hidden).sum(1)`. Streams, in the
/// plural, are the model's residual streams; `stream` is CUDA's.

#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/detail/target.cuh"
#include "holdfast/error.hpp"
#include "holdfast/recipe.hpp"
#include "holdfast/tensor_view.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace holdfast {

namespace detail {

/// out[row, i] = ((0 + x[row, 0, i]) + x[row, 1, i]) + ... for the `Width` elements i of a column.
/// `Streams` is the number of streams where it is known when compiling, else 0. `Index` holds every
/// offset in elements, within the source and within the result.
template <Floating To, class From, int Width, int Streams, class IndexType>
requires Floating<Element<From>>
struct StreamSumWork {
  using Index = IndexType;

  const From* source;  // [rows, streams, columns * Width], innermost stride 1
  To* out;             // [rows, columns * Width], row-major
  Index rows;
  Index columns;        // of Width elements
  Index streams;        // at least 1
  Index row_stride;     // elements
  Index stream_stride;  // elements

  struct Line {
    Index source;  // offsets of the row, in elements and in packs
    Index out;
  };

  [[nodiscard]] __host__ __device__ Line line(Index row) const {
    return {row * row_stride, row * columns};
  }

  __host__ __device__ void operator()(const Line& line, Index column) const {
    const Index first = line.source + column * Width;
    float sums[Width] = {};  // +0.0, as PyTorch: a column of -0.0 sums to +0.0
    if constexpr (Streams > 0) {
      add<Streams>(first, 0, sums);
    } else {
      Index stream = 0;
      for (; streams - stream >= 4; stream += 4) add<4>(first, stream, sums);
      if (streams - stream >= 2) {
        add<2>(first, stream, sums);
        stream += 2;
      }
      if (streams - stream >= 1) add<1>(first, stream, sums);
    }
    Pack<To, Width> rounded;
    for (int i = 0; i < Width; ++i) rounded.values[i] = from_float<To>(sums[i]);
    store(out + std::int64_t{line.out + column} * Width, rounded);
  }

 private:
  // Adds the streams stream, ..., stream + Count - 1 in this order. All loads come first: their
  // latencies then overlap.
  template <int Count>
  __host__ __device__ void add(Index first, Index stream, float (&sums)[Width]) const {
    Pack<Element<From>, Width> terms[Count];
    for (int s = 0; s < Count; ++s) {
      terms[s] = load<Width>(source + (first + (stream + s) * stream_stride));
    }
    for (int s = 0; s < Count; ++s) {
      for (int i = 0; i < Width; ++i) sums[i] = plus(sums[i], to_float(terms[s].values[i]));
    }
  }
};

}  // namespace detail

/// Sums a weight over its stream axis, into a contiguous tensor of its own type or another one.
///
///     out[row, i] = round_To(((0 + x[row, 0, i]) + x[row, 1, i]) + ... + x[row, streams - 1, i])
///
/// \code
/// holdfast::TensorView hc_attn_fn{weight, {24, 4 * hidden}, device};          // loaded, f32
/// broadcast.finalize(holdfast::StreamSum<float>{hc_attn_fn, 4}, stream);      // [24, hidden]
/// \endcode
///
/// - Terms are converted to f32 (exactly), added in f32 in the order of the streams from +0.0, and
///   the sum is rounded to To once, to nearest even; beyond the range of To it becomes infinity.
///   Only which NaN a NaN becomes is not promised.
/// - The axes of rows and streams may have any stride, zero and negative too. No streams give
///   zeros.
/// - Where the source, its strides, `hidden` and the result are aligned to 16 bytes, every access
///   is 16 bytes wide; elsewhere it is one element, with the same bits and lower speed. A source
///   in a packed buffer (TensorView::packed) may lie at any byte: where that is not aligned to its
///   type it is read byte by byte, in the same launch and with the same bits.
///
/// To and From: float, __nv_bfloat16 or __half, in any combination.
template <class To, class From = To, class File = detail::ThisFile>
class StreamSum {
  static_assert(detail::Floating<To> && detail::Floating<From>,
                "StreamSum works on float, __nv_bfloat16 and __half");

 public:
  /// \param source [rows, streams, hidden] From; the axis `hidden` has stride 1.
  /// \throws ContractError type_mismatch (elements are not From), unsupported_shape (rank is not
  ///   3), not_contiguous (stride of `hidden` is not 1), size_overflow (the result has too many
  ///   bytes).
  explicit StreamSum(const TensorView& source)
      : source_(checked(source)), shape_(result(source_)) {}

  /// \param source [rows, streams * hidden] From; the streams lie one after the other.
  /// \throws ContractError as above, and unsupported_shape if rank is not 2, or `streams` is below
  ///   1 or does not divide the second extent.
  StreamSum(const TensorView& source, std::int64_t streams) : StreamSum(split(source, streams)) {}

  /// [rows, hidden].
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }

  /// The hull of the source.
  [[nodiscard]] std::array<ByteRange, 1> sources() const noexcept { return {source_.hull()}; }

  /// Writes every element of `out` [rows, hidden] To, row-major.
  /// \stream enqueues only; allowed while capturing: yes
  /// \cost one launch (no streams: one memset; empty result: nothing); no allocation
  /// \throws ContractError null_pointer, misaligned (`out` for To), source_overlaps_target;
  ///   CudaError if the launch is refused. Nothing is enqueued then.
  void operator()(To* out, cuda::stream_ref stream) const;

 private:
  static const TensorView& checked(const TensorView& source);
  static TensorView split(const TensorView& source, std::int64_t streams);
  static Shape result(const TensorView& source);

  template <int Width, int Streams, class Index, class Source = From>
  void launch(To* out, cuda::stream_ref stream) const;
  [[nodiscard]] std::string name() const { return "stream_sum of " + to_string(source_.shape()); }

  TensorView source_;  // [rows, streams, hidden]
  Shape shape_;        // [rows, hidden]; its size in bytes fits int64
};

template <class To, class From, class File>
const TensorView& StreamSum<To, From, File>::checked(const TensorView& source) {
  const auto name = [&] { return "stream_sum: source " + to_string(source.shape()); };
  throw_unless(source.element_type() == kElementType<From>, Rule::type_mismatch, [&] {
    return name() + ": the elements are " + to_string(source.element_type()) + "; expected " +
           to_string(kElementType<From>) + "; name the source type in StreamSum<To, From>";
  });
  throw_unless(source.shape().rank() == 3, Rule::unsupported_shape, [&] {
    return name() + ": rank " + std::to_string(source.shape().rank()) +
           "; expected [rows, streams, hidden]; for [rows, streams * hidden] give the number of "
           "streams";
  });
  throw_unless(source.shape()[2] <= 1 || source.strides()[2] == 1, Rule::not_contiguous, [&] {
    return name() + " with strides " + to_string(source.strides()) +
           ": expected stride 1 along hidden; make it contiguous with Relayout first";
  });
  return source;
}

template <class To, class From, class File>
TensorView StreamSum<To, From, File>::split(const TensorView& source, std::int64_t streams) {
  const auto name = [&] { return "stream_sum: source " + to_string(source.shape()); };
  throw_unless(source.shape().rank() == 2, Rule::unsupported_shape, [&] {
    return name() + ": rank " + std::to_string(source.shape().rank()) +
           "; expected [rows, streams * hidden]; a source of rank 3 needs no number of streams";
  });
  throw_unless(streams >= 1 && source.shape()[1] % streams == 0, Rule::unsupported_shape, [&] {
    return name() + ": " + std::to_string(streams) +
           " streams do not divide the second extent; expected a divisor, 1 or more";
  });
  return source.unflatten(1, Shape{streams, source.shape()[1] / streams});
}

template <class To, class From, class File>
Shape StreamSum<To, From, File>::result(const TensorView& source) {
  const std::int64_t rows = source.shape()[0];
  const std::int64_t hidden = source.shape()[2];
  const std::int64_t elements = detail::multiply(rows, hidden);
  throw_unless(elements >= 0 && detail::multiply(elements, sizeof(To)) >= 0, Rule::size_overflow,
               [&] {
                 return "stream_sum: source " + to_string(source.shape()) + ": the result [" +
                        std::to_string(rows) + ", " + std::to_string(hidden) +
                        "] has more bytes than fit 63 bits; split the tensor";
               });
  return Shape{rows, hidden};
}

template <class To, class From, class File>
void StreamSum<To, From, File>::operator()(To* out, cuda::stream_ref stream) const {
  const std::int64_t bytes = shape_.elements() * static_cast<std::int64_t>(sizeof(To));
  if (bytes == 0) return;
  const ByteRange hull = source_.hull();
  detail::expects_target(out, bytes, hull, [this] { return name(); });
  const std::int64_t streams = source_.shape()[1];
  if (streams == 0) {  // all bits zero is +0.0 in all three types
    throw_on_error(cudaMemsetAsync(out, 0, static_cast<std::size_t>(bytes), detail::native(stream)),
                   [&] { return name() + ": zeros for no streams"; });
    return;
  }

  constexpr int kWidth = detail::kPackWidth<To, From>;
  const std::int64_t rows = shape_[0];
  const std::int64_t hidden = shape_[1];
  const bool wide = hidden % kWidth == 0 && detail::is_aligned(out) &&
                    detail::is_aligned(source_.data()) &&
                    (rows == 1 || detail::is_aligned<From>(source_.strides()[0])) &&
                    (streams == 1 || detail::is_aligned<From>(source_.strides()[1]));
  const bool small =
      hull.bytes() / sizeof(From) <= detail::kMaxSmall && shape_.elements() <= detail::kMaxSmall;
  if (!source_.is_aligned()) {
    launch<1, 0, std::int64_t, detail::Unaligned<From>>(out, stream);
  } else if (!wide) {
    launch<1, 0, std::int64_t>(out, stream);
  } else if (streams == 4 && small) {  // DeepSeek V4: 4 streams of 24 x 4096 or 24 x 7168
    launch<kWidth, 4, std::int32_t>(out, stream);
  } else {
    launch<kWidth, 0, std::int64_t>(out, stream);
  }
}

template <class To, class From, class File>
template <int Width, int Streams, class Index, class Source>
void StreamSum<To, From, File>::launch(To* out, cuda::stream_ref stream) const {
  // The stride of an axis of one element means nothing, and may be too large for Index.
  const auto stride = [&](int axis) {
    return static_cast<Index>(source_.shape()[axis] > 1 ? source_.strides()[axis] : 0);
  };
  const detail::StreamSumWork<To, Source, Width, Streams, Index> work{
      .source = static_cast<const Source*>(source_.data()),
      .out = out,
      .rows = static_cast<Index>(shape_[0]),
      .columns = static_cast<Index>(shape_[1] / Width),
      .streams = static_cast<Index>(source_.shape()[1]),
      .row_stride = stride(0),
      .stream_stride = stride(1),
  };
  detail::launch(work, stream, [&] { return name() + ": launch"; });
}

static_assert(Recipe<StreamSum<float>, float>);
static_assert(Recipe<StreamSum<__nv_bfloat16, float>, __nv_bfloat16>);
static_assert(Recipe<StreamSum<float, __half>, float>);

}  // namespace holdfast
