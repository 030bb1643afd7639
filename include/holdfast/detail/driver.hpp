// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Driver functions, looked up at run time: no program that includes holdfast links libcuda, so it
/// starts on a machine without a driver.

#include "holdfast/error.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace holdfast::detail {

/// The driver's function `name` with the signature that CUDA version `version` gave it.
/// \throws CudaError if the driver or the function is missing.
template <class Function>
[[nodiscard]] Function entry_point(const char* name, unsigned version) {
  void* address = nullptr;  // stays untouched where there is no driver
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  throw_on_error(
      cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
      [name] { return std::string("looking up the driver function ") + name; });
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    throw_on_error(cudaErrorNotSupported, [name] {
      return std::string("looking up the driver function ") + name +
             ": this driver does not have it; update the driver";
    });
  }
  return reinterpret_cast<Function>(address);
}

/// What the driver knows of the allocation that holds `address`.
/// \throws CudaError, also if `address` lies in no CUDA allocation.
template <class Value>
[[nodiscard]] Value pointer_attribute(CUpointer_attribute attribute, std::uintptr_t address) {
  const auto get = entry_point<PFN_cuPointerGetAttribute_v4000>("cuPointerGetAttribute", 4000);
  Value value{};
  // The driver's error numbers are the runtime's.
  throw_on_error(static_cast<cudaError_t>(get(&value, attribute, address)),
                 "asking the driver about an allocation");
  return value;
}

/// The driver's number for an allocation, or for one mapping of memory. It is never reused in the
/// life of the process, so it tells a block from a later one at the same address.
[[nodiscard]] inline std::uint64_t buffer_id(std::uintptr_t address) {
  return pointer_attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
}

/// The bytes [base, base + bytes).
struct Extent {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;

  [[nodiscard]] bool contains(std::uintptr_t address) const noexcept {
    return address >= base && address - base < bytes;
  }
};

/// The allocation, or the chunk of mapped memory, that holds `address`.
/// \throws CudaError, also if nothing is allocated or mapped there.
[[nodiscard]] inline Extent allocation_at(std::uintptr_t address) {
  const auto get = entry_point<PFN_cuMemGetAddressRange_v3020>("cuMemGetAddressRange", 3020);
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  throw_on_error(static_cast<cudaError_t>(get(&base, &bytes, address)),
                 "asking the driver for the extent of an allocation");
  return {base, bytes};
}

/// The addresses that were reserved together with `address`, whether memory is mapped there or not;
/// for an allocation, its own.
[[nodiscard]] inline Extent reservation_at(std::uintptr_t address) {
  return {pointer_attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address),
          pointer_attribute<std::size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)};
}

/// Whether `address` lies in memory that its owner mapped (cuMemMap), and not in an allocation of
/// its own, or in a pool, which hands out parts of what it mapped.
[[nodiscard]] inline bool is_mapped_memory(std::uintptr_t address) {
  const auto retain =
      entry_point<PFN_cuMemRetainAllocationHandle_v11000>("cuMemRetainAllocationHandle", 11000);
  const auto release = entry_point<PFN_cuMemRelease_v10020>("cuMemRelease", 10020);
  CUmemGenericAllocationHandle handle = 0;
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  if (retain(&handle, reinterpret_cast<void*>(address)) != CUDA_SUCCESS) return false;
  throw_on_error(static_cast<cudaError_t>(release(handle)), "releasing a handle of mapped memory");
  return pointer_attribute<CUmemoryPool>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) == nullptr;
}

}  // namespace holdfast::detail
