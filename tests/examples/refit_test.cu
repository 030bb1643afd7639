// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The README's example, as a test: what lies between the two marks is what the README shows.

#include "holdfast/holdfast.hpp"
#include "holdfast/kernels.cuh"

#include "support/runtime.hpp"

#include <cstdint>
#include <vector>

namespace {

using Examples = test::Cuda;

TEST_F(Examples, Refit) {
  constexpr std::int64_t hidden = 4096;
  constexpr std::size_t bytes = 24 * hidden * sizeof(float);
  const test::DeviceArray<float> source(std::vector<float>(24 * 4 * hidden, 0.25F));
  const test::DeviceArray<float> output(24 * hidden);
  const float* weights = source.data();
  float* seen = output.data();
  const std::vector<float> new_weights(source.size(), 0.5F);
  const auto load_new_weights = [&](cudaStream_t on) {  // in order with the fills, which read them
    test::ok(cudaMemcpyAsync(source.data(), new_weights.data(), source.bytes(),
                             cudaMemcpyHostToDevice, on));
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;

  // README begin
  holdfast::DeviceResource memory;  // cudaMalloc on the current device
  holdfast::StableBuffer<float> broadcast{"layers.0.hc_attn_fn_broadcast", memory};
  const holdfast::TensorView hc_attn_fn{weights, {24, 4 * hidden}, memory.device()};
  broadcast.finalize(holdfast::StreamSum<float>{hc_attn_fn, 4}, stream);  // allocates, then fills

  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);  // the graph keeps the address
  cudaMemcpyAsync(seen, broadcast.data(), bytes, cudaMemcpyDeviceToDevice, stream);
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&replay, graph, 0);

  load_new_weights(stream);
  broadcast.finalize(holdfast::StreamSum<float>{hc_attn_fn, 4}, stream);  // the same address
  cudaGraphLaunch(replay, stream);                                        // reads the new sums
  // README end

  EXPECT_EQ(output.download(), std::vector<float>(24 * hidden, 2.0F));
  EXPECT_EQ(broadcast.generation(), 2U);
  test::ok(cudaGraphExecDestroy(replay));
  test::ok(cudaGraphDestroy(graph));
}

}  // namespace
