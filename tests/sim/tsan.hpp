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
#error \
    "compile the simulation without -fsanitize=thread: its lock would hide the races it is there to show"
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#error \
    "compile the simulation without -fsanitize=thread: its lock would hide the races it is there to show"
#endif
#endif

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

// A line of execution as TSan sees it. run() executes on it, unordered with the caller but for
// edges.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (fiber_ != nullptr) __tsan_destroy_fiber(fiber_);
  }

  template <class Function>
  void run(Function&& function) {
    if (__tsan_create_fiber == nullptr) {
      function();
      return;
    }
    constexpr unsigned kNoSync = 1;
    if (fiber_ == nullptr) fiber_ = __tsan_create_fiber(0);
    void* caller = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber_, kNoSync);
    function();
    __tsan_switch_to_fiber(caller, kNoSync);
  }

 private:
  void* fiber_ = nullptr;
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
