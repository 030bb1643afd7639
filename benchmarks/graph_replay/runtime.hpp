// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Where graph_replay and graph_replay_sim differ.

namespace graph_replay {

/// Whether this executable is linked with the simulated runtime.
[[nodiscard]] bool simulated();

/// Returns if there is a device to run on. Where there is none, the executable of the real runtime
/// becomes graph_replay_sim, which lies beside it, with the same arguments.
/// \throws std::runtime_error if that is not possible, or HOLDFAST_REQUIRE_GPU=1 forbids it.
void find_device(char** arguments);

}  // namespace graph_replay
