// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// support/runtime.hpp for executables that are linked with the real CUDA runtime.

#include "support/runtime.hpp"

#include <cstdlib>
#include <string_view>

namespace test {

bool simulated() { return false; }

bool gpu_required() {
  const char* required = std::getenv("HOLDFAST_REQUIRE_GPU");
  return required != nullptr && std::string_view(required) == "1";
}

std::string prepare() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (code != cudaSuccess) return std::string("no usable GPU: ") + cudaGetErrorName(code);
  if (count == 0) return "no usable GPU: none found";
  return {};
}

}  // namespace test
