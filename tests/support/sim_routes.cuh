// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Host bodies for kernels in the simulated runtime. For a grid of independent items it is the
/// function that a thread of the device runs, called for each thread of the grid; for the mHC
/// operations, whose threads work together, it is the f64 oracle.

#include <holdfast/kernels.cuh>

#include "sim/sim.hpp"
#include "support/mhc_oracle.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

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

[[nodiscard]] inline std::vector<float> floats(const __nv_bfloat16* values, std::int64_t count) {
  std::vector<float> result;
  for (std::int64_t i = 0; i < count; ++i) result.push_back(__bfloat162float(values[i]));
  return result;
}

inline void run_pre_broadcast(const holdfast::mhc::PreBroadcast& op) {
  using holdfast::mhc::kMixes;
  using holdfast::mhc::kStreams;
  const std::int64_t hidden = op.x.extent(1);
  const std::span fn(op.fn_broadcast.data(), static_cast<std::size_t>(kMixes * hidden));
  mhc::Weights w{{fn.begin(), fn.end()},
                 {op.scale.data(), op.scale.data() + 3},
                 {op.base.data(), op.base.data() + kMixes},
                 {}};
  if (op.norm_weight.exists()) w.norm_weight = floats(op.norm_weight.data(), hidden);
  const mhc::Constants constants{
      .rms_eps = op.rms_eps,
      .pre_eps = op.pre_eps,
      .sinkhorn_eps = op.sinkhorn_eps,
      .norm_eps = op.norm_eps,
      .post_mult = op.post_mult,
      .iterations = op.sinkhorn_iterations,
      .rounded_squares = op.norm_squares == holdfast::mhc::NormSquares::rounded};
  for (std::int64_t token = 0; token < op.x.extent(0); ++token) {
    const auto out = mhc::pre_broadcast(floats(op.x.row(token), hidden), w, constants);
    std::ranges::copy(out.post, op.post.row(token));
    std::ranges::copy(out.comb, op.comb.row(token));
    if (op.mixes.exists()) std::ranges::copy(out.mixes, op.mixes.row(token));
    const std::vector<float> layer_input = mhc::layer_input(out, w, constants);
    std::ranges::transform(layer_input, op.layer_input.row(token),
                           [](float value) { return __float2bfloat16_rn(value); });
    for (int i = 0; op.residual_out.exists() && i < kStreams; ++i) {
      std::copy_n(op.x.row(token), hidden, op.residual_out.row(token) + i * hidden);
    }
  }
}

}  // namespace test
