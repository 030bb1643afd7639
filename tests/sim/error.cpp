// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Error codes: the last one of each thread, their names and their texts.
//
// Reading an error is not a countable call and cannot be made to fail.
#include "state.hpp"

namespace sim::detail {
namespace {

struct Text {
  cudaError_t code;
  const char* name;
  const char* text;
};

#define SIM_ERROR(code, text) \
  { code, #code, text }
constexpr Text kTexts[] = {
    SIM_ERROR(cudaSuccess, "no error"),
    SIM_ERROR(cudaErrorInvalidValue, "invalid argument"),
    SIM_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    SIM_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    SIM_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    SIM_ERROR(cudaErrorStubLibrary, "CUDA driver is a stub library"),
    SIM_ERROR(cudaErrorInsufficientDriver,
              "CUDA driver version is insufficient for CUDA runtime version"),
    SIM_ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    SIM_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    SIM_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    SIM_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    SIM_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    SIM_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    SIM_ERROR(cudaErrorLossyQuery, "attempted introspection would be semantically lossy"),
    SIM_ERROR(cudaErrorNotReady, "device not ready"),
    SIM_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    SIM_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    SIM_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    SIM_ERROR(cudaErrorNotSupported, "operation not supported"),
    SIM_ERROR(cudaErrorStreamCaptureUnsupported,
              "operation not permitted when stream is capturing"),
    SIM_ERROR(cudaErrorStreamCaptureInvalidated,
              "operation failed due to a previous error during capture"),
    SIM_ERROR(cudaErrorStreamCaptureMerge,
              "operation would result in a merge of separate capture sequences"),
    SIM_ERROR(cudaErrorStreamCaptureUnmatched,
              "capture was not ended in the same stream as it began"),
    SIM_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    SIM_ERROR(cudaErrorStreamCaptureIsolation,
              "dependency created on uncaptured work in another stream"),
    SIM_ERROR(cudaErrorStreamCaptureImplicit,
              "operation would make the legacy stream depend on a capturing blocking stream"),
    SIM_ERROR(cudaErrorCapturedEvent,
              "operation not permitted on an event last recorded in a capturing stream"),
    SIM_ERROR(cudaErrorStreamCaptureWrongThread,
              "attempt to terminate a thread-local capture sequence from another thread"),
    SIM_ERROR(cudaErrorGraphExecUpdateFailure,
              "the graph update was not performed because it included changes which violated "
              "constraints specific to instantiated graph update"),
    SIM_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef SIM_ERROR

constexpr Text kUnknown = {cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};

const Text& find_text(cudaError_t code) {
  for (const Text& text : kTexts) {
    if (text.code == code) return text;
  }
  return kUnknown;
}

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() {
  const Lock lock;
  return std::exchange(this_thread().last_error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
  const Lock lock;
  return this_thread().last_error;
}

const char* cudaGetErrorName(cudaError_t code) { return find_text(code).name; }

const char* cudaGetErrorString(cudaError_t code) { return find_text(code).text; }

}  // extern "C"

}  // namespace sim::detail
