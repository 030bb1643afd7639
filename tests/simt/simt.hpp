// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Runs the body of a kernel on the host, thread for thread: each thread of a block is a fiber,
/// which runs until it waits for the others. So the index arithmetic and the barriers of a kernel
/// run under sanitizers and without a GPU. It shows a missing barrier only where the order of
/// threads matters (blocks run theirs forwards and backwards in turn), and never time.

#include <vector_types.h>

#include <cstddef>
#include <functional>
#include <span>

namespace simt {

/// Runs `body` as every thread of every block, block after block. One grid at a time in a process.
/// A block whose threads wait for what never comes ends the process with a message.
void run(dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
         const std::function<void()>& body);

// --- For the body

/// Where the calling thread stands.
struct Position {
  uint3 thread;
  uint3 block;
  dim3 block_extent;
  dim3 grid_extent;
};
extern Position here;

/// The dynamic shared memory of the block, poisoned at its start.
[[nodiscard]] void* dynamic_shared();

/// Waits until `threads` threads of the block (0: all that have not returned) have come to barrier
/// `id`.
void barrier(int id, unsigned threads);

/// All 32 lanes of the calling thread's warp give `bytes` at `value` and see what each gave, until
/// their next exchange.
[[nodiscard]] std::span<const std::byte> exchange(const void* value, std::size_t bytes);
inline constexpr std::size_t kMostExchanged = 32;  // bytes of one lane, and the stride of lanes

}  // namespace simt
