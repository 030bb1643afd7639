// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "graph_replay/runtime.hpp"

#include <cuda_runtime_api.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unistd.h>

namespace graph_replay {

bool simulated() { return false; }

void find_device(char** arguments) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count > 0) return;
  const std::string reason = code == cudaSuccess ? "no device" : cudaGetErrorString(code);
  // Anything else is a GPU that is there and does not work: nothing to be hidden by a simulation.
  const bool none = code == cudaSuccess || code == cudaErrorNoDevice ||
                    code == cudaErrorInsufficientDriver || code == cudaErrorStubLibrary;
  if (!none) throw std::runtime_error("the GPU cannot be used: " + reason);
  const char* required = std::getenv("HOLDFAST_REQUIRE_GPU");
  if (required != nullptr && std::string_view(required) == "1") {
    throw std::runtime_error("HOLDFAST_REQUIRE_GPU=1: " + reason);
  }
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string program = (self.parent_path() / "graph_replay_sim").string();
  std::fflush(nullptr);
  execv(program.c_str(), arguments);
  throw std::runtime_error("no GPU (" + reason + "), and " + program +
                           " does not start: " + std::generic_category().message(errno));
}

}  // namespace graph_replay
