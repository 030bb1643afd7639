# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# Flags of our own tests and benchmarks; linked PRIVATE, so that no consumer inherits them.
add_library(holdfast.flags INTERFACE)

# No -Wpedantic for CUDA: the host code that nvcc generates uses GNU line markers.
set(warnings -Wall -Wextra -Wshadow)
target_compile_options(
  holdfast.flags
  INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings};-Wpedantic>"
            "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=$<JOIN:${warnings},$<COMMA>>>")
if(HOLDFAST_WERROR)
  target_compile_options(
    holdfast.flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>"
                             "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings -Xcompiler=-Werror>")
endif()

# Apart from the warnings: the simulated runtime is built without ThreadSanitizer.
add_library(holdfast.sanitizer INTERFACE)
if(HOLDFAST_SANITIZE)
  # One flag for each sanitizer: -Xcompiler splits its value at commas.
  string(REPLACE "," ";" sanitizers "${HOLDFAST_SANITIZE}")
  list(TRANSFORM sanitizers PREPEND "-fsanitize=")
  set(sanitize_flags ${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(
    holdfast.sanitizer
    INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags}>"
              "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=$<JOIN:${sanitize_flags},$<COMMA>>>")
  target_link_options(holdfast.sanitizer INTERFACE ${sanitizers})
endif()
