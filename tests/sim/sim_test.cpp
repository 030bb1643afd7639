// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// What only the simulated CUDA runtime does: faults, chosen interleavings, routes and inspection.
//
// What it shares with CUDA is in conformance_test.cpp and not repeated here.
#include "sim.hpp"

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kBytes = 256;

// Stands for what nvcc makes of a kernel: only its address and parameters matter.
void add_kernel(int* /*sum*/, int /*value*/) {}
void unrouted_kernel(int* /*sum*/) {}

// What ran, in order. Unordered work may add to it, and the test may read it before anything ran.
class Log {
 public:
  void add(int number) { numbers_.at(count_.fetch_add(1)).store(number); }
  void clear() { count_.store(0); }
  std::vector<int> read() const {
    const std::size_t count = count_.load();
    std::vector<int> numbers;
    for (std::size_t i = 0; i < count; ++i) numbers.push_back(numbers_.at(i).load());
    return numbers;
  }

 private:
  std::array<std::atomic<int>, 64> numbers_{};
  std::atomic<std::size_t> count_{0};
};

struct Step {
  Log* log;
  int number;
};

void log_step(void* data) {
  const auto* step = static_cast<const Step*>(data);
  step->log->add(step->number);
}

void call_cuda(void* code) { *static_cast<cudaError_t*>(code) = cudaDeviceSynchronize(); }

cudaError_t launch_add(int* sum, int value, cudaStream_t stream) {
  void* arguments[] = {&sum, &value};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&add_kernel), dim3(1), dim3(32), arguments,
                          0, stream);
}

class Simulation : public testing::Test {
 protected:
  void SetUp() override {
    sim::reset();
    sim::route_kernel(&add_kernel, [](dim3 grid, dim3 block, int* sum, int& value) {
      *sum += static_cast<int>(grid.x * block.x) * value;
      value = -1;  // a kernel may; no other launch or replay may see it
    });
    ASSERT_EQ(cudaStreamCreateWithFlags(&first_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&second_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes), cudaSuccess);
    std::memset(memory_, 0, kBytes);
  }

  void TearDown() override { sim::reset(); }

  // Logs `number` when it runs.
  void enqueue(int number, cudaStream_t stream) {
    steps_.push_back({&log_, number});
    ASSERT_EQ(cudaLaunchHostFunc(stream, log_step, &steps_.back()), cudaSuccess);
  }

  cudaStream_t first_ = nullptr;
  cudaStream_t second_ = nullptr;
  cudaEvent_t event_ = nullptr;
  int* memory_ = nullptr;
  Log log_;
  std::deque<Step> steps_;
};

// --- What runs when

TEST_F(Simulation, NothingRunsUntilItIsWaitedFor) {
  enqueue(1, first_);
  EXPECT_TRUE(log_.read().empty());
  EXPECT_EQ(sim::pending(first_), 1U);
  EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(log_.read(), std::vector<int>{1});
  EXPECT_EQ(sim::pending(first_), 0U);
}

TEST_F(Simulation, WaitRunsNoMoreThanItNeeds) {
  enqueue(1, first_);
  ASSERT_EQ(cudaEventRecord(event_, first_), cudaSuccess);
  enqueue(2, first_);
  enqueue(3, second_);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(log_.read(), std::vector<int>{1});
}

TEST_F(Simulation, WaitRunsWhatOtherStreamsOweIt) {
  enqueue(1, first_);
  ASSERT_EQ(cudaEventRecord(event_, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, event_, 0), cudaSuccess);
  enqueue(2, second_);
  EXPECT_EQ(cudaStreamSynchronize(second_), cudaSuccess);
  EXPECT_EQ(log_.read(), (std::vector<int>{1, 2}));
}

TEST_F(Simulation, TestChoosesTheInterleaving) {
  enqueue(1, first_);
  enqueue(2, second_);
  enqueue(3, first_);
  EXPECT_TRUE(sim::run_one(second_));
  EXPECT_TRUE(sim::run_one(first_));
  EXPECT_FALSE(sim::run_one(second_));
  EXPECT_EQ(log_.read(), (std::vector<int>{2, 1}));
}

TEST_F(Simulation, RunOneRunsWhatTheItemWaitsFor) {
  enqueue(1, first_);
  ASSERT_EQ(cudaEventRecord(event_, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, event_, 0), cudaSuccess);
  EXPECT_TRUE(sim::run_one(second_));
  EXPECT_EQ(log_.read(), std::vector<int>{1});
}

TEST_F(Simulation, DrainRunsEverything) {
  enqueue(1, first_);
  enqueue(2, second_);
  sim::drain();
  EXPECT_EQ(log_.read().size(), 2U);
}

TEST_F(Simulation, DestroyedStreamsAreForgottenOnceTheirWorkIsDone) {
  enqueue(1, first_);
  ASSERT_EQ(cudaStreamDestroy(first_), cudaSuccess);
  EXPECT_EQ(sim::live_streams(), 1U);
  EXPECT_TRUE(log_.read().empty());
  sim::drain();
  EXPECT_EQ(log_.read(), std::vector<int>{1});
}

TEST_F(Simulation, SeedsChangeTheOrderButNotWhatIsOrdered) {
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 32; ++seed) {
    sim::set_schedule(seed);
    log_.clear();
    for (int i = 0; i < 4; ++i) {
      enqueue(i, first_);
      enqueue(10 + i, second_);
    }
    ASSERT_EQ(cudaEventRecord(event_, first_), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(second_, event_, 0), cudaSuccess);
    enqueue(20, second_);
    ASSERT_EQ(cudaStreamSynchronize(second_), cudaSuccess);
    std::vector<int> of_first;
    const std::vector<int> order = log_.read();
    std::copy_if(order.begin(), order.end(), std::back_inserter(of_first),
                 [](int number) { return number < 10; });
    EXPECT_EQ(of_first, (std::vector<int>{0, 1, 2, 3}));
    EXPECT_EQ(order.back(), 20);
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 8U);
}

TEST_F(Simulation, SameSeedGivesTheSameOrder) {
  std::vector<std::vector<int>> orders;
  for (int round = 0; round < 2; ++round) {
    sim::set_schedule(7);
    log_.clear();
    for (int i = 0; i < 8; ++i) enqueue(i, i % 2 == 0 ? first_ : second_);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    orders.push_back(log_.read());
  }
  EXPECT_EQ(orders[0], orders[1]);
}

TEST_F(Simulation, SeedsChangeTheOrderOfUnorderedGraphNodes) {
  ASSERT_EQ(cudaStreamBeginCapture(first_, cudaStreamCaptureModeGlobal), cudaSuccess);
  enqueue(0, first_);
  ASSERT_EQ(cudaEventRecord(event_, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, event_, 0), cudaSuccess);
  enqueue(1, first_);
  enqueue(2, second_);
  ASSERT_EQ(cudaEventRecord(event_, second_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(first_, event_, 0), cudaSuccess);
  enqueue(3, first_);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(first_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    sim::set_schedule(seed);
    log_.clear();
    ASSERT_EQ(cudaGraphLaunch(executable, first_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
    orders.insert(log_.read());
  }
  EXPECT_EQ(orders, (std::set<std::vector<int>>{{0, 1, 2, 3}, {0, 2, 1, 3}}));
}

TEST_F(Simulation, HostFunctionMayNotCallCuda) {
  cudaError_t code = cudaSuccess;
  ASSERT_EQ(cudaLaunchHostFunc(first_, call_cuda, &code), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(code, cudaErrorNotPermitted);
}

TEST_F(Simulation, ThreadsShareTheStreams) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([this] {
      for (int round = 0; round < kRounds; ++round) {
        EXPECT_EQ(launch_add(memory_, 1, first_), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(*memory_, kThreads * kRounds * 32);
}

// --- Kernels

TEST_F(Simulation, LaunchCopiesItsArguments) {
  int value = 3;
  void* arguments[] = {&memory_, &value};
  ASSERT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&add_kernel), dim3(2), dim3(4),
                             arguments, 0, first_),
            cudaSuccess);
  value = 100;
  EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(*memory_, 24);
}

TEST_F(Simulation, EveryReplayUsesTheArgumentsOfTheCapture) {
  ASSERT_EQ(cudaStreamBeginCapture(first_, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(launch_add(memory_, 2, first_), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(first_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(executable, first_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(*memory_, 3 * 64);
}

TEST_F(Simulation, KernelWithoutARouteIsAnInvalidDeviceFunction) {
  void* arguments[] = {&memory_};
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&unrouted_kernel), dim3(1), dim3(1),
                             arguments, 0, first_),
            cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(sim::pending(first_), 0U);
}

TEST_F(Simulation, LaunchOfAnImpossibleShapeIsRefused) {
  void* arguments[] = {&memory_, &memory_};
  for (const auto& [grid, block] : std::vector<std::pair<dim3, dim3>>{
           {dim3(0), dim3(1)}, {dim3(1), dim3(1025)}, {dim3(1, 65536), dim3(1)}}) {
    EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&add_kernel), grid, block, arguments,
                               0, first_),
              cudaErrorInvalidConfiguration);
  }
}

TEST_F(Simulation, LaunchIntoAStreamOfAnotherDeviceIsRefused) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(launch_add(memory_, 1, first_), cudaErrorInvalidResourceHandle);
}

// --- Faults

TEST_F(Simulation, CallsAreCountedAndNamed) {
  sim::count_calls_begin();
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorName(cudaSuccess), "cudaSuccess");
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(sim::count_calls_end(), 2);
  EXPECT_EQ(sim::call_log(), (std::vector<std::string>{"cudaMalloc", "cudaFree"}));
}

TEST_F(Simulation, ChosenCallFailsOnceAndHasNoEffect) {
  const std::size_t before = sim::allocation_count();
  sim::fail_call(2, cudaErrorMemoryAllocation);
  void* memory = nullptr;
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  EXPECT_FALSE(sim::fault_fired());
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaErrorMemoryAllocation);
  EXPECT_TRUE(sim::fault_fired());
  EXPECT_EQ(sim::fault_name(), "cudaMalloc");
  EXPECT_EQ(memory, nullptr);
  EXPECT_EQ(sim::allocation_count(), before);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
}

TEST_F(Simulation, NamedCallFails) {
  sim::fail_named("cudaEventRecord", 2);
  EXPECT_EQ(cudaEventRecord(event_, first_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  EXPECT_EQ(cudaEventRecord(event_, first_), cudaErrorUnknown);
  EXPECT_EQ(sim::fault_name(), "cudaEventRecord");
  EXPECT_EQ(sim::pending(first_), 1U);
}

TEST_F(Simulation, ClearedFaultDoesNotFire) {
  sim::fail_call(1);
  sim::clear_fault();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_FALSE(sim::fault_fired());
}

TEST_F(Simulation, FaultWindowArmsAndCounts) {
  {
    const sim::FaultWindow window(1, cudaErrorNotSupported);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorNotSupported);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(sim::call_log().size(), 2U);
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(sim::call_log().size(), 2U);
}

// --- Inspection

TEST_F(Simulation, LiveObjectsAreCounted) {
  EXPECT_EQ(sim::live_streams(), 2U);
  EXPECT_EQ(sim::live_events(), 1U);
  EXPECT_EQ(sim::live_graphs(), 0U);
  EXPECT_EQ(sim::allocation_count(), 1U);
  EXPECT_EQ(sim::allocated_bytes(0), kBytes);
  EXPECT_EQ(sim::allocated_bytes(1), 0U);
}

TEST_F(Simulation, CapacityBoundsTheDevice) {
  sim::set_capacity(0, 4 * kBytes);
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
  EXPECT_EQ(free_bytes, 3 * kBytes);
  EXPECT_EQ(total, 4 * kBytes);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 3 * kBytes + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&memory, 3 * kBytes), cudaSuccess);
}

TEST_F(Simulation, NewMemoryIsPoisoned) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  EXPECT_EQ(*static_cast<unsigned char*>(memory), 0xCB);
}

TEST_F(Simulation, ResetForgetsEverythingButRoutes) {
  ASSERT_EQ(launch_add(memory_, 1, first_), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(9), cudaErrorInvalidDevice);
  sim::reset();
  EXPECT_EQ(sim::allocation_count(), 0U);
  EXPECT_EQ(sim::live_streams(), 0U);
  EXPECT_EQ(sim::live_events(), 0U);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes), cudaSuccess);
  EXPECT_EQ(launch_add(memory_, 1, cudaStreamPerThread), cudaSuccess);
}

}  // namespace
