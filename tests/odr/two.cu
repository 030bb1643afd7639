// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>
#include <holdfast/kernels.cuh>

#include "refusal.hpp"

bool two_cuda() { return refusal_is_right(); }
