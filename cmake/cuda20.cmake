# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# What makes nvcc compile C++20, as a target, so that it reaches every user of holdfast, in whatever folder. It is not
# part of the export: the CMake that builds the user decides, not the one that installed holdfast.
if(NOT TARGET holdfast::cuda20)
  add_library(holdfast::cuda20 INTERFACE IMPORTED GLOBAL)
  if(CMAKE_VERSION VERSION_LESS 3.25.2)
    # It does not know C++20 for nvcc: the feature is an error, and CUDA_STANDARD 20 is dropped without a word.
    set_property(TARGET holdfast::cuda20 PROPERTY INTERFACE_COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
  else()
    # A user's later standard wins. Not by target_compile_features, which wants the CUDA language to be enabled already.
    set_property(TARGET holdfast::cuda20 PROPERTY INTERFACE_COMPILE_FEATURES cuda_std_20)
  endif()
endif()
