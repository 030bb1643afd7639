// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// The simulated machine: everything that the entry points share, behind one lock.
//
// An Item is one unit of queued work; it may run when it is first in its stream and all items in
// `after` are done. Whatever is reached through state() is touched only while a Lock is held;
// bodies of work run without it. Tests do not include this file.
#pragma once

#include "sim.hpp"
#include "tsan.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace sim::detail {

constexpr int kDevices = 2;
constexpr int kVersion = 13000;
constexpr int kMultiprocessors = 132;
constexpr std::size_t kDefaultCapacity = std::size_t{64} << 30;

// Shared ownership counted under the lock. std::shared_ptr counts with atomics, whose instrumented
// copies would show TSan an order that CUDA does not promise.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) {
    if (object_ != nullptr) ++object_->references;
  }
  Ref(const Ref& other) : Ref(other.object_) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr && --object_->references == 0) delete object_;
  }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  friend bool operator==(const Ref&, const Ref&) = default;

 private:
  T* object_ = nullptr;
};

// Handles are numbers that cannot be dereferenced. The one given back last is handed out next, as
// CUDA may do.
template <class Handle>
class Handles {
 public:
  Handle take() {
    if (free_.empty()) free_.push_back(next_ += 16);
    const std::uintptr_t value = free_.back();
    free_.pop_back();
    return reinterpret_cast<Handle>(value);  // NOLINT(performance-no-int-to-ptr)
  }
  void give_back(Handle handle) { free_.push_back(reinterpret_cast<std::uintptr_t>(handle)); }

 private:
  std::uintptr_t next_ = 0x1000;
  std::vector<std::uintptr_t> free_;
};

using Work = std::function<void()>;

// A launch's own copy of its arguments, each aligned for any parameter type.
class Arguments {
 public:
  Arguments(const std::vector<std::size_t>& sizes, void** values) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::size_t first = chunks_.size();
      chunks_.resize(first + (sizes[i] + sizeof(Chunk) - 1) / sizeof(Chunk));
      std::memcpy(&chunks_[first], values[i], sizes[i]);
      firsts_.push_back(first);
    }
  }

  std::vector<void*> pointers() {
    std::vector<void*> result;
    for (const std::size_t first : firsts_) result.push_back(&chunks_[first]);
    return result;
  }

 private:
  struct alignas(64) Chunk {
    unsigned char bytes[64];
  };

  std::vector<Chunk> chunks_;
  std::vector<std::size_t> firsts_;
};

// A launch of a kernel, as a graph keeps it.
struct Kernel {
  int references = 0;
  const void* stub = nullptr;
  dim3 grid;
  dim3 block;
  std::size_t shared = 0;
  KernelBody body;
  Arguments arguments;
  std::vector<void*> handed_out;  // where cudaGraphKernelNodeGetParams says the arguments are
};

struct Stream;

struct Item {
  enum class State { kQueued, kRunning, kDone };

  int references = 0;
  State state = State::kQueued;
  Stream* stream = nullptr;  // outlives its queued items
  Work body;
  std::vector<Ref<Item>> after;
  std::uint64_t finished = 0;  // on the clock of finished items
  Edge begin;
  Edge end;
};

struct Node {
  int references = 0;
  cudaGraphNode_t handle = nullptr;
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  Work body;
  Ref<Kernel> kernel;  // of a kernel node: what `body` runs
  std::vector<Ref<Node>> after;
};

struct Graph {
  int references = 0;
  cudaGraph_t handle = nullptr;
  bool capturing = false;
  std::vector<Ref<Node>> nodes;  // in a topological order
};

struct Executable {
  struct Step {
    Ref<Node> node;  // of the graph that it was instantiated from
    Work body;
    std::vector<std::size_t> after;
  };
  // Launches keep the steps that they were made with; a change makes new ones.
  struct Steps {
    int references = 0;
    std::vector<Step> all;  // in a topological order
  };

  int references = 0;
  cudaGraphExec_t handle = nullptr;
  Ref<Steps> steps;
  Ref<Item> last;
};

struct Capture {
  int references = 0;
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::uint64_t thread = 0;
  bool valid = true;
  Stream* origin = nullptr;
  Ref<Graph> graph;
};

struct Stream {
  int references = 0;
  cudaStream_t handle = nullptr;
  unsigned long long id = 0;
  int device = 0;
  unsigned flags = cudaStreamDefault;
  int priority = 0;
  bool legacy = false;
  std::deque<Ref<Item>> queue;
  Ref<Item> last;
  Ref<Capture> capture;
  std::vector<Ref<Node>> frontier;               // what the next captured node depends on
  std::vector<cudaGraphNode_t> reported;         // as handed out by cudaStreamGetCaptureInfo
  std::vector<cudaGraphEdgeData> reported_data;  // likewise
  Fiber fiber;

  bool blocking() const { return !legacy && (flags & cudaStreamNonBlocking) == 0; }
};

struct Event {
  int device = 0;
  unsigned flags = cudaEventDefault;
  Ref<Item> record;
  Ref<Capture> capture;  // set when the last record was captured
  std::vector<Ref<Node>> frontier;
};

// Memory that a program maps itself, alive while a handle or a mapping holds it.
struct Chunk {
  Chunk() = default;
  ~Chunk();
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  int references = 0;
  int file = -1;
  std::size_t size = 0;
  int device = 0;
};

// What the driver takes for one allocation; a mapping of a chunk is one too.
struct Allocation {
  void* base = nullptr;
  std::size_t size = 0;
  cudaMemoryType type = cudaMemoryTypeDevice;
  int device = 0;
  unsigned long long buffer_id = 0;
  Ref<Chunk> chunk = {};  // none but for a mapping
};

struct Route {
  std::vector<std::size_t> sizes;
  KernelBody body;
};

struct Fault {
  bool armed = false;
  bool fired = false;
  std::string only;  // empty: any function
  long remaining = 0;
  cudaError_t code = cudaErrorUnknown;
  std::string name;
};

struct State {
  std::uint64_t epoch = 1;  // of reset()
  std::uint64_t next_id = 1;
  std::uint64_t clock = 0;

  std::map<std::uintptr_t, Allocation> allocations;
  std::map<std::uintptr_t, std::size_t> reservations;  // of addresses, to their sizes
  std::map<CUmemGenericAllocationHandle, std::pair<Ref<Chunk>, int>> chunks;  // and references
  std::array<std::size_t, kDevices> capacity{kDefaultCapacity, kDefaultCapacity};

  std::array<Ref<Stream>, kDevices> legacy;
  std::array<Edge, kDevices> retired;  // after the work of streams that are destroyed and done
  std::map<std::pair<std::uint64_t, int>, Ref<Stream>> per_thread;
  std::map<cudaStream_t, Ref<Stream>> streams;
  std::vector<Ref<Stream>> all_streams;  // those above and destroyed ones that still have work
  std::map<cudaEvent_t, Event> events;
  std::vector<Ref<Capture>> captures;  // begun and not ended
  std::map<cudaGraph_t, Ref<Graph>> graphs;
  std::map<cudaGraphNode_t, Ref<Node>> nodes;
  std::map<cudaGraphExec_t, Ref<Executable>> executables;
  std::optional<std::mt19937_64> schedule;

  Handles<cudaStream_t> stream_handles;
  Handles<cudaEvent_t> event_handles;
  Handles<cudaGraph_t> graph_handles;
  Handles<cudaGraphNode_t> node_handles;
  Handles<cudaGraphExec_t> executable_handles;

  bool counting = false;
  std::vector<std::string> calls;
  Fault fault;
};

State& state();

struct Thread {
  std::uint64_t epoch = 0;
  std::uint64_t id = 0;
  int device = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaError_t last_error = cudaSuccess;
};

// The calling thread, as new after a reset(). Needs the lock.
Thread& this_thread();

// True while this thread runs the body of some work: CUDA calls are not permitted there.
bool& inside_work();

class Lock {
 public:
  Lock() { lock(); }
  ~Lock() { unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock();
  void unlock();
};

// Runs `function` without the lock.
template <class Function>
void unlocked(Lock& lock, Function&& function) {
  lock.unlock();
  function();
  lock.lock();
}

// --- schedule.cpp

// Queues `body` behind the stream's earlier work, behind `after` and behind what the legacy stream
// orders.
Ref<Item> enqueue(Stream& stream, Work body, std::vector<Ref<Item>> after = {});
void wait_for(Lock& lock, Ref<Item> item);
void wait_for_stream(Lock& lock, const Stream& stream);
void wait_for_device(Lock& lock, int device);
bool done(const Ref<Item>& item);  // true orders the caller after the item
// Drops a stream that was destroyed, once its work is done.
void forget_if_finished(Stream& stream);

// --- stream.cpp

// Null for a handle that names no stream.
Stream* find_stream(cudaStream_t handle);
Stream& legacy_stream(int device);

// --- capture.cpp

// What a call that no capture can see gets: success, or 900 and the captures that forbid it are
// invalidated.
cudaError_t check_unsafe();
// What use of the legacy stream gets while a blocking stream of its device captures.
cudaError_t check_legacy(const Stream& stream, bool invalidate);
void invalidate(Capture& capture);
// Before the stream is destroyed: a capture goes with the stream that began it, not with a fork.
void leave_capture(Stream& stream);
// Queues the work, or records it as a node of `type` when the stream captures.
cudaError_t submit(Stream& stream, cudaGraphNodeType type, Work body, Ref<Kernel> kernel = {});

// --- graph.cpp

Ref<Graph> create_graph();
void destroy_graph(Graph& graph);
Ref<Node> add_node(Graph& graph, cudaGraphNodeType type, Work body, std::vector<Ref<Node>> after);

// --- memory.cpp

std::size_t bytes_in_use(int device);
// The allocation that holds `pointer`, or null.
const Allocation* find_allocation(const void* pointer);
cudaError_t copy(Lock& lock, void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                 cudaStream_t stream, bool synchronous);
cudaError_t set(Lock& lock, void* to, int value, std::size_t size, cudaStream_t stream,
                bool synchronous);

// --- vmm.cpp, and there the driver's functions of the like names

// Base and size of the reservation that holds `address`, which is in one.
std::pair<std::uintptr_t, std::size_t> reservation_of(std::uintptr_t address);

CUresult cu_mem_get_allocation_granularity(std::size_t* out, const CUmemAllocationProp* properties,
                                           CUmemAllocationGranularity_flags option);
CUresult cu_mem_address_reserve(CUdeviceptr* out, std::size_t size, std::size_t alignment,
                                CUdeviceptr wish, unsigned long long flags);
CUresult cu_mem_address_free(CUdeviceptr address, std::size_t size);
CUresult cu_mem_create(CUmemGenericAllocationHandle* out, std::size_t size,
                       const CUmemAllocationProp* properties, unsigned long long flags);
CUresult cu_mem_release(CUmemGenericAllocationHandle handle);
CUresult cu_mem_map(CUdeviceptr address, std::size_t size, std::size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags);
CUresult cu_mem_unmap(CUdeviceptr address, std::size_t size);
CUresult cu_mem_set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* access,
                           std::size_t count);
CUresult cu_mem_retain_allocation_handle(CUmemGenericAllocationHandle* out, void* address);

// --- launch.cpp

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** args, std::size_t shared,
                   cudaStream_t stream);
// A launch that is not made yet, or why it cannot be.
cudaError_t describe_launch(Ref<Kernel>* out, const void* stub, dim3 grid, dim3 block, void** args,
                            std::size_t shared);
Work body_of(const Ref<Kernel>& kernel);

// --- fault.cpp

// The error that this call must return without doing anything, or success.
cudaError_t enter(const char* name);

// Every runtime entry: counts, injects, runs `body(lock)` and keeps the error as the thread's last.
template <class Body>
cudaError_t api(const char* name, Body&& body) {
  if (inside_work()) return cudaErrorNotPermitted;
  Lock lock;
  cudaError_t code = enter(name);
  if (code == cudaSuccess) code = body(lock);
  const bool failed = code != cudaSuccess && code != cudaErrorNotReady;  // as CUDA: no failure
  if (failed) this_thread().last_error = code;
  return code;
}

// The same for a driver function, which leaves the runtime's last error alone.
template <class Body>
CUresult driver_api(const char* name, Body&& body) {
  if (inside_work()) return CUDA_ERROR_NOT_PERMITTED;
  Lock lock;
  return enter(name) == cudaSuccess ? body(lock) : CUDA_ERROR_UNKNOWN;
}

}  // namespace sim::detail
