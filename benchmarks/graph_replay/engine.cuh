// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A stand-in for an inference engine: static buffers, and a family of captured graphs, one for a
/// batch size each, whose first node is the mHC pre of the first layer.

#include <holdfast/detail/launch.cuh>
#include <holdfast/mhc/pre_broadcast.cuh>

#include "device.hpp"
#include "graph_replay/model.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace graph_replay {

using holdfast::throw_on_error;
using holdfast::bench::Array;
using holdfast::bench::Stream;
using holdfast::mhc::bf16;
using holdfast::mhc::PreBroadcast;

/// 1, 2, 4, 8, 16, 24, 32, ...: the batch sizes for which engines capture.
[[nodiscard]] inline std::vector<std::int64_t> batch_sizes(int graphs) {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < graphs; ++i) sizes.push_back(i < 3 ? 1 << i : 8 * (i - 2));
  return sizes;
}

/// Memory that every graph uses, for the largest batch.
struct Buffers {
  Buffers(const Layer& layer, const std::vector<std::uint16_t>& embeddings, std::int64_t most)
      : hidden(layer.hidden),
        x(embeddings),
        scale(layer.hc_attn_scale),
        base(layer.hc_attn_base),
        norm(layer.attn_norm),
        residual(static_cast<std::size_t>(most * kStreams * hidden)),
        post(static_cast<std::size_t>(most * kStreams)),
        comb(static_cast<std::size_t>(most * kStreams * kStreams)),
        layer_input(static_cast<std::size_t>(most * hidden)),
        passed_on(static_cast<std::size_t>(most * hidden)) {}

  /// The first node of a graph for `tokens` tokens that reads its weight at `fn_broadcast`.
  [[nodiscard]] PreBroadcast pre_broadcast(std::int64_t tokens, const float* fn_broadcast) const {
    return {
        .x = {reinterpret_cast<const bf16*>(x.data()), tokens, hidden},
        .fn_broadcast = {fn_broadcast, hidden},
        .scale = {scale.data()},
        .base = {base.data()},
        .norm_weight = {reinterpret_cast<const bf16*>(norm.data()), hidden},
        .residual_out = {reinterpret_cast<bf16*>(residual.data()), tokens, hidden},
        .post = {post.data(), tokens},
        .comb = {comb.data(), tokens},
        .layer_input = {reinterpret_cast<bf16*>(layer_input.data()), tokens, hidden},
    };
  }
  void poison() const {
    residual.poison();
    post.poison();
    comb.poison();
    layer_input.poison();
    passed_on.poison();
  }

  std::int64_t hidden;
  Array<std::uint16_t> x;  // bf16, like all uint16 here
  Array<float> scale;
  Array<float> base;
  Array<std::uint16_t> norm;
  Array<std::uint16_t> residual;
  Array<float> post;
  Array<float> comb;
  Array<std::uint16_t> layer_input;
  Array<std::uint16_t> passed_on;  // what the last node of a graph leaves
};

/// A node that stands for one of the small kernels of the layers: it moves a batch's activations.
/// Alternately there and back, so that the last one leaves layer_input in `passed_on`.
struct MoveWork {
  using Index = std::int32_t;
  const std::uint16_t* from;
  std::uint16_t* to;
  Index rows;
  Index columns;  // of 8 elements

  [[nodiscard]] __host__ __device__ Index line(Index row) const { return row * columns; }
  __host__ __device__ void operator()(Index line, Index column) const {
    constexpr int kWidth = 8;
    const std::int64_t at = std::int64_t{line + column} * kWidth;
    holdfast::detail::store(to + at, holdfast::detail::load<kWidth>(from + at));
  }
};

/// Pre of the first layer with its weight behind a pointer in device memory.
template <class Op>
__global__ void __launch_bounds__(holdfast::mhc::detail::kPreBroadcastThreads)
    indirect_kernel(const __grid_constant__ Op op, const float* const* fn) {
  holdfast::mhc::detail::pre_broadcast_token(op, *fn, blockIdx.x);
}

/// Stores the address of the weight where indirect_kernel looks it up. One thread.
template <class Address>
__global__ void publish_kernel(Address* slot, Address fn) {
  *slot = fn;
}

/// One captured graph.
struct Captured {
  std::int64_t tokens = 0;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaGraphNode_t reader = nullptr;  ///< the node that reads the weight
};

/// Puts the first node on the stream.
using Reader = std::function<void(const PreBroadcast&, const Stream&)>;

/// Captures a graph of `nodes` nodes for `tokens` tokens; it is not instantiated.
[[nodiscard]] inline Captured capture(const Buffers& buffers, std::int64_t tokens, int nodes,
                                      const float* fn_broadcast, const Reader& reader,
                                      const Stream& stream) {
  Captured result{.tokens = tokens};
  throw_on_error(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
  reader(buffers.pre_broadcast(tokens, fn_broadcast), stream);
  // What the stream waits for now is the node that was just captured.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* last = nullptr;
  std::size_t count = 0;
  throw_on_error(
      cudaStreamGetCaptureInfo(stream.get(), &status, nullptr, nullptr, &last, nullptr, &count),
      "the captured node");
  if (count == 1) result.reader = last[0];

  const auto columns = static_cast<MoveWork::Index>(buffers.hidden / 8);
  const auto rows = static_cast<MoveWork::Index>(tokens);
  const std::uint16_t* from = buffers.layer_input.data();
  for (int node = 1; node < nodes; ++node) {
    // The last but one may have to stay where it is, so that the last one ends in passed_on.
    const bool there = (nodes - 1 - node) % 2 == 0;
    std::uint16_t* to = there ? buffers.passed_on.data() : buffers.layer_input.data();
    holdfast::detail::launch(MoveWork{from, to, rows, columns}, stream.ref(), "move");
    from = to;
  }
  throw_on_error(cudaStreamEndCapture(stream.get(), &result.graph), "end of the capture");
  return result;
}

/// The graphs of one engine.
class Family {
 public:
  Family(const Buffers& buffers, const std::vector<std::int64_t>& batches, int nodes,
         const float* fn_broadcast, Reader reader, const Stream& stream)
      : buffers_(buffers), nodes_(nodes), reader_(std::move(reader)), stream_(stream) {
    for (const std::int64_t tokens : batches) {
      graphs_.push_back(capture_again(tokens, fn_broadcast));
      throw_on_error(cudaGraphInstantiate(&graphs_.back().exec, graphs_.back().graph, 0),
                     "instantiate");
      throw_on_error(cudaGraphUpload(graphs_.back().exec, stream.get()), "upload of a graph");
    }
    stream.wait();
  }
  ~Family() {
    for (const Captured& captured : graphs_) {
      (void)cudaGraphExecDestroy(captured.exec);
      (void)cudaGraphDestroy(captured.graph);
    }
  }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  [[nodiscard]] std::vector<Captured>& graphs() { return graphs_; }
  [[nodiscard]] Captured capture_again(std::int64_t tokens, const float* fn_broadcast) const {
    return capture(buffers_, tokens, nodes_, fn_broadcast, reader_, stream_);
  }
  void replay(std::size_t graph) const {
    throw_on_error(cudaGraphLaunch(graphs_.at(graph).exec, stream_.get()), "replay");
  }
  void replay_all() const {
    for (std::size_t i = 0; i < graphs_.size(); ++i) replay(i);
  }
  [[nodiscard]] const Stream& stream() const { return stream_; }

 private:
  const Buffers& buffers_;
  int nodes_;
  Reader reader_;
  const Stream& stream_;
  std::vector<Captured> graphs_;
};

}  // namespace graph_replay
