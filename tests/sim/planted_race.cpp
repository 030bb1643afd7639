// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// A race that ThreadSanitizer must report, and its cure, about which it must be silent.
//
// Two streams write one buffer: `race` and `race-host` leave them unordered, by a copy or by a
// host function; `ordered` puts an event between them and ends with a read on the host. The
// simulation runs all work on one thread, so only what it tells TSan about streams can find this.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

namespace {

constexpr std::size_t kBytes = 1024;

void check(cudaError_t code) {
  if (code != cudaSuccess) std::fprintf(stderr, "%s\n", cudaGetErrorString(code));
}

void write_first(void* memory) { *static_cast<unsigned char*>(memory) = 1; }

}  // namespace

int main(int count, char** arguments) {
  const char* mode = count == 2 ? arguments[1] : "";
  const bool ordered = std::strcmp(mode, "ordered") == 0;
  const bool by_host_function = std::strcmp(mode, "race-host") == 0;
  if (!ordered && !by_host_function && std::strcmp(mode, "race") != 0) {
    std::fprintf(stderr, "usage: planted_race race|race-host|ordered\n");
    return 2;
  }

  void* memory = nullptr;
  unsigned char* pinned = nullptr;
  cudaStream_t first = nullptr;
  cudaStream_t second = nullptr;
  cudaEvent_t event = nullptr;
  check(cudaMalloc(&memory, kBytes));
  check(cudaMallocHost(reinterpret_cast<void**>(&pinned), kBytes));
  check(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  std::memset(pinned, 7, kBytes);

  check(cudaMemcpyAsync(memory, pinned, kBytes, cudaMemcpyHostToDevice, first));
  check(cudaEventRecord(event, first));
  if (ordered) check(cudaStreamWaitEvent(second, event, 0));
  if (by_host_function) {
    check(cudaLaunchHostFunc(second, write_first, memory));
  } else {
    check(cudaMemsetAsync(memory, 9, kBytes, second));
  }
  if (ordered) {
    check(cudaMemcpyAsync(pinned, memory, kBytes, cudaMemcpyDeviceToHost, second));
    check(cudaStreamSynchronize(second));
    if (pinned[0] != 9) return 1;
  }

  check(cudaDeviceSynchronize());
  check(cudaEventDestroy(event));
  check(cudaStreamDestroy(second));
  check(cudaStreamDestroy(first));
  check(cudaFreeHost(pinned));
  check(cudaFree(memory));
  return 0;
}
