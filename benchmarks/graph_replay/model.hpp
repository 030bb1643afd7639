// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The weights of one layer's attention mHC, from a safetensors checkpoint.

#include "support/mhc_oracle.hpp"
#include "support/safetensors.hpp"
#include "support/shards.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

namespace graph_replay {

inline constexpr std::int64_t kStreams = 4;
inline constexpr std::int64_t kMixes = 24;

struct Layer {
  std::string source;  ///< for the report: file and prefix
  std::int64_t hidden = 0;
  std::vector<float> hc_attn_fn;         ///< [24, 4 * hidden]
  std::vector<float> hc_attn_base;       ///< [24]
  std::vector<float> hc_attn_scale;      ///< [3]
  std::vector<std::uint16_t> attn_norm;  ///< [hidden], the bits of bf16
};

namespace detail {

template <class T>
[[nodiscard]] std::vector<T> read(holdfast::bench::Shards& shards, const std::string& name) {
  const holdfast::bench::Checkpoint& checkpoint = shards.of(name);
  std::vector<T> values(checkpoint.tensor(name).elements());
  checkpoint.read(name, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace detail

/// Reads and checks `layers.<layer>.*`, or the same under `model.`, of a file, an index or a
/// folder.
/// \throws CheckpointError if one of the files is unusable, a tensor is missing or not as DeepSeek
///   V4 has it, or a value is not finite.
[[nodiscard]] inline Layer read_layer(const std::string& path, std::int64_t layer) {
  using holdfast::bench::Dtype;
  holdfast::bench::Shards shards(path);
  const std::string plain = "layers." + std::to_string(layer) + ".";
  const std::string prefix =
      shards.contains("model." + plain + "hc_attn_fn") ? "model." + plain : plain;

  const auto refuse = [&shards](const std::string& name, const std::string& expected,
                                const std::string& found, const std::string& advice) {
    holdfast::bench::detail::refuse(
        shards.of(name).path(), holdfast::bench::detail::in_tensor(name), expected, found, advice);
  };
  const std::string fn_name = prefix + "hc_attn_fn";
  const auto& fn = shards.of(fn_name).tensor(fn_name);
  // The kernels take any multiple of 8; the limit bounds what a hostile file makes us compute.
  constexpr std::int64_t kMaxHidden = 65536;
  const std::int64_t hidden = fn.shape.size() == 2 ? fn.shape[1] / kStreams : 0;
  if (hidden < 8 || hidden > kMaxHidden || hidden % 8 != 0) {
    refuse(
        fn_name,
        "F32 [24, 4 * hidden] with hidden a multiple of 8 from 8 to " + std::to_string(kMaxHidden),
        holdfast::bench::detail::print_kind(fn), "use a checkpoint of DeepSeek V4");
  }
  const auto expect = [&](const char* name, Dtype dtype, const std::vector<std::int64_t>& shape) {
    shards.of(prefix + name).expect(prefix + name, dtype, shape);
  };
  expect("hc_attn_fn", Dtype::f32, {kMixes, kStreams * hidden});
  expect("hc_attn_base", Dtype::f32, {kMixes});
  expect("hc_attn_scale", Dtype::f32, {3});
  expect("attn_norm.weight", Dtype::bf16, {hidden});

  Layer result;
  result.source = path + ", " + prefix + "*";
  result.hidden = hidden;
  result.hc_attn_fn = detail::read<float>(shards, fn_name);
  result.hc_attn_base = detail::read<float>(shards, prefix + "hc_attn_base");
  result.hc_attn_scale = detail::read<float>(shards, prefix + "hc_attn_scale");
  result.attn_norm = detail::read<std::uint16_t>(shards, prefix + "attn_norm.weight");
  const auto expect_finite = [&](const char* name, const auto& values, const auto& convert) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(convert(values[i]))) continue;
      refuse(prefix + name, "finite numbers",
             std::to_string(convert(values[i])) + " at element " + std::to_string(i),
             holdfast::bench::detail::kDamaged);
    }
  };
  const auto same = [](float value) { return value; };
  expect_finite("hc_attn_fn", result.hc_attn_fn, same);
  expect_finite("hc_attn_base", result.hc_attn_base, same);
  expect_finite("hc_attn_scale", result.hc_attn_scale, same);
  expect_finite("attn_norm.weight", result.attn_norm, test::mhc::from_bf16_bits);
  return result;
}

/// The weights for the oracle, with `hc_attn_fn` summed over its streams.
[[nodiscard]] inline test::mhc::Weights oracle_weights(const Layer& layer,
                                                       const std::vector<float>& hc_attn_fn) {
  test::mhc::Weights weights{
      test::mhc::stream_sum(hc_attn_fn, static_cast<std::size_t>(layer.hidden)),
      layer.hc_attn_scale,
      layer.hc_attn_base,
      {}};
  for (const std::uint16_t bits : layer.attn_norm) {
    weights.norm_weight.push_back(test::mhc::from_bf16_bits(bits));
  }
  return weights;
}

/// What a trainer might send next: another draw, as large as the layer's own.
[[nodiscard]] inline std::vector<float> new_weights(const Layer& layer) {
  double squares = 0;
  for (const float value : layer.hc_attn_fn) squares += double{value} * value;
  const double size = std::sqrt(squares / static_cast<double>(layer.hc_attn_fn.size()));
  test::mhc::Normal normal(2);
  std::vector<float> values(layer.hc_attn_fn.size());
  for (float& value : values) value = static_cast<float>(size * normal());
  return values;
}

/// A file of V4-Flash's shapes, written to the folder for temporary files, read back and removed.
/// \throws CheckpointError if it cannot be written.
[[nodiscard]] inline Layer seeded_layer(std::int64_t layer) {
  using holdfast::bench::CheckpointError;
  using holdfast::bench::Dtype;
  constexpr std::int64_t kHidden = 4096;
  const test::mhc::Weights w = test::mhc::make_weights(kStreams * kHidden, kHidden, 3);
  std::vector<std::uint16_t> norm;
  for (const float value : w.norm_weight) norm.push_back(test::mhc::bf16_bits(value));

  std::error_code error;
  std::string path = (std::filesystem::temp_directory_path(error) / "holdfast.XXXXXX").string();
  const int descriptor = error ? -1 : ::mkstemp(path.data());
  if (descriptor < 0) {
    throw CheckpointError(path + ": cannot be created; set TMPDIR to a folder that can be written");
  }
  ::close(descriptor);
  const struct Removed {
    const std::string& path;
    ~Removed() { ::unlink(path.c_str()); }
  } removed{path};
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const holdfast::bench::TensorData tensors[] = {
      {prefix + "hc_attn_fn",
       Dtype::f32,
       {kMixes, kStreams * kHidden},
       std::as_bytes(std::span(w.fn))},
      {prefix + "hc_attn_base", Dtype::f32, {kMixes}, std::as_bytes(std::span(w.base))},
      {prefix + "hc_attn_scale", Dtype::f32, {3}, std::as_bytes(std::span(w.scale))},
      {prefix + "attn_norm.weight", Dtype::bf16, {kHidden}, std::as_bytes(std::span(norm))}};
  holdfast::bench::write_checkpoint(path, tensors);
  Layer result = read_layer(path, layer);
  result.source = "seeded, of V4-Flash's shapes, written and read back, " + prefix + "*";
  return result;
}

}  // namespace graph_replay
