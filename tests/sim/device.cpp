// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// The two devices and what they say of themselves: a plausible Hopper, not a particular one.
#include "state.hpp"

#include <cstring>

namespace sim::detail {
namespace {

constexpr int kThreadsPerBlock = 1024;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kSharedPerBlock = 48 << 10;
constexpr int kSharedPerBlockOptin = 227 << 10;
constexpr int kSharedPerMultiprocessor = 228 << 10;
constexpr int kRegisters = 65536;
constexpr int kL2Bytes = 50 << 20;
constexpr int kLowestPriority = 0;
constexpr int kHighestPriority = -5;

bool valid(int device) { return device >= 0 && device < kDevices; }

cudaError_t describe(cudaDeviceProp* out, int device) {
  if (out == nullptr) return cudaErrorInvalidValue;
  if (!valid(device)) return cudaErrorInvalidDevice;
  *out = {};
  std::strcpy(out->name, "holdfast simulation");
  out->totalGlobalMem = state().capacity.at(static_cast<std::size_t>(device));
  out->sharedMemPerBlock = kSharedPerBlock;
  out->sharedMemPerBlockOptin = kSharedPerBlockOptin;
  out->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  out->regsPerBlock = kRegisters;
  out->regsPerMultiprocessor = kRegisters;
  out->warpSize = 32;
  out->maxThreadsPerBlock = kThreadsPerBlock;
  out->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  out->major = 9;
  out->minor = 0;
  out->multiProcessorCount = kMultiprocessors;
  out->l2CacheSize = kL2Bytes;
  out->unifiedAddressing = 1;
  out->concurrentKernels = 1;
  out->canMapHostMemory = 1;
  out->cooperativeLaunch = 1;
  out->clusterLaunch = 1;
  out->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t attribute_of(int* out, cudaDeviceAttr attribute, int device) {
  if (out == nullptr) return cudaErrorInvalidValue;
  if (!valid(device)) return cudaErrorInvalidDevice;
  static const std::map<cudaDeviceAttr, int> known = {
      {cudaDevAttrMaxThreadsPerBlock, kThreadsPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedPerBlockOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedPerMultiprocessor},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1 << 10},
      {cudaDevAttrMaxRegistersPerBlock, kRegisters},
      {cudaDevAttrMaxThreadsPerMultiProcessor, kThreadsPerMultiprocessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrL2CacheSize, kL2Bytes},
      {cudaDevAttrMaxGridDimX, 0x7FFFFFFF},
      {cudaDevAttrMaxGridDimY, 0xFFFF},
      {cudaDevAttrMaxGridDimZ, 0xFFFF},
      {cudaDevAttrMaxBlockDimX, kThreadsPerBlock},
      {cudaDevAttrMaxBlockDimY, kThreadsPerBlock},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrClusterLaunch, 1},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrMemoryPoolsSupported, 0},
      {cudaDevAttrManagedMemory, 0},
  };
  const auto found = known.find(attribute);
  if (found == known.end()) return cudaErrorInvalidValue;
  *out = found->second;
  return cudaSuccess;
}

cudaError_t put(int* out, int value) {
  if (out == nullptr) return cudaErrorInvalidValue;
  *out = value;
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return api("cudaGetDeviceCount", [&](Lock&) { return put(count, kDevices); });
}

cudaError_t cudaGetDevice(int* device) {
  return api("cudaGetDevice", [&](Lock&) { return put(device, this_thread().device); });
}

cudaError_t cudaSetDevice(int device) {
  return api("cudaSetDevice", [&](Lock&) {
    if (!valid(device)) return cudaErrorInvalidDevice;
    this_thread().device = device;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return api("cudaGetDeviceProperties", [&](Lock&) { return describe(properties, device); });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return api("cudaDeviceGetAttribute",
             [&](Lock&) { return attribute_of(value, attribute, device); });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  return api("cudaDeviceGetStreamPriorityRange", [&](Lock&) {
    if (lowest != nullptr) *lowest = kLowestPriority;
    if (highest != nullptr) *highest = kHighestPriority;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDeviceFlags(unsigned flags) {
  return api("cudaSetDeviceFlags", [&](Lock&) {
    return (flags & ~unsigned{cudaDeviceMask}) == 0 ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return api("cudaRuntimeGetVersion", [&](Lock&) { return put(version, kVersion); });
}

cudaError_t cudaDriverGetVersion(int* version) {
  return api("cudaDriverGetVersion", [&](Lock&) { return put(version, kVersion); });
}

}  // extern "C"

}  // namespace sim::detail
