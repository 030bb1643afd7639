// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// What CUDA does with the parameters of captured kernels, on the simulated runtime and on a GPU:
/// to read them, to change them in an executable graph, and to update one graph from another.

#include <holdfast/detail/launch.cuh>

#include "sim/kernel_node.cuh"
#include "support/runtime.hpp"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace {

using test::DeviceArray;
using test::ok;
using test::Store;

Store store(int* out, int value) { return {out, 1, 4, {}, value}; }

/// A kernel's one argument as the launch functions take it.
class Params {
 public:
  explicit Params(const Store& store) : store_(store) {
    params_.func = reinterpret_cast<void*>(&holdfast::detail::work_kernel<Store>);
    params_.gridDim = dim3(1);
    params_.blockDim = dim3(4);
    params_.kernelParams = static_cast<void**>(arguments_);
  }
  Params(const Params&) = delete;
  Params& operator=(const Params&) = delete;

  [[nodiscard]] const cudaKernelNodeParams* get() const { return &params_; }
  Store& argument() { return store_; }

 private:
  Store store_;
  void* arguments_[1] = {&store_};
  cudaKernelNodeParams params_{};
};

class KernelNode : public test::Cuda {
 protected:
  void SetUp() override {
    test::Cuda::SetUp();
    if (stream == nullptr) return;
    out_ = std::make_unique<DeviceArray<int>>(std::vector<int>(4, -1));
  }
  void TearDown() override {
    for (const cudaGraphExec_t exec : execs_) EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    for (const cudaGraph_t graph : graphs_) EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    out_.reset();
    test::Cuda::TearDown();
  }

  cudaGraph_t capture(const std::function<void()>& enqueue) {
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    graphs_.push_back(graph);
    return graph;
  }
  cudaGraph_t capture_store(int value) {
    return capture([&] { launch(store(out_->data(), value)); });
  }
  void launch(const Store& work) const {
    holdfast::detail::launch(work, cuda::stream_ref{stream}, "store");
  }
  cudaGraphExec_t instantiate(cudaGraph_t graph) {
    cudaGraphExec_t exec = nullptr;
    ok(cudaGraphInstantiate(&exec, graph, 0));
    execs_.push_back(exec);
    return exec;
  }
  /// Destroys it before the end of the test.
  void destroy(cudaGraph_t graph) {
    ok(cudaGraphDestroy(graph));
    std::erase(graphs_, graph);
  }
  static std::vector<cudaGraphNode_t> nodes(cudaGraph_t graph) {
    std::size_t count = 0;
    ok(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> result(count);
    ok(cudaGraphGetNodes(graph, result.data(), &count));
    return result;
  }
  /// What a replay stores; -1 if nothing.
  [[nodiscard]] int replay(cudaGraphExec_t exec) const {
    out_->upload(std::vector<int>(4, -1));
    ok(cudaGraphLaunch(exec, stream));
    sync();
    const std::vector<int> values = out_->download();
    EXPECT_EQ(values, std::vector<int>(4, values[0]));
    return values[0];
  }
  static int argument(cudaGraphNode_t node) {
    cudaKernelNodeParams params{};
    ok(cudaGraphKernelNodeGetParams(node, &params));
    return static_cast<const Store*>(params.kernelParams[0])->value;
  }

  /// Takes the error of a refused call off the thread.
  static bool refused(cudaError_t code) {
    (void)cudaGetLastError();
    return code != cudaSuccess;
  }

  std::unique_ptr<DeviceArray<int>> out_;
  std::vector<cudaGraph_t> graphs_;
  std::vector<cudaGraphExec_t> execs_;
};

TEST_F(KernelNode, TellsHowItWasLaunched) {
  const auto all = nodes(capture_store(7));
  ASSERT_EQ(all.size(), 1U);
  cudaKernelNodeParams params{};
  ok(cudaGraphKernelNodeGetParams(all[0], &params));
  EXPECT_NE(params.func, nullptr);
  EXPECT_EQ(params.gridDim.x * params.blockDim.x, 4U);
  EXPECT_EQ(params.sharedMemBytes, 0U);
  EXPECT_EQ(params.extra, nullptr);
  ASSERT_NE(params.kernelParams, nullptr);
  const auto& seen = *static_cast<const Store*>(params.kernelParams[0]);
  EXPECT_EQ(seen.out, out_->data());
  EXPECT_EQ(seen.value, 7);
}

TEST_F(KernelNode, AnExecutableTakesNewArguments) {
  const cudaGraph_t graph = capture_store(1);
  const cudaGraphExec_t exec = instantiate(graph);
  const cudaGraphExec_t other = instantiate(graph);
  EXPECT_EQ(replay(exec), 1);
  Params params(store(out_->data(), 2));
  ok(cudaGraphExecKernelNodeSetParams(exec, nodes(graph)[0], params.get()));
  params.argument().value = 3;  // the call has copied the arguments
  EXPECT_EQ(replay(exec), 2);
  EXPECT_EQ(replay(exec), 2);
  EXPECT_EQ(replay(other), 1) << "another executable of the same graph";
  EXPECT_EQ(argument(nodes(graph)[0]), 1) << "the graph itself";
  EXPECT_EQ(replay(instantiate(graph)), 1);
}

TEST_F(KernelNode, WhatGetParamsGaveCanBeSet) {
  const cudaGraph_t graph = capture_store(4);
  const cudaGraphExec_t exec = instantiate(graph);
  cudaKernelNodeParams params{};
  ok(cudaGraphKernelNodeGetParams(nodes(graph)[0], &params));
  Store changed = *static_cast<const Store*>(params.kernelParams[0]);
  changed.value = 5;
  changed.padding[59] = 100;
  void* arguments[] = {&changed};
  params.kernelParams = static_cast<void**>(arguments);
  ok(cudaGraphExecKernelNodeSetParams(exec, nodes(graph)[0], &params));
  EXPECT_EQ(replay(exec), 105);
}

TEST_F(KernelNode, TheGraphTakesNewArgumentsForLaterExecutables) {
  const cudaGraph_t graph = capture_store(1);
  const cudaGraphExec_t before = instantiate(graph);
  Params params(store(out_->data(), 2));
  ok(cudaGraphKernelNodeSetParams(nodes(graph)[0], params.get()));
  params.argument().value = 3;
  EXPECT_EQ(argument(nodes(graph)[0]), 2);
  EXPECT_EQ(replay(before), 1);
  EXPECT_EQ(replay(instantiate(graph)), 2);
}

TEST_F(KernelNode, OneNodeOfSeveral) {
  const DeviceArray<int> first(4);
  const cudaGraph_t graph = capture([&] {
    launch(store(first.data(), 1));
    launch(store(out_->data(), 2));
  });
  const cudaGraphExec_t exec = instantiate(graph);
  const auto all = nodes(graph);
  ASSERT_EQ(all.size(), 2U);
  for (const cudaGraphNode_t node : all) {
    if (argument(node) != 2) continue;
    const Params params(store(out_->data(), 9));
    ok(cudaGraphExecKernelNodeSetParams(exec, node, params.get()));
  }
  EXPECT_EQ(replay(exec), 9);
  EXPECT_EQ(first.download(), std::vector<int>(4, 1));
}

TEST_F(KernelNode, LaunchesInFlightKeepTheirArguments) {
  const cudaGraph_t graph = capture_store(1);
  const cudaGraphExec_t exec = instantiate(graph);
  const DeviceArray<int> copy(4);
  ok(cudaGraphLaunch(exec, stream));
  ok(cudaMemcpyAsync(copy.data(), out_->data(), copy.bytes(), cudaMemcpyDeviceToDevice, stream));
  const Params params(store(out_->data(), 2));
  ok(cudaGraphExecKernelNodeSetParams(exec, nodes(graph)[0], params.get()));
  ok(cudaGraphLaunch(exec, stream));
  sync();
  EXPECT_EQ(copy.download(), std::vector<int>(4, 1));
  EXPECT_EQ(out_->download(), std::vector<int>(4, 2));
}

TEST_F(KernelNode, SettingRefusesWhatIsNotItsNode) {
  const cudaGraph_t graph = capture([&] {
    launch(store(out_->data(), 1));
    ok(cudaMemsetAsync(out_->data(), 0, 4, stream));
  });
  const cudaGraph_t other = capture_store(5);
  const cudaGraphExec_t exec = instantiate(capture_store(6));
  const Params params(store(out_->data(), 9));
  for (const cudaGraphNode_t node : nodes(graph)) {
    cudaGraphNodeType type{};
    ok(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams got{};
    EXPECT_TRUE(refused(cudaGraphKernelNodeGetParams(node, &got)));
    EXPECT_TRUE(refused(cudaGraphKernelNodeSetParams(node, params.get())));
  }
  EXPECT_TRUE(refused(cudaGraphExecKernelNodeSetParams(exec, nodes(other)[0], params.get())));
  EXPECT_EQ(replay(exec), 6);
}

TEST_F(KernelNode, UpdateTakesTheOtherGraphsArguments) {
  const cudaGraph_t graph = capture_store(1);
  const cudaGraphExec_t exec = instantiate(graph);
  const cudaGraph_t newer = capture_store(2);
  cudaGraphExecUpdateResultInfo info{};
  ok(cudaGraphExecUpdate(exec, newer, &info));
  EXPECT_EQ(info.result, cudaGraphExecUpdateSuccess);
  EXPECT_EQ(replay(exec), 2);
  EXPECT_EQ(argument(nodes(graph)[0]), 1);
  // The nodes of the graph that it was made from still name its nodes.
  const Params params(store(out_->data(), 3));
  ok(cudaGraphExecKernelNodeSetParams(exec, nodes(graph)[0], params.get()));
  EXPECT_EQ(replay(exec), 3);
}

TEST_F(KernelNode, UpdateNeedsNeitherGraphLater) {
  const cudaGraph_t graph = capture_store(1);
  const cudaGraphExec_t exec = instantiate(graph);
  destroy(graph);
  const cudaGraph_t newer = capture_store(2);
  cudaGraphExecUpdateResultInfo info{};
  ok(cudaGraphExecUpdate(exec, newer, &info));
  destroy(newer);
  EXPECT_EQ(replay(exec), 2);
}

TEST_F(KernelNode, UpdateRefusesAnotherTopology) {
  const cudaGraphExec_t exec = instantiate(capture_store(1));
  const cudaGraph_t longer = capture([&] {
    launch(store(out_->data(), 2));
    launch(store(out_->data(), 3));
  });
  const cudaGraph_t of_another_type =
      capture([&] { ok(cudaMemsetAsync(out_->data(), 0, 16, stream)); });
  for (const cudaGraph_t graph : {longer, of_another_type}) {
    cudaGraphExecUpdateResultInfo info{};
    EXPECT_EQ(cudaGraphExecUpdate(exec, graph, &info), cudaErrorGraphExecUpdateFailure);
    (void)cudaGetLastError();
    EXPECT_NE(info.result, cudaGraphExecUpdateSuccess);
    EXPECT_EQ(replay(exec), 1) << "as it was";
  }
}

TEST_F(KernelNode, UploadChangesNothing) {
  const cudaGraphExec_t exec = instantiate(capture_store(1));
  ok(cudaGraphUpload(exec, stream));
  sync();
  EXPECT_EQ(out_->download(), std::vector<int>(4, -1));
  EXPECT_EQ(replay(exec), 1);
}

}  // namespace
