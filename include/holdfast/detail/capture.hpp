// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Streams at the library's border, and how to live beside stream captures without harming them.
///
/// A plain cudaMalloc, cudaFree or event query invalidates a capture of the same thread, and a
/// global-mode capture of *any* thread. No query tells whether another thread captures, so such
/// calls always run under RelaxedCapture.

#include "holdfast/detail/device_guard.hpp"
#include "holdfast/error.hpp"

#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

namespace holdfast::detail {

/// The handle to hand to CUDA. Handle 0 means the legacy or the per-thread stream, depending on how
/// the including file is compiled; frameworks pass it for the legacy stream, so that is what it
/// means.
[[nodiscard]] inline cudaStream_t native(cuda::stream_ref stream) noexcept {
  return stream.get() == nullptr ? cudaStreamLegacy : stream.get();
}

/// The device of a stream that is not being captured: asking one that is would break its capture.
/// The legacy and the per-thread stream are the current device's.
[[nodiscard]] inline int stream_device(cudaStream_t stream) {
  if (stream == cudaStreamLegacy || stream == cudaStreamPerThread) return current_device();
  int device = 0;
  throw_on_error(cudaStreamGetDevice(stream, &device), "asking for the device of a stream");
  return device;
}

/// The id of a stream that is not being captured, for the same reason.
[[nodiscard]] inline unsigned long long stream_id(cudaStream_t stream) {
  unsigned long long id = 0;
  throw_on_error(cudaStreamGetId(stream, &id), "asking for the id of a stream");
  return id;
}

enum class CaptureState : unsigned char {
  none,      ///< work runs
  active,    ///< work goes into a graph
  unusable,  ///< work fails: the capture is broken already, or the work would break another one
};

/// What becomes of work on `stream`. Never disturbs a capture. While a blocking stream is being
/// captured the legacy stream of that device does not answer (cudaErrorStreamCaptureImplicit), and
/// work on it would break that capture.
[[nodiscard]] inline CaptureState capture_state(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(stream, &status);
  if (code == cudaErrorStreamCaptureImplicit) {
    clear_last_error(code);
    return CaptureState::unusable;
  }
  throw_on_error(code, "asking whether a stream is being captured");
  switch (status) {
    case cudaStreamCaptureStatusNone: return CaptureState::none;
    case cudaStreamCaptureStatusActive: return CaptureState::active;
    case cudaStreamCaptureStatusInvalidated: break;
  }
  return CaptureState::unusable;  // also what a later CUDA may add
}

/// For its scope, calls that capture forbids neither fail nor invalidate anybody's capture.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept : status_(cudaThreadExchangeStreamCaptureMode(&mode_)) {
    (void)succeeded(status_);
  }
  ~RelaxedCapture() {
    if (active()) (void)succeeded(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  RelaxedCapture(const RelaxedCapture&) = delete;  // push and pop come in pairs
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  /// Whether the exchange worked. Where it did not, an unsafe call must not be made.
  [[nodiscard]] bool active() const noexcept { return status_ == cudaSuccess; }
  [[nodiscard]] cudaError_t status() const noexcept { return status_; }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  cudaError_t status_;
};

}  // namespace holdfast::detail
