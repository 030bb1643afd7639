// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// What the mHC operations cost on this GPU.
///
///     holdfast.bench.mhc --benchmark_out=mhc.json
///     holdfast.bench.mhc --benchmark_filter='^pre/.*/tokens:(1|64)/'
///
/// op/hidden:H/tokens:T/l2:warm|cold, where op is
/// - pre, and pre_norm with RMSNorm;
/// - pre_broadcast, with RMSNorm and residual_out;
/// - post;
/// - post_pre, with RMSNorm;
/// - head.
///
/// The time is that of one call: a chain of dependent calls on one stream, 20 or more, between two
/// events, divided by their number; behind a first replay, so that the host is ahead. `warm`: all
/// calls use the same tensors, which lie within 30 MB where the shape permits. `cold`: they go
/// around sets of tensors, weights included, of more than 120 MB. The median over 101 samples, or
/// 31 from 4096 tokens on, is the number to quote; the JSON has its name without what Google
/// Benchmark appends.
///
/// - bytes_per_second, percent_of_copy: if each input were read once and each output written once,
///   beside copy_rate, which every run measures and which can make it void (see copy_rate.cuh).
/// - floor_us: those bytes at 4.3 TB/s.
/// - mixes_rel_rms: the error of mixes against the f64 oracle, relative, root mean square over up
///   to 64 tokens; of one more call, with the optional output that the timed calls leave out. Those
///   of post_pre are of the residual that it returned, in bf16.
///
/// A batch repeats 64 tokens of N(0, 1). After the last sample every result is checked: those of
/// the first 64 tokens must be what the oracle allows, and all others have the bits of these.

#include "chain.hpp"
#include "copy_rate.cuh"
#include "device.hpp"
#include "mhc/operations.cuh"
#include "mhc/sets.cuh"
#include "report.hpp"
#include "result.hpp"
#include "support/mhc_oracle.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace holdfast::bench;

constexpr double kFloorRate = 4.3e12;  // bytes per second

/// What the two ends of a chain take must be little beside its nodes, and each set have its turn.
int nodes_of(const Shape& shape, int sets) {
  const int least = shape.tokens <= 64 ? 200 : shape.tokens <= 1024 ? 60 : 20;
  return (least - 1) / sets * sets + sets;
}

/// Less where a sample takes long; the times of such samples hardly differ.
int samples_of(const Shape& shape) { return shape.tokens < 4096 ? kSamples : 31; }

/// The error of the mixes [tokens, Op::kMixes]: of up to kDistinct tokens, from all over the batch
/// and no two of them the same.
template <class Op>
double error_of_mixes(const Op& op, const std::vector<float>& mixes, const Shape& shape) {
  const std::int64_t count = std::min(shape.tokens, kDistinct);
  const std::int64_t apart = (shape.tokens / count - 1) | 1;  // odd, as kDistinct is a power of 2
  const auto& outcomes = op.outcomes();
  test::mhc::RelativeRms rms;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t token = i * apart;
    const auto& want = outcomes[static_cast<std::size_t>(token % kDistinct)].mixes;
    rms.add(std::span(want).first(Op::kMixes), row_of(mixes, token, Op::kMixes));
  }
  return rms.value();
}

template <class Op>
Result measure(const Shape& shape, L2 l2) {
  if (!copy_rate().error.empty()) return {{}, {}, copy_rate().error};
  const Stream stream;
  Sets sets(shape.tokens);
  const Op op(sets, shape);
  sets.allocate(l2);
  const Chain chain(stream, nodes_of(shape, sets.count()),
                    [&](int node) { op.launch(node % sets.count(), nullptr, stream.ref()); });
  Result result{chain.samples(samples_of(shape)), {}, {}};
  compare_with_copy(result, op.bytes());
  result.counters["floor_us"].assign(result.seconds.size(), 1e6 * op.bytes() / kFloorRate);

  const auto check_results = [&] {
    if (result.error.empty()) result.error = sets.difference();
    if (result.error.empty()) result.error = op.difference();
  };
  check_results();
  if constexpr (Op::kMixes > 0) {
    const Array<float> mixes(static_cast<std::size_t>(shape.tokens * Op::kMixes));
    sets.poison_results();
    op.launch(0, mixes.data(), stream.ref());
    stream.wait();
    check_results();
    const double error = error_of_mixes(op, mixes.download(), shape);
    result.counters["mixes_rel_rms"].assign(result.seconds.size(), error);
    if (result.error.empty() && !(error <= test::mhc::kMixesBound)) {
      result.error = "the relative error of mixes is " + std::to_string(error * 1e6) + "e-6";
    }
  }
  return result;
}

template <class Op>
void add_shapes(const std::string& name) {
  for (const std::int64_t hidden : {4096, 7168}) {
    for (const std::int64_t tokens : {1, 8, 64, 256, 1024, 4096, 16384}) {
      for (const L2 l2 : {L2::warm, L2::cold}) {
        const Shape shape{hidden, tokens};
        add(
            name + "/hidden:" + std::to_string(hidden) + "/tokens:" + std::to_string(tokens) +
                (l2 == L2::warm ? "/l2:warm" : "/l2:cold"),
            [shape, l2] { return measure<Op>(shape, l2); }, samples_of(shape));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return holdfast::bench::run(argc, argv, [] {
    add("copy_rate", copy_rate);
    add_shapes<Pre<false>>("pre");
    add_shapes<Pre<true>>("pre_norm");
    add_shapes<PreBroadcast>("pre_broadcast");
    add_shapes<Post>("post");
    add_shapes<PostPre>("post_pre");
    add_shapes<Head>("head");
  });
}
