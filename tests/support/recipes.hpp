// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Recipes that need no nvcc, for tests of the host layer.

#include "holdfast/recipe.hpp"

#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <functional>
#include <utility>

namespace test {

/// The contents are a copy of a contiguous source.
template <class T>
class CopyOf {
 public:
  explicit CopyOf(const holdfast::TensorView& source) : source_(source) {}
  [[nodiscard]] holdfast::Shape shape() const { return source_.shape(); }
  [[nodiscard]] std::array<holdfast::ByteRange, 1> sources() const { return {source_.hull()}; }
  void operator()(T* out, cuda::stream_ref stream) const {
    holdfast::throw_on_error(cudaMemcpyAsync(out, source_.data(), source_.hull().bytes(),
                                             cudaMemcpyDeviceToDevice, stream.get()),
                             "CopyOf");
  }

 private:
  holdfast::TensorView source_;
};

/// The contents are what a callable enqueues.
template <class T>
class Custom {
 public:
  Custom(holdfast::Shape shape, std::function<void(T*, cudaStream_t)> fill)
      : shape_(shape), fill_(std::move(fill)) {}
  [[nodiscard]] holdfast::Shape shape() const { return shape_; }
  [[nodiscard]] static std::array<holdfast::ByteRange, 0> sources() { return {}; }
  void operator()(T* out, cuda::stream_ref stream) const { fill_(out, stream.get()); }

 private:
  holdfast::Shape shape_;
  std::function<void(T*, cudaStream_t)> fill_;
};

}  // namespace test
