// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What every benchmark needs of CUDA: a stream, memory, events, the device's facts, a median, a
/// comparison of bytes.

#include <holdfast/error.hpp>

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace holdfast::bench {

class Stream {
 public:
  Stream() { throw_on_error(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { (void)cudaStreamDestroy(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return handle_; }
  [[nodiscard]] cuda::stream_ref ref() const { return cuda::stream_ref{handle_}; }
  void wait() const { throw_on_error(cudaStreamSynchronize(handle_), "synchronise the stream"); }

 private:
  cudaStream_t handle_ = nullptr;
};

class Event {
 public:
  Event() { throw_on_error(cudaEventCreate(&handle_), "event"); }
  ~Event() { (void)cudaEventDestroy(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Stream& stream) const {
    throw_on_error(cudaEventRecord(handle_, stream.get()), "event");
  }
  /// Seconds from `earlier` to this one; both have happened.
  [[nodiscard]] double seconds_since(const Event& earlier) const {
    float milliseconds = 0;
    throw_on_error(cudaEventElapsedTime(&milliseconds, earlier.handle_, handle_), "elapsed time");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

/// Device memory, poisoned when it is made. Its copies wait for the whole device.
template <class T>
class Array {
 public:
  explicit Array(std::size_t count) : count_(count) {
    throw_on_error(cudaMalloc(&data_, std::max(bytes(), std::size_t{1})), "memory of a benchmark");
    poison();
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) { upload(values); }
  ~Array() { (void)cudaFree(data_); }
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Array& operator=(Array&&) = delete;

  [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

  /// Every byte 0xFF: NaN as f32 and bf16.
  void poison() const {
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
    throw_on_error(cudaMemset(data_, 0xFF, bytes()), "poison");
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
  }
  /// \throws ContractError unless there is a value for each element.
  void upload(const std::vector<T>& values) const {
    throw_unless(values.size() == count_, Rule::shape_mismatch, [&] {
      return "upload of " + std::to_string(values.size()) + " values to memory for " +
             std::to_string(count_);
    });
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
    throw_on_error(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "upload");
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
  }
  /// The first `count` elements.
  [[nodiscard]] std::vector<T> download(std::size_t count) const {
    std::vector<T> values(std::min(count, count_));
    throw_on_error(cudaDeviceSynchronize(), "synchronise");
    throw_on_error(
        cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
        "download");
    return values;
  }
  [[nodiscard]] std::vector<T> download() const { return download(count_); }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

/// Unlike ==, tells one zero from the other and finds equal NaNs equal.
template <class T>
[[nodiscard]] bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

[[nodiscard]] inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The device's and the software's facts, by name. Makes waits spin: the host's wake-up is then not
/// part of a time.
[[nodiscard]] inline std::vector<std::pair<std::string, std::string>> use_device_0() {
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  throw_on_error(cudaSetDeviceFlags(cudaDeviceScheduleSpin), "wait by spinning");
  throw_on_error(cudaSetDevice(0), "device 0");
  cudaDeviceProp device{};
  throw_on_error(cudaGetDeviceProperties(&device, 0), "properties of device 0");
  int driver = 0;
  int runtime = 0;
  throw_on_error(cudaDriverGetVersion(&driver), "version of the driver");
  throw_on_error(cudaRuntimeGetVersion(&runtime), "version of the runtime");
  return {
      {"device", device.name},
      {"multiprocessors", std::to_string(device.multiProcessorCount)},
      {"l2_bytes", std::to_string(device.l2CacheSize)},
      {"memory_bytes", std::to_string(device.totalGlobalMem)},
      {"cuda_driver", version(driver)},
      {"cuda_runtime", version(runtime)},
      {"host_wait", "cudaDeviceScheduleSpin"},
  };
}

}  // namespace holdfast::bench
