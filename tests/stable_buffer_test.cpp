// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The contract of StableBuffer, with recipes that copy: address, contents, refusals, capture,
/// lifetime, order and devices. Kernels come in refit_identity_test.cu.

#include "holdfast/stable_buffer.hpp"

#include "support/recipes.hpp"
#include "support/runtime.hpp"

#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct Record24 {
  double a;
  std::int64_t b;
  float c;
  std::int32_t d;
};
static_assert(sizeof(Record24) == 24);

}  // namespace

// Members that no test calls must compile too.
template class holdfast::StableBuffer<float>;
template class holdfast::StableBuffer<__nv_bfloat16>;
template class holdfast::StableBuffer<std::int8_t>;
template class holdfast::StableBuffer<Record24>;

namespace {

using holdfast::ByteRange;
using holdfast::Capture;
using holdfast::ContractError;
using holdfast::DeviceResource;
using holdfast::Reason;
using holdfast::RefitError;
using holdfast::Rule;
using holdfast::Shape;
using holdfast::State;
using holdfast::TensorView;
using test::CopyOf;
using test::Custom;
using test::DeviceArray;
using test::Graph;
using test::ok;

using Buffer = holdfast::StableBuffer<float>;

constexpr const char* kName = "layers.0.hc_attn_fn_broadcast";

/// 24 mixes x 96, each value distinct within a round and from the other rounds.
constexpr std::int64_t kRows = 24;
constexpr std::int64_t kHidden = 96;
constexpr std::size_t kCount = kRows * kHidden;
const Shape kShape{kRows, kHidden};

std::vector<float> values(int round) {
  std::vector<float> result(kCount);
  std::iota(result.begin(), result.end(), static_cast<float>(round) * 10000.0F);
  return result;
}

/// Expects ContractError with `rule` from `call`, and the texts in its message.
template <class Call>
void expect_refused(Rule rule, const Call& call, const std::vector<std::string>& texts = {}) {
  try {
    call();
    ADD_FAILURE() << "not refused; expected " << to_string(rule);
  } catch (const ContractError& error) {
    EXPECT_EQ(error.rule(), rule) << error.what();
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
          << "'" << text << "' is not in: " << error.what();
    }
  }
}

class StableBuffer : public test::Cuda {
 protected:
  void SetUp() override {
    test::Cuda::SetUp();
    if (stream != nullptr) memory.emplace(0);
  }
  void TearDown() override {
    if (memory) {
      EXPECT_EQ(memory->leaked_bytes(), 0U);
    }
    test::Cuda::TearDown();
  }
  [[nodiscard]] static TensorView view(const DeviceArray<float>& array) {
    return TensorView(static_cast<const float*>(array.data()), kShape, 0);
  }
  [[nodiscard]] Buffer filled(const DeviceArray<float>& source) {
    Buffer buffer(kName, *memory);
    buffer.finalize(CopyOf<float>(view(source)), stream);
    return buffer;
  }
  [[nodiscard]] std::uint64_t allocation_id(const Buffer& buffer) const {
    const auto range = memory->ledger().find(buffer.data());
    return range ? range->backing.at(0).buffer_id : 0;
  }
  /// A stream of the current device that lives as long as the test.
  class Stream {
   public:
    explicit Stream(unsigned flags = cudaStreamNonBlocking) {
      ok(cudaStreamCreateWithFlags(&stream_, flags));
    }
    ~Stream() { (void)cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    operator cudaStream_t() const { return stream_; }
    operator cuda::stream_ref() const { return stream_; }

   private:
    cudaStream_t stream_ = nullptr;
  };
  /// Puts work on a stream that takes long enough for an unordered neighbour to overtake it. On the
  /// simulation nothing runs before it is waited for, which is later still.
  static void enqueue_delay(cudaStream_t on) {
    ok(cudaLaunchHostFunc(
        on, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }, nullptr));
  }
  void enqueue_copy(float* to, const float* from, cudaStream_t on) const {
    ok(cudaMemcpyAsync(to, from, kCount * sizeof(float), cudaMemcpyDeviceToDevice, on));
  }

  std::optional<DeviceResource> memory;
};

// --- Address and contents

TEST_F(StableBuffer, HasNothingBeforeItsFirstFinalize) {
  const Buffer buffer(kName, *memory);
  EXPECT_EQ(buffer.state(), State::empty);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.generation(), 0U);
  EXPECT_EQ(buffer.name(), kName);
  EXPECT_EQ(buffer.device(), 0);
  EXPECT_TRUE(memory->ledger().live().empty());
  expect_refused(Rule::not_allocated, [&] { (void)buffer.shape(); }, {kName, "shape"});
  expect_refused(Rule::not_allocated, [&] { (void)buffer.view(); });
  expect_refused(Rule::not_allocated, [&] { buffer.mark_use(stream); }, {kName, "mark_use"});
  expect_refused(Rule::not_allocated, [&] { buffer.wait_ready(stream); }, {kName, "wait_ready"});
}

TEST_F(StableBuffer, FirstFinalizeAllocatesAndFills) {
  const DeviceArray<float> source(values(1));
  const Buffer buffer = filled(source);
  EXPECT_EQ(buffer.state(), State::live);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(buffer.shape(), kShape);
  ASSERT_NE(buffer.data(), nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, LaterFinalizeKeepsAddressAndAllocation) {
  DeviceArray<float> source(values(1));
  Buffer buffer = filled(source);
  float* const address = buffer.data();
  const std::uint64_t id = allocation_id(buffer);
  EXPECT_NE(id, 0U);
  for (int round = 2; round <= 5; ++round) {
    source.upload(values(round));
    buffer.finalize(CopyOf<float>(view(source)), stream);
    EXPECT_EQ(buffer.data(), address);
    EXPECT_EQ(allocation_id(buffer), id);
    EXPECT_EQ(buffer.generation(), static_cast<std::uint64_t>(round));
    EXPECT_EQ(buffer.state(), State::live);
    EXPECT_EQ(test::download(buffer.data(), kCount), values(round));
  }
  EXPECT_EQ(memory->ledger().live().size(), 1U);
  EXPECT_TRUE(memory->ledger().retired().empty());
}

TEST_F(StableBuffer, CapturedGraphReadsEveryRefit) {
  DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  Buffer buffer = filled(source);
  sync();
  const Graph graph(stream, [&] { enqueue_copy(output.data(), buffer.data(), stream); });
  for (int round = 2; round <= 4; ++round) {
    source.upload(values(round));
    output.poison();
    buffer.finalize(CopyOf<float>(view(source)), stream);
    graph.launch(stream);
    EXPECT_EQ(output.download(), values(round));
  }
}

TEST_F(StableBuffer, HoldsAnyTriviallyCopyableType) {
  const auto holds = [&]<class T>(const std::vector<T>& data) {
    const DeviceArray<T> source(data);
    holdfast::StableBuffer<T> buffer("typed", *memory);
    const Shape shape{static_cast<std::int64_t>(data.size())};
    buffer.finalize(CopyOf<T>(TensorView(source.data(), shape, 0)), stream);
    const auto found = test::download(buffer.data(), data.size());
    return std::memcmp(found.data(), data.data(), data.size() * sizeof(T)) == 0;
  };
  EXPECT_TRUE(holds(std::vector<std::int8_t>{-128, -1, 0, 1, 127}));
  EXPECT_TRUE(holds(std::vector<__nv_bfloat16>{__float2bfloat16(1.5F), __float2bfloat16(-3.0F)}));
  EXPECT_TRUE(
      holds(std::vector<Record24>{{1.0, -2, 3.0F, 4}, {5.0, 6, -7.0F, 8}, {9, 10, 11, 12}}));
}

TEST_F(StableBuffer, AllocateGivesTheAddressBeforeAnySource) {
  Buffer buffer(kName, *memory);
  buffer.allocate(kShape);
  EXPECT_EQ(buffer.state(), State::unset);
  EXPECT_EQ(buffer.generation(), 0U);
  EXPECT_EQ(buffer.shape(), kShape);
  float* const address = buffer.data();
  ASSERT_NE(address, nullptr);

  const DeviceArray<float> output(kCount);
  const Graph graph(stream, [&] { enqueue_copy(output.data(), buffer.data(), stream); });
  const DeviceArray<float> source(values(3));
  buffer.finalize(CopyOf<float>(view(source)), stream);
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.state(), State::live);
  EXPECT_EQ(buffer.generation(), 1U);
  graph.launch(stream);
  EXPECT_EQ(output.download(), values(3));
}

TEST_F(StableBuffer, AdoptWritesToTheEnginesAddressAndNeverFreesIt) {
  const DeviceArray<float> engine(values(1));
  const DeviceArray<float> source(values(2));
  {
    Buffer buffer(kName, *memory);
    buffer.adopt(TensorView(engine.data(), kShape, 0));
    EXPECT_EQ(buffer.state(), State::unset);
    EXPECT_EQ(buffer.generation(), 0U);
    EXPECT_EQ(buffer.data(), engine.data());
    const auto range = memory->ledger().find(engine.data());
    ASSERT_TRUE(range);
    EXPECT_EQ(range->name, kName);
    EXPECT_EQ(range->bytes, kCount * sizeof(float));
    buffer.finalize(CopyOf<float>(view(source)), stream);
    EXPECT_EQ(buffer.data(), engine.data());
    EXPECT_EQ(buffer.generation(), 1U);
  }
  EXPECT_EQ(engine.download(), values(2)) << "the memory must still be the engine's";
  EXPECT_TRUE(memory->ledger().live().empty());
  EXPECT_TRUE(memory->ledger().retired().empty()) << "its address did not become stale";
}

TEST_F(StableBuffer, EmptyShapeNeedsNoMemory) {
  Buffer buffer(kName, *memory);
  const auto nothing = [](const Shape& shape) {
    return Custom<float>(shape, [](float*, cudaStream_t) { FAIL() << "nothing is to be filled"; });
  };
  buffer.finalize(nothing({0, kHidden}), stream);
  EXPECT_EQ(buffer.state(), State::live);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.shape(), (Shape{0, kHidden}));
  EXPECT_EQ(buffer.view().shape().elements(), 0);
  EXPECT_TRUE(memory->ledger().live().empty());
  buffer.finalize(nothing({0, kHidden}), stream);
  EXPECT_EQ(buffer.generation(), 2U);
  buffer.mark_use(stream);
  buffer.wait_ready(stream);
  expect_refused(Rule::shape_mismatch, [&] {
    buffer.finalize(Custom<float>({5, kHidden}, [](float*, cudaStream_t) {}), stream);
  });

  Buffer allocated(kName, *memory);
  allocated.allocate({0});
  EXPECT_EQ(allocated.state(), State::unset);
  allocated.finalize(nothing({0}), stream);
  EXPECT_EQ(allocated.state(), State::live);

  Buffer adopted(kName, *memory);
  adopted.adopt(TensorView(static_cast<float*>(nullptr), {0, 3}, 0));
  EXPECT_EQ(adopted.state(), State::unset);
  adopted.finalize(nothing({0, 3}), stream);
  EXPECT_EQ(adopted.data(), nullptr);
}

TEST_F(StableBuffer, FinalizeIsRepeatable) {
  const DeviceArray<float> source(values(7));
  Buffer buffer = filled(source);
  for (int time = 0; time < 5; ++time) {
    buffer.finalize(CopyOf<float>(view(source)), stream);
    EXPECT_EQ(test::download(buffer.data(), kCount), values(7));
  }
  EXPECT_EQ(buffer.generation(), 6U);
}

// --- Refusals

TEST_F(StableBuffer, AnotherShapeIsRefusedAndNothingChanges) {
  const DeviceArray<float> source(values(1));
  Buffer buffer = filled(source);
  float* const address = buffer.data();
  const Shape others[] = {{kRows, kHidden * 2},
                          {kHidden, kRows},
                          {kRows, kHidden, 1},
                          {kRows * kHidden},
                          {kRows, 0},
                          {0},
                          {},
                          {kRows + 1, kHidden}};
  for (const Shape& other : others) {
    const auto refit = [&] {
      buffer.finalize(
          Custom<float>(other, [](float*, cudaStream_t) { FAIL() << "it must not run"; }), stream);
    };
    expect_refused(Rule::shape_mismatch, refit, {kName, "finalize", "[24, 96]", to_string(other)});
    EXPECT_EQ(buffer.data(), address);
    EXPECT_EQ(buffer.generation(), 1U);
    EXPECT_EQ(buffer.state(), State::live);
    EXPECT_EQ(buffer.shape(), kShape);
    EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
  }
  const DeviceArray<float> next(values(2));
  buffer.finalize(CopyOf<float>(view(next)), stream);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(2));
}

TEST_F(StableBuffer, AddressIsGivenOnce) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> engine(kCount);
  Buffer buffer = filled(source);
  float* const address = buffer.data();
  expect_refused(Rule::already_allocated, [&] { buffer.allocate(kShape); }, {kName, "allocate"});
  expect_refused(Rule::already_allocated,
                 [&] { buffer.adopt(TensorView(engine.data(), kShape, 0)); }, {kName, "adopt"});
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
  Buffer allocated(kName, *memory);
  allocated.allocate(kShape);
  expect_refused(Rule::already_allocated, [&] { allocated.allocate(kShape); });
  expect_refused(Rule::shape_mismatch, [&] {
    allocated.finalize(Custom<float>({1}, [](float*, cudaStream_t) {}), stream);
  });
}

TEST_F(StableBuffer, AdoptRefusesWhatItCannotWriteInPlace) {
  const DeviceArray<float> engine(values(1));
  Buffer buffer(kName, *memory);
  const float* read_only = engine.data();
  expect_refused(Rule::read_only, [&] { buffer.adopt(TensorView(read_only, kShape, 0)); });
  const auto* const bucket = reinterpret_cast<const std::byte*>(engine.data());
  expect_refused(Rule::misaligned,
                 [&] { buffer.adopt(TensorView::packed<float>(bucket + 6, {1}, 0)); });
  expect_refused(Rule::read_only,  // a source, also where it happens to be aligned
                 [&] { buffer.adopt(TensorView::packed<float>(bucket + 8, {1}, 0)); });
  expect_refused(Rule::type_mismatch, [&] {
    buffer.adopt(TensorView(reinterpret_cast<std::int32_t*>(engine.data()), kShape, 0));
  });
  expect_refused(Rule::not_contiguous,
                 [&] {
                   buffer.adopt(TensorView(engine.data(), {kHidden, kRows}, {1, kHidden}, 0));
                 },
                 {kName, "adopt"});
  expect_refused(Rule::device_mismatch, [&] { buffer.adopt(TensorView(engine.data(), kShape, 1)); },
                 {kName, "adopt"});
  std::vector<float> host(kCount);
  expect_refused(Rule::device_mismatch, [&] { buffer.adopt(TensorView(host.data(), kShape, 0)); },
                 {kName, "no device memory"});
  EXPECT_EQ(buffer.state(), State::empty);
  EXPECT_TRUE(memory->ledger().live().empty());
  EXPECT_EQ(engine.download(), values(1));
}

TEST_F(StableBuffer, SizeBeyond63BitsIsRefusedBeforeAnyCall) {
  constexpr std::int64_t kTooMany = std::numeric_limits<std::int64_t>::max() / 4 + 1;
  Buffer buffer(kName, *memory);
  expect_refused(Rule::size_overflow, [&] { buffer.allocate({kTooMany}); }, {kName, "allocate"});
  expect_refused(
      Rule::size_overflow,
      [&] { buffer.finalize(Custom<float>({kTooMany}, [](float*, cudaStream_t) {}), stream); },
      {kName, "finalize"});
  EXPECT_EQ(buffer.state(), State::empty);
}

TEST_F(StableBuffer, MemoryThatIsNotThereIsAnErrorAndTheBufferStaysUsable) {
  Buffer buffer(kName, *memory);
  EXPECT_THROW(buffer.allocate({std::int64_t{1} << 50}), holdfast::OutOfMemory);
  EXPECT_EQ(buffer.state(), State::empty);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_TRUE(memory->ledger().live().empty());
  const DeviceArray<float> source(values(1));
  buffer.finalize(CopyOf<float>(view(source)), stream);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, SourceThatOverlapsTheBufferIsRefused) {
  const DeviceArray<float> source(values(1));
  Buffer buffer = filled(source);
  const auto overlap = [&](const TensorView& from) {
    expect_refused(Rule::source_overlaps_target,
                   [&] { buffer.finalize(CopyOf<float>(from), stream); }, {kName, "finalize"});
  };
  overlap(buffer.view());
  const DeviceArray<float> engine(kCount * 2);
  engine.poison();
  Buffer adopted(kName, *memory);
  adopted.adopt(TensorView(engine.data() + kCount, kShape, 0));
  expect_refused(Rule::source_overlaps_target, [&] {
    adopted.finalize(CopyOf<float>(TensorView(engine.data() + 1, kShape, 0)), stream);
  });
  // The neighbour that ends where the buffer begins is no overlap.
  adopted.finalize(CopyOf<float>(TensorView(engine.data(), kShape, 0)), stream);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, RecipeThatThrowsOnTheFirstFinalizeLeavesNothing) {
  Buffer buffer(kName, *memory);
  const Custom<float> failing(kShape, [&](float* out, cudaStream_t on) {
    ok(cudaMemsetAsync(out, 0, kCount * sizeof(float), on));
    throw std::runtime_error("half way");
  });
  EXPECT_THROW(buffer.finalize(failing, stream), std::runtime_error);
  EXPECT_EQ(buffer.state(), State::empty);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.generation(), 0U);
  EXPECT_TRUE(memory->ledger().live().empty());
  EXPECT_TRUE(memory->ledger().retired().empty()) << "nobody ever learnt that address";
  const DeviceArray<float> source(values(1));
  buffer.finalize(CopyOf<float>(view(source)), stream);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, RecipeThatThrowsLaterLeavesTheAddressAndSaysUnset) {
  const DeviceArray<float> source(values(1));
  Buffer buffer = filled(source);
  float* const address = buffer.data();
  const Custom<float> failing(kShape, [](float*, cudaStream_t) { throw std::runtime_error("no"); });
  EXPECT_THROW(buffer.finalize(failing, stream), std::runtime_error);
  EXPECT_EQ(buffer.state(), State::unset);
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.generation(), 1U);
  buffer.finalize(CopyOf<float>(view(source)), stream);
  EXPECT_EQ(buffer.state(), State::live);
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.generation(), 2U);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, TwoChangesAtOnceGiveBusy) {
  const DeviceArray<float> source(values(1));
  Buffer buffer = filled(source);
  std::optional<Reason> found;
  bool busy_allocate = false;
  const Custom<float> slow(kShape, [&](float* out, cudaStream_t on) {
    std::thread([&] {
      const auto other = [&] { buffer.finalize(CopyOf<float>(view(source)), stream); };
      try {
        other();
      } catch (const RefitError& error) {
        found = error.reason();
        EXPECT_NE(std::string(error.what()).find(kName), std::string::npos);
      }
      try {
        buffer.allocate(kShape);
      } catch (const RefitError&) {
        busy_allocate = true;
      }
    }).join();
    ok(cudaMemsetAsync(out, 0, kCount * sizeof(float), on));
  });
  buffer.finalize(slow, stream);
  EXPECT_EQ(found, Reason::busy);
  EXPECT_TRUE(busy_allocate);
  EXPECT_EQ(buffer.generation(), 2U) << "the other one must not have counted";
  buffer.finalize(CopyOf<float>(view(source)), stream);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

// --- Capture

TEST_F(StableBuffer, FirstFinalizeInCaptureIsRefusedAndTheCaptureStaysValid) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  output.poison();
  for (const Capture policy : {Capture::refuse, Capture::record}) {
    Buffer buffer(kName, *memory);
    const Graph graph(stream, [&] {
      expect_refused(Rule::allocation_in_capture,
                     [&] { buffer.finalize(CopyOf<float>(view(source)), policy, stream); },
                     {kName, "finalize", "before capture"});
      enqueue_copy(output.data(), source.data(), stream);
    });
    EXPECT_EQ(graph.nodes(), 1U);
    EXPECT_EQ(buffer.state(), State::empty);
    EXPECT_TRUE(memory->ledger().live().empty());
    graph.launch(stream);
    EXPECT_EQ(output.download(), values(1));
  }
}

TEST_F(StableBuffer, LaterFinalizeInCaptureIsRefusedAndTheCaptureStaysValid) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  const DeviceArray<float> output(kCount);
  Buffer buffer = filled(source);
  sync();
  const Graph graph(stream, [&] {
    expect_refused(Rule::refit_in_capture,
                   [&] { buffer.finalize(CopyOf<float>(view(next)), stream); },
                   {kName, "finalize", "before capture"});
    enqueue_copy(output.data(), buffer.data(), stream);
  });
  EXPECT_EQ(graph.nodes(), 1U);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(buffer.state(), State::live);
  graph.launch(stream);
  EXPECT_EQ(output.download(), values(1));
}

TEST_F(StableBuffer, RecordPutsTheRecomputeIntoTheGraph) {
  DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  Buffer buffer = filled(source);
  float* const address = buffer.data();
  sync();
  const Graph graph(stream, [&] {
    buffer.finalize(CopyOf<float>(view(source)), Capture::record, stream);
    enqueue_copy(output.data(), buffer.data(), stream);
  });
  EXPECT_EQ(graph.nodes(), 2U);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1)) << "capturing computes nothing";
  for (int round = 2; round <= 3; ++round) {
    source.upload(values(round));
    output.poison();
    graph.launch(stream);
    EXPECT_EQ(output.download(), values(round));
    EXPECT_EQ(test::download(buffer.data(), kCount), values(round));
  }
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.generation(), 1U) << "recorded recomputes are not counted";
  source.upload(values(4));
  buffer.finalize(CopyOf<float>(view(source)), stream);
  EXPECT_EQ(buffer.generation(), 2U);
}

TEST_F(StableBuffer, RecordIntoAnAllocatedBufferLeavesItUnset) {
  const DeviceArray<float> source(values(1));
  Buffer buffer(kName, *memory);
  buffer.allocate(kShape);
  const Graph graph(stream,
                    [&] { buffer.finalize(CopyOf<float>(view(source)), Capture::record, stream); });
  EXPECT_EQ(buffer.state(), State::unset);
  EXPECT_EQ(buffer.generation(), 0U);
  graph.launch(stream);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, RecordOutsideACaptureIsAnOrdinaryFinalize) {
  const DeviceArray<float> source(values(1));
  Buffer buffer(kName, *memory);
  buffer.finalize(CopyOf<float>(view(source)), Capture::record, stream);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, BrokenCaptureIsRefusedNotRecorded) {
  const DeviceArray<float> source(values(1));
  Buffer buffer = filled(source);
  sync();
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  void* refused = nullptr;
  EXPECT_EQ(cudaMalloc(&refused, 256), cudaErrorStreamCaptureUnsupported);  // breaks the capture
  (void)cudaGetLastError();
  expect_refused(Rule::refit_in_capture,
                 [&] { buffer.finalize(CopyOf<float>(view(source)), Capture::record, stream); });
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  (void)cudaGetLastError();
  EXPECT_EQ(buffer.state(), State::live);
}

// Blocking streams apart: they are bound to the legacy stream, which an implicit wait would go
// through.
TEST_F(StableBuffer, AllocationAndFreeDisturbNoCaptureOfThisThread) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  const Stream other;
  for (const unsigned flags : {cudaStreamNonBlocking, cudaStreamDefault}) {
    const Stream captured(flags);
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                            cudaStreamCaptureModeRelaxed}) {
      SCOPED_TRACE(std::to_string(flags) + ", mode " + std::to_string(mode));
      output.poison();
      auto doomed = std::make_optional(filled(source));
      sync();
      const Graph graph(
          captured,
          [&] {
            Buffer allocated(kName, *memory);
            allocated.allocate(kShape);
            Buffer fresh(kName, *memory);
            fresh.finalize(CopyOf<float>(view(source)), other);  // another stream: not in the graph
            fresh.mark_use(other);
            fresh.finalize(CopyOf<float>(view(source)), other);
            doomed.reset();
            enqueue_copy(output.data(), source.data(), captured);
          },
          mode);
      EXPECT_EQ(graph.nodes(), 1U);
      graph.launch(captured);
      EXPECT_EQ(output.download(), values(1));
      EXPECT_TRUE(memory->ledger().live().empty());
    }
  }
}

TEST_F(StableBuffer, AllocationAndFreeDisturbNoCaptureOfAnotherThread) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  for (const unsigned flags : {cudaStreamNonBlocking, cudaStreamDefault}) {
    SCOPED_TRACE(flags);
    output.poison();
    const Stream captured(flags);
    std::atomic<int> step{0};
    const auto reached = [&](int wanted) {
      while (step.load() < wanted) std::this_thread::yield();
    };
    std::unique_ptr<Graph> graph;
    std::thread capturing([&] {
      try {
        graph = std::make_unique<Graph>(captured, [&] {
          step = 1;
          reached(2);
          enqueue_copy(output.data(), source.data(), captured);
        });
      } catch (const std::exception& error) {
        ADD_FAILURE() << "the capture did not survive: " << error.what();
      }
    });
    reached(1);
    {
      const Stream mine;
      Buffer buffer(kName, *memory);
      buffer.finalize(CopyOf<float>(view(source)), mine);
      buffer.finalize(CopyOf<float>(view(source)), mine);
      buffer.mark_use(mine);
      Buffer allocated(kName, *memory);
      allocated.allocate(kShape);
    }  // both are freed here, during the capture
    EXPECT_TRUE(memory->ledger().live().empty());
    step = 2;
    capturing.join();
    ASSERT_NE(graph, nullptr);
    graph->launch(captured);
    EXPECT_EQ(output.download(), values(1));
  }
}

TEST_F(StableBuffer, LegacyStreamIsRefusedWhileABlockingStreamCaptures) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  const Stream blocking(cudaStreamDefault);
  Buffer buffer = filled(source);
  sync();
  const cudaStream_t legacy = nullptr;
  const Graph graph(blocking, [&] {
    for (const Capture policy : {Capture::refuse, Capture::record}) {
      expect_refused(Rule::refit_in_capture,
                     [&] { buffer.finalize(CopyOf<float>(view(source)), policy, legacy); });
    }
    Buffer fresh(kName, *memory);
    expect_refused(Rule::allocation_in_capture,
                   [&] { fresh.finalize(CopyOf<float>(view(source)), legacy); });
    expect_refused(Rule::order_in_capture, [&] { buffer.mark_use(legacy); });
    enqueue_copy(output.data(), source.data(), blocking);
  });
  graph.launch(blocking);
  EXPECT_EQ(output.download(), values(1));
}

TEST_F(StableBuffer, MarksAreRefusedInCaptureAndTheCaptureStaysValid) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  const Buffer buffer = filled(source);
  sync();
  const Graph graph(stream, [&] {
    expect_refused(Rule::order_in_capture, [&] { buffer.mark_use(stream); },
                   {kName, "mark_use", "before capture"});
    expect_refused(Rule::order_in_capture, [&] { buffer.wait_ready(stream); },
                   {kName, "wait_ready", "before capture"});
    enqueue_copy(output.data(), buffer.data(), stream);
  });
  EXPECT_EQ(graph.nodes(), 1U);
  graph.launch(stream);
  EXPECT_EQ(output.download(), values(1));
}

// --- Streams and order

TEST_F(StableBuffer, StreamZeroIsTheLegacyStream) {
  const DeviceArray<float> source(values(1));
  const cudaStream_t zero = nullptr;
  Buffer buffer(kName, *memory);
  cudaStream_t seen = zero;
  const Custom<float> recipe(kShape, [&](float* out, cudaStream_t on) {
    seen = on;
    enqueue_copy(out, source.data(), on);
  });
  buffer.finalize(recipe, zero);
  buffer.mark_use(zero);
  buffer.wait_ready(zero);
  EXPECT_EQ(seen, cudaStreamLegacy);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

TEST_F(StableBuffer, FinalizeWaitsForMarkedUses) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  const DeviceArray<float> output(kCount);
  const Stream reader;
  Buffer buffer = filled(source);
  sync();
  enqueue_delay(reader);
  enqueue_copy(output.data(), buffer.data(), reader);
  buffer.mark_use(reader);
  buffer.finalize(CopyOf<float>(view(next)), stream);
  sync();
  EXPECT_EQ(output.download(), values(1)) << "the read was enqueued and marked before the refit";
  EXPECT_EQ(test::download(buffer.data(), kCount), values(2));
}

TEST_F(StableBuffer, FinalizeWaitsForTheUsesOfEveryStream) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  const Stream readers[3];
  const DeviceArray<float> outputs[3]{DeviceArray<float>(kCount), DeviceArray<float>(kCount),
                                      DeviceArray<float>(kCount)};
  Buffer buffer = filled(source);
  sync();
  for (std::size_t i = 0; i < 3; ++i) {
    enqueue_delay(readers[i]);
    enqueue_copy(outputs[i].data(), buffer.data(), readers[i]);
    buffer.mark_use(readers[i]);
  }
  buffer.finalize(CopyOf<float>(view(next)), stream);
  sync();
  for (const auto& output : outputs) EXPECT_EQ(output.download(), values(1));
}

TEST_F(StableBuffer, MarkReachesAsFarAsTheLastCall) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  const DeviceArray<float> output(kCount);
  const Stream reader;
  Buffer buffer = filled(source);
  sync();
  buffer.mark_use(reader);  // an early mark, which the later one must replace
  ok(cudaStreamSynchronize(reader));
  enqueue_delay(reader);
  enqueue_copy(output.data(), buffer.data(), reader);
  buffer.mark_use(reader);
  buffer.finalize(CopyOf<float>(view(next)), stream);
  sync();
  EXPECT_EQ(output.download(), values(1));
}

TEST_F(StableBuffer, FinalizeOnAnotherStreamComesAfterTheEarlierFill) {
  const DeviceArray<float> first(values(1));
  const DeviceArray<float> second(values(2));
  const Stream other;
  Buffer buffer(kName, *memory);
  enqueue_delay(stream);
  buffer.finalize(CopyOf<float>(view(first)), stream);
  buffer.finalize(CopyOf<float>(view(second)), other);
  ok(cudaStreamSynchronize(other));
  sync();
  EXPECT_EQ(test::download(buffer.data(), kCount), values(2)) << "the later finalize wins";
}

TEST_F(StableBuffer, WaitReadyOrdersAReaderAfterTheFill) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  const DeviceArray<float> output(kCount);
  const Stream reader;
  Buffer buffer = filled(source);
  sync();
  enqueue_delay(stream);
  buffer.finalize(CopyOf<float>(view(next)), stream);
  buffer.wait_ready(reader);
  enqueue_copy(output.data(), buffer.data(), reader);
  ok(cudaStreamSynchronize(reader));
  EXPECT_EQ(output.download(), values(2));
}

TEST_F(StableBuffer, StreamsThatComeAndGoAreToldApart) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  Buffer buffer = filled(source);
  sync();
  for (int round = 0; round < 40; ++round) {
    const DeviceArray<float> output(kCount);
    const Stream passing;  // its handle is likely the one of the round before
    enqueue_copy(output.data(), buffer.data(), passing);
    buffer.mark_use(passing);
    buffer.finalize(CopyOf<float>(view(round % 2 == 0 ? next : source)), stream);
    sync();
    EXPECT_EQ(output.download(), values(round % 2 == 0 ? 1 : 2));
  }
}

TEST_F(StableBuffer, AStreamWithTheHandleOfADestroyedOneIsAnotherStream) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> next(values(2));
  const DeviceArray<float> output(kCount);
  Buffer buffer = filled(source);
  sync();
  cudaStream_t gone = nullptr;
  ok(cudaStreamCreateWithFlags(&gone, cudaStreamNonBlocking));
  enqueue_delay(gone);
  enqueue_copy(output.data(), buffer.data(), gone);
  buffer.mark_use(gone);
  ok(cudaStreamDestroy(gone));  // its work goes on
  const Stream successor;
  if (static_cast<cudaStream_t>(successor) != gone) GTEST_SKIP() << "the handle was not reused";
  buffer.finalize(CopyOf<float>(view(next)), successor);
  ok(cudaStreamSynchronize(successor));
  EXPECT_EQ(output.download(), values(1));
}

TEST_F(StableBuffer, RefitOnAnotherStreamComesAfterWhatAFailedRecipeEnqueued) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> half(values(2));
  const DeviceArray<float> next(values(3));
  const Stream other;
  Buffer buffer = filled(source);
  sync();
  const Custom<float> failing(kShape, [&](float* out, cudaStream_t on) {
    enqueue_delay(on);
    enqueue_copy(out, half.data(), on);
    throw std::runtime_error("half way");
  });
  EXPECT_THROW(buffer.finalize(failing, stream), std::runtime_error);
  buffer.finalize(CopyOf<float>(view(next)), other);
  ok(cudaStreamSynchronize(other));
  sync();
  EXPECT_EQ(test::download(buffer.data(), kCount), values(3));
}

TEST_F(StableBuffer, WaitReadyRefusesContentsThatNoFinalizeMade) {
  const DeviceArray<float> source(values(1));
  Buffer buffer(kName, *memory);
  buffer.allocate(kShape);
  const auto refused = [&] {
    try {
      buffer.wait_ready(stream);
    } catch (const RefitError& error) {
      EXPECT_NE(std::string(error.what()).find(kName), std::string::npos);
      return error.reason() == Reason::unset;
    }
    return false;
  };
  EXPECT_TRUE(refused());
  buffer.finalize(CopyOf<float>(view(source)), stream);
  buffer.wait_ready(stream);
  EXPECT_THROW(
      buffer.finalize(Custom<float>(kShape, [](float*, cudaStream_t) { throw 1; }), stream), int);
  EXPECT_TRUE(refused());
}

/// Hands out memory of its own, and reuses it at once when it comes back: it writes over it, and
/// waits for nothing else. What the buffer should have waited for is then seen.
class EagerPool {
 public:
  EagerPool() {
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ok(cudaMalloc(&memory_, kCount * sizeof(float)));
  }
  ~EagerPool() {
    (void)cudaFree(memory_);
    (void)cudaStreamDestroy(stream_);
  }
  EagerPool(const EagerPool&) = delete;
  EagerPool& operator=(const EagerPool&) = delete;

  [[nodiscard]] void* allocate(std::size_t bytes) {
    if (bytes > kCount * sizeof(float))
      throw holdfast::OutOfMemory(cudaErrorMemoryAllocation, "pool");
    return static_cast<std::byte*>(memory_) + shift_;
  }
  void deallocate(void* address, std::size_t bytes) noexcept {
    (void)cudaMemsetAsync(address, 0xCB, bytes, stream_);
    (void)cudaStreamSynchronize(stream_);
    ++returned_;
  }
  [[nodiscard]] int device() const noexcept { return 0; }
  [[nodiscard]] holdfast::AddressLedger& ledger() noexcept { return ledger_; }

  /// From now on addresses are no multiple of 256.
  void misalign() { shift_ = 64; }
  [[nodiscard]] int returned() const { return returned_; }
  [[nodiscard]] const float* memory() const { return static_cast<const float*>(memory_); }

 private:
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  std::size_t shift_ = 0;
  int returned_ = 0;
  holdfast::AddressLedger ledger_;
};
static_assert(holdfast::MemoryResource<EagerPool>);

TEST_F(StableBuffer, MemoryGoesBackOnlyWhenMarkedUsesAreDone) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  const Stream reader;
  EagerPool pool;
  {
    Buffer buffer(kName, pool);
    buffer.finalize(CopyOf<float>(view(source)), stream);
    buffer.wait_ready(reader);
    enqueue_delay(reader);
    enqueue_copy(output.data(), buffer.data(), reader);
    buffer.mark_use(reader);
  }
  EXPECT_EQ(pool.returned(), 1);
  ok(cudaStreamSynchronize(reader));
  EXPECT_EQ(output.download(), values(1));
}

TEST_F(StableBuffer, MemoryGoesBackOnlyWhenItsFillsAreDone) {
  const DeviceArray<float> source(values(1));
  EagerPool pool;
  const auto expect_untouched_since = [&] {
    EXPECT_EQ(pool.returned(), 1);
    sync();
    for (const float value : test::download(pool.memory(), kCount)) {
      ASSERT_EQ(test::bits<std::uint32_t>(value), 0xCBCBCBCBU) << "written after it went back";
    }
  };
  const auto fill_late = [&](float* out, cudaStream_t on) {
    enqueue_delay(on);
    enqueue_copy(out, source.data(), on);
  };
  {
    Buffer buffer(kName, pool);
    buffer.finalize(Custom<float>(kShape, fill_late), stream);
  }
  expect_untouched_since();
}

TEST_F(StableBuffer, MemoryOfAFailedFirstFillGoesBackOnlyWhenItIsDone) {
  const DeviceArray<float> source(values(1));
  EagerPool pool;
  Buffer buffer(kName, pool);
  EXPECT_THROW(buffer.finalize(Custom<float>(kShape,
                                             [&](float* out, cudaStream_t on) {
                                               enqueue_delay(on);
                                               enqueue_copy(out, source.data(), on);
                                               throw std::runtime_error("half way");
                                             }),
                               stream),
               std::runtime_error);
  EXPECT_EQ(pool.returned(), 1);
  sync();
  for (const float value : test::download(pool.memory(), kCount)) {
    ASSERT_EQ(test::bits<std::uint32_t>(value), 0xCBCBCBCBU) << "written after it went back";
  }
}

TEST_F(StableBuffer, AddressesOfAResourceAreChecked) {
  EagerPool pool;
  pool.misalign();
  Buffer buffer(kName, pool);
  expect_refused(Rule::misaligned, [&] { buffer.allocate({8}); }, {"256"});
  EXPECT_EQ(pool.returned(), 1);
  EXPECT_EQ(buffer.state(), State::empty);
}

TEST_F(StableBuffer, AdoptedMemoryMustHoldTheShapeAndBelongToNoOtherBuffer) {
  const DeviceArray<float> engine(kCount);
  engine.poison();
  Buffer buffer(kName, *memory);
  expect_refused(Rule::shape_mismatch,
                 [&] { buffer.adopt(TensorView(engine.data(), {kRows * kHidden + 1}, 0)); },
                 {kName, "adopt"});
  expect_refused(Rule::shape_mismatch,
                 [&] { buffer.adopt(TensorView(engine.data() + 1, kShape, 0)); });
  buffer.adopt(TensorView(engine.data() + kCount / 2, {kRows * kHidden / 2}, 0));
  Buffer second("second", *memory);
  expect_refused(Rule::address_taken, [&] { second.adopt(TensorView(engine.data(), kShape, 0)); },
                 {"second", kName});
  EXPECT_EQ(second.state(), State::empty);
  second.adopt(TensorView(engine.data(), {kRows * kHidden / 2}, 0));  // its neighbour
}

TEST_F(StableBuffer, AllocatedMemoryMustBelongToNoOtherBuffer) {
  // A resource that hands out what an adopted buffer still holds: the engine freed it too early.
  EagerPool pool;
  Buffer adopted("adopted", pool);
  adopted.adopt(TensorView(const_cast<float*>(pool.memory()), kShape, 0));
  const DeviceArray<float> source(values(1));
  Buffer buffer(kName, pool);
  const auto refused = [&](const auto& call) {
    expect_refused(Rule::address_taken, call, {kName, "adopted"});
    EXPECT_EQ(buffer.state(), State::empty);
    EXPECT_EQ(pool.ledger().live().size(), 1U);
  };
  refused([&] { buffer.allocate(kShape); });
  refused([&] { buffer.finalize(CopyOf<float>(view(source)), stream); });
  EXPECT_EQ(pool.returned(), 2);
}

TEST_F(StableBuffer, OfTwoThreadsThatAdoptTheSameMemoryOneGetsIt) {
  const DeviceArray<float> engine(kCount);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> ready{0};
    std::atomic<int> refused{0};
    std::vector<Buffer> buffers;
    for (int i = 0; i < 2; ++i) buffers.emplace_back(kName, *memory);
    {
      std::vector<std::jthread> threads;
      for (Buffer& buffer : buffers) {
        threads.emplace_back([&] {
          ready.fetch_add(1);
          while (ready.load() < 2) std::this_thread::yield();
          try {
            buffer.adopt(TensorView(engine.data(), kShape, 0));
          } catch (const ContractError& error) {
            if (error.rule() == Rule::address_taken) refused.fetch_add(1);
          }
        });
      }
    }
    ASSERT_EQ(refused.load(), 1);
    ASSERT_EQ(memory->ledger().live().size(), 1U);
  }
}

TEST_F(StableBuffer, DestructorWaitsForFillsAndMarkedUses) {
  const DeviceArray<float> source(values(1));
  const DeviceArray<float> output(kCount);
  const DeviceArray<float> engine(values(5));
  const Stream reader;
  {
    Buffer buffer = filled(source);
    sync();
    enqueue_delay(reader);
    enqueue_copy(output.data(), buffer.data(), reader);
    buffer.mark_use(reader);
  }
  // Whoever gets the memory now must not be able to disturb the read.
  const DeviceArray<float> hog(std::vector<float>(kCount, std::numeric_limits<float>::quiet_NaN()));
  ok(cudaStreamSynchronize(reader));
  EXPECT_EQ(output.download(), values(1));
  {
    Buffer adopted(kName, *memory);
    adopted.adopt(TensorView(engine.data(), kShape, 0));
    enqueue_delay(stream);
    adopted.finalize(CopyOf<float>(view(source)), stream);
  }
  // An adopted buffer frees nothing, but must not write after its end either.
  std::vector<float> now(kCount);
  ok(cudaMemcpyAsync(now.data(), engine.data(), kCount * sizeof(float), cudaMemcpyDeviceToHost,
                     reader));
  ok(cudaStreamSynchronize(reader));
  EXPECT_EQ(now, values(1));
  {
    Buffer adopted(kName, *memory);
    adopted.adopt(TensorView(engine.data(), kShape, 0));
    enqueue_delay(reader);
    enqueue_copy(output.data(), engine.data(), reader);
    adopted.mark_use(reader);
  }
  // The engine may now do what it likes with its memory.
  ok(cudaMemsetAsync(engine.data(), 0xCB, kCount * sizeof(float), stream));
  sync();
  ok(cudaStreamSynchronize(reader));
  EXPECT_EQ(output.download(), values(1));
}

// --- Ownership

TEST_F(StableBuffer, MovingKeepsTheAddressAndDisarmsTheSource) {
  const DeviceArray<float> source(values(1));
  std::vector<Buffer> buffers;
  std::vector<float*> addresses;
  for (int i = 0; i < 9; ++i) {  // the vector grows several times
    buffers.push_back(filled(source));
    addresses.push_back(buffers.back().data());
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) EXPECT_EQ(buffers[i].data(), addresses[i]);
  EXPECT_TRUE(memory->ledger().retired().empty());

  Buffer moved = std::move(buffers[0]);
  EXPECT_EQ(moved.data(), addresses[0]);
  EXPECT_EQ(moved.generation(), 1U);
  Buffer& gone = buffers[0];
  EXPECT_EQ(gone.data(), nullptr);
  EXPECT_EQ(gone.state(), State::empty);
  EXPECT_EQ(gone.generation(), 0U);
  const DeviceArray<float> next(values(2));
  expect_refused(Rule::moved_from, [&] { gone.finalize(CopyOf<float>(view(next)), stream); },
                 {"finalize"});
  expect_refused(Rule::moved_from, [&] { gone.allocate(kShape); });
  expect_refused(Rule::moved_from, [&] { gone.adopt(TensorView(next.data(), kShape, 0)); });
  expect_refused(Rule::moved_from, [&] { gone.mark_use(stream); });
  expect_refused(Rule::moved_from, [&] { gone.wait_ready(stream); });
  expect_refused(Rule::moved_from, [&] { (void)gone.view(); });
  expect_refused(Rule::moved_from, [&] { (void)gone.shape(); });
  expect_refused(Rule::moved_from, [&] { (void)gone.name(); });
  expect_refused(Rule::moved_from, [&] { (void)gone.device(); });
  EXPECT_EQ(test::download(moved.data(), kCount), values(1));
  moved.finalize(CopyOf<float>(view(next)), stream);
  EXPECT_EQ(test::download(addresses[0], kCount), values(2));
}

TEST_F(StableBuffer, MoveAssignmentGivesUpWhatTheLeftSideHeld) {
  const DeviceArray<float> source(values(1));
  Buffer left = filled(source);
  Buffer right = filled(source);
  const auto left_address = reinterpret_cast<std::uintptr_t>(left.data());
  float* const right_address = right.data();
  left = std::move(right);
  EXPECT_EQ(left.data(), right_address);
  const auto retired = memory->ledger().retired();
  ASSERT_EQ(retired.size(), 1U);
  EXPECT_EQ(retired[0].base, left_address);
  EXPECT_EQ(memory->ledger().live().size(), 1U);
}

TEST_F(StableBuffer, LedgerNamesWhatLivesAndWhatLived) {
  const DeviceArray<float> source(values(1));
  std::uintptr_t base = 0;
  std::uint64_t id = 0;
  {
    const Buffer buffer = filled(source);
    base = reinterpret_cast<std::uintptr_t>(buffer.data());
    const auto live = memory->ledger().live();
    ASSERT_EQ(live.size(), 1U);
    EXPECT_EQ(live[0].name, kName);
    EXPECT_EQ(live[0].base, base);
    EXPECT_EQ(live[0].bytes, kCount * sizeof(float));
    EXPECT_EQ(live[0].device, 0);
    id = live[0].backing.at(0).buffer_id;
    EXPECT_TRUE(memory->ledger().find(buffer.data() + kCount - 1));
    EXPECT_FALSE(memory->ledger().find(buffer.data() + kCount));
  }
  EXPECT_TRUE(memory->ledger().live().empty());
  const auto retired = memory->ledger().retired();
  ASSERT_EQ(retired.size(), 1U);
  EXPECT_EQ(retired[0].name, kName);
  EXPECT_EQ(retired[0].base, base);
  EXPECT_EQ(retired[0].backing.at(0).buffer_id, id);
  const Buffer again = filled(source);
  EXPECT_NE(allocation_id(again), id) << "also at the same address it is another allocation";
}

TEST_F(StableBuffer, ManyRefitsUseNoMoreMemory) {
  const DeviceArray<float> source(values(1));
  const Stream other;
  Buffer buffer = filled(source);
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    ok(cudaDeviceSynchronize());
    ok(cudaMemGetInfo(&free, &total));
    return free;
  };
  const auto refit = [&](int round) {
    buffer.finalize(CopyOf<float>(view(source)), round % 2 == 0 ? cudaStream_t{stream} : other);
    buffer.mark_use(other);
  };
  for (int round = 0; round < 10; ++round) refit(round);
  const std::size_t before = free_bytes();
  const int rounds = test::simulated() ? 1000 : 10000;
  for (int round = 0; round < rounds; ++round) refit(round);
  EXPECT_EQ(free_bytes(), before);
  EXPECT_EQ(buffer.generation(), static_cast<std::uint64_t>(11 + rounds));
  EXPECT_EQ(memory->ledger().live().size(), 1U);
}

// --- Threads

TEST_F(StableBuffer, ObserversAndMarksAreSafeBesideFinalize) {
  const DeviceArray<float> source(values(1));
  Buffer buffer(kName, *memory);
  std::atomic<bool> done{false};
  std::atomic<float*> address{nullptr};
  std::atomic<bool> moved{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      try {
        const Stream mine;
        std::uint64_t last = 0;
        while (!done) {
          const State state = buffer.state();
          const std::uint64_t generation = buffer.generation();
          EXPECT_GE(generation, last);
          last = generation;
          if (state == State::empty) continue;
          float* const now = buffer.data();
          float* expected = nullptr;
          if (!address.compare_exchange_strong(expected, now) && expected != now) moved = true;
          EXPECT_EQ(buffer.shape(), kShape);
          buffer.wait_ready(mine);
          buffer.mark_use(mine);
        }
        ok(cudaStreamSynchronize(mine));
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  for (int round = 0; round < 200; ++round) buffer.finalize(CopyOf<float>(view(source)), stream);
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(moved);
  EXPECT_EQ(buffer.generation(), 200U);
  EXPECT_EQ(test::download(buffer.data(), kCount), values(1));
}

// --- Devices

class StableBufferOnTwoDevices : public StableBuffer {
 protected:
  void SetUp() override {
    StableBuffer::SetUp();
    if (stream == nullptr) return;
    int count = 0;
    ok(cudaGetDeviceCount(&count));
    if (count < 2) GTEST_SKIP() << "needs two devices, found " << count;
    ok(cudaSetDevice(1));
    ok(cudaStreamCreateWithFlags(&stream1, cudaStreamNonBlocking));
    source1 = std::make_unique<DeviceArray<float>>(values(1));
    memory1.emplace(1);
    ok(cudaSetDevice(0));
  }
  void TearDown() override {
    source1.reset();
    if (stream1 != nullptr) {
      EXPECT_EQ(cudaStreamSynchronize(stream1), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(stream1), cudaSuccess);
    }
    StableBuffer::TearDown();
  }
  [[nodiscard]] CopyOf<float> recipe1() const {
    return CopyOf<float>(TensorView(source1->data(), kShape, 1));
  }
  void expect_device_0() const {
    int device = -1;
    ok(cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
  }

  cudaStream_t stream1 = nullptr;
  std::unique_ptr<DeviceArray<float>> source1;
  std::optional<DeviceResource> memory1;
};

TEST_F(StableBufferOnTwoDevices, EveryOperationActsOnTheBuffersDeviceAndRestoresTheCallers) {
  {
    Buffer buffer(kName, *memory1);
    buffer.finalize(recipe1(), stream1);
    expect_device_0();
    cudaPointerAttributes attributes{};
    ok(cudaPointerGetAttributes(&attributes, buffer.data()));
    EXPECT_EQ(attributes.device, 1);
    buffer.finalize(recipe1(), stream1);
    expect_device_0();
    buffer.mark_use(stream1);
    buffer.wait_ready(stream1);
    expect_device_0();
    ok(cudaStreamSynchronize(stream1));
    std::vector<float> found(kCount);
    ok(cudaMemcpy(found.data(), buffer.data(), kCount * sizeof(float), cudaMemcpyDeviceToHost));
    EXPECT_EQ(found, values(1));
    Buffer allocated(kName, *memory1);
    allocated.allocate(kShape);
    expect_device_0();
  }
  expect_device_0();
  EXPECT_EQ(memory1->ledger().retired().size(), 2U);
  EXPECT_EQ(memory1->leaked_bytes(), 0U);
}

TEST_F(StableBufferOnTwoDevices, AnotherDevicesStreamOrSourceIsRefused) {
  const DeviceArray<float> source0(values(2));
  Buffer buffer(kName, *memory1);
  expect_refused(Rule::device_mismatch, [&] { buffer.finalize(recipe1(), stream); },
                 {kName, "finalize", "device 1", "device 0"});
  expect_refused(Rule::device_mismatch,
                 [&] { buffer.finalize(CopyOf<float>(view(source0)), stream1); },
                 {kName, "source"});
  const cudaStream_t legacy = nullptr;  // the current device's, which is 0
  expect_refused(Rule::device_mismatch, [&] { buffer.finalize(recipe1(), legacy); });
  EXPECT_EQ(buffer.state(), State::empty);
  EXPECT_TRUE(memory1->ledger().live().empty());
  buffer.finalize(recipe1(), stream1);
  float* const address = buffer.data();
  expect_refused(Rule::device_mismatch, [&] { buffer.finalize(recipe1(), stream); });
  expect_refused(Rule::device_mismatch, [&] { buffer.mark_use(stream); });
  expect_refused(Rule::device_mismatch, [&] { buffer.wait_ready(stream); });
  expect_device_0();
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(buffer.state(), State::live);
}

TEST_F(StableBufferOnTwoDevices, RecordNeedsTheBuffersDeviceToBeCurrent) {
  Buffer buffer(kName, *memory1);
  buffer.finalize(recipe1(), stream1);
  ok(cudaStreamSynchronize(stream1));
  const Graph refused(stream, [&] {
    expect_refused(Rule::device_mismatch,
                   [&] { buffer.finalize(recipe1(), Capture::record, stream); },
                   {kName, "device 1"});
  });
  EXPECT_EQ(refused.nodes(), 0U);
  ok(cudaSetDevice(1));
  const Graph recorded(stream1, [&] { buffer.finalize(recipe1(), Capture::record, stream1); });
  EXPECT_EQ(recorded.nodes(), 1U);
  ok(cudaSetDevice(0));
}

// A recipe of the user's that leaves another device current than it found.
TEST_F(StableBufferOnTwoDevices, DeviceIsRestoredWhateverTheRecipeLeaves) {
  const DeviceArray<float> source0(values(2));
  const auto leaving = [this](int device, const float* source, bool fails) {
    return Custom<float>(kShape, [=, this](float* out, cudaStream_t on) {
      enqueue_delay(on);
      enqueue_copy(out, source, on);
      ok(cudaSetDevice(device));
      if (fails) throw std::runtime_error("no");
    });
  };
  Buffer here(kName, *memory);
  Buffer there(kName, *memory1);
  for (const bool fails : {true, false, true, false}) {  // first and later fills
    const auto finalize = [fails](auto& buffer, const auto& recipe, cudaStream_t on) {
      if (fails) {
        EXPECT_THROW(buffer.finalize(recipe, on), std::runtime_error);
      } else {
        buffer.finalize(recipe, on);
      }
    };
    finalize(here, leaving(1, source0.data(), fails), stream);
    expect_device_0();
    if (!fails) {  // marked by an event of the buffer's device, and so not waited for
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    }
    finalize(there, leaving(0, source1->data(), fails), stream1);
    expect_device_0();
    finalize(there, leaving(1, source1->data(), fails), stream1);
    expect_device_0();
  }
  // The marks were made on the buffers' devices.
  here.wait_ready(stream);
  there.wait_ready(stream1);
  EXPECT_EQ(test::download(here.data(), kCount), values(2));
  ok(cudaStreamSynchronize(stream1));
  EXPECT_EQ(test::download(there.data(), kCount), values(1));
  const Graph recorded(
      stream, [&] { here.finalize(leaving(1, source0.data(), false), Capture::record, stream); });
  expect_device_0();
  (void)cudaGetLastError();  // "not ready" is no failure, and stays behind
}

TEST_F(StableBufferOnTwoDevices, DeviceIsRestoredWhenTheRecipeThrows) {
  Buffer buffer(kName, *memory1);
  int seen = -1;
  const Custom<float> failing(kShape, [&](float*, cudaStream_t) {
    ok(cudaGetDevice(&seen));
    throw std::runtime_error("no");
  });
  EXPECT_THROW(buffer.finalize(failing, stream1), std::runtime_error);
  EXPECT_EQ(seen, 1) << "a recipe runs with the buffer's device current";
  expect_device_0();
}

}  // namespace
