// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>

#include <cuda_runtime_api.h>

#include <cstdio>

int main() {
  // Without a driver this fails; the program must start and say so all the same.
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  std::printf("host: %s, %d device(s)\n", cudaGetErrorName(status), devices);
  return 0;
}
