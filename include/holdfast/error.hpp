// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The errors that holdfast throws, and the functions that throw them.
///
/// Every message names the operation, the object, what was expected, what was found and what to do.
/// A failed operation has changed nothing unless its own documentation says otherwise. Nothing here
/// prints, exits or keeps an error for later.

#include "holdfast/detail/cxx20.hpp"

#include <cuda/std/source_location>
#include <cuda_runtime_api.h>

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace holdfast {

/// The rule that a caller broke; the machine-readable half of a ContractError.
enum class Rule : std::uint8_t {
  null_pointer,       ///< a view of at least one element has no address
  unsupported_shape,  ///< rank above 5, a negative extent, or extents that the operation rejects
  size_overflow,      ///< a size in elements or bytes does not fit its integer
  shape_mismatch,     ///< the shape is not the object's, or not that of tensors beside it
  type_mismatch,      ///< the element type is not the object's
  device_mismatch,    ///< stream, memory and object do not lie on one device
  not_contiguous,     ///< a row-major view without gaps is required here
  misaligned,         ///< the address is not a multiple of the element's alignment
  read_only,          ///< the view promises not to write, and the operation writes
  source_overlaps_target,  ///< a recipe reads memory that it is about to write
  overlapping,             ///< a result of an operation shares memory with another of its tensors
  invalid_parameter,       ///< a number is outside the range that the operation takes
  not_allocated,           ///< the buffer has no address yet
  address_taken,           ///< another buffer holds some of these bytes
  already_allocated,       ///< the buffer has its address for life and cannot get another one
  allocation_in_capture,   ///< a first finalize on a stream that is being captured
  refit_in_capture,        ///< a later finalize on a stream that is being captured
  order_in_capture,        ///< a use or a wait cannot be recorded while the stream is captured
  moved_from,              ///< the object was moved away
};

/// Why a refit could not go on; the machine-readable half of a RefitError.
enum class Reason : std::uint8_t {
  busy,   ///< the same object is being changed, by another thread or by the caller of this one
  unset,  ///< the contents are undefined: no finalize has succeeded since they were last lost
};

[[nodiscard]] constexpr const char* to_string(Rule rule) noexcept {
  switch (rule) {
    case Rule::null_pointer: return "null_pointer";
    case Rule::unsupported_shape: return "unsupported_shape";
    case Rule::size_overflow: return "size_overflow";
    case Rule::shape_mismatch: return "shape_mismatch";
    case Rule::type_mismatch: return "type_mismatch";
    case Rule::device_mismatch: return "device_mismatch";
    case Rule::not_contiguous: return "not_contiguous";
    case Rule::misaligned: return "misaligned";
    case Rule::read_only: return "read_only";
    case Rule::source_overlaps_target: return "source_overlaps_target";
    case Rule::overlapping: return "overlapping";
    case Rule::invalid_parameter: return "invalid_parameter";
    case Rule::not_allocated: return "not_allocated";
    case Rule::address_taken: return "address_taken";
    case Rule::already_allocated: return "already_allocated";
    case Rule::allocation_in_capture: return "allocation_in_capture";
    case Rule::refit_in_capture: return "refit_in_capture";
    case Rule::order_in_capture: return "order_in_capture";
    case Rule::moved_from: return "moved_from";
  }
  return "unknown";
}

[[nodiscard]] constexpr const char* to_string(Reason reason) noexcept {
  switch (reason) {
    case Reason::busy: return "busy";
    case Reason::unset: return "unset";
  }
  return "unknown";
}

/// The caller broke a documented rule. Nothing has changed, unless a recipe of the caller's threw
/// it; the same call, corrected, works.
class ContractError : public std::logic_error {
 public:
  ContractError(Rule rule, const std::string& message) : std::logic_error(message), rule_(rule) {}
  [[nodiscard]] Rule rule() const noexcept { return rule_; }

 private:
  Rule rule_;
};

/// The call was right, but the object could not serve it now.
class RefitError : public std::runtime_error {
 public:
  RefitError(Reason reason, const std::string& message)
      : std::runtime_error(message), reason_(reason) {}
  [[nodiscard]] Reason reason() const noexcept { return reason_; }

 private:
  Reason reason_;
};

/// A CUDA call failed.
class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t code, const std::string& message)
      : std::runtime_error(message), code_(code) {}
  [[nodiscard]] cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

/// Device memory ran out. Caught alone by callers that can free something and try again.
class OutOfMemory : public CudaError {
 public:
  using CudaError::CudaError;
};

/// Text for an error message: a string, or a callable that builds one only when it is needed.
template <class Text>
concept MessageText = std::convertible_to<Text, std::string_view> || requires(const Text& text) {
  { text() } -> std::convertible_to<std::string>;
};

namespace detail {

template <MessageText Text>
[[nodiscard]] std::string render(const Text& text, const cuda::std::source_location& where) {
  std::string message;
  if constexpr (std::convertible_to<Text, std::string_view>) {
    message = std::string_view(text);
  } else {
    message = text();
  }
  message += " (";
  message += where.file_name();
  message += ':';
  message += std::to_string(where.line());
  message += ')';
  return message;
}

/// Takes `code` off the calling thread's last-error slot, and leaves any other error there. A
/// sticky error (a device fault) comes back with every later call, so it cannot be lost this way.
inline void clear_last_error(cudaError_t code) noexcept {
  if (cudaPeekAtLastError() == code) (void)cudaGetLastError();
}

/// For code that cannot throw: whether a call worked, without leaving its error behind.
[[nodiscard]] inline bool succeeded(cudaError_t code) noexcept {
  if (code != cudaSuccess) clear_last_error(code);
  return code == cudaSuccess;
}

}  // namespace detail

/// Throws unless `condition` holds.
/// \throws ContractError with `rule`.
template <MessageText Text>
void throw_unless(bool condition, Rule rule, const Text& text,
                  const cuda::std::source_location& where = cuda::std::source_location::current()) {
  if (!condition) [[unlikely]] {
    throw ContractError(rule, detail::render(text, where) + " [" + to_string(rule) + "]");
  }
}

/// Throws unless `condition` holds.
/// \throws RefitError with `reason`.
template <MessageText Text>
void throw_unless(bool condition, Reason reason, const Text& text,
                  const cuda::std::source_location& where = cuda::std::source_location::current()) {
  if (!condition) [[unlikely]] {
    throw RefitError(reason, detail::render(text, where) + " [" + to_string(reason) + "]");
  }
}

/// Throws unless a CUDA call succeeded, and takes the error off the thread's last-error slot.
/// \throws OutOfMemory if `code` is cudaErrorMemoryAllocation, CudaError for every other failure.
template <MessageText Text>
void throw_on_error(
    cudaError_t code, const Text& text,
    const cuda::std::source_location& where = cuda::std::source_location::current()) {
  if (code == cudaSuccess) [[likely]]
    return;
  detail::clear_last_error(code);
  const std::string message = detail::render(text, where) + ": " + cudaGetErrorName(code) + " (" +
                              std::to_string(static_cast<int>(code)) +
                              "): " + cudaGetErrorString(code);
  if (code == cudaErrorMemoryAllocation) throw OutOfMemory(code, message);
  throw CudaError(code, message);
}

}  // namespace holdfast
