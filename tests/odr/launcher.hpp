// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <typeinfo>

/// What launches kernels in one file of a program.
struct Launcher {
  const void* pre;
  const void* kernel;
  const std::type_info* stream_sum;
  const std::type_info* relayout;
};
