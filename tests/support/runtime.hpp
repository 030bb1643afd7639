// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What every test that calls CUDA stands on. One test source is linked twice: with the simulated
/// runtime (always runs) and with the real one (skips without a GPU, unless HOLDFAST_REQUIRE_GPU=1
/// makes that a failure). Which one it is shows only here, in prepare() and simulated().

#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

/// Whether this executable is linked with the simulated runtime.
[[nodiscard]] bool simulated();

/// Makes the runtime ready for one test: a fresh simulation, or a look for a GPU. Returns why there
/// is none, or an empty string.
[[nodiscard]] std::string prepare();

/// Whether HOLDFAST_REQUIRE_GPU=1 forbids skipping.
[[nodiscard]] bool gpu_required();

/// In a SetUp: leaves it, skipped or failed, where there is nothing to call CUDA on.
#define HOLDFAST_TEST_NEEDS_CUDA()                                              \
  do {                                                                          \
    const std::string reason = ::test::prepare();                               \
    if (reason.empty()) break;                                                  \
    if (::test::gpu_required()) FAIL() << "HOLDFAST_REQUIRE_GPU=1: " << reason; \
    GTEST_SKIP() << reason;                                                     \
  } while (false)

/// Fails the calling test by exception: CUDA calls that a test makes on its own behalf must work.
inline void ok(cudaError_t code, const char* what = "a CUDA call of the test") {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(code));
}

/// Fixture of all tests that call CUDA. `stream` is a non-blocking stream on device 0. At the end
/// the current device must be 0 again and no error may be left behind.
class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    HOLDFAST_TEST_NEEDS_CUDA();
    ok(cudaSetDevice(0));
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream == nullptr) return;
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the test left an error behind";
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0) << "the current device was not restored";
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  void sync() const { ok(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

  cudaStream_t stream = nullptr;
};

/// Device memory of a test. Synchronises by itself, and so is not for use inside a capture.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    ok(cudaMalloc(&data_, bytes() > 0 ? bytes() : 1), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    upload(values);
  }
  ~DeviceArray() { (void)cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

  void upload(const std::vector<T>& values) const {
    if (values.size() != count_) throw std::logic_error("upload of another size");
    ok(cudaDeviceSynchronize());
    if (count_ > 0) ok(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
    ok(cudaDeviceSynchronize());
  }
  /// Every byte set, so that an element which nobody wrote is seen.
  void poison(int byte = 0xCB) const {
    ok(cudaDeviceSynchronize());
    ok(cudaMemset(data_, byte, bytes()));
    ok(cudaDeviceSynchronize());
  }
  [[nodiscard]] std::vector<T> download() const;

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

/// `count` elements at `data` after everything on the device is done.
template <class T>
[[nodiscard]] std::vector<T> download(const T* data, std::size_t count) {
  std::vector<T> values(count);
  ok(cudaDeviceSynchronize());
  if (count > 0) ok(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

template <class T>
std::vector<T> DeviceArray<T>::download() const {
  return test::download(data(), count_);
}

/// A captured and instantiated graph.
class Graph {
 public:
  /// Captures what `enqueue` puts on `stream`.
  template <class Enqueue>
  Graph(cudaStream_t stream, const Enqueue& enqueue,
        cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    ok(cudaStreamBeginCapture(stream, mode), "cudaStreamBeginCapture");
    try {
      enqueue();
    } catch (...) {
      cudaGraph_t abandoned = nullptr;
      (void)cudaStreamEndCapture(stream, &abandoned);
      if (abandoned != nullptr) (void)cudaGraphDestroy(abandoned);
      (void)cudaGetLastError();
      throw;
    }
    ok(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    ok(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
  }
  ~Graph() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(cudaStream_t stream) const { ok(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }
  [[nodiscard]] cudaGraph_t get() const { return graph_; }
  [[nodiscard]] std::size_t nodes() const {
    std::size_t count = 0;
    ok(cudaGraphGetNodes(graph_, nullptr, &count));
    return count;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

/// How a kernel test runs its body.
enum class Mode { eager, captured };
inline constexpr Mode kModes[] = {Mode::eager, Mode::captured};
[[nodiscard]] inline const char* to_string(Mode mode) {
  return mode == Mode::eager ? "eager" : "captured";
}

/// Runs `enqueue` (which puts work on `stream`) at once, or captured and replayed, and waits.
template <class Enqueue>
void run(Mode mode, cudaStream_t stream, const Enqueue& enqueue) {
  if (mode == Mode::eager) {
    enqueue();
    ok(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  } else {
    const Graph graph(stream, enqueue);
    graph.launch(stream);
    ok(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
}

/// Bit patterns, for comparisons in which -0.0 differs from 0.0 and a NaN equals itself.
template <class To, class From>
[[nodiscard]] To bits(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(static_cast<void*>(&result), &value, sizeof(To));
  return result;
}

}  // namespace test
