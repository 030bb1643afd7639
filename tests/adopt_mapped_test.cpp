// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// StableBuffer::adopt of memory that an engine's allocator mapped chunk by chunk, as PyTorch's
/// expandable segments and the sleep allocators of serving engines do.

#include "holdfast/stable_buffer.hpp"

#include "support/mapped_memory.hpp"
#include "support/recipes.hpp"
#include "support/runtime.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace {

using holdfast::ContractError;
using holdfast::Rule;
using holdfast::Shape;
using holdfast::State;
using holdfast::TensorView;
using test::MappedMemory;
using Buffer = holdfast::StableBuffer<float>;

constexpr std::size_t kChunk = MappedMemory::kChunk;
const Shape kWeight{24, 4096};  // 384 KiB
constexpr std::size_t kCount = std::size_t{24} * 4096;
constexpr std::size_t kBytes = kCount * sizeof(float);

class AdoptMapped : public test::Cuda {
 protected:
  void SetUp() override {
    test::Cuda::SetUp();
    if (stream != nullptr) memory.emplace(0);
  }
  /// Adopts `bytes` bytes at `offset`; the message of the refusal, which is for `rule`.
  std::string refusal(const MappedMemory& mapped, std::size_t offset, Rule rule,
                      const Shape& shape = kWeight) {
    Buffer buffer("weight", *memory);
    try {
      buffer.adopt(TensorView(mapped.as<float>(offset), shape, 0));
    } catch (const ContractError& error) {
      EXPECT_EQ(error.rule(), rule) << error.what();
      EXPECT_EQ(buffer.state(), State::empty);
      EXPECT_TRUE(memory->ledger().live().empty());
      return error.what();
    }
    ADD_FAILURE() << "not refused";
    return {};
  }
  static bool names(const std::string& message, std::uintptr_t address) {
    return message.find(holdfast::detail::hex(address)) != std::string::npos;
  }

  std::optional<holdfast::DeviceResource> memory;
};

TEST_F(AdoptMapped, ATensorAcrossChunksIsAdoptedAndWritten) {
  MappedMemory mapped(3);
  for (std::size_t i = 0; i < 3; ++i) mapped.map(i);
  for (const std::size_t offset : {std::size_t{0}, kChunk - 4096, kChunk - 4, 2 * kChunk - kBytes,
                                   2 * kChunk - 512, 3 * kChunk - kBytes}) {
    std::vector<float> values(kCount);
    std::iota(values.begin(), values.end(), static_cast<float>(offset % 977));
    const test::DeviceArray<float> source(values);
    Buffer buffer("weight", *memory);
    buffer.adopt(TensorView(mapped.as<float>(offset), kWeight, 0));
    EXPECT_EQ(buffer.data(), mapped.as<float>(offset));
    buffer.finalize(test::CopyOf<float>(TensorView(source.data(), kWeight, 0)), stream);
    EXPECT_EQ(test::download(buffer.data(), kCount), values) << "at " << offset;
  }
}

TEST_F(AdoptMapped, ATensorOfManyChunksIsAdopted) {
  MappedMemory mapped(4);
  for (std::size_t i = 0; i < 4; ++i) mapped.map(i);
  Buffer buffer("large", *memory);
  buffer.adopt(TensorView(mapped.as<float>(4), {static_cast<std::int64_t>(kChunk - 2)}, 0));
  EXPECT_EQ(memory->ledger().live().at(0).backing.size(), 4U);
}

TEST_F(AdoptMapped, TheLedgerTellsEachChunk) {
  MappedMemory mapped(3);
  for (std::size_t i = 0; i < 3; ++i) mapped.map(i);
  Buffer buffer("weight", *memory);
  buffer.adopt(TensorView(mapped.as<float>(kChunk - 4096), kWeight, 0));
  const auto range = memory->ledger().live().at(0);
  EXPECT_EQ(range.base, mapped.at(kChunk - 4096));
  EXPECT_EQ(range.bytes, kBytes);
  ASSERT_EQ(range.backing.size(), 2U);
  EXPECT_EQ(range.backing[0].base, mapped.at(kChunk - 4096));
  EXPECT_EQ(range.backing[0].bytes, 4096U);
  EXPECT_EQ(range.backing[1].base, mapped.at(kChunk));
  EXPECT_EQ(range.backing[1].bytes, kBytes - 4096);
  EXPECT_NE(range.backing[0].buffer_id, range.backing[1].buffer_id);
  EXPECT_EQ(range.backing[1].buffer_id, holdfast::detail::buffer_id(mapped.at(kChunk + 4096)));
}

TEST_F(AdoptMapped, OtherMemoryAtTheSameAddressHasAnotherId) {
  MappedMemory mapped(1);
  mapped.map(0);
  const std::uint64_t before = holdfast::detail::buffer_id(mapped.at(0));
  mapped.unmap(0);
  mapped.map(0);
  EXPECT_NE(holdfast::detail::buffer_id(mapped.at(0)), before);
}

TEST_F(AdoptMapped, AHoleIsRefusedByItsAddress) {
  MappedMemory mapped(4);
  for (std::size_t i = 0; i < 3; ++i) mapped.map(i);
  mapped.unmap(1);
  EXPECT_TRUE(names(refusal(mapped, kChunk - 4096, Rule::shape_mismatch), mapped.at(kChunk)));
  // Behind the last chunk the reservation goes on, and memory does not.
  EXPECT_TRUE(
      names(refusal(mapped, 3 * kChunk - 4096, Rule::shape_mismatch), mapped.at(3 * kChunk)));
  mapped.map(1);
  Buffer buffer("weight", *memory);
  buffer.adopt(TensorView(mapped.as<float>(kChunk - 4096), kWeight, 0));
  EXPECT_EQ(buffer.state(), State::unset);
}

TEST_F(AdoptMapped, AnAddressWhereNothingIsMappedIsRefused) {
  MappedMemory mapped(2);
  mapped.map(1);
  EXPECT_TRUE(names(refusal(mapped, 0, Rule::device_mismatch), mapped.at(0)));
}

TEST_F(AdoptMapped, AChunkOfAnotherDeviceIsRefusedByItsAddress) {
  int devices = 0;
  test::ok(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two devices, found " << devices;
  MappedMemory mapped(2);
  mapped.map(0);
  mapped.map(1, 1);
  const std::string message = refusal(mapped, kChunk - 4096, Rule::device_mismatch);
  EXPECT_TRUE(names(message, mapped.at(kChunk))) << message;
  EXPECT_NE(message.find("device 1"), std::string::npos) << message;
}

TEST_F(AdoptMapped, TwoReservationsSideBySideAreNotOne) {
  MappedMemory first(1);
  first.map(0);
  MappedMemory second(1, first.at(kChunk));
  if (second.at(0) != first.at(kChunk)) GTEST_SKIP() << "the driver put them apart";
  second.map(0);
  EXPECT_TRUE(names(refusal(first, kChunk - 4096, Rule::shape_mismatch), second.at(0)));
}

TEST_F(AdoptMapped, TwoAllocationsSideBySideAreNotOne) {
  // cudaMalloc hands out neighbours; a tensor that reaches into the next one is a mistake.
  std::vector<std::byte*> blocks(64);
  for (std::byte*& block : blocks) {
    void* address = nullptr;
    test::ok(cudaMalloc(&address, kChunk));
    block = static_cast<std::byte*>(address);
  }
  Buffer buffer("weight", *memory);
  int neighbours = 0;
  for (std::byte* const block : blocks) {
    neighbours += std::find(blocks.begin(), blocks.end(), block + kChunk) != blocks.end() ? 1 : 0;
    try {
      buffer.adopt(TensorView(reinterpret_cast<float*>(block + kChunk - 4096), kWeight, 0));
      ADD_FAILURE() << "not refused";
    } catch (const ContractError& error) {
      EXPECT_EQ(error.rule(), Rule::shape_mismatch) << error.what();
    }
  }
  if (!test::simulated()) {  // whose blocks always lie apart
    EXPECT_GT(neighbours, 0);
  }
  for (std::byte* const block : blocks) test::ok(cudaFree(block));
}

TEST_F(AdoptMapped, MappingAndAskingWorkBesideACapture) {
  MappedMemory mapped(2);
  mapped.map(0);
  mapped.map(1);
  Buffer buffer("weight", *memory);
  const test::Graph graph(stream, [&] {
    buffer.adopt(TensorView(mapped.as<float>(kChunk - 4096), kWeight, 0));
    test::ok(cudaMemsetAsync(buffer.data(), 0, kBytes, stream));
  });
  EXPECT_EQ(graph.nodes(), 1U);
}

}  // namespace
