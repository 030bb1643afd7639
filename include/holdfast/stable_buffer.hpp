// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// StableBuffer<T>: one device allocation with one address for life, whose contents a recipe
/// renews.
///
/// From the first success on, data() never changes, whatever fails. A request that cannot be met at
/// that address is refused; nothing ever falls back to another one. The buffer orders its own fills
/// and the uses that it is told of; it cannot see graph replays that nobody marks.

#include "holdfast/address_ledger.hpp"
#include "holdfast/detail/capture.hpp"
#include "holdfast/detail/device_guard.hpp"
#include "holdfast/detail/driver.hpp"
#include "holdfast/detail/stream_marks.hpp"
#include "holdfast/error.hpp"
#include "holdfast/memory_resource.hpp"
#include "holdfast/recipe.hpp"
#include "holdfast/tensor_view.hpp"

#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace holdfast {

/// What a buffer holds.
enum class State : std::uint8_t {
  empty,  ///< no address yet
  unset,  ///< an address; the contents are undefined until the next finalize that succeeds
  live,   ///< an address, and the contents of the last finalize
};

[[nodiscard]] constexpr const char* to_string(State state) noexcept {
  switch (state) {
    case State::empty: return "empty";
    case State::unset: return "unset";
    case State::live: return "live";
  }
  return "unknown";
}

/// What finalize does on a stream that is being captured.
enum class Capture : std::uint8_t {
  refuse,  ///< throws, and leaves the capture valid
  record,  ///< puts the recompute into the graph, to run at every replay
};

namespace detail {

/// What every MemoryResource aligns to, in bytes.
inline constexpr std::size_t kAlignment = 256;

/// The contract of StableBuffer, in bytes. It never moves, so that threads may hold its address.
class StableStorage {
 public:
  StableStorage(std::string name, ResourceRef memory, std::size_t element_bytes)
      : name_(std::move(name)), memory_(memory), element_bytes_(element_bytes) {}
  ~StableStorage();
  StableStorage(const StableStorage&) = delete;
  StableStorage& operator=(const StableStorage&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int device() const noexcept { return memory_.device(); }
  [[nodiscard]] void* address() const noexcept { return address_.load(std::memory_order_acquire); }
  [[nodiscard]] State state() const noexcept { return state_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t generation() const noexcept {
    return generation_.load(std::memory_order_acquire);
  }
  [[nodiscard]] const Shape& shape() const;

  template <class Fill>
  void finalize(const Shape& shape, std::span<const ByteRange> sources, Capture capture,
                cudaStream_t stream, const Fill& fill);
  void allocate(const Shape& shape);
  void adopt(void* address, const TensorView& view);
  void mark_use(cudaStream_t stream);
  void wait_ready(cudaStream_t stream) const;

  [[nodiscard]] std::string says(const char* operation, const std::string& text) const {
    return "StableBuffer '" + name_ + "': " + operation + ": " + text;
  }

 private:
  /// Fresh memory with its ledger entry. Unless it is published it goes back without a trace.
  struct Allocation {
    Allocation(ResourceRef memory_in, std::size_t bytes_in) : memory(memory_in), bytes(bytes_in) {
      if (bytes > 0) address = memory.allocate(bytes);
    }
    ~Allocation() {
      if (address == nullptr) return;
      entry.forget();
      memory.deallocate(address, bytes);
    }
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    ResourceRef memory;
    std::size_t bytes;
    void* address = nullptr;
    AddressLedger::Entry entry;
  };

  /// One changer at a time.
  class Changing {
   public:
    Changing(StableStorage& storage, const char* operation) : busy_(storage.busy_) {
      if (!busy_.test_and_set(std::memory_order_acquire)) return;
      throw_unless(false, Reason::busy, [&storage, operation] {
        return storage.says(operation,
                            "another thread, or the recipe's own caller, is changing the buffer; "
                            "order the two calls and try again");
      });
    }
    ~Changing() { busy_.clear(std::memory_order_release); }
    Changing(const Changing&) = delete;
    Changing& operator=(const Changing&) = delete;

   private:
    std::atomic_flag& busy_;
  };

  [[nodiscard]] std::size_t byte_count(const char* operation, const Shape& shape) const;
  void expects_unallocated(const char* operation) const;
  void expects_device(const char* operation, int found) const;
  void expects_sources(std::span<const ByteRange> sources) const;
  void expects_not_capturing(const char* operation, cudaStream_t stream) const;
  [[nodiscard]] std::vector<Backing> backing_of(const TensorView& view, std::uintptr_t base,
                                                std::size_t bytes) const;
  void enter(const char* operation, Allocation& fresh) const;
  void publish(Allocation& fresh, const Shape& shape) noexcept;
  void mark_filled(cudaStream_t stream, unsigned long long id);

  std::string name_;
  ResourceRef memory_;
  std::size_t element_bytes_;

  // Written once, before state_ leaves `empty`, and constant from then on.
  Shape shape_;
  std::size_t bytes_ = 0;
  bool adopted_ = false;
  AddressLedger::Entry entry_;
  std::atomic<void*> address_{nullptr};

  std::atomic<State> state_{State::empty};
  std::atomic<std::uint64_t> generation_{0};
  std::atomic_flag busy_;
  StreamMarks fills_;  // the last fill on each stream that ever filled
  StreamMarks uses_;   // what mark_use was told
};

inline StableStorage::~StableStorage() {
  void* const held = address();
  if (held == nullptr) return;
  {
    const RelaxedCapture relaxed;
    const DeviceGuard on_device(device(), std::nothrow);
    if (relaxed.active()) {
      fills_.synchronize();
      uses_.synchronize();
    }
  }
  if (adopted_) {
    entry_.forget();
  } else {
    entry_.retire();  // first: from the moment of the free the address may be anybody's
    memory_.deallocate(held, bytes_);
  }
}

inline const Shape& StableStorage::shape() const {
  throw_unless(state() != State::empty, Rule::not_allocated, [this] {
    return says("shape", "the buffer has none before allocate, adopt or finalize");
  });
  return shape_;
}

template <class Fill>
void StableStorage::finalize(const Shape& shape, std::span<const ByteRange> sources,
                             Capture capture, cudaStream_t stream, const Fill& fill) {
  const Changing changing(*this, "finalize");
  const bool first = state() == State::empty;
  const std::size_t bytes = byte_count("finalize", shape);
  const CaptureState capturing = capture_state(stream);
  if (first) {
    throw_unless(capturing == CaptureState::none, Rule::allocation_in_capture, [this] {
      return says("finalize",
                  "the stream is being captured (or it is stream 0, and a blocking stream is), "
                  "and a first finalize allocates; call finalize or allocate before capture");
    });
  } else {
    throw_unless(shape == shape_, Rule::shape_mismatch, [this, &shape] {
      return says("finalize", "expected shape " + to_string(shape_) + ", found " +
                                  to_string(shape) +
                                  "; the shape is fixed for life, because captured graphs hold the "
                                  "address: use another buffer and capture again");
    });
    throw_unless(capturing == CaptureState::none ||
                     (capturing == CaptureState::active && capture == Capture::record),
                 Rule::refit_in_capture, [this] {
                   return says(
                       "finalize",
                       "the stream is being captured (or it is stream 0, and a blocking stream "
                       "is); refit before capture or after it, or pass Capture::record to have "
                       "every replay recompute the contents");
                 });
  }
  // A captured stream must not be asked for its device; a capture is of the current one.
  expects_device("finalize",
                 capturing == CaptureState::none ? stream_device(stream) : current_device());
  expects_sources(sources);

  const DeviceGuard on_device(device());
  const auto run_fill = [this, &fill](void* out) {
    const DeviceGuard around_recipe(device());  // a recipe may leave another device current
    fill(out);
  };
  if (capturing == CaptureState::active) {
    if (bytes > 0) run_fill(address());
    return;
  }
  const unsigned long long id = stream_id(stream);
  if (first) {
    Allocation fresh(memory_, bytes);
    enter("finalize", fresh);
    if (bytes > 0) {
      try {
        run_fill(fresh.address);
        mark_filled(stream, id);
      } catch (...) {
        // What was enqueued before the failure must not outlive the memory.
        const RelaxedCapture relaxed;
        if (relaxed.active()) (void)succeeded(cudaStreamSynchronize(stream));
        throw;
      }
    }
    publish(fresh, shape);
  } else if (bytes > 0) {
    uses_.order_before(stream, id);
    fills_.order_before(stream, id);
    try {
      run_fill(address());
      mark_filled(stream, id);
    } catch (...) {
      state_.store(State::unset, std::memory_order_release);
      try {
        mark_filled(stream, id);  // part of the work may be running
      } catch (...) {  // NOLINT(bugprone-empty-catch): the first error is the one to tell
      }
      throw;
    }
  }
  generation_.fetch_add(1, std::memory_order_acq_rel);  // first: who sees live sees it counted
  state_.store(State::live, std::memory_order_release);
}

inline void StableStorage::allocate(const Shape& shape) {
  const Changing changing(*this, "allocate");
  expects_unallocated("allocate");
  Allocation fresh(memory_, byte_count("allocate", shape));
  enter("allocate", fresh);
  publish(fresh, shape);
  state_.store(State::unset, std::memory_order_release);
}

inline void StableStorage::adopt(void* address, const TensorView& view) {
  const Changing changing(*this, "adopt");
  expects_unallocated("adopt");
  throw_unless(view.is_contiguous(), Rule::not_contiguous, [this, &view] {
    return says("adopt", "expected a row-major tensor without gaps, found shape " +
                             to_string(view.shape()) + " with strides " +
                             to_string(view.strides()));
  });
  throw_unless(view.device() == device(), Rule::device_mismatch, [this, &view] {
    return says("adopt", "expected memory of device " + std::to_string(device()) +
                             ", found a tensor on device " + std::to_string(view.device()));
  });
  const std::size_t bytes = byte_count("adopt", view.shape());
  AddressLedger::Entry entry;
  if (bytes > 0) {
    const auto base = reinterpret_cast<std::uintptr_t>(address);
    entry = memory_.ledger().enter({.name = name_,
                                    .base = base,
                                    .bytes = bytes,
                                    .device = device(),
                                    .backing = backing_of(view, base, bytes)});
  }
  shape_ = view.shape();
  bytes_ = bytes;
  adopted_ = true;
  entry_ = std::move(entry);
  address_.store(bytes > 0 ? address : nullptr, std::memory_order_release);
  state_.store(State::unset, std::memory_order_release);
}

/// What stands behind the bytes that are to be adopted: one allocation, or mapped memory of one or
/// more chunks, as allocators of engines map it.
inline std::vector<Backing> StableStorage::backing_of(const TensorView& view, std::uintptr_t base,
                                                      std::size_t bytes) const {
  const RelaxedCapture relaxed;  // handles of mapped memory are taken and released here
  throw_on_error(relaxed.status(), [this] { return says("adopt", "asking what the address is"); });
  std::vector<Backing> parts;
  const std::uintptr_t end = base + bytes;
  for (std::uintptr_t at = base; at < end; at = parts.back().base + parts.back().bytes) {
    cudaPointerAttributes found{};
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    throw_on_error(cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(at)),
                   [this] { return says("adopt", "asking what the address is"); });
    const bool on_device =
        found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged;
    // What lies behind an allocation, or behind what was reserved together, is there by chance.
    const bool belongs = at == base || (on_device && is_mapped_memory(base) &&
                                        is_mapped_memory(at) && reservation_at(base).contains(at));
    throw_unless(belongs, Rule::shape_mismatch, [this, &view, bytes, base, at] {
      return says("adopt", "shape " + to_string(view.shape()) + " takes " + std::to_string(bytes) +
                               " bytes, but the memory ends after " + std::to_string(at - base) +
                               ", at " + hex(at) + "; adopt what is there, or map the rest first");
    });
    throw_unless(on_device && found.device == device(), Rule::device_mismatch,
                 [this, &found, on_device, at] {
                   return says("adopt",
                               "expected memory of device " + std::to_string(device()) +
                                   ", found " +
                                   (on_device ? "memory of device " + std::to_string(found.device)
                                              : std::string("no device memory")) +
                                   " at " + hex(at));
                 });
    const Extent extent = allocation_at(at);
    const std::size_t part = (std::min)(extent.base + extent.bytes, end) - at;
    parts.push_back({.base = at, .bytes = part, .buffer_id = buffer_id(at)});
  }
  return parts;
}

inline void StableStorage::mark_use(cudaStream_t stream) {
  throw_unless(state() != State::empty, Rule::not_allocated, [this] {
    return says("mark_use", "the buffer has no address yet, so nothing can have read it");
  });
  expects_not_capturing("mark_use", stream);
  expects_device("mark_use", stream_device(stream));
  if (bytes_ == 0) return;
  const DeviceGuard on_device(device());
  uses_.record(stream, stream_id(stream));
}

inline void StableStorage::wait_ready(cudaStream_t stream) const {
  throw_unless(state() != State::empty, Rule::not_allocated, [this] {
    return says("wait_ready", "the buffer has no address yet; finalize it first");
  });
  expects_not_capturing("wait_ready", stream);
  expects_device("wait_ready", stream_device(stream));
  throw_unless(state() != State::unset, Reason::unset, [this] {
    return says("wait_ready",
                "the contents are undefined; finalize the buffer before anything reads it");
  });
  fills_.order_before(stream, stream_id(stream));
}

inline std::size_t StableStorage::byte_count(const char* operation, const Shape& shape) const {
  const std::int64_t bytes = multiply(shape.elements(), static_cast<std::int64_t>(element_bytes_));
  throw_unless(bytes >= 0, Rule::size_overflow, [this, operation, &shape] {
    return says(operation, "shape " + to_string(shape) + " with elements of " +
                               std::to_string(element_bytes_) +
                               " bytes: the size in bytes does not fit 63 bits; split the buffer");
  });
  return static_cast<std::size_t>(bytes);
}

inline void StableStorage::expects_unallocated(const char* operation) const {
  throw_unless(state() == State::empty, Rule::already_allocated, [this, operation] {
    return says(operation, "the buffer already has shape " + to_string(shape_) +
                               " and an address that graphs may hold; use another buffer");
  });
}

inline void StableStorage::expects_device(const char* operation, int found) const {
  throw_unless(found == device(), Rule::device_mismatch, [this, operation, found] {
    return says(operation, "expected a stream of device " + std::to_string(device()) +
                               ", found one of device " + std::to_string(found));
  });
}

inline void StableStorage::expects_sources(std::span<const ByteRange> sources) const {
  const auto* const begin = static_cast<const std::byte*>(address());
  const ByteRange target{begin, begin + bytes_, device()};
  for (const ByteRange& source : sources) {
    throw_unless(source.device == device(), Rule::device_mismatch, [this, &source] {
      return says("finalize", "expected sources on device " + std::to_string(device()) +
                                  ", found one on device " + std::to_string(source.device) +
                                  "; copy it over first");
    });
    throw_unless(!source.overlaps(target), Rule::source_overlaps_target, [this] {
      return says("finalize",
                  "a source overlaps the buffer, so a second refit would read the first "
                  "one's result; keep the source elsewhere");
    });
  }
}

inline void StableStorage::expects_not_capturing(const char* operation, cudaStream_t stream) const {
  throw_unless(
      capture_state(stream) == CaptureState::none, Rule::order_in_capture, [this, operation] {
        return says(
            operation,
            "the stream is being captured (or it is stream 0, and a blocking stream is); call "
            "it before capture, or after a replay");
      });
}

inline void StableStorage::enter(const char* operation, Allocation& fresh) const {
  if (fresh.bytes == 0) return;
  const auto base = reinterpret_cast<std::uintptr_t>(fresh.address);
  throw_unless(base != 0 && base % kAlignment == 0, Rule::misaligned, [this, operation, base] {
    return says(operation, "the memory resource gave the address " + hex(base) +
                               "; expected a multiple of " + std::to_string(kAlignment) +
                               " bytes that is not null; mend the resource");
  });
  fresh.entry = memory_.ledger().enter(
      {.name = name_,
       .base = base,
       .bytes = fresh.bytes,
       .device = device(),
       .backing = {{.base = base, .bytes = fresh.bytes, .buffer_id = buffer_id(base)}}});
}

/// The caller then sets the state, which is what observers look at first.
inline void StableStorage::publish(Allocation& fresh, const Shape& shape) noexcept {
  shape_ = shape;
  bytes_ = fresh.bytes;
  entry_ = std::move(fresh.entry);
  address_.store(std::exchange(fresh.address, nullptr), std::memory_order_release);
}

/// If the event cannot be recorded the fill is awaited instead, so that no fill goes untracked.
inline void StableStorage::mark_filled(cudaStream_t stream, unsigned long long id) {
  try {
    fills_.record(stream, id);
  } catch (...) {
    const RelaxedCapture relaxed;  // this thread may be capturing another stream
    if (!relaxed.active()) throw;
    throw_on_error(cudaStreamSynchronize(stream),
                   [this] { return says("finalize", "waiting for the fill"); });
  }
}

}  // namespace detail

/// A device buffer that, unlike a vector, never moves: captured graphs may hold its address.
///
///     holdfast::DeviceResource memory;
///     holdfast::StableBuffer<float> sum{"layers.0.hc_attn_fn_broadcast", memory};
///     sum.finalize(holdfast::StreamSum<float>{fn}, stream);  // allocates, then fills
///     // ... capture graphs that read sum.data() ...
///     sum.finalize(holdfast::StreamSum<float>{fn}, stream);  // new weights, same address
///
/// - Address, shape, element type and device are fixed by the first allocate, adopt or finalize
///   that succeeds. The address is a multiple of 256 bytes unless it was adopted.
/// - Moving the object moves the ownership; the address stays. A moved-from buffer answers every
///   operation with ContractError moved_from, and its observers say empty.
/// - An empty shape is legal: nothing is allocated or launched, and data() is null.
/// - Observers may be called from any thread. Two operations that change the buffer at once: one of
///   them throws RefitError busy.
/// - Handle 0 as a stream means the legacy stream. A stream must belong to the buffer's device (a
///   captured one cannot be asked, so then the current device must be the buffer's). The caller's
///   current device is restored, also on errors.
///
/// `T` is trivially copyable. `memory` must outlive the buffer.
template <class T>
class StableBuffer {
  static_assert(std::is_trivially_copyable_v<T>, "the contents are copied as bytes");
  static_assert(alignof(T) <= detail::kAlignment, "memory resources align to 256 bytes");

 public:
  /// Makes no CUDA call. `name` appears in errors and in the ledger of `memory`.
  StableBuffer(std::string name, ResourceRef memory)
      : storage_(std::make_unique<detail::StableStorage>(std::move(name), memory, sizeof(T))) {}
  /// Waits on the host for fills and marked uses, then frees; with DeviceResource that waits for
  /// the whole device. Adopted memory is not freed. A graph replay launched later is a stale read.
  /// \stream allowed while any thread captures; disturbs no capture.
  ~StableBuffer() = default;
  StableBuffer(const StableBuffer&) = delete;  // two owners of one address
  StableBuffer& operator=(const StableBuffer&) = delete;
  StableBuffer(StableBuffer&&) noexcept = default;
  /// Destroys what the left side held.
  StableBuffer& operator=(StableBuffer&&) noexcept = default;

  /// The address [shape()], or null before there is one and for an empty shape.
  [[nodiscard]] T* data() const noexcept {
    return storage_ ? static_cast<T*>(storage_->address()) : nullptr;
  }
  [[nodiscard]] State state() const noexcept { return storage_ ? storage_->state() : State::empty; }
  /// How many finalize calls have succeeded, recorded ones not counted.
  [[nodiscard]] std::uint64_t generation() const noexcept {
    return storage_ ? storage_->generation() : 0;
  }
  /// \throws ContractError not_allocated, moved_from.
  [[nodiscard]] const Shape& shape() const { return storage("shape").shape(); }
  /// \throws ContractError moved_from.
  [[nodiscard]] int device() const { return storage("device").device(); }
  /// \throws ContractError moved_from.
  [[nodiscard]] const std::string& name() const { return storage("name").name(); }
  /// The contents as a source for another recipe; read-only. A finalize that reads it on another
  /// stream than the one that filled it goes between wait_ready and mark_use, like a replay.
  /// \throws ContractError not_allocated, moved_from.
  [[nodiscard]] TensorView view() const {
    return TensorView(static_cast<const T*>(data()), shape(), device());
  }

  /// Fills or refills the buffer by `recipe`: the first time into new memory, later in place.
  ///
  /// The recipe's sources stay valid and unchanged until the stream has run the fill. The fill is
  /// ordered after earlier fills and after every use marked so far. If anything is refused
  /// (ContractError, busy) or a call fails before the recipe runs, nothing has changed. If the
  /// recipe itself throws, a first finalize gives its memory back and the buffer is empty again;
  /// later the address stays and the state is unset until a finalize succeeds.
  /// \throws ContractError shape_mismatch, device_mismatch, source_overlaps_target, size_overflow,
  ///   allocation_in_capture, refit_in_capture, moved_from; RefitError busy; OutOfMemory;
  ///   CudaError; whatever the recipe throws. A first one also throws what allocate does.
  /// \stream enqueues only. On a captured stream refused; the capture stays valid.
  /// \cost the recipe's launches, one event record, and one wait for each other stream that filled
  ///   or was marked; the first time one allocation.
  template <Recipe<T> R>
  void finalize(const R& recipe, cuda::stream_ref stream) {
    finalize(recipe, Capture::refuse, stream);
  }

  /// As above. With Capture::record a finalize on a captured stream, other than the first, puts the
  /// recompute into the graph: each replay then renews the contents from the sources' addresses.
  /// That is not counted in generation(), changes no state and marks nothing; order replays of that
  /// graph against other fills yourself, and keep buffer and sources alive as long as the graph can
  /// run.
  template <Recipe<T> R>
  void finalize(const R& recipe, Capture capture, cuda::stream_ref stream) {
    const cudaStream_t handle = detail::native(stream);
    const Shape shape = recipe.shape();
    const auto sources = recipe.sources();
    storage("finalize")
        .finalize(shape, std::span<const ByteRange>(sources), capture, handle,
                  [&recipe, handle](void* out) {
                    recipe(static_cast<T*>(out), cuda::stream_ref{handle});
                  });
  }

  /// Fixes address and shape before any source exists, so that graphs can be captured first. The
  /// state is unset; the contents are undefined until a finalize.
  /// \throws ContractError already_allocated, size_overflow, moved_from, address_taken (the memory
  ///   is what a buffer adopted and its engine freed too early), misaligned (the resource breaks
  ///   its contract); RefitError busy; OutOfMemory; CudaError.
  /// \stream allowed while any thread captures. \cost one allocation.
  void allocate(const Shape& shape) { storage("allocate").allocate(shape); }

  /// Takes memory that the engine owns and may have captured already: [view.shape()] T, contiguous,
  /// on this buffer's device, writable, held by no other buffer. It is part of one allocation, or
  /// of one reservation of addresses in which memory is mapped without a gap. It is never freed
  /// here and must outlive the buffer. The state is unset until a finalize.
  /// \throws ContractError already_allocated, type_mismatch, misaligned (a packed view), read_only,
  ///   not_contiguous, device_mismatch, size_overflow, shape_mismatch (the memory ends before
  ///   the view does), address_taken (another buffer of this resource holds some of the bytes),
  ///   moved_from; RefitError busy; CudaError.
  /// \stream allowed while any thread captures. \cost no device memory, no launch.
  void adopt(const TensorView& view) {
    detail::StableStorage& held = storage("adopt");
    held.adopt(view.writable_data_as<T>(), view);
  }

  /// Says that the work enqueued on `stream` so far reads the buffer: the next finalize and the
  /// destructor wait for it. Call it after launching a replay. May be called from any thread; a
  /// finalize on another thread must not come between wait_ready and mark_use, or it does not see
  /// the replay.
  /// \throws ContractError not_allocated, order_in_capture, device_mismatch, moved_from; CudaError.
  /// \stream enqueues only; refused while capturing. \cost one event record.
  void mark_use(cuda::stream_ref stream) const {
    storage("mark_use").mark_use(detail::native(stream));
  }

  /// Makes `stream` wait for the last fill, where that ran on another stream. Call it before
  /// launching a replay there. May be called from any thread, but see mark_use.
  /// \throws ContractError not_allocated, order_in_capture, device_mismatch, moved_from; RefitError
  ///   unset; CudaError.
  /// \stream enqueues only; refused while capturing. \cost one wait, or none.
  void wait_ready(cuda::stream_ref stream) const {
    storage("wait_ready").wait_ready(detail::native(stream));
  }

 private:
  [[nodiscard]] detail::StableStorage& storage(const char* operation) const {
    throw_unless(storage_ != nullptr, Rule::moved_from, [operation] {
      return std::string("StableBuffer: ") + operation +
             ": the buffer was moved away; use the one that it was moved to";
    });
    return *storage_;
  }

  std::unique_ptr<detail::StableStorage> storage_;
};

static_assert(!std::is_copy_constructible_v<StableBuffer<float>>);
static_assert(std::is_nothrow_move_constructible_v<StableBuffer<float>>);
static_assert(std::is_nothrow_move_assignable_v<StableBuffer<float>>);

}  // namespace holdfast
