// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// What StreamSum costs on this GPU.
///
///     holdfast.bench.stream_sum --benchmark_out=stream_sum.json
///
/// - stream_sum/hidden:H/l2:warm|cold: one f32 matrix [24, 4, H], as one node of a replayed graph.
/// - stream_sum_64/hidden:H: 64 such matrices in one launch, against the copy rate.
/// - finalize/hidden:H: StableBuffer::finalize on an existing buffer, by the host's clock: until
///   the call returns, and until the stream is done; beside it, in turn, the launch of the same
///   kernel alone.
/// - copy_rate: bytes read and written per second by the best of three copy kernels, 1 GiB. Below
///   4.0 TB/s the machine was disturbed, and what is compared with it is void.
///
/// Times of nodes: a chain of dependent nodes on one stream, between two events, divided by the
/// number of nodes; behind a first replay, so that the host is ahead. `warm`: all matrices of the
/// chain lie within 16 MB. `cold`: the chain goes around more than 120 MB. Results are checked
/// after the last sample. The median over 101 samples is the number to quote; the JSON has its name
/// without what Google Benchmark appends.

#include <holdfast/holdfast.hpp>
#include <holdfast/kernels.cuh>

#include "chain.hpp"
#include "copy_rate.cuh"
#include "device.hpp"
#include "report.hpp"
#include "result.hpp"

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace {

using holdfast::throw_on_error;
using holdfast::bench::add;
using holdfast::bench::Array;
using holdfast::bench::Chain;
using holdfast::bench::compare_with_copy;
using holdfast::bench::copy_rate;
using holdfast::bench::kSamples;
using holdfast::bench::median;
using holdfast::bench::Result;
using holdfast::bench::same_bytes;
using holdfast::bench::Stream;

constexpr std::int64_t kRows = 24;
constexpr std::int64_t kStreams = 4;

/// Different for each set, of size 1, with sums that round.
std::vector<float> weights(std::int64_t rows, std::int64_t hidden, std::uint32_t seed) {
  std::vector<float> values(static_cast<std::size_t>(rows * kStreams * hidden));
  std::uint32_t state = seed * 2654435761U + 1;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<std::int32_t>(state) >> 7) * 0x1p-24F;
  }
  return values;
}

std::vector<float> sums(const std::vector<float>& values, std::int64_t rows, std::int64_t hidden) {
  std::vector<float> result(static_cast<std::size_t>(rows * hidden));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < hidden; ++i) {
      float sum = 0;
      for (std::int64_t s = 0; s < kStreams; ++s) {
        sum += values[static_cast<std::size_t>((row * kStreams + s) * hidden + i)];
      }
      result[static_cast<std::size_t>(row * hidden + i)] = sum;
    }
  }
  return result;
}

double bytes_of_sum(std::int64_t rows, std::int64_t hidden) {
  return static_cast<double>(rows * hidden * (kStreams + 1)) * sizeof(float);
}

/// `nodes` sums in a chain that goes around `sets` sources and results.
Result measure_sums(std::int64_t rows, std::int64_t hidden, int sets, int nodes) {
  const Stream stream;
  std::vector<Array<float>> sources;
  std::vector<Array<float>> results;
  for (int set = 0; set < sets; ++set) {
    sources.emplace_back(static_cast<std::size_t>(rows * kStreams * hidden));
    sources.back().upload(weights(rows, hidden, static_cast<std::uint32_t>(set)));
    results.emplace_back(static_cast<std::size_t>(rows * hidden));
  }
  throw_on_error(cudaDeviceSynchronize(), "synchronise");
  const Chain chain(stream, nodes, [&](int node) {
    const auto set = static_cast<std::size_t>(node % sets);
    const float* source = sources[set].data();
    holdfast::StreamSum<float>{holdfast::TensorView(source, {rows, kStreams, hidden}, 0)}(
        results[set].data(), stream.ref());
  });
  Result result{chain.samples(kSamples), {}, {}};
  for (int set = 0; set < sets; ++set) {
    const auto want = sums(weights(rows, hidden, static_cast<std::uint32_t>(set)), rows, hidden);
    if (!same_bytes(results[static_cast<std::size_t>(set)].download(), want)) {
      result.error = "the sum of set " + std::to_string(set) + " is wrong";
    }
  }
  return result;
}

Result measure_warm(std::int64_t hidden) {
  constexpr int kSets = 4;  // 8 MB and 14 MB
  return measure_sums(kRows, hidden, kSets, 200);
}

Result measure_cold(std::int64_t hidden) {
  const int sets = static_cast<int>(130e6 / bytes_of_sum(kRows, hidden)) + 1;
  return measure_sums(kRows, hidden, sets, sets * (200 / sets + 1));
}

Result measure_64(std::int64_t hidden) {
  constexpr std::int64_t kMatrices = 64;
  Result result = measure_sums(kMatrices * kRows, hidden, 2, 20);  // 126 MB and 220 MB a set
  const double bytes = bytes_of_sum(kMatrices * kRows, hidden);
  compare_with_copy(result, bytes);
  if (!result.error.empty()) return result;
  const double rate = median(copy_rate().counters.at("bytes_per_second"));
  result.counters["floor_us"].assign(result.seconds.size(), 1e6 * bytes / rate);
  return result;
}

Result measure_finalize(std::int64_t hidden) {
  using Clock = std::chrono::steady_clock;
  const Stream stream;
  const std::vector<float> values = weights(kRows, hidden, 1);
  const Array<float> source(values.size());
  source.upload(values);
  const float* address = source.data();
  const holdfast::TensorView view(address, {kRows, kStreams, hidden}, 0);
  holdfast::DeviceResource memory;
  holdfast::StableBuffer<float> buffer{"benchmark", memory};
  const holdfast::StreamSum<float> recipe{view};
  const auto time = [&stream](const auto& enqueue) {  // until the call returns, until it is done
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
    const auto begin = Clock::now();
    enqueue();
    const auto returned = Clock::now();
    stream.wait();
    const auto done = Clock::now();
    return std::pair{std::chrono::duration<double>(returned - begin).count(),
                     std::chrono::duration<double>(done - begin).count()};
  };
  Result result;
  for (int i = -500; i < kSamples; ++i) {  // the first 500 warm up; the very first allocates
    const auto [call, done] =
        time([&] { buffer.finalize(holdfast::StreamSum<float>{view}, stream.ref()); });
    const auto [bare_call, bare_done] = time([&] { recipe(buffer.data(), stream.ref()); });
    if (i < 0) continue;
    result.seconds.push_back(done);
    result.counters["call_us"].push_back(call * 1e6);
    result.counters["done_us"].push_back(done * 1e6);
    result.counters["bare_launch_call_us"].push_back(bare_call * 1e6);
    result.counters["bare_launch_done_us"].push_back(bare_done * 1e6);
  }
  std::vector<float> got(values.size() / kStreams);
  throw_on_error(
      cudaMemcpy(got.data(), buffer.data(), got.size() * sizeof(float), cudaMemcpyDeviceToHost),
      "download");
  if (!same_bytes(got, sums(values, kRows, hidden))) result.error = "the sum is wrong";
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  return holdfast::bench::run(argc, argv, [] {
    add("copy_rate", copy_rate);
    for (const std::int64_t hidden : {4096, 7168}) {
      const std::string size = "/hidden:" + std::to_string(hidden);
      add("stream_sum" + size + "/l2:warm", [hidden] { return measure_warm(hidden); });
      add("stream_sum" + size + "/l2:cold", [hidden] { return measure_cold(hidden); });
      add("stream_sum_64" + size, [hidden] { return measure_64(hidden); });
      add("finalize" + size, [hidden] { return measure_finalize(hidden); });
    }
  });
}
