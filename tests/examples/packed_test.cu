// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The README's example of a packed buffer, as a test: what lies between the two marks is what the
/// README shows.

#include "holdfast/holdfast.hpp"
#include "holdfast/kernels.cuh"

#include "support/runtime.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

class PackedExample : public test::Cuda {};

TEST_F(PackedExample, ReadsATensorAtByteSix) {
  constexpr std::int64_t hidden = 40;
  std::vector<float> fn(24 * 4 * hidden);
  for (std::size_t i = 0; i < fn.size(); ++i) fn[i] = static_cast<float>(i / (4 * hidden));
  std::vector<std::byte> sent(6 + fn.size() * sizeof(float));
  std::memcpy(sent.data() + 6, fn.data(), fn.size() * sizeof(float));
  const test::DeviceArray<std::byte> bytes(sent);
  const std::byte* received = bytes.data();
  constexpr int device = 0;
  holdfast::DeviceResource memory;
  holdfast::StableBuffer<float> broadcast{"layers.0.hc_attn_fn_broadcast", memory};
  holdfast::StableBuffer<float> weight{"layers.0.hc_attn_fn", memory};

  // README begin
  const std::byte* bucket = received;  // many tensors, one after the other, without padding
  const auto hc_attn_fn = holdfast::TensorView::packed<float>(bucket + 6, {24, 4 * hidden}, device);
  broadcast.finalize(holdfast::StreamSum<float>{hc_attn_fn, 4}, stream);
  weight.finalize(holdfast::Relayout<float>{hc_attn_fn}, stream);
  // README end

  sync();
  std::vector<float> sums(24 * hidden);
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = 4 * static_cast<float>(i / hidden);
  EXPECT_EQ(test::download(broadcast.data(), sums.size()), sums);
  EXPECT_EQ(test::download(weight.data(), fn.size()), fn);
}

}  // namespace
