// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Where device memory comes from: the MemoryResource concept, a non-owning reference to any model
/// of it, and DeviceResource, which is cudaMalloc.
///
/// A resource has one device and one AddressLedger and outlives every buffer that was made with it.
/// A stream-ordered pool is not a resource: during capture its memory would belong to the graph.

#include "holdfast/address_ledger.hpp"
#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/device_guard.hpp"
#include "holdfast/error.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <type_traits>

namespace holdfast {

/// What a type must offer to be the source of a buffer's memory:
///
/// - `allocate(bytes)`, bytes > 0: device memory on `device()`, aligned to 256 bytes or more,
///   usable at once on every stream. Throws OutOfMemory or CudaError, and then has changed nothing.
/// - `deallocate(address, bytes)`: gives it back; never throws. Work on the memory is done by then,
///   unless the device failed.
/// - both may be called during captures, of this thread or of another, and disturb none; both leave
///   the current device as they found it.
/// - `device()`, `ledger()`.
template <class R>
concept MemoryResource = requires(R& resource, void* address, std::size_t bytes) {
  { resource.allocate(bytes) } -> std::same_as<void*>;
  { resource.deallocate(address, bytes) }
  noexcept->std::same_as<void>;
  { resource.device() }
  noexcept->std::same_as<int>;
  { resource.ledger() }
  noexcept->std::same_as<AddressLedger&>;
};

/// Any resource, by reference: two pointers, copied freely. The resource must outlive the
/// reference.
class ResourceRef {
 public:
  template <class R>
  requires(MemoryResource<R> && !std::same_as<std::remove_cv_t<R>, ResourceRef>)
      ResourceRef(R& resource)
  noexcept : resource_(std::addressof(resource)), calls_(&kCalls<R>) {}

  [[nodiscard]] void* allocate(std::size_t bytes) { return calls_->allocate(resource_, bytes); }
  void deallocate(void* address, std::size_t bytes) noexcept {
    calls_->deallocate(resource_, address, bytes);
  }
  [[nodiscard]] int device() const noexcept { return calls_->device(resource_); }
  [[nodiscard]] AddressLedger& ledger() const noexcept { return calls_->ledger(resource_); }

 private:
  struct Calls {
    void* (*allocate)(void*, std::size_t);
    void (*deallocate)(void*, void*, std::size_t) noexcept;
    int (*device)(void*) noexcept;
    AddressLedger& (*ledger)(void*) noexcept;
  };
  template <class R>
  static constexpr Calls kCalls{
      [](void* self, std::size_t bytes) { return static_cast<R*>(self)->allocate(bytes); },
      [](void* self, void* address, std::size_t bytes) noexcept {
        static_cast<R*>(self)->deallocate(address, bytes);
      },
      [](void* self) noexcept { return static_cast<R*>(self)->device(); },
      [](void* self) noexcept -> AddressLedger& { return static_cast<R*>(self)->ledger(); },
  };

  void* resource_;
  const Calls* calls_;
};

/// cudaMalloc on one device. Giving memory back waits for the whole device, as cudaFree does. Safe
/// to use from several threads.
class DeviceResource {
 public:
  /// On the current device. \throws CudaError.
  DeviceResource() : DeviceResource(detail::current_device()) {}
  explicit DeviceResource(int device) : device_(device) {}
  ~DeviceResource() = default;
  DeviceResource(const DeviceResource&) = delete;  // buffers hold its address
  DeviceResource& operator=(const DeviceResource&) = delete;

  /// \throws OutOfMemory, CudaError. \stream allowed while capturing; disturbs no capture.
  [[nodiscard]] void* allocate(std::size_t bytes) {
    const auto what = [this, bytes] {
      return "DeviceResource: allocating " + std::to_string(bytes) + " bytes on device " +
             std::to_string(device_);
    };
    const detail::RelaxedCapture relaxed;
    const detail::DeviceGuard on_device(device_);
    throw_on_error(relaxed.status(),
                   what);  // without it cudaMalloc could break another thread's capture
    void* address = nullptr;
    throw_on_error(cudaMalloc(&address, bytes), what);
    return address;
  }

  /// \stream waits for the device; allowed while capturing; disturbs no capture.
  void deallocate(void* address, std::size_t bytes) noexcept {
    const detail::RelaxedCapture relaxed;
    const detail::DeviceGuard on_device(device_, std::nothrow);
    if (relaxed.active() && detail::succeeded(cudaFree(address))) return;
    leaked_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }

  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] AddressLedger& ledger() noexcept { return ledger_; }
  [[nodiscard]] const AddressLedger& ledger() const noexcept { return ledger_; }
  /// Bytes that CUDA refused to take back (after a device fault, say). Normally 0.
  [[nodiscard]] std::size_t leaked_bytes() const noexcept {
    return leaked_bytes_.load(std::memory_order_relaxed);
  }

 private:
  int device_;
  AddressLedger ledger_;
  std::atomic<std::size_t> leaked_bytes_{0};
};

static_assert(MemoryResource<DeviceResource>);
static_assert(MemoryResource<ResourceRef>);
static_assert(std::is_trivially_copyable_v<ResourceRef>);

}  // namespace holdfast
