// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The cases of cases.md that are in, one test for each, named by its number.
///
/// A captured copy stands for the kernel that reads a parameter: it holds the address in the same
/// way. Sources differ in every round and outputs are poisoned, so that an old value, somebody
/// else's data and an element that nobody wrote all show.

#include "holdfast/holdfast.hpp"
#include "holdfast/kernels.cuh"

#include "support/recipes.hpp"
#include "support/runtime.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using holdfast::Capture;
using holdfast::DeviceResource;
using holdfast::Relayout;
using holdfast::Rule;
using holdfast::Shape;
using holdfast::StableBuffer;
using holdfast::State;
using holdfast::StreamSum;
using holdfast::Strides;
using holdfast::TensorView;
using test::ok;

using Bf16 = __nv_bfloat16;

// ---- contents

/// A number that tells rounds and places apart.
std::uint64_t mixed(std::uint64_t round, std::uint64_t place) {
  std::uint64_t x = (round + 1) * 0x9E3779B97F4A7C15ULL + place * 0xD1B54A32D192ED03ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

/// Integers up to 1000: every sum of a few is exact in f32, in any order.
std::vector<float> integers(std::uint64_t round, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(static_cast<int>(mixed(round, i) % 2001) - 1000);
  }
  return values;
}

std::vector<std::uint8_t> bytes(std::uint64_t round, std::size_t count) {
  std::vector<std::uint8_t> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::uint8_t>(mixed(round, i));
  return values;
}

/// Any finite bf16, by its bits.
std::vector<Bf16> brains(std::uint64_t round, std::size_t count) {
  std::vector<Bf16> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    auto pattern = static_cast<std::uint16_t>(mixed(round, i));
    if ((pattern & 0x7F80U) == 0x7F80U) pattern ^= 0x4000U;  // neither infinite nor NaN
    values[i] = __ushort_as_bfloat16(pattern);
  }
  return values;
}

/// bf16 is the upper half of an f32.
float widened(Bf16 value) {
  return test::bits<float>(static_cast<std::uint32_t>(__bfloat16_as_ushort(value)) << 16U);
}

template <class T>
std::vector<T> contents(std::uint64_t round, std::size_t count) {
  if constexpr (std::is_same_v<T, float>) {
    return integers(round, count);
  } else if constexpr (std::is_same_v<T, Bf16>) {
    return brains(round, count);
  } else {
    return bytes(round, count);
  }
}

/// Whether two tensors have the same bytes, and where not.
template <class T>
testing::AssertionResult same(const std::vector<T>& found, const std::vector<T>& expected) {
  if (found.size() != expected.size()) {
    return testing::AssertionFailure()
           << "found " << found.size() << " elements, expected " << expected.size();
  }
  if (found.empty() || std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0) {
    return testing::AssertionSuccess();
  }
  const auto text = [](const T& value) {
    std::ostringstream out;
    if constexpr (std::is_arithmetic_v<T>) out << +value << " = ";
    std::array<unsigned char, sizeof(T)> raw{};
    std::memcpy(raw.data(), &value, sizeof(T));
    out << "0x";
    for (auto byte = raw.rbegin(); byte != raw.rend(); ++byte) {
      out << "0123456789abcdef"[*byte >> 4U] << "0123456789abcdef"[*byte & 15U];
    }
    return out.str();
  };
  std::size_t wrong = 0;
  std::size_t first = found.size();
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (std::memcmp(&found[i], &expected[i], sizeof(T)) == 0) continue;
    if (wrong++ == 0) first = i;
  }
  return testing::AssertionFailure()
         << wrong << " of " << found.size() << " elements differ, the first at " << first
         << ": found " << text(found[first]) << ", expected " << text(expected[first]);
}

// ---- what the tests do again and again

/// A captured graph that copies [count] elements at `data` into an output of its own.
template <class T>
class Reader {
 public:
  Reader(const T* data, std::size_t count, cudaStream_t stream)
      : stream_(stream), output_(count), graph_(stream, [&] {
          ok(cudaMemcpyAsync(output_.data(), data, output_.bytes(), cudaMemcpyDeviceToDevice,
                             stream));
        }) {
    output_.poison();
  }
  /// Launches, with nothing between this and the refit before it, and returns what the graph read.
  [[nodiscard]] std::vector<T> replay() const {
    graph_.launch(stream_);
    ok(cudaStreamSynchronize(stream_));
    auto seen = output_.download();
    output_.poison();
    return seen;
  }

 private:
  cudaStream_t stream_;
  test::DeviceArray<T> output_;
  test::Graph graph_;
};

/// What may not change once a buffer has its storage.
template <class T>
class Kept {
 public:
  Kept(const StableBuffer<T>& buffer, DeviceResource& memory)
      : memory_(&memory), address_(buffer.data()), shape_(buffer.shape()) {
    const auto range = memory.ledger().find(address_);
    if (!range) throw std::logic_error("the ledger does not know the buffer");
    buffer_id_ = range->backing.at(0).buffer_id;
  }
  [[nodiscard]] const T* address() const { return address_; }

  void expect(const StableBuffer<T>& buffer, std::uint64_t generation) const {
    EXPECT_EQ(buffer.data(), address_);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address_) % 256, 0U);
    EXPECT_EQ(buffer.shape(), shape_);
    EXPECT_EQ(buffer.state(), State::live);
    EXPECT_EQ(buffer.generation(), generation);
    const auto range = memory_->ledger().find(address_);
    ASSERT_TRUE(range.has_value());
    EXPECT_EQ(range->name, buffer.name());
    EXPECT_EQ(range->base, reinterpret_cast<std::uintptr_t>(address_));
    EXPECT_EQ(range->bytes, static_cast<std::size_t>(shape_.elements()) * sizeof(T));
    EXPECT_EQ(range->backing.at(0).buffer_id, buffer_id_);
  }

 private:
  DeviceResource* memory_;
  const T* address_;
  Shape shape_;
  std::uint64_t buffer_id_ = 0;
};

/// Free bytes of the current device once it is idle.
std::size_t free_memory() {
  ok(cudaDeviceSynchronize());
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  ok(cudaMemGetInfo(&free_bytes, &total));
  return free_bytes;
}

/// Makes a call that must be refused by `rule`, and returns its message.
template <class Call>
std::string refusal(Rule rule, const Call& call) {
  try {
    call();
  } catch (const holdfast::ContractError& error) {
    EXPECT_EQ(error.rule(), rule) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "not refused; expected " << to_string(rule);
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Waits for another thread's word, but not for ever: a test that fails should not hang.
bool wait_for(const std::atomic<bool>& flag,
              std::chrono::seconds limit = std::chrono::seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!flag.load()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// A copy of host memory, pageable or not, as it is when the stream gets there or when it is
/// called.
test::Custom<float> copy_of_host(const std::vector<float>& host) {
  return {Shape{static_cast<std::int64_t>(host.size())}, [&host](float* out, cudaStream_t on) {
            ok(cudaMemcpyAsync(out, host.data(), host.size() * sizeof(float),
                               cudaMemcpyHostToDevice, on));
          }};
}

class RefitCases : public test::Cuda {
 protected:
  // A mixing weight of DeepSeek V4 at hidden 4096, and the sum over its streams.
  static constexpr std::int64_t kRows = 24;
  static constexpr std::int64_t kStreams = 4;
  static constexpr std::int64_t kHidden = 4096;
  static constexpr std::size_t kSource = kRows * kStreams * kHidden;
  static constexpr std::size_t kDerived = kRows * kHidden;

  [[nodiscard]] static std::vector<float> sums(const std::vector<float>& source) {
    std::vector<float> derived(kDerived);
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t i = 0; i < kHidden; ++i) {
        std::int64_t total = 0;
        for (std::int64_t s = 0; s < kStreams; ++s) {
          total += static_cast<std::int64_t>(
              source[static_cast<std::size_t>((row * kStreams + s) * kHidden + i)]);
        }
        derived[static_cast<std::size_t>(row * kHidden + i)] = static_cast<float>(total);
      }
    }
    return derived;
  }
  [[nodiscard]] static StreamSum<float> sum_of(const test::DeviceArray<float>& source) {
    return StreamSum<float>{TensorView(source.data(), Shape{kRows, kStreams, kHidden}, 0)};
  }

  DeviceResource memory{0};
};

// ---- rebound after capture

TEST_F(RefitCases, B01EveryRefitReachesTheCapturedGraph) {
  auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  StableBuffer<float> sum{"layers.0.hc_attn_fn_broadcast", memory};
  sum.finalize(sum_of(source), stream);
  const Kept kept(sum, memory);
  const Reader reader(sum.data(), kDerived, stream);
  EXPECT_TRUE(same(reader.replay(), sums(values)));
  const std::size_t baseline = free_memory();

  for (std::uint64_t round = 1; round <= 3; ++round) {
    SCOPED_TRACE(round);
    values = integers(round, kSource);
    source.upload(values);
    sum.finalize(sum_of(source), stream);
    EXPECT_TRUE(same(reader.replay(), sums(values)));
    kept.expect(sum, round + 1);
    EXPECT_EQ(free_memory(), baseline);
  }
  EXPECT_EQ(memory.ledger().live().size(), 1U);
  EXPECT_TRUE(memory.ledger().retired().empty());
}

TEST_F(RefitCases, B02TransposeAndCastLandInTheCapturedStorage) {
  constexpr std::size_t kRank = 512;
  constexpr std::size_t kHeads = 16;
  constexpr std::size_t kDim = 256;
  constexpr std::size_t kCount = kRank * kHeads * kDim;
  constexpr std::size_t kSinks = 64;
  const auto transposed = [](const std::vector<Bf16>& from) {
    std::vector<float> to(kCount);
    for (std::size_t r = 0; r < kRank; ++r) {
      for (std::size_t h = 0; h < kHeads; ++h) {
        for (std::size_t d = 0; d < kDim; ++d) {
          to[(h * kDim + d) * kRank + r] = widened(from[(r * kHeads + h) * kDim + d]);
        }
      }
    }
    return to;
  };
  const auto cast = [](const std::vector<Bf16>& from) {
    std::vector<float> to(from.size());
    std::transform(from.begin(), from.end(), to.begin(), widened);
    return to;
  };
  auto weights = brains(0, kCount);
  auto sinks = brains(100, kSinks);
  const test::DeviceArray<Bf16> weight_source(weights);
  const test::DeviceArray<Bf16> sink_source(sinks);
  const Relayout<float, Bf16> absorb{
      TensorView(weight_source.data(), Shape{kRank, kHeads, kDim}, 0).permute({1, 2, 0})};
  const Relayout<float, Bf16> widen{TensorView(sink_source.data(), Shape{kSinks}, 0)};
  StableBuffer<float> absorbed{"w_kc", memory};
  StableBuffer<float> sink{"sinks", memory};
  absorbed.finalize(absorb, stream);
  sink.finalize(widen, stream);
  const Kept absorbed_kept(absorbed, memory);
  const Kept sink_kept(sink, memory);

  const test::DeviceArray<float> weight_seen(kCount);
  const test::DeviceArray<float> sink_seen(kSinks);
  const test::Graph graph(stream, [&] {
    ok(cudaMemcpyAsync(weight_seen.data(), absorbed.data(), weight_seen.bytes(),
                       cudaMemcpyDeviceToDevice, stream));
    ok(cudaMemcpyAsync(sink_seen.data(), sink.data(), sink_seen.bytes(), cudaMemcpyDeviceToDevice,
                       stream));
  });
  for (std::uint64_t round = 0; round <= 2; ++round) {
    SCOPED_TRACE(round);
    weight_seen.poison();
    sink_seen.poison();
    if (round > 0) {
      weights = brains(round, kCount);
      sinks = brains(100 + round, kSinks);
      weight_source.upload(weights);
      sink_source.upload(sinks);
      absorbed.finalize(absorb, stream);
      sink.finalize(widen, stream);
    }
    graph.launch(stream);
    EXPECT_TRUE(same(weight_seen.download(), transposed(weights)));
    EXPECT_TRUE(same(sink_seen.download(), cast(sinks)));
    absorbed_kept.expect(absorbed, round + 1);
    sink_kept.expect(sink, round + 1);
  }
}

TEST_F(RefitCases, B03FinalizeIsAFunctionOfTheCurrentSource) {
  // The halves of one weight, split along the middle axis, the second one transposed.
  constexpr std::size_t kHeads = 8;
  constexpr std::size_t kHalf = 128;
  constexpr std::size_t kRank = 96;
  constexpr std::size_t kHalfCount = kHeads * kHalf * kRank;
  const auto split = [](const std::vector<float>& from) {
    std::pair<std::vector<float>, std::vector<float>> halves{std::vector<float>(kHalfCount),
                                                             std::vector<float>(kHalfCount)};
    for (std::size_t h = 0; h < kHeads; ++h) {
      for (std::size_t d = 0; d < kHalf; ++d) {
        for (std::size_t r = 0; r < kRank; ++r) {
          halves.first[(h * kHalf + d) * kRank + r] = from[(h * 2 * kHalf + d) * kRank + r];
          halves.second[(h * kRank + r) * kHalf + d] =
              from[(h * 2 * kHalf + kHalf + d) * kRank + r];
        }
      }
    }
    return halves;
  };
  auto values = integers(0, 2 * kHalfCount);
  const test::DeviceArray<float> source(values);
  const TensorView both(source.data(), Shape{kHeads, 2 * kHalf, kRank}, 0);
  StableBuffer<float> keys{"w_kc", memory};
  StableBuffer<float> values_half{"w_vc", memory};
  const auto finalize = [&] {
    keys.finalize(Relayout<float>{both.slice(1, 0, kHalf)}, stream);
    values_half.finalize(Relayout<float>{both.slice(1, kHalf, kHalf).permute({0, 2, 1})}, stream);
  };
  std::uint64_t calls = 0;
  finalize();
  ++calls;
  const Kept keys_kept(keys, memory);
  const Kept values_kept(values_half, memory);
  const Reader keys_reader(keys.data(), kHalfCount, stream);
  const Reader values_reader(values_half.data(), kHalfCount, stream);
  const auto expect = [&] {
    const auto [first, second] = split(values);
    EXPECT_TRUE(same(keys_reader.replay(), first));
    EXPECT_TRUE(same(values_reader.replay(), second));
    keys_kept.expect(keys, calls);
    values_kept.expect(values_half, calls);
  };
  expect();
  for (const int repeats : {1, 2, 5}) {
    SCOPED_TRACE(repeats);
    for (int i = 0; i < repeats; ++i, ++calls) finalize();
    expect();
  }
  values = integers(1, 2 * kHalfCount);
  source.upload(values);
  for (int i = 0; i < 2; ++i) {
    finalize();
    ++calls;
    expect();
  }
}

TEST_F(RefitCases, B04TheSourceMayMoveEveryRound) {
  constexpr std::size_t kOut = 384;
  constexpr std::size_t kIn = 256;
  constexpr std::size_t kBlocks = 8;
  const auto transposed = [](const std::vector<std::uint8_t>& from, std::size_t columns) {
    std::vector<std::uint8_t> to(from.size());
    for (std::size_t row = 0; row < kOut; ++row) {
      for (std::size_t column = 0; column < columns; ++column) {
        to[column * kOut + row] = from[row * columns + column];
      }
    }
    return to;
  };
  StableBuffer<std::uint8_t> weight{"experts.w13", memory};
  StableBuffer<std::uint8_t> scale{"experts.w13_scale", memory};
  std::optional<Kept<std::uint8_t>> weight_kept;
  std::optional<Kept<std::uint8_t>> scale_kept;
  std::optional<Reader<std::uint8_t>> weight_reader;
  std::optional<Reader<std::uint8_t>> scale_reader;

  std::unique_ptr<test::DeviceArray<std::uint8_t>> weight_source;
  std::unique_ptr<test::DeviceArray<std::uint8_t>> scale_source;
  for (std::uint64_t round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    const auto weights = bytes(round, kOut * kIn);
    const auto scales = bytes(1000 + round, kOut * kBlocks);
    // The last round's source still lives, so the new one lies elsewhere.
    const test::DeviceArray<std::uint8_t> pad(1 + mixed(round, 0) % 100'000);
    auto next_weight = std::make_unique<test::DeviceArray<std::uint8_t>>(weights);
    auto next_scale = std::make_unique<test::DeviceArray<std::uint8_t>>(scales);
    if (round > 0) {
      ASSERT_NE(next_weight->data(), weight_source->data());
      ASSERT_NE(next_scale->data(), scale_source->data());
      weight_source->poison();
      scale_source->poison();
    }
    weight_source = std::move(next_weight);
    scale_source = std::move(next_scale);

    weight.finalize(
        Relayout<std::uint8_t>{
            TensorView(weight_source->data(), Shape{kOut, kIn}, 0).permute({1, 0})},
        stream);
    scale.finalize(
        Relayout<std::uint8_t>{
            TensorView(scale_source->data(), Shape{kOut, kBlocks}, 0).permute({1, 0})},
        stream);
    if (round == 0) {
      weight_kept.emplace(weight, memory);
      scale_kept.emplace(scale, memory);
      weight_reader.emplace(weight.data(), kOut * kIn, stream);
      scale_reader.emplace(scale.data(), kOut * kBlocks, stream);
    }
    EXPECT_TRUE(same(weight_reader->replay(), transposed(weights, kIn)));
    EXPECT_TRUE(same(scale_reader->replay(), transposed(scales, kBlocks)));
    weight_kept->expect(weight, round + 1);
    scale_kept->expect(scale, round + 1);
  }
}

TEST_F(RefitCases, B05ACastRefitCountsEvenWhenNoByteChanges) {
  constexpr std::size_t kCount = std::size_t{4096} * 24;
  const auto cast = [](const std::vector<Bf16>& from) {
    std::vector<float> to(from.size());
    std::transform(from.begin(), from.end(), to.begin(), widened);
    return to;
  };
  auto values = brains(0, kCount);
  const test::DeviceArray<Bf16> source(values);
  const Relayout<float, Bf16> widen{TensorView(source.data(), Shape{4096, 24}, 0)};
  StableBuffer<float> precast{"hc_head_fn_f32", memory};
  precast.finalize(widen, stream);
  const Kept kept(precast, memory);
  const Reader reader(precast.data(), kCount, stream);
  EXPECT_TRUE(same(reader.replay(), cast(values)));

  const auto refit = [&](std::uint64_t generation) {
    source.upload(values);
    precast.finalize(widen, stream);
    EXPECT_TRUE(same(reader.replay(), cast(values)));
    kept.expect(precast, generation);
  };
  refit(2);  // equal bytes
  const std::size_t place = kCount / 2 + 17;
  values[place] = __ushort_as_bfloat16(
      static_cast<std::uint16_t>(__bfloat16_as_ushort(values[place]) ^ 0x8000U));
  refit(3);  // one element, in its sign
  values = brains(1, kCount);
  refit(4);  // all
}

TEST_F(RefitCases, B07WorkspacesAreZeroBeforeEveryLaunch) {
  // A workspace holds counters on which the blocks of a kernel wait for each other; one that is not
  // zero makes them spin for ever. Here the graph copies the words out before it dirties them, so
  // the test sees what such a kernel would have waited for.
  constexpr std::size_t kWorkspaces = 88;
  constexpr std::size_t kWords = 16 * 1024 / sizeof(std::uint32_t);
  constexpr std::size_t kBytes = kWords * sizeof(std::uint32_t);
  const int rounds = test::simulated() ? 100 : 1000;
  const test::Custom<std::uint32_t> zeros(Shape{kWords}, [](std::uint32_t* out, cudaStream_t on) {
    ok(cudaMemsetAsync(out, 0, kBytes, on));
  });

  std::vector<StableBuffer<std::uint32_t>> workspaces;
  std::vector<Kept<std::uint32_t>> kept;
  for (std::size_t i = 0; i < kWorkspaces; ++i) {
    workspaces.emplace_back("layers." + std::to_string(i) + ".workspace", memory);
    workspaces.back().finalize(zeros, stream);
    kept.emplace_back(workspaces.back(), memory);
  }
  const test::DeviceArray<std::uint32_t> seen(kWorkspaces * kWords);
  const test::Graph graph(stream, [&] {
    for (std::size_t i = 0; i < kWorkspaces; ++i) {
      ok(cudaMemcpyAsync(seen.data() + i * kWords, workspaces[i].data(), kBytes,
                         cudaMemcpyDeviceToDevice, stream));
      ok(cudaMemsetAsync(workspaces[i].data(), 0x11, kBytes, stream));
    }
  });
  const std::vector<std::uint32_t> clean(kWorkspaces * kWords, 0);
  seen.poison();
  graph.launch(stream);
  ASSERT_TRUE(same(seen.download(), clean));
  for (const auto& workspace : workspaces) {
    ASSERT_TRUE(same(test::download(workspace.data(), kWords),
                     std::vector<std::uint32_t>(kWords, 0x11111111U)));
  }
  const std::size_t baseline = free_memory();

  for (int round = 1; round <= rounds; ++round) {
    SCOPED_TRACE(round);
    seen.poison();
    for (std::size_t i = 0; i < kWorkspaces; ++i) {
      workspaces[i].finalize(zeros, stream);
      ASSERT_EQ(workspaces[i].data(), kept[i].address());
    }
    graph.launch(stream);
    ASSERT_TRUE(same(seen.download(), clean));
  }
  EXPECT_EQ(free_memory(), baseline);
  for (std::size_t i = 0; i < kWorkspaces; ++i) {
    kept[i].expect(workspaces[i], 1 + static_cast<std::uint64_t>(rounds));
  }

  // Coupling: graph and library share one storage, whatever the addresses say.
  for (auto& workspace : workspaces) workspace.finalize(zeros, stream);
  constexpr std::size_t kWhich = 37;
  constexpr std::size_t kWord = 5;
  const std::uint32_t flipped = 0xFFFFFFFFU;
  ok(cudaMemcpyAsync(workspaces[kWhich].data() + kWord, &flipped, sizeof flipped,
                     cudaMemcpyHostToDevice, stream));
  auto touched = clean;
  touched[kWhich * kWords + kWord] = flipped;
  graph.launch(stream);
  EXPECT_TRUE(same(seen.download(), touched));
}

/// u8 [8, 256, 512] as tiles of 16 x 16 that lie one after the other.
constexpr std::size_t kExperts = 8;
constexpr std::size_t kTile = 16;
constexpr std::size_t kTileRows = 256 / kTile;
constexpr std::size_t kTileColumns = 512 / kTile;
constexpr std::size_t kShuffled = kExperts * 256 * 512;

std::vector<std::uint8_t> shuffled(const std::vector<std::uint8_t>& from) {
  std::vector<std::uint8_t> to;
  to.reserve(from.size());
  for (std::size_t expert = 0; expert < kExperts; ++expert) {
    for (std::size_t row = 0; row < kTileRows; ++row) {
      for (std::size_t column = 0; column < kTileColumns; ++column) {
        for (std::size_t r = 0; r < kTile; ++r) {
          for (std::size_t c = 0; c < kTile; ++c) {
            to.push_back(from[(expert * 256 + row * kTile + r) * 512 + column * kTile + c]);
          }
        }
      }
    }
  }
  return to;
}

Relayout<std::uint8_t> shuffle_of(std::uint8_t* source) {
  return Relayout<std::uint8_t>{TensorView(source, Shape{kExperts, 256, 512}, 0)
                                    .unflatten(2, Shape{kTileColumns, kTile})
                                    .unflatten(1, Shape{kTileRows, kTile})
                                    .permute({0, 1, 3, 2, 4})};
}

TEST_F(RefitCases, B08TileShuffleGoesStraightIntoTheStorage) {
  auto values = bytes(0, kShuffled);
  const test::DeviceArray<std::uint8_t> source(values);
  StableBuffer<std::uint8_t> weight{"experts.w2_shuffled", memory};
  weight.finalize(shuffle_of(source.data()), stream);
  const Kept kept(weight, memory);
  const Reader reader(weight.data(), kShuffled, stream);
  EXPECT_TRUE(same(reader.replay(), shuffled(values)));

  std::optional<std::size_t> after_first;
  for (std::uint64_t round = 1; round <= 10; ++round) {
    SCOPED_TRACE(round);
    values = bytes(round, kShuffled);
    source.upload(values);
    weight.finalize(shuffle_of(source.data()), stream);
    EXPECT_TRUE(same(reader.replay(), shuffled(values)));
    kept.expect(weight, round + 1);
    if (!after_first) after_first = free_memory();
    EXPECT_EQ(free_memory(), *after_first);
  }
}

// The old handles are used on purpose.
// NOLINTBEGIN(bugprone-use-after-move)
TEST_F(RefitCases, B09MovingTheHandleMovesNoStorage) {
  auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  StableBuffer<float> first{"weight", memory};
  first.finalize(sum_of(source), stream);
  const Kept kept(first, memory);
  const Reader reader(first.data(), kDerived, stream);
  std::uint64_t generation = 1;
  const auto refit = [&](StableBuffer<float>& through) {
    values = integers(generation, kSource);
    source.upload(values);
    through.finalize(sum_of(source), stream);
    EXPECT_TRUE(same(reader.replay(), sums(values)));
    kept.expect(through, ++generation);
  };

  StableBuffer<float> second(std::move(first));
  refit(second);

  StableBuffer<float> third{"given up", memory};
  third.finalize(sum_of(source), stream);
  third = std::move(second);
  refit(third);
  ASSERT_EQ(memory.ledger().retired().size(), 1U);
  EXPECT_EQ(memory.ledger().retired()[0].name, "given up");

  std::vector<StableBuffer<float>> all;
  all.push_back(std::move(third));
  int reallocations = 0;
  for (int i = 0; i < 40; ++i) {
    const auto capacity = all.capacity();
    all.emplace_back("neighbour " + std::to_string(i), memory);
    all.back().finalize(sum_of(source), stream);
    reallocations += all.capacity() != capacity ? 1 : 0;
  }
  EXPECT_GE(reallocations, 3);
  refit(all[0]);

  source.upload(integers(999, kSource));
  for (StableBuffer<float>* moved : {&first, &second, &third}) {
    const auto text = refusal(Rule::moved_from, [&] { moved->finalize(sum_of(source), stream); });
    EXPECT_TRUE(contains(text, "finalize")) << text;
    EXPECT_EQ(moved->data(), nullptr);
    EXPECT_EQ(moved->state(), State::empty);
    EXPECT_EQ(moved->generation(), 0U);
  }
  EXPECT_TRUE(same(reader.replay(), sums(values)));
  kept.expect(all[0], generation);
}
// NOLINTEND(bugprone-use-after-move)

TEST_F(RefitCases, B10ALargerRefitIsRefusedAndBothGraphsKeepTheirValues) {
  auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<float> larger(integers(1, 2 * kSource));
  StableBuffer<float> sum{"layers.3.mixing", memory};
  sum.finalize(sum_of(source), stream);
  const Kept kept(sum, memory);
  const Reader first(sum.data(), kDerived, stream);
  const Reader second(sum.data(), kDerived, stream);

  const auto text = refusal(Rule::shape_mismatch, [&] {
    const TensorView view(larger.data(), Shape{kRows, kStreams, 2 * kHidden}, 0);
    sum.finalize(StreamSum<float>{view}, stream);
  });
  for (const char* part : {"layers.3.mixing", "finalize", "[24, 4096]", "[24, 8192]"}) {
    EXPECT_TRUE(contains(text, part)) << part << " is missing in: " << text;
  }
  EXPECT_TRUE(same(first.replay(), sums(values)));
  EXPECT_TRUE(same(second.replay(), sums(values)));
  kept.expect(sum, 1);
  EXPECT_EQ(memory.ledger().live().size(), 1U);
  EXPECT_TRUE(memory.ledger().retired().empty());
}

// ---- derived value never refreshed

TEST_F(RefitCases, B20TenRefitsAtOneSourceAddress) {
  constexpr std::size_t kGates = 256;
  constexpr std::size_t kWidth = 512;
  constexpr std::size_t kCount = kGates * kWidth;
  const test::DeviceArray<Bf16> source(kCount);
  const Relayout<float, Bf16> widen{TensorView(source.data(), Shape{kGates, kWidth}, 0)};
  StableBuffer<float> router{"router_f32", memory};
  std::optional<Kept<float>> kept;
  std::optional<Reader<float>> reader;
  for (std::uint64_t round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    const auto values = brains(round, kCount);
    // No call tells the library of this write.
    ok(cudaMemcpyAsync(source.data(), values.data(), source.bytes(), cudaMemcpyHostToDevice,
                       stream));
    router.finalize(widen, stream);
    if (round == 0) {
      kept.emplace(router, memory);
      reader.emplace(router.data(), kCount, stream);
    }
    std::vector<float> expected(kCount);
    std::transform(values.begin(), values.end(), expected.begin(), widened);
    EXPECT_TRUE(same(reader->replay(), expected));
    kept->expect(router, round + 1);
  }
}

TEST_F(RefitCases, B21NoLatchAndNoSilentSuccessWithoutASource) {
  StableBuffer<float> sum{"mega_moe.layout", memory};
  std::optional<Kept<float>> kept;
  std::optional<Reader<float>> reader;
  std::vector<float> last;
  for (std::uint64_t round = 0; round < 5; ++round) {
    const auto values = integers(round, kSource);
    const test::DeviceArray<float> source(values);
    sum.finalize(sum_of(source), stream);
    sync();  // then the source goes
    if (round == 0) {
      kept.emplace(sum, memory);
      reader.emplace(sum.data(), kDerived, stream);
    }
    last = sums(values);
    EXPECT_TRUE(same(reader->replay(), last)) << "round " << round;
  }

  // Released as null, and as a tensor of no elements.
  float* const released = nullptr;
  const auto text = refusal(Rule::null_pointer, [&] {
    const TensorView view(released, Shape{kRows, kStreams, kHidden}, 0);
    sum.finalize(StreamSum<float>{view}, stream);
  });
  EXPECT_TRUE(contains(text, "released")) << text;
  (void)refusal(Rule::shape_mismatch, [&] {
    const TensorView view(released, Shape{0, kStreams, kHidden}, 0);
    sum.finalize(StreamSum<float>{view}, stream);
  });
  EXPECT_TRUE(same(reader->replay(), last));
  kept->expect(sum, 5);
}

TEST_F(RefitCases, B24HostMemoryIsReadAgainEachTime) {
  constexpr std::size_t kCount = 64 * 1024;
  std::vector<float> pageable(kCount);
  void* pinned_memory = nullptr;
  ok(cudaMallocHost(&pinned_memory, kCount * sizeof(float)));
  const std::unique_ptr<void, void (*)(void*)> owner(pinned_memory,
                                                     [](void* at) { (void)cudaFreeHost(at); });
  auto* const pinned = static_cast<float*>(pinned_memory);

  StableBuffer<float> copied{"from pageable memory", memory};
  StableBuffer<float> relaid{"from pinned memory", memory};
  std::optional<Reader<float>> copied_reader;
  std::optional<Reader<float>> relaid_reader;
  for (std::uint64_t round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    pageable = integers(round, kCount);
    const auto values = integers(100 + round, kCount);
    std::copy(values.begin(), values.end(), pinned);
    copied.finalize(copy_of_host(pageable), stream);
    relaid.finalize(Relayout<float>{TensorView(pinned, Shape{kCount}, 0)}, stream);
    if (round == 0) {
      copied_reader.emplace(copied.data(), kCount, stream);
      relaid_reader.emplace(relaid.data(), kCount, stream);
    }
    EXPECT_TRUE(same(copied_reader->replay(), pageable));
    EXPECT_TRUE(same(relaid_reader->replay(), values));
    EXPECT_EQ(copied.generation(), round + 1);
    EXPECT_EQ(relaid.generation(), round + 1);
  }
}

// ---- finalize too early, or where the source does not live

TEST_F(RefitCases, B34TheAddressCanBeCapturedBeforeAnySourceExists) {
  StableBuffer<float> sum{"layers.0.hc_attn_fn_broadcast", memory};
  sum.allocate(Shape{kRows, kHidden});
  EXPECT_EQ(sum.state(), State::unset);
  EXPECT_EQ(sum.generation(), 0U);
  const Kept kept(sum, memory);
  const Reader reader(sum.data(), kDerived, stream);
  // A launch that nobody guards reads whatever lies there: here what the test puts there.
  ok(cudaMemsetAsync(sum.data(), 0x5A, kDerived * sizeof(float), stream));
  EXPECT_TRUE(same(reader.replay(),
                   std::vector<float>(kDerived, test::bits<float>(std::uint32_t{0x5A5A5A5AU}))));
  EXPECT_EQ(sum.state(), State::unset);

  const auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  sum.finalize(sum_of(source), stream);
  EXPECT_TRUE(same(reader.replay(), sums(values)));
  kept.expect(sum, 1);
}

TEST_F(RefitCases, B37EmptyAgainstNonEmptyIsAlwaysAnError) {
  int launches = 0;
  const auto recipe = [&](const Shape& shape) {
    return test::Custom<float>(shape, [&launches, shape](float* out, cudaStream_t on) {
      ++launches;
      ok(cudaMemsetAsync(out, 0x3F, static_cast<std::size_t>(shape.elements()) * sizeof(float),
                         on));
    });
  };
  const test::DeviceArray<float> source(integers(0, 512 * 128));
  const std::size_t baseline = free_memory();

  // Nothing into nothing.
  StableBuffer<float> empty{"released", memory};
  for (std::uint64_t round = 1; round <= 2; ++round) {
    empty.finalize(recipe(Shape{0}), stream);
    EXPECT_EQ(empty.state(), State::live);
    EXPECT_EQ(empty.generation(), round);
    EXPECT_EQ(empty.data(), nullptr);
  }
  EXPECT_EQ(launches, 0);
  EXPECT_EQ(free_memory(), baseline);
  EXPECT_TRUE(memory.ledger().live().empty());

  // Something into nothing.
  const Relayout<float> whole{TensorView(source.data(), Shape{512, 128}, 0)};
  (void)refusal(Rule::shape_mismatch, [&] { empty.finalize(whole, stream); });
  (void)refusal(Rule::shape_mismatch, [&] { empty.finalize(recipe(Shape{5}), stream); });
  EXPECT_EQ(empty.generation(), 2U);
  EXPECT_EQ(empty.data(), nullptr);

  // Nothing into something.
  StableBuffer<float> five{"five", memory};
  five.finalize(Relayout<float>{TensorView(source.data(), Shape{5}, 0)}, stream);
  const Kept kept(five, memory);
  const Reader reader(five.data(), 5, stream);
  const auto before = reader.replay();
  EXPECT_TRUE(same(before, test::download(source.data(), 5)));
  (void)refusal(Rule::shape_mismatch, [&] { five.finalize(recipe(Shape{0}), stream); });
  (void)refusal(Rule::shape_mismatch, [&] {
    float* const released = nullptr;
    five.finalize(Relayout<float>{TensorView(released, Shape{0}, 0)}, stream);
  });
  EXPECT_TRUE(same(reader.replay(), before));
  kept.expect(five, 1);
  EXPECT_EQ(launches, 0);
}

// ---- layout, shape, type, stride; transforms that are not idempotent

TEST_F(RefitCases, B38HalvesAreSwappedOnceForEveryLoad) {
  constexpr std::size_t kHalf = std::size_t{128} * 256;
  const auto swapped = [](const std::vector<float>& from) {
    std::vector<float> to(from.begin() + kHalf, from.end());
    to.insert(to.end(), from.begin(), from.begin() + kHalf);
    return to;
  };
  auto values = integers(1, 2 * kHalf);
  const test::DeviceArray<float> source(values);
  // From the second half backwards to the first.
  const Relayout<float> swap{TensorView(source.data() + kHalf, Shape{2, 128, 256},
                                        Strides{-static_cast<std::int64_t>(kHalf), 256, 1}, 0)};
  StableBuffer<float> warm{"w13", memory};
  warm.finalize(swap, stream);
  const Kept kept(warm, memory);
  const Reader reader(warm.data(), 2 * kHalf, stream);
  EXPECT_TRUE(same(reader.replay(), swapped(values)));

  // The loader that stays attached writes the unswapped order.
  values = integers(2, 2 * kHalf);
  source.upload(values);
  warm.finalize(swap, stream);
  EXPECT_TRUE(same(reader.replay(), swapped(values)));
  kept.expect(warm, 2);

  StableBuffer<float> cold{"w13 of a cold start", memory};
  cold.finalize(swap, stream);
  EXPECT_TRUE(same(test::download(warm.data(), 2 * kHalf), test::download(cold.data(), 2 * kHalf)));
}

TEST_F(RefitCases, B40ATransformNeverReadsItsOwnResult) {
  std::vector<std::uint8_t> values(kShuffled);
  for (std::size_t i = 0; i < kShuffled; ++i) values[i] = static_cast<std::uint8_t>(i * 7 % 251);
  const auto once = shuffled(values);
  ASSERT_FALSE(same(shuffled(once), once)) << "these values would not show a second shuffle";
  const test::DeviceArray<std::uint8_t> source(values);
  StableBuffer<std::uint8_t> weight{"shuffled", memory};
  weight.finalize(shuffle_of(source.data()), stream);
  const Kept kept(weight, memory);
  const Reader reader(weight.data(), kShuffled, stream);
  EXPECT_TRUE(same(reader.replay(), once));
  for (std::uint64_t round = 2; round <= 3; ++round) {
    weight.finalize(shuffle_of(source.data()), stream);
    EXPECT_TRUE(same(reader.replay(), once));
    kept.expect(weight, round);
  }

  const auto text = refusal(Rule::source_overlaps_target,
                            [&] { weight.finalize(shuffle_of(weight.data()), stream); });
  EXPECT_TRUE(contains(text, "shuffled")) << text;
  EXPECT_TRUE(same(reader.replay(), once));
  kept.expect(weight, 3);

  // A source that shares one byte with the result, inside memory of the engine.
  const test::DeviceArray<std::uint8_t> engine(2 * kShuffled);
  StableBuffer<std::uint8_t> adopted{"adopted", memory};
  adopted.adopt(
      TensorView(engine.data(), Shape{kExperts, kTileRows, kTileColumns, kTile, kTile}, 0));
  engine.poison();
  (void)refusal(Rule::source_overlaps_target,
                [&] { adopted.finalize(shuffle_of(engine.data() + kShuffled - 1), stream); });
  EXPECT_EQ(adopted.state(), State::unset);
  EXPECT_TRUE(same(engine.download(), std::vector<std::uint8_t>(2 * kShuffled, 0xCB)));
}

TEST_F(RefitCases, B45EachIncompatibilityIsRefusedWithItsOwnRule) {
  static_assert(!holdfast::Recipe<StreamSum<Bf16, float>, float>,
                "a recipe for another element type does not compile");
  const auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<float> other(integers(1, 2 * kSource));
  StableBuffer<float> sum{"mixing", memory};
  sum.finalize(sum_of(source), stream);
  const Kept kept(sum, memory);
  const Reader reader(sum.data(), kDerived, stream);
  float* const data = other.data();
  auto* const misaligned = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(data) + 2);
  const auto refit = [&](const TensorView& view) { sum.finalize(StreamSum<float>{view}, stream); };

  struct Offer {
    const char* what;
    Rule rule;
    std::function<void()> call;
  };
  const Shape good{kRows, kStreams, kHidden};
  const std::vector<Offer> offers{
      {"shape", Rule::shape_mismatch,
       [&] {
         refit(TensorView(data, Shape{kRows + 1, kStreams, kHidden}, 0));
       }},
      {"axes exchanged", Rule::shape_mismatch,
       [&] {
         refit(TensorView(data, Shape{kHidden, kStreams, kRows}, 0));
       }},
      {"rank", Rule::shape_mismatch,
       [&] { sum.finalize(Relayout<float>{TensorView(data, Shape{kRows * kHidden}, 0)}, stream); }},
      {"type", Rule::type_mismatch,
       [&] { refit(TensorView(reinterpret_cast<Bf16*>(data), good, 0)); }},
      {"strides", Rule::not_contiguous,
       [&] {
         refit(TensorView(data, good, Strides{2 * kStreams * kHidden, 2 * kHidden, 2}, 0));
       }},
      {"device", Rule::device_mismatch, [&] { refit(TensorView(data, good, 1)); }},
      {"alignment", Rule::misaligned, [&] { refit(TensorView(misaligned, good, 0)); }},
      {"all at once", Rule::misaligned,
       [&] {
         refit(TensorView(misaligned, Shape{2, kStreams, 7}, Strides{99, 14, 2}, 1));
       }},
  };
  for (const Offer& offer : offers) {
    SCOPED_TRACE(offer.what);
    (void)refusal(offer.rule, offer.call);
    EXPECT_TRUE(same(reader.replay(), sums(values)));
    kept.expect(sum, 1);
  }
  EXPECT_EQ(memory.ledger().live().size(), 1U);

  const auto next = integers(2, kSource);
  source.upload(next);
  sum.finalize(sum_of(source), stream);
  EXPECT_TRUE(same(reader.replay(), sums(next)));
  kept.expect(sum, 2);
}

TEST_F(RefitCases, B46OneRecipeServesEveryPath) {
  constexpr std::size_t kIn = 160;
  constexpr std::size_t kOut = 96;
  constexpr std::size_t kCount = kIn * kOut;
  const auto values = brains(0, kCount);
  const auto old = brains(1, kCount);
  std::vector<float> expected(kCount);
  for (std::size_t i = 0; i < kOut; ++i) {
    for (std::size_t j = 0; j < kIn; ++j) expected[i * kIn + j] = widened(values[j * kOut + i]);
  }
  const test::DeviceArray<Bf16> source(old);
  const Relayout<float, Bf16> recipe{
      TensorView(source.data(), Shape{kIn, kOut}, 0).permute({1, 0})};
  const test::DeviceArray<float> engine(kCount);
  engine.poison();

  StableBuffer<float> online{"online update", memory};
  online.finalize(recipe, stream);
  StableBuffer<float> replayed{"recorded", memory};
  replayed.finalize(recipe, stream);
  const test::Graph graph(stream, [&] { replayed.finalize(recipe, Capture::record, stream); });

  source.upload(values);
  StableBuffer<float> cold{"cold load", memory};
  cold.finalize(recipe, stream);
  online.finalize(recipe, stream);
  StableBuffer<float> adopted{"memory of the engine", memory};
  adopted.adopt(TensorView(engine.data(), Shape{kOut, kIn}, 0));
  adopted.finalize(recipe, stream);
  graph.launch(stream);
  for (const StableBuffer<float>* buffer : {&cold, &online, &adopted, &replayed}) {
    EXPECT_TRUE(same(test::download(buffer->data(), kCount), expected)) << buffer->name();
  }
}

TEST_F(RefitCases, B47WrongCountsAreErrorsAndTheNextRefitWorks) {
  constexpr std::int64_t kCount = 1000;
  const test::DeviceArray<float> source(integers(0, 2 * kCount));
  const auto offer = [&](std::int64_t count) {
    return Relayout<float>{TensorView(source.data(), Shape{count}, 0)};
  };
  StableBuffer<float> weight{"conv1.weight", memory};
  weight.finalize(offer(kCount), stream);
  const Kept kept(weight, memory);
  const Reader reader(weight.data(), kCount, stream);
  const auto before = reader.replay();
  for (const std::int64_t count : {kCount - 1, kCount + 1, std::int64_t{0}, 2 * kCount}) {
    const auto text = refusal(Rule::shape_mismatch, [&] { weight.finalize(offer(count), stream); });
    EXPECT_TRUE(contains(text, "[1000]")) << text;
    EXPECT_TRUE(contains(text, "[" + std::to_string(count) + "]")) << text;
    EXPECT_TRUE(same(reader.replay(), before));
  }
  auto next = integers(1, 2 * kCount);
  source.upload(next);
  weight.finalize(offer(kCount), stream);
  next.resize(kCount);
  EXPECT_TRUE(same(reader.replay(), next));
  kept.expect(weight, 2);
}

// ---- ordering

TEST_F(RefitCases, B51ARefitWaitsForNoOtherStream) {
  auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  StableBuffer<float> sum{"scale chain", memory};
  sum.finalize(sum_of(source), stream);
  const Reader reader(sum.data(), kDerived, stream);
  EXPECT_TRUE(same(reader.replay(), sums(values)));
  const test::DeviceArray<float> next(integers(1, kSource));

  struct Busy {
    cudaStream_t stream = nullptr;
    std::atomic<bool> may_end{false};
    std::atomic<bool> ended{false};
    ~Busy() {
      may_end = true;
      (void)cudaStreamSynchronize(stream);
      (void)cudaStreamDestroy(stream);
    }
  } busy;
  ok(cudaStreamCreateWithFlags(&busy.stream, cudaStreamNonBlocking));
  ok(cudaLaunchHostFunc(
      busy.stream,
      [](void* at) {
        auto& self = *static_cast<Busy*>(at);
        (void)wait_for(self.may_end, std::chrono::seconds(5));
        self.ended = true;
      },
      &busy));
  sum.finalize(sum_of(next), stream);
  sync();
  EXPECT_FALSE(busy.ended) << "the refit waited for a stream that has nothing to do with it";
  busy.may_end = true;
  ok(cudaStreamSynchronize(busy.stream));
  EXPECT_TRUE(busy.ended);
  EXPECT_TRUE(same(reader.replay(), sums(integers(1, kSource))));
}

// ---- lifetime of captured memory

TEST_F(RefitCases, B85ARecordedRefreshNeedsNothingOfItsScope) {
  constexpr std::size_t kDim = 96;
  constexpr std::size_t kCount = kDim * kDim;
  // Every second row, its columns backwards, transposed: shape and strides have to travel.
  const auto gathered = [](const std::vector<float>& from) {
    std::vector<float> to(kCount);
    for (std::size_t i = 0; i < kDim; ++i) {
      for (std::size_t j = 0; j < kDim; ++j) {
        to[i * kDim + j] = from[2 * j * kDim + (kDim - 1 - i)];
      }
    }
    return to;
  };
  auto values = integers(0, 2 * kCount);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<float> output(kCount);
  StableBuffer<float> derived{"gathered", memory};
  std::unique_ptr<test::Graph> graph;
  {
    const Relayout<float> recipe{
        TensorView(source.data() + (kDim - 1), Shape{kDim, kDim}, Strides{-1, 2 * kDim}, 0)};
    derived.finalize(recipe, stream);
    graph = std::make_unique<test::Graph>(stream, [&] {
      derived.finalize(recipe, Capture::record, stream);
      ok(cudaMemcpyAsync(output.data(), derived.data(), output.bytes(), cudaMemcpyDeviceToDevice,
                         stream));
    });
  }
  const Kept kept(derived, memory);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    SCOPED_TRACE(round);
    for (std::size_t i = 0; i < 64; ++i) {
      const std::vector<std::uint8_t> host(16U << (i % 12), 0xFF);
      const test::DeviceArray<std::uint8_t> device(host);
    }
    values = integers(round, 2 * kCount);
    source.upload(values);
    output.poison();
    graph->launch(stream);
    sync();
    EXPECT_TRUE(same(output.download(), gathered(values)));
    kept.expect(derived, 1);  // replays are not counted
  }
}

// ---- sources

struct Layout {
  const char* name;
  std::size_t offset;
  std::vector<std::int64_t> extents;
  std::vector<std::int64_t> strides;
};

/// The elements of a strided view in row-major order, one index at a time.
template <class T>
std::vector<T> elements(const std::vector<T>& parent, const Layout& layout) {
  std::vector<T> values;
  std::vector<std::int64_t> index(layout.extents.size(), 0);
  if (std::find(layout.extents.begin(), layout.extents.end(), 0) != layout.extents.end()) {
    return values;
  }
  while (true) {
    auto place = static_cast<std::int64_t>(layout.offset);
    for (std::size_t axis = 0; axis < index.size(); ++axis) {
      place += index[axis] * layout.strides[axis];
    }
    values.push_back(parent[static_cast<std::size_t>(place)]);
    std::size_t axis = index.size();
    while (axis > 0 && ++index[axis - 1] == layout.extents[axis - 1]) index[--axis] = 0;
    if (axis == 0) return values;
  }
}

template <class T>
TensorView view_of(T* parent, const Layout& layout) {
  return TensorView(parent + layout.offset, Shape(layout.extents), Strides(layout.strides), 0);
}

template <class T>
void expect_layouts_are_read(DeviceResource& memory, cudaStream_t stream) {
  constexpr std::size_t kParent = 64 * 48;
  const std::vector<Layout> layouts{
      {"every second element", 0, {kParent / 2}, {2}},
      {"transposed", 0, {48, 64}, {1, 48}},
      {"rows with pitch", 8, {64, 32}, {48, 1}},
      {"broadcast", 48, {5, 48}, {0, 1}},
      {"permuted axes", 0, {48, 4, 16}, {1, 16 * 48, 48}},
      {"backwards", kParent - 1, {kParent}, {-1}},
      {"scalar", 7, {}, {}},
      {"empty", 0, {0, 48}, {48, 1}},
  };
  const test::DeviceArray<T> source(kParent);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    StableBuffer<T> derived{layout.name, memory};
    std::optional<Reader<T>> reader;
    for (std::uint64_t round = 0; round < 2; ++round) {
      const auto values = contents<T>(round, kParent);
      const auto expected = elements(values, layout);
      source.upload(values);
      derived.finalize(Relayout<T>{view_of(source.data(), layout)}, stream);
      EXPECT_EQ(derived.shape(), Shape(layout.extents));
      EXPECT_EQ(derived.generation(), round + 1);
      if (expected.empty()) {
        EXPECT_EQ(derived.data(), nullptr);
        continue;
      }
      if (!reader) reader.emplace(derived.data(), expected.size(), stream);
      EXPECT_TRUE(same(reader->replay(), expected));
    }
  }
}

TEST_F(RefitCases, B97StridedSourcesAreReadByTheirStrides) {
  {
    SCOPED_TRACE("f32");
    expect_layouts_are_read<float>(memory, stream);
  }
  {
    SCOPED_TRACE("bf16");
    expect_layouts_are_read<Bf16>(memory, stream);
  }
  {
    SCOPED_TRACE("u8");
    expect_layouts_are_read<std::uint8_t>(memory, stream);
  }
}

TEST_F(RefitCases, B98AFlatReaderWouldBeWrong) {
  constexpr std::size_t kParentRows = 512;
  constexpr std::size_t kColumns = 512;
  constexpr std::size_t kCount = 256 * kColumns;
  std::vector<float> parent(kParentRows * kColumns);
  for (std::size_t i = 0; i < parent.size(); ++i) {
    parent[i] = static_cast<float>(i / kColumns * 1000 + i % kColumns);
  }
  // 256 of the 512 rows: two blocks of 128 with a gap, where a flat reader goes wrong at row 128,
  // and every second one.
  const std::vector<Layout> layouts{
      {"blocks", 0, {2, 128, kColumns}, {256 * kColumns, kColumns, 1}},
      {"every second row", 0, {256, kColumns}, {2 * kColumns, 1}},
  };
  const std::vector<float> flat(parent.begin(), parent.begin() + kCount);
  const test::DeviceArray<float> source(parent);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    const auto expected = elements(parent, layout);
    ASSERT_EQ(expected.size(), kCount);
    ASSERT_FALSE(same(flat, expected));
    StableBuffer<float> derived{layout.name, memory};
    derived.finalize(Relayout<float>{view_of(source.data(), layout)}, stream);
    const Reader reader(derived.data(), kCount, stream);
    EXPECT_TRUE(same(reader.replay(), expected));
  }
  const auto blocks = elements(parent, layouts[0]);
  const auto wrong = std::mismatch(flat.begin(), flat.end(), blocks.begin()).first - flat.begin();
  EXPECT_EQ(wrong, 128 * static_cast<std::ptrdiff_t>(kColumns));
}

TEST_F(RefitCases, B100SizesBeyond63BitsAreRefused) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 32;
  float* const nowhere = reinterpret_cast<float*>(256);
  (void)refusal(Rule::size_overflow, [&] { (void)Shape{kLarge, kLarge}; });
  // The elements fit, the bytes do not.
  constexpr std::int64_t kElements = std::numeric_limits<std::int64_t>::max() / 2;
  (void)refusal(Rule::size_overflow, [&] { (void)TensorView(nowhere, Shape{kElements}, 0); });
  (void)refusal(Rule::size_overflow, [&] {
    (void)TensorView(nowhere, Shape{kLarge, kStreams, kLarge}, Strides{0, 0, 1}, 0);
  });
  StableBuffer<float> buffer{"too large", memory};
  const auto text = refusal(Rule::size_overflow, [&] { buffer.allocate(Shape{kElements}); });
  EXPECT_TRUE(contains(text, "too large")) << text;
  EXPECT_EQ(buffer.state(), State::empty);
  EXPECT_TRUE(memory.ledger().live().empty());
}

TEST_F(RefitCases, B100MoreThanTwoToThe31Elements) {
  if (test::simulated()) GTEST_SKIP() << "22 GB are too much for simulated device memory";
  constexpr std::int64_t kTwo31 = std::int64_t{1} << 31;
  constexpr std::int64_t kCount = kTwo31 + 4099;  // odd: the streams are not aligned to 16 bytes
  constexpr auto kSourceBytes = static_cast<std::size_t>(kStreams * kCount) * sizeof(__half);
  constexpr auto kBytes = static_cast<std::size_t>(kCount) * sizeof(__half);
  if (free_memory() < kSourceBytes + kBytes + (std::size_t{1} << 30)) {
    GTEST_SKIP() << "needs 23 GB of free device memory";
  }
  const test::DeviceArray<__half> source(kStreams * kCount);
  const test::DeviceArray<__half> target(kCount);
  source.poison(0);
  target.poison();
  // Zeros but for some columns, among them those where 31 and 32 bits of elements or bytes end.
  const std::vector<std::int64_t> columns{
      0,          1,          4098,   4099,       kTwo31 / 2 - 1, kTwo31 / 2, kTwo31 / 2 + 1,
      kTwo31 - 2, kTwo31 - 1, kTwo31, kTwo31 + 1, kTwo31 + 2,     kCount - 2, kCount - 1};
  for (std::size_t which = 0; which < columns.size(); ++which) {
    for (std::int64_t s = 0; s < kStreams; ++s) {
      const auto value = __float2half(static_cast<float>((which + 1) * (1U << s)));
      ok(cudaMemcpy(source.data() + s * kCount + columns[which], &value, sizeof value,
                    cudaMemcpyHostToDevice));
    }
  }
  StableBuffer<__half> sum{"large", memory};
  sum.adopt(TensorView(target.data(), Shape{1, kCount}, 0));
  sum.finalize(StreamSum<__half>{TensorView(source.data(), Shape{1, kStreams, kCount}, 0)}, stream);
  sync();
  constexpr std::int64_t kWindow = 1 << 16;
  for (const std::int64_t center :
       {std::int64_t{0}, kTwo31 / 4, kTwo31 / 2, kTwo31 / 4 * 3, kTwo31, kCount}) {
    SCOPED_TRACE(center);
    const std::int64_t begin = std::clamp<std::int64_t>(center - kWindow, 0, kCount);
    const std::int64_t end = std::clamp<std::int64_t>(center + kWindow, 0, kCount);
    std::vector<__half> expected(static_cast<std::size_t>(end - begin), __float2half(0.0F));
    for (std::size_t which = 0; which < columns.size(); ++which) {
      if (columns[which] < begin || columns[which] >= end) continue;
      expected[static_cast<std::size_t>(columns[which] - begin)] =
          __float2half(static_cast<float>((which + 1) * 15));
    }
    EXPECT_TRUE(same(test::download(sum.data() + begin, expected.size()), expected));
  }
}

TEST_F(RefitCases, B101AShardIsASliceWithACheckedRange) {
  constexpr std::int64_t kFull = 2304;
  constexpr std::int64_t kShard = kFull / 4;
  constexpr std::int64_t kWidth = 64;
  constexpr std::int64_t kRank = 3;
  const auto values = integers(0, kFull * kWidth);
  const std::vector<float> rows(values.begin() + kRank * kShard * kWidth, values.end());
  const test::DeviceArray<float> source(values);
  const TensorView full(source.data(), Shape{kFull, kWidth}, 0);

  StableBuffer<float> replicated{"replicated", memory};
  replicated.finalize(Relayout<float>{full}, stream);
  EXPECT_TRUE(same(test::download(replicated.data(), kFull * kWidth), values));

  StableBuffer<float> shard{"shard 3 of 4", memory};
  shard.finalize(Relayout<float>{full.slice(0, kRank * kShard, kShard)}, stream);
  const Kept kept(shard, memory);
  const Reader reader(shard.data(), kShard * kWidth, stream);
  EXPECT_TRUE(same(reader.replay(), rows));

  // A source that is the shard already.
  const auto ready_values = integers(1, kShard * kWidth);
  const test::DeviceArray<float> ready_source(ready_values);
  const TensorView ready(ready_source.data(), Shape{kShard, kWidth}, 0);
  shard.finalize(Relayout<float>{ready}, stream);
  EXPECT_TRUE(same(reader.replay(), ready_values));

  // A slice by global rank of what is a shard already: the range lies outside.
  (void)refusal(Rule::unsupported_shape, [&] { (void)ready.slice(0, 2 * kShard, kShard); });
  for (const std::int64_t count : {std::int64_t{1}, kShard - 1, kShard + 1, 2 * kShard, kFull}) {
    SCOPED_TRACE(count);
    (void)refusal(Rule::shape_mismatch,
                  [&] { shard.finalize(Relayout<float>{full.slice(0, 0, count)}, stream); });
  }
  EXPECT_TRUE(same(reader.replay(), ready_values));
  kept.expect(shard, 2);
}

TEST_F(RefitCases, B102ThereIsNoDefaultShard) {
  constexpr std::int64_t kRanks = 4;
  constexpr std::int64_t kShard = 96;
  constexpr std::int64_t kWidth = 64;
  const auto values = integers(0, kRanks * kShard * kWidth);
  const test::DeviceArray<float> source(values);
  const TensorView full(source.data(), Shape{kRanks * kShard, kWidth}, 0);
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    StableBuffer<float> shard{"rank " + std::to_string(rank), memory};
    shard.allocate(Shape{kShard, kWidth});
    (void)refusal(Rule::shape_mismatch, [&] { shard.finalize(Relayout<float>{full}, stream); });
    EXPECT_EQ(shard.state(), State::unset);
    shard.finalize(Relayout<float>{full.slice(0, rank * kShard, kShard)}, stream);
    const auto begin = values.begin() + rank * kShard * kWidth;
    EXPECT_TRUE(same(test::download(shard.data(), kShard * kWidth),
                     std::vector<float>(begin, begin + kShard * kWidth)));
  }
}

// ---- capture and devices

/// Device 1 for a scope, for the calls that the test itself makes.
class OnDevice1 {
 public:
  OnDevice1() { ok(cudaSetDevice(1)); }
  ~OnDevice1() { (void)cudaSetDevice(0); }
  OnDevice1(const OnDevice1&) = delete;
  OnDevice1& operator=(const OnDevice1&) = delete;
};

TEST_F(RefitCases, B106EveryCallActsOnTheBuffersDevice) {
  int devices = 0;
  ok(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two devices, found " << devices;
  const auto expect_device_0 = [](const char* after) {
    int current = -1;
    ok(cudaGetDevice(&current));
    EXPECT_EQ(current, 0) << "after " << after;
  };
  const Shape derived_shape{kRows, kHidden};
  auto values = integers(0, kSource);
  const test::DeviceArray<float> source0(values);
  std::optional<test::DeviceArray<float>> source1;
  std::optional<test::DeviceArray<float>> output1;
  std::optional<test::DeviceArray<float>> engine1;
  cudaStream_t stream1 = nullptr;
  std::size_t baseline = 0;
  {
    const OnDevice1 scope;
    source1.emplace(values);
    output1.emplace(kDerived);
    engine1.emplace(kDerived);
    ok(cudaStreamCreateWithFlags(&stream1, cudaStreamNonBlocking));
    output1->poison();
    baseline = free_memory();
  }
  const StreamSum<float> sum_on_1{TensorView(source1->data(), Shape{kRows, kStreams, kHidden}, 1)};
  // Says which device was current, and then works or does not.
  int seen_device = -1;
  bool fails = true;
  const test::Custom<float> probe(derived_shape, [&](float* out, cudaStream_t on) {
    ok(cudaGetDevice(&seen_device));
    if (fails) throw std::runtime_error("no kernel for this");
    ok(cudaMemsetAsync(out, 0x42, kDerived * sizeof(float), on));
  });

  DeviceResource memory1{1};
  std::optional<StableBuffer<float>> buffer;
  buffer.emplace("on device 1", memory1);
  expect_device_0("construction");
  EXPECT_EQ(buffer->device(), 1);

  // Refused, and nothing happens.
  auto text = refusal(Rule::device_mismatch, [&] { buffer->finalize(sum_on_1, stream); });
  EXPECT_TRUE(contains(text, "on device 1")) << text;
  EXPECT_TRUE(contains(text, "stream")) << text;
  expect_device_0("a stream of device 0");
  text = refusal(Rule::device_mismatch, [&] { buffer->finalize(sum_of(source0), stream1); });
  EXPECT_TRUE(contains(text, "source")) << text;
  expect_device_0("a source on device 0");
  EXPECT_THROW(buffer->finalize(probe, stream1), std::runtime_error);
  EXPECT_EQ(seen_device, 1);
  expect_device_0("a recipe that fails at the first finalize");
  EXPECT_THROW(buffer->allocate(Shape{std::int64_t{1} << 50}), holdfast::OutOfMemory);
  expect_device_0("running out of memory");
  EXPECT_EQ(buffer->state(), State::empty);
  EXPECT_TRUE(memory1.ledger().live().empty());

  buffer->finalize(sum_on_1, stream1);
  expect_device_0("the first finalize");
  cudaPointerAttributes attributes{};
  ok(cudaPointerGetAttributes(&attributes, buffer->data()));
  EXPECT_EQ(attributes.device, 1);
  ASSERT_TRUE(memory1.ledger().find(buffer->data()).has_value());
  EXPECT_EQ(memory1.ledger().find(buffer->data())->device, 1);
  const Kept kept(*buffer, memory1);

  std::optional<test::Graph> graph;
  {
    const OnDevice1 scope;
    graph.emplace(stream1, [&] {
      ok(cudaMemcpyAsync(output1->data(), buffer->data(), output1->bytes(),
                         cudaMemcpyDeviceToDevice, stream1));
    });
  }
  const auto expect_replayed = [&](const std::vector<float>& expected) {
    const OnDevice1 scope;
    graph->launch(stream1);
    EXPECT_TRUE(same(output1->download(), expected));
    output1->poison();
  };
  expect_replayed(sums(values));

  values = integers(1, kSource);
  {
    const OnDevice1 scope;
    source1->upload(values);
  }
  buffer->wait_ready(stream1);
  expect_device_0("wait_ready");
  buffer->finalize(sum_on_1, stream1);
  expect_device_0("a refit");
  expect_replayed(sums(values));
  buffer->mark_use(stream1);
  expect_device_0("mark_use");
  (void)refusal(Rule::device_mismatch, [&] { buffer->mark_use(stream); });
  (void)refusal(Rule::device_mismatch, [&] { buffer->wait_ready(stream); });
  (void)refusal(Rule::device_mismatch, [&] { buffer->finalize(sum_on_1, stream); });
  (void)refusal(Rule::shape_mismatch, [&] {
    buffer->finalize(StreamSum<float>{TensorView(source1->data(), Shape{1, 1, 8}, 1)}, stream1);
  });
  expect_device_0("refusals");
  kept.expect(*buffer, 2);
  expect_replayed(sums(values));

  EXPECT_THROW(buffer->finalize(probe, stream1), std::runtime_error);
  expect_device_0("a recipe that fails at a refit");
  EXPECT_EQ(buffer->state(), State::unset);
  fails = false;
  seen_device = -1;
  buffer->finalize(probe, stream1);
  expect_device_0("the refit after it");
  EXPECT_EQ(seen_device, 1);
  expect_replayed(std::vector<float>(kDerived, test::bits<float>(0x42424242U)));
  kept.expect(*buffer, 3);
  {
    // A captured stream cannot be asked for its device, so the current one counts.
    std::optional<test::Graph> recorded;
    const OnDevice1 scope;
    recorded.emplace(stream1, [&] {
      ok(cudaSetDevice(0));
      (void)refusal(Rule::device_mismatch,
                    [&] { buffer->finalize(sum_on_1, Capture::record, stream1); });
      expect_device_0("a recorded finalize with the wrong device current");
      (void)refusal(Rule::refit_in_capture, [&] { buffer->finalize(sum_on_1, stream1); });
      expect_device_0("a refusal in a capture");
      ok(cudaSetDevice(1));
      buffer->finalize(sum_on_1, Capture::record, stream1);
      int current = -1;
      ok(cudaGetDevice(&current));
      EXPECT_EQ(current, 1) << "after a recorded finalize";
    });
    EXPECT_EQ(recorded->nodes(), 1U);
    recorded->launch(stream1);
    ok(cudaStreamSynchronize(stream1));
  }
  expect_replayed(sums(values));

  {
    StableBuffer<float> allocated{"allocated", memory1};
    allocated.allocate(derived_shape);
    expect_device_0("allocate");
    StableBuffer<float> adopted{"adopted", memory1};
    (void)refusal(Rule::device_mismatch,
                  [&] { adopted.adopt(TensorView(source0.data(), derived_shape, 1)); });
    expect_device_0("adopting memory of device 0");
    adopted.adopt(TensorView(engine1->data(), derived_shape, 1));
    expect_device_0("adopt");
  }
  expect_device_0("destroying without a fill");
  graph.reset();
  const auto address = reinterpret_cast<std::uintptr_t>(buffer->data());
  buffer->mark_use(stream1);
  buffer.reset();
  expect_device_0("destruction");
  EXPECT_TRUE(memory1.ledger().live().empty());
  ASSERT_FALSE(memory1.ledger().retired().empty());
  EXPECT_EQ(memory1.ledger().retired().back().base, address);
  EXPECT_EQ(memory1.leaked_bytes(), 0U);
  {
    const OnDevice1 scope;
    if (test::simulated()) {
      EXPECT_EQ(free_memory(), baseline);  // elsewhere modules and graphs take their part
    }
    ok(cudaStreamDestroy(stream1));
    source1.reset();
    output1.reset();
    engine1.reset();
  }
}

TEST_F(RefitCases, B107DestroyingDisturbsNoCaptureOfAnotherThread) {
  constexpr std::size_t kCount = std::size_t{8} << 20U;
  constexpr std::size_t kBytes = kCount * sizeof(float);
  constexpr std::size_t kHalf = kCount / 2;
  // What an instantiated graph may cost; none of the buffer's memory can hide in it.
  const std::size_t slack = test::simulated() ? 0 : std::size_t{8} << 20U;
  const auto values = integers(0, kCount);
  const auto captured_values = integers(1, kCount);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<float> captured_source(captured_values);
  const test::DeviceArray<float> output(kCount);
  const test::DeviceArray<float> captured_output(kCount);
  output.poison();
  captured_output.poison();
  struct Scene {
    cudaStream_t worker = nullptr;
    cudaStream_t capturing_stream = nullptr;
    std::atomic<bool> capturing{false};
    std::atomic<bool> destroying{false};
    std::atomic<bool> destroyed{false};
    std::atomic<bool> work_done{false};
    ~Scene() {
      destroying = true;
      destroyed = true;
      (void)cudaStreamSynchronize(worker);
      (void)cudaStreamDestroy(worker);
      (void)cudaStreamDestroy(capturing_stream);
    }
  } scene;
  ok(cudaStreamCreateWithFlags(&scene.worker, cudaStreamNonBlocking));
  ok(cudaStreamCreateWithFlags(&scene.capturing_stream, cudaStreamNonBlocking));

  const test::Custom<float> copy(Shape{kCount}, [&](float* out, cudaStream_t on) {
    ok(cudaMemcpyAsync(out, source.data(), kBytes, cudaMemcpyDeviceToDevice, on));
  });
  auto buffer = std::make_unique<StableBuffer<float>>("short-lived", memory);
  buffer->finalize(copy, stream);
  const auto range = memory.ledger().find(buffer->data());
  ASSERT_TRUE(range.has_value());
  const std::size_t before = free_memory();

  // Running work that reads the buffer: it cannot end before the destruction has begun.
  ok(cudaLaunchHostFunc(
      scene.worker,
      [](void* at) {
        (void)wait_for(static_cast<Scene*>(at)->destroying);
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
      },
      &scene));
  ok(cudaMemcpyAsync(output.data(), buffer->data(), kBytes, cudaMemcpyDeviceToDevice,
                     scene.worker));
  ok(cudaLaunchHostFunc(
      scene.worker, [](void* at) { static_cast<Scene*>(at)->work_done = true; }, &scene));
  buffer->mark_use(scene.worker);

  auto capture = std::async(std::launch::async, [&] {
    return std::make_unique<test::Graph>(
        scene.capturing_stream,
        [&] {
          ok(cudaMemcpyAsync(captured_output.data(), captured_source.data(), kBytes / 2,
                             cudaMemcpyDeviceToDevice, scene.capturing_stream));
          scene.capturing = true;
          if (!wait_for(scene.destroyed)) throw std::runtime_error("the destructor did not return");
          cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
          ok(cudaStreamIsCapturing(scene.capturing_stream, &status));
          EXPECT_EQ(status, cudaStreamCaptureStatusActive);
          ok(cudaMemcpyAsync(captured_output.data() + kHalf, captured_source.data() + kHalf,
                             kBytes / 2, cudaMemcpyDeviceToDevice, scene.capturing_stream));
        },
        cudaStreamCaptureModeGlobal);
  });
  EXPECT_TRUE(wait_for(scene.capturing));
  EXPECT_FALSE(scene.work_done);
  scene.destroying = true;
  buffer.reset();
  EXPECT_TRUE(scene.work_done) << "freed under running work";
  scene.destroyed = true;

  std::unique_ptr<test::Graph> graph;
  ASSERT_NO_THROW(graph = capture.get()) << "the capture was disturbed";
  EXPECT_EQ(graph->nodes(), 2U);
  EXPECT_TRUE(memory.ledger().live().empty());
  const auto retired = memory.ledger().retired();
  ASSERT_EQ(retired.size(), 1U);
  EXPECT_EQ(retired[0].name, "short-lived");
  EXPECT_EQ(retired[0].base, range->base);
  EXPECT_EQ(retired[0].bytes, kBytes);
  EXPECT_EQ(retired[0].backing.at(0).buffer_id, range->backing.at(0).buffer_id);
  EXPECT_EQ(memory.leaked_bytes(), 0U);
  EXPECT_GE(free_memory() + slack, before + kBytes) << "the memory was not given back";

  EXPECT_TRUE(same(output.download(), values));
  graph->launch(stream);
  sync();
  EXPECT_TRUE(same(captured_output.download(), captured_values));
}

TEST_F(RefitCases, B108EveryRefusalInACaptureSaysWhatToDo) {
  const auto values = integers(0, kSource);
  const test::DeviceArray<float> source(values);
  const test::DeviceArray<float> output(kDerived);
  output.poison();
  StableBuffer<float> fresh{"buffer one", memory};
  StableBuffer<float> unset{"buffer two", memory};
  StableBuffer<float> live{"buffer three", memory};
  unset.allocate(Shape{kRows, kHidden});
  live.finalize(sum_of(source), stream);
  sync();
  const Kept kept(live, memory);
  const std::size_t ranges = memory.ledger().live().size();

  const auto expect = [](const char* operation, const StableBuffer<float>& buffer, Rule rule,
                         const std::function<void()>& call) {
    SCOPED_TRACE(operation + (" of " + buffer.name()));
    const auto text = refusal(rule, call);
    EXPECT_TRUE(contains(text, operation)) << text;
    EXPECT_TRUE(contains(text, "'" + buffer.name() + "'")) << text;
    EXPECT_TRUE(contains(text, "before capture")) << text;
  };
  const auto expect_refusals = [&](cudaStream_t on) {
    for (const Capture capture : {Capture::refuse, Capture::record}) {
      expect("finalize", fresh, Rule::allocation_in_capture,
             [&] { fresh.finalize(sum_of(source), capture, on); });
    }
    expect("finalize", unset, Rule::refit_in_capture, [&] { unset.finalize(sum_of(source), on); });
    expect("finalize", live, Rule::refit_in_capture, [&] { live.finalize(sum_of(source), on); });
    for (const StableBuffer<float>* buffer : {&unset, &live}) {
      expect("mark_use", *buffer, Rule::order_in_capture, [&] { buffer->mark_use(on); });
      expect("wait_ready", *buffer, Rule::order_in_capture, [&] { buffer->wait_ready(on); });
    }
  };
  const auto read = [&](cudaStream_t on) {
    ok(cudaMemcpyAsync(output.data(), live.data(), output.bytes(), cudaMemcpyDeviceToDevice, on));
  };
  const auto expect_valid = [&](const test::Graph& graph) {
    EXPECT_EQ(graph.nodes(), 1U) << "a refused call left work in the capture";
    graph.launch(stream);
    sync();
    EXPECT_TRUE(same(output.download(), sums(values)));
    output.poison();
    EXPECT_EQ(fresh.state(), State::empty);
    EXPECT_EQ(unset.state(), State::unset);
    kept.expect(live, 1);
    EXPECT_EQ(memory.ledger().live().size(), ranges);
  };

  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                          cudaStreamCaptureModeRelaxed}) {
    SCOPED_TRACE(mode);
    const test::Graph graph(
        stream,
        [&] {
          expect_refusals(stream);
          read(stream);
        },
        mode);
    expect_valid(graph);
  }

  // The legacy stream, while a stream that waits for it is being captured: work on it would break
  // that capture, so not even a recorded finalize may go there.
  cudaStream_t blocking = nullptr;
  ok(cudaStreamCreate(&blocking));
  for (cudaStream_t legacy : {cudaStreamLegacy, static_cast<cudaStream_t>(nullptr)}) {
    const test::Graph graph(blocking, [&] {
      expect_refusals(legacy);
      expect("finalize", live, Rule::refit_in_capture,
             [&] { live.finalize(sum_of(source), Capture::record, legacy); });
      read(blocking);
    });
    expect_valid(graph);
  }
  ok(cudaStreamDestroy(blocking));

  // Afterwards, before the next capture, each of them works.
  fresh.finalize(sum_of(source), stream);
  unset.finalize(sum_of(source), stream);
  live.finalize(sum_of(source), stream);
  live.mark_use(stream);
  live.wait_ready(stream);
  EXPECT_TRUE(same(test::download(fresh.data(), kDerived), sums(values)));
  EXPECT_TRUE(same(test::download(unset.data(), kDerived), sums(values)));
}

}  // namespace
