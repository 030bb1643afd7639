// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The kernel of kernel_node_test.cu.

#include <cstdint>

namespace test {

/// Stores `value`; large, so that it shows whether all of a parameter arrives.
struct Store {
  using Index = std::int32_t;
  int* out;
  Index rows;
  Index columns;
  int padding[60];
  int value;

  [[nodiscard]] __host__ __device__ Index line(Index row) const { return row * columns; }
  __host__ __device__ void operator()(Index line, Index column) const {
    out[line + column] = value + padding[59];
  }
};

}  // namespace test
