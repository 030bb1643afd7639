// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "holdfast/address_ledger.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using holdfast::AddressLedger;
using holdfast::AddressRange;
using Names = std::vector<std::string>;

// An address that no other range has.
std::uintptr_t somewhere() {
  static std::atomic<std::uintptr_t> next{0x7000'0000'0000};
  return next.fetch_add(0x1000);
}

// Ranges are numbers to the ledger: no memory stands behind these.
AddressRange range(std::string name, std::uintptr_t base = somewhere(), std::size_t bytes = 256,
                   std::uint64_t buffer_id = 0) {
  return {std::move(name), base, bytes, 0, {{base, bytes, buffer_id}}};
}

const void* at(std::uintptr_t address) {
  return reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

Names names(const std::vector<AddressRange>& ranges) {
  Names result;
  for (const AddressRange& each : ranges) result.push_back(each.name);
  return result;
}

std::string found(const AddressLedger& ledger, std::uintptr_t address) {
  const std::optional<AddressRange> range = ledger.find(at(address));
  return range ? range->name : "none";
}

TEST(AddressLedger, FindsTheFirstAnInteriorAndTheLastByteOfARange) {
  AddressLedger ledger;
  const auto entry = ledger.enter(range("a", 0x1000, 256));
  EXPECT_EQ(found(ledger, 0x1000), "a");
  EXPECT_EQ(found(ledger, 0x1080), "a");
  EXPECT_EQ(found(ledger, 0x10FF), "a");
}

TEST(AddressLedger, DoesNotFindTheBytesNextToARange) {
  AddressLedger ledger;
  const auto entry = ledger.enter(range("a", 0x1000, 256));
  EXPECT_EQ(found(ledger, 0x0FFF), "none");
  EXPECT_EQ(found(ledger, 0x1100), "none");
}

TEST(AddressLedger, TellsNeighboursApart) {
  AddressLedger ledger;
  const auto high = ledger.enter(range("high", 0x1100, 256));
  const auto low = ledger.enter(range("low", 0x1000, 256));
  EXPECT_EQ(found(ledger, 0x10FF), "low");
  EXPECT_EQ(found(ledger, 0x1100), "high");
}

TEST(AddressLedger, FindsTheLastByteOfTheAddressSpace) {
  constexpr std::uintptr_t kLast = std::numeric_limits<std::uintptr_t>::max();
  AddressLedger ledger;
  const auto entry = ledger.enter(range("top", kLast - 15, 16));
  EXPECT_EQ(found(ledger, kLast), "top");
  EXPECT_EQ(found(ledger, kLast - 16), "none");
  EXPECT_EQ(found(ledger, 0), "none");
}

TEST(AddressLedger, ARangeOfNoBytesHoldsNoAddress) {
  AddressLedger ledger;
  const auto entry = ledger.enter(range("empty", 0x1000, 0));
  EXPECT_EQ(found(ledger, 0x1000), "none");
}

TEST(AddressLedger, AnEmptyLedgerFindsNothing) {
  const AddressLedger ledger;
  EXPECT_EQ(found(ledger, 0), "none");
  EXPECT_TRUE(ledger.live().empty());
  EXPECT_TRUE(ledger.retired().empty());
  EXPECT_EQ(ledger.forgotten(), 0U);
}

TEST(AddressLedger, KeepsEveryFieldOfARangeThroughItsLife) {
  AddressLedger ledger;
  auto entry = ledger.enter({"layers.0.w", 0xABC00, 4096, 3, {{0xABC00, 4096, 77}}});
  const auto expect_same = [](const AddressRange& each) {
    EXPECT_EQ(each.name, "layers.0.w");
    EXPECT_EQ(each.base, 0xABC00U);
    EXPECT_EQ(each.bytes, 4096U);
    EXPECT_EQ(each.device, 3);
    EXPECT_EQ(each.backing.at(0).buffer_id, 77U);
  };
  ASSERT_EQ(ledger.live().size(), 1U);
  expect_same(ledger.live().front());
  expect_same(ledger.find(at(0xABC00)).value());
  entry.retire();
  ASSERT_EQ(ledger.retired().size(), 1U);
  expect_same(ledger.retired().front());
}

TEST(AddressLedger, DroppingAnEntryRetiresItsRange) {
  AddressLedger ledger;
  { const auto entry = ledger.enter(range("a")); }
  EXPECT_EQ(found(ledger, 0x1000), "none");
  EXPECT_TRUE(ledger.live().empty());
  EXPECT_EQ(names(ledger.retired()), Names{"a"});
}

TEST(AddressLedger, RetiringTwiceRetiresOnce) {
  AddressLedger ledger;
  {
    auto entry = ledger.enter(range("a"));
    entry.retire();
    EXPECT_EQ(names(ledger.retired()), Names{"a"});
    entry.retire();
  }
  EXPECT_EQ(names(ledger.retired()), Names{"a"});
}

TEST(AddressLedger, AForgottenEntryLeavesNoHistory) {
  AddressLedger ledger;
  {
    auto entry = ledger.enter(range("a"));
    entry.forget();
    EXPECT_TRUE(ledger.live().empty());
    entry.forget();
    entry.retire();
  }
  EXPECT_TRUE(ledger.retired().empty());
  EXPECT_EQ(ledger.forgotten(), 0U) << "nothing was pushed out of the history";
}

TEST(AddressLedger, ForgettingARetiredEntryDoesNotUndoItsHistory) {
  AddressLedger ledger;
  auto entry = ledger.enter(range("a"));
  entry.retire();
  entry.forget();
  EXPECT_EQ(names(ledger.retired()), Names{"a"});
}

TEST(AddressLedger, NoBytesOverlapNothing) {
  AddressLedger ledger;
  const auto entry = ledger.enter(range("a", 0x1000));
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<const void*>(address); };
  for (const std::uintptr_t address : {0xFFFU, 0x1000U, 0x1001U}) {
    EXPECT_FALSE(ledger.find_overlap(at(address), 0)) << address;
  }
  EXPECT_TRUE(ledger.find_overlap(at(0x1001), 1));  // and one byte does
}

TEST(AddressLedger, ForgettingOneRangeLeavesItsNeighbours) {
  AddressLedger ledger;
  const auto a = ledger.enter(range("a"));
  auto b = ledger.enter(range("b"));
  const auto c = ledger.enter(range("c"));
  b.forget();
  EXPECT_EQ(names(ledger.live()), (Names{"a", "c"}));
}

TEST(AddressLedger, ADefaultEntryHoldsNothing) {
  AddressLedger::Entry entry;
  entry.retire();
  entry.forget();
}

TEST(AddressLedger, AMovedEntryKeepsItsRangeAlive) {
  AddressLedger ledger;
  std::optional<AddressLedger::Entry> first = ledger.enter(range("a"));
  auto second = std::move(*first);
  first->retire();
  first->forget();
  first.reset();
  EXPECT_EQ(names(ledger.live()), Names{"a"});
  second.retire();
  EXPECT_EQ(names(ledger.retired()), Names{"a"});
}

TEST(AddressLedger, AssigningToAnEntryRetiresItsOwnRangeAndKeepsTheOther) {
  AddressLedger ledger;
  auto entry = ledger.enter(range("old"));
  {
    auto other = ledger.enter(range("new"));
    entry = std::move(other);
  }
  EXPECT_EQ(names(ledger.live()), Names{"new"});
  EXPECT_EQ(names(ledger.retired()), Names{"old"});
}

TEST(AddressLedger, AssigningAnEmptyEntryRetires) {
  AddressLedger ledger;
  auto entry = ledger.enter(range("a"));
  entry = {};
  EXPECT_TRUE(ledger.live().empty());
  EXPECT_EQ(names(ledger.retired()), Names{"a"});
}

TEST(AddressLedger, AnEntryAssignedToItselfStaysAlive) {
  AddressLedger ledger;
  auto entry = ledger.enter(range("a"));
  auto& same = entry;
  entry = std::move(same);
  EXPECT_EQ(names(ledger.live()), Names{"a"});
  EXPECT_TRUE(ledger.retired().empty());
  entry.retire();
  EXPECT_EQ(names(ledger.retired()), Names{"a"});
}

TEST(AddressLedger, AnEntryMovesFromOneLedgerToAnother) {
  AddressLedger first;
  AddressLedger second;
  auto entry = first.enter(range("of first"));
  entry = second.enter(range("of second"));
  EXPECT_EQ(names(first.retired()), Names{"of first"});
  EXPECT_EQ(names(second.live()), Names{"of second"});
  entry.retire();
  EXPECT_EQ(names(first.retired()), Names{"of first"});
  EXPECT_EQ(names(second.retired()), Names{"of second"});
}

TEST(AddressLedger, EntriesSurviveTheGrowthOfTheirContainer) {
  AddressLedger ledger;
  std::vector<AddressLedger::Entry> entries;
  for (int i = 0; i < 100; ++i) entries.push_back(ledger.enter(range(std::to_string(i))));
  EXPECT_EQ(ledger.live().size(), 100U);
  EXPECT_TRUE(ledger.retired().empty());
  entries.erase(entries.begin() + 10, entries.begin() + 30);
  EXPECT_EQ(ledger.live().size(), 80U);
  EXPECT_EQ(ledger.retired().size(), 20U);
}

TEST(AddressLedger, AnEntryMayOutliveItsLedger) {
  auto ledger = std::make_unique<AddressLedger>();
  auto retired = ledger->enter(range("a"));
  auto forgotten = ledger->enter(range("b"));
  auto moved = ledger->enter(range("c"));
  const auto dropped = ledger->enter(range("d"));
  ledger.reset();
  retired.retire();
  forgotten.forget();
  const auto target = std::move(moved);
}

TEST(AddressLedger, LiveRangesAreListedInTheOrderOfTheirEntry) {
  AddressLedger ledger;
  const auto c = ledger.enter(range("c", 0x3000));
  auto a = ledger.enter(range("a", 0x1000));
  const auto b = ledger.enter(range("b", 0x2000));
  EXPECT_EQ(names(ledger.live()), (Names{"c", "a", "b"}));
  a.retire();
  EXPECT_EQ(names(ledger.live()), (Names{"c", "b"}));
}

TEST(AddressLedger, RetiredRangesAreListedInTheOrderOfTheirRetirement) {
  AddressLedger ledger;
  auto first = ledger.enter(range("first"));
  auto second = ledger.enter(range("second"));
  auto third = ledger.enter(range("third"));
  third.retire();
  first.retire();
  second.retire();
  EXPECT_EQ(names(ledger.retired()), (Names{"third", "first", "second"}));
}

TEST(AddressLedger, AnAddressUsedAgainIsLiveAndRetiredAtOnce) {
  AddressLedger ledger;
  { const auto entry = ledger.enter(range("old", 0x1000, 256, 1)); }
  const auto entry = ledger.enter(range("new", 0x1000, 256, 2));
  EXPECT_EQ(found(ledger, 0x1000), "new");
  ASSERT_EQ(ledger.retired().size(), 1U);
  EXPECT_EQ(ledger.retired().front().base, 0x1000U);
  EXPECT_EQ(ledger.retired().front().backing.at(0).buffer_id, 1U);
  EXPECT_EQ(ledger.find(at(0x1000))->backing.at(0).buffer_id, 2U);
}

TEST(AddressLedger, AnAddressRetiredTwiceIsInTheHistoryTwice) {
  AddressLedger ledger;
  { const auto entry = ledger.enter(range("a", 0x1000, 256, 1)); }
  { const auto entry = ledger.enter(range("a", 0x1000, 256, 2)); }
  ASSERT_EQ(ledger.retired().size(), 2U);
  EXPECT_EQ(ledger.retired()[0].backing.at(0).buffer_id, 1U);
  EXPECT_EQ(ledger.retired()[1].backing.at(0).buffer_id, 2U);
}

TEST(AddressLedger, BytesOfALiveRangeAreRefusedToEveryOther) {
  AddressLedger ledger;
  auto entry = ledger.enter(range("owner", 0x1000, 256));
  const auto refused = [&ledger](std::uintptr_t base, std::size_t bytes) {
    try {
      (void)ledger.enter(range("other", base, bytes));
    } catch (const holdfast::ContractError& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.rule(), holdfast::Rule::address_taken);
      EXPECT_NE(text.find("'owner' holds 256 bytes from 0x1000 on"), std::string::npos) << text;
      EXPECT_NE(text.find("'other'"), std::string::npos) << text;
      return true;
    }
    return false;
  };
  EXPECT_TRUE(refused(0x1000, 256));
  EXPECT_TRUE(refused(0x10FF, 1));
  EXPECT_TRUE(refused(0x0F00, 257));
  EXPECT_TRUE(refused(0x0F00, 0x1000));
  EXPECT_FALSE(refused(0x0F00, 256));
  EXPECT_FALSE(refused(0x1100, 256));
  EXPECT_FALSE(refused(0x1080, 0));
  EXPECT_EQ(names(ledger.live()), Names{"owner"});
  entry.retire();
  EXPECT_FALSE(refused(0x1000, 256)) << "a retired range owns nothing";
}

TEST(AddressLedger, OfManyThreadsThatAskForTheSameBytesOneGetsThem) {
  constexpr int kThreads = 8;
  for (int round = 0; round < 200; ++round) {
    AddressLedger ledger;
    std::atomic<int> ready{0};
    std::atomic<int> refused{0};
    std::vector<AddressLedger::Entry> entries(kThreads);
    {
      std::vector<std::jthread> threads;
      for (AddressLedger::Entry& entry : entries) {
        threads.emplace_back([&] {
          ready.fetch_add(1);
          while (ready.load() < kThreads) std::this_thread::yield();
          try {
            entry = ledger.enter(range("same", 0x1000));
          } catch (const holdfast::ContractError&) {
            refused.fetch_add(1);
          }
        });
      }
    }
    ASSERT_EQ(refused.load(), kThreads - 1);
    ASSERT_EQ(ledger.live().size(), 1U);
  }
}

void retire_all(AddressLedger& ledger, const Names& all) {
  for (const std::string& name : all) ledger.enter(range(name)).retire();
}

TEST(AddressLedger, TheHistoryKeepsTheNewestRanges) {
  AddressLedger ledger(3);
  retire_all(ledger, {"1", "2", "3"});
  EXPECT_EQ(names(ledger.retired()), (Names{"1", "2", "3"}));
  EXPECT_EQ(ledger.forgotten(), 0U);
  retire_all(ledger, {"4", "5"});
  EXPECT_EQ(names(ledger.retired()), (Names{"3", "4", "5"}));
  EXPECT_EQ(ledger.forgotten(), 2U);
}

TEST(AddressLedger, AHistoryOfOneKeepsTheLastRange) {
  AddressLedger ledger(1);
  retire_all(ledger, {"1", "2", "3"});
  EXPECT_EQ(names(ledger.retired()), Names{"3"});
  EXPECT_EQ(ledger.forgotten(), 2U);
}

TEST(AddressLedger, AHistoryOfNoneCountsWhatItForgets) {
  AddressLedger ledger(0);
  retire_all(ledger, {"1", "2", "3"});
  EXPECT_TRUE(ledger.retired().empty());
  EXPECT_EQ(ledger.forgotten(), 3U);
}

TEST(AddressLedger, TheDefaultHistoryIsBounded) {
  AddressLedger ledger;
  for (std::size_t i = 0; i <= AddressLedger::kDefaultHistory; ++i) {
    const auto entry = ledger.enter(range(std::to_string(i)));
  }
  EXPECT_EQ(ledger.retired().size(), AddressLedger::kDefaultHistory);
  EXPECT_EQ(ledger.retired().front().name, "1");
  EXPECT_EQ(ledger.forgotten(), 1U);
}

TEST(AddressLedger, TheBoundDoesNotTouchLiveRanges) {
  AddressLedger ledger(1);
  const auto a = ledger.enter(range("a"));
  const auto b = ledger.enter(range("b"));
  retire_all(ledger, {"1", "2"});
  EXPECT_EQ(names(ledger.live()), (Names{"a", "b"}));
}

TEST(AddressLedger, AListingStaysAsItWas) {
  AddressLedger ledger;
  auto entry = ledger.enter(range("a"));
  const auto listing = ledger.live();
  entry.retire();
  EXPECT_EQ(names(listing), Names{"a"});
}

TEST(AddressLedger, LedgersAndEntriesHaveOneOwner) {
  static_assert(!std::is_copy_constructible_v<AddressLedger>);
  static_assert(!std::is_copy_assignable_v<AddressLedger>);
  static_assert(!std::is_move_constructible_v<AddressLedger>);
  static_assert(!std::is_copy_constructible_v<AddressLedger::Entry>);
  static_assert(!std::is_copy_assignable_v<AddressLedger::Entry>);
  static_assert(std::is_nothrow_move_constructible_v<AddressLedger::Entry>);
  static_assert(std::is_nothrow_move_assignable_v<AddressLedger::Entry>);
}

TEST(AddressLedger, TotalsAreRightAfterEightThreads) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 300;  // per thread: a third dropped, retired and forgotten each
  constexpr std::size_t kHistory = 100;
  AddressLedger ledger(kHistory);
  std::vector<AddressLedger::Entry> kept(kThreads);
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&ledger, &kept, thread] {
        const std::uintptr_t base = static_cast<std::uintptr_t>(thread + 1) << 32;
        for (int round = 0; round < kRounds; ++round) {
          const auto step = static_cast<std::uintptr_t>(round) * 256;
          auto entry = ledger.enter(range(std::to_string(thread), base + step));
          EXPECT_EQ(found(ledger, base + step + 255), std::to_string(thread));
          if (round % 3 == 1) entry.retire();
          if (round % 3 == 2) entry.forget();
        }
        kept[static_cast<std::size_t>(thread)] = ledger.enter(range("kept"));
      });
    }
  }
  EXPECT_EQ(names(ledger.live()), Names(kThreads, "kept"));
  EXPECT_EQ(ledger.retired().size(), kHistory);
  EXPECT_EQ(ledger.forgotten(), kThreads * kRounds * 2 / 3 - kHistory);
}

TEST(AddressLedger, ListingsAreWholeWhileOtherThreadsWrite) {
  AddressLedger ledger(16);
  const auto always = ledger.enter(range("always", 0x1000));
  std::atomic<bool> stop{false};
  {
    std::vector<std::jthread> writers;
    for (int writer = 0; writer < 4; ++writer) {
      writers.emplace_back([&ledger, &stop] {
        for (int round = 0; round < 20'000 && !stop.load(); ++round) {
          ledger.enter(range("passing")).retire();
        }
      });
    }
    std::uint64_t forgotten = 0;
    for (int round = 0; round < 200; ++round) {
      EXPECT_EQ(found(ledger, 0x1000), "always");
      const Names live = names(ledger.live());
      EXPECT_TRUE(!live.empty() && live.front() == "always");
      EXPECT_LE(live.size(), 5U);
      for (const AddressRange& each : ledger.retired()) EXPECT_EQ(each.name, "passing");
      const std::uint64_t now = ledger.forgotten();
      EXPECT_GE(now, forgotten);
      forgotten = now;
    }
    stop.store(true);
  }
}

TEST(AddressLedger, EntriesMayBeDroppedWhileTheLedgerIsDestroyed) {
  for (int round = 0; round < 50; ++round) {
    auto ledger = std::make_unique<AddressLedger>(4);
    std::vector<AddressLedger::Entry> entries;
    for (int i = 0; i < 8; ++i) entries.push_back(ledger->enter(range("a")));
    const std::jthread dropper([mine = std::move(entries)]() mutable { mine.clear(); });
    ledger.reset();
  }
}

}  // namespace
