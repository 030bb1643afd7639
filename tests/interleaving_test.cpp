// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Refits and reads on several streams, run in many orders that the marks allow: every read must
/// see the generation that the host's call order gives it. Without the marks some order must show a
/// wrong one, or the test proves nothing. Simulation only.

#include "holdfast/stable_buffer.hpp"

#include "sim/sim.hpp"
#include "support/recipes.hpp"
#include "support/runtime.hpp"

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace {

using holdfast::Shape;
using holdfast::TensorView;
using test::ok;
using Buffer = holdfast::StableBuffer<float>;

constexpr std::size_t kCount = 8;
constexpr int kSteps = 24;
constexpr int kSeeds = 300;

enum class Marks { none, uses_only, fills_only, both };

/// Random refits on two streams and reads on two others; counts the reads that saw anything but the
/// contents of the last finalize before them, whole.
int wrong_reads(std::uint64_t seed, Marks marks) {
  sim::reset();
  sim::set_schedule(seed);
  std::mt19937_64 random(seed);
  holdfast::DeviceResource memory(0);
  cudaStream_t streams[4];
  for (cudaStream_t& stream : streams) {
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  Buffer buffer("interleaved", memory);
  std::vector<std::unique_ptr<test::DeviceArray<float>>> sources;
  std::vector<std::unique_ptr<test::DeviceArray<float>>> outputs;
  std::vector<float> expected;
  for (int i = 0; i <= kSteps; ++i) {
    sources.push_back(std::make_unique<test::DeviceArray<float>>(
        std::vector<float>(kCount, static_cast<float>(i))));
    outputs.push_back(
        std::make_unique<test::DeviceArray<float>>(std::vector<float>(kCount, -1.0F)));
  }
  float now = 0.0F;
  const auto refit = [&](int step, cudaStream_t stream) {
    now = static_cast<float>(step);
    const float* source = sources[static_cast<std::size_t>(step)]->data();
    buffer.finalize(test::CopyOf<float>(TensorView(source, Shape{kCount}, 0)), stream);
  };
  refit(0, streams[0]);
  for (int step = 1; step <= kSteps; ++step) {
    if (random() % 3 == 0) {
      refit(step, streams[random() % 2]);
    } else {
      const cudaStream_t reader = streams[2 + random() % 2];
      if (marks == Marks::fills_only || marks == Marks::both) buffer.wait_ready(reader);
      ok(cudaMemcpyAsync(outputs[expected.size()]->data(), buffer.data(), kCount * sizeof(float),
                         cudaMemcpyDeviceToDevice, reader));
      if (marks == Marks::uses_only || marks == Marks::both) buffer.mark_use(reader);
      expected.push_back(now);
    }
    if (random() % 5 == 0) (void)sim::run_one(streams[random() % 4]);
  }
  for (const cudaStream_t stream : streams) ok(cudaStreamSynchronize(stream));
  int wrong = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (outputs[i]->download() != std::vector<float>(kCount, expected[i])) ++wrong;
  }
  for (const cudaStream_t stream : streams) ok(cudaStreamDestroy(stream));
  return wrong;
}

int wrong_reads_of_all_seeds(Marks marks) {
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) wrong += wrong_reads(seed, marks);
  return wrong;
}

TEST(Interleaving, MarkedReadsSeeTheRefitBeforeThemInEveryOrder) {
  EXPECT_EQ(wrong_reads_of_all_seeds(Marks::both), 0);
}

TEST(Interleaving, EachHalfOfTheMarksIsNeeded) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "races on purpose, and ThreadSanitizer would say so";
#endif
  EXPECT_GT(wrong_reads_of_all_seeds(Marks::none), 0);
  EXPECT_GT(wrong_reads_of_all_seeds(Marks::uses_only), 0);
  EXPECT_GT(wrong_reads_of_all_seeds(Marks::fills_only), 0);
}

}  // namespace
