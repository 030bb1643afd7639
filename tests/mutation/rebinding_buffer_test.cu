// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The fault itself, under the same suite: a buffer that takes new memory on every finalize. Its
/// sums are right, so only the identity tests can fail, and each of them must.

#include "holdfast/memory_resource.hpp"
#include "holdfast/stable_buffer.hpp"

#include "support/refit_suite.cuh"

#include <cuda/stream_ref>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// Finalizes like an attribute that is assigned anew. It keeps the old storage, as a caching
/// allocator may, so that a stale read gives old numbers and no fault.
template <class T>
class RebindingBuffer {
 public:
  RebindingBuffer(std::string name, holdfast::ResourceRef memory)
      : name_(std::move(name)), memory_(memory) {}

  template <holdfast::Recipe<T> R>
  void finalize(const R& recipe, cuda::stream_ref stream) {
    auto next = std::make_unique<holdfast::StableBuffer<T>>(name_, memory_);
    next->finalize(recipe, stream);
    storage_.push_back(std::move(next));
  }
  [[nodiscard]] T* data() const { return storage_.empty() ? nullptr : storage_.back()->data(); }

 private:
  std::string name_;
  holdfast::ResourceRef memory_;
  std::vector<std::unique_ptr<holdfast::StableBuffer<T>>> storage_;
};

INSTANTIATE_TYPED_TEST_SUITE_P(RebindingBuffer, Refit, RebindingBuffer<float>);

}  // namespace test
