// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The copy rate: bytes read and written per second by the best of three copy kernels, 1 GiB. It is
/// what a kernel that moves its bytes once can reach. Below 4.0 TB/s the machine was disturbed, and
/// what is compared with the rate is void.

#include <holdfast/error.hpp>

#include "chain.hpp"
#include "device.hpp"
#include "result.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace holdfast::bench {

namespace detail {

inline constexpr double kVoidBelow = 4.0e12;  // bytes per second
inline constexpr std::size_t kCopyBytes = std::size_t{1} << 30U;

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

template <int Each, bool Streaming>
void copy(const Array<float>& from, const Array<float>& to, const Stream& stream) {
  constexpr unsigned kBlocks = kCopyBytes / sizeof(float4) / 256 / Each;
  copy_kernel<Each, Streaming><<<kBlocks, 256, 0, stream.get()>>>(
      reinterpret_cast<const float4*>(from.data()), reinterpret_cast<float4*>(to.data()));
  throw_on_error(cudaGetLastError(), "launch of the copy");
}

inline Result measure_copy_rate() {
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
    if (!same_bytes(to.download(), values)) return {{}, {}, "a copy kernel gave wrong results"};
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

}  // namespace detail

/// The copy itself, measured when it is first asked for. Its counter bytes_per_second is there even
/// where it is void.
inline const Result& copy_rate() {
  static const Result result = detail::measure_copy_rate();
  return result;
}

/// Adds to a result whose nodes move `bytes` how that compares with the copy. Void where the copy
/// is.
inline void compare_with_copy(Result& result, double bytes) {
  const Result& copied = copy_rate();
  if (result.error.empty()) result.error = copied.error;
  if (copied.counters.empty()) return;
  const double rate = median(copied.counters.at("bytes_per_second"));
  for (const double seconds : result.seconds) {
    result.counters["bytes_per_second"].push_back(bytes / seconds);
    result.counters["percent_of_copy"].push_back(100 * bytes / seconds / rate);
  }
}

}  // namespace holdfast::bench
