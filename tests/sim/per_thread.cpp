// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// The entries of code compiled with per-thread default streams: handle 0 means the calling thread's
// own stream.
//
// Each does no more than translate the handle, and counts under its plain name.
#include "state.hpp"

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#error "the simulation defines both flavours itself"
#endif

namespace sim::detail {
namespace {

cudaStream_t own(cudaStream_t stream) { return stream == nullptr ? cudaStreamPerThread : stream; }

}  // namespace

extern "C" {

cudaError_t cudaMemcpy_ptds(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  return api("cudaMemcpy", [&](Lock& lock) {
    return copy(lock, to, from, size, kind, cudaStreamPerThread, true);
  });
}

cudaError_t cudaMemset_ptds(void* to, int value, std::size_t size) {
  return api("cudaMemset",
             [&](Lock& lock) { return set(lock, to, value, size, cudaStreamPerThread, true); });
}

cudaError_t cudaMemcpyAsync_ptsz(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                                 cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, kind, own(stream));
}

cudaError_t cudaMemsetAsync_ptsz(void* to, int value, std::size_t size, cudaStream_t stream) {
  return cudaMemsetAsync(to, value, size, own(stream));
}

cudaError_t cudaGraphLaunch_ptsz(cudaGraphExec_t executable, cudaStream_t stream) {
  return cudaGraphLaunch(executable, own(stream));
}

cudaError_t cudaStreamBeginCapture_ptsz(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(own(stream), mode);
}

cudaError_t cudaStreamEndCapture_ptsz(cudaStream_t stream, cudaGraph_t* graph) {
  return cudaStreamEndCapture(own(stream), graph);
}

cudaError_t cudaStreamGetCaptureInfo_ptsz(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                          unsigned long long* id, cudaGraph_t* graph,
                                          const cudaGraphNode_t** dependencies,
                                          const cudaGraphEdgeData** data, std::size_t* count) {
  return cudaStreamGetCaptureInfo(own(stream), status, id, graph, dependencies, data, count);
}

cudaError_t cudaStreamIsCapturing_ptsz(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamIsCapturing(own(stream), status);
}

cudaError_t cudaStreamQuery_ptsz(cudaStream_t stream) { return cudaStreamQuery(own(stream)); }

cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t stream) {
  return cudaStreamSynchronize(own(stream));
}

cudaError_t cudaStreamGetDevice_ptsz(cudaStream_t stream, int* device) {
  return cudaStreamGetDevice(own(stream), device);
}

cudaError_t cudaStreamGetFlags_ptsz(cudaStream_t stream, unsigned* flags) {
  return cudaStreamGetFlags(own(stream), flags);
}

cudaError_t cudaStreamGetId_ptsz(cudaStream_t stream, unsigned long long* id) {
  return cudaStreamGetId(own(stream), id);
}

cudaError_t cudaStreamGetPriority_ptsz(cudaStream_t stream, int* priority) {
  return cudaStreamGetPriority(own(stream), priority);
}

cudaError_t cudaEventRecord_ptsz(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecord(event, own(stream));
}

cudaError_t cudaStreamWaitEvent_ptsz(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return cudaStreamWaitEvent(own(stream), event, flags);
}

cudaError_t cudaLaunchHostFunc_ptsz(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return cudaLaunchHostFunc(own(stream), function, data);
}

cudaError_t cudaLaunchKernel_ptsz(const void* stub, dim3 grid, dim3 block, void** args,
                                  std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(stub, grid, block, args, shared, own(stream));
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                    std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, own(stream));
}

cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t* config, const void* stub,
                                     void** args) {
  if (config == nullptr) return cudaLaunchKernelExC(config, stub, args);
  cudaLaunchConfig_t translated = *config;
  translated.stream = own(config->stream);
  return cudaLaunchKernelExC(&translated, stub, args);
}

cudaError_t cudaGetDriverEntryPointByVersion_ptsz(const char* name, void** out, unsigned version,
                                                  unsigned long long flags,
                                                  cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, version, flags, result);
}

}  // extern "C"

}  // namespace sim::detail
