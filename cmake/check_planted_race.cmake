# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# cmake -DPROGRAM=<launcher;program> -DMODE=<its argument> -P check_planted_race.cmake
#
# A ThreadSanitizer run that reports nothing proves something only if it would have reported a race. The program plants
# one, except in the mode `ordered`.
execute_process(COMMAND ${PROGRAM} ${MODE} RESULT_VARIABLE exit_code OUTPUT_VARIABLE output ERROR_VARIABLE output)
message(STATUS "${output}")
string(FIND "${output}" "WARNING: ThreadSanitizer: data race" report)
if(MODE STREQUAL "ordered")
  if(NOT report EQUAL -1 OR NOT exit_code STREQUAL "0")
    message(FATAL_ERROR "the ordered program is not silent (exit code '${exit_code}')")
  endif()
elseif(report EQUAL -1 OR exit_code STREQUAL "0")
  message(FATAL_ERROR "the planted race was not reported (exit code '${exit_code}')")
endif()
