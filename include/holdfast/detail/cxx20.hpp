// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Says what is wrong where the language is older than C++20. Each header that includes no other of
/// holdfast begins with this one, so that it comes before all that would not compile.

// Not `< 202002L`: GCC 10 calls its C++20 201709L.
#if __cplusplus <= 201703L
#error holdfast needs C++20: pass -std=c++20 (CMake: CMAKE_CXX_STANDARD 20, CMAKE_CUDA_STANDARD 20)
// After #error compilers go on, to a page of syntax errors. What they cannot open stops them.
#include "see the error above"
#endif
