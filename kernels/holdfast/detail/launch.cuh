// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// One kernel and one launch for work that is a grid of independent items.
///
/// A Work says what happens at (row, column); this file says which thread does it. The same Work
/// runs on the host, where the tests execute it under a sanitizer. Kernels here never trigger
/// programmatic launch early: a dependent launch sees everything they wrote.

#include "holdfast/detail/capture.hpp"
#include "holdfast/error.hpp"

#include <cuda/stream_ref>
#include <cuda_runtime.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

namespace holdfast::detail {

/// The file that is being compiled, as part of the type of every recipe and of the name of every
/// function that launches a kernel. Files of one program may be compiled for other architectures or
/// with other flags, and the linker merges host functions of one name: some files would then launch
/// the kernels of another, which the device may not have, or which round differently. No macro
/// tells sm_90a from sm_90, or --use_fast_math, where host code is compiled; a type without linkage
/// tells any two files apart.
namespace {
struct ThisFile {};
}  // namespace

/// The same for kernels. Compiled whole, a file has kernels of its own under whatever name; only
/// relocatable device code (-rdc=true) merges those of several files.
#ifdef __CUDACC_RDC__
using KernelKey = ThisFile;
#else
using KernelKey = void;
#endif

/// Threads of a block, in any shape. With 128 the smallest matrix of interest (24 x 4096 f32, 192
/// blocks) reaches all 132 SMs of an H200, and 16 blocks still fill an SM for the large ones.
inline constexpr int kThreads = 128;

/// Up to this, int32 counts rows, columns and elements. The step to a thread's next item does not
/// overflow either: it is at most kMaxGridY * kThreads rows, or the columns rounded up to whole
/// blocks.
inline constexpr std::int64_t kMaxSmall = (std::int64_t{1} << 30) - kThreads;

/// A matrix of work items, passed to the kernel by value. `line(row)` is what the items of one row
/// share (addresses, decoded indices); `work(line, column)` does one item. `Index` counts rows and
/// columns; it may be int32 where neither is above kMaxSmall.
template <class W>
concept Work = std::is_trivially_copyable_v<W> && std::signed_integral<typename W::Index> &&
    requires(const W& work, typename W::Index index) {
  requires std::same_as<decltype(work.rows), typename W::Index>;
  requires std::same_as<decltype(work.columns), typename W::Index>;
  work(work.line(index), index);
};

/// What one thread does: every `row_step`-th row from `row`, and in it every `column_step`-th
/// column from `column`.
template <Work W>
__host__ __device__ void run_items(const W& work, typename W::Index row, typename W::Index row_step,
                                   typename W::Index column, typename W::Index column_step) {
  for (; row < work.rows; row += row_step) {
    const auto line = work.line(row);
    for (auto at = column; at < work.columns; at += column_step) work(line, at);
  }
}

/// Grid: (columns / block.x, rows / block.y), each limited to what CUDA allows; run_items strides
/// over the rest.
template <Work W, class Key = KernelKey>
__global__ void __launch_bounds__(kThreads) work_kernel(const __grid_constant__ W work) {
  using Index = typename W::Index;
  run_items(work, static_cast<Index>(blockIdx.y * blockDim.y + threadIdx.y),  // < 2^16 * 2^7
            static_cast<Index>(gridDim.y * blockDim.y),
            static_cast<Index>(blockIdx.x) * static_cast<Index>(blockDim.x) +
                static_cast<Index>(threadIdx.x),
            static_cast<Index>(gridDim.x) * static_cast<Index>(blockDim.x));
}

inline constexpr std::int64_t kMaxGridX = 2147483647;  // what CUDA allows, in blocks
inline constexpr std::int64_t kMaxGridY = 65535;

struct GridShape {
  dim3 grid;
  dim3 block;
};

/// The shape for `rows` x `columns` items, both at least 1. Where a row has fewer columns than a
/// block has threads, the block takes several rows.
[[nodiscard]] inline GridShape grid_shape(std::int64_t rows, std::int64_t columns) {
  int across = 1;
  while (across < kThreads && across < columns) across *= 2;
  const int down = kThreads / across;
  const std::int64_t x = (columns - 1) / across + 1;
  const std::int64_t y = (rows - 1) / down + 1;
  return {dim3(static_cast<unsigned>((std::min)(x, kMaxGridX)),
               static_cast<unsigned>((std::min)(y, kMaxGridY))),
          dim3(static_cast<unsigned>(across), static_cast<unsigned>(down))};
}

/// Enqueues `work`; nothing when it has no items. `what` names the operation in an error.
/// \stream enqueues only; allowed while capturing: yes
/// \cost one launch, or none
/// \throws CudaError if the launch is refused.
template <Work W, MessageText Text, class File = ThisFile>
void launch(const W& work, cuda::stream_ref stream, const Text& what) {
  if (work.rows <= 0 || work.columns <= 0) return;
  const GridShape shape = grid_shape(work.rows, work.columns);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.stream = native(stream);
  throw_on_error(cudaLaunchKernelEx(&config, work_kernel<W>, work), what);
}

}  // namespace holdfast::detail
