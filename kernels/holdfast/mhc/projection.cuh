// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The projection of a token's four streams to its mixes, and their sum of squares, in f32 accuracy
/// on tensor cores.
///
/// Activations are bf16 already. A weight is split into three bf16 that sum to it exactly, one
/// matrix product for each. The accumulator of a tensor core rounds toward zero, so the length of a
/// chain of products decides the accuracy: one is cut after 8 steps of 16, and everything above is
/// added in ordinary f32, along a tree that depends on hidden alone:
///
/// - A chunk is 32 hidden of all four streams: 8 steps, an accumulator for each part of the weight;
///   its sum is hi + (mid + lo).
/// - A segment is a sixteenth of the chunks, added in order.
/// - The total is the segments, added in order.
///
/// So a token's bits do not depend on how its chunks are spread over blocks, or on the batch.

#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/instructions.cuh"
#include "holdfast/detail/launch.cuh"
#include "holdfast/detail/pack.cuh"
#include "holdfast/error.hpp"
#include "holdfast/mhc/shapes.cuh"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace holdfast::mhc::detail {

inline constexpr int kWarp = 32;
inline constexpr int kTile = 16;  // tokens of one matrix product
inline constexpr int kSteps = 2;  // matrix products over the 32 hidden of a chunk, of each stream
inline constexpr int kParts = 3;  // hi, mid, lo

/// The tree of sums.
struct SumTree {
  static constexpr int kChunkHidden = 32;
  static constexpr int kMaxSegments = 16;

  int chunks;
  int segment_chunks;  ///< the last segment may have fewer

  [[nodiscard]] static __host__ __device__ SumTree of(int hidden) {
    const int chunks = (hidden - 1) / kChunkHidden + 1;
    return {chunks, (chunks - 1) / kMaxSegments + 1};
  }
  [[nodiscard]] __host__ __device__ int segments() const {
    return (chunks - 1) / segment_chunks + 1;
  }
};

/// How a launch spreads the tree: what one block adds, and what it leaves for the reader to add.
/// A partial sum is a chunk, a segment or the total.
struct Spread {
  int block_chunks;    ///< whole segments, or one chunk
  int partial_chunks;  ///< 1, those of a segment, or all

  [[nodiscard]] __host__ __device__ int partials(const SumTree& tree) const {
    return (tree.chunks - 1) / partial_chunks + 1;
  }
};

inline constexpr int kSomeTokens = 256;           // spread by chunks, 64 tokens to a block
inline constexpr int kManyTokensBlock = 128;      // above, tokens to a block
inline constexpr std::int64_t kManyBlocks = 264;  // two for each SM of an H200
/// The most tokens whose sums more than one block adds.
inline constexpr std::int64_t kSharedTokens = kManyBlocks / 2 * kManyTokensBlock;

/// Any spread gives the same bits, so this one is made for speed.
[[nodiscard]] inline Spread spread_of(std::int64_t tokens, const SumTree& tree) {
  if (tokens <= kSomeTokens || tree.segment_chunks == 1) return {1, 1};
  const std::int64_t groups = (tokens - 1) / kManyTokensBlock + 1;
  const std::int64_t units = std::clamp<std::int64_t>(kManyBlocks / groups, 1, tree.segments());
  const auto segments = static_cast<int>((tree.segments() - 1) / units + 1);
  return {segments * tree.segment_chunks,
          segments >= tree.segments() ? tree.chunks : tree.segment_chunks};
}

/// Floats of one partial sum: the mixes, the sum of squares, and what rounds it up to whole
/// accesses.
template <int Rows>
inline constexpr int kPartialFloats = (Rows + 1 + 3) / 4 * 4;

/// What the partial sums of any batch of up to `tokens` take, in bytes. A larger batch leaves fewer
/// of them for each token, so it may take less than a smaller one: the most is taken by one of the
/// largest of each kind of spread.
template <int Rows>
[[nodiscard]] std::size_t partial_bytes(std::int64_t tokens, std::int64_t hidden) {
  if (tokens <= 0) return 0;
  const SumTree tree = SumTree::of(static_cast<int>(hidden));
  std::int64_t most = 0;
  for (const std::int64_t kind : {std::int64_t{kSomeTokens}, kSharedTokens, tokens}) {
    const std::int64_t batch = (std::min)(tokens, kind);
    most = (std::max)(most, batch * spread_of(batch, tree).partials(tree));
  }
  return static_cast<std::size_t>(most) * kPartialFloats<Rows> * sizeof(float);
}

/// The partial sums of a batch, between the kernel that writes them and the one that adds them.
struct PartialSums {
  float* data;  ///< [tokens, partials, kPartialFloats]
  SumTree tree;
  Spread spread;

  [[nodiscard]] static PartialSums in(const Workspace& workspace, std::int64_t tokens,
                                      std::int64_t hidden) {
    const SumTree tree = SumTree::of(static_cast<int>(hidden));
    return {static_cast<float*>(workspace.data), tree, spread_of(tokens, tree)};
  }
  [[nodiscard]] __host__ __device__ int per_token() const { return spread.partials(tree); }
  /// Those of one token, of `floats` floats each.
  [[nodiscard]] __host__ __device__ float* of(std::int64_t token, int floats) const {
    return data + token * per_token() * floats;
  }
};

/// Kernel argument. `Source` gives the streams: load(token, h, streams) fills
/// Values (&streams)[kStreams] with kWidth elements from h of each. Of each token and h it is asked
/// once.
template <class Source>
struct Projection {
  Source source;
  const float* fn;  ///< [rows, 4 * hidden]
  PartialSums sums;
  std::int64_t tokens;
  int hidden;
};

/// The streams of a token where they lie.
struct ResidualSource {
  Residual<const bf16> residual;

  __device__ void load(std::int64_t token, int h, Values (&streams)[kStreams]) const {
    const bf16* row = residual.row(token) + h;
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      streams[i] = holdfast::detail::load<kWidth>(row + i * residual.extent(2));
    }
  }
};

/// Two adjacent elements, the first in the lower octet.
[[nodiscard]] __host__ __device__ inline std::uint32_t pair_at(const Values& values, int index) {
  std::uint32_t pair;
  memcpy(&pair, &values.values[index], sizeof pair);
  return pair;
}

/// A block's share of a weight chunk in shared memory: [stream][step][8 rows][part][lane].
template <int Rows>
struct StagedWeight {
  static constexpr int kRowTiles = (Rows + 7) / 8;
  static constexpr int kItems = kStreams * kRowTiles * kWarp;  // each 8 weights of one row
  uint2 words[kStreams][kSteps][kRowTiles][kParts][kWarp];
};

/// Eight weights of one row: what lane `item % 32` multiplies of a stream.
template <int Rows>
struct WeightItem {
  float values[kWidth];

  __device__ void load(const float* fn, int item, int hidden, int first_hidden) {
    const int lane = item % kWarp;
    const int row = item / kWarp % StagedWeight<Rows>::kRowTiles * 8 + lane / 4;
    const int stream = item / kWarp / StagedWeight<Rows>::kRowTiles;
    const int h = first_hidden + lane % 4 * kWidth;
    if (row < Rows && h < hidden) {
      const std::int64_t at = (std::int64_t{row} * kStreams + stream) * hidden + h;
      const auto pack = holdfast::detail::load<kWidth>(fn + at);
      for (int i = 0; i < kWidth; ++i) values[i] = pack.values[i];
    } else {
      for (int i = 0; i < kWidth; ++i) values[i] = 0;
    }
  }

  /// Splits each weight: the upper 16 bits of what is left are a bf16, three times.
  __device__ void store(StagedWeight<Rows>& staged, int item) const {
    const int lane = item % kWarp;
    const int tile = item / kWarp % StagedWeight<Rows>::kRowTiles;
    const int stream = item / kWarp / StagedWeight<Rows>::kRowTiles;
    float rest[kWidth];
    for (int i = 0; i < kWidth; ++i) rest[i] = values[i];
    for (int part = 0; part < kParts; ++part) {
      std::uint32_t upper[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        upper[i] = __float_as_uint(rest[i]) & 0xFFFF0000U;
        rest[i] -= __uint_as_float(upper[i]);
      }
      for (int step = 0; step < kSteps; ++step) {
        const std::uint32_t* word = upper + step * 4;
        staged.words[stream][step][tile][part][lane] =
            make_uint2(word[0] >> 16U | word[1], word[2] >> 16U | word[3]);
      }
    }
  }
};

/// Of `Tiles` x 16 tokens: what a lane holds of the sums of a chunk, a segment or all.
template <int Rows, int Tiles>
struct Sums {
  static constexpr int kRowTiles = StagedWeight<Rows>::kRowTiles;
  float mixes[Tiles][kRowTiles][4];
  float squares[Tiles][2];

  __device__ void add(const Sums& other) {
    for (int tile = 0; tile < Tiles; ++tile) {
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
        for (int i = 0; i < 4; ++i) mixes[tile][row_tile][i] += other.mixes[tile][row_tile][i];
      }
      for (int i = 0; i < 2; ++i) squares[tile][i] += other.squares[tile][i];
    }
  }
};

/// The sums of one chunk. `streams[tile][octet]` are the lane's tokens lane / 4 and lane / 4 + 8.
template <int Rows, int Tiles>
__device__ Sums<Rows, Tiles> chunk_sums(const Values (&streams)[Tiles][2][kStreams],
                                        const StagedWeight<Rows>& weight) {
  constexpr int kRowTiles = StagedWeight<Rows>::kRowTiles;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float sums[Tiles][kRowTiles][kParts][4] = {};
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint2 words = weight.words[stream][step][row_tile][part][lane];
          const std::uint32_t b[2] = {words.x, words.y};
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile) {
            const Values& first = streams[tile][0][stream];
            const Values& second = streams[tile][1][stream];
            // Columns 2q and 2q + 8 of a step are elements 4 * step and 4 * step + 2 of the lane's
            // eight: any order will do that is the same for activations and weights.
            const std::uint32_t a[4] = {pair_at(first, 4 * step), pair_at(second, 4 * step),
                                        pair_at(first, 4 * step + 2),
                                        pair_at(second, 4 * step + 2)};
            holdfast::detail::multiply_accumulate(sums[tile][row_tile][part], a, b);
          }
        }
      }
    }
  }
  Sums<Rows, Tiles> result;
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      const auto& parts = sums[tile][row_tile];
      for (int i = 0; i < 4; ++i) {
        result.mixes[tile][row_tile][i] = parts[0][i] + (parts[1][i] + parts[2][i]);
      }
    }
    for (int octet = 0; octet < 2; ++octet) {
      float squares = 0;
      for (int stream = 0; stream < kStreams; ++stream) {
        for (int i = 0; i < kWidth; ++i) {
          const float value = __bfloat162float(streams[tile][octet][stream].values[i]);
          squares = fmaf(value, value, squares);
        }
      }
      squares += __shfl_xor_sync(0xFFFFFFFFU, squares, 1);
      squares += __shfl_xor_sync(0xFFFFFFFFU, squares, 2);
      result.squares[tile][octet] = squares;
    }
  }
  return result;
}

/// One block of `Warps` warps: Warps x Tiles x 16 tokens from blockIdx.x on, and the chunks of
/// blockIdx.y: one with `OneChunk`, else whole segments.
template <int Rows, int Tiles, int Warps, bool OneChunk, class Source>
__device__ void project(const Projection<Source>& op) {
  using Weight = StagedWeight<Rows>;
  constexpr int kThreads = Warps * kWarp;
  constexpr int kItems = (Weight::kItems - 1) / kThreads + 1;
  __shared__ Weight weight;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const std::int64_t first_token =
      (std::int64_t{blockIdx.x} * Warps + thread / kWarp) * (Tiles * kTile) + lane / 4;
  const auto token_of = [first_token](int tile, int octet) {
    return first_token + tile * kTile + octet * (kTile / 2);
  };

  // A warp beyond the batch brings its share of the weight only.
  const bool idle = first_token - lane / 4 >= op.tokens;

  WeightItem<Rows> items[kItems];
  const auto fetch_weight = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kThreads;
      if (item < Weight::kItems) {
        items[i].load(op.fn, item, op.hidden, chunk * SumTree::kChunkHidden);
      }
    }
  };
  // With the weight of `chunk` in items; what it may overwrite has been read.
  const auto add_chunk = [&](int chunk, auto&& meanwhile) {
    Values streams[Tiles][2][kStreams];
    const int h = chunk * SumTree::kChunkHidden + lane % 4 * kWidth;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        if (token_of(tile, octet) < op.tokens && h < op.hidden) {
          op.source.load(token_of(tile, octet), h, streams[tile][octet]);
        } else {
          memset(streams[tile][octet], 0, sizeof streams[tile][octet]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kThreads;
      if (item < Weight::kItems) items[i].store(weight, item);
    }
    __syncthreads();
    meanwhile();
    if (idle) return Sums<Rows, Tiles>{};
    return chunk_sums<Rows, Tiles>(streams, weight);
  };
  const SumTree tree = op.sums.tree;
  const Spread spread = op.sums.spread;
  const auto emit = [&](const Sums<Rows, Tiles>& sums, int partial) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        const std::int64_t token = token_of(tile, octet);
        if (token >= op.tokens) continue;
        float* out =
            op.sums.of(token, kPartialFloats<Rows>) + std::int64_t{partial} * kPartialFloats<Rows>;
#pragma unroll
        for (int row_tile = 0; row_tile < Weight::kRowTiles; ++row_tile) {
          const int row = row_tile * 8 + lane % 4 * 2;
          if (row < Rows) {
            *reinterpret_cast<float2*>(out + row) = make_float2(
                sums.mixes[tile][row_tile][octet * 2], sums.mixes[tile][row_tile][octet * 2 + 1]);
          }
        }
        if (lane % 4 == 0) out[Rows] = sums.squares[tile][octet];
      }
    }
  };

  const int begin = static_cast<int>(blockIdx.y) * spread.block_chunks;
  fetch_weight(begin);
  if constexpr (OneChunk) {
    emit(add_chunk(begin, [] {}), begin);
  } else {
    const int end = (min)(begin + spread.block_chunks, tree.chunks);
    const bool keeps_total = spread.partial_chunks == tree.chunks;
    Sums<Rows, Tiles> segment{};
    Sums<Rows, Tiles> total{};
    for (int chunk = begin; chunk < end; ++chunk) {
      const Sums<Rows, Tiles> sums = add_chunk(chunk, [&] {
        if (chunk + 1 < end) fetch_weight(chunk + 1);  // on its way while this one is multiplied
      });
      __syncthreads();
      if (chunk % tree.segment_chunks == 0) {
        segment = sums;
      } else {
        segment.add(sums);
      }
      if ((chunk + 1) % tree.segment_chunks != 0 && chunk + 1 != tree.chunks) continue;
      const int index = chunk / tree.segment_chunks;
      if (!keeps_total) {
        emit(segment, index);
      } else if (index == 0) {
        total = segment;
      } else {
        total.add(segment);
      }
    }
    if (keeps_total) emit(total, 0);
  }
}

template <int Rows, int Tiles, int Warps, bool OneChunk, class Source,
          class Key = holdfast::detail::KernelKey>
__global__ void __launch_bounds__(Warps* kWarp)
    project_kernel(const __grid_constant__ Projection<Source> op) {
  project<Rows, Tiles, Warps, OneChunk>(op);
}

/// Enqueues the projection of at least one token. `what` names the operation in an error.
template <class File, int Rows, class Source, MessageText Text>
void launch_projection(const Projection<Source>& op, cuda::stream_ref stream, const Text& what) {
  const auto launch = [&](auto kernel, int tokens, int threads) {
    cudaLaunchConfig_t config{};
    config.gridDim =
        dim3(static_cast<unsigned>((op.tokens - 1) / tokens + 1),
             static_cast<unsigned>((op.sums.tree.chunks - 1) / op.sums.spread.block_chunks + 1));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = holdfast::detail::native(stream);
    holdfast::throw_on_error(cudaLaunchKernelEx(&config, kernel, op), what);
  };
  if (op.sums.spread.partial_chunks != 1) {
    launch(project_kernel<Rows, 1, 8, false, Source>, kManyTokensBlock, 8 * kWarp);
  } else {
    launch(project_kernel<Rows, 1, 4, true, Source>, 4 * kTile, 4 * kWarp);
  }
}

/// The rest of the tree, for token `token`, by all `Threads` threads of a block: in thread t < Rows
/// the total of mix t, in thread Rows that of the squares.
template <int Rows, int Threads>
[[nodiscard]] __device__ float total_of(const PartialSums& sums, std::int64_t token) {
  constexpr int kSums = Rows + 1;
  __shared__ float segments[SumTree::kMaxSegments][kSums];
  const float* partials = sums.of(token, kPartialFloats<Rows>);
  const int count = sums.per_token();
  const int per_segment = sums.spread.partial_chunks == 1 ? sums.tree.segment_chunks : 1;
  const int segment_count = (count - 1) / per_segment + 1;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < segment_count * kSums; i += Threads) {
    const int begin = i / kSums * per_segment;
    const int end = (min)(begin + per_segment, count);
    const float* at = partials + std::int64_t{begin} * kPartialFloats<Rows> + i % kSums;
    float sum = *at;
    for (int partial = begin + 1; partial < end; ++partial) sum += *(at += kPartialFloats<Rows>);
    segments[i / kSums][i % kSums] = sum;
  }
  __syncthreads();
  if (thread >= kSums) return 0;
  float sum = segments[0][thread];
  for (int segment = 1; segment < segment_count; ++segment) sum += segments[segment][thread];
  return sum;
}

}  // namespace holdfast::mhc::detail
