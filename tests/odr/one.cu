// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include <holdfast/holdfast.hpp>
#include <holdfast/kernels.cuh>

int one_cuda() { return 1; }
