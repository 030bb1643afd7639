// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Relayout against an index walk of this file's own, for every supported pair of types.

#include <holdfast/relayout.cuh>

#include "support/runtime.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

template class holdfast::Relayout<std::uint8_t>;
template class holdfast::Relayout<std::int32_t>;
template class holdfast::Relayout<std::int64_t>;
template class holdfast::Relayout<float>;
template class holdfast::Relayout<float, __nv_bfloat16>;
template class holdfast::Relayout<float, __half>;
template class holdfast::Relayout<__nv_bfloat16, float>;
template class holdfast::Relayout<__nv_bfloat16>;
template class holdfast::Relayout<__nv_bfloat16, __half>;
template class holdfast::Relayout<__half, float>;
template class holdfast::Relayout<__half, __nv_bfloat16>;
template class holdfast::Relayout<__half>;

namespace {

using holdfast::Rule;
using holdfast::Shape;
using holdfast::Strides;
using holdfast::TensorView;
using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr std::size_t kGuard = 64;  // elements around a tensor; whole 16-byte accesses in each type
constexpr int kPoison = 0xCB;

template <class T>
const char* name() {
  return holdfast::to_string(holdfast::kElementType<T>);
}

template <std::size_t Bytes>
using Pattern = std::conditional_t<
    Bytes == 1, std::uint8_t,
    std::conditional_t<Bytes == 2, std::uint16_t,
                       std::conditional_t<Bytes == 4, std::uint32_t, std::uint64_t>>>;

template <class T>
std::uint64_t pattern(const T& value) {
  return test::bits<Pattern<sizeof(T)>>(value);
}

template <class T>
T from_pattern(std::uint64_t bits) {
  const auto narrow = static_cast<Pattern<sizeof(T)>>(bits);
  T value;
  std::memcpy(static_cast<void*>(&value), &narrow, sizeof(T));
  return value;
}

// --- What a cast must give: the nearest number, and of two equally near ones the even one. Read
// from the formats, without a conversion of CUDA.

struct Format {
  int fraction_bits;
  int exponent_bits;
};
template <class T>
constexpr Format kFormat{23, 8};
template <>
constexpr Format kFormat<bf16>{7, 8};
template <>
constexpr Format kFormat<f16>{10, 5};

template <class T>
constexpr std::uint64_t kSign = 1ULL << (sizeof(T) * 8 - 1);
template <class T>
constexpr std::uint64_t kInfinity = ((1ULL << kFormat<T>.exponent_bits) - 1)
                                    << kFormat<T>.fraction_bits;

template <class T>
bool is_nan(std::uint64_t bits) {
  return (bits & ~kSign<T>) > kInfinity<T>;
}

std::string hex(std::uint64_t bits) {
  std::array<char, 24> text{};
  (void)std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(bits));
  return text.data();
}

// The magnitude that `bits` stands for; infinity counts as the next number after the largest.
template <class T>
double magnitude(std::uint64_t bits) {
  constexpr Format f = kFormat<T>;
  constexpr int kBias = (1 << (f.exponent_bits - 1)) - 1;
  const auto fraction = static_cast<double>(bits & ((1ULL << f.fraction_bits) - 1));
  const int exponent =
      static_cast<int>((bits >> f.fraction_bits) & ((1ULL << f.exponent_bits) - 1));
  return exponent == 0 ? std::ldexp(fraction, 1 - kBias - f.fraction_bits)
                       : std::ldexp(std::ldexp(1.0, f.fraction_bits) + fraction,
                                    exponent - kBias - f.fraction_bits);
}

template <class To, class From>
::testing::AssertionResult is_cast(const From& from, const To& to) {
  const std::uint64_t x = pattern(from);
  const std::uint64_t y = pattern(to);
  const auto fail = [&](const char* why) {
    return ::testing::AssertionFailure() << hex(x) << " became " << hex(y) << ": " << why;
  };
  if (is_nan<From>(x)) return is_nan<To>(y) ? ::testing::AssertionSuccess() : fail("not a NaN");
  if (is_nan<To>(y)) return fail("a NaN");
  if (((x & kSign<From>) != 0) != ((y & kSign<To>) != 0)) return fail("another sign");
  const double value = magnitude<From>(x & ~kSign<From>);
  const std::uint64_t got = y & ~kSign<To>;
  if (x == (x & kSign<From>)+kInfinity<From>) {
    return got == kInfinity<To> ? ::testing::AssertionSuccess() : fail("not infinity");
  }
  const double error = std::abs(value - magnitude<To>(got));
  const auto refuses = [&](std::uint64_t other) {
    const double its = std::abs(value - magnitude<To>(other));
    return its < error || (its == error && got % 2 != 0);
  };
  if (got > 0 && refuses(got - 1)) return fail("the number below is nearer, or as near and even");
  if (got < kInfinity<To> && refuses(got + 1)) {
    return fail("the number above is nearer, or as near and even");
  }
  return ::testing::AssertionSuccess();
}

template <class To, class From>
::testing::AssertionResult is_result(const From& from, const To& to) {
  if constexpr (std::is_same_v<To, From>) {
    if (pattern(from) == pattern(to)) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << hex(pattern(from)) << " became " << hex(pattern(to));
  } else {
    return is_cast(from, to);
  }
}

// --- Inputs

// Each element has a pattern of its own, as far as the type has so many; not a NaN.
template <class T>
std::vector<T> numbers(std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    auto bits = (i + 1) * 0x9E3779B97F4A7C15U;
    bits ^= bits >> 29U;
    if constexpr (std::is_integral_v<T>) {
      values[i] = from_pattern<T>(bits);
    } else {  // a sign, an exponent near that of 1, and the rest at random
      constexpr Format f = kFormat<T>;
      const std::uint64_t bias = (1ULL << (f.exponent_bits - 1)) - 1;
      const std::uint64_t exponent = bias - 4 + bits % 8;
      const std::uint64_t fraction = (bits >> 8U) & ((1ULL << f.fraction_bits) - 1);
      const std::uint64_t sign = (bits >> 40U) & 1U;
      values[i] =
          from_pattern<T>((((sign << f.exponent_bits) | exponent) << f.fraction_bits) | fraction);
    }
  }
  return values;
}

// The offsets of a view's elements in row-major order.
std::vector<std::int64_t> offsets(const TensorView& view) {
  std::vector<std::int64_t> result;
  const Shape& shape = view.shape();
  std::array<std::int64_t, holdfast::kMaxRank> index{};
  for (std::int64_t n = 0; n < shape.elements(); ++n) {
    std::int64_t offset = 0;
    for (int axis = 0; axis < shape.rank(); ++axis) {
      offset += index[static_cast<std::size_t>(axis)] * view.strides()[axis];
    }
    result.push_back(offset);
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      if (++index[static_cast<std::size_t>(axis)] < shape[axis]) break;
      index[static_cast<std::size_t>(axis)] = 0;
    }
  }
  return result;
}

template <class To, class From>
void compare(const std::vector<To>& got, std::size_t begin, const std::vector<From>& want) {
  const std::vector<std::uint8_t> untouched(sizeof(To), kPoison);
  for (std::size_t k = 0; k < got.size(); ++k) {
    if (k < begin || k >= begin + want.size()) {
      ASSERT_EQ(std::memcmp(&got[k], untouched.data(), sizeof(To)), 0)
          << "wrote outside the result, at element "
          << static_cast<std::int64_t>(k) - static_cast<std::int64_t>(begin);
    } else {
      ASSERT_TRUE(is_result(want[k - begin], got[k])) << "at element " << k - begin;
    }
  }
}

// --- Every pair of types

template <class ToType, class FromType>
struct Pair {
  using To = ToType;
  using From = FromType;
};
using Pairs =
    ::testing::Types<Pair<std::uint8_t, std::uint8_t>, Pair<std::int32_t, std::int32_t>,
                     Pair<std::int64_t, std::int64_t>, Pair<float, float>, Pair<float, bf16>,
                     Pair<float, f16>, Pair<bf16, float>, Pair<bf16, bf16>, Pair<bf16, f16>,
                     Pair<f16, float>, Pair<f16, bf16>, Pair<f16, f16>>;
struct PairName {
  template <class P>
  static std::string GetName(int /*index*/) {
    return std::string(name<typename P::To>()) + "_from_" + name<typename P::From>();
  }
};

template <class P>
class RelayoutOf : public test::Cuda {
 protected:
  using To = typename P::To;
  using From = typename P::From;

  // Lays the view of `make(memory)` out in both modes, `out_shift` elements off a 16-byte boundary.
  template <class Make>
  void expect(const Make& make, std::size_t out_shift = 0) const {
    const test::DeviceArray<From> source(memory());
    const TensorView view = make(static_cast<const From*>(source.data()) + kMiddle);
    SCOPED_TRACE("shape " + to_string(view.shape()) + ", strides " + to_string(view.strides()) +
                 ", out shift " + std::to_string(out_shift));
    std::vector<From> want;
    const auto* first = static_cast<const From*>(view.data());
    for (const std::int64_t offset : offsets(view)) {
      want.push_back(memory().at(static_cast<std::size_t>(first - source.data() + offset)));
    }
    const holdfast::Relayout<To, From> recipe{view};
    EXPECT_EQ(recipe.shape(), view.shape());
    const std::size_t begin = kGuard + out_shift;
    const test::DeviceArray<To> out(begin + want.size() + kGuard);
    for (const test::Mode mode : test::kModes) {
      SCOPED_TRACE(test::to_string(mode));
      out.poison(kPoison);
      test::run(mode, this->stream,
                [&] { recipe(out.data() + begin, cuda::stream_ref{this->stream}); });
      compare(out.download(), begin, want);
    }
  }
  void expect(const Shape& shape, const Strides& strides, std::int64_t shift = 0,
              std::size_t out_shift = 0) const {
    expect([&](const From* data) { return TensorView(data + shift, shape, strides, 0); },
           out_shift);
  }

  // Lays a tensor of `shape` out that begins at byte `offset` of a bucket and ends with it, and its
  // aligned copy, both as `change` views them: the same bits, and one launch.
  template <class Change>
  void expect_packed(std::size_t offset, const Shape& shape, const Change& change) const {
    const std::vector<From> values = numbers<From>(static_cast<std::size_t>(shape.elements()));
    const test::DeviceArray<From> copy(values);
    std::vector<std::uint8_t> bytes(offset, kPoison);
    const auto* const raw = reinterpret_cast<const std::uint8_t*>(values.data());
    bytes.insert(bytes.end(), raw, raw + copy.bytes());
    const test::DeviceArray<std::uint8_t> bucket(bytes);
    const TensorView view = change(TensorView::packed<From>(bucket.data() + offset, shape, 0));
    SCOPED_TRACE("shape " + to_string(view.shape()) + ", strides " + to_string(view.strides()) +
                 ", byte " + std::to_string(offset));
    EXPECT_EQ(view.is_aligned(), offset % alignof(From) == 0);

    const auto count = static_cast<std::size_t>(view.shape().elements());
    const test::DeviceArray<To> out(kGuard + count + kGuard);
    const auto result = [&](test::Mode mode, const TensorView& source) {
      out.poison(kPoison);
      test::run(mode, this->stream, [&] {
        holdfast::Relayout<To, From>{source}(out.data() + kGuard, cuda::stream_ref{this->stream});
      });
      return test::download(reinterpret_cast<const std::uint8_t*>(out.data()), out.bytes());
    };
    const TensorView aligned = change(TensorView(copy.data(), shape, 0));
    const std::vector<std::uint8_t> want = result(test::Mode::eager, aligned);
    for (const test::Mode mode : test::kModes) {
      EXPECT_TRUE(result(mode, view) == want) << test::to_string(mode);
    }
    const test::Graph graph(this->stream, [&] {
      holdfast::Relayout<To, From>{view}(out.data() + kGuard, cuda::stream_ref{this->stream});
    });
    EXPECT_EQ(graph.nodes(), count > 0 ? 1U : 0U);
  }
  void expect_packed(std::size_t offset, const Shape& shape) const {
    expect_packed(offset, shape, [](const TensorView& whole) { return whole; });
  }

 private:
  static constexpr std::int64_t kMiddle = 32768;
  static const std::vector<From>& memory() {
    static const std::vector<From> values = numbers<From>(2 * kMiddle);
    return values;
  }
};
TYPED_TEST_SUITE(RelayoutOf, Pairs, PairName);

TYPED_TEST(RelayoutOf, CopiesContiguousTensorsOfAnyLength) {
  for (const std::int64_t length : {0,  1,  2,  3,  4,   5,   7,   8,    9,    15,   16,
                                    17, 31, 32, 33, 127, 128, 129, 2047, 2048, 2049, 10007}) {
    this->expect(Shape{length}, Strides{1});
  }
  this->expect({}, {});
  this->expect({3, 5, 16}, {80, 16, 1});
  this->expect({2, 3, 4, 5, 6}, {360, 120, 30, 6, 1});
}

TYPED_TEST(RelayoutOf, ReadsAnyAlignment) {
  for (const std::int64_t shift : {0, 1, 2, 4, 8, 16}) {
    for (const std::size_t out_shift : {0, 1, 2, 4, 8}) {
      this->expect({100}, {1}, shift, out_shift);
      this->expect({3, 32}, {48, 1}, shift, out_shift);
    }
  }
}

TYPED_TEST(RelayoutOf, ReadsPaddedRows) {
  for (const std::int64_t width : {1, 7, 8, 12, 16, 24, 33, 64, 200}) {  // 12, 24: end in a part
    for (const std::int64_t gap : {1, 4, 8, 16, 56}) {
      this->expect({5, width}, {width + gap, 1});
      this->expect({2, 3, width}, {4 * (width + gap), width + gap, 1});
      this->expect({2, 3, width}, {width + gap, 2 * (width + gap), 1});
    }
    this->expect({5, width}, {256, 1});
    this->expect({4, 3, 2, 2, width}, {4096, 1024, 512, 256, 1});
    this->expect({4, 3, 2, 5, width}, {16, 2048, 528, 256, 1});
  }
}

TYPED_TEST(RelayoutOf, ReadsTransposes) {
  this->expect({5, 7}, {1, 5});
  this->expect({64, 96}, {1, 64});
  this->expect({130, 129}, {1, 130});
  this->expect({3, 64, 32}, {2048, 1, 64});
  this->expect({2, 3, 4, 5, 6}, {1, 2, 6, 24, 120});
  this->expect({6, 2, 5, 3, 4}, {1, 360, 6, 120, 30});
}

TYPED_TEST(RelayoutOf, ReadsZeroAndNegativeStrides) {
  this->expect({5, 32}, {0, 1});
  this->expect({5, 32}, {1, 0});
  this->expect({5, 32}, {0, 0});
  this->expect({2, 5, 32}, {32, 0, 1});
  this->expect({40}, {-1});
  this->expect({5, 32}, {-32, 1});
  this->expect({5, 32}, {-32, -1});
  this->expect({5, 32}, {32, -1});
  this->expect({3, 5, 32}, {-1024, 48, 1});
  this->expect({3, 4, 5}, {20, -5, 2});
}

TYPED_TEST(RelayoutOf, DropsAxesOfOneElementAndMergesNeighbours) {
  constexpr std::int64_t kFar = std::int64_t{1} << 55;
  this->expect({1, 5, 1, 32, 1}, {kFar, 64, kFar, 1, -kFar});
  this->expect({1, 1}, {kFar, 3});
  this->expect({4, 1, 8, 16}, {128, 7, 16, 1});    // one axis of 512
  this->expect({4, 8, 16}, {160, 16, 1});          // [4, 128]
  this->expect({4, 8, 16}, {640, 32, 1});          // nothing to merge innermost
  this->expect({4, 3, 8, 16}, {960, 320, 32, 1});  // no neighbour either
  this->expect({4, 3, 8, 16}, {768, 256, 32, 1});  // [12 x 8, 16] by 32
  this->expect({2, 3, 5}, {-15, -5, -1});          // all 30, backwards
}

TYPED_TEST(RelayoutOf, ShufflesTiles) {
  using Element = typename TypeParam::From;
  // [48, 64] in 16 x 16 tiles, each row-major, one after the other
  this->expect([](const Element* data) {
    return TensorView(data, Shape{48, 64}, 0)
        .unflatten(1, {4, 16})
        .unflatten(0, {3, 16})
        .permute({0, 2, 1, 3});
  });
  // and back
  this->expect([](const Element* data) {
    return TensorView(data, Shape{3, 4, 16, 16}, 0).permute({0, 2, 1, 3});
  });
  // the columns of a slice, last tile first
  this->expect([](const Element* data) {
    return TensorView(data, Shape{48, 64}, 0).slice(1, 16, 32).slice(0, 3, 40).permute({1, 0});
  });
}

TYPED_TEST(RelayoutOf, ReadsPackedTensorsAtAnyByte) {
  for (std::size_t offset = 0; offset <= 32; ++offset) {
    this->expect_packed(offset, {33});
    this->expect_packed(offset, {3, 32});
  }
  for (const std::size_t offset : {1, 2, 6}) {
    for (const std::int64_t length : {0, 1, 2, 3, 5, 8, 127, 128, 129, 2049}) {
      this->expect_packed(offset, {length});
    }
    this->expect_packed(offset, {});
    this->expect_packed(offset, {2, 3, 4, 5, 6});
  }
}

TYPED_TEST(RelayoutOf, ReadsPackedTensorsInAnyLayout) {
  for (const std::size_t offset : {1, 2, 3, 4, 6, 7, 11}) {
    this->expect_packed(offset, {37, 29}, [](const TensorView& whole) {
      return whole.permute({1, 0});
    });
    this->expect_packed(offset, {2, 3, 4, 5, 6}, [](const TensorView& whole) {
      return whole.permute({4, 1, 3, 0, 2});
    });
    this->expect_packed(offset, {7, 40}, [](const TensorView& whole) {
      return whole.slice(1, 3, 33).slice(0, 2, 5);  // up to the last row, not to the last byte
    });
    this->expect_packed(offset, {48, 64}, [](const TensorView& whole) {  // tiles
      return whole.unflatten(1, {4, 16}).unflatten(0, {3, 16}).permute({0, 2, 1, 3});
    });
    this->expect_packed(offset, {9, 11}, [](const TensorView& whole) {
      using Element = typename TypeParam::From;
      const auto* last = static_cast<const std::byte*>(whole.data()) + 98 * sizeof(Element);
      return TensorView::packed<Element>(last, {9, 2, 11}, {-11, 0, -1}, 0);
    });
  }
}

TYPED_TEST(RelayoutOf, LeavesEmptyTensorsAlone) {
  this->expect({0}, {1});
  this->expect({3, 0, 5}, {1, 1, 1});
  const holdfast::Relayout<typename TypeParam::To, typename TypeParam::From> empty{
      TensorView(static_cast<const typename TypeParam::From*>(nullptr), Shape{0, 4}, 0)};
  const test::Graph graph(this->stream, [&] { empty(nullptr, cuda::stream_ref{this->stream}); });
  EXPECT_EQ(graph.nodes(), 0U);
}

// Every pattern of 16 bits; of f32 all exponents, with the fractions at which rounding turns.
template <class From>
std::vector<From> all_patterns() {
  std::vector<From> values;
  if constexpr (sizeof(From) == 2) {
    for (std::uint64_t bits = 0; bits < 65536; ++bits) values.push_back(from_pattern<From>(bits));
  } else {
    for (std::uint64_t high = 0; high < 512; ++high) {
      for (const int shift : {12, 13, 15, 16, 19, 22}) {  // f16 cuts off 13 bits, bf16 16
        for (std::uint64_t keep = 0; keep < 4; ++keep) {
          const std::uint64_t half = 1ULL << static_cast<unsigned>(shift);
          for (const std::uint64_t low : {keep * half, keep * half + 1, keep * half - 1}) {
            values.push_back(from_pattern<From>((high << 23U) | (low & 0x7FFFFFU)));
          }
        }
      }
      values.push_back(from_pattern<From>((high << 23U) | (high * 0x9E3779B9U & 0x7FFFFFU)));
    }
  }
  return values;
}

template <class To, class From>
void expect_patterns(cudaStream_t stream) {
  SCOPED_TRACE(std::string(name<To>()) + " from " + name<From>());
  const std::vector<From> values = all_patterns<From>();
  const test::DeviceArray<From> source(values);
  const auto count = static_cast<std::int64_t>(values.size());
  for (const std::size_t shift : {0, 1}) {  // in vectors and one by one
    const std::size_t begin = kGuard + shift;
    const test::DeviceArray<To> out(begin + values.size() + kGuard);
    out.poison(kPoison);
    holdfast::Relayout<To, From>{TensorView(source.data(), Shape{count}, 0)}(
        out.data() + begin, cuda::stream_ref{stream});
    test::ok(cudaStreamSynchronize(stream));
    compare(out.download(), begin, values);
  }
  std::vector<std::uint8_t> bytes(1 + source.bytes());
  std::memcpy(bytes.data() + 1, values.data(), source.bytes());
  const test::DeviceArray<std::uint8_t> bucket(bytes);
  const test::DeviceArray<To> out(values.size());
  out.poison(kPoison);
  holdfast::Relayout<To, From>{TensorView::packed<From>(bucket.data() + 1, Shape{count}, 0)}(
      out.data(), cuda::stream_ref{stream});
  test::ok(cudaStreamSynchronize(stream));
  compare(out.download(), 0, values);
}

class Relayout : public test::Cuda {};

TEST_F(Relayout, KeepsEveryBitOfOneTypeAndRoundsToTheNearestOfAnother) {
  expect_patterns<float, float>(stream);  // signalling NaNs among them
  expect_patterns<bf16, bf16>(stream);
  expect_patterns<f16, f16>(stream);
  expect_patterns<float, bf16>(stream);
  expect_patterns<float, f16>(stream);
  expect_patterns<bf16, float>(stream);
  expect_patterns<bf16, f16>(stream);
  expect_patterns<f16, float>(stream);
  expect_patterns<f16, bf16>(stream);
}

TEST_F(Relayout, GivesTheSameBitsEveryTimeAndReadsItsSourceAtEachReplay) {
  const std::vector<float> values = numbers<float>(64 * 96);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<bf16> out(values.size());
  const holdfast::Relayout<bf16, float> recipe{
      TensorView(source.data(), Shape{64, 96}, 0).permute({1, 0})};
  const test::Graph graph(stream, [&] { recipe(out.data(), cuda::stream_ref{stream}); });
  EXPECT_EQ(graph.nodes(), 1U);
  const auto replay = [&] {
    out.poison(kPoison);
    graph.launch(stream);
    sync();
    std::vector<std::uint64_t> patterns;
    for (const bf16& value : out.download()) patterns.push_back(pattern(value));
    return patterns;
  };
  const auto first = replay();
  EXPECT_EQ(first, replay());
  source.upload(std::vector<float>(values.size(), 2.0F));
  EXPECT_EQ(replay(), std::vector<std::uint64_t>(values.size(), 0x4000));
}

TEST_F(Relayout, TakesTheDefaultStreamOfAFramework) {
  const std::vector<std::int32_t> values = numbers<std::int32_t>(100);
  const test::DeviceArray<std::int32_t> source(values);
  const test::DeviceArray<std::int32_t> out(100);
  const cudaStream_t none = nullptr;  // PyTorch hands out handle 0
  holdfast::Relayout<std::int32_t>{TensorView(source.data(), Shape{100}, 0)}(
      out.data(), cuda::stream_ref{none});
  test::ok(cudaStreamSynchronize(cudaStreamLegacy));
  EXPECT_EQ(out.download(), values);
}

TEST_F(Relayout, NamesWhatItReads) {
  const test::DeviceArray<float> memory(1000);
  const holdfast::Relayout<float> recipe{
      TensorView(memory.data() + 500, Shape{3, 10}, Strides{-100, 2}, 0)};
  const auto* base = reinterpret_cast<const std::byte*>(memory.data());
  ASSERT_EQ(recipe.sources().size(), 1U);
  EXPECT_EQ(recipe.sources()[0].begin, base + 300 * 4);
  EXPECT_EQ(recipe.sources()[0].end, base + (500 + 19) * 4);
  EXPECT_EQ(recipe.sources()[0].device, 0);
  const holdfast::Relayout<float> packed{
      TensorView::packed<float>(base + 1006, Shape{3, 10}, Strides{-100, 2}, 0)};
  ASSERT_EQ(packed.sources().size(), 1U);
  EXPECT_EQ(packed.sources()[0].begin, base + 1006 - 200 * 4);
  EXPECT_EQ(packed.sources()[0].end, base + 1006 + 19 * 4);
  EXPECT_EQ(packed.sources()[0].device, 0);
}

template <class Call>
void expect_refused(Rule rule, const char* part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const holdfast::ContractError& error) {
    EXPECT_STREQ(to_string(error.rule()), to_string(rule)) << error.what();
    EXPECT_NE(std::string(error.what()).find("relayout"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST_F(Relayout, RefusesWhatItCannotCopy) {
  alignas(16) static const std::byte bytes[16] = {};
  const auto* floats = reinterpret_cast<const float*>(bytes);  // never read
  expect_refused(Rule::type_mismatch, "expected bf16",
                 [&] { holdfast::Relayout<bf16>{TensorView(floats, Shape{4}, 0)}; });
  expect_refused(Rule::type_mismatch, "expected i32",
                 [&] { holdfast::Relayout<std::int32_t>{TensorView(floats, Shape{4}, 0)}; });
  const TensorView half(reinterpret_cast<const bf16*>(bytes), Shape{std::int64_t{1} << 61},
                        Strides{0}, 0);
  expect_refused(Rule::size_overflow, "63 bits", [&] { holdfast::Relayout<float, bf16>{half}; });
  EXPECT_NO_THROW(holdfast::Relayout<bf16>{half});

  const test::DeviceArray<float> memory(300);
  memory.poison();
  const holdfast::Relayout<float> recipe{TensorView(memory.data() + 100, Shape{100}, 0)};
  const cuda::stream_ref on{stream};
  expect_refused(Rule::null_pointer, "null", [&] { recipe(nullptr, on); });
  auto* odd = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(memory.data()) + 2);
  expect_refused(Rule::misaligned, "4 bytes", [&] { recipe(odd, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { recipe(memory.data() + 1, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps",
                 [&] { recipe(memory.data() + 199, on); });
  EXPECT_NO_THROW(recipe(memory.data(), on));
  EXPECT_NO_THROW(recipe(memory.data() + 200, on));
  sync();
}

TEST_F(Relayout, RefusesForAPackedTensorWhatItRefusesForAnyOther) {
  const test::DeviceArray<float> memory(400);
  memory.poison();
  const auto* const bucket = reinterpret_cast<const std::byte*>(memory.data());
  const auto packed = [&](std::size_t byte) {
    return TensorView::packed<float>(bucket + byte, Shape{100}, 0);
  };
  expect_refused(Rule::type_mismatch, "expected bf16",
                 [&] { holdfast::Relayout<bf16>{packed(6)}; });
  const TensorView half =
      TensorView::packed<bf16>(bucket + 1, Shape{std::int64_t{1} << 61}, Strides{0}, 0);
  expect_refused(Rule::size_overflow, "63 bits", [&] { holdfast::Relayout<float, bf16>{half}; });
  const holdfast::Relayout<float> recipe{packed(402)};  // bytes 402 to 802
  const cuda::stream_ref on{stream};
  expect_refused(Rule::null_pointer, "null", [&] { recipe(nullptr, on); });
  auto* odd = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(memory.data()) + 2);
  expect_refused(Rule::misaligned, "4 bytes", [&] { recipe(odd, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps", [&] { recipe(memory.data() + 1, on); });
  expect_refused(Rule::source_overlaps_target, "overlaps",
                 [&] { recipe(memory.data() + 200, on); });
  EXPECT_NO_THROW(recipe(memory.data(), on));
  EXPECT_NO_THROW(recipe(memory.data() + 201, on));
  sync();
}

// --- Merging; no device

TEST(RelayoutAxes, MergeWithoutOverflow) {
  constexpr std::int64_t kFar = std::int64_t{1} << 62;
  const auto apart = holdfast::detail::merge_axes({2, 4}, {0, kFar});
  EXPECT_EQ(apart.count, 2);
  const auto none = holdfast::detail::merge_axes({1, 1}, {kFar, -kFar});
  EXPECT_EQ(none.count, 0);
  const auto whole = holdfast::detail::merge_axes({2, 1, 3, 4}, {12, kFar, 4, 1});
  EXPECT_EQ(whole.count, 1);
  EXPECT_EQ(whole.extents[0], 24);
  EXPECT_EQ(whole.strides[0], 1);
  const auto rows = holdfast::detail::merge_axes({2, 3, 4}, {24, 8, 1});
  EXPECT_EQ(rows.count, 2);
  EXPECT_EQ(rows.extents[1], 6);
  EXPECT_EQ(rows.strides[1], 8);
  const auto still = holdfast::detail::merge_axes({2, 3}, {0, 0});
  EXPECT_EQ(still.count, 1);
  EXPECT_EQ(still.extents[0], 6);
  EXPECT_EQ(still.strides[0], 0);
}

TEST(RelayoutAxes, DecodeRowsBeyond32Bits) {
  // 3 x 2^31 x 5 rows of one element, of which the test reads a few.
  constexpr std::int64_t kMiddle = std::int64_t{1} << 31;
  const std::vector<std::int32_t> source(400);
  const holdfast::detail::RelayoutWork<std::uint32_t, std::uint32_t, 1, std::uint64_t> work{
      .source = reinterpret_cast<const std::uint32_t*>(source.data()),
      .out = nullptr,
      .rows = 3 * kMiddle * 5,
      .columns = 1,
      .length = 1,
      .stride = 1,
      .extents = {5, kMiddle, 3, 1},
      .strides = {7, 0, 100, 0},
      .outer = 3,
  };
  const auto offset = [&](std::int64_t a, std::int64_t b, std::int64_t c) {
    const std::int64_t row = (a * kMiddle + b) * 5 + c;
    return reinterpret_cast<const std::int32_t*>(work.line(row).source) - source.data();
  };
  EXPECT_EQ(offset(0, 0, 0), 0);
  EXPECT_EQ(offset(0, kMiddle - 1, 4), 28);
  EXPECT_EQ(offset(1, 0, 0), 100);
  EXPECT_EQ(offset(2, kMiddle - 1, 3), 221);
}

// --- Beyond 32 bits; too large for a simulation

TEST_F(Relayout, CountsElementsIn64Bits) {
  if (test::simulated()) GTEST_SKIP() << "takes 5 GB";
  constexpr std::int64_t kBig = std::int64_t{1} << 31;
  constexpr std::int64_t kCount = kBig + 4099;
  constexpr std::size_t kChunk = std::size_t{1} << 26;
  const test::DeviceArray<std::uint8_t> source(kCount + 1);
  const test::DeviceArray<std::uint8_t> out(kCount + 64);
  test::ok(cudaMemset(source.data(), 0x5A, source.bytes()));
  // Numbers at the start, around 2^31 and at the end; 0x5A everywhere else.
  const std::vector<std::uint8_t> marks = numbers<std::uint8_t>(4096);
  const std::array<std::int64_t, 3> places = {0, kBig - 2048, kCount - 2000};
  for (const std::int64_t place : places) {
    const auto length = static_cast<std::size_t>(std::min<std::int64_t>(4096, kCount - place));
    test::ok(cudaMemcpy(source.data() + place, marks.data(), length, cudaMemcpyHostToDevice));
  }
  for (const std::int64_t shift : {0, 1}) {  // in vectors and one by one
    SCOPED_TRACE("out shift " + std::to_string(shift));
    out.poison(kPoison);
    holdfast::Relayout<std::uint8_t>{TensorView(source.data(), Shape{kCount}, 0)}(
        out.data() + shift, cuda::stream_ref{stream});
    sync();
    for (std::size_t at = 0; at < static_cast<std::size_t>(kCount); at += kChunk) {
      const std::size_t length = std::min(kChunk, static_cast<std::size_t>(kCount) - at);
      ASSERT_EQ(test::download(source.data() + at, length),
                test::download(out.data() + shift + at, length))
          << "in the chunk from " << at;
    }
    const auto behind =
        test::download(out.data() + shift + kCount, static_cast<std::size_t>(64 - shift));
    EXPECT_EQ(std::count(behind.begin(), behind.end(), kPoison), 64 - shift);
  }
}

TEST_F(Relayout, TakesMoreRowsThan32BitsCount) {
  if (test::simulated()) GTEST_SKIP() << "takes 9 GB";
  // [2, 2^31 + 1, 2] by strides 1, 0 and 2: the pairs (0, 2) and then the pairs (1, 3) of the
  // source.
  constexpr std::int64_t kPairs = (std::int64_t{1} << 31) + 1;
  const std::vector<std::uint8_t> numbers = {0x12, 0x34, 0x56, 0x78};
  const test::DeviceArray<std::uint8_t> source(numbers);
  const test::DeviceArray<std::uint8_t> out(4 * kPairs + 64);
  out.poison(kPoison);
  holdfast::Relayout<std::uint8_t>{TensorView(source.data(), Shape{2, kPairs, 2}, Strides{1, 0, 2},
                                              0)}(out.data(), cuda::stream_ref{stream});
  sync();
  constexpr std::size_t kChunk = std::size_t{1} << 26;
  for (const std::size_t half : {0, 1}) {
    std::vector<std::uint8_t> want(kChunk);
    for (std::size_t i = 0; i < kChunk; ++i) want[i] = numbers[half + i % 2 * 2];
    const std::size_t all = 2 * static_cast<std::size_t>(kPairs);
    for (std::size_t at = 0; at < all; at += kChunk) {
      const std::size_t length = std::min(kChunk, all - at);
      const auto got = test::download(out.data() + half * all + at, length);
      ASSERT_EQ(std::memcmp(got.data(), want.data(), length), 0)
          << "half " << half << ", in the chunk from " << at;
    }
  }
  const auto behind = test::download(out.data() + 4 * kPairs, 64);
  EXPECT_EQ(std::count(behind.begin(), behind.end(), kPoison), 64);
}

}  // namespace
