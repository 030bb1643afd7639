# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# Runs ${PROGRAM}, graph_replay, where it sees no GPU: it must turn into the simulated one and say so, and must not
# where HOLDFAST_REQUIRE_GPU=1 forbids it, or where there is a driver that is too old (that of ${OLD_DRIVER}).
set(ENV{CUDA_VISIBLE_DEVICES} "")
set(ENV{HOLDFAST_REQUIRE_GPU} "")
execute_process(COMMAND "${PROGRAM}" --graphs 1 --nodes 2 RESULT_VARIABLE result OUTPUT_VARIABLE output
                ERROR_VARIABLE error)
if(NOT result EQUAL 0 OR NOT output MATCHES "SIMULATED" OR NOT output MATCHES "rebind +STALE" OR
   NOT error MATCHES "no CUDA (driver|device)")
  message(FATAL_ERROR "expected the simulated run, found exit code ${result}:\n${output}\n${error}")
endif()
set(ENV{HOLDFAST_REQUIRE_GPU} 1)
execute_process(COMMAND "${PROGRAM}" --graphs 1 --nodes 2 RESULT_VARIABLE result OUTPUT_VARIABLE output
                ERROR_VARIABLE error)
if(NOT result EQUAL 1 OR NOT error MATCHES "HOLDFAST_REQUIRE_GPU=1: no CUDA (driver|device)")
  message(FATAL_ERROR "expected a refusal, found exit code ${result}:\n${output}\n${error}")
endif()
set(ENV{HOLDFAST_REQUIRE_GPU} "")
set(ENV{LD_LIBRARY_PATH} "${OLD_DRIVER}:$ENV{LD_LIBRARY_PATH}")
execute_process(COMMAND "${PROGRAM}" --graphs 1 --nodes 2 RESULT_VARIABLE result OUTPUT_VARIABLE output
                ERROR_VARIABLE error)
if(NOT result EQUAL 1 OR NOT error MATCHES "supports CUDA 12.4, this program needs 1[0-9]+.[0-9]+; update the driver")
  message(FATAL_ERROR "expected to be told to update the driver, found exit code ${result}:\n${output}\n${error}")
endif()
