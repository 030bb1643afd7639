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
[[nodiscard]] Value pointer_attribute(CUpointer_attribute attribute, const void* address) {
  const auto get = entry_point<PFN_cuPointerGetAttribute_v4000>("cuPointerGetAttribute", 4000);
  Value value{};
  // The driver's error numbers are the runtime's.
  throw_on_error(
      static_cast<cudaError_t>(get(&value, attribute, reinterpret_cast<CUdeviceptr>(address))),
      "asking the driver about an allocation");
  return value;
}

/// The driver's number for an allocation. It is never reused in the life of the process, so it
/// tells a block from a later one at the same address.
[[nodiscard]] inline std::uint64_t buffer_id(const void* address) {
  return pointer_attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
}

/// How many bytes of its allocation lie at `address` and behind it.
[[nodiscard]] inline std::size_t bytes_from(const void* address) {
  const auto base = pointer_attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address);
  const auto size = pointer_attribute<std::size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address);
  return size - (reinterpret_cast<CUdeviceptr>(address) - base);
}

}  // namespace holdfast::detail
