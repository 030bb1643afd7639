// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>
#include <holdfast/kernels.cuh>

#include <typeinfo>

int one_cuda() { return 1; }

const char* recipe_type() { return typeid(holdfast::StreamSum<float>).name(); }
