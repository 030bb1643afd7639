// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// Constants that are not finite are refused, also in a file that its owner compiles with
/// -ffast-math, where a compiler may take std::isfinite for true. A program of its own: elsewhere
/// the linker might keep the checks of another file.

#include "holdfast/kernels.cuh"

#include <bit>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

namespace {

using holdfast::ContractError;
using holdfast::Rule;

int failures = 0;

/// `set` gives one constant of `op`, which is otherwise that of an empty batch, a value.
template <class Op, class Set>
void expect_refused(const char* name, const Op& op, const Set& set) {
  // By their bits, and volatile, so that the compiler of this file has no opinion of them.
  for (const std::uint32_t bits : {0x7F80'0000U, 0xFF80'0000U, 0x7FC0'0000U, 0xFFC0'0001U}) {
    const volatile std::uint32_t given = bits;
    Op bad = op;
    set(bad, std::bit_cast<float>(std::uint32_t{given}));
    try {
      holdfast::mhc::detail::validate(bad);
    } catch (const ContractError& error) {
      if (error.rule() == Rule::invalid_parameter) continue;
      std::printf("%s: %s\n", name, error.what());
    }
    std::printf("%s: %08x was not refused as a constant\n", name, bits);
    ++failures;
  }
  try {
    holdfast::mhc::detail::validate(op);  // and nothing else is wrong with it
  } catch (const ContractError& error) {
    std::printf("%s: %s\n", name, error.what());
    ++failures;
  }
}

}  // namespace

int main() {
  using namespace holdfast::mhc;  // NOLINT(google-build-using-namespace)
  alignas(16) static float weights[24 * 4 * 8];
  Pre pre;
  pre.residual = {nullptr, 0, 8};
  pre.fn = {weights, 8};
  pre.scale = {weights};
  pre.base = {weights};
  pre.post = {nullptr, 0};
  pre.comb = {nullptr, 0};
  pre.layer_input = {nullptr, 0, 8};
  expect_refused("rms_eps", pre, [](Pre& op, float value) { op.rms_eps = value; });
  expect_refused("pre_eps", pre, [](Pre& op, float value) { op.pre_eps = value; });
  expect_refused("sinkhorn_eps", pre, [](Pre& op, float value) { op.sinkhorn_eps = value; });
  expect_refused("norm_eps", pre, [](Pre& op, float value) { op.norm_eps = value; });
  expect_refused("post_mult", pre, [](Pre& op, float value) { op.post_mult = value; });
  return failures == 0 ? 0 : 1;
}
