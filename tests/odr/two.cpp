// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>

#include "refusal.hpp"

bool two() { return refusal_is_right(); }
