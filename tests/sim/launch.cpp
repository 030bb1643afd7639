// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels: what nvcc's objects register, what they call to launch, and the host bodies that tests
// route them to.
//
// A kernel is known by the address of its host stub. nvcc gives template kernels a stub of internal
// linkage in each translation unit, so a launch whose own stub has no route looks for one with the
// same device name. Launch attributes (programmatic launch, clusters) are accepted and mean
// nothing.
#include "state.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace sim {
namespace detail {
namespace {

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared = 0;
  cudaStream_t stream = nullptr;
};

std::vector<Configuration>& configurations() {
  thread_local std::vector<Configuration> pushed;
  return pushed;
}

// These belong to the program and not to the process that reset() begins anew.
std::map<const void*, std::string>& device_names() {
  static auto* const names = new std::map<const void*, std::string>;
  return *names;
}

std::map<const void*, Route>& routes() {
  static auto* const all = new std::map<const void*, Route>;
  return *all;
}

const char* name_of(const void* stub) {
  const auto found = device_names().find(stub);
  return found == device_names().end() ? nullptr : found->second.c_str();
}

const Route* find_route(const void* stub) {
  const auto own = routes().find(stub);
  if (own != routes().end()) return &own->second;
  const char* name = name_of(stub);
  if (name == nullptr) return nullptr;
  for (const auto& [other, route] : routes()) {
    const char* other_name = name_of(other);
    if (other_name != nullptr && std::strcmp(name, other_name) == 0) return &route;
  }
  return nullptr;
}

bool known(const void* stub) { return name_of(stub) != nullptr || routes().count(stub) != 0; }

constexpr unsigned kMaxThreads = 1024;

bool valid_shape(dim3 grid, dim3 block) {
  const auto threads = std::uint64_t{block.x} * block.y * block.z;
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0;
  return !empty && block.z <= 64 && threads <= kMaxThreads && grid.x <= 0x7FFFFFFFU &&
         grid.y <= 0xFFFFU && grid.z <= 0xFFFFU;
}

cudaError_t occupancy(int* blocks, const void* stub, int threads) {
  if (blocks == nullptr || threads <= 0) return cudaErrorInvalidValue;
  if (!known(stub)) return cudaErrorInvalidDeviceFunction;
  constexpr int kThreadsPerMultiprocessor = 2048;
  constexpr int kBlocksPerMultiprocessor = 32;
  const bool fits = threads <= static_cast<int>(kMaxThreads);
  *blocks = fits ? std::min(kThreadsPerMultiprocessor / threads, kBlocksPerMultiprocessor) : 0;
  return cudaSuccess;
}

cudaError_t describe(cudaFuncAttributes* out, const void* stub) {
  if (out == nullptr) return cudaErrorInvalidValue;
  if (!known(stub)) return cudaErrorInvalidDeviceFunction;
  *out = {};
  out->maxThreadsPerBlock = static_cast<int>(kMaxThreads);
  out->numRegs = 32;
  out->ptxVersion = 90;
  out->binaryVersion = 90;
  out->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

}  // namespace

cudaError_t describe_launch(Ref<Kernel>* out, const void* stub, dim3 grid, dim3 block, void** args,
                            std::size_t shared) {
  const Route* route = find_route(stub);
  if (route == nullptr) {
    const char* name = name_of(stub);
    std::fprintf(stderr, "sim: no route for the kernel %s\n", name == nullptr ? "(unknown)" : name);
    return cudaErrorInvalidDeviceFunction;
  }
  if (!valid_shape(grid, block)) return cudaErrorInvalidConfiguration;
  if (args == nullptr && !route->sizes.empty()) return cudaErrorInvalidValue;
  *out = Ref<Kernel>(
      new Kernel{0, stub, grid, block, shared, route->body, Arguments(route->sizes, args), {}});
  return cudaSuccess;
}

Work body_of(const Ref<Kernel>& kernel) {
  return
      [body = kernel->body, kept = kernel->arguments, grid = kernel->grid, block = kernel->block] {
        // A kernel may write to its parameters; the next replay must not see that.
        Arguments own = kept;
        std::vector<void*> pointers = own.pointers();
        body(grid, block, pointers.data());
      };
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** args, std::size_t shared,
                   cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  Ref<Kernel> kernel;
  const cudaError_t code = describe_launch(&kernel, stub, grid, block, args, shared);
  if (code != cudaSuccess) return code;
  if (stream->device != this_thread().device) return cudaErrorInvalidResourceHandle;
  return submit(*stream, cudaGraphNodeTypeKernel, body_of(kernel), kernel);
}

extern "C" {

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args,
                             std::size_t shared, cudaStream_t stream) {
  return api("cudaLaunchKernel",
             [&](Lock&) { return launch(stub, grid, block, args, shared, stream); });
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** args) {
  return api("cudaLaunchKernelExC", [&](Lock&) {
    if (config == nullptr || (config->numAttrs != 0 && config->attrs == nullptr)) {
      return cudaErrorInvalidValue;
    }
    return launch(stub, config->gridDim, config->blockDim, args, config->dynamicSmemBytes,
                  config->stream);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  return api("cudaFuncGetAttributes", [&](Lock&) { return describe(attributes, stub); });
}

cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  return api("cudaFuncSetAttribute", [&](Lock&) {
    if (!known(stub)) return cudaErrorInvalidDeviceFunction;
    const bool valid = attribute >= cudaFuncAttributeMaxDynamicSharedMemorySize &&
                       attribute < cudaFuncAttributeMax && value >= -1;
    return valid ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* stub,
                                                          int threads, std::size_t /*shared*/) {
  return api("cudaOccupancyMaxActiveBlocksPerMultiprocessor",
             [&](Lock&) { return occupancy(blocks, stub, threads); });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* stub,
                                                                   int threads,
                                                                   std::size_t /*shared*/,
                                                                   unsigned flags) {
  return api("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", [&](Lock&) {
    if (flags > cudaOccupancyDisableCachingOverride) return cudaErrorInvalidValue;
    return occupancy(blocks, stub, threads);
  });
}

// What nvcc 13.0 makes objects call. A cudaKernel_t is the stub's address itself, so it outlives
// reset().

void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void** /*binary*/) {}
void __cudaUnregisterFatBinary(void** /*binary*/) {}
char __cudaInitModule(void** /*binary*/) { return 1; }

void __cudaRegisterFunction(void** /*binary*/, const char* stub, char* /*device_function*/,
                            const char* device_name, int /*thread_limit*/, uint3* /*tid*/,
                            uint3* /*bid*/, dim3* /*block*/, dim3* /*grid*/, int* /*warp_size*/) {
  const Lock lock;
  device_names()[stub] = device_name;
}

// Variables of device code have host storage of their own; nothing needs their names.
void __cudaRegisterVar(void** /*binary*/, char* /*variable*/, char* /*address*/,
                       const char* /*name*/, int /*ext*/, std::size_t /*size*/, int /*constant*/,
                       int /*global*/) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     cudaStream_t stream) {
  configurations().push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  if (configurations().empty()) return cudaErrorMissingConfiguration;
  const Configuration top = configurations().back();
  configurations().pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                               std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

}  // extern "C"

}  // namespace detail

void route(const void* stub, std::vector<std::size_t> argument_sizes, KernelBody body) {
  const detail::Lock lock;
  detail::routes()[stub] = {std::move(argument_sizes), std::move(body)};
}

}  // namespace sim
