// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "holdfast/memory_resource.hpp"

#include "support/runtime.hpp"

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <future>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using holdfast::AddressLedger;
using holdfast::CudaError;
using holdfast::DeviceResource;
using holdfast::MemoryResource;
using holdfast::OutOfMemory;
using holdfast::ResourceRef;

constexpr std::size_t kAbsurd = std::size_t{1} << 60;
constexpr cudaStreamCaptureMode kCaptureModes[] = {
    cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed};

int current_device() {
  int device = -1;
  test::ok(cudaGetDevice(&device));
  return device;
}

int device_of(const void* address) {
  cudaPointerAttributes attributes{};
  test::ok(cudaPointerGetAttributes(&attributes, address));
  return attributes.type == cudaMemoryTypeDevice ? attributes.device : -1;
}

bool second_device() {
  int count = 0;
  test::ok(cudaGetDeviceCount(&count));
  return count >= 2;
}

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  test::ok(cudaMemGetInfo(&free, &total));
  return free;
}

/// The calling thread's capture mode, which stays as it is.
cudaStreamCaptureMode capture_mode() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  test::ok(cudaThreadExchangeStreamCaptureMode(&mode));
  cudaStreamCaptureMode found = mode;
  test::ok(cudaThreadExchangeStreamCaptureMode(&mode));
  return found;
}

std::vector<unsigned char> counting(std::size_t count) {
  std::vector<unsigned char> values(count);
  std::iota(values.begin(), values.end(), static_cast<unsigned char>(1));
  return values;
}

// --- the battery: what every resource promises

/// A resource by itself.
class Direct {
 public:
  explicit Direct(int device) : memory_(device) {}
  [[nodiscard]] DeviceResource& resource() { return memory_; }
  [[nodiscard]] AddressLedger& ledger() { return memory_.ledger(); }
  [[nodiscard]] std::size_t leaked_bytes() const { return memory_.leaked_bytes(); }

 private:
  DeviceResource memory_;
};

/// The same one by reference.
class Referenced {
 public:
  explicit Referenced(int device) : memory_(device), reference_(memory_) {}
  [[nodiscard]] ResourceRef& resource() { return reference_; }
  [[nodiscard]] AddressLedger& ledger() { return memory_.ledger(); }
  [[nodiscard]] std::size_t leaked_bytes() const { return memory_.leaked_bytes(); }

 private:
  DeviceResource memory_;
  ResourceRef reference_;
};

/// `Fixture` has a constructor from a device, resource(), its ledger() and leaked_bytes().
template <class Fixture>
class MemoryResourceBattery : public test::Cuda {
 protected:
  /// Captures work on both sides of an allocation and a release that `use` makes, and runs the
  /// graph: every byte of the result is right only if the capture came through whole.
  template <class Use>
  void expect_capture_survives(cudaStreamCaptureMode mode, const Use& use) {
    constexpr std::size_t kHalf = 512;
    const test::DeviceArray<unsigned char> target(2 * kHalf);
    target.poison();
    const test::Graph graph(
        stream,
        [&] {
          test::ok(cudaMemsetAsync(target.data(), 0x11, kHalf, stream));
          use();
          test::ok(cudaMemsetAsync(target.data() + kHalf, 0x22, kHalf, stream));
        },
        mode);
    EXPECT_EQ(graph.nodes(), 2U);
    graph.launch(stream);
    sync();
    std::vector<unsigned char> expected(kHalf, 0x11);
    expected.resize(2 * kHalf, 0x22);
    EXPECT_EQ(target.download(), expected);
  }
};

struct FixtureNames {
  template <class Fixture>
  static std::string GetName(int /*index*/) {
    return std::is_same_v<Fixture, Direct> ? "DeviceResource" : "ResourceRefOfDeviceResource";
  }
};
using Fixtures = ::testing::Types<Direct, Referenced>;
TYPED_TEST_SUITE(MemoryResourceBattery, Fixtures, FixtureNames);

TYPED_TEST(MemoryResourceBattery, AddressesAreMultiplesOf256) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  for (const std::size_t bytes : {1, 2, 255, 256, 257, 4097}) {
    void* first = memory.allocate(bytes);
    void* second = memory.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 256, 0U) << bytes << " bytes";
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second) % 256, 0U) << bytes << " bytes";
    memory.deallocate(second, bytes);
    memory.deallocate(first, bytes);
  }
}

TYPED_TEST(MemoryResourceBattery, LiveAllocationsDoNotOverlap) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  struct Block {
    std::uintptr_t base;
    std::size_t bytes;
  };
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < 48; ++i) {
    const std::size_t bytes = 1 + i * i * 37;
    blocks.push_back({reinterpret_cast<std::uintptr_t>(memory.allocate(bytes)), bytes});
    if (i % 3 != 0) continue;  // holes, which later allocations may fill
    memory.deallocate(reinterpret_cast<void*>(blocks.front().base), blocks.front().bytes);
    blocks.erase(blocks.begin());
  }
  std::ranges::sort(blocks, {}, &Block::base);
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    EXPECT_LE(blocks[i - 1].base + blocks[i - 1].bytes, blocks[i].base);
  }
  for (const Block& block : blocks) {
    memory.deallocate(reinterpret_cast<void*>(block.base), block.bytes);
  }
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, EveryByteCanBeWrittenAndReadBack) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  const std::vector<unsigned char> values = counting(1'000'003);
  auto* address = static_cast<unsigned char*>(memory.allocate(values.size()));
  test::ok(cudaMemcpy(address, values.data(), values.size(), cudaMemcpyHostToDevice));
  EXPECT_EQ(test::download(address, values.size()), values);
  memory.deallocate(address, values.size());
}

TYPED_TEST(MemoryResourceBattery, OneByteIsASize) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  auto* address = static_cast<unsigned char*>(memory.allocate(1));
  ASSERT_NE(address, nullptr);
  test::ok(cudaMemset(address, 0x5A, 1));
  EXPECT_EQ(test::download(address, 1), std::vector<unsigned char>{0x5A});
  memory.deallocate(address, 1);
}

TYPED_TEST(MemoryResourceBattery, MemoryIsUsableAtOnceOnEveryStream) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  auto* address = static_cast<unsigned char*>(memory.allocate(64));
  test::ok(cudaMemsetAsync(address, 0x33, 32, this->stream));
  test::ok(cudaMemsetAsync(address + 32, 0x33, 32, cudaStreamLegacy));
  EXPECT_EQ(test::download(address, 64), std::vector<unsigned char>(64, 0x33));
  memory.deallocate(address, 64);
}

TYPED_TEST(MemoryResourceBattery, ReleasedMemoryIsTakenBack) {
  constexpr std::size_t kRounds = 8;
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  memory.deallocate(memory.allocate(kBytes), kBytes);
  const std::size_t before = free_bytes();
  for (std::size_t round = 0; round < kRounds; ++round) {
    memory.deallocate(memory.allocate(kBytes), kBytes);
  }
  // Others may use the device too, so this sees only that most of it came back.
  EXPECT_GT(free_bytes() + kRounds * kBytes / 2, before);
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, ReleaseWaitsForWorkThatUsesTheMemory) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  const test::DeviceArray<unsigned char> copy(64);
  copy.poison();
  void* address = memory.allocate(64);
  test::ok(cudaMemsetAsync(address, 0x44, 64, this->stream));
  test::ok(cudaMemcpyAsync(copy.data(), address, 64, cudaMemcpyDeviceToDevice, this->stream));
  memory.deallocate(address, 64);
  EXPECT_EQ(cudaStreamQuery(this->stream), cudaSuccess);
  EXPECT_EQ(copy.download(), std::vector<unsigned char>(64, 0x44));
}

TYPED_TEST(MemoryResourceBattery, MemoryLiesOnTheResourcesDevice) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  EXPECT_EQ(memory.device(), 0);
  void* address = memory.allocate(256);
  EXPECT_EQ(device_of(address), 0);
  memory.deallocate(address, 256);
}

TYPED_TEST(MemoryResourceBattery, MemoryOfANonCurrentDeviceLiesThere) {
  if (!second_device()) GTEST_SKIP() << "fewer than two devices";
  TypeParam fixture(1);
  auto& memory = fixture.resource();
  const std::vector<unsigned char> values = counting(300);
  EXPECT_EQ(memory.device(), 1);
  auto* address = static_cast<unsigned char*>(memory.allocate(values.size()));
  EXPECT_EQ(current_device(), 0);
  EXPECT_EQ(device_of(address), 1);
  test::ok(cudaMemcpy(address, values.data(), values.size(), cudaMemcpyHostToDevice));
  EXPECT_EQ(test::download(address, values.size()), values);
  memory.deallocate(address, values.size());
  EXPECT_EQ(current_device(), 0);
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, TheCallersDeviceIsGivenBack) {
  if (!second_device()) GTEST_SKIP() << "fewer than two devices";
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  test::ok(cudaSetDevice(1));
  void* address = memory.allocate(256);
  EXPECT_EQ(current_device(), 1);
  memory.deallocate(address, 256);
  EXPECT_EQ(current_device(), 1);
  EXPECT_THROW((void)memory.allocate(kAbsurd), OutOfMemory);
  EXPECT_EQ(current_device(), 1);
  test::ok(cudaSetDevice(0));
}

TYPED_TEST(MemoryResourceBattery, AllocationDuringACaptureOfThisThreadLeavesItWhole) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  for (const cudaStreamCaptureMode mode : kCaptureModes) {
    SCOPED_TRACE(mode);
    void* address = nullptr;
    this->expect_capture_survives(mode, [&] { address = memory.allocate(1024); });
    memory.deallocate(address, 1024);
  }
}

TYPED_TEST(MemoryResourceBattery, ReleaseDuringACaptureOfThisThreadLeavesItWhole) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  for (const cudaStreamCaptureMode mode : kCaptureModes) {
    SCOPED_TRACE(mode);
    void* address = memory.allocate(1024);
    this->expect_capture_survives(mode, [&] { memory.deallocate(address, 1024); });
  }
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, AllocationBesideACaptureOfAnotherThreadLeavesItWhole) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  void* address = nullptr;
  this->expect_capture_survives(cudaStreamCaptureModeGlobal, [&] {
    std::async(std::launch::async, [&] { address = memory.allocate(1024); }).get();
  });
  memory.deallocate(address, 1024);
}

TYPED_TEST(MemoryResourceBattery, ReleaseBesideACaptureOfAnotherThreadLeavesItWhole) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  void* address = memory.allocate(1024);
  this->expect_capture_survives(cudaStreamCaptureModeGlobal, [&] {
    std::async(std::launch::async, [&] { memory.deallocate(address, 1024); }).get();
  });
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, AFailedAllocationDuringACaptureLeavesItWhole) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  for (const cudaStreamCaptureMode mode : kCaptureModes) {
    SCOPED_TRACE(mode);
    this->expect_capture_survives(
        mode, [&] { EXPECT_THROW((void)memory.allocate(kAbsurd), OutOfMemory); });
  }
}

TYPED_TEST(MemoryResourceBattery, MemoryAllocatedDuringACaptureIsNotTheGraphs) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  unsigned char* address = nullptr;
  {
    const test::Graph graph(this->stream, [&] {
      address = static_cast<unsigned char*>(memory.allocate(64));
      test::ok(cudaMemsetAsync(address, 0x55, 64, this->stream));
    });
    graph.launch(this->stream);
    graph.launch(this->stream);
    this->sync();
  }
  EXPECT_EQ(test::download(address, 64), std::vector<unsigned char>(64, 0x55));
  memory.deallocate(address, 64);
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, TheThreadsCaptureModeIsGivenBack) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  for (const cudaStreamCaptureMode mode : kCaptureModes) {
    SCOPED_TRACE(mode);
    cudaStreamCaptureMode previous = mode;
    test::ok(cudaThreadExchangeStreamCaptureMode(&previous));
    void* address = memory.allocate(256);
    EXPECT_EQ(capture_mode(), mode);
    memory.deallocate(address, 256);
    EXPECT_EQ(capture_mode(), mode);
    EXPECT_THROW((void)memory.allocate(kAbsurd), OutOfMemory);
    EXPECT_EQ(capture_mode(), mode);
    test::ok(cudaThreadExchangeStreamCaptureMode(&previous));
  }
}

TYPED_TEST(MemoryResourceBattery, AnAbsurdSizeIsOutOfMemory) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  try {
    (void)memory.allocate(kAbsurd);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.code(), cudaErrorMemoryAllocation);
    EXPECT_NE(std::string(error.what()).find("1152921504606846976 bytes"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("device 0"), std::string::npos) << error.what();
  }
}

TYPED_TEST(MemoryResourceBattery, AFailedAllocationLeavesNoErrorBehind) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  EXPECT_THROW((void)memory.allocate(kAbsurd), OutOfMemory);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TYPED_TEST(MemoryResourceBattery, MemoryIsThereAfterAFailedAllocation) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  EXPECT_THROW((void)memory.allocate(kAbsurd), OutOfMemory);
  void* address = memory.allocate(256);
  EXPECT_NE(address, nullptr);
  memory.deallocate(address, 256);
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

TYPED_TEST(MemoryResourceBattery, AMissingDeviceIsAnErrorThatChangesNothing) {
  TypeParam fixture(1 << 20);
  auto& memory = fixture.resource();
  try {
    (void)memory.allocate(256);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const CudaError& error) {
    EXPECT_EQ(error.code(), cudaErrorInvalidDevice);
  }
  EXPECT_EQ(current_device(), 0);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TYPED_TEST(MemoryResourceBattery, ItHasOneLedgerForLife) {
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  EXPECT_EQ(&memory.ledger(), &memory.ledger());
  EXPECT_EQ(&memory.ledger(), &fixture.ledger());
  const auto entry = memory.ledger().enter({"a", 0x1000, 256, 0, {}});
  EXPECT_EQ(fixture.ledger().live().size(), 1U);
}

TYPED_TEST(MemoryResourceBattery, SeveralThreadsMayUseItAtOnce) {
  constexpr std::size_t kThreads = 4;
  TypeParam fixture(0);
  auto& memory = fixture.resource();
  std::vector<std::future<bool>> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.push_back(std::async(std::launch::async, [&memory, thread] {
      bool right = true;
      for (std::size_t round = 1; round <= 10; ++round) {
        const std::size_t bytes = 100 * round + thread;
        const std::vector<unsigned char> values(bytes, static_cast<unsigned char>(thread));
        auto* address = static_cast<unsigned char*>(memory.allocate(bytes));
        test::ok(cudaMemcpy(address, values.data(), bytes, cudaMemcpyHostToDevice));
        right = right && test::download(address, bytes) == values;
        memory.deallocate(address, bytes);
      }
      return right;
    }));
  }
  for (auto& thread : threads) EXPECT_TRUE(thread.get());
  EXPECT_EQ(fixture.leaked_bytes(), 0U);
}

// --- what DeviceResource adds

class DeviceResourceAlone : public test::Cuda {};

TEST_F(DeviceResourceAlone, IsOfTheDeviceThatWasCurrentWhenItWasMade) {
  EXPECT_EQ(DeviceResource().device(), 0);
  if (!second_device()) GTEST_SKIP() << "fewer than two devices";
  test::ok(cudaSetDevice(1));
  DeviceResource memory;
  test::ok(cudaSetDevice(0));
  EXPECT_EQ(memory.device(), 1);
}

TEST_F(DeviceResourceAlone, CountsTheBytesThatCudaRefusesToTakeBack) {
  DeviceResource memory(0);
  int on_the_host = 0;
  memory.deallocate(&on_the_host, 24);
  EXPECT_EQ(memory.leaked_bytes(), 24U);
  memory.deallocate(&on_the_host, 100);
  EXPECT_EQ(memory.leaked_bytes(), 124U);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(DeviceResourceAlone, HasALedgerOfItsOwn) {
  DeviceResource first(0);
  DeviceResource second(0);
  const DeviceResource& read_only = first;
  EXPECT_EQ(&read_only.ledger(), &first.ledger());
  EXPECT_NE(&first.ledger(), &second.ledger());
}

// --- ResourceRef, without CUDA

/// Records what it is asked for.
struct Recorder {
  void* allocate(std::size_t bytes) {
    if (bytes > 1000) throw OutOfMemory(cudaErrorMemoryAllocation, "recorder: full");
    allocated.push_back(bytes);
    return &storage;
  }
  void deallocate(void* address, std::size_t bytes) noexcept {
    released_address = address;
    released_bytes = bytes;
  }
  int device() noexcept { return 5; }
  AddressLedger& ledger() noexcept { return book; }

  int storage = 0;
  std::vector<std::size_t> allocated;
  void* released_address = nullptr;
  std::size_t released_bytes = 0;
  AddressLedger book;
};

TEST(ResourceRef, ForwardsEveryCallToItsResource) {
  Recorder recorder;
  ResourceRef memory(recorder);
  void* address = memory.allocate(77);
  EXPECT_EQ(address, &recorder.storage);
  EXPECT_EQ(recorder.allocated, std::vector<std::size_t>{77});
  memory.deallocate(address, 78);
  EXPECT_EQ(recorder.released_address, address);
  EXPECT_EQ(recorder.released_bytes, 78U);
  EXPECT_EQ(memory.device(), 5);
  EXPECT_EQ(&memory.ledger(), &recorder.book);
}

TEST(ResourceRef, LetsErrorsThrough) {
  Recorder recorder;
  ResourceRef memory(recorder);
  EXPECT_THROW((void)memory.allocate(1001), OutOfMemory);
}

TEST(ResourceRef, ACopyRefersToTheSameResource) {
  Recorder recorder;
  ResourceRef first(recorder);
  ResourceRef second(first);
  (void)second.allocate(1);
  EXPECT_EQ(recorder.allocated.size(), 1U);
  EXPECT_EQ(&second.ledger(), &recorder.book);
}

TEST(ResourceRef, AnAssignedReferenceRefersToTheOtherResource) {
  Recorder one;
  Recorder other;
  ResourceRef memory(one);
  memory = ResourceRef(other);
  (void)memory.allocate(1);
  EXPECT_TRUE(one.allocated.empty());
  EXPECT_EQ(other.allocated.size(), 1U);
}

struct WithoutLedger {
  void* allocate(std::size_t /*bytes*/) { return nullptr; }
  void deallocate(void* /*address*/, std::size_t /*bytes*/) noexcept {}
  int device() noexcept { return 0; }
};
struct WithThrowingRelease : Recorder {
  void deallocate(void* /*address*/, std::size_t /*bytes*/) {}
};

TEST(ResourceRef, OnlyWholeResourcesAreResources) {
  static_assert(MemoryResource<Recorder>);
  static_assert(!MemoryResource<WithoutLedger>);
  static_assert(!MemoryResource<WithThrowingRelease>);
  static_assert(!MemoryResource<int>);
}

TEST(ResourceRef, DoesNotReferToATemporary) {
  static_assert(std::is_constructible_v<ResourceRef, Recorder&>);
  static_assert(!std::is_constructible_v<ResourceRef, Recorder>);
  static_assert(!std::is_constructible_v<ResourceRef, DeviceResource>);
}

}  // namespace
