# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# cmake -DCOMPILER=<command;option...> -DSOURCES=a;b -P check_cxx17.cmake
#
# The command compiles as C++17, which must fail with the line that says what to do, the stop after it and nothing else.
if(NOT SOURCES)
  message(FATAL_ERROR "no source to compile")
endif()
set(refusal "^error: [^\n]*holdfast needs C\\+\\+20[^\n]*\nerror: [^\n]*see the error above[^\n]*$")
foreach(source IN LISTS SOURCES)
  execute_process(COMMAND ${COMPILER} "${source}" RESULT_VARIABLE exit_code OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  string(REGEX MATCHALL "error:[^\n]*" errors "${output}")
  list(JOIN errors "\n" lines)
  if(exit_code EQUAL 0 OR NOT lines MATCHES "${refusal}")
    message(FATAL_ERROR "${source}: not refused as C++17 in one line (exit code ${exit_code}):\n${output}")
  endif()
endforeach()
