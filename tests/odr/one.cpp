// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>

#include "launcher.hpp"

#include <cstdio>
#include <utility>
#include <vector>

// Defined in the other files of this program.
int two();
int one_cuda();
int two_cuda();
Launcher tuned();
Launcher fast_math();
Launcher portable();
Launcher other_architecture();
Launcher relocatable();
Launcher relocatable_fast_math();

int main() {
  const std::vector<std::pair<const char*, Launcher>> files{
      {"sm_90a", tuned()},
      {"sm_90a, fast math", fast_math()},
      {"PTX of compute_90", portable()},
      {"sm_80", other_architecture()},
      {"relocatable", relocatable()},
      {"relocatable, fast math", relocatable_fast_math()}};
  int shared = 0;
  for (const auto& [name, file] : files) {
    for (const auto& [other_name, other] : files) {
      if (&file == &other) continue;
      if (file.pre != other.pre && file.kernel != other.kernel &&
          *file.stream_sum != *other.stream_sum && *file.relayout != *other.relayout) {
        continue;
      }
      std::printf("the files for %s and for %s share functions that launch kernels\n", name,
                  other_name);
      ++shared;
    }
  }
  return shared == 0 && two() + one_cuda() + two_cuda() == 3 ? 0 : 1;
}
