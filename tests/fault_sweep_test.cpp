// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Every CUDA call that an operation makes fails once. After each failure the buffer's promises
/// hold: address, contents, state and generation, nothing leaked, no error left behind, and a
/// capture that was under way stays valid. Simulation only.

#include "holdfast/stable_buffer.hpp"

#include "sim/sim.hpp"
#include "support/recipes.hpp"
#include "support/runtime.hpp"

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace {

using holdfast::Shape;
using holdfast::State;
using holdfast::TensorView;
using test::ok;
using Buffer = holdfast::StableBuffer<float>;

constexpr std::size_t kCount = 100;
const Shape kShape{4, 25};

std::vector<float> values(int round) {
  std::vector<float> result(kCount);
  std::iota(result.begin(), result.end(), static_cast<float>(round) * 1000.0F);
  return result;
}

/// A buffer on `device` while device 0 is current and another stream of this thread is captured.
struct World {
  explicit World(int device) : memory(std::make_unique<holdfast::DeviceResource>(device)) {
    ok(cudaSetDevice(device));
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (auto* source : {&old_source, &new_source, &engine}) {
      *source = std::make_unique<test::DeviceArray<float>>(kCount);
    }
    old_source->upload(values(1));
    new_source->upload(values(2));
    engine->upload(values(3));
    ok(cudaSetDevice(0));
    ok(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    ok(cudaMalloc(&scratch, 64));
    buffer = std::make_unique<Buffer>("swept", *memory);
    ours = sim::allocated_bytes(device);
    events = sim::live_events();
  }

  [[nodiscard]] test::CopyOf<float> recipe(const test::DeviceArray<float>& source) const {
    return test::CopyOf<float>(TensorView(source.data(), kShape, memory->device()));
  }
  /// What a reader on `reader` sees that was ordered by wait_ready and waits for nothing else.
  [[nodiscard]] std::vector<float> contents(cudaStream_t reader) const {
    if (buffer->state() == State::live) buffer->wait_ready(reader);
    return read(reader);
  }
  [[nodiscard]] std::vector<float> contents() const { return contents(other); }
  [[nodiscard]] std::vector<float> read(cudaStream_t reader) const {
    enqueue_read(reader);
    ok(cudaStreamSynchronize(reader));
    return seen();
  }
  void enqueue_read(cudaStream_t reader) const {
    ok(cudaMemcpyAsync(engine->data(), buffer->data(), kCount * sizeof(float),
                       cudaMemcpyDeviceToDevice, reader));
  }
  /// What the last read has brought so far.
  [[nodiscard]] std::vector<float> seen() const {
    std::vector<float> result(kCount);
    std::memcpy(result.data(), engine->data(), kCount * sizeof(float));
    return result;
  }
  void begin_capture() const { ok(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal)); }
  /// Ends the capture that spanned the operation; it must have survived.
  void end_capture() const {
    EXPECT_EQ(cudaMemsetAsync(scratch, 0, 64, captured), cudaSuccess);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess) << "the capture was broken";
    std::size_t nodes = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
    EXPECT_EQ(nodes, 1U);
    ok(cudaGraphDestroy(graph));
  }

  std::unique_ptr<holdfast::DeviceResource> memory;
  cudaStream_t stream = nullptr;
  cudaStream_t other = nullptr;
  cudaStream_t captured = nullptr;
  void* scratch = nullptr;
  std::unique_ptr<test::DeviceArray<float>> old_source;
  std::unique_ptr<test::DeviceArray<float>> new_source;
  std::unique_ptr<test::DeviceArray<float>> engine;
  std::unique_ptr<Buffer> buffer;
  std::size_t ours = 0;  // bytes before the buffer has any
  std::size_t events = 0;
};

struct Operation {
  const char* name;
  std::function<void(World&)> prepare;  // brings the buffer to where the operation starts
  std::function<void(World&)> act;
  std::function<void(World&)> expect_done;  // what a success leaves
  bool keeps_contents = false;  // on failure, values(1), and reading them disturbs nothing
};

const Operation kOperations[] = {
    {"first finalize", [](World&) {},
     [](World& w) { w.buffer->finalize(w.recipe(*w.new_source), w.stream); },
     [](World& w) {
       EXPECT_EQ(w.buffer->state(), State::live);
       EXPECT_EQ(w.buffer->generation(), 1U);
       EXPECT_EQ(w.contents(), values(2));
     }},
    {"later finalize", [](World& w) { w.buffer->finalize(w.recipe(*w.old_source), w.stream); },
     [](World& w) { w.buffer->finalize(w.recipe(*w.new_source), w.stream); },
     [](World& w) {
       EXPECT_EQ(w.buffer->state(), State::live);
       EXPECT_EQ(w.buffer->generation(), 2U);
       EXPECT_EQ(w.contents(), values(2));
     },
     true},
    {"finalize after a use and a fill on other streams",
     [](World& w) {
       w.buffer->finalize(w.recipe(*w.old_source), w.other);
       w.buffer->mark_use(w.other);
     },
     [](World& w) { w.buffer->finalize(w.recipe(*w.new_source), w.stream); },
     [](World& w) {
       EXPECT_EQ(w.buffer->state(), State::live);
       EXPECT_EQ(w.buffer->generation(), 2U);
       EXPECT_EQ(w.contents(), values(2));
     },
     true},
    {"allocate", [](World&) {}, [](World& w) { w.buffer->allocate(kShape); },
     [](World& w) {
       EXPECT_EQ(w.buffer->state(), State::unset);
       EXPECT_NE(w.buffer->data(), nullptr);
     }},
    {"adopt", [](World&) {},
     [](World& w) { w.buffer->adopt(TensorView(w.engine->data(), kShape, w.memory->device())); },
     [](World& w) {
       EXPECT_EQ(w.buffer->state(), State::unset);
       EXPECT_EQ(w.buffer->data(), w.engine->data());
     }},
    {"mark_use",
     [](World& w) {
       w.buffer->finalize(w.recipe(*w.old_source), w.stream);
       w.buffer->wait_ready(w.other);
       w.enqueue_read(w.other);
     },
     [](World& w) { w.buffer->mark_use(w.other); },
     [](World& w) {
       w.buffer->finalize(w.recipe(*w.new_source), w.stream);
       ok(cudaStreamSynchronize(w.stream));
       ok(cudaStreamSynchronize(w.other));
       EXPECT_EQ(w.seen(), values(1)) << "the refit overtook a marked read";
     }},
    {"wait_ready",
     [](World& w) {
       w.buffer->finalize(w.recipe(*w.old_source), w.stream);
       ok(cudaStreamSynchronize(w.stream));
       w.buffer->finalize(w.recipe(*w.new_source), w.stream);
     },
     [](World& w) { w.buffer->wait_ready(w.other); },
     [](World& w) { EXPECT_EQ(w.read(w.other), values(2)) << "the read overtook the fill"; }},
};

/// Calls after which a device or capture mode cannot be given back: nobody can, when they fail.
bool restores(const std::string& name) {
  return name == "cudaSetDevice" || name == "cudaThreadExchangeStreamCaptureMode";
}

class FaultSweep : public ::testing::TestWithParam<int> {
 protected:
  void TearDown() override {
    ok(cudaSetDevice(0));
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    ok(cudaThreadExchangeStreamCaptureMode(&mode));
    sim::reset();
  }
};

TEST_P(FaultSweep, EveryOperationKeepsItsPromisesWhateverCallFails) {
  const int device = GetParam();
  for (const Operation& operation : kOperations) {
    long calls = 0;
    {
      sim::reset();
      World clean(device);
      operation.prepare(clean);
      clean.begin_capture();
      sim::count_calls_begin();
      operation.act(clean);
      calls = sim::count_calls_end();
      clean.end_capture();
      operation.expect_done(clean);
    }
    ASSERT_GT(calls, 0) << operation.name << " makes no CUDA call: nothing is swept";
    for (long n = 1; n <= calls; ++n) {
      SCOPED_TRACE(std::string(operation.name) + ", failing call " + std::to_string(n));
      sim::reset();
      World w(device);
      operation.prepare(w);
      float* const address = w.buffer->data();
      const State state = w.buffer->state();
      const std::uint64_t generation = w.buffer->generation();
      w.begin_capture();
      bool threw = false;
      std::string failed;
      {
        const sim::FaultWindow fault(n, cudaErrorInvalidValue);
        try {
          operation.act(w);
        } catch (const holdfast::CudaError& error) {
          threw = true;
          EXPECT_EQ(error.code(),
                    sim::fault_name().starts_with("cu") && !sim::fault_name().starts_with("cuda")
                        ? cudaErrorUnknown
                        : cudaErrorInvalidValue);
        }
        ASSERT_TRUE(sim::fault_fired());
        failed = sim::fault_name();
      }
      SCOPED_TRACE(failed);
      EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
      if (restores(failed)) {
        ok(cudaSetDevice(0));
      } else {
        int current = -1;
        ok(cudaGetDevice(&current));
        EXPECT_EQ(current, 0);
      }
      w.end_capture();
      if (threw) {
        EXPECT_EQ(w.buffer->data(), address) << "the address changed";
        EXPECT_EQ(w.buffer->generation(), generation);
        if (w.buffer->state() != state) {
          EXPECT_EQ(w.buffer->state(), State::unset);
          EXPECT_EQ(state, State::live);
        } else if (state == State::live && operation.keeps_contents) {
          EXPECT_EQ(w.contents(w.stream), values(1)) << "contents changed, and the state says live";
        }
        if (state == State::empty) {
          EXPECT_EQ(sim::allocated_bytes(device), w.ours + w.memory->leaked_bytes());
          EXPECT_TRUE(w.memory->ledger().live().empty());
          EXPECT_TRUE(w.memory->ledger().retired().empty());
        }
        operation.act(w);  // the same call, with nothing in its way
      }
      operation.expect_done(w);
      w.buffer.reset();
      EXPECT_EQ(sim::allocated_bytes(device), w.ours + w.memory->leaked_bytes());
      EXPECT_EQ(w.memory->leaked_bytes(), 0U);
      EXPECT_EQ(sim::live_events(), w.events);
    }
  }
}

TEST_P(FaultSweep, DestructorLosesNothingUncounted) {
  const int device = GetParam();
  const auto prepare = [](World& w) {
    w.buffer->finalize(w.recipe(*w.old_source), w.stream);
    w.buffer->mark_use(w.other);
    w.begin_capture();
  };
  sim::reset();
  World clean(device);
  prepare(clean);
  sim::count_calls_begin();
  clean.buffer.reset();
  const long calls = sim::count_calls_end();
  ASSERT_GT(calls, 0);
  std::set<std::string> reached;
  for (long n = 1; n <= calls; ++n) {
    SCOPED_TRACE("failing call " + std::to_string(n));
    sim::reset();
    World w(device);
    prepare(w);
    {
      const sim::FaultWindow fault(n);
      w.buffer.reset();
      ASSERT_TRUE(sim::fault_fired());
    }
    const std::string failed = sim::fault_name();
    SCOPED_TRACE(failed);
    reached.insert(failed);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    if (restores(failed)) ok(cudaSetDevice(0));
    w.end_capture();
    EXPECT_EQ(sim::allocated_bytes(device), w.ours + w.memory->leaked_bytes());
    EXPECT_EQ(sim::live_events(), w.events + (failed == "cudaEventDestroy" ? 1U : 0U));
    EXPECT_TRUE(w.memory->ledger().live().empty());
    EXPECT_EQ(w.memory->ledger().retired().size(), 1U);
  }
  EXPECT_TRUE(reached.contains("cudaFree"));
  EXPECT_TRUE(reached.contains("cudaEventSynchronize"));
}

TEST_P(FaultSweep, OutOfMemoryIsToldApart) {
  sim::reset();
  World w(GetParam());
  sim::fail_named("cudaMalloc", 1, cudaErrorMemoryAllocation);
  EXPECT_THROW(w.buffer->allocate(kShape), holdfast::OutOfMemory);
  EXPECT_EQ(w.buffer->state(), State::empty);
  sim::clear_fault();
}

TEST_P(FaultSweep, RefusalsMakeNoCallThatHasAnEffect) {
  sim::reset();
  World w(GetParam());
  ok(cudaStreamBeginCapture(w.stream, cudaStreamCaptureModeThreadLocal));
  sim::count_calls_begin();
  EXPECT_THROW(w.buffer->finalize(w.recipe(*w.old_source), w.stream), holdfast::ContractError);
  EXPECT_GT(sim::count_calls_end(), 0);
  for (const std::string& call : sim::call_log()) EXPECT_EQ(call, "cudaStreamIsCapturing");
  cudaGraph_t graph = nullptr;
  ok(cudaStreamEndCapture(w.stream, &graph));
  ok(cudaGraphDestroy(graph));
}

TEST_P(FaultSweep, ConstructionAndMovesMakeNoCall) {
  sim::reset();
  World w(GetParam());
  sim::count_calls_begin();
  Buffer made("made", *w.memory);
  Buffer moved(std::move(made));
  made = std::move(moved);
  EXPECT_EQ(sim::count_calls_end(), 0);
}

TEST_P(FaultSweep, SteadyRefitMakesOneLaunchAndOneRecord) {
  sim::reset();
  World w(GetParam());
  w.buffer->finalize(w.recipe(*w.old_source), w.stream);
  w.buffer->finalize(w.recipe(*w.old_source), w.stream);
  sim::count_calls_begin();
  w.buffer->finalize(w.recipe(*w.new_source), w.stream);
  sim::count_calls_end();
  std::multiset<std::string> effects;
  for (const std::string& call : sim::call_log()) {
    if (!call.starts_with("cudaStreamGet") && call != "cudaStreamIsCapturing" &&
        call != "cudaGetDevice" && call != "cudaSetDevice") {
      effects.insert(call);
    }
  }
  EXPECT_EQ(effects, (std::multiset<std::string>{"cudaMemcpyAsync", "cudaEventRecord"}));
}

TEST_P(FaultSweep, RefitsAndMarksPileUpNothing) {
  sim::reset();
  World w(GetParam());
  const auto rounds = [&w](int count) {
    for (int round = 0; round < count; ++round) {
      w.buffer->finalize(w.recipe(*w.old_source), round % 2 == 0 ? w.stream : w.other);
      w.buffer->wait_ready(w.other);
      w.buffer->mark_use(w.other);
      cudaStream_t passing = nullptr;
      ok(cudaSetDevice(GetParam()));
      ok(cudaStreamCreateWithFlags(&passing, cudaStreamNonBlocking));
      ok(cudaSetDevice(0));
      w.buffer->wait_ready(passing);
      w.buffer->mark_use(passing);
      ok(cudaStreamSynchronize(passing));
      ok(cudaStreamDestroy(passing));
    }
  };
  rounds(10);
  const std::size_t events = sim::live_events();
  const std::size_t bytes = sim::allocated_bytes(GetParam());
  rounds(500);
  EXPECT_EQ(sim::live_events(), events);
  EXPECT_EQ(sim::allocated_bytes(GetParam()), bytes);
}

INSTANTIATE_TEST_SUITE_P(OnDevice, FaultSweep, ::testing::Values(0, 1), [](const auto& device) {
  return device.param == 0 ? "CurrentDevice" : "AnotherDevice";
});

}  // namespace
