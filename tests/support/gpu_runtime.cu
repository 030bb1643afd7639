// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// support/runtime.hpp, and main(), for executables that are linked with the real CUDA runtime.
/// Where there is no GPU they exit with 77, which ctest shows as skipped, unless a test has failed.

#include "support/gpu.cuh"
#include "support/runtime.hpp"

#include <cstdlib>
#include <string>
#include <string_view>

namespace test {

/// Whether a test has found no GPU.
static bool without_gpu = false;

bool simulated() { return false; }

bool gpu_required() {
  const char* required = std::getenv("HOLDFAST_REQUIRE_GPU");
  return required != nullptr && std::string_view(required) == "1";
}

std::string prepare() {
  static const std::string reason = why_no_gpu();
  if (reason.empty()) return {};
  without_gpu = true;
  return "no usable GPU: " + reason;
}

}  // namespace test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  constexpr int kSkipped = 77;
  return failed == 0 && test::without_gpu ? kSkipped : failed;
}
