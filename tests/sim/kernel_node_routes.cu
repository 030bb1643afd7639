// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "sim/kernel_node.cuh"
#include "support/sim_routes.cuh"

namespace {

[[maybe_unused]] const bool routed = [] {
  test::route_work<test::Store>();
  return true;
}();

}  // namespace
