// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>

// Defined in the other files of this program.
int two();
int one_cuda();
int two_cuda();

int main() { return one_cuda() + two_cuda() + two() == 3 ? 0 : 1; }
