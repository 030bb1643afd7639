// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// AddressLedger: who lives, and who lived, at which device address.
///
/// A captured graph holds bare addresses and outlives what they meant. The ledger keeps the
/// meaning: every range that a buffer owns, and a bounded history of ranges that were given up. It
/// reads and writes no device memory. Safe to use from several threads.

#include "holdfast/error.hpp"

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace holdfast {

/// What stands behind a part of a range: one allocation, or one chunk of mapped memory.
struct Backing {
  std::uintptr_t base = 0;  ///< of the part, not of the whole allocation
  std::size_t bytes = 0;
  /// The driver's number of the allocation or mapping; never reused in a process.
  std::uint64_t buffer_id = 0;
  friend bool operator==(const Backing&, const Backing&) = default;
};

/// One entry of the ledger: the bytes [base, base + bytes) on `device`.
struct AddressRange {
  std::string name;         ///< the buffer's
  std::uintptr_t base = 0;  ///< device address
  std::size_t bytes = 0;
  int device = 0;
  /// Its parts by address, without gaps. More than one only where mapped memory was adopted.
  std::vector<Backing> backing;

  /// Whether `address` is one of the bytes. One past the end is not.
  [[nodiscard]] bool contains(std::uintptr_t address) const noexcept {
    return address >= base && address - base < bytes;
  }
  /// Whether the two share a byte. An empty range shares none.
  [[nodiscard]] bool overlaps(std::uintptr_t other, std::size_t other_bytes) const noexcept {
    if (bytes == 0 || other_bytes == 0) return false;
    return other < base ? base - other < other_bytes : other - base < bytes;
  }
};

namespace detail {

/// `0x7f0000000000`.
[[nodiscard]] inline std::string hex(std::uintptr_t address) {
  std::array<char, 2 * sizeof address> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), address, 16).ptr;
  return "0x" + std::string(digits.data(), end);
}

}  // namespace detail

class AddressLedger {
  struct State;

 public:
  static constexpr std::size_t kDefaultHistory = 4096;

  /// A range for as long as it lives. Dropping the entry moves the range to the history.
  class Entry {
   public:
    Entry() = default;
    ~Entry() { retire(); }
    Entry(const Entry&) = delete;  // a range lives once
    Entry& operator=(const Entry&) = delete;
    Entry(Entry&& other) noexcept
        : state_(std::move(other.state_)), place_(std::exchange(other.place_, {})) {}
    Entry& operator=(Entry&& other) noexcept {
      if (this != &other) {
        retire();
        state_ = std::move(other.state_);
        place_ = std::exchange(other.place_, {});
      }
      return *this;
    }

    /// The range was given up: from now on a graph that holds it is stale. Allocates nothing.
    void retire() noexcept {
      if (state_ == nullptr) return;
      const auto state = std::exchange(state_, nullptr);
      const std::lock_guard lock(state->mutex);
      state->retired.splice(state->retired.end(), state->live, place_);
      state->trim();
    }

    /// Nobody ever learnt this address from us, or it stays valid without us: no history.
    void forget() noexcept {
      if (state_ == nullptr) return;
      const auto state = std::exchange(state_, nullptr);
      const std::lock_guard lock(state->mutex);
      state->live.erase(place_);
    }

   private:
    friend class AddressLedger;
    Entry(std::shared_ptr<State> state, std::list<AddressRange>::iterator place)
        : state_(std::move(state)), place_(place) {}

    std::shared_ptr<State> state_;  // so that an entry may outlive its ledger
    std::list<AddressRange>::iterator place_;
  };

  /// `history` bounds how many retired ranges are kept; the oldest go first.
  explicit AddressLedger(std::size_t history = kDefaultHistory)
      : state_(std::make_shared<State>()) {
    state_->history = history;
  }
  ~AddressLedger() = default;
  AddressLedger(const AddressLedger&) = delete;  // a copy would miss what happens later
  AddressLedger& operator=(const AddressLedger&) = delete;

  /// Adds a live range. Looking for another owner and entering are one step, so of two threads that
  /// ask for the same bytes one gets them. \cost linear in the live ranges.
  /// \throws ContractError address_taken if a live range shares a byte with it; then nothing has
  ///   changed.
  [[nodiscard]] Entry enter(AddressRange range) {
    std::list<AddressRange> node;
    node.push_back(std::move(range));  // outside the lock: it allocates
    const AddressRange& wanted = node.front();
    const std::lock_guard lock(state_->mutex);
    const AddressRange* const owner = state_->overlapping(wanted.base, wanted.bytes);
    throw_unless(owner == nullptr, Rule::address_taken, [&wanted, owner] {
      return "AddressLedger: buffer '" + wanted.name + "' asks for " + text(wanted) +
             ", but buffer '" + owner->name + "' holds " + text(*owner) +
             "; they would overwrite each other's contents: share the one, or drop it if its "
             "memory was freed";
    });
    state_->live.splice(state_->live.end(), node);
    return Entry(state_, std::prev(state_->live.end()));
  }

  /// The live range that holds `address`. \cost linear in the live ranges.
  [[nodiscard]] std::optional<AddressRange> find(const void* address) const {
    const auto wanted = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(state_->mutex);
    for (const AddressRange& range : state_->live) {
      if (range.contains(wanted)) return range;
    }
    return std::nullopt;
  }

  /// A live range that shares a byte with [base, base + bytes). No bytes share none.
  /// \cost linear in the live ranges.
  [[nodiscard]] std::optional<AddressRange> find_overlap(const void* base,
                                                         std::size_t bytes) const {
    const std::lock_guard lock(state_->mutex);
    const AddressRange* const found =
        state_->overlapping(reinterpret_cast<std::uintptr_t>(base), bytes);
    return found == nullptr ? std::nullopt : std::optional(*found);
  }

  /// The live ranges, oldest first.
  [[nodiscard]] std::vector<AddressRange> live() const { return copy(&State::live); }
  /// The ranges that were given up, oldest first. They may be in use again, by us or by others:
  /// compare `backing`.
  [[nodiscard]] std::vector<AddressRange> retired() const { return copy(&State::retired); }
  /// How many retired ranges the bound has pushed out. Above 0, "not in the history" proves
  /// nothing.
  [[nodiscard]] std::uint64_t forgotten() const {
    const std::lock_guard lock(state_->mutex);
    return state_->forgotten;
  }

 private:
  struct State {
    std::mutex mutex;
    std::list<AddressRange> live;
    std::list<AddressRange> retired;
    std::size_t history = 0;
    std::uint64_t forgotten = 0;

    [[nodiscard]] const AddressRange* overlapping(std::uintptr_t base,
                                                  std::size_t bytes) const noexcept {
      for (const AddressRange& range : live) {
        if (range.overlaps(base, bytes)) return &range;
      }
      return nullptr;
    }

    void trim() noexcept {
      while (retired.size() > history) {
        retired.pop_front();
        ++forgotten;
      }
    }
  };

  [[nodiscard]] static std::string text(const AddressRange& range) {
    return std::to_string(range.bytes) + " bytes from " + detail::hex(range.base) + " on";
  }

  [[nodiscard]] std::vector<AddressRange> copy(std::list<AddressRange> State::*list) const {
    const std::lock_guard lock(state_->mutex);
    const auto& ranges = (*state_).*list;
    return {ranges.begin(), ranges.end()};
  }

  std::shared_ptr<State> state_;
};

}  // namespace holdfast
