// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Gives the simulated runtime a host body for every kernel. For those of the recipes it is the
/// function that a thread of the device runs, called for each thread of the grid; for those of mHC,
/// whose threads work together, it is the f64 oracle.

#include <holdfast/kernels.cuh>

#include "sim/sim.hpp"
#include "support/mhc_oracle.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace {

using holdfast::detail::Raw;
using bf16 = __nv_bfloat16;
using f16 = __half;

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
void route() {
  sim::route_kernel(&holdfast::detail::work_kernel<W>, &run_grid<W>);
}

template <class To, class From>
void route_stream_sum() {
  using holdfast::detail::StreamSumWork;
  constexpr int kWidth = holdfast::detail::kPackWidth<To, From>;
  route<StreamSumWork<To, From, kWidth, 4, std::int32_t>>();
  route<StreamSumWork<To, From, kWidth, 0, std::int64_t>>();
  route<StreamSumWork<To, From, 1, 0, std::int64_t>>();
}

template <class To, class From>
void route_relayout() {
  using holdfast::detail::RelayoutWork;
  constexpr int kWidth = holdfast::detail::kPackWidth<To, From>;
  route<RelayoutWork<To, From, kWidth, std::uint32_t>>();
  route<RelayoutWork<To, From, 1, std::uint32_t>>();
  route<RelayoutWork<To, From, 1, std::uint64_t>>();
}

// From every floating type to To.
template <class To>
void route_floating() {
  route_stream_sum<To, float>();
  route_stream_sum<To, bf16>();
  route_stream_sum<To, f16>();
  if constexpr (!std::is_same_v<To, float>) route_relayout<To, float>();
  if constexpr (!std::is_same_v<To, bf16>) route_relayout<To, bf16>();
  if constexpr (!std::is_same_v<To, f16>) route_relayout<To, f16>();
}

std::vector<float> floats(const bf16* values, std::int64_t count) {
  std::vector<float> result;
  for (std::int64_t i = 0; i < count; ++i) result.push_back(__bfloat162float(values[i]));
  return result;
}

void run_pre_broadcast(const holdfast::mhc::PreBroadcast& op) {
  using holdfast::mhc::kMixes;
  using holdfast::mhc::kStreams;
  const std::int64_t hidden = op.x.extent(1);
  const std::span fn(op.fn_broadcast.data(), static_cast<std::size_t>(kMixes * hidden));
  test::mhc::Weights w{{fn.begin(), fn.end()},
                       {op.scale.data(), op.scale.data() + 3},
                       {op.base.data(), op.base.data() + kMixes},
                       {}};
  if (op.norm_weight.exists()) w.norm_weight = floats(op.norm_weight.data(), hidden);
  const test::mhc::Constants constants{
      .rms_eps = op.rms_eps,
      .pre_eps = op.pre_eps,
      .sinkhorn_eps = op.sinkhorn_eps,
      .norm_eps = op.norm_eps,
      .post_mult = op.post_mult,
      .iterations = op.sinkhorn_iterations,
      .rounded_squares = op.norm_squares == holdfast::mhc::NormSquares::rounded};
  for (std::int64_t token = 0; token < op.x.extent(0); ++token) {
    const auto out = test::mhc::pre_broadcast(floats(op.x.row(token), hidden), w, constants);
    std::ranges::copy(out.post, op.post.row(token));
    std::ranges::copy(out.comb, op.comb.row(token));
    if (op.mixes.exists()) std::ranges::copy(out.mixes, op.mixes.row(token));
    const std::vector<float> layer_input = test::mhc::layer_input(out, w, constants);
    std::ranges::transform(layer_input, op.layer_input.row(token),
                           [](float value) { return __float2bfloat16_rn(value); });
    for (int i = 0; op.residual_out.exists() && i < kStreams; ++i) {
      std::copy_n(op.x.row(token), hidden, op.residual_out.row(token) + i * hidden);
    }
  }
}

[[maybe_unused]] const bool routed = [] {
  sim::route_kernel(
      &holdfast::mhc::detail::pre_broadcast_kernel<holdfast::detail::CompiledFor>,
      [](dim3, dim3, const holdfast::mhc::PreBroadcast& op) { run_pre_broadcast(op); });
  route_floating<float>();
  route_floating<bf16>();
  route_floating<f16>();
  route_relayout<Raw<1>, Raw<1>>();
  route_relayout<Raw<2>, Raw<2>>();
  route_relayout<Raw<4>, Raw<4>>();
  route_relayout<Raw<8>, Raw<8>>();
  return true;
}();

}  // namespace
