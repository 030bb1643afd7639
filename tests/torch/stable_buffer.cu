// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// A C face of StableBuffer<float> and StreamSum<float> for stable_buffer_test.py, which holds them
/// against PyTorch in one process. It is loaded with ctypes, so nothing here needs PyTorch's
/// headers.

#include "holdfast/memory_resource.hpp"
#include "holdfast/stable_buffer.hpp"
#include "holdfast/stream_sum.cuh"

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

// Not in an unnamed namespace: functions that name it would not be exported.
struct Handle {
  explicit Handle(const char* name) : buffer(name, memory) {}

  holdfast::DeviceResource memory;
  holdfast::StableBuffer<float> buffer;
};

namespace {

thread_local std::string last_error;

}  // namespace

extern "C" {

const char* holdfast_last_error() { return last_error.c_str(); }

Handle* holdfast_create(const char* name) { return std::make_unique<Handle>(name).release(); }
void holdfast_destroy(Handle* handle) { const std::unique_ptr<Handle> owner(handle); }
float* holdfast_data(const Handle* handle) { return handle->buffer.data(); }
std::uint64_t holdfast_generation(const Handle* handle) { return handle->buffer.generation(); }

/// Sums `weights` [rows, streams * hidden] f32 into the buffer. Returns 0, or 1 with a last error.
int holdfast_finalize(Handle* handle, const float* weights, std::int64_t rows, std::int64_t streams,
                      std::int64_t hidden, cudaStream_t stream) {
  try {
    const holdfast::TensorView view(weights, {rows, streams * hidden}, handle->memory.device());
    handle->buffer.finalize(holdfast::StreamSum<float>{view, streams}, stream);
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // extern "C"
