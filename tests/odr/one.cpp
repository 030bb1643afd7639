// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>

#include "refusal.hpp"

#include <cstdio>
#include <cstring>

// Defined in the other files of this program.
bool two();
bool one_cuda();
bool two_cuda();
const char* recipe_type();
const char* recipe_type_of_other_architecture();

int main() {
  if (!refusal_is_right() || !two() || !one_cuda() || !two_cuda()) {
    std::puts("a refusal's text was built for another layout of its values");
    return 1;
  }
  if (std::strcmp(recipe_type(), recipe_type_of_other_architecture()) == 0) {
    std::puts("files for two architectures share the functions that launch kernels");
    return 1;
  }
  return 0;
}
