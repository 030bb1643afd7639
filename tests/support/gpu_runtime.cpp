// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// support/runtime.hpp, and main(), for executables that are linked with the real CUDA runtime.
/// Where there is no GPU they exit with 77, which ctest shows as skipped, unless a test has failed.

#include "support/runtime.hpp"

#include <cstdlib>
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
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  switch (code) {
    case cudaErrorInsufficientDriver:  // also: no driver at all
    case cudaErrorStubLibrary:
    case cudaErrorNoDevice: (void)cudaGetLastError(); break;
    default:
      ok(code, "cudaGetDeviceCount");
      if (count > 0) return {};
  }
  without_gpu = true;
  return std::string("no usable GPU: ") + cudaGetErrorName(code);
}

}  // namespace test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  constexpr int kSkipped = 77;
  return failed == 0 && test::without_gpu ? kSkipped : failed;
}
