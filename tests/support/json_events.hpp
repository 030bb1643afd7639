// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// JSON that is not believed, event by event. A document that nlohmann's parser built would merge
/// equal keys and could take many times the memory of its text.

#include "support/checkpoint_error.hpp"

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace holdfast::bench::detail {

/// Takes the events of nlohmann's parser. A derived class overrides those that its format has, and
/// follows the nesting of its format alone: a value of no interest is passed over here, however
/// deep it is. Neither this nor the parser recurses.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  /// \throws CheckpointError unless `text` is JSON that the derived class accepts.
  void parse(const std::string& text) {
    // Checked here because the parser takes a NUL for the end, and would not see what follows.
    if (const std::size_t nul = text.find('\0'); nul != std::string::npos) {
      refuse(path_, document_, "JSON", "a NUL at byte " + std::to_string(nul), advice_);
    }
    // The events throw; they never ask the parser to stop.
    (void)nlohmann::json::sax_parse(text.begin(), text.end(), this);
  }

  bool null() final { return scalar("null"); }
  bool boolean(bool value) final { return scalar(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) final { return scalar(std::to_string(value)); }
  /// Fractions, exponents, and integers of 2^64 and above.
  bool number_float(double /*value*/, const std::string& text) final {
    return scalar(printable(text, 40));
  }
  bool binary(binary_t& /*value*/) final { return scalar("binary"); }

  bool number_unsigned(std::uint64_t value) final {
    if (!passed_over()) on_unsigned(value);
    return true;
  }
  bool string(std::string& value) final {
    if (!passed_over()) on_string(value);
    return true;
  }
  bool key(std::string& value) final {
    if (!passing_over_) on_key(value);
    return true;
  }
  bool start_object(std::size_t /*size*/) final {
    if (!passed_over(+1)) on_object();
    return true;
  }
  bool end_object() final {
    if (!passed_over(-1)) on_object_end();
    return true;
  }
  bool start_array(std::size_t /*size*/) final {
    if (!passed_over(+1)) on_array();
    return true;
  }
  bool end_array() final {
    if (!passed_over(-1)) on_array_end();
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& error) final {
    // The parser quotes the bytes that it could not read: they need not be UTF-8.
    std::string reason = printable(error.what());
    for (char& c : reason) {
      if (static_cast<unsigned char>(c) >= 0x80) c = '?';
    }
    refuse(path_, document_, "JSON", "an error at byte " + std::to_string(position) + ": " + reason,
           advice_);
  }

 protected:
  /// For messages. `path` is borrowed.
  JsonEvents(const std::string& path, const char* document, const char* advice)
      : path_(path), document_(document), advice_(advice) {}

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// On a key: no event of its value comes.
  void pass_over_value() noexcept { passing_over_ = true; }

  virtual void on_key(std::string& key) = 0;
  virtual void on_object() { unexpected("an object"); }
  virtual void on_object_end() = 0;
  virtual void on_array() { unexpected("an array"); }
  virtual void on_array_end() {}
  virtual void on_unsigned(std::uint64_t value) { unexpected(std::to_string(value)); }
  virtual void on_string(std::string& value) {
    unexpected("the string \"" + printable(value, 40) + "\"");
  }
  /// Refuses `found`, which the format does not have here.
  [[noreturn]] virtual void unexpected(const std::string& found) const = 0;

 private:
  bool scalar(const std::string& found) {
    if (!passed_over()) unexpected(found);
    return true;
  }

  /// Whether an event belongs to a value of no interest, and whether that value ends with it.
  [[nodiscard]] bool passed_over(int nesting = 0) noexcept {
    if (!passing_over_) return false;
    depth_ += nesting;
    passing_over_ = depth_ > 0;
    return true;
  }

  const std::string& path_;
  const char* document_;
  const char* advice_;
  bool passing_over_ = false;
  std::int64_t depth_ = 0;
};

}  // namespace holdfast::bench::detail
