// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Host bodies for kernels in the simulated runtime: the function that a thread of the device runs,
/// called for each thread of the grid.

#include <holdfast/kernels.cuh>

#include "sim/sim.hpp"

namespace test {

template <class W>
void run_grid(dim3 grid, dim3 block, const W& work) {
  using Index = typename W::Index;
  const auto rows = static_cast<Index>(grid.y * block.y);
  const auto columns = static_cast<Index>(grid.x) * static_cast<Index>(block.x);
  for (Index row = 0; row < rows; ++row) {
    for (Index column = 0; column < columns; ++column) {
      holdfast::detail::run_items(work, row, rows, column, columns);
    }
  }
}

template <class W>
void route_work() {
  sim::route_kernel(&holdfast::detail::work_kernel<W>, &run_grid<W>);
}

}  // namespace test
