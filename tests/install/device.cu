// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// A .cu file of a consumer: every recipe compiles in it, as C++20.

#include <holdfast/kernels.cuh>

#include <cstdio>

template class holdfast::StreamSum<float>;
template class holdfast::Relayout<float>;

int main() {
  std::printf("device: C++ %ld\n", static_cast<long>(__cplusplus));
  return __cplusplus >= 202002L ? 0 : 1;
}
