// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// StableBuffer keeps both promises of the suite: right sums, and identity through refits.

#include "holdfast/stable_buffer.hpp"

#include "support/refit_suite.cuh"

namespace test {

INSTANTIATE_TYPED_TEST_SUITE_P(StableBuffer, Refit, holdfast::StableBuffer<float>);

}  // namespace test
