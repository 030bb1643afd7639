// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "graph_replay/engine.cuh"
#include "graph_replay/runtime.hpp"
#include "support/mhc_bodies.hpp"
#include "support/sim_routes.cuh"

namespace graph_replay {

bool simulated() { return true; }

void find_device(char** /*arguments*/) {}

namespace {

[[maybe_unused]] const bool routed = [] {
  test::route_work<MoveWork>();
  sim::route_kernel(&indirect_kernel<PreBroadcast>,
                    [](dim3 grid, dim3 block, const PreBroadcast& op, const float* const* fn) {
                      test::run_pre_broadcast(grid, block, op, *fn);
                    });
  sim::route_kernel(
      &publish_kernel<const float*>,
      [](dim3 /*grid*/, dim3 /*block*/, const float** slot, const float* fn) { *slot = fn; });
  return true;
}();

}  // namespace

}  // namespace graph_replay
