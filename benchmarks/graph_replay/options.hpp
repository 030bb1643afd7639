// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The command line of graph_replay.

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace graph_replay {

inline constexpr const char* kUsage =
    "usage: graph_replay [--checkpoint PATH] [--layer N] [--graphs K[,K...]] [--nodes M] [--json "
    "FILE]\n"
    "\n"
    "Captures CUDA graphs that read a derived weight of DeepSeek V4's first layer, lets new "
    "weights\n"
    "arrive, and shows which ways of refitting reach the graphs, and what each costs.\n"
    "\n"
    "  --checkpoint PATH  safetensors file, index (*.json) of several, or folder with a\n"
    "                     model.safetensors.index.json or else a model.safetensors. It has\n"
    "                     layers.N.hc_attn_fn, hc_attn_base, hc_attn_scale and attn_norm.weight,\n"
    "                     also under model.; only the files with these are opened. (default: a\n"
    "                     seeded file of V4-Flash's shapes, written and read back)\n"
    "  --layer N          the layer to read (default 0)\n"
    "  --graphs K[,K...]  how many graphs an engine holds, 1 to 64 each (default 8)\n"
    "  --nodes M          kernels in each graph, 2 to 10000 (default 500)\n"
    "  --json FILE        write the numbers here too\n"
    "\n"
    "Without a GPU a simulated CUDA runtime takes its place: same verdicts, no times.\n"
    "\n"
    "Exit code: 0 if exactly the rebinding way is stale, 1 if not or if something failed, 2 for "
    "an\n"
    "unusable argument or checkpoint.\n";

/// An argument that cannot be used. One line that names it, what was expected and what was found.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string checkpoint;  ///< empty: a seeded one
  std::int64_t layer = 0;
  std::vector<int> graphs{8};
  int nodes = 500;
  std::string json;  ///< empty: none
  bool help = false;
};

namespace detail {

[[nodiscard]] inline std::int64_t number(std::string_view option, std::string_view text,
                                         std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most) {
    throw UsageError(std::string(option) + ": expected a whole number from " +
                     std::to_string(least) + " to " + std::to_string(most) + ", found \"" +
                     std::string(text) + "\"");
  }
  return value;
}

}  // namespace detail

/// \throws UsageError.
[[nodiscard]] inline Options parse(std::span<const char* const> arguments) {
  constexpr int kMaxGraphs = 64;
  constexpr int kMaxNodes = 10000;
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      options.help = true;
      return options;
    }
    // `--name value` and `--name=value`.
    const std::string_view name = argument.substr(0, argument.find('='));
    std::string_view value;
    const auto known = {"--checkpoint", "--layer", "--graphs", "--nodes", "--json"};
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw UsageError("unknown argument \"" + std::string(argument) + "\"; --help lists them");
    }
    if (name.size() < argument.size()) {
      value = argument.substr(name.size() + 1);
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    }
    if (value.empty()) throw UsageError(std::string(name) + ": expected a value, found none");
    if (name == "--checkpoint") {
      options.checkpoint = value;
    } else if (name == "--json") {
      options.json = value;
    } else if (name == "--layer") {
      options.layer = detail::number(name, value, 0, 1'000'000);
    } else if (name == "--nodes") {
      options.nodes = static_cast<int>(detail::number(name, value, 2, kMaxNodes));
    } else {
      options.graphs.clear();
      while (true) {
        const std::string_view one = value.substr(0, value.find(','));
        options.graphs.push_back(static_cast<int>(detail::number(name, one, 1, kMaxGraphs)));
        if (one.size() == value.size()) break;
        value.remove_prefix(one.size() + 1);
      }
    }
  }
  return options;
}

}  // namespace graph_replay
