// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// What the tests of this library take for granted about the CUDA runtime, one fact per test.
//
// Written against CUDA alone and linked twice: with the simulation, and with the real runtime on a
// GPU, which then confirms what the simulation claims. Nothing here may depend on when work runs
// that nothing waits for, and host functions wait only for gates that the test opens before it
// waits itself.
#include "support/runtime.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kBytes = 4096;
constexpr auto kAWhile = std::chrono::milliseconds(20);

// Work that cannot finish until the test opens it.
class Gate {
 public:
  void open() { open_.store(true); }
  static void pass(void* self) {
    while (!static_cast<Gate*>(self)->open_.load()) std::this_thread::yield();
  }

 private:
  std::atomic<bool> open_{false};
};

void sleep_then_set(void* flag) {
  std::this_thread::sleep_for(kAWhile);
  static_cast<std::atomic<bool>*>(flag)->store(true);
}

void sleep_a_while(void* /*unused*/) { std::this_thread::sleep_for(kAWhile); }

void increment(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

template <class Function>
auto in_other_thread(Function function) {
  decltype(function()) result{};
  std::thread thread([&] {
    result = function();
    cudaGetLastError();
  });
  thread.join();
  return result;
}

// Within its scope the calling thread's capture mode is another.
class CaptureMode {
 public:
  explicit CaptureMode(cudaStreamCaptureMode mode) : mode_(mode) { exchange(); }
  ~CaptureMode() { exchange(); }
  CaptureMode(const CaptureMode&) = delete;
  CaptureMode& operator=(const CaptureMode&) = delete;

 private:
  void exchange() { EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode_), cudaSuccess); }

  cudaStreamCaptureMode mode_;
};

using Call = std::function<cudaError_t()>;

class CudaConformance : public testing::Test {
 protected:
  void SetUp() override {
    HOLDFAST_TEST_NEEDS_CUDA();
    ASSERT_EQ(cudaGetDeviceCount(&devices_), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreate(&blocking_), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&recorded_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes), cudaSuccess);
    ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&pinned_), kBytes), cudaSuccess);
    ASSERT_EQ(cudaMemset(memory_, 0, kBytes), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(recorded_, other_), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (std::size_t i = 0; i < kBytes; ++i) pinned_[i] = 0;
  }

  void TearDown() override {
    if (devices_ == 0) return;
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    for (cudaStream_t stream : {stream_, other_, blocking_}) end_capture(stream);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (cudaStream_t stream : {stream_, other_, blocking_}) {
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
    for (cudaEvent_t event : {event_, recorded_}) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaFree(memory_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(pinned_), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  static cudaStreamCaptureStatus status(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    return status;
  }

  static void begin_capture(cudaStream_t stream,
                            cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
  }

  // Ends whatever capture `stream` began, and forgets the errors of the test.
  static void end_capture(cudaStream_t stream) {
    if (status(stream) != cudaStreamCaptureStatusNone) {
      cudaGraph_t graph = nullptr;
      if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) {
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      }
    }
    cudaGetLastError();
  }

  void expect_invalidated(cudaStream_t stream) {
    EXPECT_EQ(status(stream), cudaStreamCaptureStatusInvalidated);
    end_capture(stream);
  }

  void expect_active(cudaStream_t stream) {
    EXPECT_EQ(status(stream), cudaStreamCaptureStatusActive);
    end_capture(stream);
  }

  // `call` is refused while this thread captures, which costs the capture.
  void expect_refused_in_own_capture(const Call& call) {
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
      SCOPED_TRACE(mode);
      begin_capture(stream_, mode);
      EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
      expect_invalidated(stream_);
    }
  }

  // `call` succeeds while this thread captures, and the capture goes on.
  void expect_allowed_in_own_capture(const Call& call) {
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
      SCOPED_TRACE(mode);
      begin_capture(stream_, mode);
      EXPECT_EQ(call(), cudaSuccess);
      expect_active(stream_);
    }
  }

  // `call` would be refused, but not under a relaxed exchange.
  void expect_allowed_when_relaxed(const Call& call) {
    begin_capture(stream_);
    {
      const CaptureMode relaxed(cudaStreamCaptureModeRelaxed);
      EXPECT_EQ(call(), cudaSuccess);
    }
    expect_active(stream_);
  }

  // Captures a memset of `memory_` to `value` on `stream_`.
  cudaGraph_t capture_memset(int value) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(memory_, value, kBytes, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    return graph;
  }

  cudaGraphExec_t instantiate_and_destroy(cudaGraph_t graph) {
    cudaGraphExec_t executable = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return executable;
  }

  // The first byte of `memory_` once the device is idle.
  int first_byte() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    unsigned char byte = 0;
    EXPECT_EQ(cudaMemcpy(&byte, memory_, 1, cudaMemcpyDeviceToHost), cudaSuccess);
    return byte;
  }

  static unsigned long long buffer_id(const void* pointer) {
    unsigned long long id = 0;
    EXPECT_EQ(pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer), CUDA_SUCCESS);
    return id;
  }

  static CUresult pointer_attribute(void* out, CUpointer_attribute attribute, const void* pointer) {
    using Getter = CUresult (*)(void*, CUpointer_attribute, CUdeviceptr);
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &found, 13000,
                                               cudaEnableDefault, &result),
              cudaSuccess);
    EXPECT_EQ(result, cudaDriverEntryPointSuccess);
    if (found == nullptr) return CUDA_ERROR_NOT_FOUND;
    return reinterpret_cast<Getter>(found)(out, attribute, reinterpret_cast<CUdeviceptr>(pointer));
  }

  Gate gate_;  // opened by the test, and passed at the latest in TearDown()
  int devices_ = 0;
  cudaStream_t stream_ = nullptr;    // non-blocking
  cudaStream_t other_ = nullptr;     // non-blocking
  cudaStream_t blocking_ = nullptr;  // ordered with the legacy stream
  cudaEvent_t event_ = nullptr;      // never recorded
  cudaEvent_t recorded_ = nullptr;   // recorded and complete
  unsigned char* memory_ = nullptr;  // device memory, zero
  unsigned char* pinned_ = nullptr;  // pinned host memory, zero
};

// --- Errors

TEST_F(CudaConformance, FailureSetsTheLastErrorUntilItIsRead) {
  EXPECT_EQ(cudaMalloc(nullptr, 1), cudaErrorInvalidValue);
  int device = 0;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaConformance, LastErrorBelongsToTheThread) {
  EXPECT_EQ(cudaMalloc(nullptr, 1), cudaErrorInvalidValue);
  EXPECT_EQ(in_other_thread([] { return cudaPeekAtLastError(); }), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, NotReadyIsNotALastError) {
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  gate_.open();
}

TEST_F(CudaConformance, ErrorsHaveNamesAndTexts) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorStreamCaptureUnsupported),
               "cudaErrorStreamCaptureUnsupported");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorInvalidValue), "invalid argument");
  EXPECT_STREQ(cudaGetErrorString(static_cast<cudaError_t>(4242)), "unrecognized error code");
}

// --- Devices

TEST_F(CudaConformance, UnknownDeviceIsInvalid) {
  EXPECT_EQ(cudaSetDevice(devices_), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST_F(CudaConformance, CurrentDeviceBelongsToTheThread) {
  if (devices_ < 2) GTEST_SKIP() << "needs two devices";
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const int other = in_other_thread([] {
    int device = -1;
    cudaGetDevice(&device);
    return device;
  });
  EXPECT_EQ(other, 0);
}

// --- Memory

TEST_F(CudaConformance, AllocationIsAlignedTo256Bytes) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{255}, std::size_t{257}}) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, size), cudaSuccess);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0U);
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
  }
}

TEST_F(CudaConformance, MallocOfNothingGivesNull) {
  void* memory = memory_;
  EXPECT_EQ(cudaMalloc(&memory, 0), cudaSuccess);
  EXPECT_EQ(memory, nullptr);
}

TEST_F(CudaConformance, MallocBeyondTheDeviceFails) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, std::size_t{1} << 50), cudaErrorMemoryAllocation);
  EXPECT_EQ(memory, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

TEST_F(CudaConformance, FreeOfNullSucceeds) { EXPECT_EQ(cudaFree(nullptr), cudaSuccess); }

TEST_F(CudaConformance, SecondFreeIsInvalid) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, FreeInsideAnAllocationIsInvalid) {
  EXPECT_EQ(cudaFree(memory_ + 16), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, FreeOfPinnedMemoryIsInvalid) {
  EXPECT_EQ(cudaFree(pinned_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(memory_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, FreeWaitsForTheWholeDevice) {
  void* unrelated = nullptr;
  ASSERT_EQ(cudaMalloc(&unrelated, kBytes), cudaSuccess);
  std::atomic<bool> finished{false};
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_then_set, &finished), cudaSuccess);
  EXPECT_EQ(cudaFree(unrelated), cudaSuccess);
  EXPECT_TRUE(finished.load());
}

TEST_F(CudaConformance, FreeHostWaitsForTheWholeDevice) {
  void* unrelated = nullptr;
  ASSERT_EQ(cudaMallocHost(&unrelated, kBytes), cudaSuccess);
  std::atomic<bool> finished{false};
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_then_set, &finished), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(unrelated), cudaSuccess);
  EXPECT_TRUE(finished.load());
}

TEST_F(CudaConformance, MallocDoesNotWait) {
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(CudaConformance, PointerAttributesTellDeviceMemory) {
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, memory_ + 8), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(attributes.devicePointer, memory_ + 8);
  EXPECT_EQ(attributes.hostPointer, nullptr);
}

TEST_F(CudaConformance, PointerAttributesTellPinnedMemory) {
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, pinned_ + 8), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes.hostPointer, pinned_ + 8);
}

TEST_F(CudaConformance, PointerAttributesTellPageableMemory) {
  const std::vector<char> pageable(kBytes);
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, pageable.data()), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST_F(CudaConformance, PointerAttributesTellTheOwningDevice) {
  if (devices_ < 2) GTEST_SKIP() << "needs two devices";
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  cudaPointerAttributes attributes{};
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, memory), cudaSuccess);
  EXPECT_EQ(attributes.device, 1);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(CudaConformance, BufferIdIsTheSameInsideAnAllocation) {
  EXPECT_EQ(buffer_id(memory_), buffer_id(memory_ + kBytes - 1));
}

TEST_F(CudaConformance, BufferIdIsNeverUsedAgain) {
  std::set<unsigned long long> ids;
  constexpr std::size_t kRounds = 50;
  for (std::size_t i = 0; i < kRounds; ++i) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
    ids.insert(buffer_id(memory));
    ASSERT_EQ(cudaFree(memory), cudaSuccess);
  }
  EXPECT_EQ(ids.size(), kRounds);
}

TEST_F(CudaConformance, RangeAttributesTellTheAllocation) {
  void* start = nullptr;
  std::size_t size = 0;
  EXPECT_EQ(pointer_attribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, memory_ + 8),
            CUDA_SUCCESS);
  EXPECT_EQ(pointer_attribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory_ + 8), CUDA_SUCCESS);
  EXPECT_EQ(start, memory_);
  EXPECT_EQ(size, kBytes);
}

TEST_F(CudaConformance, DriverAttributesTellDeviceAndType) {
  int ordinal = -1;
  unsigned type = 0;
  EXPECT_EQ(pointer_attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory_),
            CUDA_SUCCESS);
  EXPECT_EQ(pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory_), CUDA_SUCCESS);
  EXPECT_EQ(ordinal, 0);
  EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
}

TEST_F(CudaConformance, DriverAttributesOfPageableMemoryAreInvalid) {
  const std::vector<char> pageable(kBytes);
  unsigned long long id = 0;
  EXPECT_EQ(pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pageable.data()),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(CudaConformance, UnknownDriverFunctionIsNullWithoutError) {
  void* found = memory_;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuNoSuchFunction", &found, 13000, cudaEnableDefault,
                                             &result),
            cudaSuccess);
  EXPECT_EQ(found, nullptr);
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
}

TEST_F(CudaConformance, DriverFunctionOfALaterVersionIsInvalid) {
  void* found = nullptr;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &found, 99000,
                                             cudaEnableDefault, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

// --- Copies

TEST_F(CudaConformance, CopiesRoundTripInEveryDirection) {
  std::vector<unsigned char> from(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) from[i] = static_cast<unsigned char>(i * 7 + 1);
  std::vector<unsigned char> to(kBytes);
  void* second = nullptr;
  ASSERT_EQ(cudaMalloc(&second, kBytes), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory_, from.data(), kBytes, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(second, memory_, kBytes, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(to.data(), second, kBytes, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(to, from);
  EXPECT_EQ(cudaFree(second), cudaSuccess);
}

TEST_F(CudaConformance, PageableSourceMayChangeAfterAnAsynchronousCopy) {
  std::vector<unsigned char> from(kBytes, 1);
  ASSERT_EQ(cudaMemcpyAsync(memory_, from.data(), kBytes, cudaMemcpyHostToDevice, stream_),
            cudaSuccess);
  from.assign(kBytes, 2);
  EXPECT_EQ(first_byte(), 1);
}

TEST_F(CudaConformance, PinnedSourceIsReadWhenTheCopyRuns) {
  pinned_[0] = 1;
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(memory_, pinned_, kBytes, cudaMemcpyHostToDevice, stream_),
            cudaSuccess);
  pinned_[0] = 2;
  gate_.open();
  EXPECT_EQ(first_byte(), 2);
}

TEST_F(CudaConformance, CopyOfNothingSucceeds) {
  EXPECT_EQ(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDefault), cudaSuccess);
}

TEST_F(CudaConformance, CopyInAnUnknownDirectionIsRefused) {
  EXPECT_EQ(cudaMemcpy(memory_, pinned_, 1, static_cast<cudaMemcpyKind>(7)),
            cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
}

TEST_F(CudaConformance, CopyToNullIsInvalid) {
  EXPECT_EQ(cudaMemcpy(nullptr, memory_, 1, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, CopyToTheHostWaitsForBlockingStreams) {
  ASSERT_EQ(cudaLaunchHostFunc(blocking_, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 3, kBytes, blocking_), cudaSuccess);
  unsigned char byte = 0;
  EXPECT_EQ(cudaMemcpy(&byte, memory_, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(byte, 3);
}

TEST_F(CudaConformance, CopyToTheHostDoesNotWaitForNonBlockingStreams) {
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  unsigned char byte = 1;
  EXPECT_EQ(cudaMemcpy(&byte, memory_, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(byte, 0);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  gate_.open();
}

TEST_F(CudaConformance, MemsetOfDeviceMemoryDoesNotWait) {
  ASSERT_EQ(cudaLaunchHostFunc(blocking_, &Gate::pass, &gate_), cudaSuccess);
  EXPECT_EQ(cudaMemset(memory_, 4, kBytes), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(blocking_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(first_byte(), 4);
}

TEST_F(CudaConformance, CopyWithinTheDeviceDoesNotWait) {
  ASSERT_EQ(cudaLaunchHostFunc(blocking_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_ + 1, 5, 1, blocking_), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory_, memory_ + 1, 1, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(blocking_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(first_byte(), 5);
}

// --- Streams

TEST_F(CudaConformance, StreamIdIsNeverUsedAgain) {
  std::set<unsigned long long> ids;
  constexpr std::size_t kRounds = 50;
  for (std::size_t i = 0; i < kRounds; ++i) {
    cudaStream_t stream = nullptr;
    unsigned long long id = 0;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamGetId(stream, &id), cudaSuccess);
    ids.insert(id);
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  EXPECT_EQ(ids.size(), kRounds);
}

TEST_F(CudaConformance, StreamHandleMayBeUsedAgain) {
  cudaStream_t first = nullptr;
  cudaStream_t second = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(first), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(first, second);
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

TEST_F(CudaConformance, HandleZeroIsTheLegacyStream) {
  unsigned long long zero = 0;
  unsigned long long legacy = 0;
  unsigned long long own = 0;
  EXPECT_EQ(cudaStreamGetId(nullptr, &zero), cudaSuccess);
  EXPECT_EQ(cudaStreamGetId(cudaStreamLegacy, &legacy), cudaSuccess);
  EXPECT_EQ(cudaStreamGetId(cudaStreamPerThread, &own), cudaSuccess);
  EXPECT_EQ(zero, legacy);
  EXPECT_NE(zero, own);
}

TEST_F(CudaConformance, PerThreadStreamsDifferByThread) {
  const auto own_id = [] {
    unsigned long long id = 0;
    EXPECT_EQ(cudaStreamGetId(cudaStreamPerThread, &id), cudaSuccess);
    return id;
  };
  EXPECT_NE(own_id(), in_other_thread(own_id));
}

TEST_F(CudaConformance, StreamTellsItsFlags) {
  unsigned flags = 9;
  EXPECT_EQ(cudaStreamGetFlags(stream_, &flags), cudaSuccess);
  EXPECT_EQ(flags, static_cast<unsigned>(cudaStreamNonBlocking));
  EXPECT_EQ(cudaStreamGetFlags(blocking_, &flags), cudaSuccess);
  EXPECT_EQ(flags, static_cast<unsigned>(cudaStreamDefault));
}

TEST_F(CudaConformance, UnknownStreamFlagsAreInvalid) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, 7), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, StreamTellsTheDeviceItWasCreatedOn) {
  if (devices_ < 2) GTEST_SKIP() << "needs two devices";
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  int device = -1;
  EXPECT_EQ(cudaStreamGetDevice(stream_, &device), cudaSuccess);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(cudaStreamGetDevice(cudaStreamLegacy, &device), cudaSuccess);
  EXPECT_EQ(device, 1);
}

TEST_F(CudaConformance, StreamRunsItsWorkInOrder) {
  for (int value = 1; value <= 20; ++value) {
    ASSERT_EQ(cudaMemsetAsync(memory_, value, kBytes, stream_), cudaSuccess);
  }
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, kBytes, cudaMemcpyDeviceToHost, stream_),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(pinned_[kBytes - 1], 20);
}

TEST_F(CudaConformance, SynchronizeDoesNotWaitForOtherStreams) {
  ASSERT_EQ(cudaLaunchHostFunc(other_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 1, kBytes, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(other_), cudaErrorNotReady);
  gate_.open();
}

TEST_F(CudaConformance, DeviceSynchronizeWaitsForEveryStream) {
  std::atomic<bool> first{false};
  std::atomic<bool> second{false};
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_then_set, &first), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(blocking_, sleep_then_set, &second), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(first.load());
  EXPECT_TRUE(second.load());
}

TEST_F(CudaConformance, WorkOfADestroyedStreamStillRuns) {
  cudaStream_t stream = nullptr;
  std::atomic<bool> finished{false};
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(stream, sleep_then_set, &finished), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(finished.load());
}

TEST_F(CudaConformance, LegacyStreamWaitsForBlockingStreams) {
  ASSERT_EQ(cudaLaunchHostFunc(blocking_, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 6, kBytes, blocking_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDeviceToHost, cudaStreamLegacy),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
  EXPECT_EQ(pinned_[0], 6);
}

TEST_F(CudaConformance, BlockingStreamsWaitForTheLegacyStream) {
  ASSERT_EQ(cudaLaunchHostFunc(cudaStreamLegacy, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 7, kBytes, cudaStreamLegacy), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDeviceToHost, blocking_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(blocking_), cudaSuccess);
  EXPECT_EQ(pinned_[0], 7);
}

TEST_F(CudaConformance, PerThreadStreamWaitsForTheLegacyStream) {
  ASSERT_EQ(cudaLaunchHostFunc(cudaStreamLegacy, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 8, kBytes, cudaStreamLegacy), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDeviceToHost, cudaStreamPerThread),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
  EXPECT_EQ(pinned_[0], 8);
}

TEST_F(CudaConformance, NonBlockingStreamsDoNotWaitForTheLegacyStream) {
  ASSERT_EQ(cudaLaunchHostFunc(cudaStreamLegacy, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 1, kBytes, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
  gate_.open();
}

TEST_F(CudaConformance, LegacySynchronizeWaitsForBlockingStreams) {
  std::atomic<bool> finished{false};
  ASSERT_EQ(cudaLaunchHostFunc(blocking_, sleep_then_set, &finished), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
  EXPECT_TRUE(finished.load());
}

// --- Events

TEST_F(CudaConformance, EventThatWasNeverRecordedIsComplete) {
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
}

TEST_F(CudaConformance, EventCompletesWithTheWorkBeforeIt) {
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
}

TEST_F(CudaConformance, EventSynchronizeDoesNotWaitForLaterWork) {
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  gate_.open();
}

TEST_F(CudaConformance, WaitEventOrdersTwoStreams) {
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 9, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other_, event_, 0), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDeviceToHost, other_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(other_), cudaSuccess);
  EXPECT_EQ(pinned_[0], 9);
}

TEST_F(CudaConformance, WaitTakesTheEventAsItIsAtTheCall) {
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other_, event_, 0), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(other_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  gate_.open();
}

TEST_F(CudaConformance, RecordReplacesTheEarlierRecord) {
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, other_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  gate_.open();
}

TEST_F(CudaConformance, EventMayBeDestroyedBeforeItCompletes) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other_, event, 0), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(other_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaStreamSynchronize(other_), cudaSuccess);
}

TEST_F(CudaConformance, ElapsedTimeNeedsTimedEvents) {
  float milliseconds = 0;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, recorded_, recorded_),
            cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaConformance, ElapsedTimeIsNotNegative) {
  cudaEvent_t first = nullptr;
  cudaEvent_t second = nullptr;
  ASSERT_EQ(cudaEventCreate(&first), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&second), cudaSuccess);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, second), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaEventRecord(first, stream_), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(second, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, second), cudaErrorNotReady);
  gate_.open();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, second), cudaSuccess);
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(cudaEventDestroy(first), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(second), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaConformance, UnknownEventFlagsAreInvalid) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, 64), cudaErrorInvalidValue);
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventInterprocess), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, RecordOnAStreamOfAnotherDeviceIsRefused) {
  if (devices_ < 2) GTEST_SKIP() << "needs two devices";
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event_, stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaConformance, WaitForAnEventOfAnotherDeviceOrders) {
  if (devices_ < 2) GTEST_SKIP() << "needs two devices";
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 9, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event_, 0), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDefault, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(pinned_[0], 9);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// --- Capture: what a capture is

TEST_F(CudaConformance, CapturedWorkDoesNotRun) {
  begin_capture(stream_);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, kBytes, stream_), cudaSuccess);
  end_capture(stream_);
  EXPECT_EQ(first_byte(), 0);
}

TEST_F(CudaConformance, CaptureInfoTellsIdAndDependencies) {
  begin_capture(stream_);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long first = 0;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  std::size_t count = 9;
  EXPECT_EQ(cudaStreamGetCaptureInfo(stream_, &capture, &first, &graph, &nodes, nullptr, &count),
            cudaSuccess);
  EXPECT_EQ(capture, cudaStreamCaptureStatusActive);
  EXPECT_NE(graph, nullptr);
  EXPECT_EQ(count, 0U);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, kBytes, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamGetCaptureInfo(stream_, &capture, &first, &graph, &nodes, nullptr, &count),
            cudaSuccess);
  ASSERT_EQ(count, 1U);
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  EXPECT_EQ(cudaGraphNodeGetType(nodes[0], &type), cudaSuccess);
  EXPECT_EQ(type, cudaGraphNodeTypeMemset);
  end_capture(stream_);

  begin_capture(stream_);
  unsigned long long second = 0;
  EXPECT_EQ(
      cudaStreamGetCaptureInfo(stream_, &capture, &second, nullptr, nullptr, nullptr, nullptr),
      cudaSuccess);
  EXPECT_NE(first, second);
}

TEST_F(CudaConformance, StreamOutsideACaptureHasNoStatus) {
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
  EXPECT_EQ(status(nullptr), cudaStreamCaptureStatusNone);
}

TEST_F(CudaConformance, CaptureMayNotBeginOnTheLegacyStream) {
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamBeginCapture(cudaStreamLegacy, cudaStreamCaptureModeRelaxed),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureUnsupported);
}

TEST_F(CudaConformance, CaptureMayBeginOnThePerThreadStream) {
  begin_capture(cudaStreamPerThread);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, kBytes, cudaStreamPerThread), cudaSuccess);
  expect_active(cudaStreamPerThread);
}

TEST_F(CudaConformance, SecondCaptureOnAStreamIsAnIllegalState) {
  begin_capture(stream_);
  EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
}

TEST_F(CudaConformance, EndWithoutACaptureIsAnIllegalState) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorIllegalState);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalState);
}

TEST_F(CudaConformance, UnknownCaptureModeIsInvalid) {
  EXPECT_EQ(cudaStreamBeginCapture(stream_, static_cast<cudaStreamCaptureMode>(3)),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, CaptureModeIsExchanged) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
}

TEST_F(CudaConformance, StreamJoinsACaptureByWaitingForItsEvent) {
  begin_capture(stream_);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, 1, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(status(other_), cudaStreamCaptureStatusNone);
  EXPECT_EQ(cudaStreamWaitEvent(other_, event_, 0), cudaSuccess);
  EXPECT_EQ(status(other_), cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaMemsetAsync(memory_ + 1, 2, 1, other_), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event_, other_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_, 0), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(status(other_), cudaStreamCaptureStatusNone);
  cudaGraphExec_t executable = instantiate_and_destroy(graph);
  EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  EXPECT_EQ(first_byte(), 1);
  unsigned char second = 0;
  EXPECT_EQ(cudaMemcpy(&second, memory_ + 1, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(second, 2);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, ForkWithoutWorkNeedsNoJoin) {
  begin_capture(stream_);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, 1, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other_, event_, 0), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(status(other_), cudaStreamCaptureStatusNone);
}

TEST_F(CudaConformance, ForkThatIsNotJoinedFailsTheEnd) {
  begin_capture(stream_);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other_, event_, 0), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, 1, other_), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
  EXPECT_EQ(status(other_), cudaStreamCaptureStatusNone);
}

TEST_F(CudaConformance, EndOnAForkInvalidatesTheCapture) {
  begin_capture(stream_);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other_, event_, 0), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(other_, &graph), cudaErrorStreamCaptureUnmatched);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, EndOfAnInvalidatedCaptureGivesNoGraph) {
  begin_capture(stream_);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
}

TEST_F(CudaConformance, WorkOnAnInvalidatedCaptureIsRefused) {
  begin_capture(stream_);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaMemsetAsync(memory_, 1, 1, stream_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, recorded_, 0), cudaErrorStreamCaptureInvalidated);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, EndInAnotherThreadIsRefusedAndEndsTheCapture) {
  begin_capture(stream_);
  EXPECT_EQ(in_other_thread([&] {
              cudaGraph_t graph = nullptr;
              return cudaStreamEndCapture(stream_, &graph);
            }),
            cudaErrorStreamCaptureWrongThread);
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
}

TEST_F(CudaConformance, RelaxedCaptureMayEndInAnotherThread) {
  begin_capture(stream_, cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(in_other_thread([&] {
              cudaGraph_t graph = nullptr;
              const cudaError_t code = cudaStreamEndCapture(stream_, &graph);
              EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
              return code;
            }),
            cudaSuccess);
}

// --- Capture: what it forbids

TEST_F(CudaConformance, MallocInOwnCaptureIsRefusedAndInvalidatesIt) {
  void* memory = nullptr;
  expect_refused_in_own_capture([&] { return cudaMalloc(&memory, kBytes); });
}

TEST_F(CudaConformance, MallocHostInOwnCaptureIsRefusedAndInvalidatesIt) {
  void* memory = nullptr;
  expect_refused_in_own_capture([&] { return cudaMallocHost(&memory, kBytes); });
  expect_refused_in_own_capture([&] { return cudaHostAlloc(&memory, kBytes, 0); });
}

TEST_F(CudaConformance, FreeInOwnCaptureIsRefusedAndInvalidatesIt) {
  expect_refused_in_own_capture([&] { return cudaFree(memory_); });
  expect_refused_in_own_capture([&] { return cudaFree(nullptr); });
  expect_refused_in_own_capture([&] { return cudaFreeHost(pinned_); });
}

TEST_F(CudaConformance, EventSynchronizeInOwnCaptureIsRefusedAndInvalidatesIt) {
  expect_refused_in_own_capture([&] { return cudaEventSynchronize(recorded_); });
}

TEST_F(CudaConformance, EventQueryInOwnCaptureIsRefusedAndInvalidatesIt) {
  expect_refused_in_own_capture([&] { return cudaEventQuery(recorded_); });
}

TEST_F(CudaConformance, SynchronizeOfAnotherStreamInOwnCaptureIsRefusedAndInvalidatesIt) {
  expect_refused_in_own_capture([&] { return cudaStreamSynchronize(other_); });
  expect_refused_in_own_capture([&] { return cudaStreamQuery(other_); });
}

TEST_F(CudaConformance, InstantiateInOwnCaptureIsRefusedAndInvalidatesIt) {
  cudaGraph_t graph = capture_memset(1);
  cudaGraphExec_t executable = nullptr;
  expect_refused_in_own_capture([&] { return cudaGraphInstantiate(&executable, graph, 0); });
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaConformance, ExecDestroyInOwnCaptureIsRefusedAndInvalidatesIt) {
  cudaGraphExec_t executable = instantiate_and_destroy(capture_memset(1));
  expect_refused_in_own_capture([&] { return cudaGraphExecDestroy(executable); });
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, GraphLaunchIntoACaptureIsRefusedAndInvalidatesIt) {
  cudaGraphExec_t executable = instantiate_and_destroy(capture_memset(1));
  expect_refused_in_own_capture([&] { return cudaGraphLaunch(executable, stream_); });
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, MallocOfNothingIsAllowedInOwnCapture) {
  void* memory = nullptr;
  expect_allowed_in_own_capture([&] { return cudaMalloc(&memory, 0); });
}

TEST_F(CudaConformance, MallocAndFreeAreAllowedUnderARelaxedExchange) {
  void* memory = nullptr;
  expect_allowed_when_relaxed([&] { return cudaMalloc(&memory, kBytes); });
  expect_allowed_when_relaxed([&] { return cudaFree(memory); });
  expect_allowed_when_relaxed([&] { return cudaMallocHost(&memory, kBytes); });
  expect_allowed_when_relaxed([&] { return cudaFreeHost(memory); });
}

TEST_F(CudaConformance, WaitingIsAllowedUnderARelaxedExchange) {
  expect_allowed_when_relaxed([&] { return cudaEventQuery(recorded_); });
  expect_allowed_when_relaxed([&] { return cudaEventSynchronize(recorded_); });
  expect_allowed_when_relaxed([&] { return cudaStreamSynchronize(other_); });
}

TEST_F(CudaConformance, InstantiateIsAllowedUnderARelaxedExchange) {
  cudaGraph_t graph = capture_memset(1);
  cudaGraphExec_t executable = nullptr;
  expect_allowed_when_relaxed([&] { return cudaGraphInstantiate(&executable, graph, 0); });
  expect_allowed_when_relaxed([&] { return cudaGraphExecDestroy(executable); });
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaConformance, OwnRelaxedCaptureForbidsNoMalloc) {
  begin_capture(stream_, cudaStreamCaptureModeRelaxed);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  expect_active(stream_);
}

TEST_F(CudaConformance, DeviceSynchronizeIsRefusedEvenUnderARelaxedExchange) {
  begin_capture(stream_, cudaStreamCaptureModeRelaxed);
  {
    const CaptureMode relaxed(cudaStreamCaptureModeRelaxed);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  }
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, DeviceSynchronizeOfAnotherThreadInvalidatesAThreadLocalCapture) {
  begin_capture(stream_, cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(in_other_thread([] { return cudaDeviceSynchronize(); }),
            cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, SynchronizeOfTheCapturingStreamIsRefusedAndInvalidatesIt) {
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed}) {
    begin_capture(stream_, mode);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
    expect_invalidated(stream_);
    begin_capture(stream_, mode);
    EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorStreamCaptureUnsupported);
    expect_invalidated(stream_);
  }
}

TEST_F(CudaConformance, MallocIsRefusedAndInvalidatesAnotherThreadsGlobalCapture) {
  begin_capture(stream_, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(in_other_thread([] {
              void* memory = nullptr;
              return cudaMalloc(&memory, kBytes);
            }),
            cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, FreeIsRefusedAndInvalidatesAnotherThreadsGlobalCapture) {
  begin_capture(stream_, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(in_other_thread([&] { return cudaFree(memory_); }), cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, RelaxedExchangeSparesAnotherThreadsGlobalCapture) {
  begin_capture(stream_, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(in_other_thread([] {
              const CaptureMode relaxed(cudaStreamCaptureModeRelaxed);
              void* memory = nullptr;
              const cudaError_t code = cudaMalloc(&memory, kBytes);
              return code != cudaSuccess ? code : cudaFree(memory);
            }),
            cudaSuccess);
  expect_active(stream_);
}

TEST_F(CudaConformance, ThreadLocalExchangeSparesAnotherThreadsGlobalCapture) {
  begin_capture(stream_, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(in_other_thread([] {
              const CaptureMode local(cudaStreamCaptureModeThreadLocal);
              void* memory = nullptr;
              const cudaError_t code = cudaMalloc(&memory, kBytes);
              return code != cudaSuccess ? code : cudaFree(memory);
            }),
            cudaSuccess);
  expect_active(stream_);
}

TEST_F(CudaConformance, ThreadLocalCaptureForbidsOtherThreadsNothing) {
  begin_capture(stream_, cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(in_other_thread([] {
              void* memory = nullptr;
              const cudaError_t code = cudaMalloc(&memory, kBytes);
              return code != cudaSuccess ? code : cudaFree(memory);
            }),
            cudaSuccess);
  expect_active(stream_);
}

TEST_F(CudaConformance, EventQueryOfAnotherThreadInvalidatesAGlobalCapture) {
  begin_capture(stream_, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(in_other_thread([&] { return cudaEventQuery(recorded_); }),
            cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, WaitInACaptureForAnOutsideEventBreaksIsolation) {
  begin_capture(stream_);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, recorded_, 0), cudaErrorStreamCaptureIsolation);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, WaitInACaptureForAnEventNeverRecordedIsNothing) {
  begin_capture(stream_);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_, 0), cudaSuccess);
  expect_active(stream_);
}

TEST_F(CudaConformance, WaitThatWouldMergeTwoCapturesInvalidatesBoth) {
  begin_capture(stream_);
  begin_capture(other_);
  EXPECT_EQ(cudaEventRecord(event_, other_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_, 0), cudaErrorStreamCaptureMerge);
  expect_invalidated(stream_);
  expect_invalidated(other_);
}

TEST_F(CudaConformance, CapturedEventMayNotBeQueriedInAnyMode) {
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed}) {
    begin_capture(stream_, mode);
    EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
    {
      const CaptureMode relaxed(cudaStreamCaptureModeRelaxed);
      EXPECT_EQ(cudaEventQuery(event_), cudaErrorCapturedEvent);
    }
    expect_invalidated(stream_);
  }
}

TEST_F(CudaConformance, CapturedEventMayNotBeSynchronizedInAnyMode) {
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed}) {
    begin_capture(stream_, mode);
    EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(event_), cudaErrorCapturedEvent);
    expect_invalidated(stream_);
  }
}

TEST_F(CudaConformance, EventOfAnEndedCaptureIsInvalidUntilRecordedAgain) {
  begin_capture(stream_);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  end_capture(stream_);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(CudaConformance, IdDeviceAndFlagsOfACapturingStreamAreRefusedAndInvalidateTheCapture) {
  unsigned long long id = 0;
  int device = 0;
  unsigned flags = 0;
  expect_refused_in_own_capture([&] { return cudaStreamGetId(stream_, &id); });
  expect_refused_in_own_capture([&] { return cudaStreamGetDevice(stream_, &device); });
  expect_refused_in_own_capture([&] { return cudaStreamGetFlags(stream_, &flags); });
}

TEST_F(CudaConformance, PriorityOfACapturingStreamMayBeAsked) {
  int priority = 0;
  expect_allowed_in_own_capture([&] { return cudaStreamGetPriority(stream_, &priority); });
}

TEST_F(CudaConformance, IdOfACapturingStreamIsRefusedEvenUnderARelaxedExchange) {
  begin_capture(stream_, cudaStreamCaptureModeRelaxed);
  {
    const CaptureMode relaxed(cudaStreamCaptureModeRelaxed);
    unsigned long long id = 0;
    EXPECT_EQ(cudaStreamGetId(stream_, &id), cudaErrorStreamCaptureUnsupported);
  }
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, DestroyingAForkedStreamSparesTheCapture) {
  cudaStream_t fork = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&fork, cudaStreamNonBlocking), cudaSuccess);
  begin_capture(stream_);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(fork, event_, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(fork), cudaSuccess);
  expect_active(stream_);
}

TEST_F(CudaConformance, DestroyingTheCapturingStreamDropsTheCapture) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  begin_capture(stream);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

// --- Capture and the legacy stream

TEST_F(CudaConformance, StatusOfTheLegacyStreamIsRefusedWhileABlockingStreamCaptures) {
  begin_capture(blocking_);
  auto capture = static_cast<cudaStreamCaptureStatus>(3);
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &capture), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamIsCapturing(cudaStreamLegacy, &capture), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(
      cudaStreamGetCaptureInfo(nullptr, &capture, nullptr, nullptr, nullptr, nullptr, nullptr),
      cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(static_cast<int>(capture), 3);
  expect_active(blocking_);
}

TEST_F(CudaConformance, LegacyWorkInvalidatesACaptureOfABlockingStream) {
  const std::vector<Call> calls = {
      [&] { return cudaMemsetAsync(memory_, 1, 1, nullptr); },
      [&] { return cudaMemset(memory_, 1, 1); },
      [&] { return cudaMemcpy(memory_, pinned_, 1, cudaMemcpyDefault); },
      [&] { return cudaEventRecord(event_, nullptr); },
      [&] { return cudaStreamWaitEvent(nullptr, recorded_, 0); },
      [&] { return cudaStreamSynchronize(nullptr); },
      [&] { return cudaStreamQuery(nullptr); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    begin_capture(blocking_, cudaStreamCaptureModeRelaxed);
    EXPECT_EQ(calls[i](), cudaErrorStreamCaptureImplicit);
    expect_invalidated(blocking_);
  }
}

TEST_F(CudaConformance, LegacyStreamMayNotBeDescribedWhileABlockingStreamCaptures) {
  unsigned long long id = 0;
  int number = 0;
  unsigned flags = 0;
  const std::vector<Call> calls = {
      [&] { return cudaStreamGetId(nullptr, &id); },
      [&] { return cudaStreamGetDevice(nullptr, &number); },
      [&] { return cudaStreamGetFlags(nullptr, &flags); },
      [&] { return cudaStreamGetPriority(nullptr, &number); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    begin_capture(blocking_);
    EXPECT_EQ(calls[i](), cudaErrorStreamCaptureImplicit);
    expect_invalidated(blocking_);
  }
}

TEST_F(CudaConformance, LegacyStreamMayNotJoinACapture) {
  begin_capture(stream_);
  EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(nullptr, event_, 0), cudaErrorStreamCaptureImplicit);
  expect_invalidated(stream_);
}

TEST_F(CudaConformance, LegacyWorkSparesACaptureOfANonBlockingStream) {
  expect_allowed_in_own_capture([&] { return cudaMemsetAsync(memory_, 1, 1, nullptr); });
  expect_allowed_in_own_capture([&] { return cudaMemset(memory_, 1, 1); });
  expect_allowed_in_own_capture([&] { return cudaMemcpy(memory_, pinned_, 1, cudaMemcpyDefault); });
}

// --- Capture: what stays legal

TEST_F(CudaConformance, WorkOnOtherStreamsIsAllowedInOwnCapture) {
  expect_allowed_in_own_capture([&] { return cudaMemsetAsync(memory_, 1, 1, other_); });
  expect_allowed_in_own_capture([&] { return cudaEventRecord(event_, other_); });
  expect_allowed_in_own_capture([&] { return cudaStreamWaitEvent(other_, recorded_, 0); });
  expect_allowed_in_own_capture([&] { return cudaLaunchHostFunc(other_, sleep_a_while, nullptr); });
}

TEST_F(CudaConformance, GraphLaunchOnAnotherStreamIsAllowedInOwnCapture) {
  cudaGraphExec_t executable = instantiate_and_destroy(capture_memset(1));
  expect_allowed_in_own_capture([&] { return cudaGraphLaunch(executable, other_); });
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, CreatingAndDestroyingStreamsAndEventsIsAllowedInOwnCapture) {
  cudaEvent_t event = nullptr;
  cudaStream_t stream = nullptr;
  for (int round = 0; round < 2; ++round) {
    begin_capture(stream_);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    expect_active(stream_);
  }
}

TEST_F(CudaConformance, QuestionsAreAllowedInOwnCapture) {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  unsigned long long id = 0;
  int number = 0;
  cudaPointerAttributes attributes{};
  void* found = nullptr;
  expect_allowed_in_own_capture([&] { return cudaMemGetInfo(&free_bytes, &total); });
  expect_allowed_in_own_capture([&] { return cudaPointerGetAttributes(&attributes, memory_); });
  expect_allowed_in_own_capture([&] { return cudaStreamGetId(other_, &id); });
  expect_allowed_in_own_capture([&] { return cudaStreamGetDevice(other_, &number); });
  expect_allowed_in_own_capture([&] { return cudaGetDevice(&number); });
  expect_allowed_in_own_capture(
      [&] { return cudaDeviceGetAttribute(&number, cudaDevAttrWarpSize, 0); });
  expect_allowed_in_own_capture([&] {
    return cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &found, 13000,
                                            cudaEnableDefault, nullptr);
  });
  expect_allowed_in_own_capture([&] {
    EXPECT_NE(buffer_id(memory_), 0U);
    return cudaSuccess;
  });
}

TEST_F(CudaConformance, DestroyingAGraphIsAllowedInOwnCapture) {
  cudaGraph_t graph = capture_memset(1);
  begin_capture(stream_);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  expect_active(stream_);
}

// --- Graphs

TEST_F(CudaConformance, EveryLaunchReplaysTheGraph) {
  std::atomic<int> counter{0};
  begin_capture(stream_);
  ASSERT_EQ(cudaLaunchHostFunc(stream_, increment, &counter), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t executable = instantiate_and_destroy(graph);
  constexpr int kRounds = 3;
  for (int i = 0; i < kRounds; ++i) EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(counter.load(), kRounds);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, ReplayReadsTheCapturedAddressAnew) {
  begin_capture(stream_);
  ASSERT_EQ(cudaMemcpyAsync(memory_, pinned_, 1, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t executable = instantiate_and_destroy(graph);
  for (unsigned char value = 1; value <= 3; ++value) {
    pinned_[0] = value;
    EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
    EXPECT_EQ(first_byte(), value);
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, GraphTellsItsNodesAndTheirTypes) {
  begin_capture(stream_);
  ASSERT_EQ(cudaMemsetAsync(memory_, 1, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, kBytes, cudaMemcpyDeviceToHost, stream_),
            cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  std::size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  ASSERT_EQ(count, 3U);
  std::vector<cudaGraphNode_t> nodes(count);
  EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
  std::multiset<int> types;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    EXPECT_EQ(cudaGraphNodeGetType(node, &type), cudaSuccess);
    types.insert(type);
  }
  EXPECT_EQ(types, (std::multiset<int>{cudaGraphNodeTypeMemset, cudaGraphNodeTypeMemcpy,
                                       cudaGraphNodeTypeHost}));
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaConformance, EventRecordIsNoNode) {
  begin_capture(stream_);
  ASSERT_EQ(cudaMemsetAsync(memory_, 1, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  std::size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  EXPECT_EQ(count, 1U);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaConformance, GraphLaunchIsOrderedInItsStream) {
  cudaGraphExec_t executable = instantiate_and_destroy(capture_memset(5));
  ASSERT_EQ(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory_, 4, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(pinned_[0], 5);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, LaunchesOfOneExecutableAreOrderedAcrossStreams) {
  cudaGraphExec_t executable = instantiate_and_destroy(capture_memset(5));
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, other_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(other_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(cudaStreamSynchronize(other_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(CudaConformance, PendingLaunchOutlivesItsExecutable) {
  cudaGraphExec_t executable = instantiate_and_destroy(capture_memset(5));
  ASSERT_EQ(cudaLaunchHostFunc(stream_, &Gate::pass, &gate_), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  gate_.open();
  EXPECT_EQ(first_byte(), 5);
}

}  // namespace
