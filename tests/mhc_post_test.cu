// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// mhc::post against the f64 oracle, eager and replayed.

#include "holdfast/mhc/post.cuh"

#include "support/mhc_batches.hpp"
#include "support/mhc_oracle.hpp"
#include "support/mhc_rows.hpp"
#include "support/refusal.hpp"
#include "support/runtime.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace {

using holdfast::Rule;
using holdfast::mhc::bf16;
using holdfast::mhc::Post;
using test::mhc::from_bits;
using test::mhc::kStreams;
using test::mhc::Rows;
using test::mhc::to_bits;
using test::mhc::token_of;

/// One op on the device, each row `gap` elements longer than it need be.
class Problem {
 public:
  Problem(std::int64_t tokens, std::int64_t hidden, std::int64_t gap = 0, std::uint64_t seed = 1)
      : tokens_(tokens),
        hidden_(hidden),
        x_values_(test::mhc::make_activations(elements(hidden), seed)),
        residual_values_(test::mhc::make_activations(elements(kStreams * hidden), seed + 1)),
        coefficients_(test::mhc::make_coefficients(tokens, seed + 2)),
        x_(to_bits(x_values_), hidden, gap),
        residual_(to_bits(residual_values_), kStreams * hidden, gap),
        post_(coefficients_.post, kStreams, gap),
        comb_(coefficients_.comb, kStreams * kStreams, gap),
        out_(tokens, kStreams * hidden, gap) {}

  [[nodiscard]] Post op() const {
    Post op{.x = {x_.data(), tokens_, hidden_},
            .residual = {residual_.data(), tokens_, hidden_},
            .post = {post_.data(), tokens_},
            .comb = {comb_.data(), tokens_},
            .residual_out = {out_.data(), tokens_, hidden_}};
    op.x = op.x.with_row_stride(x_.stride());
    op.residual = op.residual.with_row_stride(residual_.stride());
    op.post = op.post.with_row_stride(post_.stride());
    op.comb = op.comb.with_row_stride(comb_.stride());
    op.residual_out = op.residual_out.with_row_stride(out_.stride());
    return op;
  }
  void poison() const { out_.poison(); }
  [[nodiscard]] std::vector<std::uint16_t> results() const { return out_.results(); }

  /// Every `step`-th token.
  void expect_right(const std::vector<std::uint16_t>& got, std::int64_t step = 1) const {
    const auto hidden = static_cast<std::size_t>(hidden_);
    for (std::int64_t t = 0; t < tokens_ && !::testing::Test::HasFailure(); t += step) {
      const auto want = test::mhc::post(token_of(x_values_, t, hidden),
                                        token_of(residual_values_, t, kStreams * hidden),
                                        token_of(coefficients_.post, t, kStreams),
                                        token_of(coefficients_.comb, t, kStreams * kStreams));
      EXPECT_EQ(test::mhc::difference(want, from_bits(token_of(got, t, kStreams * hidden))), "")
          << "token " << t;
    }
  }

 private:
  [[nodiscard]] std::size_t elements(std::int64_t length) const {
    return static_cast<std::size_t>(tokens_ * length);
  }

  std::int64_t tokens_;
  std::int64_t hidden_;
  std::vector<float> x_values_;
  std::vector<float> residual_values_;
  test::mhc::Coefficients coefficients_;
  Rows<std::uint16_t> x_;
  Rows<std::uint16_t> residual_;
  Rows<float> post_;
  Rows<float> comb_;
  Rows<std::uint16_t> out_;
};

using MhcPost = test::Cuda;

TEST_F(MhcPost, EveryHiddenAgainstTheOracle) {
  for (const std::int64_t hidden :
       {8, 24, 64, 128, 136, 1280, 1536, 2560, 4096, 5120, 7168, 8192, 8200}) {
    const Problem in(7, hidden, 0, static_cast<std::uint64_t>(hidden));
    for (const test::Mode mode : test::kModes) {
      SCOPED_TRACE("hidden " + std::to_string(hidden) + ", " + to_string(mode));
      in.poison();
      test::run(mode, stream, [&] { post(in.op(), stream); });
      in.expect_right(in.results());
    }
  }
}

TEST_F(MhcPost, ATokensBitsDoNotDependOnTheBatch) {
  const std::int64_t hidden = 520;
  const std::int64_t most = test::simulated() ? 300 : 16384;
  const Problem whole(most, hidden);
  post(whole.op(), stream);
  const std::vector<std::uint16_t> want = whole.results();
  whole.expect_right(want, 97);
  for (const std::int64_t tokens : {1, 2, 7, 8, 16, 17, 33, 64, 100, 128, 257, 1024, 4096}) {
    if (tokens > most) break;
    for (const std::int64_t first : {std::int64_t{0}, most - tokens}) {
      Post op = whole.op();
      op.x = {op.x.row(first), tokens, hidden};
      op.residual = {op.residual.row(first), tokens, hidden};
      op.post = {op.post.row(first), tokens};
      op.comb = {op.comb.row(first), tokens};
      op.residual_out = {op.residual_out.row(first), tokens, hidden};
      for (const test::Mode mode : test::kModes) {
        whole.poison();
        test::run(mode, stream, [&] { post(op, stream); });
        const std::vector<std::uint16_t> got = whole.results();
        for (std::int64_t t = 0; t < most; ++t) {
          const auto row = token_of(got, t, 4 * 520);
          if (t >= first && t < first + tokens) {
            ASSERT_TRUE(std::ranges::equal(row, token_of(want, t, 4 * 520))) << tokens << ' ' << t;
          } else {
            ASSERT_EQ(std::ranges::count(row, 0xCBCBU), 4 * 520) << tokens << ' ' << t;
          }
        }
      }
    }
  }
}

TEST_F(MhcPost, RowsMayLieApart) {
  const Problem dense(6, 264);
  post(dense.op(), stream);
  for (const std::int64_t gap : {8, 24}) {
    const Problem apart(6, 264, gap);
    for (const test::Mode mode : test::kModes) {
      apart.poison();
      test::run(mode, stream, [&] { post(apart.op(), stream); });
      EXPECT_EQ(apart.results(), dense.results()) << gap;
    }
  }
}

TEST_F(MhcPost, OffsetsBeyondTheReachOfInt32) {
  if (test::simulated()) GTEST_SKIP() << "needs 4 GiB of device memory";
  for (const std::int64_t tokens : {2, 257}) {
    const Problem in(tokens, 520);
    const Post near = in.op();
    test::mhc::FarRows rows(tokens);
    Post op = near;
    op.x = rows.far(near.x);
    op.residual = rows.far(near.residual);
    op.residual_out = rows.far(near.residual_out);
    post(op, stream);
    test::mhc::FarRows::copy(op.residual_out, near.residual_out);
    in.expect_right(in.results());
  }
}

TEST_F(MhcPost, NoTokensLaunchNothing) {
  const Problem in(0, 64);
  const test::Graph graph(stream, [&] { post(in.op(), stream); });
  EXPECT_EQ(graph.nodes(), 0U);
}

TEST_F(MhcPost, RefusesWhatIsNotTheOp) {
  const std::int64_t hidden = 64;
  const Problem in(4, hidden);
  const Post raw = in.op();
  const auto refused = [&](Rule rule, const std::string& text,
                           const std::function<void(Post&)>& spoil) {
    SCOPED_TRACE(text);
    Post op = raw;
    spoil(op);
    in.poison();
    test::expect_refused(rule, "mhc::post of", text, [&] { post(op, stream); });
    test::ok(cudaStreamSynchronize(stream));
    EXPECT_EQ(std::ranges::count(in.results(), 0xCBCBU), 4 * 4 * hidden);
  };
  for (const std::int64_t wrong : {0, 4, 12, 1 << 21}) {
    refused(Rule::unsupported_shape, "hidden must be a multiple of 8", [&](Post& op) {
      op.x = {raw.x.data(), 4, wrong};
    });
  }
  refused(Rule::shape_mismatch, "residual is [4, 4, 72]; expected [4, 4, 64]", [&](Post& op) {
    op.residual = {raw.residual.data(), 4, 72};
  });
  refused(Rule::shape_mismatch, "post", [](Post& op) { op.post = {}; });
  refused(Rule::shape_mismatch, "comb", [&](Post& op) { op.comb = {raw.comb.data(), 3}; });
  refused(Rule::shape_mismatch, "residual_out", [&](Post& op) {
    op.residual_out = {raw.residual_out.data(), 5, hidden};
  });
  refused(Rule::null_pointer, "x has no address", [&](Post& op) { op.x = {nullptr, 4, hidden}; });
  refused(Rule::misaligned, "post: address", [&](Post& op) {
    op.post = {raw.post.data() + 1, 3};
    op.x = {raw.x.data(), 3, hidden};
    op.residual = {raw.residual.data(), 3, hidden};
    op.comb = {raw.comb.data(), 3};
    op.residual_out = {raw.residual_out.data(), 3, hidden};
  });
  refused(Rule::misaligned, "residual: address",
          [&](Post& op) { op.residual = raw.residual.with_row_stride(4 * hidden + 4); });
  refused(Rule::overlapping, "residual_out and residual", [&](Post& op) {
    op.residual_out = {const_cast<bf16*>(raw.residual.data()), 4, hidden};
  });
  refused(Rule::overlapping, "residual_out and x", [&](Post& op) {
    op.x = {raw.residual_out.data(), 4, hidden};
  });
}

}  // namespace
