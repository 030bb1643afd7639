// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Streams: created ones, the legacy stream of each device and each thread's default stream.
//
// Handle values may return after a destroy; ids never do. A destroyed stream keeps its work until
// that is done.
#include "state.hpp"

#include <algorithm>

namespace sim::detail {
namespace {

Ref<Stream> create(int device, unsigned flags, int priority) {
  Ref<Stream> stream(new Stream);
  stream->id = state().next_id++;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  state().all_streams.push_back(stream);
  return stream;
}

cudaError_t create_for_program(cudaStream_t* out, unsigned flags, int priority) {
  if (out == nullptr || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
  const Ref<Stream> stream = create(this_thread().device, flags, priority);
  stream->handle = state().stream_handles.take();
  state().streams[stream->handle] = stream;
  *out = stream->handle;
  return cudaSuccess;
}

Stream& per_thread_stream() {
  const Thread& thread = this_thread();
  Ref<Stream>& stream = state().per_thread[{thread.id, thread.device}];
  if (!stream) {
    stream = create(thread.device, cudaStreamDefault, 0);
    stream->handle = cudaStreamPerThread;
  }
  return *stream;
}

// What any use of a stream but work, capture and destruction gets: even a question about a stream
// that captures is refused and costs the capture. Only its priority may be asked.
cudaError_t check_use(const Stream& stream) {
  if (!stream.capture) return check_legacy(stream, true);
  invalidate(*stream.capture);
  return cudaErrorStreamCaptureUnsupported;
}

// Runs `use(stream)`, or says that the handle names none.
template <class Use>
cudaError_t with_stream(cudaStream_t handle, Use&& use) {
  Stream* stream = find_stream(handle);
  return stream == nullptr ? cudaErrorInvalidResourceHandle : use(*stream);
}

template <class T>
cudaError_t describe(cudaStream_t handle, T* out, T Stream::*member) {
  if (out == nullptr) return cudaErrorInvalidValue;
  return with_stream(handle, [&](const Stream& stream) {
    const cudaError_t code = check_use(stream);
    if (code == cudaSuccess) *out = stream.*member;
    return code;
  });
}

// What synchronizing or querying gets: no wait may meet a capture.
cudaError_t check_wait(const Stream& stream) {
  const cudaError_t code = check_use(stream);
  return code != cudaSuccess ? code : check_unsafe();
}

// The ends of the work that `stream` stands for: the legacy stream speaks for the blocking streams
// too.
std::vector<Ref<Item>> ends_of(const Stream& stream) {
  std::vector<Ref<Item>> ends = {stream.last};
  for (const Ref<Stream>& other : state().all_streams) {
    const bool included = stream.legacy && other->blocking() && other->device == stream.device;
    if (included) ends.push_back(other->last);
  }
  return ends;
}

}  // namespace

Stream& legacy_stream(int device) {
  Ref<Stream>& stream = state().legacy.at(static_cast<std::size_t>(device));
  if (!stream) {
    stream = create(device, cudaStreamDefault, 0);
    stream->handle = cudaStreamLegacy;
    stream->legacy = true;
  }
  return *stream;
}

Stream* find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &legacy_stream(this_thread().device);
  if (handle == cudaStreamPerThread) return &per_thread_stream();
  const auto found = state().streams.find(handle);
  return found == state().streams.end() ? nullptr : found->second.get();
}

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return api("cudaStreamCreate",
             [&](Lock&) { return create_for_program(stream, cudaStreamDefault, 0); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return api("cudaStreamCreateWithFlags",
             [&](Lock&) { return create_for_program(stream, flags, 0); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return api("cudaStreamCreateWithPriority",
             [&](Lock&) { return create_for_program(stream, flags, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return api("cudaStreamDestroy", [&](Lock&) {
    const auto found = state().streams.find(handle);
    if (found == state().streams.end()) return cudaErrorInvalidResourceHandle;
    const Ref<Stream> stream = found->second;
    leave_capture(*stream);
    state().streams.erase(found);
    state().stream_handles.give_back(handle);
    stream->handle = nullptr;
    forget_if_finished(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return api("cudaStreamSynchronize", [&](Lock& lock) {
    return with_stream(handle, [&](Stream& stream) {
      const cudaError_t code = check_wait(stream);
      if (code != cudaSuccess) return code;
      for (const Ref<Item>& end : ends_of(stream)) wait_for(lock, end);
      return cudaSuccess;
    });
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return api("cudaStreamQuery", [&](Lock&) {
    return with_stream(handle, [](Stream& stream) {
      const cudaError_t code = check_wait(stream);
      if (code != cudaSuccess) return code;
      const std::vector<Ref<Item>> ends = ends_of(stream);
      return std::all_of(ends.begin(), ends.end(), done) ? cudaSuccess : cudaErrorNotReady;
    });
  });
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return api("cudaStreamGetId", [&](Lock&) { return describe(handle, id, &Stream::id); });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return api("cudaStreamGetDevice",
             [&](Lock&) { return describe(handle, device, &Stream::device); });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return api("cudaStreamGetFlags", [&](Lock&) { return describe(handle, flags, &Stream::flags); });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return api("cudaStreamGetPriority", [&](Lock&) {
    const Stream* stream = find_stream(handle);
    if (stream == nullptr || priority == nullptr || !stream->capture) {
      return describe(handle, priority, &Stream::priority);
    }
    *priority = stream->priority;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return api("cudaDeviceSynchronize", [](Lock& lock) {
    const int device = this_thread().device;
    bool refused = false;
    for (const Ref<Stream>& stream : state().all_streams) {
      if (stream->device != device || !stream->capture) continue;
      invalidate(*stream->capture);
      refused = true;
    }
    if (refused) return cudaErrorStreamCaptureUnsupported;
    const cudaError_t code = check_unsafe();
    if (code == cudaSuccess) wait_for_device(lock, device);
    return code;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return api("cudaLaunchHostFunc", [&](Lock&) {
    if (function == nullptr) return cudaErrorInvalidValue;
    return with_stream(handle, [&](Stream& stream) {
      return submit(stream, cudaGraphNodeTypeHost, [function, data] { function(data); });
    });
  });
}

}  // extern "C"

}  // namespace sim::detail
