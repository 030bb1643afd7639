// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "holdfast/tensor_view.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using holdfast::ByteRange;
using holdfast::ContractError;
using holdfast::ElementType;
using holdfast::Rule;
using holdfast::Shape;
using holdfast::Strides;
using holdfast::TensorView;
using Index = std::vector<std::int64_t>;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

constexpr std::int64_t pow2(int exponent) { return std::int64_t{1} << exponent; }

/// The rule that `function` breaks, by name.
template <class Function>
std::string broken_rule(const Function& function) {
  try {
    (void)function();
  } catch (const ContractError& error) {
    return to_string(error.rule());
  }
  return "none";
}

template <class Function>
std::string message_of(const Function& function) {
  try {
    (void)function();
  } catch (const ContractError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Index list(const Shape& shape) { return {shape.begin(), shape.end()}; }
Index list(const Strides& strides) { return {strides.begin(), strides.end()}; }
Shape shape_of(const Index& extents) { return Shape(std::span<const std::int64_t>(extents)); }
Strides strides_of(const Index& strides) { return Strides(std::span<const std::int64_t>(strides)); }

// --- a second opinion: elements one by one, by their index

/// Calls `visit` with every index of the extents, in row-major order.
void for_each_index(const Index& extents, const std::function<void(const Index&)>& visit) {
  if (std::ranges::find(extents, 0) != extents.end()) return;
  Index index(extents.size(), 0);
  for (;;) {
    visit(index);
    std::size_t axis = extents.size();
    while (axis > 0 && ++index[axis - 1] == extents[axis - 1]) index[--axis] = 0;
    if (axis == 0) return;
  }
}

std::intptr_t address(const void* pointer) { return reinterpret_cast<std::intptr_t>(pointer); }

std::intptr_t element(const TensorView& view, const Index& index) {
  std::intptr_t result = address(view.data());
  for (std::size_t axis = 0; axis < index.size(); ++axis) {
    result += index[axis] * view.strides()[static_cast<int>(axis)] * view.element_bytes();
  }
  return result;
}

/// Addresses of all elements, in row-major order of their index.
std::vector<std::intptr_t> elements(const TensorView& view) {
  std::vector<std::intptr_t> result;
  for_each_index(list(view.shape()),
                 [&](const Index& index) { result.push_back(element(view, index)); });
  return result;
}

/// Whether each element follows the one before it.
bool row_major_without_gaps(const TensorView& view) {
  const std::vector<std::intptr_t> all = elements(view);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] != address(view.data()) + static_cast<std::intptr_t>(i) * view.element_bytes())
      return false;
  }
  return true;
}

struct Wide {  // an opaque element
  std::array<std::int64_t, 3> words;
};
struct Narrow {
  std::array<std::int64_t, 2> words;
};
struct alignas(16) Aligned {
  std::array<std::int32_t, 4> words;
};

/// Small views of every rank, some of them broadcast, reversed, transposed, contiguous or empty,
/// that lie inside an arena.
class RandomViews {
 public:
  explicit RandomViews(std::uint64_t seed) : random_(seed) {}

  std::int64_t number(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }

  TensorView next() {
    const auto rank = static_cast<std::size_t>(number(0, 5));
    const bool may_be_empty = number(0, 9) == 0;
    Index extents(rank);
    for (auto& extent : extents) extent = number(may_be_empty ? 0 : 1, 4);
    Index strides(rank);
    for (auto& stride : strides) stride = number(-5, 5);
    if (number(0, 3) == 0) {
      strides = list(Strides::contiguous(shape_of(extents)));
      if (rank > 0 && number(0, 1) == 0) strides[index_below(rank)] += number(-1, 1);
    }
    return number(0, 1) == 0
               ? TensorView(&floats_[kMiddle], shape_of(extents), strides_of(strides), 0)
               : TensorView(&wide_[kMiddle], shape_of(extents), strides_of(strides), 0);
  }

  std::size_t index_below(std::size_t count) {
    return static_cast<std::size_t>(number(0, static_cast<std::int64_t>(count) - 1));
  }

  std::vector<int> permutation(int rank) {
    std::vector<int> axes(static_cast<std::size_t>(rank));
    std::iota(axes.begin(), axes.end(), 0);
    std::ranges::shuffle(axes, random_);
    return axes;
  }

 private:
  // The last element of a view lies at most 4^5 elements away where strides are contiguous, and
  // 5 * 3 * 5 where they are not.
  static constexpr std::size_t kMiddle = 2048;

  std::mt19937_64 random_;
  std::vector<float> floats_ = std::vector<float>(2 * kMiddle);
  std::vector<Wide> wide_ = std::vector<Wide>(2 * kMiddle);
};

constexpr int kRounds = 2000;

TensorView permuted(const TensorView& view, const std::vector<int>& a) {
  switch (a.size()) {
    case 0: return view.permute({});
    case 1: return view.permute({a[0]});
    case 2: return view.permute({a[0], a[1]});
    case 3: return view.permute({a[0], a[1], a[2]});
    case 4: return view.permute({a[0], a[1], a[2], a[3]});
    default: return view.permute({a[0], a[1], a[2], a[3], a[4]});
  }
}

// --- Shape

TEST(Shape, AScalarHasOneElementAndNoAxis) {
  const Shape shape;
  EXPECT_EQ(shape.rank(), 0);
  EXPECT_EQ(shape.elements(), 1);
  EXPECT_EQ(list(shape), Index{});
  EXPECT_EQ(shape, shape_of({}));
}

TEST(Shape, KeepsTheExtentsOfEveryRankUpToFive) {
  const std::vector<std::pair<Index, std::int64_t>> cases{
      {{7}, 7}, {{2, 3}, 6}, {{2, 3, 5}, 30}, {{2, 3, 5, 7}, 210}, {{2, 3, 5, 7, 11}, 2310}};
  for (const auto& [extents, count] : cases) {
    const Shape shape = shape_of(extents);
    EXPECT_EQ(shape.rank(), static_cast<int>(extents.size()));
    EXPECT_EQ(list(shape), extents);
    EXPECT_EQ(shape.elements(), count);
    for (std::size_t axis = 0; axis < extents.size(); ++axis) {
      EXPECT_EQ(shape[static_cast<int>(axis)], extents[axis]);
    }
  }
}

TEST(Shape, KeepsNoReferenceToTheExtentsItIsMadeFrom) {
  Index extents{2, 3};
  const Shape shape = shape_of(extents);
  extents = {9, 9};
  EXPECT_EQ(list(shape), (Index{2, 3}));
}

TEST(Shape, RefusesRankSix) {
  EXPECT_EQ(broken_rule([] { return Shape{1, 1, 1, 1, 1, 1}; }), "unsupported_shape");
  EXPECT_EQ(broken_rule([] { return shape_of(Index(100, 1)); }), "unsupported_shape");
}

TEST(Shape, RefusesANegativeExtent) {
  EXPECT_EQ(broken_rule([] { return Shape{-1}; }), "unsupported_shape");
  EXPECT_EQ(broken_rule([] { return Shape{2, -3}; }), "unsupported_shape");
  EXPECT_EQ(broken_rule([] { return Shape{-2, -3}; }), "unsupported_shape");
  EXPECT_EQ(broken_rule([] { return Shape{kMin, 2}; }), "unsupported_shape");
}

TEST(Shape, RefusesANegativeExtentBesideAZero) {
  EXPECT_EQ(broken_rule([] { return Shape{0, -1}; }), "unsupported_shape");
  EXPECT_EQ(broken_rule([] { return Shape{-1, 0}; }), "unsupported_shape");
}

TEST(Shape, AZeroExtentMakesItEmptyHoweverHugeTheOthers) {
  EXPECT_EQ(Shape{0}.elements(), 0);
  EXPECT_EQ((Shape{0, kMax, kMax}.elements()), 0);
  EXPECT_EQ((Shape{kMax, kMax, 0}.elements()), 0);
  EXPECT_EQ((Shape{kMax, 0, kMax}.elements()), 0);
  EXPECT_EQ((Shape{0, 0}.elements()), 0);
}

TEST(Shape, HoldsAsManyElementsAsFit63Bits) {
  EXPECT_EQ(Shape{kMax}.elements(), kMax);
  EXPECT_EQ((Shape{1, kMax, 1}.elements()), kMax);
  EXPECT_EQ((Shape{pow2(62), 1}.elements()), pow2(62));
  EXPECT_EQ((Shape{pow2(31), pow2(31)}.elements()), pow2(62));
  // 2^63 - 1 = 7 * 7 * 73 * 127 * 337 * 92737 * 649657
  EXPECT_EQ((Shape{49 * 73, 127, 337, 92737, 649657}.elements()), kMax);
}

TEST(Shape, RefusesOneElementMoreThanFits63Bits) {
  EXPECT_EQ(broken_rule([] { return Shape{pow2(62), 2}; }), "size_overflow");
  EXPECT_EQ(broken_rule([] { return Shape{2, pow2(62)}; }), "size_overflow");
  EXPECT_EQ(broken_rule([] { return Shape{pow2(31), pow2(32)}; }), "size_overflow");
  EXPECT_EQ(broken_rule([] { return Shape{kMax, 2}; }), "size_overflow");
  // 2^64 and 2^65 wrap to 0 in 64 bits, 3 * (2^63 - 1) to a positive number.
  EXPECT_EQ(broken_rule([] { return Shape{pow2(32), pow2(32)}; }), "size_overflow");
  EXPECT_EQ(broken_rule([] { return Shape{pow2(62), 4, 2}; }), "size_overflow");
  EXPECT_EQ(broken_rule([] { return Shape{3, kMax}; }), "size_overflow");
}

TEST(Shape, IsEqualOnlyToTheSameExtents) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
  EXPECT_NE((Shape{1}), Shape{});
  EXPECT_NE((Shape{1}), (Shape{1, 1}));
  EXPECT_NE((Shape{0}), (Shape{0, 0}));
  EXPECT_NE((Shape{0, 2}), (Shape{0, 3}));
}

TEST(Shape, IsPrintedAsAList) {
  EXPECT_EQ(to_string(Shape{24, 4, 4096}), "[24, 4, 4096]");
  EXPECT_EQ(to_string(Shape{7}), "[7]");
  EXPECT_EQ(to_string(Shape{}), "[]");
}

TEST(Shape, ARefusalShowsTheExtents) {
  EXPECT_TRUE(contains(message_of([] { return Shape{2, -3}; }), "[2, -3]"));
  EXPECT_TRUE(contains(message_of([] { return Shape{pow2(62), 2}; }), "[4611686018427387904, 2]"));
  EXPECT_TRUE(contains(message_of([] { return Shape{1, 1, 1, 1, 1, 1}; }), "rank 6"));
}

// --- Strides

TEST(Strides, ContiguousStridesAreThoseOfRowMajorOrder) {
  EXPECT_EQ(list(Strides::contiguous(Shape{})), Index{});
  EXPECT_EQ(list(Strides::contiguous(Shape{9})), Index{1});
  EXPECT_EQ(list(Strides::contiguous(Shape{24, 4, 4096})), (Index{16384, 4096, 1}));
  EXPECT_EQ(list(Strides::contiguous(Shape{2, 1, 3, 1, 5})), (Index{15, 15, 5, 5, 1}));
  EXPECT_EQ(list(Strides::contiguous(Shape{1, kMax})), (Index{kMax, 1}));
}

TEST(Strides, ContiguousStridesOfAnEmptyShapeDoNotOverflow) {
  EXPECT_EQ(Strides::contiguous(Shape{0, kMax, kMax}).rank(), 3);
  EXPECT_EQ(Strides::contiguous(Shape{kMax, kMax, 0}).rank(), 3);
  EXPECT_EQ(Strides::contiguous(Shape{kMax, 0, kMax}).rank(), 3);
}

TEST(Strides, MayBeZeroOrNegative) {
  const Strides strides{0, -7, kMin};
  EXPECT_EQ(strides.rank(), 3);
  EXPECT_EQ(list(strides), (Index{0, -7, kMin}));
  EXPECT_EQ(strides[1], -7);
  EXPECT_EQ(to_string(Strides{0, -7}), "[0, -7]");
}

TEST(Strides, RefuseRankSix) {
  EXPECT_EQ(broken_rule([] { return Strides{1, 1, 1, 1, 1, 1}; }), "unsupported_shape");
}

TEST(Strides, AreEqualOnlyToTheSameStrides) {
  EXPECT_EQ((Strides{2, 1}), (Strides{2, 1}));
  EXPECT_NE((Strides{2, 1}), (Strides{1, 2}));
  EXPECT_NE((Strides{0}), (Strides{0, 0}));
}

// --- ByteRange

TEST(ByteRange, OverlapsOnlyARangeWithACommonByte) {
  const std::array<std::byte, 16> memory{};
  const auto range = [&](std::size_t begin, std::size_t end) {
    return ByteRange{memory.data() + begin, memory.data() + end, 0};
  };
  for (std::size_t a = 0; a <= 6; ++a) {
    for (std::size_t b = a; b <= 6; ++b) {
      for (std::size_t c = 0; c <= 6; ++c) {
        for (std::size_t d = c; d <= 6; ++d) {
          bool shared = false;
          for (std::size_t byte = a; byte < b; ++byte) shared = shared || (byte >= c && byte < d);
          EXPECT_EQ(range(a, b).overlaps(range(c, d)), shared)
              << a << ' ' << b << ' ' << c << ' ' << d;
        }
      }
    }
  }
}

TEST(ByteRange, CountsItsBytes) {
  const std::array<std::byte, 16> memory{};
  EXPECT_EQ((ByteRange{memory.data() + 3, memory.data() + 16, 0}.bytes()), 13U);
  EXPECT_EQ(ByteRange{}.bytes(), 0U);
}

// --- TensorView: what it is made of

template <class T>
void expect_type(T* data, ElementType type, std::int64_t bytes) {
  const TensorView view(data, Shape{1}, 0);
  EXPECT_EQ(view.element_type(), type);
  EXPECT_EQ(view.element_bytes(), bytes);
  EXPECT_EQ(view.data(), static_cast<const void*>(data));
  EXPECT_EQ(view.template data_as<std::remove_const_t<T>>(), data);
}

TEST(TensorView, KnowsItsElementType) {
  alignas(16) std::array<std::byte, 64> memory{};
  void* data = memory.data();
  expect_type(static_cast<float*>(data), ElementType::f32, 4);
  expect_type(static_cast<__nv_bfloat16*>(data), ElementType::bf16, 2);
  expect_type(static_cast<__half*>(data), ElementType::f16, 2);
  expect_type(static_cast<std::uint8_t*>(data), ElementType::u8, 1);
  expect_type(static_cast<std::int32_t*>(data), ElementType::i32, 4);
  expect_type(static_cast<std::int64_t*>(data), ElementType::i64, 8);
  expect_type(static_cast<std::int8_t*>(data), ElementType::opaque, 1);
  expect_type(static_cast<double*>(data), ElementType::opaque, 8);
  expect_type(static_cast<Wide*>(data), ElementType::opaque, 24);
  expect_type(static_cast<Aligned*>(data), ElementType::opaque, 16);
}

TEST(TensorView, KnowsTheElementTypeOfConstMemory) {
  alignas(16) const std::array<std::byte, 64> memory{};
  const void* data = memory.data();
  expect_type(static_cast<const float*>(data), ElementType::f32, 4);
  expect_type(static_cast<const __nv_bfloat16*>(data), ElementType::bf16, 2);
  expect_type(static_cast<const __half*>(data), ElementType::f16, 2);
  expect_type(static_cast<const std::uint8_t*>(data), ElementType::u8, 1);
  expect_type(static_cast<const std::int32_t*>(data), ElementType::i32, 4);
  expect_type(static_cast<const std::int64_t*>(data), ElementType::i64, 8);
  expect_type(static_cast<const Wide*>(data), ElementType::opaque, 24);
}

TEST(TensorView, ElementTypesArePrintedAsTheyAreSpelt) {
  EXPECT_STREQ(to_string(ElementType::f32), "f32");
  EXPECT_STREQ(to_string(ElementType::bf16), "bf16");
  EXPECT_STREQ(to_string(ElementType::f16), "f16");
  EXPECT_STREQ(to_string(ElementType::u8), "u8");
  EXPECT_STREQ(to_string(ElementType::i32), "i32");
  EXPECT_STREQ(to_string(ElementType::i64), "i64");
  EXPECT_STREQ(to_string(ElementType::opaque), "opaque");
  EXPECT_STREQ(to_string(static_cast<ElementType>(255)), "unknown");
}

TEST(TensorView, IsReadOnlyOnlyWhenMadeFromConst) {
  std::array<float, 2> memory{};
  const float* readable = memory.data();
  EXPECT_FALSE(TensorView(memory.data(), Shape{2}, 0).read_only());
  EXPECT_TRUE(TensorView(readable, Shape{2}, 0).read_only());
  EXPECT_TRUE(TensorView(readable, Shape{2}, Strides{1}, 0).read_only());
}

TEST(TensorView, KeepsShapeStridesAndDevice) {
  std::array<float, 16> memory{};
  const TensorView view(memory.data(), Shape{2, 3}, Strides{5, 1}, 7);
  EXPECT_EQ(view.shape(), (Shape{2, 3}));
  EXPECT_EQ(view.strides(), (Strides{5, 1}));
  EXPECT_EQ(view.device(), 7);
}

TEST(TensorView, IsContiguousWithoutGivenStrides) {
  std::array<float, 24> memory{};
  const TensorView view(memory.data(), Shape{2, 3, 4}, 0);
  EXPECT_EQ(view.strides(), (Strides{12, 4, 1}));
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorView, ACopyOutlivesItsOriginal) {
  std::array<float, 6> memory{};
  std::optional<TensorView> original(std::in_place, memory.data(), Shape{2, 3}, Strides{1, 2}, 1);
  const TensorView copy = *original;
  original.reset();
  EXPECT_EQ(copy.data(), memory.data());
  EXPECT_EQ(copy.shape(), (Shape{2, 3}));
  EXPECT_EQ(copy.strides(), (Strides{1, 2}));
  EXPECT_EQ(copy.device(), 1);
  EXPECT_EQ(copy.hull().bytes(), sizeof(memory));
}

TEST(TensorView, AnAssignedViewIsTheOtherView) {
  std::array<float, 6> memory{};
  const Wide other{};
  TensorView view(memory.data(), Shape{6}, 0);
  view = TensorView(&other, Shape{}, 3);
  EXPECT_EQ(view.data_as<Wide>(), &other);
  EXPECT_EQ(view.shape(), Shape{});
  EXPECT_EQ(view.element_bytes(), 24);
  EXPECT_EQ(view.device(), 3);
  EXPECT_TRUE(view.read_only());
}

// --- TensorView: refusals

TEST(TensorView, RefusesNullForAtLeastOneElement) {
  float* null = nullptr;
  EXPECT_EQ(broken_rule([&] { return TensorView(null, Shape{3}, 0); }), "null_pointer");
  EXPECT_EQ(broken_rule([&] { return TensorView(null, Shape{}, 0); }), "null_pointer");
  EXPECT_EQ(broken_rule([&] { return TensorView(null, Shape{1}, Strides{0}, 0); }), "null_pointer");
}

TEST(TensorView, AcceptsNullForNoElements) {
  const TensorView view(static_cast<float*>(nullptr), Shape{3, 0}, 0);
  EXPECT_EQ(view.data(), nullptr);
  EXPECT_EQ(view.hull().bytes(), 0U);
}

TEST(TensorView, RefusesAnAddressThatIsNoMultipleOfTheAlignment) {
  alignas(16) std::array<std::byte, 64> memory{};
  const auto rule = [&]<class T>(T* /*type*/, std::size_t offset) {
    return broken_rule([&] {
      return TensorView(static_cast<T*>(static_cast<void*>(memory.data() + offset)), Shape{1}, 0);
    });
  };
  for (std::size_t offset = 0; offset <= 16; ++offset) {
    const auto expected = [&](std::size_t alignment) {
      return offset % alignment == 0 ? "none" : "misaligned";
    };
    EXPECT_EQ(rule(static_cast<std::uint8_t*>(nullptr), offset), expected(1)) << offset;
    EXPECT_EQ(rule(static_cast<__nv_bfloat16*>(nullptr), offset), expected(2)) << offset;
    EXPECT_EQ(rule(static_cast<__half*>(nullptr), offset), expected(2)) << offset;
    EXPECT_EQ(rule(static_cast<float*>(nullptr), offset), expected(4)) << offset;
    EXPECT_EQ(rule(static_cast<std::int32_t*>(nullptr), offset), expected(4)) << offset;
    EXPECT_EQ(rule(static_cast<std::int64_t*>(nullptr), offset), expected(8)) << offset;
    EXPECT_EQ(rule(static_cast<Wide*>(nullptr), offset), expected(8)) << offset;
    EXPECT_EQ(rule(static_cast<Aligned*>(nullptr), offset), expected(16)) << offset;
  }
}

TEST(TensorView, AMisalignedAddressNamesTheWayIn) {
  alignas(16) std::array<std::byte, 16> memory{};
  void* const odd = memory.data() + 6;
  const std::string message =
      message_of([&] { return TensorView(static_cast<const float*>(odd), Shape{2}, 0); });
  EXPECT_TRUE(contains(message, "multiple of 4 bytes")) << message;
  EXPECT_TRUE(contains(message, "TensorView::packed")) << message;
}

TEST(TensorView, RefusesStridesOfAnotherRank) {
  std::array<float, 8> memory{};
  const auto rule = [&](const Shape& shape, const Strides& strides) {
    return broken_rule([&] { return TensorView(memory.data(), shape, strides, 0); });
  };
  EXPECT_EQ(rule(Shape{2, 3}, Strides{1}), "unsupported_shape");
  EXPECT_EQ(rule(Shape{2}, Strides{1, 1}), "unsupported_shape");
  EXPECT_EQ(rule(Shape{}, Strides{1}), "unsupported_shape");
  EXPECT_EQ(rule(Shape{1}, Strides{}), "unsupported_shape");
  EXPECT_EQ(rule(Shape{0}, Strides{}), "unsupported_shape");
}

TEST(TensorView, RefusesANegativeDevice) {
  float value = 0;
  EXPECT_EQ(broken_rule([&] { return TensorView(&value, Shape{}, -1); }), "device_mismatch");
}

/// The rule that a view of `T` breaks at an address which leaves 2^63 bytes on either side.
template <class T>
std::string layout_rule(const Shape& shape, const Strides& strides) {
  auto* const middle = reinterpret_cast<T*>(std::uintptr_t{1} << 63U);
  return broken_rule([&] { return TensorView(middle, shape, strides, 0); });
}

TEST(TensorView, RefusesElementsOutsideTheAddressSpace) {
  auto* const low = reinterpret_cast<float*>(std::uintptr_t{4096});
  EXPECT_EQ(broken_rule([&] { return TensorView(low, Shape{2}, Strides{-1024}, 0); }), "none");
  EXPECT_EQ(broken_rule([&] { return TensorView(low, Shape{2}, Strides{-1025}, 0); }),
            "size_overflow");
  auto* const high = reinterpret_cast<float*>(~std::uintptr_t{0} - 4095);
  EXPECT_EQ(broken_rule([&] { return TensorView(high, Shape{2}, Strides{1022}, 0); }), "none");
  EXPECT_EQ(broken_rule([&] { return TensorView(high, Shape{2}, Strides{1023}, 0); }),
            "size_overflow");
}

// The bytes from the first to the end of the last element must fit 63 bits. For floats these are
// 4 * (1 + span) <= 2^63 - 1, so the span in elements is at most 2^61 - 2.
constexpr std::int64_t kFloatSpan = pow2(61) - 2;

TEST(TensorView, AcceptsSpansUpTo63BitsOfBytes) {
  EXPECT_EQ(layout_rule<float>(Shape{2}, Strides{kFloatSpan}), "none");
  EXPECT_EQ(layout_rule<float>(Shape{2}, Strides{-kFloatSpan}), "none");
  EXPECT_EQ(layout_rule<float>(Shape{3}, Strides{kFloatSpan / 2}), "none");
  EXPECT_EQ(layout_rule<float>(Shape{2, 2}, Strides{pow2(60), kFloatSpan - pow2(60)}), "none");
  EXPECT_EQ(layout_rule<float>(Shape{2, 2}, Strides{-pow2(60), pow2(60) - kFloatSpan}), "none");
  EXPECT_EQ(layout_rule<std::uint8_t>(Shape{2}, Strides{kMax - 1}), "none");
  EXPECT_EQ(layout_rule<std::uint8_t>(Shape{2}, Strides{1 - kMax}), "none");
  EXPECT_EQ(layout_rule<Wide>(Shape{2}, Strides{kMax / 24 - 1}), "none");
}

TEST(TensorView, RefusesSpansOfOneElementMore) {
  EXPECT_EQ(layout_rule<float>(Shape{2}, Strides{kFloatSpan + 1}), "size_overflow");
  EXPECT_EQ(layout_rule<float>(Shape{2}, Strides{-kFloatSpan - 1}), "size_overflow");
  EXPECT_EQ(layout_rule<float>(Shape{3}, Strides{kFloatSpan / 2 + 1}), "size_overflow");
  EXPECT_EQ(layout_rule<float>(Shape{2, 2}, Strides{pow2(60), kFloatSpan - pow2(60) + 1}),
            "size_overflow");
  EXPECT_EQ(layout_rule<float>(Shape{2, 2}, Strides{-pow2(60), pow2(60) - kFloatSpan - 1}),
            "size_overflow");
  EXPECT_EQ(layout_rule<std::uint8_t>(Shape{2}, Strides{kMax}), "size_overflow");
  EXPECT_EQ(layout_rule<std::uint8_t>(Shape{2}, Strides{-kMax}), "size_overflow");
  EXPECT_EQ(layout_rule<Wide>(Shape{2}, Strides{kMax / 24}), "size_overflow");
}

TEST(TensorView, RefusesSpansWhoseProductsWrap) {
  EXPECT_EQ(layout_rule<float>(Shape{5}, Strides{pow2(62)}), "size_overflow");  // 4 * 2^62 = 2^64
  EXPECT_EQ(layout_rule<float>(Shape{2}, Strides{pow2(62)}), "size_overflow");  // in bytes 2^64
  EXPECT_EQ(layout_rule<float>(Shape{kMax}, Strides{kMax}), "size_overflow");
  EXPECT_EQ(layout_rule<float>(Shape{2, 2, 2, 2}, Strides{pow2(62), pow2(62), pow2(62), pow2(62)}),
            "size_overflow");
}

TEST(TensorView, RefusesTheMostNegativeStride) {
  EXPECT_EQ(layout_rule<float>(Shape{2}, Strides{kMin}), "size_overflow");
  EXPECT_EQ(layout_rule<std::uint8_t>(Shape{2}, Strides{kMin}), "size_overflow");
  EXPECT_EQ(layout_rule<float>(Shape{kMax}, Strides{kMin}), "size_overflow");
}

TEST(TensorView, RefusesContiguousBytesThatDoNotFit63Bits) {
  static float value{};
  static std::uint8_t byte{};
  const auto rule = [](auto* data, const Shape& shape) {
    return broken_rule([&] { return TensorView(data, shape, 0); });
  };
  EXPECT_EQ(rule(&value, Shape{pow2(61) - 1}), "none");
  EXPECT_EQ(rule(&value, Shape{pow2(61)}), "size_overflow");
  EXPECT_EQ(rule(&value, Shape{pow2(30), pow2(31)}), "size_overflow");
  EXPECT_EQ(rule(&byte, Shape{kMax}), "none");
}

TEST(TensorView, IgnoresTheStrideOfAnAxisWithOneElement) {
  EXPECT_EQ(layout_rule<float>(Shape{1}, Strides{kMax}), "none");
  EXPECT_EQ(layout_rule<float>(Shape{1, 2}, Strides{-kMax, 1}), "none");
}

TEST(TensorView, IgnoresTheStridesOfAnEmptyTensor) {
  EXPECT_EQ(layout_rule<float>(Shape{0}, Strides{kMin}), "none");
  EXPECT_EQ(layout_rule<float>(Shape{kMax, 0, kMax}, Strides{kMax, kMin, kMax}), "none");
}

TEST(TensorView, ARefusalShowsShapeAndStrides) {
  const std::string message = message_of([] {
    static float value{};
    return TensorView(&value, Shape{2, 7}, Strides{kMax, 1}, 0);
  });
  EXPECT_TRUE(contains(message, "[2, 7]")) << message;
  EXPECT_TRUE(contains(message, "[9223372036854775807, 1]")) << message;
}

// --- TensorView: typed access

TEST(TensorView, GivesItsAddressOnlyAsItsOwnType) {
  std::array<float, 4> memory{};
  const TensorView view(memory.data(), Shape{4}, 0);
  EXPECT_EQ(view.data_as<float>(), memory.data());
  EXPECT_EQ(broken_rule([&] { return view.data_as<std::int32_t>(); }), "type_mismatch");
  EXPECT_EQ(broken_rule([&] { return view.data_as<__half>(); }), "type_mismatch");
  EXPECT_EQ(broken_rule([&] { return view.data_as<double>(); }), "type_mismatch");
  EXPECT_EQ(broken_rule([&] { return view.data_as<unsigned>(); }), "type_mismatch")
      << "opaque, 4 bytes";
}

TEST(TensorView, TellsTypesOfOneSizeApart) {
  alignas(2) std::array<std::byte, 2> memory{};
  const TensorView view(static_cast<__nv_bfloat16*>(static_cast<void*>(memory.data())), Shape{1},
                        0);
  EXPECT_EQ(broken_rule([&] { return view.data_as<__half>(); }), "type_mismatch");
  EXPECT_EQ(broken_rule([&] { return view.data_as<__nv_bfloat16>(); }), "none");
}

TEST(TensorView, TellsOpaqueTypesOfOtherSizesApart) {
  Wide wide{};
  const TensorView view(&wide, Shape{1}, 0);
  EXPECT_EQ(view.data_as<Wide>(), &wide);
  EXPECT_EQ(view.writable_data_as<Wide>(), &wide);
  EXPECT_EQ(broken_rule([&] { return view.data_as<Narrow>(); }), "type_mismatch");
  EXPECT_EQ(broken_rule([&] { return view.writable_data_as<Narrow>(); }), "type_mismatch");
}

TEST(TensorView, GivesItsAddressForWritingOnlyAsItsOwnType) {
  std::array<float, 4> memory{};
  const TensorView view(memory.data(), Shape{4}, 0);
  EXPECT_EQ(view.writable_data_as<float>(), memory.data());
  EXPECT_EQ(broken_rule([&] { return view.writable_data_as<std::int32_t>(); }), "type_mismatch");
}

TEST(TensorView, AReadOnlyViewIsNotForWriting) {
  const std::array<float, 4> memory{};
  const TensorView view(memory.data(), Shape{4}, 0);
  EXPECT_EQ(view.data_as<float>(), memory.data());
  EXPECT_EQ(broken_rule([&] { return view.writable_data_as<float>(); }), "read_only");
}

TEST(TensorView, ATypeMismatchNamesBothTypes) {
  float value = 0;
  const TensorView view(&value, Shape{}, 0);
  const std::string message = message_of([&] { return view.data_as<std::int64_t>(); });
  EXPECT_TRUE(contains(message, "f32 of 4 bytes")) << message;
  EXPECT_TRUE(contains(message, "i64 of 8")) << message;
}

// --- TensorView: packed

TEST(TensorView, APackedViewLiesAtAnyByteAndIsNoPointerUnlessAligned) {
  alignas(16) std::array<std::byte, 64> memory{};
  const auto look = [&]<class T>(T* /*type*/, std::size_t offset, std::size_t alignment) {
    const std::byte* const bytes = memory.data() + offset;
    const TensorView view = TensorView::packed<T>(bytes, Shape{1}, 3);
    const bool aligned = offset % alignment == 0;
    EXPECT_EQ(view.data(), bytes);
    EXPECT_EQ(view.is_aligned(), aligned) << offset;
    EXPECT_EQ(view.element_type(), holdfast::kElementType<T>);
    EXPECT_EQ(view.device(), 3);
    EXPECT_TRUE(view.read_only());
    EXPECT_EQ(broken_rule([&] { return view.data_as<T>(); }), aligned ? "none" : "misaligned")
        << offset;
    EXPECT_EQ(broken_rule([&] { return view.writable_data_as<T>(); }),
              aligned ? "read_only" : "misaligned")
        << offset;
    EXPECT_EQ(broken_rule([&] { return view.data_as<Narrow>(); }), "type_mismatch");
  };
  for (std::size_t offset = 0; offset <= 32; ++offset) {
    look(static_cast<std::uint8_t*>(nullptr), offset, 1);
    look(static_cast<__nv_bfloat16*>(nullptr), offset, 2);
    look(static_cast<__half*>(nullptr), offset, 2);
    look(static_cast<float*>(nullptr), offset, 4);
    look(static_cast<std::int32_t*>(nullptr), offset, 4);
    look(static_cast<std::int64_t*>(nullptr), offset, 8);
    look(static_cast<Wide*>(nullptr), offset, 8);
  }
}

TEST(TensorView, APackedViewIsCutLikeAnyOther) {
  alignas(16) std::array<std::byte, 256> memory{};
  const std::byte* const bytes = memory.data() + 6;
  const TensorView view = TensorView::packed<float>(bytes, Shape{4, 6}, 0);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.hull().begin, bytes);
  EXPECT_EQ(view.hull().end, bytes + 96);
  const TensorView part = view.slice(0, 1, 2).unflatten(1, {2, 3}).permute({2, 0, 1});
  EXPECT_EQ(part.shape(), (Shape{3, 2, 2}));
  EXPECT_EQ(part.strides(), (Strides{1, 6, 3}));
  EXPECT_EQ(part.hull().begin, bytes + 24);
  EXPECT_EQ(part.hull().end, bytes + 72);
  EXPECT_FALSE(part.is_aligned());
  EXPECT_EQ(broken_rule([&] { return part.data_as<float>(); }), "misaligned");
  const TensorView backwards = TensorView::packed<float>(bytes + 20, Shape{6}, Strides{-1}, 0);
  EXPECT_EQ(backwards.hull().begin, bytes);
  EXPECT_EQ(backwards.hull().end, bytes + 24);
}

TEST(TensorView, APackedViewIsRefusedLikeAnyOther) {
  const std::byte byte{};
  const auto rule = [](const void* bytes, const Shape& shape, const Strides& strides, int device) {
    return broken_rule([&] { return TensorView::packed<float>(bytes, shape, strides, device); });
  };
  EXPECT_EQ(rule(nullptr, Shape{2}, Strides{1}, 0), "null_pointer");
  EXPECT_EQ(rule(nullptr, Shape{0}, Strides{1}, 0), "none");
  EXPECT_EQ(rule(&byte, Shape{2}, Strides{1, 1}, 0), "unsupported_shape");
  EXPECT_EQ(rule(&byte, Shape{2}, Strides{1}, -1), "device_mismatch");
  EXPECT_EQ(rule(&byte, Shape{pow2(61)}, Strides{1}, 0), "size_overflow");
  EXPECT_EQ(rule(&byte, Shape{pow2(60), 2}, Strides{4, kMax}, 0), "size_overflow");
  // 4096 bytes up to the end of the address space, and one less
  const auto* const last = reinterpret_cast<const std::byte*>(~std::uintptr_t{0} - 4096);
  EXPECT_EQ(rule(last, Shape{1024}, Strides{1}, 0), "none");
  EXPECT_EQ(rule(last + 1, Shape{1024}, Strides{1}, 0), "size_overflow");
}

TEST(TensorView, ARefusedPackedViewSaysWhoReadsIt) {
  alignas(16) std::array<std::byte, 16> memory{};
  const TensorView view = TensorView::packed<float>(memory.data() + 6, Shape{2}, 0);
  const std::string message = message_of([&] { return view.data_as<float>(); });
  EXPECT_TRUE(contains(message, "[2]")) << message;
  EXPECT_TRUE(contains(message, "Relayout")) << message;
}

// --- TensorView: contiguity and hull

TEST(TensorView, IsContiguousExactlyWhenRowMajorWithoutGaps) {
  struct Case {
    Index extents;
    Index strides;
    bool contiguous;
  };
  const std::vector<Case> cases{
      {{}, {}, true},
      {{5}, {1}, true},
      {{5}, {2}, false},
      {{5}, {0}, false},
      {{5}, {-1}, false},
      {{1}, {1}, true},
      {{1}, {-9}, true},
      {{2, 3}, {3, 1}, true},
      {{2, 3}, {4, 1}, false},    // padded rows
      {{2, 3}, {2, 1}, false},    // rows that share an element
      {{2, 3}, {1, 2}, false},    // transposed
      {{2, 3}, {0, 1}, false},    // broadcast rows
      {{2, 3}, {3, 0}, false},    // broadcast columns
      {{2, 3}, {-3, 1}, false},   // rows from last to first
      {{2, 3}, {-3, -1}, false},  // all from last to first
      {{3, 3}, {1, 3}, false},    // a square, transposed
      {{1, 3}, {99, 1}, true},
      {{3, 1}, {1, 99}, true},
      {{3, 1}, {2, 1}, false},
      {{2, 1, 3}, {3, -5, 1}, true},
      {{2, 1, 3}, {4, 3, 1}, false},
      {{2, 2, 2}, {4, 2, 1}, true},
      {{2, 2, 2}, {4, 1, 2}, false},
      {{2, 2, 2}, {2, 4, 1}, false},
      {{2, 3, 1, 2, 2}, {12, 4, 0, 2, 1}, true},
      {{1, 1, 1, 1, 1}, {5, 4, 3, 2, 0}, true},
      {{0}, {9}, true},
      {{0, 4}, {-3, 17}, true},
      {{4, 0}, {17, -3}, true},
  };
  std::array<float, 64> memory{};
  for (const auto& [extents, strides, contiguous] : cases) {
    const TensorView view(&memory[32], shape_of(extents), strides_of(strides), 0);
    EXPECT_EQ(view.is_contiguous(), contiguous)
        << to_string(view.shape()) << " with strides " << to_string(view.strides());
  }
}

TEST(TensorView, ContiguityAgreesWithTheAddressesOfAllElements) {
  RandomViews views(1);
  int contiguous = 0;
  for (int round = 0; round < kRounds; ++round) {
    const TensorView view = views.next();
    contiguous += view.is_contiguous() ? 1 : 0;
    ASSERT_EQ(view.is_contiguous(), row_major_without_gaps(view))
        << to_string(view.shape()) << " with strides " << to_string(view.strides());
  }
  EXPECT_GT(contiguous, kRounds / 10) << "the views are too much alike to show anything";
  EXPECT_LT(contiguous, kRounds * 9 / 10);
}

TEST(TensorView, HullCoversStridesOfEverySign) {
  std::array<float, 64> memory{};
  const float* middle = &memory[32];
  const auto expect_hull = [&](const Shape& shape, const Strides& strides, int low, int end) {
    const ByteRange hull = TensorView(middle, shape, strides, 3).hull();
    EXPECT_EQ(address(hull.begin), address(middle) + 4 * low) << to_string(strides);
    EXPECT_EQ(address(hull.end), address(middle) + 4 * end) << to_string(strides);
    EXPECT_EQ(hull.device, 3);
  };
  expect_hull(Shape{}, Strides{}, 0, 1);
  expect_hull(Shape{5}, Strides{2}, 0, 9);
  expect_hull(Shape{5}, Strides{0}, 0, 1);
  expect_hull(Shape{5}, Strides{-2}, -8, 1);
  expect_hull(Shape{2, 3}, Strides{-3, 1}, -3, 3);
  expect_hull(Shape{2, 3}, Strides{3, -1}, -2, 4);
  expect_hull(Shape{2, 3}, Strides{-3, -1}, -5, 1);
  expect_hull(Shape{1, 3}, Strides{-9, 1}, 0, 3);
}

TEST(TensorView, HullIsTheSmallestRangeThatHoldsAllElements) {
  RandomViews views(2);
  for (int round = 0; round < kRounds; ++round) {
    const TensorView view = views.next();
    const std::vector<std::intptr_t> all = elements(view);
    if (all.empty()) continue;
    const auto [first, last] = std::ranges::minmax(all);
    const ByteRange hull = view.hull();
    ASSERT_EQ(address(hull.begin), first)
        << to_string(view.shape()) << ' ' << to_string(view.strides());
    ASSERT_EQ(address(hull.end), last + view.element_bytes())
        << to_string(view.shape()) << ' ' << to_string(view.strides());
  }
}

TEST(TensorView, HullOfAnEmptyTensorHasNoByte) {
  std::array<float, 8> memory{};
  const ByteRange hull = TensorView(&memory[4], Shape{3, 0}, Strides{-2, 5}, 2).hull();
  EXPECT_EQ(hull.bytes(), 0U);
  EXPECT_EQ(hull.device, 2);
  EXPECT_FALSE(hull.overlaps(TensorView(memory.data(), Shape{8}, 0).hull()));
}

TEST(TensorView, CountsBeyond32Bits) {
  // Never dereferenced; low enough that nothing wraps.
  auto* data = reinterpret_cast<float*>(std::uintptr_t{4096});  // NOLINT(performance-no-int-to-ptr)
  const TensorView view(data, Shape{pow2(20), pow2(20)}, 0);
  EXPECT_EQ(view.hull().bytes(), static_cast<std::size_t>(pow2(42)));
  const TensorView tail = view.slice(0, pow2(20) - 1, 1);
  EXPECT_EQ(address(tail.data()), 4096 + 4 * (pow2(20) - 1) * pow2(20));
  EXPECT_EQ(tail.shape(), (Shape{1, pow2(20)}));
}

// --- TensorView: permute

TEST(TensorView, PermuteHoldsTheSameElementsWithItsAxesInNewPlaces) {
  RandomViews views(3);
  for (int round = 0; round < kRounds; ++round) {
    const TensorView view = views.next();
    const std::vector<int> axes = views.permutation(view.shape().rank());
    const TensorView result = permuted(view, axes);
    ASSERT_EQ(result.shape().rank(), view.shape().rank());
    ASSERT_EQ(result.shape().elements(), view.shape().elements());
    for (std::size_t place = 0; place < axes.size(); ++place) {
      ASSERT_EQ(result.shape()[static_cast<int>(place)], view.shape()[axes[place]]);
    }
    for_each_index(list(result.shape()), [&](const Index& index) {
      Index original(index.size());
      for (std::size_t place = 0; place < axes.size(); ++place) {
        original[static_cast<std::size_t>(axes[place])] = index[place];
      }
      ASSERT_EQ(element(result, index), element(view, original));
    });
  }
}

TEST(TensorView, PermutePutsTheNamedAxisInEachPlace) {
  std::array<float, 24> memory{};
  const TensorView view = TensorView(memory.data(), Shape{2, 3, 4}, 0).permute({2, 0, 1});
  EXPECT_EQ(view.shape(), (Shape{4, 2, 3}));
  EXPECT_EQ(view.strides(), (Strides{1, 12, 4}));
}

TEST(TensorView, PermuteRefusesAnythingButEveryAxisOnce) {
  std::array<float, 24> memory{};
  const TensorView view(memory.data(), Shape{2, 3, 4}, 0);
  const auto rule = [&](std::initializer_list<int> axes) {
    return broken_rule([&] { return view.permute(axes); });
  };
  EXPECT_EQ(rule({0, 1, 2}), "none");
  EXPECT_EQ(rule({0, 0, 1}), "unsupported_shape");
  EXPECT_EQ(rule({2, 2, 2}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, 3}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, -1}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, 32}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, 34}), "unsupported_shape");
  EXPECT_EQ(rule({}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, 2, 2}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, 2, 3}), "unsupported_shape");
  EXPECT_EQ(rule({0, 1, 2, 0, 1, 2, 0}), "unsupported_shape");
}

TEST(TensorView, PermuteOfAScalarNamesNoAxis) {
  float value = 0;
  const TensorView view(&value, Shape{}, 0);
  EXPECT_EQ(view.permute({}).shape(), Shape{});
  EXPECT_EQ(broken_rule([&] { return view.permute({0}); }), "unsupported_shape");
}

// --- TensorView: slice

TEST(TensorView, SliceHoldsTheElementsOfItsRange) {
  RandomViews views(4);
  for (int round = 0; round < kRounds; ++round) {
    const TensorView view = views.next();
    if (view.shape().rank() == 0) continue;
    const std::size_t axis = views.index_below(static_cast<std::size_t>(view.shape().rank()));
    const std::int64_t extent = view.shape()[static_cast<int>(axis)];
    const std::int64_t start = views.number(0, extent);
    const std::int64_t length = views.number(0, extent - start);
    const TensorView result = view.slice(static_cast<int>(axis), start, length);
    Index extents = list(view.shape());
    extents[axis] = length;
    ASSERT_EQ(list(result.shape()), extents);
    for_each_index(extents, [&](const Index& index) {
      Index original = index;
      original[axis] += start;
      ASSERT_EQ(element(result, index), element(view, original));
    });
  }
}

TEST(TensorView, ASliceMayBeEmptyAnywhereInTheAxis) {
  std::array<float, 12> memory{};
  const TensorView view(memory.data(), Shape{3, 4}, 0);
  for (const std::int64_t start : {0, 1, 3}) {
    const TensorView slice = view.slice(0, start, 0);
    EXPECT_EQ(slice.shape(), (Shape{0, 4}));
    EXPECT_EQ(slice.hull().bytes(), 0U);
    EXPECT_TRUE(slice.is_contiguous());
  }
}

TEST(TensorView, ASliceOfASliceCountsFromTheFirstSlice) {
  std::array<float, 40> memory{};
  const TensorView view(memory.data(), Shape{10, 4}, 0);
  const TensorView slice = view.slice(0, 2, 7).slice(0, 3, 2).slice(1, 1, 2);
  EXPECT_EQ(slice.shape(), (Shape{2, 2}));
  EXPECT_EQ(elements(slice),
            (std::vector<std::intptr_t>{address(&memory[21]), address(&memory[22]),
                                        address(&memory[25]), address(&memory[26])}));
}

TEST(TensorView, ASliceMayBeTheWholeAxis) {
  std::array<float, 12> memory{};
  const TensorView view(memory.data(), Shape{3, 4}, 0);
  EXPECT_EQ(elements(view.slice(1, 0, 4)), elements(view));
}

TEST(TensorView, SliceRefusesRangesOutsideTheAxis) {
  std::array<float, 12> memory{};
  const TensorView view(memory.data(), Shape{3, 4}, 0);
  const auto rule = [&](int axis, std::int64_t start, std::int64_t length) {
    return broken_rule([&] { return view.slice(axis, start, length); });
  };
  EXPECT_EQ(rule(1, 1, 3), "none");
  EXPECT_EQ(rule(1, 1, 4), "unsupported_shape");
  EXPECT_EQ(rule(1, 0, 5), "unsupported_shape");
  EXPECT_EQ(rule(1, 4, 1), "unsupported_shape");
  EXPECT_EQ(rule(1, 5, 0), "unsupported_shape");
  EXPECT_EQ(rule(1, -1, 2), "unsupported_shape");
  EXPECT_EQ(rule(1, 2, -1), "unsupported_shape");
  EXPECT_EQ(rule(1, 1, kMax), "unsupported_shape");
  EXPECT_EQ(rule(1, kMax, 1), "unsupported_shape");
  EXPECT_EQ(rule(1, kMax, kMax), "unsupported_shape");
  EXPECT_EQ(rule(1, kMin, kMin), "unsupported_shape");
}

TEST(TensorView, SliceRefusesAnAxisThatItDoesNotHave) {
  std::array<float, 12> memory{};
  const TensorView view(memory.data(), Shape{3, 4}, 0);
  EXPECT_EQ(broken_rule([&] { return view.slice(2, 0, 0); }), "unsupported_shape");
  EXPECT_EQ(broken_rule([&] { return view.slice(-1, 0, 0); }), "unsupported_shape");
  EXPECT_EQ(broken_rule([&] { return TensorView(memory.data(), Shape{}, 0).slice(0, 0, 0); }),
            "unsupported_shape");
}

TEST(TensorView, AnEmptyTensorWithExtremeStridesCanBeSliced) {
  const TensorView view(static_cast<float*>(nullptr), Shape{5, 0}, Strides{kMax, kMin}, 0);
  EXPECT_EQ(view.slice(0, 3, 2).shape(), (Shape{2, 0}));
  EXPECT_EQ(view.slice(0, 3, 2).data(), nullptr);
}

// --- TensorView: unflatten

TEST(TensorView, UnflattenSplitsAnAxisInRowMajorOrder) {
  RandomViews views(5);
  const auto parts_of = [&](std::int64_t extent) {
    const std::vector<Index> choices =
        extent == 4   ? std::vector<Index>{{4}, {2, 2}, {1, 4}, {4, 1}, {2, 1, 2}}
        : extent == 0 ? std::vector<Index>{{0}, {0, 3}, {3, 0}, {0, 0}}
                      : std::vector<Index>{{extent}, {1, extent}, {extent, 1}, {1, extent, 1}};
    return choices[views.index_below(choices.size())];
  };
  for (int round = 0; round < kRounds; ++round) {
    const TensorView view = views.next();
    if (view.shape().rank() == 0) continue;
    const std::size_t axis = views.index_below(static_cast<std::size_t>(view.shape().rank()));
    const Index parts = parts_of(view.shape()[static_cast<int>(axis)]);
    if (static_cast<std::size_t>(view.shape().rank()) - 1 + parts.size() > 5) continue;
    const TensorView result = view.unflatten(static_cast<int>(axis), shape_of(parts));
    const auto place = static_cast<std::ptrdiff_t>(axis);
    const auto count = static_cast<std::ptrdiff_t>(parts.size());
    Index extents = list(view.shape());
    extents.erase(extents.begin() + place);
    extents.insert(extents.begin() + place, parts.begin(), parts.end());
    ASSERT_EQ(list(result.shape()), extents);
    for_each_index(extents, [&](const Index& index) {
      std::int64_t merged = 0;
      for (std::size_t part = 0; part < parts.size(); ++part) {
        merged = merged * parts[part] + index[axis + part];
      }
      Index original = index;
      original.erase(original.begin() + place, original.begin() + place + count);
      original.insert(original.begin() + place, merged);
      ASSERT_EQ(element(result, index), element(view, original));
    });
  }
}

TEST(TensorView, UnflattenSplitsStreamsOffHidden) {
  std::vector<float> memory(24 * 4 * 16);
  const TensorView view =
      TensorView(memory.data(), Shape{24, 4 * 16}, 0).unflatten(1, Shape{4, 16});
  EXPECT_EQ(view.shape(), (Shape{24, 4, 16}));
  EXPECT_EQ(view.strides(), (Strides{64, 16, 1}));
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorView, UnflattenRefusesPartsOfAnotherSize) {
  std::array<float, 24> memory{};
  const TensorView view(memory.data(), Shape{2, 12}, 0);
  const auto rule = [&](int axis, const Shape& parts) {
    return broken_rule([&] { return view.unflatten(axis, parts); });
  };
  EXPECT_EQ(rule(1, Shape{3, 4}), "none");
  EXPECT_EQ(rule(1, Shape{3, 5}), "unsupported_shape");
  EXPECT_EQ(rule(1, Shape{3, 3}), "unsupported_shape");
  EXPECT_EQ(rule(1, Shape{0, 12}), "unsupported_shape");
  EXPECT_EQ(rule(1, Shape{}), "unsupported_shape");
  EXPECT_EQ(rule(0, Shape{12}), "unsupported_shape");
}

TEST(TensorView, UnflattenRefusesAnAxisThatItDoesNotHave) {
  std::array<float, 24> memory{};
  const TensorView view(memory.data(), Shape{2, 12}, 0);
  EXPECT_EQ(broken_rule([&] { return view.unflatten(2, Shape{12}); }), "unsupported_shape");
  EXPECT_EQ(broken_rule([&] { return view.unflatten(-1, Shape{2}); }), "unsupported_shape");
  EXPECT_EQ(
      broken_rule([&] { return TensorView(memory.data(), Shape{}, 0).unflatten(0, Shape{}); }),
      "unsupported_shape");
}

TEST(TensorView, UnflattenRefusesAResultOfRankSix) {
  std::array<float, 16> memory{};
  const TensorView view(memory.data(), Shape{2, 2, 4}, 0);
  EXPECT_EQ(view.unflatten(2, Shape{2, 1, 2}).shape().rank(), 5);
  // By itself, and not only because no Shape of rank 6 can be made.
  EXPECT_TRUE(contains(message_of([&] {
                         return view.unflatten(2, Shape{2, 1, 2, 1});
                       }),
                       "unflatten of tensor [2, 2, 4]"));
}

TEST(TensorView, UnflattenOfTheWidestSpanDoesNotOverflow) {
  static std::uint8_t byte{};
  const TensorView view(&byte, Shape{2}, Strides{pow2(62)}, 0);
  const TensorView result = view.unflatten(0, Shape{1, 2});
  EXPECT_EQ(result.shape(), (Shape{1, 2}));
  EXPECT_EQ(result.strides()[1], pow2(62));
}

TEST(TensorView, UnflattenOfAnEmptyTensorIgnoresItsStrides) {
  const TensorView view(static_cast<float*>(nullptr), Shape{6, 0}, Strides{kMax, kMin}, 0);
  EXPECT_EQ(view.unflatten(0, Shape{3, 2}).shape(), (Shape{3, 2, 0}));
  EXPECT_EQ(view.unflatten(1, Shape{0, 2}).shape(), (Shape{6, 0, 2}));
}

// --- TensorView: what derived views keep

TEST(TensorView, DerivedViewsComposeElementByElement) {
  std::vector<float> memory(6 * 8 * 5);
  const TensorView view(memory.data(), Shape{6, 8, 5}, 0);
  const TensorView result =
      view.slice(0, 1, 4).unflatten(1, Shape{2, 4}).permute({3, 1, 0, 2}).slice(3, 1, 2);
  ASSERT_EQ(result.shape(), (Shape{5, 2, 4, 2}));
  for_each_index(list(result.shape()), [&](const Index& i) {
    const std::int64_t offset = ((i[2] + 1) * 8 + i[1] * 4 + (i[3] + 1)) * 5 + i[0];
    EXPECT_EQ(element(result, i), address(memory.data() + offset));
  });
}

TEST(TensorView, DerivedViewsKeepTypeDeviceAndPermission) {
  std::array<Wide, 12> memory{};
  const Wide* readable = memory.data();
  for (const TensorView& view :
       {TensorView(memory.data(), Shape{3, 4}, 5), TensorView(readable, Shape{3, 4}, 5)}) {
    for (const TensorView& derived : {view.permute({1, 0}), view.slice(1, 1, 2),
                                      view.slice(0, 0, 0), view.unflatten(1, Shape{2, 2})}) {
      EXPECT_EQ(derived.element_type(), ElementType::opaque);
      EXPECT_EQ(derived.element_bytes(), 24);
      EXPECT_EQ(derived.device(), 5);
      EXPECT_EQ(derived.read_only(), view.read_only());
    }
  }
}

TEST(TensorView, DerivingAViewLeavesTheOriginal) {
  std::array<float, 12> memory{};
  const TensorView view(memory.data(), Shape{3, 4}, 0);
  (void)view.permute({1, 0});
  (void)view.slice(0, 1, 1);
  (void)view.unflatten(1, Shape{2, 2});
  EXPECT_EQ(view.data(), memory.data());
  EXPECT_EQ(view.shape(), (Shape{3, 4}));
  EXPECT_EQ(view.strides(), (Strides{4, 1}));
}

TEST(TensorView, ARefusedDerivationNamesShapeAndRequest) {
  std::array<float, 12> memory{};
  const TensorView view(memory.data(), Shape{3, 4}, 0);
  const std::string slice = message_of([&] { return view.slice(1, 3, 2); });
  EXPECT_TRUE(contains(slice, "[3, 4]")) << slice;
  EXPECT_TRUE(contains(slice, "axis 1, start 3, length 2")) << slice;
  const std::string unflatten = message_of([&] { return view.unflatten(0, Shape{2, 2}); });
  EXPECT_TRUE(contains(unflatten, "[3, 4]")) << unflatten;
  EXPECT_TRUE(contains(unflatten, "[2, 2]")) << unflatten;
  EXPECT_TRUE(contains(message_of([&] { return view.permute({0}); }), "[3, 4]"));
}

}  // namespace
