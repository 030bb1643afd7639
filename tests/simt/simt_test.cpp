// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// What kernels may rely on when a host compiler compiles them.

#include "simt/device.hpp"

#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <vector>

namespace {

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
  std::multiset<std::tuple<unsigned, unsigned, unsigned, unsigned, unsigned, unsigned>> seen;
  simt::run(dim3(2, 3, 2), dim3(5, 2, 3), 0, [&] {
    EXPECT_EQ(blockDim.y, 2U);
    EXPECT_EQ(gridDim.y, 3U);
    seen.emplace(blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  });
  EXPECT_EQ(seen.size(), 2U * 3 * 2 * 5 * 2 * 3);
  for (const auto& one : seen) {
    EXPECT_EQ(seen.count(one), 1U);
    EXPECT_LT(std::get<3>(one), 5U);
    EXPECT_LT(std::get<4>(one), 2U);
  }
}

TEST(Simt, ABlockRunsForwardsTheNextBackwards) {
  std::vector<unsigned> order;
  simt::run(2, 3, 0, [&] { order.push_back(10 * blockIdx.x + threadIdx.x); });
  EXPECT_EQ(order, (std::vector<unsigned>{0, 1, 2, 12, 11, 10}));
}

TEST(Simt, ABarrierSeparatesWhatComesBeforeFromWhatComesAfter) {
  constexpr unsigned kThreads = 96;
  simt::run(4, kThreads, kThreads * sizeof(unsigned), [] {
    auto* shared = static_cast<unsigned*>(simt::dynamic_shared());
    for (unsigned round = 1; round < 5; ++round) {
      shared[threadIdx.x] = threadIdx.x * round;
      __syncthreads();
      const unsigned other = (threadIdx.x + 50) % kThreads;
      EXPECT_EQ(shared[other], other * round);
      __syncthreads();
    }
  });
}

TEST(Simt, DynamicSharedMemoryIsPoisonedForEachBlock) {
  simt::run(3, 1, 4, [] {
    auto* shared = static_cast<unsigned*>(simt::dynamic_shared());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(shared) % 128, 0U);
    EXPECT_EQ(*shared, 0xCBCBCBCBU);
    *shared = 1;
  });
}

TEST(Simt, LanesExchangeWithinTheirWarp) {
  simt::run(2, 64, 0, [] {
    const int mine = static_cast<int>(threadIdx.x);
    for (const int lanes : {1, 2, 4, 8, 16, 31}) {
      EXPECT_EQ(__shfl_xor_sync(0xFFFFFFFFU, mine, lanes), mine ^ lanes);
    }
    EXPECT_EQ(__shfl_sync(0xFFFFFFFFU, mine, 5), mine / 32 * 32 + 5);
    __syncwarp();
  });
}

TEST(Simt, ANamedBarrierIsForThoseThatComeToIt) {
  static int arrived;
  simt::run(2, 96, 0, [] {
    if (threadIdx.x >= 64) return;
    if (threadIdx.x == 0) arrived = 0;
    simt::barrier(1, 64);
    ++arrived;
    simt::barrier(1, 64);
    EXPECT_EQ(arrived, 64);
    __syncthreads();  // those that returned are not waited for
  });
}

TEST(SimtDeathTest, WaitingForWhatNeverComesEndsTheProcess) {
  EXPECT_DEATH(simt::run(1, 64, 0,
                         [] {
                           if (threadIdx.x < 32) simt::barrier(1, 64);
                         }),
               "32 threads of a block wait");
}

}  // namespace
