// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Calls that must be refused.

#include "holdfast/error.hpp"

#include <gtest/gtest.h>

#include <string>

namespace test {

/// `call` throws a ContractError of `rule` whose message names `operation` and holds `text`.
template <class Call>
void expect_refused(holdfast::Rule rule, const std::string& operation, const std::string& text,
                    const Call& call) {
  try {
    call();
    ADD_FAILURE() << "accepted: " << text;
  } catch (const holdfast::ContractError& error) {
    EXPECT_EQ(error.rule(), rule) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(operation), std::string::npos) << error.what();
  }
}

}  // namespace test
