# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/holdfast")

install(DIRECTORY include/ DESTINATION include FILES_MATCHING PATTERN "*.hpp")
install(DIRECTORY kernels/ DESTINATION include FILES_MATCHING PATTERN "*.cuh")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")

install(TARGETS holdfast holdfast_kernels EXPORT holdfast-targets)
install(EXPORT holdfast-targets NAMESPACE holdfast:: DESTINATION "${package_dir}")
# The same package for the build tree: -Dholdfast_DIR=<build folder>.
export(EXPORT holdfast-targets NAMESPACE holdfast:: FILE "${CMAKE_CURRENT_BINARY_DIR}/holdfast-targets.cmake")

configure_package_config_file(
  cmake/holdfast-config.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/holdfast-config.cmake"
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break its users.
write_basic_package_version_file(
  "${CMAKE_CURRENT_BINARY_DIR}/holdfast-config-version.cmake" COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
configure_file(cmake/cuda20.cmake "${CMAKE_CURRENT_BINARY_DIR}/cuda20.cmake" COPYONLY)
install(
  FILES "${CMAKE_CURRENT_BINARY_DIR}/holdfast-config.cmake"
        "${CMAKE_CURRENT_BINARY_DIR}/holdfast-config-version.cmake" cmake/cuda20.cmake
  DESTINATION "${package_dir}")
