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

#include "device.hpp"

#include <cuda_runtime.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using holdfast::check;
using holdfast::bench::Array;
using holdfast::bench::Event;
using holdfast::bench::median;
using holdfast::bench::Stream;

constexpr int kSamples = 101;
constexpr std::int64_t kRows = 24;
constexpr std::int64_t kStreams = 4;
constexpr double kVoidBelow = 4.0e12;  // bytes per second

/// A chain of nodes on one stream, and how long one of them takes.
class Chain {
 public:
  /// `enqueue(i)` puts node i on the stream.
  Chain(const Stream& stream, int nodes, const std::function<void(int)>& enqueue)
      : stream_(stream), nodes_(nodes) {
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < nodes; ++i) enqueue(i);
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.get(), &graph), "end of the capture");
    check(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    check(cudaGraphDestroy(graph), "destroy the graph");
  }
  ~Chain() { (void)cudaGraphExecDestroy(exec_); }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  /// Seconds of one node.
  [[nodiscard]] double sample() const {
    check(cudaGraphLaunch(exec_, stream_.get()), "replay");  // keeps the GPU busy meanwhile
    begin_.record(stream_);
    check(cudaGraphLaunch(exec_, stream_.get()), "replay");
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

// --- The copy rate

/// Grid: one thread for `Each` float4, a grid apart.
template <int Each, bool Streaming>
__global__ void __launch_bounds__(256) copy_kernel(const float4* from, float4* to) {
  const unsigned step = gridDim.x * blockDim.x;
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  float4 values[Each];
  for (int i = 0; i < Each; ++i) {
    const float4* address = from + first + i * step;
    values[i] = Streaming ? __ldcs(address) : *address;
  }
  for (int i = 0; i < Each; ++i) {
    float4* address = to + first + i * step;
    if (Streaming) {
      __stcs(address, values[i]);
    } else {
      *address = values[i];
    }
  }
}

constexpr std::size_t kCopyBytes = std::size_t{1} << 30U;

template <int Each, bool Streaming>
void copy(const Array<float>& from, const Array<float>& to, const Stream& stream) {
  constexpr unsigned kBlocks = kCopyBytes / sizeof(float4) / 256 / Each;
  copy_kernel<Each, Streaming><<<kBlocks, 256, 0, stream.get()>>>(
      reinterpret_cast<const float4*>(from.data()), reinterpret_cast<float4*>(to.data()));
  check(cudaGetLastError(), "launch of the copy");
}

struct Result {
  std::vector<double> seconds;                          // one for each sample
  std::map<std::string, std::vector<double>> counters;  // the same, in their own units
  std::string error;
};

Result measure_copy() {
  const Stream stream;
  const Array<float> from(kCopyBytes / sizeof(float));
  const Array<float> to(kCopyBytes / sizeof(float));
  std::vector<float> values(kCopyBytes / sizeof(float));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 16777213);
  from.upload(values);
  Result best;
  for (const auto variant : {copy<1, false>, copy<4, false>, copy<4, true>}) {
    to.poison();
    const Chain chain(stream, 20, [&](int) { variant(from, to, stream); });
    Result result{chain.samples(kSamples), {}, {}};
    if (to.download() != values) return {{}, {}, "a copy kernel gave wrong results"};
    if (best.seconds.empty() || median(result.seconds) < median(best.seconds)) {
      best = std::move(result);
    }
  }
  std::vector<double>& rates = best.counters["bytes_per_second"];
  for (const double seconds : best.seconds) rates.push_back(2.0 * kCopyBytes / seconds);
  if (median(rates) < kVoidBelow) {
    best.error = "void: the copy rate is " + std::to_string(median(rates) * 1e-12) +
                 " TB/s, below 4.0 TB/s (is the GPU shared, or not an H200?)";
  }
  return best;
}

const Result& copy_result() {
  static const Result result = measure_copy();
  return result;
}

// --- StreamSum

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
  check(cudaDeviceSynchronize(), "synchronise");
  const Chain chain(stream, nodes, [&](int node) {
    const auto set = static_cast<std::size_t>(node % sets);
    const float* source = sources[set].data();
    holdfast::StreamSum<float>{holdfast::TensorView(source, {rows, kStreams, hidden}, 0)}(
        results[set].data(), stream.ref());
  });
  Result result{chain.samples(kSamples), {}, {}};
  for (int set = 0; set < sets; ++set) {
    const auto want = sums(weights(rows, hidden, static_cast<std::uint32_t>(set)), rows, hidden);
    if (results[static_cast<std::size_t>(set)].download() != want) {
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
  const Result& copied = copy_result();
  if (result.error.empty()) result.error = copied.error;
  if (copied.counters.empty()) return result;
  const double rate = median(copied.counters.at("bytes_per_second"));
  const double bytes = bytes_of_sum(kMatrices * kRows, hidden);
  for (const double seconds : result.seconds) {
    result.counters["bytes_per_second"].push_back(bytes / seconds);
    result.counters["percent_of_copy"].push_back(100 * bytes / seconds / rate);
    result.counters["floor_us"].push_back(1e6 * bytes / rate);
  }
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
    check(cudaDeviceSynchronize(), "synchronise");
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
  check(cudaMemcpy(got.data(), buffer.data(), got.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "download");
  if (got != sums(values, kRows, hidden)) result.error = "the sum is wrong";
  return result;
}

// --- Google Benchmark

/// Hands out one sample for each repetition; the samples are taken before the first.
void report(benchmark::State& state, const std::function<Result()>& measure,
            std::shared_ptr<Result>& cache, std::size_t& next) {
  if (cache == nullptr) {
    try {
      cache = std::make_shared<Result>(measure());
    } catch (const std::exception& error) {
      cache = std::make_shared<Result>(Result{{}, {}, error.what()});
    }
    next = 0;
  }
  if (!cache->error.empty()) {
    state.SkipWithError(cache->error.c_str());
    return;
  }
  for (auto _ : state) state.SetIterationTime(cache->seconds.at(next));
  for (const auto& [name, values] : cache->counters) state.counters[name] = values.at(next);
  ++next;
}

void add(const std::string& name, const std::function<Result()>& measure,
         benchmark::TimeUnit unit = benchmark::kMicrosecond) {
  auto cache = std::make_shared<std::pair<std::shared_ptr<Result>, std::size_t>>();
  benchmark::RegisterBenchmark(name.c_str(),
                               [measure, cache](benchmark::State& state) {
                                 report(state, measure, cache->first, cache->second);
                               })
      ->UseManualTime()
      ->Iterations(1)
      ->Repetitions(kSamples)
      ->ReportAggregatesOnly()
      ->Unit(unit);
}

bool failed = false;

/// Whether a run ended in an error; Google Benchmark 1.8 renamed the field.
template <class Run>
bool ended_in_error(const Run& run) {
  if constexpr (requires { run.error_occurred; }) {
    return run.error_occurred;
  } else {
    return static_cast<bool>(run.skipped);
  }
}

/// Leaves the names as they were registered, without `/iterations:1/repeats:101/manual_time`.
template <class Base>
class ExactNames : public Base {
 public:
  using Base::Base;
  void ReportRuns(const std::vector<benchmark::BenchmarkReporter::Run>& runs) override {
    std::vector<benchmark::BenchmarkReporter::Run> renamed;
    for (auto run : runs) {
      run.run_name.iterations.clear();
      run.run_name.repetitions.clear();
      run.run_name.time_type.clear();
      failed = failed || ended_in_error(run);
      renamed.push_back(std::move(run));
      if (ended_in_error(renamed.back())) break;  // the other repetitions say the same
    }
    Base::ReportRuns(renamed);
  }
};

/// Prints what is measured, and puts it into the JSON. False if there is nothing to measure on.
bool describe_device() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || count == 0) {
    std::fprintf(stderr, "no usable GPU: %s\n",
                 code != cudaSuccess ? cudaGetErrorString(code) : "none found");
    return false;
  }
  for (const auto& [name, value] : holdfast::bench::use_device_0()) {
    std::printf("%-16s %s\n", name.c_str(), value.c_str());
    benchmark::AddCustomContext(name, value);
  }
  std::fflush(stdout);
  return true;
}

bool asks_for_file(int argc, char** argv) {
  return std::any_of(argv, argv + argc, [](const char* argument) {
    return std::string_view(argument).starts_with("--benchmark_out=");
  });
}

}  // namespace

int main(int argc, char** argv) {
  const bool to_file = asks_for_file(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  try {
    if (!describe_device()) return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "no usable GPU: %s\n", error.what());
    return 1;
  }
  add("copy_rate", copy_result);
  for (const std::int64_t hidden : {4096, 7168}) {
    const std::string size = "/hidden:" + std::to_string(hidden);
    add("stream_sum" + size + "/l2:warm", [hidden] { return measure_warm(hidden); });
    add("stream_sum" + size + "/l2:cold", [hidden] { return measure_cold(hidden); });
    add("stream_sum_64" + size, [hidden] { return measure_64(hidden); });
    add("finalize" + size, [hidden] { return measure_finalize(hidden); });
  }
  ExactNames<benchmark::ConsoleReporter> console;
  ExactNames<benchmark::JSONReporter> file;
  if (to_file) {
    benchmark::RunSpecifiedBenchmarks(&console, &file);
  } else {
    benchmark::RunSpecifiedBenchmarks(&console);
  }
  benchmark::Shutdown();
  return failed ? 1 : 0;
}
