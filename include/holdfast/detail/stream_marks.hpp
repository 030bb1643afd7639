// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// StreamMarks: for each of several streams, how far it had got when it was last marked.
///
/// One event per stream, told apart by id: a handle may be reused after its stream is destroyed, an
/// id is not. All streams are of one device, so an event may pass from one to another. Safe to use
/// from several threads.

#include "holdfast/detail/capture.hpp"
#include "holdfast/error.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace holdfast::detail {

class StreamMarks {
 public:
  StreamMarks() = default;
  /// Destroys the events and waits for nothing.
  ~StreamMarks() {
    for (const Mark& mark : marks_) (void)succeeded(cudaEventDestroy(mark.event));
  }
  StreamMarks(const StreamMarks&) = delete;  // an event has one owner
  StreamMarks& operator=(const StreamMarks&) = delete;

  /// Marks the work enqueued so far on `stream`, whose id is `id`. The current device is the
  /// stream's, and the stream is not being captured. \throws CudaError; then older marks still
  /// stand.
  void record(cudaStream_t stream, unsigned long long id) {
    const std::lock_guard lock(mutex_);
    auto mark = std::ranges::find(marks_, id, &Mark::stream_id);
    if (mark == marks_.end()) mark = place(id);
    throw_on_error(cudaEventRecord(mark->event, stream), "marking the work on a stream");
    mark->stream_id = id;
  }

  /// Makes `stream`, whose id is `id`, wait for the marks of all other streams; its own work is
  /// ordered already.
  void order_before(cudaStream_t stream, unsigned long long id) const {
    const std::lock_guard lock(mutex_);
    for (const Mark& mark : marks_) {
      if (mark.stream_id == id) continue;
      throw_on_error(cudaStreamWaitEvent(stream, mark.event, 0),
                     "making a stream wait for another one");
    }
  }

  /// Waits on the host for every mark. For destructors: errors (a dead device) end the wait.
  void synchronize() const noexcept {
    const std::lock_guard lock(mutex_);
    for (const Mark& mark : marks_) (void)succeeded(cudaEventSynchronize(mark.event));
  }

 private:
  struct Mark {
    unsigned long long stream_id;
    cudaEvent_t event;
  };

  /// A mark for a stream that has none: one whose work is done, so that streams which come and go
  /// do not pile up events, or a new one.
  std::vector<Mark>::iterator place(unsigned long long id) {
    const RelaxedCapture relaxed;  // a query is forbidden during captures
    if (relaxed.active()) {
      for (auto mark = marks_.begin(); mark != marks_.end(); ++mark) {
        if (succeeded(cudaEventQuery(mark->event))) return mark;
      }
    }
    marks_.reserve(marks_.size() + 1);  // first, so that no event is lost to a failed allocation
    cudaEvent_t event = nullptr;
    throw_on_error(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    marks_.push_back({id, event});
    return marks_.end() - 1;
  }

  mutable std::mutex mutex_;
  std::vector<Mark> marks_;
};

}  // namespace holdfast::detail
