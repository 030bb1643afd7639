// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// The umbrella header.

#include "holdfast/holdfast.hpp"

#include <gtest/gtest.h>

#include <string>

namespace {

TEST(Holdfast, HasTheVersionOfItsPackage) {
  EXPECT_EQ(std::to_string(holdfast::kVersionMajor) + "." +
                std::to_string(holdfast::kVersionMinor) + "." +
                std::to_string(holdfast::kVersionPatch),
            HOLDFAST_TEST_VERSION);
}

}  // namespace
