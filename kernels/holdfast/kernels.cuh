// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// All recipes and mHC operations that holdfast ships. This half needs nvcc; holdfast.hpp is the
/// half that does not.

#include "holdfast/mhc/head.cuh"
#include "holdfast/mhc/post.cuh"
#include "holdfast/mhc/post_pre.cuh"
#include "holdfast/mhc/pre.cuh"
#include "holdfast/mhc/pre_broadcast.cuh"
#include "holdfast/relayout.cuh"
#include "holdfast/stream_sum.cuh"
