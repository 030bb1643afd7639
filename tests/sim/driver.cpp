// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Driver functions, which a program gets only through cudaGetDriverEntryPointByVersion.
//
// One table row per signature: the name, the CUDA version that introduced the signature, and the
// function. A row for a later version of a name shadows an earlier one when that version is asked
// for.
#include "state.hpp"

#include <cstring>

namespace sim::detail {
namespace {

template <class T>
void put(void* out, T value) {
  std::memcpy(out, &value, sizeof value);
}

CUresult pointer_attribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Allocation* allocation =
      find_allocation(reinterpret_cast<const void*>(pointer));  // NOLINT(performance-no-int-to-ptr)
  if (allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool on_device = allocation->type == cudaMemoryTypeDevice;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: put(out, allocation->buffer_id); return CUDA_SUCCESS;
    // Of mapped memory, what was reserved and not what is mapped.
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      put(out, allocation->chunk ? reservation_of(pointer).first
                                 : reinterpret_cast<std::uintptr_t>(allocation->base));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      put(out, allocation->chunk ? reservation_of(pointer).second : allocation->size);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:  // there are no pools
      put(out, CUmemoryPool{nullptr});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: put(out, allocation->device); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      put(out, on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
      return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cu_pointer_get_attribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return driver_api("cuPointerGetAttribute",
                    [&](Lock&) { return pointer_attribute(out, attribute, pointer); });
}

CUresult address_range(CUdeviceptr* base, std::size_t* size, CUdeviceptr pointer) {
  const Allocation* allocation =
      find_allocation(reinterpret_cast<const void*>(pointer));  // NOLINT(performance-no-int-to-ptr)
  if (allocation == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(allocation->base);
  if (size != nullptr) *size = allocation->size;
  return CUDA_SUCCESS;
}

CUresult cu_mem_get_address_range(CUdeviceptr* base, std::size_t* size, CUdeviceptr pointer) {
  return driver_api("cuMemGetAddressRange",
                    [&](Lock&) { return address_range(base, size, pointer); });
}

struct Entry {
  const char* name;
  unsigned version;
  void* function;
};

const Entry kEntries[] = {
    {"cuPointerGetAttribute", 4000, reinterpret_cast<void*>(&cu_pointer_get_attribute)},
    {"cuMemGetAddressRange", 3020, reinterpret_cast<void*>(&cu_mem_get_address_range)},
    {"cuMemGetAllocationGranularity", 10020,
     reinterpret_cast<void*>(&cu_mem_get_allocation_granularity)},
    {"cuMemAddressReserve", 10020, reinterpret_cast<void*>(&cu_mem_address_reserve)},
    {"cuMemAddressFree", 10020, reinterpret_cast<void*>(&cu_mem_address_free)},
    {"cuMemCreate", 10020, reinterpret_cast<void*>(&cu_mem_create)},
    {"cuMemRelease", 10020, reinterpret_cast<void*>(&cu_mem_release)},
    {"cuMemMap", 10020, reinterpret_cast<void*>(&cu_mem_map)},
    {"cuMemUnmap", 10020, reinterpret_cast<void*>(&cu_mem_unmap)},
    {"cuMemSetAccess", 10020, reinterpret_cast<void*>(&cu_mem_set_access)},
    {"cuMemRetainAllocationHandle", 11000,
     reinterpret_cast<void*>(&cu_mem_retain_allocation_handle)},
};

cudaError_t look_up(const char* name, void** out, unsigned version, unsigned long long flags,
                    cudaDriverEntryPointQueryResult* result) {
  if (name == nullptr || out == nullptr || version > kVersion ||
      flags > cudaEnablePerThreadDefaultStream) {
    return cudaErrorInvalidValue;
  }
  const Entry* best = nullptr;
  auto status = cudaDriverEntryPointSymbolNotFound;
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (status == cudaDriverEntryPointSymbolNotFound) {
      status = cudaDriverEntryPointVersionNotSufficent;
    }
    if (entry.version > version) continue;
    if (best == nullptr || best->version < entry.version) best = &entry;
  }
  if (best != nullptr) status = cudaDriverEntryPointSuccess;
  *out = best == nullptr ? nullptr : best->function;
  if (result != nullptr) *result = status;
  return cudaSuccess;
}

}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out,
                                                        unsigned version, unsigned long long flags,
                                                        cudaDriverEntryPointQueryResult* result) {
  return api("cudaGetDriverEntryPointByVersion",
             [&](Lock&) { return look_up(name, out, version, flags, result); });
}

}  // namespace sim::detail
