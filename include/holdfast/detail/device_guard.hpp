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

/// Whatever becomes current inside the scope, by the guard or by code of others that the scope
/// calls, the caller's device is current again after it.
class DeviceGuard {
 public:
  /// \throws CudaError if the device cannot be made current; then nothing has changed.
  explicit DeviceGuard(int device) : previous_(current_device()) {
    if (previous_ == device) return;
    throw_on_error(cudaSetDevice(device),
                   [device] { return "making device " + std::to_string(device) + " current"; });
  }
  /// For destructors: goes on as well as it can.
  DeviceGuard(int device, std::nothrow_t /*tag*/) noexcept
      : known_(succeeded(cudaGetDevice(&previous_))) {
    if (known_ && previous_ != device) (void)succeeded(cudaSetDevice(device));
  }
  ~DeviceGuard() {
    int now = 0;
    if (!known_ || (succeeded(cudaGetDevice(&now)) && now == previous_)) return;
    (void)succeeded(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;  // one scope, one restore
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool known_ = true;
};

}  // namespace holdfast::detail
