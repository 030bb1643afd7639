// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Mapped memory: reservations of addresses, chunks of memory, and which chunk lies where.
//
// A chunk is a file in memory, so that it keeps its contents while it is mapped nowhere or twice.
// Addresses where nothing is mapped fault. Unmapping and releasing wait for nothing, as in CUDA:
// work that still uses the memory is the caller's fault.
#include "state.hpp"

#include <iterator>
#include <sys/mman.h>
#include <unistd.h>

namespace sim::detail {

Chunk::~Chunk() { (void)close(file); }

std::pair<std::uintptr_t, std::size_t> reservation_of(std::uintptr_t address) {
  return *std::prev(state().reservations.upper_bound(address));
}

namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20U;

bool is_granular(std::uintptr_t address, std::size_t size) {
  return size > 0 && size % kGranularity == 0 && address % kGranularity == 0;
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Whether [address, address + size) lies in one reservation.
bool is_reserved(CUdeviceptr address, std::size_t size) {
  auto next = state().reservations.upper_bound(address);
  if (next == state().reservations.begin()) return false;
  const auto& [base, bytes] = *--next;
  return address - base <= bytes && size <= bytes - (address - base);
}

// The mappings that begin in [address, address + size), by calls that leave none half outside.
template <class Visit>
bool for_mappings(CUdeviceptr address, std::size_t size, Visit&& visit) {
  auto& allocations = state().allocations;
  CUdeviceptr at = address;
  while (at < address + size) {
    const auto found = allocations.find(at);
    if (found == allocations.end() || !found->second.chunk) return false;
    at += found->second.size;
  }
  if (at != address + size) return false;
  for (auto each = allocations.find(address);
       each != allocations.end() && each->first < address + size;) {
    const auto next = std::next(each);
    visit(each);
    each = next;
  }
  return true;
}

CUresult granularity(std::size_t* out, const CUmemAllocationProp* properties) {
  if (out == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = kGranularity;
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* out, std::size_t size, CUdeviceptr wish) {
  if (out == nullptr || !is_granular(wish, size)) return CUDA_ERROR_INVALID_VALUE;
  if (wish != 0 && mmap(pointer(wish), size, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1,
                        0) == pointer(wish)) {
    state().reservations[wish] = size;
    *out = wish;
    return CUDA_SUCCESS;
  }
  // More than is asked for, so that an aligned part can be cut out.
  void* const raw = mmap(nullptr, size + kGranularity, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t base = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (base > begin) (void)munmap(raw, base - begin);
  if (const std::size_t tail = begin + kGranularity - base; tail > 0) {
    (void)munmap(pointer(base + size), tail);
  }
  state().reservations[base] = size;
  *out = base;
  return CUDA_SUCCESS;
}

CUresult free_reservation(CUdeviceptr address, std::size_t size) {
  const auto found = state().reservations.find(address);
  if (found == state().reservations.end() || found->second != size) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = state().allocations.lower_bound(address);
  if (mapping != state().allocations.end() && mapping->first < address + size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  (void)munmap(pointer(address), size);
  state().reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* out, std::size_t size,
                const CUmemAllocationProp* properties) {
  if (out == nullptr || properties == nullptr || !is_granular(0, size) ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->location.id < 0 ||
      properties->location.id >= kDevices) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Ref<Chunk> chunk(new Chunk);
  chunk->file = memfd_create("chunk", MFD_CLOEXEC);
  chunk->size = size;
  chunk->device = properties->location.id;
  if (chunk->file < 0 || ftruncate(chunk->file, static_cast<off_t>(size)) != 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = state().next_id++;
  state().chunks[*out] = {chunk, 1};
  return CUDA_SUCCESS;
}

CUresult release_chunk(CUmemGenericAllocationHandle handle) {
  const auto found = state().chunks.find(handle);
  if (found == state().chunks.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.second == 0) state().chunks.erase(found);  // mappings keep the memory
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, std::size_t size, std::size_t offset,
             CUmemGenericAllocationHandle handle) {
  const auto found = state().chunks.find(handle);
  if (found == state().chunks.end() || offset != 0 || size != found->second.first->size ||
      !is_granular(address, size) || !is_reserved(address, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = state().allocations.lower_bound(address);
  if (next != state().allocations.end() && next->first < address + size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (find_allocation(pointer(address)) != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Ref<Chunk>& chunk = found->second.first;
  if (mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->file, 0) ==
      MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  state().allocations[address] = {pointer(address),  size, cudaMemoryTypeDevice, chunk->device,
                                  state().next_id++, chunk};
  return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr address, std::size_t size) {
  const bool whole = for_mappings(address, size, [](auto each) {
    (void)mmap(pointer(each->first), each->second.size, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    state().allocations.erase(each);
  });
  return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* access,
                    std::size_t count) {
  if (access == nullptr || count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool whole = for_mappings(address, size, [](auto each) {
    (void)mprotect(pointer(each->first), each->second.size, PROT_READ | PROT_WRITE);
  });
  return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult retain(CUmemGenericAllocationHandle* out, const void* address) {
  const Allocation* const allocation = find_allocation(address);
  if (out == nullptr || allocation == nullptr || !allocation->chunk) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (auto& [handle, chunk] : state().chunks) {
    if (chunk.first != allocation->chunk) continue;
    ++chunk.second;
    *out = handle;
    return CUDA_SUCCESS;
  }
  *out = state().next_id++;  // released, and mapped all the same
  state().chunks[*out] = {allocation->chunk, 1};
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cu_mem_get_allocation_granularity(std::size_t* out, const CUmemAllocationProp* properties,
                                           CUmemAllocationGranularity_flags /*option*/) {
  return driver_api("cuMemGetAllocationGranularity",
                    [&](Lock&) { return granularity(out, properties); });
}
CUresult cu_mem_address_reserve(CUdeviceptr* out, std::size_t size, std::size_t /*alignment*/,
                                CUdeviceptr wish, unsigned long long /*flags*/) {
  return driver_api("cuMemAddressReserve", [&](Lock&) { return reserve(out, size, wish); });
}
CUresult cu_mem_address_free(CUdeviceptr address, std::size_t size) {
  return driver_api("cuMemAddressFree", [&](Lock&) { return free_reservation(address, size); });
}
CUresult cu_mem_create(CUmemGenericAllocationHandle* out, std::size_t size,
                       const CUmemAllocationProp* properties, unsigned long long /*flags*/) {
  return driver_api("cuMemCreate", [&](Lock&) { return create(out, size, properties); });
}
CUresult cu_mem_release(CUmemGenericAllocationHandle handle) {
  return driver_api("cuMemRelease", [&](Lock&) { return release_chunk(handle); });
}
CUresult cu_mem_map(CUdeviceptr address, std::size_t size, std::size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long /*flags*/) {
  return driver_api("cuMemMap", [&](Lock&) { return map(address, size, offset, handle); });
}
CUresult cu_mem_unmap(CUdeviceptr address, std::size_t size) {
  return driver_api("cuMemUnmap", [&](Lock&) { return unmap(address, size); });
}
CUresult cu_mem_set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* access,
                           std::size_t count) {
  return driver_api("cuMemSetAccess",
                    [&](Lock&) { return set_access(address, size, access, count); });
}
CUresult cu_mem_retain_allocation_handle(CUmemGenericAllocationHandle* out, void* address) {
  return driver_api("cuMemRetainAllocationHandle", [&](Lock&) { return retain(out, address); });
}

}  // namespace sim::detail
