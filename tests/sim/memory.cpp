// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Device and pinned host memory: allocation, release and what a pointer is.
//
// Each allocation is heap memory of exactly the size asked for, so that ASan sees overruns and use
// after free, and is filled with a pattern that no test mistakes for data. Freeing waits for the
// device, as CUDA does.
#include "state.hpp"

#include <cstdlib>
#include <cstring>

namespace sim::detail {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kPoison = 0xCB;

std::size_t available(int device) {
  const std::size_t capacity = state().capacity.at(static_cast<std::size_t>(device));
  const std::size_t taken = bytes_in_use(device);
  return taken < capacity ? capacity - taken : 0;
}

cudaError_t allocate(void** out, std::size_t size, cudaMemoryType type) {
  if (out == nullptr) return cudaErrorInvalidValue;
  if (size == 0) {
    *out = nullptr;
    return cudaSuccess;
  }
  const cudaError_t code = check_unsafe();
  if (code != cudaSuccess) return code;
  *out = nullptr;
  const int device = this_thread().device;
  if (type == cudaMemoryTypeDevice && size > available(device)) return cudaErrorMemoryAllocation;
  void* base = nullptr;
  if (posix_memalign(&base, kAlignment, size) != 0) return cudaErrorMemoryAllocation;
  std::memset(base, kPoison, size);
  state().allocations[reinterpret_cast<std::uintptr_t>(base)] = {base, size, type, device,
                                                                 state().next_id++};
  *out = base;
  return cudaSuccess;
}

cudaError_t release(Lock& lock, void* pointer, cudaMemoryType type) {
  const cudaError_t code = check_unsafe();
  if (code != cudaSuccess || pointer == nullptr) return code;
  const auto key = reinterpret_cast<std::uintptr_t>(pointer);
  auto found = state().allocations.find(key);
  if (found == state().allocations.end() || found->second.type != type || found->second.chunk) {
    return cudaErrorInvalidValue;
  }
  const unsigned long long id = found->second.buffer_id;
  for (int device = 0; device < kDevices; ++device) {
    if (type == cudaMemoryTypeHost || found->second.device == device) {
      wait_for_device(lock, device);
      // The wait opens the lock, so another thread may have freed the memory.
      found = state().allocations.find(key);
      if (found == state().allocations.end() || found->second.buffer_id != id) {
        return cudaErrorInvalidValue;
      }
    }
  }
  state().allocations.erase(found);
  unlocked(lock, [pointer] { std::free(pointer); });  // in the sight of TSan
  return cudaSuccess;
}

cudaError_t describe(cudaPointerAttributes* out, const void* pointer) {
  if (out == nullptr) return cudaErrorInvalidValue;
  *out = {};
  const Allocation* allocation = find_allocation(pointer);
  void* address = const_cast<void*>(pointer);
  out->hostPointer = address;
  if (allocation == nullptr) {
    out->type = cudaMemoryTypeUnregistered;
    out->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  out->type = allocation->type;
  out->device = allocation->device;
  out->devicePointer = address;
  if (allocation->type == cudaMemoryTypeDevice) out->hostPointer = nullptr;
  return cudaSuccess;
}

}  // namespace

std::size_t bytes_in_use(int device) {
  std::size_t bytes = 0;
  for (const auto& [address, allocation] : state().allocations) {
    const bool counts = allocation.type == cudaMemoryTypeDevice && allocation.device == device;
    bytes += counts ? allocation.size : 0;
  }
  return bytes;
}

const Allocation* find_allocation(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto next = state().allocations.upper_bound(address);
  if (next == state().allocations.begin()) return nullptr;
  const auto& [base, allocation] = *--next;
  return address - base < allocation.size ? &allocation : nullptr;
}

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t size) {
  return api("cudaMalloc", [&](Lock&) { return allocate(pointer, size, cudaMemoryTypeDevice); });
}

cudaError_t cudaFree(void* pointer) {
  return api("cudaFree", [&](Lock& lock) { return release(lock, pointer, cudaMemoryTypeDevice); });
}

cudaError_t cudaMallocHost(void** pointer, std::size_t size) {
  return api("cudaMallocHost", [&](Lock&) { return allocate(pointer, size, cudaMemoryTypeHost); });
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t size, unsigned flags) {
  return api("cudaHostAlloc", [&](Lock&) {
    constexpr unsigned kKnown =
        cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if ((flags & ~kKnown) != 0) return cudaErrorInvalidValue;
    return allocate(pointer, size, cudaMemoryTypeHost);
  });
}

cudaError_t cudaFreeHost(void* pointer) {
  return api("cudaFreeHost",
             [&](Lock& lock) { return release(lock, pointer, cudaMemoryTypeHost); });
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  return api("cudaMemGetInfo", [&](Lock&) {
    if (free_bytes == nullptr || total == nullptr) return cudaErrorInvalidValue;
    const int device = this_thread().device;
    *free_bytes = available(device);
    *total = state().capacity.at(static_cast<std::size_t>(device));
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return api("cudaPointerGetAttributes", [&](Lock&) { return describe(attributes, pointer); });
}

}  // extern "C"

}  // namespace sim::detail
