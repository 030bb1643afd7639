# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# Examples in the README are quotations of tests, so that they cannot rot: what stands between the
# marks "README begin" and "README end" of each file in EXAMPLES, less its indentation, must stand in
# README. Run as: cmake -DREADME=... -DEXAMPLES=a;b -P check_readme.cmake

file(READ "${README}" readme)
if(NOT EXAMPLES)
  message(FATAL_ERROR "no examples to look for")
endif()
foreach(example IN LISTS EXAMPLES)
  file(READ "${example}" text)
  string(FIND "${text}" "  // README begin\n" begin)
  string(FIND "${text}" "  // README end\n" end)
  if(begin EQUAL -1 OR end LESS begin)
    message(FATAL_ERROR "${example}: no 'README begin' before a 'README end'")
  endif()
  string(LENGTH "  // README begin\n" mark)
  math(EXPR begin "${begin} + ${mark}")
  math(EXPR length "${end} - ${begin}")
  string(SUBSTRING "${text}" ${begin} ${length} quote)
  string(REGEX REPLACE "\n  " "\n" quote "\n${quote}")
  string(SUBSTRING "${quote}" 1 -1 quote)
  string(FIND "${readme}" "${quote}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "README.md does not quote ${example}:\n${quote}")
  endif()
endforeach()
