// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Gives the simulated runtime a host body for every kernel that holdfast ships.

#include "support/mhc_bodies.hpp"
#include "support/sim_routes.cuh"

#include <cstdint>
#include <type_traits>

namespace {

using holdfast::detail::Raw;
using holdfast::detail::Unaligned;
using bf16 = __nv_bfloat16;
using f16 = __half;

template <class To, class From>
void route_stream_sum() {
  using holdfast::detail::StreamSumWork;
  constexpr int kWidth = holdfast::detail::kPackWidth<To, From>;
  test::route_work<StreamSumWork<To, From, kWidth, 4, std::int32_t>>();
  test::route_work<StreamSumWork<To, From, kWidth, 0, std::int64_t>>();
  test::route_work<StreamSumWork<To, From, 1, 0, std::int64_t>>();
  test::route_work<StreamSumWork<To, Unaligned<From>, 1, 0, std::int64_t>>();
}

template <class To, class From>
void route_relayout() {
  using holdfast::detail::RelayoutWork;
  constexpr int kWidth = holdfast::detail::kPackWidth<To, From>;
  test::route_work<RelayoutWork<To, From, kWidth, std::uint32_t>>();
  test::route_work<RelayoutWork<To, From, 1, std::uint32_t>>();
  test::route_work<RelayoutWork<To, From, 1, std::uint64_t>>();
  if constexpr (sizeof(From) > 1) {
    test::route_work<RelayoutWork<To, Unaligned<From>, 1, std::uint64_t>>();
  }
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

template <int Rows, int Tiles, int Warps, bool OneChunk, class Source>
void route_projection() {
  sim::route_kernel(&holdfast::mhc::detail::project_kernel<Rows, Tiles, Warps, OneChunk, Source>,
                    &test::run_project<Rows, Tiles, Warps, OneChunk, Source>);
}

template <int Rows>
void route_collapse() {
  sim::route_kernel(&holdfast::mhc::detail::collapse_kernel<Rows>, &test::run_collapse<Rows>);
}

void route_mhc() {
  using holdfast::mhc::kMixes;
  using holdfast::mhc::kStreams;
  using holdfast::mhc::detail::MixSource;
  using holdfast::mhc::detail::ResidualSource;
  sim::route_kernel(&holdfast::mhc::detail::pre_broadcast_kernel<holdfast::mhc::PreBroadcast>,
                    [](dim3 grid, dim3 block, const holdfast::mhc::PreBroadcast& op) {
                      test::run_pre_broadcast(grid, block, op, op.fn_broadcast.data());
                    });
  test::route_work<holdfast::mhc::detail::PostWork>();
  route_projection<kMixes, 1, 4, true, ResidualSource>();
  route_projection<kMixes, 1, 8, false, ResidualSource>();
  route_projection<kMixes, 1, 4, true, MixSource>();
  route_projection<kMixes, 1, 8, false, MixSource>();
  route_projection<kStreams, 1, 4, true, ResidualSource>();
  route_projection<kStreams, 1, 8, false, ResidualSource>();
  route_collapse<kMixes>();
  route_collapse<kStreams>();
}

[[maybe_unused]] const bool routed = [] {
  route_mhc();
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
