// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Control over the simulated CUDA runtime that tests link instead of cudart.
//
// Host memory stands for device memory; streams are queues whose work runs only when something
// waits for it, and then only what that wait needs, unless a test says otherwise here. So work that
// is not ordered is seen late. It does not imitate time, device numerics or the memory model of a
// GPU: it proves host-side state machines.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace sim {

// As a new process: memory, streams, events, graphs, captures, faults and schedule are gone, and
// pending work never runs. Routes and the kernels that the compiler registered stay. No other
// thread may be inside a call.
void reset();

// --- What runs when

// Runs the first item of `stream` and whatever that item itself has to wait for. False when nothing
// is queued.
bool run_one(cudaStream_t stream);

// Runs everything that is queued, on all devices.
void drain();

// From now on a wait first runs ready items of any stream, chosen by `seed`, until the awaited item
// is done; the nodes of a graph run in a topological order chosen by `seed`.
void set_schedule(std::uint64_t seed);

// Back to the default: a wait runs only what it needs, oldest first.
void clear_schedule();

// --- Kernels

using KernelBody = std::function<void(dim3 grid, dim3 block, void** args)>;

// Launches of the kernel with host stub `stub` run `body`, once for the whole grid. The compiler
// gives each translation unit its own stub of a template kernel; a route serves all of them, by
// their common device name.
void route(const void* stub, std::vector<std::size_t> argument_sizes, KernelBody body);

namespace detail {
template <class Body, class... Args, std::size_t... I>
void call_with_arguments(const Body& body, dim3 grid, dim3 block, void** args,
                         std::index_sequence<I...> /*indices*/) {
  body(grid, block, *static_cast<std::remove_cv_t<Args>*>(args[I])...);
}
}  // namespace detail

// The same with sizes taken from the kernel's signature. `body` takes (grid, block, void** args),
// or (grid, block) and then the kernel's own parameters.
template <class... Args, class Body>
void route_kernel(void (*kernel)(Args...), Body body) {
  static_assert((std::is_trivially_copyable_v<Args> && ...), "launches copy arguments as bytes");
  const auto* stub = reinterpret_cast<const void*>(kernel);
  if constexpr (std::is_invocable_v<const Body&, dim3, dim3, Args&...>) {
    route(stub, {sizeof(Args)...}, [body](dim3 grid, dim3 block, void** args) {
      detail::call_with_arguments<Body, Args...>(body, grid, block, args,
                                                 std::index_sequence_for<Args...>{});
    });
  } else {
    route(stub, {sizeof(Args)...}, KernelBody(std::move(body)));
  }
}

// --- Faults
// Countable is every entry that returns an error code, runtime and simulated driver alike, except
// those that only read or name an error.

void count_calls_begin();
long count_calls_end();

// Names of the countable calls since count_calls_begin().
std::vector<std::string> call_log();

// The n-th (from 1) countable call from now fails with `code` and has no effect. Only one fault is
// armed at a time. A driver function fails with CUDA_ERROR_UNKNOWN instead.
void fail_call(long n, cudaError_t code = cudaErrorUnknown);

// The same for the n-th call of one function, by its name without `_ptsz` or `_ptds`.
void fail_named(const std::string& name, long n, cudaError_t code = cudaErrorUnknown);

// Whether the armed fault was reached, and by which function; both last until the next fault is
// armed.
bool fault_fired();
std::string fault_name();
void clear_fault();

// Counts the calls of a scope, for a sweep that then fails each in turn.
class FaultWindow {
 public:
  FaultWindow() { count_calls_begin(); }
  explicit FaultWindow(long n, cudaError_t code = cudaErrorUnknown) : FaultWindow() {
    fail_call(n, code);
  }
  ~FaultWindow() {
    clear_fault();
    count_calls_end();
  }
  FaultWindow(const FaultWindow&) = delete;
  FaultWindow& operator=(const FaultWindow&) = delete;
};

// --- Inspection

std::size_t allocated_bytes(int device);
std::size_t allocation_count();  // device and pinned host allocations
std::size_t live_events();
std::size_t live_streams();  // created by the program, not yet destroyed
std::size_t live_graphs();   // graphs and executable graphs
std::size_t pending(cudaStream_t stream);

void set_capacity(int device, std::size_t bytes);

}  // namespace sim
