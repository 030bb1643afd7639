// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "support/mhc_bodies.hpp"

namespace test {

using holdfast::mhc::kMixes;
using holdfast::mhc::kStreams;
using holdfast::mhc::detail::Collapse;
using holdfast::mhc::detail::MixSource;
using holdfast::mhc::detail::Projection;
using holdfast::mhc::detail::ResidualSource;

void run_pre_broadcast(dim3 grid, dim3 block, const holdfast::mhc::PreBroadcast& op,
                       const float* fn) {
  simt::run(grid, block, 0,
            [&op, fn] { holdfast::mhc::detail::pre_broadcast_token(op, fn, blockIdx.x); });
}

template <int Rows, int Tiles, int Warps, bool OneChunk, class Source>
void run_project(dim3 grid, dim3 block, const Projection<Source>& op) {
  simt::run(grid, block, 0,
            [&op] { holdfast::mhc::detail::project<Rows, Tiles, Warps, OneChunk>(op); });
}
template void run_project<kMixes, 1, 4, true>(dim3, dim3, const Projection<ResidualSource>&);
template void run_project<kMixes, 1, 8, false>(dim3, dim3, const Projection<ResidualSource>&);
template void run_project<kMixes, 1, 4, true>(dim3, dim3, const Projection<MixSource>&);
template void run_project<kMixes, 1, 8, false>(dim3, dim3, const Projection<MixSource>&);
template void run_project<kStreams, 1, 4, true>(dim3, dim3, const Projection<ResidualSource>&);
template void run_project<kStreams, 1, 8, false>(dim3, dim3, const Projection<ResidualSource>&);

template <int Rows>
void run_collapse(dim3 grid, dim3 block, const Collapse<Rows>& op) {
  simt::run(grid, block, 0, [&op] { holdfast::mhc::detail::collapse_token(op, blockIdx.x); });
}
template void run_collapse(dim3, dim3, const Collapse<kMixes>&);
template void run_collapse(dim3, dim3, const Collapse<kStreams>&);

}  // namespace test
