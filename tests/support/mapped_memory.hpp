// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Memory as the allocators of engines map it: a reservation of addresses, and chunks that are
/// mapped into it one by one, each by its own handle. Through the driver, real or simulated.

#include "holdfast/detail/driver.hpp"

#include "support/runtime.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

inline void ok(CUresult code, const char* what) { ok(static_cast<cudaError_t>(code), what); }

class MappedMemory {
 public:
  static constexpr std::size_t kChunk = std::size_t{2} << 20U;  // the least that a GPU maps

  /// Addresses for `chunks` chunks, from `wish` on where that can be had. Nothing is mapped yet.
  explicit MappedMemory(std::size_t chunks, std::uintptr_t wish = 0) : handles_(chunks) {
    ok(reserve_(&base_, chunks * kChunk, 0, wish, 0), "cuMemAddressReserve");
  }
  ~MappedMemory() {
    for (std::size_t i = 0; i < handles_.size(); ++i) {
      if (handles_[i] != 0) unmap(i);
    }
    (void)free_(base_, handles_.size() * kChunk);
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  /// Maps fresh memory of `device` as chunk `index`, for use by that device.
  void map(std::size_t index, int device = 0) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    CUmemGenericAllocationHandle handle = 0;
    ok(create_(&handle, kChunk, &properties, 0), "cuMemCreate");
    const CUdeviceptr address = base_ + index * kChunk;
    ok(map_(address, kChunk, 0, handle, 0), "cuMemMap");
    handles_.at(index) = handle;
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ok(access_(address, kChunk, &access, 1), "cuMemSetAccess");
  }
  void unmap(std::size_t index) {
    ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ok(unmap_(base_ + index * kChunk, kChunk), "cuMemUnmap");
    ok(release_(handles_.at(index)), "cuMemRelease");
    handles_[index] = 0;
  }

  /// `offset` bytes into the reservation.
  [[nodiscard]] std::uintptr_t at(std::size_t offset) const { return base_ + offset; }
  template <class T>
  [[nodiscard]] T* as(std::size_t offset) const {
    return reinterpret_cast<T*>(at(offset));  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  template <class Function>
  [[nodiscard]] static Function entry(const char* name) {
    return holdfast::detail::entry_point<Function>(name, 10020);
  }

  PFN_cuMemAddressReserve_v10020 reserve_ =
      entry<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve");
  PFN_cuMemAddressFree_v10020 free_ = entry<PFN_cuMemAddressFree_v10020>("cuMemAddressFree");
  PFN_cuMemCreate_v10020 create_ = entry<PFN_cuMemCreate_v10020>("cuMemCreate");
  PFN_cuMemRelease_v10020 release_ = entry<PFN_cuMemRelease_v10020>("cuMemRelease");
  PFN_cuMemMap_v10020 map_ = entry<PFN_cuMemMap_v10020>("cuMemMap");
  PFN_cuMemUnmap_v10020 unmap_ = entry<PFN_cuMemUnmap_v10020>("cuMemUnmap");
  PFN_cuMemSetAccess_v10020 access_ = entry<PFN_cuMemSetAccess_v10020>("cuMemSetAccess");
  CUdeviceptr base_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

}  // namespace test
