#!/usr/bin/env bash
# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# compute_sanitizer.sh <build folder>   runs most GPU tests under memcheck, racecheck, initcheck and synccheck
set -euo pipefail

program=${1:?usage: $0 <build folder>}/tests/holdfast.test.gpu
export HOLDFAST_REQUIRE_GPU=1
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin

# Left out: what takes gigabytes or thousands of rounds, and what tests that work goes on beside other work, since the
# tools make launches wait for each other.
left_out='*2To31*:*TwoToThe31*:*64Bits*:*MoreRows*:*ManyRefits*:*TenThousand*:RefitCases.B07*'
left_out+=':RefitCases.B51*:RefitCases.B107*:Gpu.*NeverTorn'
left_out+=':Mhc*.OffsetsBeyond*:Mhc*.ATokensBits*:Mhc*.*RunToRun*'

failed=0
for tool in memcheck racecheck initcheck synccheck; do
  # Tests provoke API errors on purpose, so those are not counted.
  compute-sanitizer --tool "$tool" --error-exitcode 1 --report-api-errors no "$program" \
    --gtest_brief=1 --gtest_filter="-$left_out" || failed=1
done
exit "$failed"
