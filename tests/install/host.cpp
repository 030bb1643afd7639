// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// A plain .cpp file of a consumer: it holds a buffer, and starts on a machine without a driver.

#include <holdfast/holdfast.hpp>

#include <cstdio>

int main() {
  try {
    holdfast::DeviceResource memory(0);
    holdfast::StableBuffer<float> buffer("consumer", memory);
    buffer.allocate({24, 4096});
    std::printf("host: allocated %s\n", to_string(buffer.shape()).c_str());
    return buffer.data() != nullptr ? 0 : 1;
  } catch (const holdfast::CudaError& error) {
    std::printf("host: %s\n", error.what());
    return error.code() == cudaErrorInsufficientDriver || error.code() == cudaErrorNoDevice ? 0 : 1;
  }
}
