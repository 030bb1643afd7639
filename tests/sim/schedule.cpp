// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
//
// When queued work runs: lazily, in the order the streams allow, and no more than is asked for.
//
// Bodies run without the lock, on the thread that waits, and on their stream's fiber for TSan. Two
// threads never run items of one stream at once. An item cannot wait for a later one, so there is
// always an item to run.
#include "state.hpp"

#include <algorithm>
#include <sched.h>

namespace sim {
namespace detail {
namespace {

bool is_done(const Ref<Item>& item) { return !item || item->state == Item::State::kDone; }

bool ready(const Item& item) {
  return item.state == Item::State::kQueued && item.stream->queue.front().get() == &item &&
         std::all_of(item.after.begin(), item.after.end(), is_done);
}

// The item to run next for `target` to get done; null when another thread is running it.
Item* needed_for(Item& target) {
  Item* current = &target;
  while (true) {
    Item* first = current->stream->queue.front().get();
    if (first->state == Item::State::kRunning) return nullptr;
    const auto blocker = std::find_if_not(first->after.begin(), first->after.end(), is_done);
    if (blocker == first->after.end()) return first;
    current = blocker->get();
  }
}

Item* random_ready(std::mt19937_64& random) {
  std::vector<Item*> candidates;
  for (const Ref<Stream>& stream : state().all_streams) {
    if (stream->queue.empty()) continue;
    if (ready(*stream->queue.front())) candidates.push_back(stream->queue.front().get());
  }
  return candidates.empty() ? nullptr : candidates[random() % candidates.size()];
}

std::size_t device_index(const Stream& stream) { return static_cast<std::size_t>(stream.device); }

void run(Lock& lock, Item& chosen) {
  const Ref<Item> item(&chosen);
  const Ref<Stream> stream(item->stream);
  item->state = Item::State::kRunning;
  unlocked(lock, [&item, &stream] {
    stream->fiber.run([&item] {
      item->begin.acquire();
      for (const Ref<Item>& earlier : item->after) earlier->end.acquire();
      if (item->stream->legacy) state().retired.at(device_index(*item->stream)).acquire();
      inside_work() = true;
      if (item->body) item->body();
      inside_work() = false;
      item->end.release();
    });
  });
  item->state = Item::State::kDone;
  item->finished = ++state().clock;
  item->body = nullptr;
  item->after.clear();
  stream->queue.pop_front();
  forget_if_finished(*stream);
}

}  // namespace

Ref<Item> enqueue(Stream& stream, Work body, std::vector<Ref<Item>> after) {
  Ref<Item> item(new Item);
  item->stream = &stream;
  item->body = std::move(body);
  item->after = std::move(after);
  if (stream.legacy) {
    for (const Ref<Stream>& other : state().all_streams) {
      const bool waits = other->blocking() && other->device == stream.device && other->last;
      if (waits) item->after.push_back(other->last);
    }
  } else if (stream.blocking()) {
    const Ref<Item>& last = legacy_stream(stream.device).last;
    if (last) item->after.push_back(last);
  }
  item->begin.release();
  stream.queue.push_back(item);
  stream.last = item;
  return item;
}

// Takes its item by value: the last reference elsewhere may go while the lock is open.
void wait_for(Lock& lock, Ref<Item> item) {  // NOLINT(performance-unnecessary-value-param)
  if (!item) return;
  const std::uint64_t epoch = state().epoch;
  while (!is_done(item) && state().epoch == epoch) {
    std::optional<std::mt19937_64>& schedule = state().schedule;
    Item* next = schedule ? random_ready(*schedule) : needed_for(*item);
    if (next != nullptr) {
      run(lock, *next);
    } else {
      unlocked(lock, [] { sched_yield(); });
    }
  }
  item->end.acquire();
}

void wait_for_stream(Lock& lock, const Stream& stream) { wait_for(lock, stream.last); }

void wait_for_device(Lock& lock, int device) {
  std::vector<Ref<Item>> ends;
  for (const Ref<Stream>& stream : state().all_streams) {
    if (stream->device == device && stream->last) ends.push_back(stream->last);
  }
  for (const Ref<Item>& end : ends) wait_for(lock, end);
  state().retired.at(static_cast<std::size_t>(device)).acquire();
}

void forget_if_finished(Stream& stream) {
  if (stream.handle != nullptr || !stream.queue.empty()) return;
  if (stream.last) {
    stream.fiber.run([&stream] { state().retired.at(device_index(stream)).release(); });
  }
  std::erase(state().all_streams, Ref<Stream>(&stream));
}

bool done(const Ref<Item>& item) {
  if (!is_done(item)) return false;
  if (item) item->end.acquire();
  return true;
}

}  // namespace detail

using namespace detail;

bool run_one(cudaStream_t stream) {
  Lock lock;
  const Stream* found = find_stream(stream);
  if (found == nullptr || found->queue.empty()) return false;
  const Ref<Item> target = found->queue.front();
  while (!is_done(target)) {
    Item* next = needed_for(*target);
    if (next != nullptr) {
      run(lock, *next);
    } else {
      unlocked(lock, [] { sched_yield(); });
    }
  }
  return true;
}

void drain() {
  Lock lock;
  for (int device = 0; device < kDevices; ++device) wait_for_device(lock, device);
}

void set_schedule(std::uint64_t seed) {
  const Lock lock;
  state().schedule.emplace(seed);
}

void clear_schedule() {
  const Lock lock;
  state().schedule.reset();
}

}  // namespace sim
