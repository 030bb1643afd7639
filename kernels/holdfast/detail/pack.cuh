// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Element types of kernels, and loads and stores of several elements at once.
///
/// Everything here gives the same bits on the host and on the device, except which NaN a conversion
/// of a NaN gives.

#include "holdfast/detail/cxx20.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace holdfast::detail {

template <class T>
concept Floating =
    std::same_as<T, float> || std::same_as<T, __nv_bfloat16> || std::same_as<T, __half>;

/// The unsigned integer of `Bytes` bytes: copies through it keep every bit, those of a NaN too.
template <std::size_t Bytes>
using Raw = std::conditional_t<
    Bytes == 1, unsigned char,
    std::conditional_t<Bytes == 2, unsigned short,
                       std::conditional_t<Bytes == 4, unsigned int, unsigned long long>>>;

/// The widest access of one thread on every supported architecture, in bytes.
inline constexpr int kAccessBytes = 16;

/// Elements per thread with which the narrower of two types fills one access; the wider one then
/// takes several whole accesses.
template <class A, class B>
inline constexpr int kPackWidth = kAccessBytes /
                                  static_cast<int>(sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));

[[nodiscard]] inline bool is_aligned(const void* address) noexcept {
  return reinterpret_cast<std::uintptr_t>(address) % kAccessBytes == 0;
}

/// Whether `count` elements of T (negative too) are whole accesses.
template <class T>
[[nodiscard]] bool is_aligned(std::int64_t count) noexcept {
  return count % (kAccessBytes / static_cast<int>(sizeof(T))) == 0;
}

/// One access on the host. Aligned, so that UBSan sees there what would fault on the device.
struct alignas(kAccessBytes) HostAccess {
  unsigned char bytes[kAccessBytes];  // unsigned char: may alias any type
};

/// A T at any byte of a packed buffer, in the order of its bytes.
template <class T>
struct Unaligned {
  unsigned char bytes[sizeof(T)];
};

template <class From>
struct ElementOf {
  using Type = From;
};
template <class T>
struct ElementOf<Unaligned<T>> {
  using Type = T;
};
/// What a load from `const From*` gives: From itself, and of Unaligned<T> the T.
template <class From>
using Element = typename ElementOf<From>::Type;

template <class T, int Width>
struct Pack {
  static constexpr int kAccesses = Width * static_cast<int>(sizeof(T)) / kAccessBytes;
  T values[Width];
};

/// `Width` elements at `address`. Several elements are taken in accesses of 16 bytes, to which the
/// address must be aligned. They carry no cache hint on purpose: on an H200, loads that L2 may
/// evict first cost 6 % of the bandwidth of a sum beside stores that it may keep (31.7 against 30.0
/// us for 64 matrices of [24, 4, 4096] f32).
template <int Width, class T>
[[nodiscard]] __host__ __device__ Pack<T, Width> load(const T* address) {
  Pack<T, Width> pack;
  if constexpr (Width == 1) {
#ifdef __CUDA_ARCH__
    const auto raw = __ldg(reinterpret_cast<const Raw<sizeof(T)>*>(address));
    memcpy(&pack, &raw, sizeof(pack));
#else
    pack.values[0] = *address;
#endif
  } else {
    constexpr int kAccesses = Pack<T, Width>::kAccesses;
#ifdef __CUDA_ARCH__
    uint4 raw[kAccesses];
    for (int i = 0; i < kAccesses; ++i) raw[i] = reinterpret_cast<const uint4*>(address)[i];
#else
    HostAccess raw[kAccesses];
    for (int i = 0; i < kAccesses; ++i) raw[i] = reinterpret_cast<const HostAccess*>(address)[i];
#endif
    memcpy(&pack, raw, sizeof(pack));
  }
  return pack;
}

/// The element at `address`, which may be any. Byte by byte, so that nothing outside the source is
/// touched: the rest of an aligned word at its ends may belong to others, or to no one. Threads
/// side by side read elements side by side, so a warp's loads of single bytes share cache lines.
template <int Width, class T>
[[nodiscard]] __host__ __device__ Pack<T, Width> load(const Unaligned<T>* address) {
  static_assert(Width == 1, "several elements at once need an aligned address");
  unsigned char bytes[sizeof(T)];
  for (std::size_t i = 0; i < sizeof(T); ++i) {
#ifdef __CUDA_ARCH__
    bytes[i] = __ldg(address->bytes + i);
#else
    bytes[i] = address->bytes[i];
#endif
  }
  Pack<T, Width> pack;
  memcpy(&pack, bytes, sizeof(pack));
  return pack;
}

#ifdef __CUDA_ARCH__
/// One access of 16 bytes to global memory. In words of C++ the compiler may take it apart again
/// where it made the words one by one, and write each by itself.
__device__ inline void store_access(void* address, const uint4& access) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(access.x), "r"(access.y),
                 "r"(access.z), "r"(access.w)
               : "memory");
}
#else
inline void store_access(void* address, const HostAccess& access) {
  *static_cast<HostAccess*>(address) = access;
}
#endif

/// Writes `pack` at `address` in global memory, aligned as for load. The lines stay cached: readers
/// come next.
template <class T, int Width>
__host__ __device__ void store(T* address, const Pack<T, Width>& pack) {
  if constexpr (Width == 1) {
    *address = pack.values[0];
  } else {
    constexpr int kAccesses = Pack<T, Width>::kAccesses;
#ifdef __CUDA_ARCH__
    using Access = uint4;
#else
    using Access = HostAccess;
#endif
    Access raw[kAccesses];
    memcpy(raw, &pack, sizeof(pack));
    for (int i = 0; i < kAccesses; ++i)
      store_access(reinterpret_cast<Access*>(address) + i, raw[i]);
  }
}

[[nodiscard]] __host__ __device__ inline float to_float(float value) { return value; }
[[nodiscard]] __host__ __device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
[[nodiscard]] __host__ __device__ inline float to_float(__half value) {
  return __half2float(value);
}

/// a + b, rounded to nearest even, also where a file is compiled to flush subnormals or to
/// contract.
[[nodiscard]] __host__ __device__ inline float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
#else
  return a + b;
#endif
}

/// `value` rounded to To, to nearest with ties to even; beyond the range to infinity.
template <Floating To>
[[nodiscard]] __host__ __device__ To from_float(float value) {
  if constexpr (std::same_as<To, float>) {
    return value;
  } else if constexpr (std::same_as<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return __float2half_rn(value);
  }
}

}  // namespace holdfast::detail
