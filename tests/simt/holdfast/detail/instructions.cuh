// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Stands in for kernels/holdfast/detail/instructions.cuh where a host compiler compiles kernels.

#include "simt/device.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace holdfast::detail {

inline float approximate_reciprocal(float x) { return 1 / x; }

inline void barrier(int id, int threads) { simt::barrier(id, static_cast<unsigned>(threads)); }

/// Every product and the sum of 16 are exact, or nearly; then it is rounded toward zero.
inline void multiply_accumulate(float (&d)[4], const std::uint32_t (&a)[4],
                                const std::uint32_t (&b)[2]) {
  struct Lane {
    std::uint32_t a[4];
    std::uint32_t b[2];
  };
  Lane mine{};
  std::memcpy(mine.a, a, sizeof mine.a);
  std::memcpy(mine.b, b, sizeof mine.b);
  const auto given = simt::exchange(&mine, sizeof mine);
  const auto lane_at = [given](unsigned lane) {
    Lane lane_;
    std::memcpy(&lane_, given.data() + lane * simt::kMostExchanged, sizeof lane_);
    return lane_;
  };
  const auto value = [](std::uint32_t pair, unsigned which) {
    return static_cast<double>(__uint_as_float(which == 0 ? pair << 16U : pair & 0xFFFF0000U));
  };
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8;
    const unsigned column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const Lane of_a = lane_at(row % 8 * 4 + k % 8 / 2);
      const Lane of_b = lane_at(column * 4 + k % 8 / 2);
      sum += value(of_a.a[row / 8 + k / 8 * 2], k % 2) * value(of_b.b[k / 8], k % 2);
    }
    auto rounded = static_cast<float>(sum);
    if (std::abs(static_cast<double>(rounded)) > std::abs(sum)) {
      rounded = std::nextafter(rounded, 0.0F);
    }
    d[i] = rounded;
  }
}

}  // namespace holdfast::detail
