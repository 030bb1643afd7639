// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// TensorView says where a tensor lies and how it is laid out, and owns nothing.
///
/// Everything that can be wrong with a shape, a stride or an address is refused when the view is
/// made, so that code which holds a view need not look again. Sizes and strides are int64: element
/// counts beyond 2^31 are ordinary. A view does not keep memory alive and does not order anything.

#include "holdfast/error.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

struct __nv_bfloat16;
struct __half;

namespace holdfast {

inline constexpr int kMaxRank = 5;

/// What one element is. `opaque` is any other trivially copyable type: it can be held and copied,
/// but not computed with.
enum class ElementType : std::uint8_t { f32, bf16, f16, u8, i32, i64, opaque };

[[nodiscard]] constexpr const char* to_string(ElementType type) noexcept {
  switch (type) {
    case ElementType::f32: return "f32";
    case ElementType::bf16: return "bf16";
    case ElementType::f16: return "f16";
    case ElementType::u8: return "u8";
    case ElementType::i32: return "i32";
    case ElementType::i64: return "i64";
    case ElementType::opaque: return "opaque";
  }
  return "unknown";
}

/// The ElementType of a C++ type.
template <class T>
inline constexpr ElementType kElementType = ElementType::opaque;
template <>
inline constexpr ElementType kElementType<float> = ElementType::f32;
template <>
inline constexpr ElementType kElementType<__nv_bfloat16> = ElementType::bf16;
template <>
inline constexpr ElementType kElementType<__half> = ElementType::f16;
template <>
inline constexpr ElementType kElementType<std::uint8_t> = ElementType::u8;
template <>
inline constexpr ElementType kElementType<std::int32_t> = ElementType::i32;
template <>
inline constexpr ElementType kElementType<std::int64_t> = ElementType::i64;

namespace detail {

/// Up to five int64, printed as `[a, b, c]`.
class Axes {
 public:
  constexpr Axes() = default;
  explicit Axes(std::span<const std::int64_t> values) {
    throw_unless(values.size() <= kMaxRank, Rule::unsupported_shape, [values] {
      return "tensor: rank " + std::to_string(values.size()) + " is above the supported " +
             std::to_string(kMaxRank) + "; merge axes";
    });
    for (const std::int64_t value : values) values_[static_cast<std::size_t>(rank_++)] = value;
  }

  [[nodiscard]] constexpr int rank() const noexcept { return rank_; }
  [[nodiscard]] constexpr std::int64_t operator[](int axis) const noexcept {
    return values_[static_cast<std::size_t>(axis)];
  }
  [[nodiscard]] constexpr const std::int64_t* begin() const noexcept { return values_.data(); }
  [[nodiscard]] constexpr const std::int64_t* end() const noexcept { return begin() + rank_; }
  friend constexpr bool operator==(const Axes&, const Axes&) = default;

 private:
  std::array<std::int64_t, kMaxRank> values_{};  // beyond rank_: zero, so that == may compare all
  int rank_ = 0;
};

[[nodiscard]] inline std::string to_string(const Axes& axes) {
  std::string text = "[";
  for (int axis = 0; axis < axes.rank(); ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(axes[axis]);
  }
  return text + "]";
}

/// a * b for a, b >= 0, or -1 where the product does not fit.
[[nodiscard]] constexpr std::int64_t multiply(std::int64_t a, std::int64_t b) noexcept {
  if (a != 0 && b > (std::numeric_limits<std::int64_t>::max)() / a) return -1;
  return a * b;
}

}  // namespace detail

/// The extents of a tensor, outermost first. Rank 0 is a scalar of one element; an extent of 0
/// makes an empty tensor, which is legal everywhere.
/// \throws ContractError unsupported_shape (rank above 5, negative extent), size_overflow (the
///   number of elements does not fit int64).
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents)
      : Shape(std::span(extents.begin(), extents.end())) {}
  explicit Shape(std::span<const std::int64_t> extents) : extents_(extents) {
    bool empty = false;
    for (const std::int64_t extent : extents_) {
      throw_unless(extent >= 0, Rule::unsupported_shape, [this] {
        return "shape " + detail::to_string(extents_) +
               ": an extent is negative; expected 0 or more";
      });
      empty |= extent == 0;
    }
    if (empty) {
      elements_ = 0;
      return;
    }
    for (const std::int64_t extent : extents_) {
      elements_ = detail::multiply(elements_, extent);
      throw_unless(elements_ > 0, Rule::size_overflow, [this] {
        return "shape " + detail::to_string(extents_) +
               ": the number of elements does not fit 63 bits; split the tensor";
      });
    }
  }

  [[nodiscard]] int rank() const noexcept { return extents_.rank(); }
  /// Extent of `axis`, 0 <= axis < rank().
  [[nodiscard]] std::int64_t operator[](int axis) const noexcept { return extents_[axis]; }
  [[nodiscard]] std::int64_t elements() const noexcept { return elements_; }
  [[nodiscard]] const std::int64_t* begin() const noexcept { return extents_.begin(); }
  [[nodiscard]] const std::int64_t* end() const noexcept { return extents_.end(); }
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  detail::Axes extents_;
  std::int64_t elements_ = 1;
};

/// Distances in elements between neighbours along each axis; zero (broadcast) and negative are
/// legal.
class Strides {
 public:
  Strides() = default;
  Strides(std::initializer_list<std::int64_t> strides)
      : Strides(std::span(strides.begin(), strides.end())) {}
  explicit Strides(std::span<const std::int64_t> strides) : strides_(strides) {}

  /// Row-major without gaps.
  [[nodiscard]] static Strides contiguous(const Shape& shape) {
    std::array<std::int64_t, kMaxRank> strides{};
    std::int64_t next = 1;
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      strides[static_cast<std::size_t>(axis)] = next;
      if (shape.elements() > 0) next *= shape[axis];
    }
    return Strides(
        std::span<const std::int64_t>(strides.data(), static_cast<std::size_t>(shape.rank())));
  }

  [[nodiscard]] int rank() const noexcept { return strides_.rank(); }
  [[nodiscard]] std::int64_t operator[](int axis) const noexcept { return strides_[axis]; }
  [[nodiscard]] const std::int64_t* begin() const noexcept { return strides_.begin(); }
  [[nodiscard]] const std::int64_t* end() const noexcept { return strides_.end(); }
  friend bool operator==(const Strides&, const Strides&) = default;

 private:
  detail::Axes strides_;
};

/// `[24, 4, 4096]`.
[[nodiscard]] inline std::string to_string(const Shape& shape) {
  return detail::to_string(detail::Axes(std::span(shape.begin(), shape.end())));
}
[[nodiscard]] inline std::string to_string(const Strides& strides) {
  return detail::to_string(detail::Axes(std::span(strides.begin(), strides.end())));
}

/// The bytes [begin, end) on one device.
struct ByteRange {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  int device = 0;

  [[nodiscard]] std::size_t bytes() const noexcept { return static_cast<std::size_t>(end - begin); }
  /// Whether the two share a byte. An empty range shares none.
  [[nodiscard]] bool overlaps(const ByteRange& other) const noexcept {
    return begin != end && other.begin != other.end && begin < other.end && other.begin < end;
  }
};

/// A tensor by pointer, element type, shape, strides and device.
///
/// A view made from `const T*` is read-only and stays so; one made from `T*` may also be adopted as
/// the storage of a StableBuffer. One made with `packed` may lie at any byte, and is a source only.
/// \throws ContractError on construction: null_pointer (no address for at least one element),
///   unsupported_shape (strides of another rank), size_overflow (the elements span 2^63 bytes or
///   more, or reach beyond the address space), misaligned (address not a multiple of alignof(T)
///   and the view not made with `packed`), device_mismatch (device below 0).
class TensorView {
 public:
  /// Row-major without gaps. `device` is the ordinal whose kernels read the memory; for pinned host
  /// memory the device that reads it.
  template <class T>
  TensorView(T* data, const Shape& shape, int device)
      : TensorView(data, shape, Strides::contiguous(shape), device) {}

  /// Any layout; `strides` in elements, of the same rank as `shape`.
  template <class T>
  TensorView(T* data, const Shape& shape, const Strides& strides, int device)
      : TensorView(data, element<std::remove_cv_t<T>>(), std::is_const_v<T>, shape, strides,
                   device) {
    static_assert(!std::is_void_v<T>, "a view needs an element type");
    static_assert(!std::is_volatile_v<T>, "views of volatile memory are not supported");
    throw_unless(aligned_, Rule::misaligned, [&shape] {
      return "tensor " + to_string(shape) + ": the address is not a multiple of " +
             std::to_string(kElementAlignment<std::remove_cv_t<T>>) + " bytes, the alignment of " +
             to_string(kElementType<std::remove_cv_t<T>>) +
             "; view a tensor in a packed buffer with TensorView::packed, which StreamSum and "
             "Relayout read at any byte";
    });
  }

  /// A tensor inside a packed buffer, as weight transfers send them: its elements are those of T,
  /// but `bytes`, where the first one lies, may be any address. The view is read-only. StreamSum
  /// and Relayout take it as their source; whoever asks it for a `T*` is refused where the address
  /// is not aligned, so no one reads a T there by mistake.
  ///
  ///     const auto fn = TensorView::packed<float>(bucket + 6, {24, 4 * hidden}, device);
  ///
  /// Row-major without gaps; `device` as for the constructors.
  /// \throws ContractError as the constructors, but for misaligned.
  template <class T>
  [[nodiscard]] static TensorView packed(const void* bytes, const Shape& shape, int device) {
    return packed<T>(bytes, shape, Strides::contiguous(shape), device);
  }

  /// The same in any layout; `strides` in elements, of the same rank as `shape`.
  template <class T>
  [[nodiscard]] static TensorView packed(const void* bytes, const Shape& shape,
                                         const Strides& strides, int device) {
    static_assert(std::is_same_v<T, std::remove_cv_t<T>>,
                  "name the element type itself: packed<float>(...)");
    return TensorView(bytes, element<T>(), true, shape, strides, device);
  }

  /// Where the element of index 0 lies. Not always aligned to the elements: see is_aligned().
  [[nodiscard]] const void* data() const noexcept { return data_; }
  /// The address as `const T*`. \throws ContractError type_mismatch, misaligned (a packed view).
  template <class T>
  [[nodiscard]] const T* data_as() const {
    expects_type<T>();
    expects_alignment();
    return static_cast<const T*>(data_);
  }
  /// The address as `T*`, for writing. \throws ContractError type_mismatch, misaligned (a packed
  /// view), read_only.
  template <class T>
  [[nodiscard]] T* writable_data_as() const {
    expects_type<T>();
    expects_alignment();
    throw_unless(!read_only_, Rule::read_only, [this] {
      return "tensor " + to_string(shape_) +
             ": the view was made from a pointer to const; make it "
             "from a writable pointer";
    });
    return static_cast<T*>(data_);
  }
  [[nodiscard]] ElementType element_type() const noexcept { return type_; }
  [[nodiscard]] std::int64_t element_bytes() const noexcept { return element_bytes_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const Strides& strides() const noexcept { return strides_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] bool read_only() const noexcept { return read_only_; }
  /// Whether every element lies at a multiple of its type's alignment. False only for a packed
  /// view, whose elements are then to be read byte by byte.
  [[nodiscard]] bool is_aligned() const noexcept { return aligned_; }

  /// Whether the elements lie row-major without gaps. Strides of axes with one element do not
  /// matter.
  [[nodiscard]] bool is_contiguous() const noexcept {
    if (shape_.elements() == 0) return true;
    std::int64_t expected = 1;
    for (int axis = shape_.rank() - 1; axis >= 0; --axis) {
      if (shape_[axis] != 1 && strides_[axis] != expected) return false;
      expected *= shape_[axis];
    }
    return true;
  }

  /// The smallest byte range that holds every element.
  [[nodiscard]] ByteRange hull() const noexcept {
    const auto* base = static_cast<const std::byte*>(data_);
    if (shape_.elements() == 0) return {base, base, device_};
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (int axis = 0; axis < shape_.rank(); ++axis) {
      const std::int64_t reach = (shape_[axis] - 1) * strides_[axis];
      (reach < 0 ? low : high) += reach;
    }
    return {base + low * element_bytes_, base + (high + 1) * element_bytes_, device_};
  }

  /// The same elements with axis `axes[i]` in place i: `permute({2, 0, 1})`.
  /// \throws ContractError unsupported_shape unless `axes` names every axis once.
  [[nodiscard]] TensorView permute(std::initializer_list<int> axes) const {
    std::array<std::int64_t, kMaxRank> extents{};
    std::array<std::int64_t, kMaxRank> strides{};
    std::size_t place = 0;
    unsigned seen = 0;
    for (const int axis : axes) {
      if (axis < 0 || axis >= shape_.rank() || place >= kMaxRank) break;
      seen |= 1U << static_cast<unsigned>(axis);
      extents[place] = shape_[axis];
      strides[place++] = strides_[axis];
    }
    throw_unless(axes.size() == static_cast<std::size_t>(shape_.rank()) && place == axes.size() &&
                     seen == (1U << static_cast<unsigned>(shape_.rank())) - 1U,
                 Rule::unsupported_shape, [this] {
                   return "permute of tensor " + to_string(shape_) +
                          ": expected every axis of 0.." + std::to_string(shape_.rank() - 1) +
                          " once";
                 });
    return relaid(data_, std::span(extents).first(place), std::span(strides).first(place));
  }

  /// The elements start <= index < start + length along `axis`.
  /// \throws ContractError unsupported_shape if the axis or the range lies outside the tensor.
  [[nodiscard]] TensorView slice(int axis, std::int64_t start, std::int64_t length) const {
    throw_unless(axis >= 0 && axis < shape_.rank() && start >= 0 && length >= 0 &&
                     start <= shape_[axis] && length <= shape_[axis] - start,
                 Rule::unsupported_shape, [this, axis, start, length] {
                   return "slice of tensor " + to_string(shape_) + ": axis " +
                          std::to_string(axis) + ", start " + std::to_string(start) + ", length " +
                          std::to_string(length) + " lies outside";
                 });
    std::array<std::int64_t, kMaxRank> extents{};
    std::array<std::int64_t, kMaxRank> strides{};
    for (int i = 0; i < shape_.rank(); ++i) {
      extents[static_cast<std::size_t>(i)] = i == axis ? length : shape_[i];
      strides[static_cast<std::size_t>(i)] = strides_[i];
    }
    const auto rank = static_cast<std::size_t>(shape_.rank());
    const bool moves = length > 0 && shape_.elements() > 0;
    auto* base =
        static_cast<std::byte*>(data_) + (moves ? start * strides_[axis] * element_bytes_ : 0);
    return relaid(base, std::span(extents).first(rank), std::span(strides).first(rank));
  }

  /// Splits one axis into several: `unflatten(1, {4, hidden})` turns [24, 4*hidden] into
  /// [24, 4, hidden]. \throws ContractError unsupported_shape unless the product fits the axis.
  [[nodiscard]] TensorView unflatten(int axis, const Shape& parts) const {
    throw_unless(axis >= 0 && axis < shape_.rank() && parts.elements() == shape_[axis] &&
                     shape_.rank() - 1 + parts.rank() <= kMaxRank,
                 Rule::unsupported_shape, [this, axis, &parts] {
                   return "unflatten of tensor " + to_string(shape_) + ": axis " +
                          std::to_string(axis) + " does not split into " + to_string(parts);
                 });
    std::array<std::int64_t, kMaxRank> extents{};
    std::array<std::int64_t, kMaxRank> strides{};
    const Strides within = Strides::contiguous(parts);
    std::size_t place = 0;
    for (int i = 0; i < shape_.rank(); ++i) {
      for (int part = 0; part < (i == axis ? parts.rank() : 1); ++part) {
        extents[place] = i == axis ? parts[part] : shape_[i];
        // The stride of an axis of one element is never taken, nor any of no elements: neither need
        // fit.
        const bool steps = i == axis && parts[part] > 1 && shape_.elements() > 0;
        strides[place++] = steps ? within[part] * strides_[i] : strides_[i];
      }
    }
    return relaid(data_, std::span(extents).first(place), std::span(strides).first(place));
  }

 private:
  // bf16 and f16 are incomplete here (their headers cost compile time that a plain .cpp need not
  // pay), so their size is stated.
  template <class T>
  static constexpr std::int64_t kElementSize = sizeof(T);
  template <class T>
  static constexpr std::size_t kElementAlignment = alignof(T);

  struct Element {
    ElementType type;
    std::int64_t bytes;
    std::size_t alignment;
  };
  template <class T>
  static constexpr Element element() {
    if constexpr (kElementType<T> == ElementType::opaque) {
      static_assert(std::is_trivially_copyable_v<T>, "elements are copied as bytes");
    }
    return {kElementType<T>, kElementSize<T>, kElementAlignment<T>};
  }

  TensorView(const void* data, const Element& element, bool read_only, const Shape& shape,
             const Strides& strides, int device)
      : data_(const_cast<void*>(
            data)),  // NOLINT(cppcoreguidelines-pro-type-const-cast): read_only_ guards it
        shape_(shape),
        strides_(strides),
        element_bytes_(element.bytes),
        device_(device),
        type_(element.type),
        read_only_(read_only),
        aligned_(reinterpret_cast<std::uintptr_t>(data) % element.alignment == 0) {
    throw_unless(device >= 0, Rule::device_mismatch, [&shape, device] {
      return "tensor " + to_string(shape) + ": device " + std::to_string(device) +
             "; expected a device ordinal, 0 or more";
    });
    throw_unless(strides.rank() == shape.rank(), Rule::unsupported_shape, [&shape, &strides] {
      return "tensor " + to_string(shape) + ": strides " + to_string(strides) +
             " are of another rank; give one stride for each axis";
    });
    throw_unless(data != nullptr || shape.elements() == 0, Rule::null_pointer, [&shape] {
      return "tensor " + to_string(shape) + ": the address is null; expected " +
             std::to_string(shape.elements()) + " elements (was the source released?)";
    });
    throw_unless(spans_addresses(), Rule::size_overflow, [&shape, &strides] {
      return "tensor " + to_string(shape) + " with strides " + to_string(strides) +
             ": the elements span 2^63 bytes or more, or reach beyond the address space";
    });
  }

  /// Whether every element lies at an address, and all of them within 2^63 bytes.
  [[nodiscard]] bool spans_addresses() const noexcept {
    if (shape_.elements() == 0) return true;
    constexpr std::int64_t kMax = (std::numeric_limits<std::int64_t>::max)();
    std::int64_t below = 0;  // elements from the lowest one to data_
    std::int64_t above = 1;  // elements from data_ to the end of the highest one
    for (int axis = 0; axis < shape_.rank(); ++axis) {
      if (shape_[axis] == 1) continue;
      if (strides_[axis] == (std::numeric_limits<std::int64_t>::min)()) return false;
      const std::int64_t distance = strides_[axis] < 0 ? -strides_[axis] : strides_[axis];
      const std::int64_t reach = detail::multiply(shape_[axis] - 1, distance);
      if (reach < 0 || reach > kMax - below - above) return false;
      (strides_[axis] < 0 ? below : above) += reach;
    }
    if (detail::multiply(below + above, element_bytes_) < 0) return false;
    const auto address = reinterpret_cast<std::uintptr_t>(data_);
    return static_cast<std::uintptr_t>(below * element_bytes_) <= address &&
           static_cast<std::uintptr_t>(above * element_bytes_) <=
               (std::numeric_limits<std::uintptr_t>::max)() - address;
  }

  template <class T>
  void expects_type() const {
    static_assert(!std::is_const_v<T>, "name the element type itself: data_as<float>()");
    throw_unless(type_ == kElementType<T> && element_bytes_ == kElementSize<T>, Rule::type_mismatch,
                 [this] {
                   return "tensor " + to_string(shape_) + ": the elements are " + to_string(type_) +
                          " of " + std::to_string(element_bytes_) + " bytes; expected " +
                          to_string(kElementType<T>) + " of " + std::to_string(kElementSize<T>);
                 });
  }

  void expects_alignment() const {
    throw_unless(aligned_, Rule::misaligned, [this] {
      return "tensor " + to_string(shape_) +
             ": the view is packed, and its address not aligned to " + to_string(type_) +
             "; only StreamSum and Relayout read such a source, and Relayout makes an aligned copy";
    });
  }

  [[nodiscard]] TensorView relaid(void* data, std::span<const std::int64_t> extents,
                                  std::span<const std::int64_t> strides) const {
    TensorView view = *this;
    view.data_ = data;
    view.shape_ = Shape(extents);
    view.strides_ = Strides(strides);
    return view;
  }

  void* data_;
  Shape shape_;
  Strides strides_;
  std::int64_t element_bytes_;
  int device_;
  ElementType type_;
  bool read_only_;
  bool aligned_;  // of the first element and so of all, in whatever part of the tensor: a type's
                  // size is a multiple of its alignment
};

template <>
inline constexpr std::int64_t TensorView::kElementSize<__nv_bfloat16> = 2;
template <>
inline constexpr std::int64_t TensorView::kElementSize<__half> = 2;
template <>
inline constexpr std::size_t TensorView::kElementAlignment<__nv_bfloat16> = 2;
template <>
inline constexpr std::size_t TensorView::kElementAlignment<__half> = 2;

}  // namespace holdfast
