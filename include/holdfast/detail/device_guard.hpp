// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Makes a device current for one scope and gives the caller's device back, also on errors.

#include "holdfast/error.hpp"

#include <cuda_runtime_api.h>

#include <new>
#include <string>

namespace holdfast::detail {

[[nodiscard]] inline int current_device() {
  int device = 0;
  throw_on_error(cudaGetDevice(&device), "asking for the current device");
  return device;
}

class DeviceGuard {
 public:
  /// \throws CudaError if the device cannot be made current; then nothing has changed.
  explicit DeviceGuard(int device) : previous_(current_device()), changed_(previous_ != device) {
    if (changed_) {
      throw_on_error(cudaSetDevice(device),
                     [device] { return "making device " + std::to_string(device) + " current"; });
    }
  }
  /// For destructors: goes on as well as it can.
  DeviceGuard(int device, std::nothrow_t /*tag*/) noexcept {
    changed_ = succeeded(cudaGetDevice(&previous_)) && previous_ != device &&
               succeeded(cudaSetDevice(device));
  }
  ~DeviceGuard() {
    if (changed_) (void)succeeded(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;  // one scope, one restore
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace holdfast::detail
