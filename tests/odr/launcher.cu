// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Compiled several times, for other architectures and with other flags: the build gives FUNCTION.

#include <holdfast/kernels.cuh>

#include "launcher.hpp"

Launcher FUNCTION() {
  using holdfast::mhc::detail::collapse_kernel;
  return {reinterpret_cast<const void*>(&holdfast::mhc::pre<>),
          reinterpret_cast<const void*>(&collapse_kernel<holdfast::mhc::kMixes>),
          &typeid(holdfast::StreamSum<float>), &typeid(holdfast::Relayout<float>)};
}
