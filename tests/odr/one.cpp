// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>

#include <cstdio>
#include <cstring>

// Defined in the other files of this program.
int two();
int one_cuda();
int two_cuda();
const char* recipe_type();
const char* recipe_type_of_other_architecture();

int main() {
  if (std::strcmp(recipe_type(), recipe_type_of_other_architecture()) == 0) {
    std::puts("files for two architectures share the functions that launch kernels");
    return 1;
  }
  return two() + one_cuda() + two_cuda() == 3 ? 0 : 1;
}
