// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A program of benchmarks whose samples are taken by the benchmarks themselves; Google Benchmark
/// selects, reports and writes the JSON.

#include "device.hpp"
#include "result.hpp"

#include <cuda_runtime.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace holdfast::bench {

/// Registers a benchmark of `samples` samples, all taken by one call of `measure` before the first
/// is reported.
inline void add(const std::string& name, const std::function<Result()>& measure,
                int samples = kSamples, benchmark::TimeUnit unit = benchmark::kMicrosecond) {
  struct Taken {
    std::unique_ptr<Result> result;
    std::size_t next = 0;
  };
  const auto report = [measure, taken = std::make_shared<Taken>()](benchmark::State& state) {
    if (taken->result == nullptr) {
      try {
        taken->result = std::make_unique<Result>(measure());
      } catch (const std::exception& error) {
        taken->result = std::make_unique<Result>(Result{{}, {}, error.what()});
      }
    }
    const Result& result = *taken->result;
    if (!result.error.empty()) {
      state.SkipWithError(result.error.c_str());
      return;
    }
    const std::size_t sample = taken->next++;
    for (auto _ : state) state.SetIterationTime(result.seconds.at(sample));
    for (const auto& [counter, values] : result.counters) {
      state.counters[counter] = values.at(sample);
    }
  };
  benchmark::RegisterBenchmark(name.c_str(), report)
      ->UseManualTime()
      ->Iterations(1)
      ->Repetitions(samples)
      ->ReportAggregatesOnly()
      ->Unit(unit);
}

namespace detail {

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
      failed_ = failed_ || ended_in_error(run);
      renamed.push_back(std::move(run));
      if (ended_in_error(renamed.back())) break;  // the other repetitions say the same
    }
    Base::ReportRuns(renamed);
  }
  [[nodiscard]] bool failed() const { return failed_; }

 private:
  bool failed_ = false;
};

/// Prints what is measured, and puts it into the JSON. False if there is nothing to measure on.
inline bool describe_device() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || count == 0) {
    std::fprintf(stderr, "no usable GPU: %s\n",
                 code != cudaSuccess ? cudaGetErrorString(code) : "none found");
    return false;
  }
  for (const auto& [name, value] : use_device_0()) {
    std::printf("%-16s %s\n", name.c_str(), value.c_str());
    benchmark::AddCustomContext(name, value);
  }
  std::fflush(stdout);
  return true;
}

inline bool asks_for_file(int argc, char** argv) {
  return std::any_of(argv, argv + argc, [](const char* argument) {
    return std::string_view(argument).starts_with("--benchmark_out=");
  });
}

}  // namespace detail

/// The main program: what `add_all` registers, as far as the command line selects it. Returns the
/// exit status.
inline int run(int argc, char** argv, const std::function<void()>& add_all) {
  const bool to_file = detail::asks_for_file(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  try {
    if (!detail::describe_device()) return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "no usable GPU: %s\n", error.what());
    return 1;
  }
  add_all();
  detail::ExactNames<benchmark::ConsoleReporter> console;
  detail::ExactNames<benchmark::JSONReporter> file;
  if (to_file) {
    benchmark::RunSpecifiedBenchmarks(&console, &file);
  } else {
    benchmark::RunSpecifiedBenchmarks(&console);
  }
  benchmark::Shutdown();
  return console.failed() ? 1 : 0;
}

}  // namespace holdfast::bench
