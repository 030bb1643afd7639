// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <holdfast/tensor_view.hpp>

#include <string>

/// Whether a refusal that captures several values tells them right. The linker keeps one copy of
/// the code that builds its text, and that copy must fit the closures of every compiler.
static bool refusal_is_right() {
  float values[4] = {};
  const holdfast::TensorView view(values, {4}, 0);
  try {
    (void)view.slice(0, 3, 17);
  } catch (const holdfast::ContractError& error) {
    return std::string(error.what()).find("axis 0, start 3, length 17") != std::string::npos;
  }
  return false;
}
