# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# Every header compiles on its own, twice over, in one generated source file, and all of them behind macros. CMake's
# VERIFY_INTERFACE_HEADER_SETS would do, but it skips .cuh. As C++17 every header is refused in one line.

# holdfast_header_sources(<out> <root> <header suffix> <source suffix>)
function(holdfast_header_sources out root header_suffix source_suffix)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${root}" "${root}/*.${header_suffix}")
  if(NOT headers)
    message(FATAL_ERROR "no *.${header_suffix} under ${root}: the header tests would test nothing")
  endif()
  set(sources)
  foreach(header IN LISTS headers)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/headers/${header}.${source_suffix}")
    file(CONFIGURE OUTPUT "${source}" CONTENT "#include <${header}>\n#include <${header}>\n")
    list(APPEND sources "${source}")
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# holdfast_macro_source(<out> <root> <header suffix> <umbrella header> <source suffix>): the umbrella behind macros that
# projects define with the names of functions. Every header of others comes first: theirs need not bear such macros.
function(holdfast_macro_source out root header_suffix umbrella source_suffix)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/*.hpp" "${root}/*.${header_suffix}")
  set(lines)
  foreach(header IN LISTS headers)
    file(STRINGS "${header}" includes REGEX "^ *# *include <")
    list(APPEND lines ${includes})
  endforeach()
  list(REMOVE_DUPLICATES lines)
  foreach(name check expects ensures verify require assert_that min max CHECK EXPECT REQUIRE ASSERT VERIFY)
    list(APPEND lines "#undef ${name}" "#define ${name}(...) static_assert(false, \"a macro of the including project\")")
  endforeach()
  list(APPEND lines "#include \"${umbrella}\"")
  list(JOIN lines "\n" text)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/headers/behind_macros.${source_suffix}")
  file(CONFIGURE OUTPUT "${source}" CONTENT "${text}\n")
  set(${out} "${source}" PARENT_SCOPE)
endfunction()

holdfast_header_sources(host_header_sources "${PROJECT_SOURCE_DIR}/include" hpp cpp)
set(cxx17_sources ${host_header_sources})
holdfast_macro_source(host_macro_source "${PROJECT_SOURCE_DIR}/include" hpp holdfast/holdfast.hpp cpp)
list(APPEND host_header_sources "${host_macro_source}")
add_library(holdfast.headers.host OBJECT ${host_header_sources})
target_link_libraries(holdfast.headers.host PRIVATE holdfast::holdfast holdfast.flags)
# -Wswitch-enum is on in many a project that includes us; our tests take a default for "the rest".
target_compile_options(holdfast.headers.host PRIVATE -Werror -Wswitch-enum)

holdfast_header_sources(cuda_header_sources "${PROJECT_SOURCE_DIR}/kernels" cuh cu)
list(APPEND cxx17_sources ${cuda_header_sources})
holdfast_macro_source(cuda_macro_source "${PROJECT_SOURCE_DIR}/kernels" cuh holdfast/kernels.cuh cu)
list(APPEND cuda_header_sources "${cuda_macro_source}")
add_library(holdfast.headers.cuda OBJECT ${cuda_header_sources})
target_link_libraries(holdfast.headers.cuda PRIVATE holdfast::kernels holdfast.flags)

# A second compiler in one build is a test, not a target.
find_program(HOLDFAST_CLANG NAMES clang++ clang++-14 DOC "clang++ for the header test")
if(HOLDFAST_CLANG)
  set(include_dirs "$<TARGET_PROPERTY:holdfast.headers.host,INCLUDE_DIRECTORIES>")
  # Other people's headers as system headers; ours not, or their warnings would be lost.
  set(other_dirs "$<FILTER:${include_dirs},EXCLUDE,^${PROJECT_SOURCE_DIR}/include$>")
  add_test(
    NAME headers.clang
    COMMAND "${HOLDFAST_CLANG}" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Werror
            "-I${PROJECT_SOURCE_DIR}/include" "-isystem$<JOIN:${other_dirs},;-isystem>" ${host_header_sources}
    COMMAND_EXPAND_LISTS)
  set_tests_properties(headers.clang PROPERTIES TIMEOUT 300)
else()
  set_property(GLOBAL APPEND PROPERTY holdfast_left_out "header test with clang++ (no clang++ found)")
endif()

# holdfast_cxx17_test(<name> <compiler with its options> <source>...)
function(holdfast_cxx17_test name compiler)
  set(include_dirs "$<TARGET_PROPERTY:holdfast.headers.cuda,INCLUDE_DIRECTORIES>")
  add_test(
    NAME headers.cxx17.${name}
    COMMAND "${CMAKE_COMMAND}" "-DCOMPILER=${compiler};-std=c++17;-I$<JOIN:${include_dirs},;-I>" "-DSOURCES=${ARGN}" -P
            "${PROJECT_SOURCE_DIR}/cmake/check_cxx17.cmake")
  set_tests_properties(headers.cxx17.${name} PROPERTIES TIMEOUT 120)
endfunction()
# The refusal comes before anything of CUDA, so a host compiler sees it in a .cu file as well, and far sooner than nvcc.
holdfast_cxx17_test(host "${CMAKE_CXX_COMPILER};-fsyntax-only;-x;c++" ${cxx17_sources})
if(HOLDFAST_CLANG)
  holdfast_cxx17_test(clang "${HOLDFAST_CLANG};-fsyntax-only"
                      "${CMAKE_CURRENT_BINARY_DIR}/headers/holdfast/holdfast.hpp.cpp")
endif()
holdfast_cxx17_test(cuda "${CMAKE_CUDA_COMPILER};-c;-o;/dev/null"
                    "${CMAKE_CURRENT_BINARY_DIR}/headers/holdfast/kernels.cuh.cu")
