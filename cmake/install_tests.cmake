# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# A consumer project is configured, built and run against the build tree and against an installed tree.
set(prefix "${CMAKE_CURRENT_BINARY_DIR}/install/prefix")
add_test(NAME install.clean COMMAND "${CMAKE_COMMAND}" -E rm -rf "${prefix}")
add_test(NAME install.install COMMAND "${CMAKE_COMMAND}" --install "${PROJECT_BINARY_DIR}" --prefix "${prefix}")
set_tests_properties(install.clean PROPERTIES FIXTURES_SETUP cleaned_prefix TIMEOUT 60)
set_tests_properties(install.install PROPERTIES FIXTURES_REQUIRED cleaned_prefix FIXTURES_SETUP installed_tree TIMEOUT 60)

# holdfast_consumer_test(<name> <folder of the package> <language of the consumer>)
function(holdfast_consumer_test name package language)
  add_test(
    NAME install.${name}
    COMMAND
      "${CMAKE_CTEST_COMMAND}" --build-and-test "${CMAKE_CURRENT_SOURCE_DIR}/install"
      "${CMAKE_CURRENT_BINARY_DIR}/install/${name}" --build-generator "${CMAKE_GENERATOR}" --build-options
      "-Dholdfast_DIR=${package}" "-DCONSUMER_LANGUAGE=${language}" "-DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE}"
      "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_CUDA_COMPILER=${CMAKE_CUDA_COMPILER}"
      "-DCMAKE_CUDA_ARCHITECTURES=${CMAKE_CUDA_ARCHITECTURES}" --test-command "${CMAKE_CTEST_COMMAND}"
      --output-on-failure --no-tests=error)
  set_tests_properties(install.${name} PROPERTIES TIMEOUT 600)
endfunction()

include(GNUInstallDirs)
set(installed_package "${prefix}/${CMAKE_INSTALL_LIBDIR}/cmake/holdfast")
holdfast_consumer_test(build_tree "${PROJECT_BINARY_DIR}" CUDA)
holdfast_consumer_test(installed_tree "${installed_package}" CUDA)
holdfast_consumer_test(installed_tree_host "${installed_package}" CXX)
set_tests_properties(install.installed_tree install.installed_tree_host PROPERTIES FIXTURES_REQUIRED installed_tree)
