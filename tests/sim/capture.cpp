// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Stream capture: who captures, what that forbids to whom, and work recorded instead of queued.
//
// A stream joins a capture by waiting for one of its events and leaves when the capture ends. A
// refused call invalidates each capture that forbade it. Loading of kernels on first use, which
// CUDA can refuse, is not modelled.
#include "state.hpp"

#include <algorithm>
#include <set>

namespace sim::detail {
namespace {

bool known(cudaStreamCaptureMode mode) {
  return mode == cudaStreamCaptureModeGlobal || mode == cudaStreamCaptureModeThreadLocal ||
         mode == cudaStreamCaptureModeRelaxed;
}

cudaError_t begin(cudaStream_t handle, cudaStreamCaptureMode mode) {
  if (!known(mode)) return cudaErrorInvalidValue;
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture) return cudaErrorIllegalState;
  Ref<Capture> capture(new Capture);
  capture->id = state().next_id++;
  capture->mode = mode;
  capture->thread = this_thread().id;
  capture->origin = stream;
  capture->graph = create_graph();
  capture->graph->capturing = true;
  stream->capture = capture;
  state().captures.push_back(capture);
  return cudaSuccess;
}

// Whether everything that was forked off comes before what the origin captured last.
bool joined(const Capture& capture) {
  std::set<const Node*> reached;
  std::vector<const Node*> open;
  for (const Ref<Node>& node : capture.origin->frontier) open.push_back(node.get());
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (!reached.insert(node).second) continue;
    for (const Ref<Node>& earlier : node->after) open.push_back(earlier.get());
  }
  return std::all_of(
      state().all_streams.begin(), state().all_streams.end(), [&](const Ref<Stream>& stream) {
        if (stream->capture.get() != &capture) return true;
        return std::all_of(stream->frontier.begin(), stream->frontier.end(),
                           [&](const Ref<Node>& node) { return reached.count(node.get()) != 0; });
      });
}

// All streams leave the capture, and its events are of no use any more.
void terminate(Capture& capture) {
  for (const Ref<Stream>& member : state().all_streams) {
    if (member->capture.get() != &capture) continue;
    member->capture = Ref<Capture>();
    member->frontier.clear();
  }
  capture.origin = nullptr;
  capture.graph->capturing = false;
  std::erase(state().captures, Ref<Capture>(&capture));
}

cudaError_t end(cudaStream_t handle, cudaGraph_t* out) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (out != nullptr) *out = nullptr;
  if (!stream->capture) return cudaErrorIllegalState;
  if (out == nullptr) return cudaErrorInvalidValue;
  const Ref<Capture> capture = stream->capture;
  if (capture->origin != stream) {
    invalidate(*capture);
    return cudaErrorStreamCaptureUnmatched;
  }
  const bool relaxed = capture->mode == cudaStreamCaptureModeRelaxed;
  cudaError_t code = cudaSuccess;
  if (!relaxed && capture->thread != this_thread().id) {
    code = cudaErrorStreamCaptureWrongThread;
  } else if (!capture->valid) {
    code = cudaErrorStreamCaptureInvalidated;
  } else if (!joined(*capture)) {
    code = cudaErrorStreamCaptureUnjoined;
  }
  terminate(*capture);
  if (code == cudaSuccess) {
    *out = capture->graph->handle;
  } else {
    destroy_graph(*capture->graph);
  }
  return code;
}

cudaStreamCaptureStatus status_of(const Stream& stream) {
  if (!stream.capture) return cudaStreamCaptureStatusNone;
  return stream.capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
}

cudaError_t is_capturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  if (status == nullptr) return cudaErrorInvalidValue;
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  const cudaError_t code = check_legacy(*stream, false);
  if (code == cudaSuccess) *status = status_of(*stream);
  return code;
}

cudaError_t info(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                 cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                 const cudaGraphEdgeData** data, std::size_t* count) {
  if (data != nullptr && dependencies == nullptr) return cudaErrorInvalidValue;
  const cudaError_t code = is_capturing(handle, status);
  if (code != cudaSuccess || *status != cudaStreamCaptureStatusActive) return code;
  Stream& stream = *find_stream(handle);
  stream.reported.clear();
  for (const Ref<Node>& node : stream.frontier) stream.reported.push_back(node->handle);
  stream.reported_data.assign(stream.frontier.size(), cudaGraphEdgeData{});
  if (id != nullptr) *id = stream.capture->id;
  if (graph != nullptr) *graph = stream.capture->graph->handle;
  if (dependencies != nullptr) *dependencies = stream.reported.data();
  if (data != nullptr) *data = stream.reported_data.data();
  if (count != nullptr) *count = stream.reported.size();
  return cudaSuccess;
}

}  // namespace

void invalidate(Capture& capture) { capture.valid = false; }

cudaError_t check_unsafe() {
  const Thread& thread = this_thread();
  if (thread.mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t code = cudaSuccess;
  for (const Ref<Capture>& capture : state().captures) {
    const bool mine = capture->thread == thread.id && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool global =
        thread.mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!mine && !global) continue;
    invalidate(*capture);
    code = cudaErrorStreamCaptureUnsupported;
  }
  return code;
}

cudaError_t check_legacy(const Stream& stream, bool invalidating) {
  if (!stream.legacy) return cudaSuccess;
  cudaError_t code = cudaSuccess;
  for (const Ref<Stream>& other : state().all_streams) {
    if (!other->blocking() || other->device != stream.device || !other->capture) continue;
    if (invalidating) invalidate(*other->capture);
    code = cudaErrorStreamCaptureImplicit;
  }
  return code;
}

void leave_capture(Stream& stream) {
  if (!stream.capture) return;
  const Ref<Capture> capture = stream.capture;
  if (capture->origin == &stream) {
    terminate(*capture);
    destroy_graph(*capture->graph);
  } else {
    stream.capture = Ref<Capture>();
    stream.frontier.clear();
  }
}

cudaError_t submit(Stream& stream, cudaGraphNodeType type, Work body, Ref<Kernel> kernel) {
  if (!stream.capture) {
    const cudaError_t code = check_legacy(stream, true);
    if (code == cudaSuccess) enqueue(stream, std::move(body));
    return code;
  }
  if (!stream.capture->valid) return cudaErrorStreamCaptureInvalidated;
  stream.frontier = {
      add_node(*stream.capture->graph, type, std::move(body), std::move(stream.frontier))};
  stream.frontier.front()->kernel = std::move(kernel);
  return cudaSuccess;
}

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return api("cudaStreamBeginCapture", [&](Lock&) { return begin(stream, mode); });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return api("cudaStreamEndCapture", [&](Lock&) { return end(stream, graph); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return api("cudaStreamIsCapturing", [&](Lock&) { return is_capturing(stream, status); });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** data, std::size_t* count) {
  return api("cudaStreamGetCaptureInfo",
             [&](Lock&) { return info(stream, status, id, graph, dependencies, data, count); });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return api("cudaThreadExchangeStreamCaptureMode", [&](Lock&) {
    if (mode == nullptr || !known(*mode)) return cudaErrorInvalidValue;
    std::swap(*mode, this_thread().mode);
    return cudaSuccess;
  });
}

}  // extern "C"

}  // namespace sim::detail
