// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/kernels.cuh>

#include <cstdio>

int main() {
  std::printf("device: C++ %ld\n", static_cast<long>(__cplusplus));
  return __cplusplus >= 202002L ? 0 : 1;
}
