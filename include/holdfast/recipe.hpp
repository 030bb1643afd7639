// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Recipe: how the contents of a derived parameter are made.
///
/// A recipe is a pure function from its sources to one contiguous row-major tensor. It is built
/// from views at the moment of use, and nothing keeps it: the next refit may name other addresses.
/// What it enqueues reads the sources when the stream gets there, so they stay valid and unchanged
/// till then.

#include "holdfast/tensor_view.hpp"

#include <cuda/stream_ref>

#include <concepts>
#include <ranges>

namespace holdfast {

/// What a type must offer to fill a StableBuffer<T>:
///
/// - `shape()`: the shape of the result.
/// - `sources()`: by value, the byte ranges that it reads (of a strided source its hull).
/// - `operator()(T* out, cuda::stream_ref stream) const`: enqueues on `stream`, and only there,
///   work that writes every element of `out` and reads nothing that the recipe itself writes. It
///   neither allocates nor synchronises, may be captured, and may run any number of times: the same
///   sources give the same bytes. The current device is the buffer's. It throws if it cannot
///   enqueue. Its kernels never trigger programmatic launch early, so that a reader may rely on
///   stream order. It is not called for an empty shape.
template <class R, class T>
concept Recipe = requires(const R& recipe, T* out, cuda::stream_ref stream) {
  { recipe.shape() } -> std::convertible_to<Shape>;
  { recipe.sources() } -> std::ranges::contiguous_range;
  requires std::same_as<std::ranges::range_value_t<decltype(recipe.sources())>, ByteRange>;
  recipe(out, stream);
};

}  // namespace holdfast
