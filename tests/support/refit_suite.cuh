// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The two promises of the project as a typed suite over the buffer: the sums are right, and a
/// refit keeps the identity (address, allocation, and what captured graphs read). The second is
/// what a buffer that rebinds on every finalize breaks, so the suite also runs over one that does:
/// see mutation/.
///
/// The source is [24, 4, 4096] f32 integers of at most 1000, so that every sum is exact in any
/// order.

#include "holdfast/memory_resource.hpp"
#include "holdfast/stream_sum.cuh"

#include "support/runtime.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace test {

template <class Buffer>
class Refit : public Cuda {
 protected:
  static constexpr std::int64_t kMixes = 24;
  static constexpr std::int64_t kStreams = 4;
  static constexpr std::int64_t kHidden = 4096;
  static constexpr std::size_t kCount = kMixes * kHidden;

  void SetUp() override {
    Cuda::SetUp();
    if (stream == nullptr) return;
    memory.emplace(0);
    source.emplace(kCount * kStreams);
    output.emplace(kCount);
    buffer.emplace("layers.0.hc_attn_fn_broadcast", *memory);
  }
  void TearDown() override {
    buffer.reset();
    output.reset();
    source.reset();
    Cuda::TearDown();
  }

  /// Integers in [-1000, 1000] that differ between rounds, rows, streams and columns.
  static float weight(int round, std::int64_t mix, std::int64_t at_stream, std::int64_t column) {
    const auto mixed = static_cast<std::uint64_t>(round * 7919 + mix * 104729 +
                                                  at_stream * 1299709 + column * 15485863);
    return static_cast<float>(static_cast<std::int64_t>((mixed * 2654435761U >> 7U) % 2001U) -
                              1000);
  }
  void finalize(int round) {
    std::vector<float> weights(kCount * kStreams);
    for (std::int64_t m = 0; m < kMixes; ++m) {
      for (std::int64_t s = 0; s < kStreams; ++s) {
        for (std::int64_t h = 0; h < kHidden; ++h) {
          weights[static_cast<std::size_t>((m * kStreams + s) * kHidden + h)] =
              weight(round, m, s, h);
        }
      }
    }
    source->upload(weights);
    const holdfast::TensorView view(static_cast<const float*>(source->data()),
                                    {kMixes, kStreams, kHidden}, 0);
    buffer->finalize(holdfast::StreamSum<float>{view}, stream);
    sync();
  }
  static std::vector<float> sums(int round) {
    std::vector<float> result(kCount);
    for (std::int64_t m = 0; m < kMixes; ++m) {
      for (std::int64_t h = 0; h < kHidden; ++h) {
        float sum = 0.0F;
        for (std::int64_t s = 0; s < kStreams; ++s) sum += weight(round, m, s, h);
        result[static_cast<std::size_t>(m * kHidden + h)] = sum;
      }
    }
    return result;
  }
  [[nodiscard]] std::uint64_t allocation_id() {
    const auto range = memory->ledger().find(buffer->data());
    return range ? range->backing.at(0).buffer_id : 0;
  }

  std::optional<holdfast::DeviceResource> memory;
  std::optional<DeviceArray<float>> source;
  std::optional<DeviceArray<float>> output;
  std::optional<Buffer> buffer;
};

TYPED_TEST_SUITE_P(Refit);

TYPED_TEST_P(Refit, SumsAreRightTheFirstTime) {
  this->finalize(1);
  EXPECT_EQ(test::download(this->buffer->data(), this->kCount), this->sums(1));
}

TYPED_TEST_P(Refit, SumsAreRightAfterEveryRefit) {
  for (int round = 1; round <= 4; ++round) {
    this->finalize(round);
    EXPECT_EQ(test::download(this->buffer->data(), this->kCount), this->sums(round));
  }
  EXPECT_NE(this->sums(1), this->sums(2)) << "the rounds must differ, or nothing is tested";
}

TYPED_TEST_P(Refit, IdentityOfTheAddress) {
  this->finalize(1);
  const float* const address = this->buffer->data();
  this->finalize(2);
  EXPECT_EQ(this->buffer->data(), address);
}

TYPED_TEST_P(Refit, IdentityOfTheAllocation) {
  this->finalize(1);
  const std::uint64_t id = this->allocation_id();
  ASSERT_NE(id, 0U);
  this->finalize(2);
  EXPECT_EQ(this->allocation_id(), id);
}

TYPED_TEST_P(Refit, IdentityThroughACapturedGraph) {
  this->finalize(1);
  const Graph graph(this->stream, [&] {
    ok(cudaMemcpyAsync(this->output->data(), this->buffer->data(), this->kCount * sizeof(float),
                       cudaMemcpyDeviceToDevice, this->stream));
  });
  for (int round = 2; round <= 4; ++round) {
    this->finalize(round);
    this->output->poison();
    graph.launch(this->stream);
    this->sync();
    EXPECT_EQ(this->output->download(), this->sums(round)) << "the replay read stale weights";
  }
}

REGISTER_TYPED_TEST_SUITE_P(Refit, SumsAreRightTheFirstTime, SumsAreRightAfterEveryRefit,
                            IdentityOfTheAddress, IdentityOfTheAllocation,
                            IdentityThroughACapturedGraph);

}  // namespace test
