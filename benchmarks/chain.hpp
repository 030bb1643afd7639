// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The time of one node: that of a replayed graph, divided.

#include <holdfast/error.hpp>

#include "device.hpp"

#include <cuda_runtime.h>

#include <functional>
#include <vector>

namespace holdfast::bench {

/// A chain of nodes on one stream, and how long one of them takes.
class Chain {
 public:
  /// `enqueue(i)` puts node i on the stream.
  Chain(const Stream& stream, int nodes, const std::function<void(int)>& enqueue)
      : stream_(stream), nodes_(nodes) {
    throw_on_error(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                   "capture");
    for (int i = 0; i < nodes; ++i) enqueue(i);
    cudaGraph_t graph = nullptr;
    throw_on_error(cudaStreamEndCapture(stream.get(), &graph), "end of the capture");
    throw_on_error(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    throw_on_error(cudaGraphDestroy(graph), "destroy the graph");
  }
  ~Chain() { (void)cudaGraphExecDestroy(exec_); }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  /// Seconds of one node.
  [[nodiscard]] double sample() const {
    throw_on_error(cudaGraphLaunch(exec_, stream_.get()),
                   "replay");  // keeps the GPU busy meanwhile
    begin_.record(stream_);
    throw_on_error(cudaGraphLaunch(exec_, stream_.get()), "replay");
    end_.record(stream_);
    stream_.wait();
    return end_.seconds_since(begin_) / nodes_;
  }
  [[nodiscard]] std::vector<double> samples(int count) const {
    for (int i = 0; i < 5; ++i) (void)sample();
    std::vector<double> seconds;
    for (int i = 0; i < count; ++i) seconds.push_back(sample());
    return seconds;
  }

 private:
  const Stream& stream_;
  int nodes_;
  cudaGraphExec_t exec_ = nullptr;
  Event begin_;
  Event end_;
};

}  // namespace holdfast::bench
