// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>
#include <holdfast/kernels.cuh>

#include "refusal.hpp"

#include <typeinfo>

bool one_cuda() { return refusal_is_right(); }

const char* recipe_type() { return typeid(holdfast::StreamSum<float>).name(); }
