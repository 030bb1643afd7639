// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The error of everything that reads a checkpoint. A checkpoint comes from outside, and so does
/// what a message quotes of it: whatever bytes it has, the message is one line.

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace holdfast::bench {

/// The file is not a checkpoint that can be used. One line that names the file, what was expected,
/// what was found and what to do.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

inline constexpr const char* kDamaged =
    "the file is damaged or not a safetensors file: fetch or write it again";

/// `text` on one line and without control characters, cut to `limit` bytes between characters.
[[nodiscard]] inline std::string printable(std::string_view text, std::size_t limit = 200) {
  bool cut = false;
  if (text.size() > limit) {
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80U) --limit;
    text = text.substr(0, limit);
    cut = true;
  }
  constexpr std::string_view hex = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += "\\x";
      out += hex[byte >> 4U];
      out += hex[byte & 0xFU];
    } else {
      out += c;
    }
  }
  if (cut) out += "...";
  return out;
}

[[nodiscard]] inline std::string in_tensor(std::string_view name) {
  return "tensor \"" + printable(name) + "\"";
}

[[noreturn]] inline void refuse(const std::string& path, const std::string& subject,
                                const std::string& expected, const std::string& found,
                                const std::string& advice = kDamaged) {
  // No limit on the path: a name that was cut does not lead to the file.
  throw CheckpointError(printable(path, path.size()) + ": " + subject + ": expected " + expected +
                        ", found " + found + "; " + advice);
}

}  // namespace detail
}  // namespace holdfast::bench
