// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What graph_replay found, as a table for a reader and as JSON for a program.

#include "device.hpp"
#include "graph_replay/options.hpp"
#include "graph_replay/verdict.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

namespace graph_replay {

/// What one way showed. Times in seconds, one for each sample; none in a simulation.
struct WayResult {
  std::string name;
  std::string meaning;
  bool must_be_fresh = true;
  Verdict verdict = Verdict::wrong;
  std::string why;  ///< of a wrong one
  bool address_kept = false;
  std::size_t extra_bytes = 0;
  std::vector<double> call;    ///< until refit() returns
  std::vector<double> done;    ///< until the stream has run it
  std::vector<double> replay;  ///< of one graph, the mean over the family

  [[nodiscard]] bool as_it_must_be() const {
    return verdict == (must_be_fresh ? Verdict::fresh : Verdict::stale);
  }
};

/// What one size of the family showed.
struct Run {
  std::vector<std::int64_t> batches;
  int nodes = 0;
  std::size_t telling = 0;       ///< coefficients that old and new weights set apart
  std::size_t coefficients = 0;  ///< all of them
  std::vector<WayResult> ways{};

  [[nodiscard]] bool as_it_must_be() const {
    bool good = !ways.empty();
    for (const WayResult& way : ways) good = good && way.as_it_must_be();
    return good;
  }
};

struct Report {
  bool simulated = false;
  std::vector<std::pair<std::string, std::string>> machine;
  std::string checkpoint;
  std::int64_t hidden = 0;
  std::vector<Run> runs;
};

namespace detail {

/// Three digits and a unit; `-` without samples.
[[nodiscard]] inline std::string time(const std::vector<double>& samples) {
  if (samples.empty()) return "-";
  const double us = holdfast::bench::median(samples) * 1e6;
  char text[32];
  if (us < 1000) {
    std::snprintf(text, sizeof text, us < 100 ? "%.2f us" : "%.0f us", us);
  } else {
    std::snprintf(text, sizeof text, "%.2f ms", us * 1e-3);
  }
  return text;
}

[[nodiscard]] inline std::string size(std::size_t bytes) {
  if (bytes == 0) return "0";
  const std::size_t kib = bytes / 1024;
  const std::size_t rest = bytes % 1024;
  std::string text = kib > 0 ? std::to_string(kib) + " KiB" : "";
  if (rest > 0) text += (text.empty() ? "" : " + ") + std::to_string(rest) + " B";
  return text;
}

}  // namespace detail

inline void print_head(const Report& report) {
  std::printf("graph_replay: new weights under captured CUDA graphs\n");
  if (report.simulated) {
    std::printf(
        "SIMULATED: no GPU here. A simulated CUDA runtime runs the same program; it proves which\n"
        "graphs see the new weights, and measures nothing: times are -\n");
  }
  std::printf("\n");
  for (const auto& [name, value] : report.machine) {
    if (!report.simulated) std::printf("  %-16s %s\n", name.c_str(), value.c_str());
  }
  std::printf("  %-16s %s\n  %-16s %lld\n", "checkpoint", report.checkpoint.c_str(), "hidden",
              static_cast<long long>(report.hidden));
}

inline void print(const Run& run) {
  std::string batches;
  for (std::size_t i = 0; i < run.batches.size(); ++i) {
    if (i == 6 && run.batches.size() > 8) {
      batches += " ...";
      i = run.batches.size() - 1;
    }
    batches += ' ' + std::to_string(run.batches[i]);
  }
  std::printf(
      "\n%zu %s of %d nodes, for batches of%s tokens. The first node of each reads\n"
      "hc_attn_fn_broadcast. New weights, one refit, each graph replayed, every output "
      "compared:\n\n",
      run.batches.size(), run.batches.size() == 1 ? "graph" : "graphs", run.nodes, batches.c_str());
  std::printf("  %-17s %-7s %-8s %10s %11s %11s  %s\n", "", "graphs", "address", "refit call",
              "refit done", "replay of", "extra memory");
  std::printf("  %-17s %-7s %-8s %10s %11s %11s  %s\n", "way", "read", "kept", "returns",
              "on the GPU", "one graph", "at its peak");
  for (const WayResult& way : run.ways) {
    std::printf("  %-17s %-7s %-8s %10s %11s %11s  %s%s\n", way.name.c_str(),
                to_string(way.verdict), way.address_kept ? "yes" : "no",
                detail::time(way.call).c_str(), detail::time(way.done).c_str(),
                detail::time(way.replay).c_str(), detail::size(way.extra_bytes).c_str(),
                way.as_it_must_be() ? "" : "   <-- not as it must be");
  }
  for (const WayResult& way : run.ways) {
    if (!way.why.empty()) std::printf("  %s: %s\n", way.name.c_str(), way.why.c_str());
  }
}

inline void print_legend(const Report& report) {
  if (report.runs.empty()) return;
  std::printf("\n");
  for (const WayResult& way : report.runs.front().ways) {
    std::printf("  %-17s %s\n", way.name.c_str(), way.meaning.c_str());
  }
  const Run& last = report.runs.back();
  std::printf(
      "\n  fresh: each element of post, comb, layer_input and residual_out is right for the new "
      "weights\n"
      "  STALE: each is right for the old ones. Of %zu coefficients, %zu cannot be right for "
      "both.\n"
      "  extra memory: what a refit takes on the GPU beyond the one derived weight; graphs are not "
      "counted.\n",
      last.coefficients, last.telling);
}

[[nodiscard]] inline bool as_it_must_be(const Report& report) {
  bool good = !report.runs.empty();
  for (const Run& run : report.runs) good = good && run.as_it_must_be();
  return good;
}

/// So that nobody measures for minutes and then cannot keep it. Creates and changes nothing.
/// \throws UsageError.
inline void expect_writable(const std::string& path) {
  std::error_code error;
  const std::filesystem::path file(path);
  const bool exists = std::filesystem::exists(file, error);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  const bool good =
      exists ? !std::filesystem::is_directory(file, error) && ::access(path.c_str(), W_OK) == 0
             : std::filesystem::is_directory(folder, error) && ::access(folder.c_str(), W_OK) == 0;
  if (!good) {
    throw UsageError("--json: expected a file that can be written, found \"" + path +
                     "\"; check the path and its permissions");
  }
}

/// \throws std::runtime_error if the file cannot be written.
inline void write_json(const Report& report, const std::string& path) {
  using nlohmann::ordered_json;
  const auto samples = [](const std::vector<double>& seconds) -> ordered_json {
    if (seconds.empty()) return nullptr;
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return {{"median_us", holdfast::bench::median(seconds) * 1e6},
            {"min_us", sorted.front() * 1e6},
            {"max_us", sorted.back() * 1e6},
            {"samples", sorted.size()}};
  };
  ordered_json out;
  out["simulated"] = report.simulated;
  for (const auto& [name, value] : report.machine) out["machine"][name] = value;
  out["checkpoint"] = report.checkpoint;
  out["hidden"] = report.hidden;
  out["as_it_must_be"] = as_it_must_be(report);
  out["runs"] = ordered_json::array();
  for (const Run& run : report.runs) {
    ordered_json one;
    one["graphs"] = run.batches.size();
    one["nodes"] = run.nodes;
    one["batches"] = run.batches;
    one["coefficients"] = run.coefficients;
    one["telling_coefficients"] = run.telling;
    for (const WayResult& way : run.ways) {
      one["ways"][way.name] = {{"graphs_read", to_string(way.verdict)},
                               {"must_read", way.must_be_fresh ? "fresh" : "STALE"},
                               {"address_kept", way.address_kept},
                               {"peak_extra_bytes", way.extra_bytes},
                               {"call", samples(way.call)},
                               {"done", samples(way.done)},
                               {"replay_of_one_graph", samples(way.replay)}};
    }
    out["runs"].push_back(std::move(one));
  }
  std::ofstream file(path);
  file << out.dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path + "; check the path and the disk");
}

}  // namespace graph_replay
