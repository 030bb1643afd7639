// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Whether this machine has a GPU for the program that asks. One that is there and cannot be used
/// is an error: a simulation or a skipped test would hide it.

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace test {

namespace detail {

/// Any kernel of the program will do: all are compiled for the same architectures.
template <class>
__global__ void probe_kernel() {}

[[nodiscard]] inline std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace detail

/// Why there is no GPU; empty if there is one and it runs this program's kernels. Device 0 counts.
/// \throws std::runtime_error if there is one that cannot be used: says what to do.
[[nodiscard]] inline std::string why_no_gpu() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (code == cudaErrorInsufficientDriver) {  // also where there is none
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver";
    throw std::runtime_error("the GPU cannot be used: its driver supports CUDA " +
                             detail::cuda_version(driver) + ", this program needs " +
                             detail::cuda_version(CUDART_VERSION) + "; update the driver");
  }
  if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0)) return "no CUDA device";
  if (code == cudaErrorStubLibrary) return "the CUDA driver is the toolkit's stub";
  const auto expect = [](cudaError_t result) {
    if (result == cudaSuccess) return;
    (void)cudaGetLastError();
    throw std::runtime_error(std::string("the GPU cannot be used: ") + cudaGetErrorName(result) +
                             ", " + cudaGetErrorString(result));
  };
  expect(code);
  cudaFuncAttributes attributes{};
  const cudaError_t found = cudaFuncGetAttributes(&attributes, detail::probe_kernel<void>);
  if (found == cudaErrorNoKernelImageForDevice || found == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();
    cudaDeviceProp device{};
    expect(cudaGetDeviceProperties(&device, 0));
    const std::string architecture = std::to_string(device.major) + std::to_string(device.minor);
    throw std::runtime_error(
        std::string("the GPU cannot be used: this program was not compiled for ") + device.name +
        ", sm_" + architecture + "; configure with -DCMAKE_CUDA_ARCHITECTURES=" + architecture +
        " and build again");
  }
  expect(found);
  return {};
}

}  // namespace test
