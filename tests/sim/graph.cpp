// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Graphs: recorded nodes, executable copies of them, and launches.
//
// An executable owns copies of the nodes' work, so the graph may go first. Its launches are ordered
// after each other, and run what it was when they were made. Nodes run one at a time, in the order
// of capture or in one chosen by the schedule's seed; for TSan, unordered nodes are unordered.
#include "state.hpp"

#include <algorithm>
#include <memory>
#include <numeric>

namespace sim::detail {
namespace {

template <class Map>
auto* find(Map& map, typename Map::key_type handle) {
  const auto found = map.find(handle);
  return found == map.end() ? nullptr : found->second.get();
}

Ref<Executable::Steps> compile(const Graph& graph) {
  Ref<Executable::Steps> result(new Executable::Steps);
  std::map<const Node*, std::size_t> index;
  for (const Ref<Node>& node : graph.nodes) {
    Executable::Step step;
    step.node = node;
    step.body = node->body;
    for (const Ref<Node>& earlier : node->after) step.after.push_back(index.at(earlier.get()));
    index[node.get()] = result->all.size();
    result->all.push_back(std::move(step));
  }
  return result;
}

Ref<Executable::Steps> copy_of(const Ref<Executable::Steps>& steps) {
  Ref<Executable::Steps> result(new Executable::Steps);
  result->all = steps->all;
  return result;
}

std::vector<std::size_t> choose_order(const std::vector<Executable::Step>& steps) {
  std::vector<std::size_t> order(steps.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::optional<std::mt19937_64>& schedule = state().schedule;
  if (!schedule) return order;

  std::vector<std::size_t> open = std::move(order);
  std::vector<bool> finished(steps.size(), false);
  order.clear();
  while (!open.empty()) {
    const auto blocked = std::partition(open.begin(), open.end(), [&](std::size_t i) {
      return std::all_of(steps[i].after.begin(), steps[i].after.end(),
                         [&](std::size_t earlier) { return finished[earlier]; });
    });
    const auto chosen =
        open.begin() + static_cast<std::ptrdiff_t>(
                           (*schedule)() % static_cast<std::size_t>(blocked - open.begin()));
    order.push_back(*chosen);
    finished[*chosen] = true;
    open.erase(chosen);
  }
  return order;
}

// Runs without the lock, on the fiber of the stream that the graph was launched into.
void replay(const std::vector<Executable::Step>& steps, const std::vector<std::size_t>& order) {
  Edge start;
  std::vector<Edge> ends(steps.size());
  start.release();
  for (const std::size_t i : order) {
    Fiber fiber;
    fiber.run([&] {
      start.acquire();
      for (const std::size_t earlier : steps[i].after) ends[earlier].acquire();
      if (steps[i].body) steps[i].body();
      ends[i].release();
    });
  }
  for (Edge& end : ends) end.acquire();
}

cudaError_t instantiate(cudaGraphExec_t* out, cudaGraph_t handle, unsigned long long flags) {
  const Graph* graph = find(state().graphs, handle);
  constexpr unsigned long long kKnown =
      cudaGraphInstantiateFlagAutoFreeOnLaunch | cudaGraphInstantiateFlagUpload |
      cudaGraphInstantiateFlagDeviceLaunch | cudaGraphInstantiateFlagUseNodePriority;
  if (out == nullptr || graph == nullptr || (flags & ~kKnown) != 0) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t code = check_unsafe();
  if (code != cudaSuccess) return code;
  const Ref<Executable> executable(new Executable);
  executable->steps = compile(*graph);
  executable->handle = state().executable_handles.take();
  state().executables[executable->handle] = executable;
  *out = executable->handle;
  return cudaSuccess;
}

cudaError_t launch_graph(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  const Ref<Executable> executable(find(state().executables, handle));
  if (!executable) return cudaErrorInvalidValue;
  Stream* stream = find_stream(stream_handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture) {  // no child graph: the call is refused
    invalidate(*stream->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  std::vector<std::size_t> order = choose_order(executable->steps->all);
  Work body = [steps = executable->steps, order = std::move(order)] { replay(steps->all, order); };
  const cudaError_t code = check_legacy(*stream, true);
  if (code != cudaSuccess) return code;
  std::vector<Ref<Item>> after;
  if (executable->last) after.push_back(executable->last);
  executable->last = enqueue(*stream, std::move(body), std::move(after));
  return cudaSuccess;
}

cudaError_t get_nodes(cudaGraph_t handle, cudaGraphNode_t* nodes, std::size_t* count) {
  const Graph* graph = find(state().graphs, handle);
  if (graph == nullptr || count == nullptr) return cudaErrorInvalidValue;
  const std::size_t available = graph->nodes.size();
  if (nodes != nullptr) {
    for (std::size_t i = 0; i < *count; ++i) {
      nodes[i] = i < available ? graph->nodes[i]->handle : nullptr;
    }
    *count = std::min(*count, available);
  } else {
    *count = available;
  }
  return cudaSuccess;
}

Kernel* kernel_of(const Node* node) {
  return node == nullptr || node->type != cudaGraphNodeTypeKernel ? nullptr : node->kernel.get();
}

// A kernel node's parameters, ours or the caller's.
cudaError_t get_params(cudaGraphNode_t handle, cudaKernelNodeParams* out) {
  Kernel* kernel = kernel_of(find(state().nodes, handle));
  if (kernel == nullptr || out == nullptr) return cudaErrorInvalidValue;
  kernel->handed_out = kernel->arguments.pointers();
  *out = {};
  out->func = const_cast<void*>(kernel->stub);
  out->gridDim = kernel->grid;
  out->blockDim = kernel->block;
  out->sharedMemBytes = static_cast<unsigned>(kernel->shared);
  out->kernelParams = kernel->handed_out.data();
  return cudaSuccess;
}

cudaError_t describe_launch(Ref<Kernel>* out, const cudaKernelNodeParams* params) {
  if (params == nullptr || params->func == nullptr || params->extra != nullptr) {
    return cudaErrorInvalidValue;
  }
  return detail::describe_launch(out, params->func, params->gridDim, params->blockDim,
                                 params->kernelParams, params->sharedMemBytes);
}

cudaError_t set_params(cudaGraphNode_t handle, const cudaKernelNodeParams* params) {
  Node* node = find(state().nodes, handle);
  if (kernel_of(node) == nullptr) return cudaErrorInvalidValue;
  Ref<Kernel> kernel;
  const cudaError_t code = describe_launch(&kernel, params);
  if (code != cudaSuccess) return code;
  node->kernel = kernel;
  node->body = body_of(kernel);
  return cudaSuccess;
}

cudaError_t set_params(cudaGraphExec_t exec, cudaGraphNode_t handle,
                       const cudaKernelNodeParams* params) {
  Executable* executable = find(state().executables, exec);
  const Node* node = find(state().nodes, handle);
  if (executable == nullptr || kernel_of(node) == nullptr) return cudaErrorInvalidValue;
  Ref<Kernel> kernel;
  const cudaError_t code = describe_launch(&kernel, params);
  if (code != cudaSuccess) return code;
  const Ref<Executable::Steps> steps = copy_of(executable->steps);
  const auto step = std::find_if(steps->all.begin(), steps->all.end(),
                                 [node](const auto& each) { return each.node.get() == node; });
  if (step == steps->all.end()) return cudaErrorInvalidValue;
  step->body = body_of(kernel);
  executable->steps = steps;
  return cudaSuccess;
}

cudaError_t update(cudaGraphExec_t exec, cudaGraph_t handle, cudaGraphExecUpdateResultInfo* info) {
  Executable* executable = find(state().executables, exec);
  const Graph* graph = find(state().graphs, handle);
  if (executable == nullptr || graph == nullptr || info == nullptr) return cudaErrorInvalidValue;
  *info = {};
  const Ref<Executable::Steps> steps = copy_of(executable->steps);
  const Ref<Executable::Steps> wanted = compile(*graph);
  const auto fail = [info](cudaGraphExecUpdateResult why) {
    info->result = why;
    return cudaErrorGraphExecUpdateFailure;
  };
  if (steps->all.size() != wanted->all.size()) {
    return fail(cudaGraphExecUpdateErrorTopologyChanged);
  }
  for (std::size_t i = 0; i < steps->all.size(); ++i) {
    Executable::Step& step = steps->all[i];
    Executable::Step& now = wanted->all[i];
    if (step.after != now.after) return fail(cudaGraphExecUpdateErrorTopologyChanged);
    if (step.node->type != now.node->type) return fail(cudaGraphExecUpdateErrorNodeTypeChanged);
    step.body = std::move(now.body);
  }
  executable->steps = steps;
  info->result = cudaGraphExecUpdateSuccess;
  return cudaSuccess;
}

}  // namespace

Ref<Graph> create_graph() {
  Ref<Graph> graph(new Graph);
  graph->handle = state().graph_handles.take();
  state().graphs[graph->handle] = graph;
  return graph;
}

void destroy_graph(Graph& graph) {
  for (const Ref<Node>& node : graph.nodes) {
    state().nodes.erase(node->handle);
    state().node_handles.give_back(node->handle);
    node->after.clear();  // a long chain would be destroyed by recursion
  }
  graph.nodes.clear();
  state().graph_handles.give_back(graph.handle);
  state().graphs.erase(graph.handle);
}

Ref<Node> add_node(Graph& graph, cudaGraphNodeType type, Work body, std::vector<Ref<Node>> after) {
  Ref<Node> node(new Node);
  node->handle = state().node_handles.take();
  node->type = type;
  node->body = std::move(body);
  node->after = std::move(after);
  state().nodes[node->handle] = node;
  graph.nodes.push_back(node);
  return node;
}

extern "C" {

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return api("cudaGraphGetNodes", [&](Lock&) { return get_nodes(graph, nodes, count); });
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t handle, cudaGraphNodeType* type) {
  return api("cudaGraphNodeGetType", [&](Lock&) {
    const Node* node = find(state().nodes, handle);
    if (node == nullptr || type == nullptr) return cudaErrorInvalidValue;
    *type = node->type;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams* params) {
  return api("cudaGraphKernelNodeGetParams", [&](Lock&) { return get_params(node, params); });
}

cudaError_t cudaGraphKernelNodeSetParams(cudaGraphNode_t node, const cudaKernelNodeParams* params) {
  return api("cudaGraphKernelNodeSetParams", [&](Lock&) { return set_params(node, params); });
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t executable, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  return api("cudaGraphExecKernelNodeSetParams",
             [&](Lock&) { return set_params(executable, node, params); });
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  return api("cudaGraphExecUpdate", [&](Lock&) { return update(executable, graph, info); });
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  return api("cudaGraphUpload", [&](Lock&) {
    if (state().executables.count(executable) == 0) return cudaErrorInvalidValue;
    return find_stream(stream) == nullptr ? cudaErrorInvalidResourceHandle : cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph,
                                 unsigned long long flags) {
  return api("cudaGraphInstantiate", [&](Lock&) { return instantiate(out, graph, flags); });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph,
                                          unsigned long long flags) {
  return api("cudaGraphInstantiateWithFlags",
             [&](Lock&) { return instantiate(out, graph, flags); });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return api("cudaGraphLaunch", [&](Lock&) { return launch_graph(executable, stream); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  return api("cudaGraphDestroy", [&](Lock&) {
    const Ref<Graph> graph(find(state().graphs, handle));
    if (!graph || graph->capturing) return cudaErrorInvalidValue;
    destroy_graph(*graph);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  return api("cudaGraphExecDestroy", [&](Lock&) {
    if (state().executables.count(handle) == 0) return cudaErrorInvalidValue;
    const cudaError_t code = check_unsafe();
    if (code != cudaSuccess) return code;
    state().executables.erase(handle);
    state().executable_handles.give_back(handle);
    return cudaSuccess;
  });
}

}  // extern "C"

}  // namespace sim::detail
