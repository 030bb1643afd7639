// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// StreamSum against a sum that this file computes by itself: its own loop, its own reading of bf16
/// and f16 and its own rounding.

#include <holdfast/stream_sum.cuh>

#include "support/runtime.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

template class holdfast::StreamSum<float>;
template class holdfast::StreamSum<float, __nv_bfloat16>;
template class holdfast::StreamSum<float, __half>;
template class holdfast::StreamSum<__nv_bfloat16, float>;
template class holdfast::StreamSum<__nv_bfloat16>;
template class holdfast::StreamSum<__nv_bfloat16, __half>;
template class holdfast::StreamSum<__half, float>;
template class holdfast::StreamSum<__half, __nv_bfloat16>;
template class holdfast::StreamSum<__half>;

namespace {

using holdfast::Rule;
using holdfast::Shape;
using holdfast::Strides;
using holdfast::TensorView;
using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr std::int64_t kGuard =
    64;  // elements around a tensor; whole 16-byte accesses in each type
constexpr int kPoison = 0xCB;

template <class T>
const char* name() {
  return holdfast::to_string(holdfast::kElementType<T>);
}

// --- An independent reading of the formats, and rounding to them

float widen(float value) { return value; }

float widen(bf16 value) {
  return test::bits<float>(static_cast<std::uint32_t>(test::bits<std::uint16_t>(value)) << 16U);
}

float widen(f16 value) {
  const unsigned pattern = test::bits<std::uint16_t>(value);
  const int exponent = static_cast<int>((pattern >> 10U) & 31U);
  const int fraction = static_cast<int>(pattern & 1023U);
  float result = 0;
  if (exponent == 31) {
    result = fraction == 0 ? INFINITY : NAN;
  } else {
    result = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                           : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return (pattern & 0x8000U) != 0 ? -result : result;
}

struct Format {
  int fraction_bits;
  int smallest_exponent;  // of a normal number
  int largest_exponent;
};
template <class T>
constexpr Format kFormat{23, -126, 127};
template <>
constexpr Format kFormat<bf16>{7, -126, 127};
template <>
constexpr Format kFormat<f16>{10, -14, 15};

// The value that rounding `value` to T gives: to nearest, ties to even.
template <class T>
float rounded(float value) {
  if (!std::isfinite(value) || value == 0) return value;
  constexpr Format format = kFormat<T>;
  const int exponent = std::max(std::ilogb(value), format.smallest_exponent);
  const double ulp = std::ldexp(1.0, exponent - format.fraction_bits);
  const double nearest = std::nearbyint(value / ulp) * ulp;  // the default mode: ties to even
  if (std::abs(nearest) >= std::ldexp(1.0, format.largest_exponent + 1)) {
    return std::copysign(INFINITY, value);
  }
  return static_cast<float>(std::copysign(nearest, value));
}

float sum_in_order(const std::vector<float>& terms) {
  volatile float sum = 0.0F;  // volatile: one f32 addition after the other, whatever the flags
  for (const float term : terms) sum = sum + term;
  return sum;
}

template <class T>
T encode(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(value);
  } else {
    return __float2half_rn(value);
  }
}

// --- Inputs

std::uint32_t hash(std::int64_t row, std::int64_t stream, std::int64_t i) {
  auto x = static_cast<std::uint64_t>(row) * 0x9E3779B97F4A7C15U +
           static_cast<std::uint64_t>(stream) * 0xC2B2AE3D27D4EB4FU +
           static_cast<std::uint64_t>(i) * 0x165667B19E3779F9U + 1;
  x ^= x >> 31U;
  x *= 0xBF58476D1CE4E5B9U;
  x ^= x >> 29U;
  return static_cast<std::uint32_t>(x >> 32U);
}

// In turn along a row: an integer that tells rows, streams and columns apart; a random number in
// [-1, 1); and terms whose f32 sum depends on the order, since a small one is lost beside a big
// one.
template <class From>
From value(std::int64_t row, std::int64_t stream, std::int64_t i) {
  switch ((row + i) % 3) {
    case 0: return encode<From>(static_cast<float>(1 + (row * 131 + stream * 17 + i * 3) % 251));
    case 1: return encode<From>(std::ldexp(static_cast<float>(hash(row, stream, i)), -31) - 1.0F);
    default: {
      constexpr bool kNarrow = std::is_same_v<From, f16>;
      const float big = kNarrow ? 32768.0F : 1e8F;
      const float small = kNarrow ? 0x1p-12F : 1.0F;
      const std::array<float, 8> terms = {big,       small,    -big,    3 * small,
                                          2 * small, -big / 2, big / 2, 5 * small};
      return encode<From>(terms[static_cast<std::size_t>(stream % 8)]);
    }
  }
}

struct Layout {
  std::int64_t rows;
  std::int64_t streams;
  std::int64_t hidden;
  std::int64_t row_stride;
  std::int64_t stream_stride;
  std::int64_t source_shift = 0;  // elements off a 16-byte boundary
  std::int64_t out_shift = 0;

  [[nodiscard]] std::string text() const {
    return "rows " + std::to_string(rows) + ", streams " + std::to_string(streams) + ", hidden " +
           std::to_string(hidden) + ", row stride " + std::to_string(row_stride) +
           ", stream stride " + std::to_string(stream_stride) + ", source shift " +
           std::to_string(source_shift) + ", out shift " + std::to_string(out_shift);
  }
};

Layout contiguous(std::int64_t rows, std::int64_t streams, std::int64_t hidden) {
  return {rows, streams, hidden, streams * hidden, hidden};
}

// A source on the device, with NaN around and between its elements, and what its sum must be.
template <class To, class From>
class Problem {
 public:
  template <class Value>
  Problem(const Layout& layout, const Value& value_at)
      : layout_(layout), memory_(fill(layout, value_at)), device_(memory_) {}
  explicit Problem(const Layout& layout) : Problem(layout, value<From>) {}

  [[nodiscard]] TensorView view() const {
    return {static_cast<const From*>(device_.data()) + first(layout_),
            Shape{layout_.rows, layout_.streams, layout_.hidden},
            Strides{layout_.row_stride, layout_.stream_stride, 1}, 0};
  }

  // The source alone, from byte `offset` of a bucket to its last one.
  [[nodiscard]] std::vector<std::uint8_t> bucket(std::size_t offset) const {
    std::vector<std::uint8_t> bytes(offset, kPoison);
    if (empty(layout_)) return bytes;
    const auto* begin =
        reinterpret_cast<const std::uint8_t*>(memory_.data() + kGuard + layout_.source_shift);
    const auto* end =
        reinterpret_cast<const std::uint8_t*>(memory_.data() + memory_.size() - kGuard);
    bytes.insert(bytes.end(), begin, end);
    return bytes;
  }
  [[nodiscard]] TensorView packed_view(const std::uint8_t* source) const {
    const std::int64_t first = empty(layout_) ? 0 : -lowest(layout_);
    return TensorView::packed<From>(source + first * static_cast<std::int64_t>(sizeof(From)),
                                    {layout_.rows, layout_.streams, layout_.hidden},
                                    {layout_.row_stride, layout_.stream_stride, 1}, 0);
  }

  [[nodiscard]] std::vector<float> expected() const {
    std::vector<float> sums;
    for (std::int64_t row = 0; row < layout_.rows; ++row) {
      for (std::int64_t i = 0; i < layout_.hidden; ++i) {
        std::vector<float> terms;
        for (std::int64_t stream = 0; stream < layout_.streams; ++stream) {
          terms.push_back(widen(memory_[at(layout_, row, stream, i)]));
        }
        sums.push_back(rounded<To>(sum_in_order(terms)));
      }
    }
    return sums;
  }

  // Runs `recipe` in both modes and compares every element and the guards.
  template <class Recipe>
  void check(const Recipe& recipe, cudaStream_t stream) const {
    SCOPED_TRACE(std::string(name<To>()) + " from " + name<From>() + ", " + layout_.text());
    const std::vector<float> want = expected();
    EXPECT_EQ(recipe.shape(), (Shape{layout_.rows, layout_.hidden}));
    const auto begin = static_cast<std::size_t>(kGuard + layout_.out_shift);
    const test::DeviceArray<To> out(begin + want.size() + static_cast<std::size_t>(kGuard));
    for (const test::Mode mode : test::kModes) {
      SCOPED_TRACE(test::to_string(mode));
      out.poison(kPoison);
      test::run(mode, stream, [&] { recipe(out.data() + begin, cuda::stream_ref{stream}); });
      compare(out.download(), begin, want);
    }
  }

 private:
  static std::int64_t lowest(const Layout& layout) {
    return std::min<std::int64_t>(0, (layout.rows - 1) * layout.row_stride) +
           std::min<std::int64_t>(0, (layout.streams - 1) * layout.stream_stride);
  }
  static std::int64_t first(const Layout& layout) {
    return empty(layout) ? 0 : kGuard + layout.source_shift - lowest(layout);
  }
  static bool empty(const Layout& layout) {
    return layout.rows == 0 || layout.streams == 0 || layout.hidden == 0;
  }
  static std::size_t at(const Layout& layout, std::int64_t row, std::int64_t stream,
                        std::int64_t i) {
    return static_cast<std::size_t>(first(layout) + row * layout.row_stride +
                                    stream * layout.stream_stride + i);
  }

  template <class Value>
  static std::vector<From> fill(const Layout& layout, const Value& value_at) {
    if (empty(layout)) return {};
    const std::int64_t highest =
        std::max<std::int64_t>(0, (layout.rows - 1) * layout.row_stride) +
        std::max<std::int64_t>(0, (layout.streams - 1) * layout.stream_stride) + layout.hidden;
    std::vector<From> memory(static_cast<std::size_t>(first(layout) + highest + kGuard),
                             encode<From>(NAN));
    for (std::int64_t row = 0; row < layout.rows; ++row) {
      for (std::int64_t stream = 0; stream < layout.streams; ++stream) {
        for (std::int64_t i = 0; i < layout.hidden; ++i) {
          memory[at(layout, row, stream, i)] = value_at(row, stream, i);
        }
      }
    }
    return memory;
  }

  static void compare(const std::vector<To>& got, std::size_t begin,
                      const std::vector<float>& want) {
    const std::vector<std::uint8_t> untouched(sizeof(To), kPoison);
    for (std::size_t k = 0; k < got.size(); ++k) {
      if (k < begin || k >= begin + want.size()) {
        ASSERT_EQ(std::memcmp(&got[k], untouched.data(), sizeof(To)), 0)
            << "wrote outside the result, at element "
            << static_cast<std::int64_t>(k) - static_cast<std::int64_t>(begin);
        continue;
      }
      const float have = widen(got[k]);
      const float expect = want[k - begin];
      if (std::isnan(expect)) {
        ASSERT_TRUE(std::isnan(have)) << "element " << k - begin << " is " << have << ", not NaN";
      } else {
        ASSERT_EQ(test::bits<std::uint32_t>(have), test::bits<std::uint32_t>(expect))
            << "element " << k - begin << " is " << have << ", not " << expect;
      }
    }
  }

  Layout layout_;
  std::vector<From> memory_;
  test::DeviceArray<From> device_;
};

template <class To, class From>
void expect_sum(cudaStream_t stream, const Layout& layout) {
  const Problem<To, From> problem(layout);
  problem.check(holdfast::StreamSum<To, From>{problem.view()}, stream);
}

template <class To, class From>
void expect_packed_sum(cudaStream_t stream, std::size_t offset, const Layout& layout) {
  SCOPED_TRACE("byte " + std::to_string(offset));
  const Problem<To, From> problem(layout);
  const test::DeviceArray<std::uint8_t> bucket(problem.bucket(offset));
  const TensorView view = problem.packed_view(bucket.data() + offset);
  EXPECT_EQ(view.is_aligned(), offset % alignof(From) == 0);
  problem.check(holdfast::StreamSum<To, From>{view}, stream);
}

// --- Every pair of types

template <class ToType, class FromType>
struct Pair {
  using To = ToType;
  using From = FromType;
};
using Pairs = ::testing::Types<Pair<float, float>, Pair<float, bf16>, Pair<float, f16>,
                               Pair<bf16, float>, Pair<bf16, bf16>, Pair<bf16, f16>,
                               Pair<f16, float>, Pair<f16, bf16>, Pair<f16, f16>>;
struct PairName {
  template <class P>
  static std::string GetName(int /*index*/) {
    return std::string(name<typename P::To>()) + "_from_" + name<typename P::From>();
  }
};

template <class P>
class StreamSumOf : public test::Cuda {
 protected:
  void expect(const Layout& layout) const {
    expect_sum<typename P::To, typename P::From>(this->stream, layout);
  }
  void expect_packed(std::size_t offset, const Layout& layout) const {
    expect_packed_sum<typename P::To, typename P::From>(this->stream, offset, layout);
  }
};
TYPED_TEST_SUITE(StreamSumOf, Pairs, PairName);

TYPED_TEST(StreamSumOf, IsTheSumInOrderForEverySize) {
  // 0 and 1; a whole vector (4 or 8) and its neighbours; a block (128 threads) and its neighbours
  for (const std::int64_t hidden : {0, 1, 4, 7, 8, 9, 16, 127, 128, 129}) {
    for (const std::int64_t streams : {0, 1, 2, 3, 4, 5, 8, 11}) {
      for (const std::int64_t rows : {0, 1, 2, 3}) this->expect(contiguous(rows, streams, hidden));
    }
  }
}

TYPED_TEST(StreamSumOf, IsTheSumInOrderForTheSizesOfModels) {
  this->expect(contiguous(24, 4, 4096));
  this->expect(contiguous(2, 4, 4100));  // f32 in vectors, the others not
  this->expect(contiguous(3, 4, 7168));
  this->expect(contiguous(2, 5, 7168));
}

TYPED_TEST(StreamSumOf, ReadsAnyAlignment) {
  for (const std::int64_t source_shift : {0, 1, 4}) {
    for (const std::int64_t out_shift : {0, 1, 4}) {
      for (const std::int64_t streams : {3, 4}) {
        Layout layout = contiguous(3, streams, 64);
        layout.source_shift = source_shift;
        layout.out_shift = out_shift;
        this->expect(layout);
      }
    }
  }
}

TYPED_TEST(StreamSumOf, ReadsAnyStride) {
  for (const std::int64_t streams : {1, 2, 4, 6}) {
    for (const std::int64_t gap : {0, 1, 4, 16}) {
      const std::int64_t stride = 64 + gap;
      const std::int64_t row = streams * stride + gap;
      this->expect({3, streams, 64, row, stride});         // padded
      this->expect({3, streams, 64, stride, 3 * stride});  // streams outermost
      this->expect({3, streams, 64, row, 0});              // one stream, read several times
      this->expect({3, streams, 64, 0, stride});           // one row, several times
      this->expect({3, streams, 64, -row, stride});        // upside down
      this->expect({3, streams, 64, row, -stride});
      this->expect({3, streams, 64, -row, -stride});
      this->expect({3, streams, 64, gap, gap});   // windows that overlap
      this->expect({1, streams, 64, 7, stride});  // the stride of a single row says nothing
    }
  }
  this->expect({3, 1, 64, 64, 7});  // nor that of a single stream
}

TYPED_TEST(StreamSumOf, ReadsPackedSourcesAtAnyByte) {
  for (std::size_t offset = 0; offset <= 32; ++offset) {
    this->expect_packed(offset, contiguous(3, 4, 32));
    this->expect_packed(offset, contiguous(2, 3, 33));
  }
  for (const std::size_t offset : {1, 2, 6}) {
    for (const std::int64_t hidden : {0, 1, 2, 7, 8, 9, 127, 128, 129}) {
      for (const std::int64_t streams : {0, 1, 2, 3, 4, 5, 8}) {
        for (const std::int64_t rows : {0, 1, 3}) {
          this->expect_packed(offset, contiguous(rows, streams, hidden));
        }
      }
    }
  }
  this->expect_packed(6, contiguous(24, 4, 4096));
  this->expect_packed(5, contiguous(3, 4, 7168));
}

TYPED_TEST(StreamSumOf, ReadsPackedSourcesOfAnyStride) {
  for (const std::size_t offset : {1, 2, 3, 4}) {
    for (const std::int64_t streams : {1, 4, 6}) {
      const std::int64_t stride = 64 + 5;
      const std::int64_t row = streams * stride + 3;
      this->expect_packed(offset, {3, streams, 64, row, stride});
      this->expect_packed(offset, {3, streams, 64, stride, 3 * stride});
      this->expect_packed(offset, {3, streams, 64, row, 0});
      this->expect_packed(offset, {3, streams, 64, 0, stride});
      this->expect_packed(offset, {3, streams, 64, -row, stride});
      this->expect_packed(offset, {3, streams, 64, -row, -stride});
    }
  }
}

TYPED_TEST(StreamSumOf, GivesForAPackedSourceTheBitsOfItsAlignedCopy) {
  using To = typename TypeParam::To;
  using From = typename TypeParam::From;
  const Problem<To, From> problem(contiguous(5, 4, 96));
  const test::DeviceArray<std::uint8_t> bucket(problem.bucket(7));
  const TensorView packed = TensorView::packed<From>(bucket.data() + 7, Shape{5, 4 * 96}, 0);
  const test::DeviceArray<To> out(5 * 96);
  const auto bytes = [&](const auto& recipe) {
    out.poison(kPoison);
    recipe(out.data(), cuda::stream_ref{this->stream});
    return test::download(reinterpret_cast<const std::uint8_t*>(out.data()), out.bytes());
  };
  EXPECT_TRUE(bytes(holdfast::StreamSum<To, From>{packed, 4}) ==
              bytes(holdfast::StreamSum<To, From>{problem.view()}));
}

TYPED_TEST(StreamSumOf, StartsFromPositiveZero) {
  using To = typename TypeParam::To;
  using From = typename TypeParam::From;
  for (const std::int64_t streams : {0, 1, 3, 4, 8}) {
    for (const std::int64_t hidden : {1, 32}) {
      const Problem<To, From> problem(
          contiguous(3, streams, hidden),
          [](std::int64_t, std::int64_t, std::int64_t) { return encode<From>(-0.0F); });
      for (const float sum : problem.expected()) {
        ASSERT_EQ(test::bits<std::uint32_t>(sum), 0U);  // +0.0: the reference says so too
      }
      problem.check(holdfast::StreamSum<To, From>{problem.view()}, this->stream);
    }
  }
}

TYPED_TEST(StreamSumOf, CarriesInfinityAndNan) {
  using To = typename TypeParam::To;
  using From = typename TypeParam::From;
  for (const std::int64_t hidden : {5, 32}) {
    const Problem<To, From> problem(contiguous(2, 4, hidden),
                                    [](std::int64_t row, std::int64_t s, std::int64_t i) {
                                      const bool here = s == (row + 1) % 4;
                                      switch (i % 5) {
                                        case 0: return encode<From>(here ? INFINITY : 1.0F);
                                        case 1: return encode<From>(here ? -INFINITY : 1.0F);
                                        case 2: return encode<From>(here ? NAN : 1.0F);
                                        case 3:
                                          return encode<From>(s % 2 == 0 ? INFINITY : -INFINITY);
                                        default: return encode<From>(1.0F);
                                      }
                                    });
    problem.check(holdfast::StreamSum<To, From>{problem.view()}, this->stream);
  }
}

TYPED_TEST(StreamSumOf, RoundsTheSumOnce) {
  using To = typename TypeParam::To;
  using From = typename TypeParam::From;
  // Two streams: a number of either type, and a part of its last place, exact in each type. So sums
  // lie below, on and above the middle of two neighbours, among subnormals and at the largest
  // number.
  constexpr Format narrow = kFormat<To>;
  const std::array<float, 8> parts = {0.0F, 0.25F, 0.5F, 0.75F, -0.25F, -0.5F, -0.75F, 1.0F};
  const int low = std::max(narrow.smallest_exponent, kFormat<From>.smallest_exponent);
  const int high = std::min(narrow.largest_exponent, kFormat<From>.largest_exponent);
  for (const int exponent : {low - 2, low, -1, 0, 3, high}) {
    const Problem<To, From> problem(
        contiguous(2, 2, 512), [&](std::int64_t row, std::int64_t s, std::int64_t i) {
          const float last_place =
              std::ldexp(1.0F, std::max(exponent, narrow.smallest_exponent) - narrow.fraction_bits);
          const float sign = row == 0 ? 1.0F : -1.0F;
          const auto part = parts[static_cast<std::size_t>(i % 8)];
          if (s == 1) return encode<From>(sign * part * last_place);
          // the last number of the binade (odd, may round up into the next), and others
          const float significand = i < 64 ? 2.0F - std::ldexp(1.0F, -7)
                                           : 1.0F + std::ldexp(static_cast<float>(i / 8), -7);
          return encode<From>(sign * std::ldexp(std::min(significand, 1.9921875F), exponent));
        });
    problem.check(holdfast::StreamSum<To, From>{problem.view()}, this->stream);
  }
}

TYPED_TEST(StreamSumOf, SplitsRowsIntoStreams) {
  using To = typename TypeParam::To;
  using From = typename TypeParam::From;
  for (const std::int64_t streams : {1, 2, 4, 8}) {
    const Layout layout{3, streams, 40, streams * 40 + 8, 40};
    const Problem<To, From> problem(layout);
    const TensorView flat(problem.view().template data_as<From>(), Shape{3, streams * 40},
                          Strides{layout.row_stride, 1}, 0);
    problem.check(holdfast::StreamSum<To, From>{flat, streams}, this->stream);
  }
}

// --- f32

class StreamSum : public test::Cuda {};

template <class From = float>
TensorView dummy(const Shape& shape, const Strides& strides) {
  alignas(16) static const std::byte memory[16] = {};
  return {reinterpret_cast<const From*>(memory), shape, strides, 0};  // never read
}
template <class From = float>
TensorView dummy(const Shape& shape) {
  return dummy<From>(shape, Strides::contiguous(shape));
}

TEST_F(StreamSum, GivesTheGoldenValuesOfTheSpecification) {
  constexpr std::int64_t kRows = 24;
  std::vector<float> fn;
  for (std::int64_t o = 0; o < kRows; ++o) {
    for (std::int64_t s = 0; s < 4; ++s) {
      for (std::int64_t h = 0; h < 4; ++h) {
        fn.push_back(static_cast<float>((5 * o + 3 * s + 2 * h) % 13 - 6) / 16);
      }
    }
  }
  const test::DeviceArray<float> source(fn);
  const holdfast::StreamSum<float> recipe{
      TensorView(static_cast<const float*>(source.data()), Shape{kRows, 16}, 0), 4};
  const test::DeviceArray<float> out(kRows * 4);
  for (const test::Mode mode : test::kModes) {
    SCOPED_TRACE(test::to_string(mode));
    out.poison(kPoison);
    test::run(mode, stream, [&] { recipe(out.data(), cuda::stream_ref{stream}); });
    const std::vector<float> sums = out.download();
    const auto row = [&](std::size_t r) {
      return std::vector<float>(sums.begin() + static_cast<std::ptrdiff_t>(4 * r),
                                sums.begin() + static_cast<std::ptrdiff_t>(4 * r + 4));
    };
    EXPECT_EQ(row(0), (std::vector<float>{-0.375F, 0.125F, -0.1875F, 0.3125F}));
    EXPECT_EQ(row(1), (std::vector<float>{0.0625F, -0.25F, 0.25F, -0.0625F}));
    EXPECT_EQ(row(23), (std::vector<float>{-0.0625F, -0.375F, 0.125F, -0.1875F}));
  }
}

TEST_F(StreamSum, StaysWithinTheBoundOfAFloat64Sum) {
  constexpr std::int64_t kRows = 24;
  constexpr std::int64_t kHidden = 7168;
  const auto random = [](std::int64_t row, std::int64_t s, std::int64_t i) {
    return std::ldexp(static_cast<float>(hash(row, s, i)), -31) - 1.0F;
  };
  const Problem<float, float> problem(contiguous(kRows, 4, kHidden), random);
  const test::DeviceArray<float> out(kRows * kHidden);
  test::run(test::Mode::eager, stream, [&] {
    holdfast::StreamSum<float>{problem.view()}(out.data(), cuda::stream_ref{stream});
  });
  const std::vector<float> sums = out.download();
  double largest_error = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i < kHidden; ++i) {
      double exact = 0;  // four f32 of size 1: exact in f64
      double magnitude = 0;
      for (std::int64_t s = 0; s < 4; ++s) {
        exact += random(row, s, i);
        magnitude += std::abs(random(row, s, i));
      }
      const double error =
          std::abs(static_cast<double>(sums[static_cast<std::size_t>(row * kHidden + i)]) - exact);
      // 0 + x0 is exact. Each of the three other additions errs by at most 2^-24 of its result, and
      // n - 1 such additions together by at most (n - 1) 2^-24 sum|x| (Jeannerod and Rump, 2013).
      ASSERT_LE(error, 3 * 0x1p-24 * magnitude) << "row " << row << ", i " << i;
      largest_error = std::max(largest_error, error);
    }
  }
  EXPECT_GT(largest_error, 0.0);  // else the inputs tested no rounding
}

TEST_F(StreamSum, GivesTheSameBitsEveryTime) {
  const Problem<float, float> problem(contiguous(24, 4, 4096));
  const holdfast::StreamSum<float> recipe{problem.view()};
  const test::DeviceArray<float> out(24 * 4096);
  const auto again = [&](auto&& go) {
    out.poison(kPoison);
    go();
    const std::vector<float> sums = out.download();
    std::vector<std::uint32_t> patterns;
    for (const float sum : sums) patterns.push_back(test::bits<std::uint32_t>(sum));
    return patterns;
  };
  const auto enqueue = [&] { recipe(out.data(), cuda::stream_ref{stream}); };
  const auto first = again([&] { test::run(test::Mode::eager, stream, enqueue); });
  EXPECT_EQ(first, again([&] { test::run(test::Mode::eager, stream, enqueue); }));
  const test::Graph graph(stream, enqueue);
  for (int replay = 0; replay < 3; ++replay) {
    EXPECT_EQ(first, again([&] {
                graph.launch(stream);
                sync();
              }));
  }
}

TEST_F(StreamSum, ReadsItsSourceAtEachReplay) {
  const Problem<float, float> problem(contiguous(2, 4, 8));
  const test::DeviceArray<float> source(std::vector<float>(2 * 4 * 8, 1.0F));
  const test::DeviceArray<float> out(16);
  const holdfast::StreamSum<float> recipe{TensorView(source.data(), Shape{2, 4, 8}, 0)};
  const test::Graph graph(stream, [&] { recipe(out.data(), cuda::stream_ref{stream}); });
  for (const float weight : {1.0F, 2.0F}) {
    source.upload(std::vector<float>(2 * 4 * 8, weight));
    graph.launch(stream);
    sync();
    EXPECT_EQ(out.download(), std::vector<float>(16, 4 * weight));
  }
}

TEST_F(StreamSum, IsOneNode) {
  const auto nodes = [&](const TensorView& source, float* out) {
    const test::Graph graph(
        stream, [&] { holdfast::StreamSum<float>{source}(out, cuda::stream_ref{stream}); });
    return graph.nodes();
  };
  const test::DeviceArray<float> source(24 * 4 * 32);
  const test::DeviceArray<float> out(24 * 32 + 1);
  const TensorView view(source.data(), Shape{24, 4, 32}, 0);
  EXPECT_EQ(nodes(view, out.data()), 1U);
  EXPECT_EQ(nodes(view, out.data() + 1), 1U);             // unaligned
  EXPECT_EQ(nodes(view.slice(1, 0, 0), out.data()), 1U);  // no streams: zeros
  EXPECT_EQ(nodes(view.slice(2, 0, 0), out.data()), 0U);  // an empty result
  EXPECT_EQ(nodes(view.slice(0, 0, 0), nullptr), 0U);
  const auto* const bucket = reinterpret_cast<const std::byte*>(source.data());
  const TensorView packed = TensorView::packed<float>(bucket + 6, Shape{23, 4, 32}, 0);
  EXPECT_EQ(nodes(packed, out.data()), 1U);
  EXPECT_EQ(nodes(packed.slice(1, 0, 0), out.data()), 1U);
  EXPECT_EQ(nodes(packed.slice(2, 0, 0), out.data()), 0U);
}

TEST_F(StreamSum, WaitsForItsStreamAndNoOther) {
  const Problem<float, float> problem(contiguous(2, 4, 32));
  const holdfast::StreamSum<float> recipe{problem.view()};
  const test::DeviceArray<float> out(64);
  recipe(out.data(), cuda::stream_ref{stream});  // loads the kernel, which may wait for the device
  sync();
  const std::vector<float> sums = out.download();
  const std::vector<float> before(64, 7.0F);
  out.upload(before);

  cudaStream_t other = nullptr;
  test::ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  float* seen = nullptr;
  test::ok(cudaMallocHost(&seen, out.bytes()));
  std::atomic<bool> open{false};
  test::ok(cudaLaunchHostFunc(
      stream,
      [](void* gate) {
        while (!static_cast<std::atomic<bool>*>(gate)->load()) {
          std::this_thread::sleep_for(std::chrono::microseconds(10));
        }
      },
      &open));
  recipe(out.data(), cuda::stream_ref{stream});
  // `stream` is held up, so the sum has not run, and work of another stream sees what was there.
  test::ok(cudaMemcpyAsync(seen, out.data(), out.bytes(), cudaMemcpyDeviceToHost, other));
  test::ok(cudaStreamSynchronize(other));
  EXPECT_TRUE(std::equal(before.begin(), before.end(), seen));
  open = true;
  sync();
  EXPECT_EQ(out.download(), sums);
  test::ok(cudaFreeHost(seen));
  test::ok(cudaStreamDestroy(other));
}

TEST_F(StreamSum, TakesTheDefaultStreamOfAFramework) {
  const Problem<float, float> problem(contiguous(2, 4, 32));
  const test::DeviceArray<float> out(64);
  const cudaStream_t none = nullptr;  // PyTorch hands out handle 0
  for (const std::int64_t streams : {4, 0}) {
    out.poison(kPoison);
    holdfast::StreamSum<float>{problem.view().slice(1, 0, streams)}(out.data(),
                                                                    cuda::stream_ref{none});
    test::ok(cudaStreamSynchronize(cudaStreamLegacy));
    EXPECT_EQ(out.download(), streams == 0 ? std::vector<float>(64, 0.0F) : problem.expected());
  }
}

TEST_F(StreamSum, TakesMoreRowsThanAGridIsHigh) {
  constexpr std::int64_t kRows = 65535 * holdfast::detail::kThreads + 5;
  std::vector<float> values(kRows);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<float> out(values.size());
  out.poison(kPoison);
  holdfast::StreamSum<float>{TensorView(source.data(), Shape{kRows, 1, 1}, 0)}(
      out.data(), cuda::stream_ref{stream});
  sync();
  EXPECT_TRUE(out.download() == values);
}

TEST_F(StreamSum, NamesWhatItReads) {
  const test::DeviceArray<float> memory(1000);
  const auto* base = reinterpret_cast<const std::byte*>(memory.data());
  const holdfast::StreamSum<float> padded{
      TensorView(memory.data() + 8, Shape{3, 2, 10}, Strides{100, 20, 1}, 0)};
  ASSERT_EQ(padded.sources().size(), 1U);
  EXPECT_EQ(padded.sources()[0].begin, base + 8 * 4);
  EXPECT_EQ(padded.sources()[0].end, base + (8 + 200 + 20 + 10) * 4);
  EXPECT_EQ(padded.sources()[0].device, 0);
  const holdfast::StreamSum<float> upside_down{
      TensorView(memory.data() + 400, Shape{3, 2, 10}, Strides{-100, 20, 1}, 0)};
  EXPECT_EQ(upside_down.sources()[0].begin, base + 200 * 4);
  EXPECT_EQ(upside_down.sources()[0].end, base + (400 + 20 + 10) * 4);
  const holdfast::StreamSum<float> packed{
      TensorView::packed<float>(base + 6, Shape{3, 20}, Strides{100, 1}, 0), 2};
  ASSERT_EQ(packed.sources().size(), 1U);
  EXPECT_EQ(packed.sources()[0].begin, base + 6);
  EXPECT_EQ(packed.sources()[0].end, base + 6 + (200 + 20) * 4);
  EXPECT_EQ(packed.sources()[0].device, 0);
}

// --- Refusals

template <class Call>
void expect_refused(Rule rule, const char* part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const holdfast::ContractError& error) {
    EXPECT_STREQ(to_string(error.rule()), to_string(rule)) << error.what();
    EXPECT_NE(std::string(error.what()).find("stream_sum"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST_F(StreamSum, RefusesOtherSources) {
  using Sum = holdfast::StreamSum<float>;
  expect_refused(Rule::type_mismatch, "bf16", [] { Sum{dummy<bf16>({2, 4, 8})}; });
  expect_refused(Rule::type_mismatch, "expected f16", [] {
    holdfast::StreamSum<float, f16>{dummy({2, 4, 8})};
  });
  expect_refused(Rule::type_mismatch, "i32", [] { Sum{dummy<std::int32_t>({2, 32}), 4}; });
  expect_refused(Rule::unsupported_shape, "rank 2", [] { Sum{dummy({2, 32})}; });
  expect_refused(Rule::unsupported_shape, "rank 0", [] { Sum{dummy({})}; });
  expect_refused(Rule::unsupported_shape, "rank 4", [] { Sum{dummy({1, 2, 4, 8})}; });
  expect_refused(Rule::unsupported_shape, "rank 3", [] { Sum(dummy({2, 4, 8}), 4); });
  expect_refused(Rule::unsupported_shape, "rank 1", [] { Sum(dummy({32}), 4); });
  expect_refused(Rule::unsupported_shape, "3 streams", [] { Sum(dummy({2, 32}), 3); });
  expect_refused(Rule::unsupported_shape, "0 streams", [] { Sum(dummy({2, 32}), 0); });
  expect_refused(Rule::unsupported_shape, "0 streams", [] { Sum(dummy({2, 0}), 0); });
  expect_refused(Rule::unsupported_shape, "-4 streams", [] { Sum(dummy({2, 32}), -4); });
  for (const std::int64_t stride : {0, 2, -1}) {
    expect_refused(Rule::not_contiguous, "along hidden", [&] {
      Sum{dummy({2, 4, 8}, Strides{32, 8, stride})};
    });
    expect_refused(Rule::not_contiguous, "along hidden", [&] {
      Sum(dummy({2, 32}, Strides{64, stride}), 4);
    });
    EXPECT_NO_THROW((Sum{dummy({2, 4, 1}, Strides{4, 1, stride})}));  // one element: no stride
  }
  EXPECT_NO_THROW(Sum(dummy({2, 0}), 4));
}

TEST_F(StreamSum, RefusesAResultThatNoIntegerCounts) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  expect_refused(Rule::size_overflow, "63 bits", [] {
    holdfast::StreamSum<float>{dummy({kHuge, 0, kHuge})};
  });
  // 2^62 elements are counted, their 2^64 bytes are not; the same in bf16 from 2^62 bytes of f32.
  const TensorView rows = dummy({std::int64_t{1} << 61, 1, 1}, Strides{0, 0, 1});
  expect_refused(Rule::size_overflow, "63 bits", [&] { holdfast::StreamSum<float>{rows}; });
  EXPECT_NO_THROW((holdfast::StreamSum<bf16, float>{rows}));
}

TEST_F(StreamSum, RefusesOtherTargets) {
  const test::DeviceArray<float> memory(1000);
  memory.poison(kPoison);
  const std::vector<float> before = memory.download();
  const TensorView source(memory.data() + 100, Shape{2, 4, 8}, 0);
  const holdfast::StreamSum<float> sum{source};
  const cuda::stream_ref on{stream};
  expect_refused(Rule::null_pointer, "null", [&] { sum(nullptr, on); });
  float* odd = memory.data();
  odd = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(odd) + 2);
  expect_refused(Rule::misaligned, "4 bytes", [&] { sum(odd, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { sum(memory.data() + 100, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { sum(memory.data() + 163, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { sum(memory.data() + 85, on); });
  sync();
  EXPECT_EQ(std::memcmp(memory.download().data(), before.data(), memory.bytes()), 0);
  EXPECT_NO_THROW(sum(memory.data() + 164, on));
  EXPECT_NO_THROW(sum(memory.data() + 84, on));
  sync();
}

TEST_F(StreamSum, RefusesForAPackedSourceWhatItRefusesForAnyOther) {
  const test::DeviceArray<float> memory(1000);
  memory.poison(kPoison);
  const std::vector<float> before = memory.download();
  const auto* const bucket = reinterpret_cast<const std::byte*>(memory.data());
  const auto packed = [&](const Shape& shape) {
    return TensorView::packed<float>(bucket + 402, shape, 0);
  };
  using Sum = holdfast::StreamSum<float>;
  expect_refused(Rule::type_mismatch, "expected f16", [&] {
    holdfast::StreamSum<float, f16>{packed({2, 4, 8})};
  });
  expect_refused(Rule::unsupported_shape, "rank 2", [&] { Sum{packed({2, 32})}; });
  expect_refused(Rule::unsupported_shape, "3 streams", [&] { Sum(packed({2, 32}), 3); });
  expect_refused(Rule::not_contiguous, "along hidden", [&] {
    Sum{packed({2, 4, 8}).permute({0, 2, 1})};
  });
  const Sum sum{packed({2, 4, 8})};  // bytes 402 to 658
  const cuda::stream_ref on{stream};
  expect_refused(Rule::null_pointer, "null", [&] { sum(nullptr, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { sum(memory.data() + 164, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { sum(memory.data() + 85, on); });
  sync();
  EXPECT_EQ(std::memcmp(memory.download().data(), before.data(), memory.bytes()), 0);
  EXPECT_NO_THROW(sum(memory.data() + 165, on));
  EXPECT_NO_THROW(sum(memory.data() + 84, on));
  sync();
}

// --- Beyond 32 bits; too large for a simulation

// bf16 numbers by bytes: both bytes of a number are the same, so that cudaMemset can write it.
bf16 from_byte(int byte) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(static_cast<unsigned>(byte) * 0x0101U));
}

TEST_F(StreamSum, CountsSourceElementsIn64Bits) {
  if (test::simulated()) GTEST_SKIP() << "takes 6 GB";
  constexpr std::int64_t kRows = 131;
  constexpr std::int64_t kHidden = std::int64_t{1} << 22;
  constexpr std::int64_t kElements = kRows * 4 * kHidden;
  static_assert(kElements > (std::int64_t{1} << 31));
  const test::DeviceArray<bf16> source(static_cast<std::size_t>(kElements) + 8);
  const test::DeviceArray<bf16> out(static_cast<std::size_t>(kRows * kHidden) + 8);
  // Each row and stream has a number of its own, of size 0.5 to 16, with both signs.
  const auto byte = [](std::int64_t row, std::int64_t s) {
    return static_cast<int>((row * 4 + s) % 2 * 0x80 + 0x3F + (row + 2 * s) % 3);
  };
  for (const std::int64_t shift : {0, 1}) {  // in vectors and one by one
    SCOPED_TRACE("shift " + std::to_string(shift));
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t s = 0; s < 4; ++s) {
        test::ok(cudaMemset(source.data() + shift + (row * 4 + s) * kHidden, byte(row, s),
                            static_cast<std::size_t>(kHidden) * sizeof(bf16)));
      }
    }
    out.poison(kPoison);
    holdfast::StreamSum<bf16>{TensorView(source.data() + shift, Shape{kRows, 4, kHidden}, 0)}(
        out.data() + shift, cuda::stream_ref{stream});
    sync();
    for (std::int64_t row = 0; row < kRows; ++row) {
      std::vector<float> terms;
      for (std::int64_t s = 0; s < 4; ++s) terms.push_back(widen(from_byte(byte(row, s))));
      const auto want = test::bits<std::uint16_t>(encode<bf16>(rounded<bf16>(sum_in_order(terms))));
      const auto got =
          test::download(reinterpret_cast<const std::uint16_t*>(out.data() + shift + row * kHidden),
                         static_cast<std::size_t>(kHidden));
      ASSERT_EQ(std::count(got.begin(), got.end(), want), kHidden) << "row " << row;
    }
    const auto ends =
        test::download(reinterpret_cast<const std::uint16_t*>(out.data() + shift + kRows * kHidden),
                       static_cast<std::size_t>(8 - shift));
    EXPECT_EQ(std::count(ends.begin(), ends.end(), 0xCBCB), 8 - shift);
  }
}

TEST_F(StreamSum, ReachesRowsAndStreamsBeyond2To31) {
  if (test::simulated()) GTEST_SKIP() << "takes 26 GB";
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 16;
  const test::DeviceArray<bf16> memory(static_cast<std::size_t>(6 * kFar + 64));
  const auto put = [&](std::int64_t offset, std::int64_t row, std::int64_t s) {
    std::vector<bf16> values;
    for (std::int64_t i = 0; i < 8; ++i) values.push_back(value<bf16>(row, s, i));
    test::ok(cudaMemcpy(memory.data() + offset, values.data(), 16, cudaMemcpyHostToDevice));
  };
  std::vector<float> want;
  for (std::int64_t row = 0; row < 2; ++row) {
    for (std::int64_t i = 0; i < 8; ++i) {
      std::vector<float> terms;
      for (std::int64_t s = 0; s < 4; ++s) terms.push_back(widen(value<bf16>(row, s, i)));
      want.push_back(sum_in_order(terms));
    }
  }
  const test::DeviceArray<float> out(16);
  struct Strided {
    std::int64_t row;
    std::int64_t stream;
  };
  for (const Strided far : {Strided{kFar, 8}, Strided{16, kFar}, Strided{-kFar, 8}}) {
    test::ok(cudaMemset(memory.data(), 0xFF, memory.bytes()));  // NaN
    const std::int64_t first = far.row < 0 ? kFar : 0;
    for (std::int64_t row = 0; row < 2; ++row) {
      for (std::int64_t s = 0; s < 4; ++s) put(first + row * far.row + s * far.stream, row, s);
    }
    out.poison(kPoison);
    const TensorView view(static_cast<const bf16*>(memory.data()) + first, Shape{2, 4, 8},
                          Strides{far.row, far.stream, 1}, 0);
    holdfast::StreamSum<float, bf16>{view}(out.data(), cuda::stream_ref{stream});
    sync();
    EXPECT_EQ(out.download(), want) << "row stride " << far.row << ", stream " << far.stream;
  }
}

// --- The launch shape; no device

TEST(StreamSumLaunch, CoversEveryItemWithinTheLimitsOfAGrid) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 45;
  for (const std::int64_t rows :
       {std::int64_t{1}, std::int64_t{24}, std::int64_t{65535}, std::int64_t{65536}, kHuge}) {
    for (const std::int64_t columns :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{127}, std::int64_t{128},
          std::int64_t{129}, std::int64_t{1024}, kHuge}) {
      const auto [grid, block] = holdfast::detail::grid_shape(rows, columns);
      EXPECT_EQ(block.x * block.y * block.z, 128U);
      EXPECT_EQ(grid.z, 1U);
      EXPECT_GE(grid.x, 1U);
      EXPECT_GE(grid.y, 1U);
      EXPECT_LE(grid.x, 0x7FFFFFFFU);
      EXPECT_LE(grid.y, 65535U);
      const std::int64_t across = std::int64_t{grid.x} * block.x;
      const std::int64_t down = std::int64_t{grid.y} * block.y;
      EXPECT_TRUE(across >= columns || grid.x == 0x7FFFFFFFU);
      EXPECT_TRUE(down >= rows || grid.y == 65535U);
      EXPECT_LT(across - columns, std::int64_t{block.x}) << "threads without work";
      EXPECT_TRUE(block.x < 2 * columns) << "threads without work";
    }
  }
}

TEST(StreamSumLaunch, NeverOverflowsASmallIndex) {
  using holdfast::detail::kMaxSmall;
  for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{1000000}, kMaxSmall}) {
    const std::int64_t columns = kMaxSmall / rows;
    const auto [grid, block] = holdfast::detail::grid_shape(rows, columns);
    EXPECT_LT(rows + std::int64_t{grid.y} * block.y, std::int64_t{1} << 31);
    EXPECT_LT(columns + std::int64_t{grid.x} * block.x, std::int64_t{1} << 31);
  }
}

struct Visits {
  using Index = std::int32_t;
  Index rows;
  Index columns;
  int* counts;
  [[nodiscard]] __host__ __device__ Index line(Index row) const { return row * columns; }
  __host__ __device__ void operator()(Index line, Index column) const { ++counts[line + column]; }
};

TEST(StreamSumLaunch, VisitsEachItemOnceWhateverTheStride) {
  constexpr int kRows = 7;
  constexpr int kColumns = 11;
  for (const int row_step : {1, 2, 7, 8}) {
    for (const int column_step : {1, 3, 11, 16}) {
      std::vector<int> counts(kRows * kColumns);
      const Visits work{kRows, kColumns, counts.data()};
      for (int row = 0; row < row_step; ++row) {
        for (int column = 0; column < column_step; ++column) {
          holdfast::detail::run_items(work, row, row_step, column, column_step);
        }
      }
      EXPECT_EQ(counts, std::vector<int>(counts.size(), 1));
    }
  }
}

}  // namespace
