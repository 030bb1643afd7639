# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# A consumer project is configured, built and run against the build tree, an installed tree and the sources.
set(prefix "${CMAKE_CURRENT_BINARY_DIR}/install/prefix")
add_test(NAME install.clean COMMAND "${CMAKE_COMMAND}" -E rm -rf "${prefix}")
add_test(NAME install.install COMMAND "${CMAKE_COMMAND}" --install "${PROJECT_BINARY_DIR}" --prefix "${prefix}")
set_tests_properties(install.clean PROPERTIES FIXTURES_SETUP cleaned_prefix TIMEOUT 60)
set_tests_properties(install.install PROPERTIES FIXTURES_REQUIRED cleaned_prefix FIXTURES_SETUP installed_tree TIMEOUT 60)

# holdfast_consumer_test(<name> <where holdfast is: variable=folder> <language of the consumer> [option of it...])
function(holdfast_consumer_test name where language)
  add_test(
    NAME install.${name}
    COMMAND
      "${CMAKE_CTEST_COMMAND}" --build-and-test "${CMAKE_CURRENT_SOURCE_DIR}/install"
      "${CMAKE_CURRENT_BINARY_DIR}/install/${name}" --build-generator "${CMAKE_GENERATOR}" --build-options
      "-D${where}" "-DCONSUMER_LANGUAGE=${language}" ${ARGN} "-DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE}"
      "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_CUDA_COMPILER=${CMAKE_CUDA_COMPILER}"
      "-DCMAKE_CUDA_ARCHITECTURES=${CMAKE_CUDA_ARCHITECTURES}" --test-command "${CMAKE_CTEST_COMMAND}"
      --output-on-failure --no-tests=error)
  set_tests_properties(install.${name} PROPERTIES TIMEOUT 600)
endfunction()

include(GNUInstallDirs)
set(installed_package "${prefix}/${CMAKE_INSTALL_LIBDIR}/cmake/holdfast")
holdfast_consumer_test(build_tree "holdfast_DIR=${PROJECT_BINARY_DIR}" CUDA)
holdfast_consumer_test(build_tree_far "holdfast_DIR=${PROJECT_BINARY_DIR}" CUDA -DCONSUMER_FAR=ON)
holdfast_consumer_test(installed_tree "holdfast_DIR=${installed_package}" CUDA)
holdfast_consumer_test(installed_tree_host "holdfast_DIR=${installed_package}" CXX)
holdfast_consumer_test(sources "CONSUMER_SOURCES=${PROJECT_SOURCE_DIR}" CUDA)
holdfast_consumer_test(sources_far "CONSUMER_SOURCES=${PROJECT_SOURCE_DIR}" CUDA -DCONSUMER_FAR=ON)
holdfast_consumer_test(sources_host "CONSUMER_SOURCES=${PROJECT_SOURCE_DIR}" CXX)
set_tests_properties(install.installed_tree install.installed_tree_host PROPERTIES FIXTURES_REQUIRED installed_tree)
