// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What every recipe asks of the address that it is to write, before it enqueues anything.

#include "holdfast/error.hpp"
#include "holdfast/tensor_view.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace holdfast::detail {

/// `out` has room for `bytes` > 0 bytes of To. `name` says in an error which recipe asks.
/// \throws ContractError null_pointer, misaligned, source_overlaps_target.
template <class To, MessageText Name>
void expects_target(const To* out, std::int64_t bytes, const ByteRange& source, const Name& name) {
  throw_unless(out != nullptr, Rule::null_pointer,
               [&name] { return name() + ": the address of the result is null"; });
  throw_unless(reinterpret_cast<std::uintptr_t>(out) % alignof(To) == 0, Rule::misaligned, [&name] {
    return name() + ": the address of the result is not a multiple of " +
           std::to_string(alignof(To)) + " bytes, the alignment of " + to_string(kElementType<To>);
  });
  const auto* const begin = reinterpret_cast<const std::byte*>(out);
  throw_unless(
      !source.overlaps({begin, begin + bytes, source.device}), Rule::source_overlaps_target,
      [&name] { return name() + ": the result overlaps the source; give it other memory"; });
}

}  // namespace holdfast::detail
