// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What one benchmark found.

#include <map>
#include <string>
#include <vector>

namespace holdfast::bench {

/// Samples of a benchmark, unless it says otherwise.
inline constexpr int kSamples = 101;

/// Samples, which mean nothing where there is an error.
struct Result {
  std::vector<double> seconds;                          // one for each sample
  std::map<std::string, std::vector<double>> counters;  // the same, in their own units
  std::string error;
};

}  // namespace holdfast::bench
