// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// The one State, its lock, and what a test may do to the whole of it.
//
// State is never destroyed: nvcc objects register kernels before main and unregister after it. The
// lock is a spin lock because TSan intercepts the mutexes of the system even in code that it does
// not instrument.
#include "state.hpp"

#include <atomic>
#include <cstdlib>
#include <sched.h>
#include <sys/mman.h>

namespace sim {
namespace detail {
namespace {

std::atomic_flag locked = ATOMIC_FLAG_INIT;
std::atomic<std::uint64_t> threads{0};

}  // namespace

State& state() {
  static State* const only = new State;
  return *only;
}

Thread& this_thread() {
  thread_local Thread thread;
  if (thread.epoch != state().epoch) {
    const std::uint64_t id = thread.id != 0 ? thread.id : threads.fetch_add(1) + 1;
    thread = Thread{};
    thread.epoch = state().epoch;
    thread.id = id;
  }
  return thread;
}

bool& inside_work() {
  thread_local bool inside = false;
  return inside;
}

void Lock::lock() {
  while (locked.test_and_set(std::memory_order_acquire)) sched_yield();
  ignore_accesses(true);
}

void Lock::unlock() {
  ignore_accesses(false);
  locked.clear(std::memory_order_release);
}

}  // namespace detail

using namespace detail;

void reset() {
  Lock lock;
  State& s = state();
  // Long chains of dependencies would otherwise be destroyed by recursion.
  for (const Ref<Stream>& stream : s.all_streams) {
    for (const Ref<Item>& item : stream->queue) {
      item->after.clear();
      item->body = nullptr;  // may own the graph that owns the item
    }
  }
  for (const auto& [handle, node] : s.nodes) node->after.clear();

  std::map<std::uintptr_t, Allocation> allocations = std::move(s.allocations);
  std::map<std::uintptr_t, std::size_t> reservations = std::move(s.reservations);
  State fresh;
  fresh.epoch = s.epoch + 1;
  fresh.next_id = s.next_id;  // ids are unique for the process
  s = std::move(fresh);
  unlocked(lock, [&] {
    for (const auto& [address, allocation] : allocations) {
      if (!allocation.chunk) std::free(allocation.base);
    }
    for (const auto& [address, size] : reservations) {
      (void)munmap(reinterpret_cast<void*>(address), size);  // NOLINT(performance-no-int-to-ptr)
    }
  });
}

std::size_t allocated_bytes(int device) {
  const Lock lock;
  return bytes_in_use(device);
}

std::size_t allocation_count() {
  const Lock lock;
  return state().allocations.size();
}

std::size_t live_events() {
  const Lock lock;
  return state().events.size();
}

std::size_t live_streams() {
  const Lock lock;
  return state().streams.size();
}

std::size_t live_graphs() {
  const Lock lock;
  return state().graphs.size() + state().executables.size();
}

std::size_t pending(cudaStream_t stream) {
  const Lock lock;
  const Stream* found = find_stream(stream);
  return found == nullptr ? 0 : found->queue.size();
}

void set_capacity(int device, std::size_t bytes) {
  const Lock lock;
  state().capacity.at(static_cast<std::size_t>(device)) = bytes;
}

}  // namespace sim
