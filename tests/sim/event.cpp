// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Events: the state of a stream at one moment, real or captured, and waiting for it.
//
// A record replaces the state; a wait takes the state at the time of the call. An event that was
// never recorded counts as complete. Timing runs on a clock that counts finished work, not on time.
#include "state.hpp"

#include <algorithm>

namespace sim::detail {
namespace {

Event* find_event(cudaEvent_t handle) {
  const auto found = state().events.find(handle);
  return found == state().events.end() ? nullptr : &found->second;
}

cudaError_t create(cudaEvent_t* out, unsigned flags) {
  constexpr unsigned kKnown =
      cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
  const bool interprocess = (flags & cudaEventInterprocess) != 0;
  const bool timed = (flags & cudaEventDisableTiming) == 0;
  if (out == nullptr || (flags & ~kKnown) != 0 || (interprocess && timed)) {
    return cudaErrorInvalidValue;
  }
  const cudaEvent_t handle = state().event_handles.take();
  Event& event = state().events[handle];
  event.device = this_thread().device;
  event.flags = flags;
  *out = handle;
  return cudaSuccess;
}

cudaError_t record(cudaEvent_t handle, cudaStream_t stream_handle) {
  Event* event = find_event(handle);
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
  if (stream->capture) {
    if (!stream->capture->valid) return cudaErrorStreamCaptureInvalidated;
    event->record = Ref<Item>();
    event->capture = stream->capture;
    event->frontier = stream->frontier;
    return cudaSuccess;
  }
  const cudaError_t code = check_legacy(*stream, true);
  if (code != cudaSuccess) return code;
  event->record = enqueue(*stream, nullptr);
  event->capture = Ref<Capture>();
  event->frontier.clear();
  return cudaSuccess;
}

bool ongoing(const Ref<Capture>& capture) { return capture->origin != nullptr; }

// `stream` waits for an event that was last recorded in a capture: it joins that capture.
cudaError_t join(Stream& stream, const Event& event) {
  if (!ongoing(event.capture)) {
    if (stream.capture) invalidate(*stream.capture);
    return cudaErrorInvalidValue;
  }
  if (!event.capture->valid) return cudaErrorStreamCaptureInvalidated;
  if (stream.capture && stream.capture != event.capture) {
    invalidate(*stream.capture);
    invalidate(*event.capture);
    return cudaErrorStreamCaptureMerge;
  }
  if (stream.legacy) {
    invalidate(*event.capture);
    return cudaErrorStreamCaptureImplicit;
  }
  stream.capture = event.capture;
  for (const Ref<Node>& node : event.frontier) {
    const bool known =
        std::find(stream.frontier.begin(), stream.frontier.end(), node) != stream.frontier.end();
    if (!known) stream.frontier.push_back(node);
  }
  return cudaSuccess;
}

cudaError_t wait(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  if (flags != cudaEventWaitDefault && flags != cudaEventWaitExternal) return cudaErrorInvalidValue;
  Event* event = find_event(handle);
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (flags == cudaEventWaitExternal) {  // a node of its own kind, which is not modelled
    return stream->capture ? cudaErrorNotSupported : cudaErrorIllegalState;
  }
  if (stream->capture && !stream->capture->valid) return cudaErrorStreamCaptureInvalidated;
  if (event->capture) return join(*stream, *event);
  if (stream->capture) {
    if (!event->record) return cudaSuccess;
    invalidate(*stream->capture);
    return cudaErrorStreamCaptureIsolation;
  }
  const cudaError_t code = check_legacy(*stream, true);
  if (code != cudaSuccess) return code;
  if (event->record) enqueue(*stream, nullptr, {event->record});
  return cudaSuccess;
}

// What asking about an event gets that was last recorded in a capture, ended or not.
cudaError_t check_captured(const Event& event, bool invalidating) {
  if (!event.capture) return cudaSuccess;
  if (!ongoing(event.capture)) return cudaErrorInvalidValue;
  if (invalidating) invalidate(*event.capture);
  return cudaErrorCapturedEvent;
}

// What synchronizing or querying an event gets while captures are about.
cudaError_t check_wait(const Event& event) {
  const cudaError_t code = check_captured(event, true);
  return code != cudaSuccess ? code : check_unsafe();
}

cudaError_t elapsed(float* milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  const Event* start = find_event(start_handle);
  const Event* end = find_event(end_handle);
  if (milliseconds == nullptr) return cudaErrorInvalidValue;
  if (start == nullptr || end == nullptr) return cudaErrorInvalidResourceHandle;
  for (const Event* event : {start, end}) {
    const cudaError_t code = check_captured(*event, false);
    if (code != cudaSuccess) return code;
  }
  const bool timed = ((start->flags | end->flags) & cudaEventDisableTiming) == 0;
  if (!timed || !start->record || !end->record) return cudaErrorInvalidResourceHandle;
  if (!done(start->record) || !done(end->record)) return cudaErrorNotReady;
  constexpr float kMillisecondsPerItem = 0.001F;
  const auto ticks = static_cast<std::int64_t>(end->record->finished - start->record->finished);
  *milliseconds = static_cast<float>(ticks) * kMillisecondsPerItem;
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return api("cudaEventCreate", [&](Lock&) { return create(event, cudaEventDefault); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return api("cudaEventCreateWithFlags", [&](Lock&) { return create(event, flags); });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return api("cudaEventDestroy", [&](Lock&) {
    if (state().events.erase(handle) == 0) return cudaErrorInvalidResourceHandle;
    state().event_handles.give_back(handle);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return api("cudaEventRecord", [&](Lock&) { return record(event, stream); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return api("cudaStreamWaitEvent", [&](Lock&) { return wait(stream, event, flags); });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return api("cudaEventQuery", [&](Lock&) {
    const Event* event = find_event(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    const cudaError_t code = check_wait(*event);
    if (code != cudaSuccess) return code;
    return done(event->record) ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return api("cudaEventSynchronize", [&](Lock& lock) {
    const Event* event = find_event(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    const cudaError_t code = check_wait(*event);
    if (code == cudaSuccess) wait_for(lock, event->record);
    return code;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return api("cudaEventElapsedTime", [&](Lock&) { return elapsed(milliseconds, start, end); });
}

}  // extern "C"

}  // namespace sim::detail
