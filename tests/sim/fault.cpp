// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Faults: counting the calls of a stretch of a test, and failing a chosen one.
//
// A failed call has no effect but its error. Calls made from inside a host function or a kernel
// body are refused before they are counted.
#include "state.hpp"

namespace sim {
namespace detail {

cudaError_t enter(const char* name) {
  State& s = state();
  if (s.counting) s.calls.emplace_back(name);
  Fault& fault = s.fault;
  if (!fault.armed || (!fault.only.empty() && fault.only != name)) return cudaSuccess;
  if (--fault.remaining > 0) return cudaSuccess;
  fault.armed = false;
  fault.fired = true;
  fault.name = name;
  return fault.code;
}

}  // namespace detail

using namespace detail;

void count_calls_begin() {
  const Lock lock;
  state().counting = true;
  state().calls.clear();
}

long count_calls_end() {
  const Lock lock;
  state().counting = false;
  return static_cast<long>(state().calls.size());
}

std::vector<std::string> call_log() {
  const Lock lock;
  return state().calls;
}

void fail_call(long n, cudaError_t code) { fail_named("", n, code); }

void fail_named(const std::string& name, long n, cudaError_t code) {
  const Lock lock;
  state().fault = Fault{};
  state().fault.armed = true;
  state().fault.only = name;
  state().fault.remaining = n;
  state().fault.code = code;
}

bool fault_fired() {
  const Lock lock;
  return state().fault.fired;
}

std::string fault_name() {
  const Lock lock;
  return state().fault.name;
}

void clear_fault() {
  const Lock lock;
  state().fault.armed = false;
}

}  // namespace sim
