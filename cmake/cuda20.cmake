# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# CMake 3.25 does not know C++20 for nvcc: the feature cuda_std_20 is an error, and CMAKE_CUDA_STANDARD 20 is dropped
# without a word. These variables teach it. They are read in the directory of the target that is compiled, so a
# consumer needs them too: the installed package includes this file. Enable the CUDA language before it.
if(CMAKE_CUDA_COMPILER_LOADED AND NOT "cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_COMPILE_FEATURES cuda_std_20)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
