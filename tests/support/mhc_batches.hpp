// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What a token's results must not depend on: the batch around it, how its sums are spread over
/// blocks, and where its rows lie.

#include "holdfast/mhc/collapse.cuh"
#include "holdfast/mhc/projection.cuh"
#include "holdfast/mhc/shapes.cuh"

#include "support/runtime.hpp"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace test::mhc {

/// Batches in which a token must have the same bits, ascending; the last holds all the others. On a
/// GPU it is one whose sums a single block adds.
[[nodiscard]] inline std::vector<std::int64_t> batches() {
  std::vector<std::int64_t> sizes{1, 2, 7, 8, 16, 17, 33, 64, 100, 128, 256, 257, 300};
  if (!simulated()) sizes.insert(sizes.end(), {1024, 4096, 16384, 17000});
  return sizes;
}

/// `tokens` rows of a dense view.
template <class View>
[[nodiscard]] View part(const View& view, std::int64_t first, std::int64_t tokens) {
  if constexpr (View::kOpenExtents == 1) {
    return View{view.row(first), tokens};
  } else {
    return View{view.row(first), tokens, view.extent(View::kRank - 1)};
  }
}

/// Whether what a dense view shows has the bits of `want` from row `first` on.
template <class View, class T>
[[nodiscard]] bool same_bits(const View& view, const std::vector<T>& want, std::int64_t first) {
  const auto count = static_cast<std::size_t>(view.extent(0) * view.row_elements());
  const std::vector<T> got = download(reinterpret_cast<const T*>(view.data()), count);
  return std::equal(got.begin(), got.end(), want.begin() + first * view.row_elements(),
                    [](T a, T b) { return std::memcmp(&a, &b, sizeof a) == 0; });
}

/// The workspace that `bytes(tokens, hidden)` asks for is enough for each batch of up to `tokens`,
/// and not larger.
template <int Rows, class Bytes>
void expect_enough_for_smaller_batches(const Bytes& bytes) {
  using holdfast::mhc::detail::kPartialFloats;
  using holdfast::mhc::detail::kSharedTokens;
  using holdfast::mhc::detail::PartialSums;
  for (const std::int64_t hidden : {8, 512, 520, 4096, 8200}) {
    std::size_t most = 0;
    for (std::int64_t tokens = 0; tokens < 2 * kSharedTokens; ++tokens) {
      const auto sums = PartialSums::in({}, std::max<std::int64_t>(tokens, 1), hidden);
      const std::int64_t floats = tokens * sums.per_token() * kPartialFloats<Rows>;
      most = std::max(most, static_cast<std::size_t>(floats) * sizeof(float));
      ASSERT_EQ(bytes(tokens, hidden), most) << tokens << " tokens, hidden " << hidden;
    }
  }
}

/// Enqueues the two launches of `op`, whose mixes are of `source`, in every way that the sums can
/// be spread over blocks; `check(what)` after each. hidden is 1064: 12 segments of up to 3 chunks.
template <int Rows, class Op, class Source, class Check>
void run_every_spread(const Op& op, const Source& source, std::int64_t tokens, cudaStream_t stream,
                      const Check& check) {
  using namespace holdfast::mhc::detail;  // NOLINT(google-build-using-namespace)
  constexpr int kHidden = 1064;
  const SumTree tree = SumTree::of(kHidden);
  ASSERT_EQ(tree.chunks, 34);
  ASSERT_EQ(tree.segment_chunks, 3);
  const DeviceArray<float> partials(static_cast<std::size_t>(tokens * 34 * kPartialFloats<Rows>));
  for (const Spread spread :
       {Spread{1, 1}, Spread{3, 3}, Spread{6, 3}, Spread{15, 3}, Spread{36, 34}}) {
    partials.poison();
    const PartialSums sums{partials.data(), tree, spread};
    const auto what = [] { return std::string("every spread"); };
    launch_projection<holdfast::detail::ThisFile, Rows>(
        Projection<Source>{source, op.fn.data(), sums, tokens, kHidden}, stream, what);
    launch_collapse<holdfast::detail::ThisFile>(collapse_of(op, sums), stream, what);
    check(std::to_string(spread.block_chunks) + ' ' + std::to_string(spread.partial_chunks));
  }
}

/// Rows so far apart that int32 does not count the elements up to the last one: the tensors of a
/// test are columns of one matrix of 4 GiB, with 2 or 257 tokens.
class FarRows {
 public:
  explicit FarRows(std::int64_t tokens)
      : stride_(kReach / (tokens - 1)), memory_(static_cast<std::size_t>(kReach + kColumns)) {}

  /// What `near` shows, in columns of its own.
  template <class View>
  [[nodiscard]] View far(const View& near) {
    const View view = View{reinterpret_cast<__nv_bfloat16*>(memory_.data()) + columns_,
                           near.extent(0), near.extent(View::kRank - 1)}
                          .with_row_stride(stride_);
    columns_ += near.row_elements();
    if (columns_ > std::min(kColumns, stride_)) throw std::logic_error("too many columns");
    copy(near, view);
    return view;
  }

  template <class From, class To>
  static void copy(const From& from, const To& to) {
    ok(cudaDeviceSynchronize());
    for (std::int64_t row = 0; row < from.extent(0); ++row) {
      ok(cudaMemcpy(const_cast<__nv_bfloat16*>(to.row(row)), from.row(row),
                    static_cast<std::size_t>(from.row_elements()) * sizeof(__nv_bfloat16),
                    cudaMemcpyDeviceToDevice));
    }
    ok(cudaDeviceSynchronize());
  }

 private:
  static constexpr std::int64_t kReach = std::int64_t{1} << 31;
  static constexpr std::int64_t kColumns = 1 << 14;
  std::int64_t stride_;
  DeviceArray<std::uint16_t> memory_;
  std::int64_t columns_ = 0;
};

}  // namespace test::mhc
