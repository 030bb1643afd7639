// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Everything in include/: what a plain .cpp file of an engine needs. It takes any C++20 host
/// compiler and the headers of CUDA 13.0 or later.
///
/// Conventions: a function that takes a stream enqueues on it and returns, unless its first line
/// says that it synchronises. Streams are the last parameter and never defaulted. Sizes are int64,
/// in elements unless the name says bytes. Every error is an exception of error.hpp.

#include "holdfast/address_ledger.hpp"
#include "holdfast/error.hpp"
#include "holdfast/memory_resource.hpp"
#include "holdfast/recipe.hpp"
#include "holdfast/stable_buffer.hpp"
#include "holdfast/tensor_view.hpp"

#include <cuda_runtime_api.h>

namespace holdfast {

inline constexpr int kVersionMajor = 0;
inline constexpr int kVersionMinor = 1;
inline constexpr int kVersionPatch = 0;

static_assert(CUDART_VERSION >= 13000, "holdfast needs the CUDA Toolkit 13.0 or later");

}  // namespace holdfast
