// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// support/runtime.hpp for executables that are linked with the simulated CUDA runtime.

#include "sim/sim.hpp"
#include "support/runtime.hpp"

namespace test {

bool simulated() { return true; }

bool gpu_required() { return true; }

std::string prepare() {
  sim::reset();
  return {};
}

}  // namespace test
