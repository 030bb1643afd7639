// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// What only a device can answer: kernels that read the buffer while it is refitted under a running
/// graph, first launches inside a capture, host memory over many refits, stream ids, memory pools.

#include "holdfast/memory_resource.hpp"
#include "holdfast/relayout.cuh"
#include "holdfast/stable_buffer.hpp"
#include "holdfast/stream_sum.cuh"

#include "support/runtime.hpp"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using holdfast::DeviceResource;
using holdfast::StableBuffer;
using holdfast::StreamSum;
using holdfast::TensorView;
using test::DeviceArray;
using test::Graph;
using test::ok;

constexpr std::int64_t kMixes = 24;
constexpr std::int64_t kStreams = 4;
constexpr std::int64_t kHidden = 4096;
constexpr std::size_t kCount = kMixes * kHidden;

using Gpu = test::Cuda;

template <class T>
__global__ void copy_kernel(T* out, const T* in, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    out[i] = in[i];
  }
}

/// Smallest and largest element, by one block.
template <class T>
__global__ void range_kernel(T* out, const T* in, std::int64_t count) {
  __shared__ T low[256];
  __shared__ T high[256];
  T l = in[0];
  T h = in[0];
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    l = in[i] < l ? in[i] : l;
    h = in[i] > h ? in[i] : h;
  }
  low[threadIdx.x] = l;
  high[threadIdx.x] = h;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 256; ++i) {
    l = low[i] < l ? low[i] : l;
    h = high[i] > h ? high[i] : h;
  }
  out[0] = l;
  out[1] = h;
}

TEST_F(Gpu, KernelNodesReadEveryRefitWithoutAnyHostWait) {
  constexpr int kRounds = 100;
  DeviceResource memory(0);
  StableBuffer<float> buffer("broadcast", memory);
  const DeviceArray<float> source(kCount * kStreams);
  const DeviceArray<float> outputs(2 * kRounds);
  const TensorView view(static_cast<const float*>(source.data()), {kMixes, kStreams, kHidden}, 0);
  source.poison(0);
  buffer.finalize(StreamSum<float>{view}, stream);
  sync();
  const DeviceArray<float> range(2);
  const Graph graph(stream, [&] {
    range_kernel<float><<<1, 256, 0, stream>>>(range.data(), buffer.data(), kCount);
    ok(cudaGetLastError());
  });
  const std::size_t weights = kCount * kStreams;
  float* pinned = nullptr;  // from pageable memory the host would wait for each copy
  ok(cudaMallocHost(&pinned, kRounds * weights * sizeof(float)));
  for (int round = 0; round < kRounds; ++round) {
    std::fill_n(pinned + round * weights, weights, static_cast<float>(round + 1));
  }
  for (int round = 0; round < kRounds; ++round) {
    ok(cudaMemcpyAsync(source.data(), pinned + round * weights, source.bytes(),
                       cudaMemcpyHostToDevice, stream));
    buffer.finalize(StreamSum<float>{view}, stream);
    graph.launch(stream);
    ok(cudaMemcpyAsync(outputs.data() + 2 * round, range.data(), 2 * sizeof(float),
                       cudaMemcpyDeviceToDevice, stream));
  }
  sync();
  const auto found = outputs.download();
  for (int round = 0; round < kRounds; ++round) {
    const float expected = 4.0F * static_cast<float>(round + 1);
    EXPECT_EQ(found[2 * round], expected);
    EXPECT_EQ(found[2 * round + 1], expected);
  }
  ok(cudaFreeHost(pinned));
}

/// Refits on `stream` beside replays on another one; counts the replays that saw anything but the
/// refit before them, whole.
int wrong_replays(cudaStream_t stream, bool marked) {
  constexpr int kRounds = 500;
  DeviceResource memory(0);
  StableBuffer<float> buffer("broadcast", memory);
  const DeviceArray<float> a(std::vector<float>(kCount * kStreams, 1.0F));
  const DeviceArray<float> b(std::vector<float>(kCount * kStreams, 2.0F));
  const auto recipe = [](const DeviceArray<float>& from) {
    return StreamSum<float>{
        TensorView(static_cast<const float*>(from.data()), {kMixes, kStreams, kHidden}, 0)};
  };
  cudaStream_t reader = nullptr;
  ok(cudaStreamCreateWithFlags(&reader, cudaStreamNonBlocking));
  buffer.finalize(recipe(a), stream);
  ok(cudaStreamSynchronize(stream));
  const DeviceArray<float> range(2);
  const DeviceArray<float> outputs(2 * kRounds);
  const Graph graph(reader, [&] {
    range_kernel<float><<<1, 256, 0, reader>>>(range.data(), buffer.data(), kCount);
    ok(cudaGetLastError());
  });
  for (int round = 0; round < kRounds; ++round) {
    buffer.finalize(recipe(round % 2 == 0 ? a : b), stream);
    if (marked) buffer.wait_ready(reader);
    graph.launch(reader);
    if (marked) buffer.mark_use(reader);
    ok(cudaMemcpyAsync(outputs.data() + 2 * round, range.data(), 2 * sizeof(float),
                       cudaMemcpyDeviceToDevice, reader));
  }
  ok(cudaStreamSynchronize(reader));
  const auto found = outputs.download();
  int wrong = 0;
  for (int round = 0; round < kRounds; ++round) {
    const float expected = round % 2 == 0 ? 4.0F : 8.0F;
    if (found[2 * round] != expected || found[2 * round + 1] != expected) ++wrong;
  }
  ok(cudaStreamDestroy(reader));
  return wrong;
}

TEST_F(Gpu, MarkedReplaysOnAnotherStreamAreNeverTorn) {
  EXPECT_EQ(wrong_replays(stream, true), 0);
  EXPECT_GT(wrong_replays(stream, false), 0) << "the streams never overlapped: nothing was tested";
}

TEST_F(Gpu, FirstLaunchOfAKernelMayBeRecorded) {
  // No other test uses these instantiations, so with lazy loading their first launch is the
  // recorded one, in a global-mode capture.
  DeviceResource memory(0);
  const DeviceArray<__half> source(std::vector<__half>(512, __float2half(1.5F)));
  StableBuffer<std::int32_t> copied("copied", memory);
  StableBuffer<__half> summed("summed", memory);
  const DeviceArray<std::int32_t> words(std::vector<std::int32_t>(128, 77));
  copied.allocate({16, 8});
  summed.allocate({2, 64});
  const Graph graph(stream, [&] {
    copied.finalize(
        holdfast::Relayout<std::int32_t>{TensorView(words.data(), {8, 16}, 0).permute({1, 0})},
        holdfast::Capture::record, stream);
    summed.finalize(StreamSum<__half>{TensorView(source.data(), {2, 4, 64}, 0)},
                    holdfast::Capture::record, stream);
  });
  EXPECT_EQ(graph.nodes(), 2U);
  graph.launch(stream);
  sync();
  EXPECT_EQ(test::download(copied.data(), 128), std::vector<std::int32_t>(128, 77));
  for (const __half value : test::download(summed.data(), 128))
    EXPECT_EQ(__half2float(value), 6.0F);
}

long resident_kib() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  long size = 0;
  long resident = 0;
  const int fields = std::fscanf(file, "%ld %ld", &size, &resident);
  std::fclose(file);
  return fields == 2 ? resident * (sysconf(_SC_PAGESIZE) / 1024) : 0;
}

TEST_F(Gpu, HostMemoryIsFlatOverTenThousandRefits) {
  DeviceResource memory(0);
  StableBuffer<float> buffer("broadcast", memory);
  const DeviceArray<float> source(std::vector<float>(kCount * kStreams, 1.0F));
  const StreamSum<float> recipe{
      TensorView(static_cast<const float*>(source.data()), {kMixes, kStreams, kHidden}, 0)};
  for (int round = 0; round < 2000; ++round) buffer.finalize(recipe, stream);
  sync();
  const long before = resident_kib();
  ASSERT_GT(before, 0);
  for (int round = 0; round < 10000; ++round) buffer.finalize(recipe, stream);
  sync();
  EXPECT_LE(resident_kib() - before, 1024) << "KiB";
}

TEST_F(Gpu, StreamIdsTellPerThreadStreamsApart) {
  // StableBuffer tells marks apart by stream id, also those of cudaStreamPerThread.
  unsigned long long mine = 0;
  unsigned long long theirs = 0;
  ok(cudaStreamGetId(cudaStreamPerThread, &mine));
  std::thread([&] {
    ok(cudaSetDevice(0));
    ok(cudaStreamGetId(cudaStreamPerThread, &theirs));
  }).join();
  EXPECT_NE(mine, theirs);
}

TEST_F(Gpu, RefitIsExactUnderCopyKernelNodes) {
  DeviceResource memory(0);
  StableBuffer<float> buffer("broadcast", memory);
  const DeviceArray<float> source(kCount * kStreams);
  const DeviceArray<float> output(kCount);
  const TensorView view(static_cast<const float*>(source.data()), {kMixes, kStreams * kHidden}, 0);
  std::vector<float> weights(kCount * kStreams);
  for (int round = 0; round < 3; ++round) {
    std::vector<float> expected(kCount);
    for (std::int64_t m = 0; m < kMixes; ++m) {
      for (std::int64_t h = 0; h < kHidden; ++h) {
        volatile float sum = 0.0F;  // volatile: each addition is rounded to float
        for (std::int64_t s = 0; s < kStreams; ++s) {
          const float value =
              1.0F / static_cast<float>(1 + (m * 31 + s * 17 + h * 7 + round) % 1013);
          weights[static_cast<std::size_t>((m * kStreams + s) * kHidden + h)] = value;
          sum = sum + value;
        }
        expected[static_cast<std::size_t>(m * kHidden + h)] = sum;
      }
    }
    source.upload(weights);
    buffer.finalize(StreamSum<float>{view, kStreams}, stream);
    sync();
    output.poison();
    const Graph graph(stream, [&] {
      copy_kernel<float><<<96, 256, 0, stream>>>(output.data(), buffer.data(), kCount);
      ok(cudaGetLastError());
    });
    graph.launch(stream);
    sync();
    EXPECT_EQ(output.download(), expected);
  }
}

/// A pool maps memory and hands out parts of it, side by side: a tensor that reaches into the next
/// part is a mistake, although memory is mapped there.
TEST_F(Gpu, AdoptKeepsToItsPartOfAPool) {
  constexpr std::size_t kBytes = kCount * sizeof(float);
  DeviceResource memory(0);
  std::vector<float*> parts(32);
  for (float*& part : parts) {
    void* address = nullptr;
    ok(cudaMallocAsync(&address, kBytes, stream));
    part = static_cast<float*>(address);
  }
  sync();
  int neighbours = 0;
  for (float* const part : parts) {
    neighbours += std::find(parts.begin(), parts.end(), part + kCount) != parts.end() ? 1 : 0;
    StableBuffer<float> buffer("weight", memory);
    try {
      buffer.adopt(TensorView(part + kCount / 2, {kMixes, kHidden}, 0));
      ADD_FAILURE() << "not refused";
    } catch (const holdfast::ContractError& error) {
      EXPECT_EQ(error.rule(), holdfast::Rule::shape_mismatch) << error.what();
    }
    buffer.adopt(TensorView(part, {kMixes, kHidden}, 0));
  }
  EXPECT_GT(neighbours, 0);
  for (float* const part : parts) ok(cudaFreeAsync(part, stream));
}

}  // namespace
