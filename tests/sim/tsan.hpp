// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// What the simulation tells ThreadSanitizer: only the order that CUDA itself promises.
//
// The simulation is compiled without -fsanitize=thread, so its own lock orders nothing in TSan's
// eyes. Each stream and each graph node is a fiber of its own; edges join them. Without TSan in the
// program all of this is nothing.
#pragma once

#if defined(__SANITIZE_THREAD__)
#error "compile the simulation without -fsanitize=thread: its lock would hide races"
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#error "compile the simulation without -fsanitize=thread: its lock would hide races"
#endif
#endif

#include <type_traits>

extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void AnnotateIgnoreReadsBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreReadsEnd(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace sim::detail {

// One promised order: everything before release() happens before everything after acquire().
class Edge {
 public:
  void release() {
    if (__tsan_release != nullptr) __tsan_release(&address_);
  }
  void acquire() {
    if (__tsan_acquire != nullptr) __tsan_acquire(&address_);
  }

 private:
  long long address_ = 0;
};

// A line of execution as TSan sees it. It comes after what its creator did before, and only edges
// order what run() executes on it with anything else. Under TSan it has a stack of its own, lest
// the frames of unordered bodies share addresses.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  template <class Function>
  void run(Function&& function) {
    run([](void* erased) { (*static_cast<std::remove_reference_t<Function>*>(erased))(); },
        &function);
  }

 private:
  void run(void (*function)(void*), void* argument);

  void* fiber_ = nullptr;
  void* stack_ = nullptr;
};

// Inside the simulation's lock TSan looks away: the linker may have chosen an instrumented copy of
// a standard container's function for the simulation's own use.
inline void ignore_accesses(bool on) {
  if (AnnotateIgnoreReadsBegin == nullptr) return;
  if (on) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  } else {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
}

}  // namespace sim::detail
