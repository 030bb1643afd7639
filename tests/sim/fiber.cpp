// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// Lines of execution for ThreadSanitizer, each with its own stack.
//
// The thread that runs a fiber does not change: this only tells TSan, and keeps apart, what CUDA
// would run at the same time. Without TSan a fiber is a plain call.
#include "tsan.hpp"

#include <cstdint>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>

namespace sim::detail {
namespace {

constexpr std::size_t kStackBytes = std::size_t{1} << 20;

struct Call {
  void (*function)(void*);
  void* argument;
};

// makecontext() passes ints only, so the address of the call comes in two halves.
void enter(unsigned high, unsigned low) {
  const auto address = (std::uintptr_t{high} << 32) | low;
  const auto* call = reinterpret_cast<const Call*>(address);  // NOLINT(performance-no-int-to-ptr)
  call->function(call->argument);
}

}  // namespace

Fiber::Fiber() {
  if (__tsan_create_fiber == nullptr) return;
  stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stack_ == MAP_FAILED) std::abort();
  fiber_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (fiber_ == nullptr) return;
  __tsan_destroy_fiber(fiber_);
  munmap(stack_, kStackBytes);
}

void Fiber::run(void (*function)(void*), void* argument) {
  if (fiber_ == nullptr) {
    function(argument);
    return;
  }
  constexpr unsigned kNoSync = 1;
  const Call call = {function, argument};
  const auto address = reinterpret_cast<std::uintptr_t>(&call);
  ucontext_t caller;
  ucontext_t callee;
  if (getcontext(&callee) != 0) std::abort();
  callee.uc_stack.ss_sp = stack_;
  callee.uc_stack.ss_size = kStackBytes;
  callee.uc_link = &caller;
  makecontext(&callee, reinterpret_cast<void (*)()>(&enter), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
  void* const calling = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber_, kNoSync);
  if (swapcontext(&caller, &callee) != 0) std::abort();
  __tsan_switch_to_fiber(calling, kNoSync);
}

}  // namespace sim::detail
