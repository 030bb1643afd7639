// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "simt/simt.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <ucontext.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

Position here{};

namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10U;
constexpr unsigned kLanes = 32;
constexpr int kBarriers = 16;  // what a block has on a GPU

struct Barrier {
  unsigned waiting = 0;
  unsigned passed = 0;  // how often it opened
};

struct Warp {
  Barrier barrier;
  std::array<std::array<std::byte, kLanes * kMostExchanged>, 2> given;
};

#if defined(__x86_64__)
/// Pushes what a function must preserve, leaves the stack pointer in `*from`, goes on where `to`
/// was left. swapcontext does the same, and asks the kernel for the signal mask each time: much
/// slower.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.type simt_switch, @function
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size simt_switch, . - simt_switch
)");

class Context {
 public:
  /// To run `entry`, which never returns, on a stack of its own.
  void prepare(std::byte* stack, std::size_t bytes, void (*entry)()) {
    constexpr std::size_t kPushed = 6;
    auto* top = reinterpret_cast<void**>(stack + bytes - 64);
    *--top = nullptr;  // where a return would go; a function starts 8 off a multiple of 16
    *--top = reinterpret_cast<void*>(entry);
    for (std::size_t i = 0; i < kPushed; ++i) *--top = nullptr;
    stack_pointer_ = top;
  }
  static void change(Context& from, Context& to) {
    simt_switch(&from.stack_pointer_, to.stack_pointer_);
  }

 private:
  void* stack_pointer_ = nullptr;
};
#else
class Context {
 public:
  void prepare(std::byte* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.context_, &to.context_); }

 private:
  ucontext_t context_{};
};
#endif

struct Fiber {
  Context context;
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};  // at a multiple of 16
  Position position;
  Warp* warp = nullptr;
  unsigned lane = 0;
  unsigned exchanges = 0;
  bool done = false;
  void* fake_stack = nullptr;
};

struct Block {
  std::array<Barrier, kBarriers> barriers;
  unsigned alive = 0;
  bool moved = false;  // since the scheduler last looked: a barrier opened or a thread ended
};

std::mutex one_grid;
std::deque<Fiber> fibers;  // kept for the next grid: stacks are large
std::vector<std::byte> shared;
Block* block_now = nullptr;
Fiber* running = nullptr;
const std::function<void()>* body_now = nullptr;
Context scheduler;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;

void leaving([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* stack,
             [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#endif
}
void arrived([[maybe_unused]] void* fake_stack, [[maybe_unused]] const void** stack,
             [[maybe_unused]] std::size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
#endif
}

void to_scheduler(bool for_ever) {
  Fiber& self = *running;
  leaving(for_ever ? nullptr : &self.fake_stack, scheduler_stack, scheduler_stack_bytes);
  Context::change(self.context, scheduler);
  arrived(self.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}

void enter() {
  arrived(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  (*body_now)();
  running->done = true;
  --block_now->alive;
  block_now->moved = true;
  to_scheduler(true);
}

void to_fiber(Fiber& fiber) {
  running = &fiber;
  here = fiber.position;
  leaving(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
  Context::change(scheduler, fiber.context);
  arrived(scheduler_fake_stack, nullptr, nullptr);
}

/// `expected` is asked again each time: threads that return are no longer waited for.
template <class Expected>
void wait_at(Barrier& barrier, const Expected& expected) {
  const unsigned before = barrier.passed;
  ++barrier.waiting;
  while (barrier.passed == before) {
    if (barrier.waiting >= expected()) {
      barrier.waiting = 0;
      ++barrier.passed;
      block_now->moved = true;
      return;
    }
    to_scheduler(false);
  }
}

void run_block(std::size_t threads, bool backwards) {
  for (std::size_t remaining = threads; remaining > 0;) {
    block_now->moved = false;
    for (std::size_t i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[backwards ? threads - 1 - i : i];
      if (fiber.done) continue;
      to_fiber(fiber);
      if (fiber.done) --remaining;
    }
    if (!block_now->moved) {
      std::fprintf(stderr, "simt: %zu threads of a block wait for others that never come\n",
                   remaining);
      std::abort();
    }
  }
}

}  // namespace

void run(dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
         const std::function<void()>& body) {
  const std::scoped_lock lock(one_grid);
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  while (fibers.size() < threads) fibers.emplace_back();
  shared.resize(dynamic_shared_bytes + 128);
  body_now = &body;
  bool backwards = false;
  std::vector<Warp> warps((threads + kLanes - 1) / kLanes);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        Block state;
        state.alive = static_cast<unsigned>(threads);
        block_now = &state;
        std::ranges::fill(shared, std::byte{0xCB});
        std::ranges::fill(warps, Warp{});
        for (std::size_t i = 0; i < threads; ++i) {
          Fiber& fiber = fibers[i];
          const auto at = static_cast<unsigned>(i);
          fiber.position = {{at % block.x, at / block.x % block.y, at / block.x / block.y},
                            {x, y, z},
                            block,
                            grid};
          fiber.warp = &warps[i / kLanes];
          fiber.lane = at % kLanes;
          fiber.exchanges = 0;
          fiber.done = false;
          fiber.context.prepare(fiber.stack.get(), kStackBytes, &enter);
        }
        run_block(threads, backwards);
        backwards = !backwards;
      }
    }
  }
}

void* dynamic_shared() {
  const auto address = reinterpret_cast<std::uintptr_t>(shared.data());
  return shared.data() + (128 - address % 128) % 128;
}

void barrier(int id, unsigned threads) {
  wait_at(block_now->barriers.at(static_cast<std::size_t>(id)),
          [threads] { return threads == 0 ? block_now->alive : threads; });
}

std::span<const std::byte> exchange(const void* value, std::size_t bytes) {
  if (bytes > kMostExchanged) std::abort();
  Fiber& self = *running;
  // Two buffers in turn: a lane may give its next value while others still read this one.
  auto& given = self.warp->given[self.exchanges++ % 2];
  std::memcpy(given.data() + self.lane * kMostExchanged, value, bytes);
  wait_at(self.warp->barrier, [] { return kLanes; });
  return given;
}

}  // namespace simt
