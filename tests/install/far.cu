// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// A .cu file of a consumer that uses the host layer alone: it is compiled as C++20 or later, too.

#include <holdfast/error.hpp>

int main() { return __cplusplus >= 202002L ? 0 : 1; }
