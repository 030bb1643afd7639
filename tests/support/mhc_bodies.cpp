// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "support/mhc_bodies.hpp"

namespace test {

void run_pre_broadcast(dim3 grid, dim3 block, const holdfast::mhc::PreBroadcast& op,
                       const float* fn) {
  simt::run(grid, block, 0,
            [&op, fn] { holdfast::mhc::detail::pre_broadcast_token(op, fn, blockIdx.x); });
}

}  // namespace test
