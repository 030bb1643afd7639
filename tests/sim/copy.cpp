// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// memcpy and memset, asynchronous and not.
//
// The accesses happen when the work runs, through the C library's functions, so that ASan and TSan
// see them. A copy from pageable host memory takes its bytes at the call, unless captured. Calls
// that CUDA documents as not waiting for the device (a copy within devices, setting device memory)
// do not wait here either.
#include "state.hpp"

#include <cstring>

namespace sim::detail {
namespace {

bool is_device(const Allocation* allocation) {
  return allocation != nullptr && allocation->type == cudaMemoryTypeDevice;
}

// Whether [pointer, pointer + size) may be one end of a copy. With unified addresses the pointer
// decides, except that pageable memory cannot be said to be on a device.
bool valid_end(const void* pointer, std::size_t size, bool says_device) {
  if (pointer == nullptr) return false;
  const Allocation* allocation = find_allocation(pointer);
  if (allocation == nullptr) return !says_device;
  const auto* base = static_cast<const char*>(allocation->base);
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(pointer) - base);
  std::size_t there = allocation->size - offset;
  while (there < size && allocation->chunk) {  // mapped memory goes on in the next chunk
    allocation = find_allocation(static_cast<const char*>(pointer) + there);
    if (allocation == nullptr || !allocation->chunk) break;
    there += allocation->size;
  }
  return size <= there;
}

// A synchronous call may not wait for a stream that captures.
cudaError_t check_synchronous(const Stream& stream) {
  if (!stream.capture) return cudaSuccess;
  invalidate(*stream.capture);
  return cudaErrorStreamCaptureUnsupported;
}

}  // namespace

cudaError_t copy(Lock& lock, void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                 cudaStream_t stream_handle, bool synchronous) {
  Stream* stream = find_stream(stream_handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (size == 0) return cudaSuccess;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return cudaErrorInvalidMemcpyDirection;
  }
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (!valid_end(to, size, to_device) || !valid_end(from, size, from_device)) {
    return cudaErrorInvalidValue;
  }
  if (synchronous) {
    const cudaError_t code = check_synchronous(*stream);
    if (code != cudaSuccess) return code;
  }

  Work body = [to, from, size] { std::memcpy(to, from, size); };
  const bool pageable = find_allocation(from) == nullptr;
  if (pageable && !synchronous && !stream->capture) {
    auto staged = std::vector<char>(size);
    unlocked(lock, [&] { std::memcpy(staged.data(), from, size); });  // in the sight of TSan
    stream = find_stream(stream_handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    body = [to, staged = std::move(staged)] { std::memcpy(to, staged.data(), staged.size()); };
  }
  const bool within_devices = is_device(find_allocation(to)) && is_device(find_allocation(from));
  const cudaError_t code = submit(*stream, cudaGraphNodeTypeMemcpy, std::move(body));
  if (code == cudaSuccess && synchronous && !within_devices) wait_for_stream(lock, *stream);
  return code;
}

cudaError_t set(Lock& lock, void* to, int value, std::size_t size, cudaStream_t stream_handle,
                bool synchronous) {
  Stream* stream = find_stream(stream_handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (size == 0) return cudaSuccess;
  if (!valid_end(to, size, true)) return cudaErrorInvalidValue;
  if (synchronous) {
    const cudaError_t code = check_synchronous(*stream);
    if (code != cudaSuccess) return code;
  }
  const bool on_device = is_device(find_allocation(to));
  const cudaError_t code =
      submit(*stream, cudaGraphNodeTypeMemset, [to, value, size] { std::memset(to, value, size); });
  if (code == cudaSuccess && synchronous && !on_device) wait_for_stream(lock, *stream);
  return code;
}

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  return api("cudaMemcpy",
             [&](Lock& lock) { return copy(lock, to, from, size, kind, nullptr, true); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return api("cudaMemcpyAsync",
             [&](Lock& lock) { return copy(lock, to, from, size, kind, stream, false); });
}

cudaError_t cudaMemset(void* to, int value, std::size_t size) {
  return api("cudaMemset", [&](Lock& lock) { return set(lock, to, value, size, nullptr, true); });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t size, cudaStream_t stream) {
  return api("cudaMemsetAsync",
             [&](Lock& lock) { return set(lock, to, value, size, stream, false); });
}

}  // extern "C"

}  // namespace sim::detail
