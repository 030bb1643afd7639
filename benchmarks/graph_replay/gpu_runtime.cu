// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "graph_replay/runtime.hpp"
#include "support/gpu.cuh"

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
  const std::string reason = test::why_no_gpu();
  if (reason.empty()) return;
  const char* required = std::getenv("HOLDFAST_REQUIRE_GPU");
  if (required != nullptr && std::string_view(required) == "1") {
    throw std::runtime_error("HOLDFAST_REQUIRE_GPU=1: " + reason);
  }
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string program = (self.parent_path() / "graph_replay_sim").string();
  std::fprintf(stderr, "graph_replay: %s: the simulated CUDA runtime takes its place\n",
               reason.c_str());
  std::fflush(nullptr);
  execv(program.c_str(), arguments);
  throw std::runtime_error("no GPU (" + reason + "), and " + program +
                           " does not start: " + std::generic_category().message(errno));
}

}  // namespace graph_replay
