// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Six ways to bring new weights under captured graphs. All sum with the same kernel.

#include <holdfast/holdfast.hpp>
#include <holdfast/stream_sum.cuh>

#include "device.hpp"
#include "graph_replay/engine.cuh"

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace graph_replay {

/// What all ways start from.
struct Scene {
  const Buffers& buffers;
  std::vector<std::int64_t> batches;
  int nodes;
  const Stream& stream;
  const float* hc_attn_fn;  ///< the first weights, [24, 4 * hidden]
};

[[nodiscard]] inline holdfast::StreamSum<float> stream_sum(const float* hc_attn_fn,
                                                           std::int64_t hidden) {
  return holdfast::StreamSum<float>{
      holdfast::TensorView(hc_attn_fn, {kMixes, kStreams, hidden}, 0)};
}

/// An engine with one way to refit. Its graphs are captured when it is made.
class Way {
 public:
  Way() = default;
  virtual ~Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;

  [[nodiscard]] virtual const char* name() const = 0;
  /// One line for a reader.
  [[nodiscard]] virtual const char* meaning() const = 0;
  /// Whether the graphs must see new weights.
  [[nodiscard]] virtual bool reaches_graphs() const { return true; }
  /// Whether one refit takes milliseconds for each graph.
  [[nodiscard]] virtual bool slow() const { return false; }

  /// New weights lie at `hc_attn_fn`. May return before the device is done.
  virtual void refit(const float* hc_attn_fn) = 0;
  /// Where the derived weight lies.
  [[nodiscard]] virtual const float* address() const = 0;
  /// Device bytes that a refit needs beyond the one derived weight, at their peak. What graphs take
  /// is not counted.
  [[nodiscard]] virtual std::size_t extra_bytes() const = 0;

  [[nodiscard]] virtual Family& family() = 0;
};

/// holdfast's: one address, new contents.
class Stable final : public Way {
 public:
  explicit Stable(const Scene& scene) : scene_(scene) {
    refit(scene.hc_attn_fn);
    family_ = std::make_unique<Family>(
        scene.buffers, scene.batches, scene.nodes, broadcast_.data(),
        [](const PreBroadcast& op, const Stream& on) { pre_broadcast(op, on.ref()); },
        scene.stream);
  }
  [[nodiscard]] const char* name() const override { return "stable"; }
  [[nodiscard]] const char* meaning() const override {
    return "holdfast::StableBuffer: the sum is written to the address that the graphs hold";
  }
  void refit(const float* hc_attn_fn) override {
    broadcast_.finalize(stream_sum(hc_attn_fn, scene_.buffers.hidden), scene_.stream.ref());
  }
  [[nodiscard]] const float* address() const override { return broadcast_.data(); }
  [[nodiscard]] std::size_t extra_bytes() const override { return 0; }
  [[nodiscard]] Family& family() override { return *family_; }

 private:
  Scene scene_;
  holdfast::DeviceResource memory_;
  holdfast::StableBuffer<float> broadcast_{"layers.0.hc_attn_fn_broadcast", memory_};
  std::unique_ptr<Family> family_;  // goes before the memory that it reads
};

/// What engines do without it: the sum goes to another allocation, and the last one is given up
/// after that, so a refit takes one block more. To be fair the allocations are made beforehand, as
/// a caching allocator has them. And the one that the graphs captured is kept here, so that a stale
/// graph reads old numbers and not somebody else's; that block is not counted.
class Rebind : public Way {
 public:
  explicit Rebind(const Scene& scene)
      : Rebind(scene,
               [](const PreBroadcast& op, const Stream& on) { pre_broadcast(op, on.ref()); }) {}
  [[nodiscard]] const char* name() const override { return "rebind"; }
  [[nodiscard]] const char* meaning() const override {
    return "the fault: the sum goes to a new allocation, the graphs read the old one";
  }
  [[nodiscard]] bool reaches_graphs() const override { return false; }
  void refit(const float* hc_attn_fn) override {
    current_ = current_ == 1 ? 2 : 1;
    sum(hc_attn_fn);
  }
  [[nodiscard]] const float* address() const override { return blocks_.at(current_).data(); }
  [[nodiscard]] std::size_t extra_bytes() const override { return blocks_[0].bytes(); }
  [[nodiscard]] Family& family() override { return *family_; }

 protected:
  Rebind(const Scene& scene, Reader reader) : scene_(scene) {
    sum(scene.hc_attn_fn);
    family_ = std::make_unique<Family>(scene.buffers, scene.batches, scene.nodes, address(),
                                       std::move(reader), scene.stream);
  }
  [[nodiscard]] const Scene& scene() const { return scene_; }

 private:
  void sum(const float* hc_attn_fn) const {
    stream_sum(hc_attn_fn, scene_.buffers.hidden)(blocks_.at(current_).data(), scene_.stream.ref());
  }
  [[nodiscard]] static Array<float> block(const Scene& scene) {
    return Array<float>(static_cast<std::size_t>(kMixes * scene.buffers.hidden));
  }

  Scene scene_;
  std::array<Array<float>, 3> blocks_{block(scene_), block(scene_), block(scene_)};
  std::size_t current_ = 0;
  std::unique_ptr<Family> family_;
};

/// Rebinds, then gives the reading node of every graph the new address.
class SetParams final : public Rebind {
 public:
  explicit SetParams(const Scene& scene) : Rebind(scene) {
    for (const Captured& captured : family().graphs()) {
      throw_on_error(cudaGraphKernelNodeGetParams(captured.reader, &launches_.emplace_back()),
                     "parameters of the reader");
      arguments_.push_back(scene.buffers.pre_broadcast(captured.tokens, address()));
    }
  }
  [[nodiscard]] const char* name() const override { return "rebind+setparams"; }
  [[nodiscard]] const char* meaning() const override {
    return "and cudaGraphExecKernelNodeSetParams on each reading node (keep all graphs, handles "
           "and arguments)";
  }
  [[nodiscard]] bool reaches_graphs() const override { return true; }
  void refit(const float* hc_attn_fn) override {
    Rebind::refit(hc_attn_fn);
    const std::vector<Captured>& graphs = family().graphs();
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      arguments_[i].fn_broadcast = {address(), scene().buffers.hidden};
      void* arguments[] = {&arguments_[i]};
      launches_[i].kernelParams = static_cast<void**>(arguments);
      launches_[i].extra = nullptr;
      throw_on_error(
          cudaGraphExecKernelNodeSetParams(graphs[i].exec, graphs[i].reader, &launches_[i]),
          "set the parameters of the reader");
    }
  }

 private:
  // What an engine that refits so would keep: to ask the graph each time costs more than to set.
  std::vector<cudaKernelNodeParams> launches_;
  std::vector<PreBroadcast> arguments_;
};

/// Rebinds, then captures every graph again and updates the executable one.
class Update final : public Rebind {
 public:
  using Rebind::Rebind;
  [[nodiscard]] const char* name() const override { return "rebind+update"; }
  [[nodiscard]] const char* meaning() const override {
    return "and every graph captured again, cudaGraphExecUpdate";
  }
  [[nodiscard]] bool reaches_graphs() const override { return true; }
  [[nodiscard]] bool slow() const override { return true; }
  void refit(const float* hc_attn_fn) override {
    Rebind::refit(hc_attn_fn);
    for (const Captured& captured : family().graphs()) {
      const Captured again = family().capture_again(captured.tokens, address());
      cudaGraphExecUpdateResultInfo result{};
      throw_on_error(cudaGraphExecUpdate(captured.exec, again.graph, &result), "update of a graph");
      throw_on_error(cudaGraphDestroy(again.graph), "destroy a graph");
    }
  }
};

/// Rebinds, then captures and instantiates every graph again.
class Recapture final : public Rebind {
 public:
  using Rebind::Rebind;
  [[nodiscard]] const char* name() const override { return "rebind+recapture"; }
  [[nodiscard]] const char* meaning() const override {
    return "and every graph captured and instantiated again";
  }
  [[nodiscard]] bool reaches_graphs() const override { return true; }
  [[nodiscard]] bool slow() const override { return true; }
  void refit(const float* hc_attn_fn) override {
    Rebind::refit(hc_attn_fn);
    for (Captured& captured : family().graphs()) {
      Captured again = family().capture_again(captured.tokens, address());
      throw_on_error(cudaGraphInstantiate(&again.exec, again.graph, 0), "instantiate");
      std::swap(captured, again);
      throw_on_error(cudaGraphExecDestroy(again.exec), "destroy an executable graph");
      throw_on_error(cudaGraphDestroy(again.graph), "destroy a graph");
    }
  }
};

/// Rebinds, then stores the new address where the graphs look it up.
class Indirection final : public Rebind {
 public:
  explicit Indirection(const Scene& scene)
      : Indirection(scene, std::make_shared<Array<const float*>>(std::size_t{1})) {}
  [[nodiscard]] const char* name() const override { return "indirection"; }
  [[nodiscard]] const char* meaning() const override {
    return "the graphs look the address up in device memory (needs kernels that do)";
  }
  [[nodiscard]] bool reaches_graphs() const override { return true; }
  void refit(const float* hc_attn_fn) override {
    Rebind::refit(hc_attn_fn);
    publish();
  }
  [[nodiscard]] std::size_t extra_bytes() const override {
    return Rebind::extra_bytes() + slot_->bytes();
  }

 private:
  Indirection(const Scene& scene, const std::shared_ptr<Array<const float*>>& slot)
      : Rebind(scene,
               [slot](const PreBroadcast& op, const Stream& on) {
                 holdfast::mhc::detail::validate(op);
                 cudaLaunchConfig_t config{};
                 config.gridDim = dim3(static_cast<unsigned>(op.x.extent(0)));
                 config.blockDim = dim3(holdfast::mhc::detail::kPreBroadcastThreads);
                 config.stream = on.get();
                 const float* const* address = slot->data();
                 throw_on_error(
                     cudaLaunchKernelEx(&config, indirect_kernel<PreBroadcast>, op, address),
                     "launch through a pointer");
               }),
        slot_(slot) {
    publish();
  }
  void publish() {
    // A kernel and not a copy: its argument is the cheapest way for eight bytes to the device.
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(1);
    config.stream = scene().stream.get();
    throw_on_error(
        cudaLaunchKernelEx(&config, publish_kernel<const float*>, slot_->data(), address()),
        "store the address");
  }

  std::shared_ptr<Array<const float*>> slot_;
};

[[nodiscard]] inline std::vector<std::unique_ptr<Way>> all_ways(const Scene& scene) {
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(std::make_unique<Stable>(scene));
  ways.push_back(std::make_unique<Rebind>(scene));
  ways.push_back(std::make_unique<SetParams>(scene));
  ways.push_back(std::make_unique<Update>(scene));
  ways.push_back(std::make_unique<Recapture>(scene));
  ways.push_back(std::make_unique<Indirection>(scene));
  return ways;
}

}  // namespace graph_replay
