// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// graph_replay: captures an engine's CUDA graphs, lets new weights arrive, and shows which ways of
/// refitting the derived weight reach the graphs, and what each costs.

#include "device.hpp"
#include "graph_replay/engine.cuh"
#include "graph_replay/model.hpp"
#include "graph_replay/options.hpp"
#include "graph_replay/report.hpp"
#include "graph_replay/runtime.hpp"
#include "graph_replay/verdict.hpp"
#include "graph_replay/ways.cuh"

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace graph_replay {
namespace {

void progress(const std::string& what) {
  std::fprintf(stderr, "graph_replay: %s ...\n", what.c_str());
}

/// Replays every graph of a way, and looks at all that it left.
Verdict look(Way& way, const Buffers& buffers, Judge& judge, std::string& why) {
  const auto hidden = static_cast<std::size_t>(buffers.hidden);
  std::vector<Verdict> verdicts;
  const std::vector<Captured>& graphs = way.family().graphs();
  for (std::size_t i = 0; i < graphs.size(); ++i) {
    buffers.poison();
    way.family().replay(i);
    way.family().stream().wait();
    const auto tokens = static_cast<std::size_t>(graphs[i].tokens);
    const std::vector<float> post = buffers.post.download(tokens * kStreams);
    const std::vector<float> comb = buffers.comb.download(tokens * kStreams * kStreams);
    const auto layer_input = buffers.layer_input.download(tokens * hidden);
    const auto residual = buffers.residual.download(tokens * kStreams * hidden);
    const auto passed_on = buffers.passed_on.download(tokens * hidden);
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto row = [t](const auto& all, std::size_t length) {
        return std::span(all).subspan(t * length, length);
      };
      std::string reason;
      verdicts.push_back(judge.judge(
          t,
          {row(post, kStreams), row(comb, kStreams * kStreams), row(layer_input, hidden),
           row(residual, kStreams * hidden), row(passed_on, hidden)},
          reason));
      if (verdicts.back() != verdicts.front() && reason.empty()) {
        reason = std::string("the first token is ") + to_string(verdicts.front()) +
                 ", this one is " + to_string(verdicts.back());
      }
      if (!reason.empty()) {
        why = "graph of " + std::to_string(tokens) + " tokens, token " + std::to_string(t) + ": " +
              reason;
        return Verdict::wrong;
      }
    }
  }
  return verdicts.front();
}

struct Refit {
  double call;
  double done;
};

Refit time_refit(Way& way, const float* hc_attn_fn, const Stream& stream) {
  using Clock = std::chrono::steady_clock;
  throw_on_error(cudaDeviceSynchronize(), "synchronise");
  const auto begin = Clock::now();
  way.refit(hc_attn_fn);
  const auto returned = Clock::now();
  stream.wait();
  const auto done = Clock::now();
  return {std::chrono::duration<double>(returned - begin).count(),
          std::chrono::duration<double>(done - begin).count()};
}

/// The ways take turns, so that all see the same machine: in each round a few refits in a row, the
/// first of which finds the host's caches full of the other ways and is not counted.
void measure(std::vector<std::unique_ptr<Way>>& ways, std::vector<WayResult>& results,
             const float* old_fn, const float* new_fn, const Stream& stream) {
  const auto refits = [&](bool slow, int warm_up, int rounds, int in_a_row) {
    for (int round = -warm_up; round < rounds; ++round) {
      for (std::size_t i = 0; i < ways.size(); ++i) {
        if (ways[i]->slow() != slow) continue;
        for (int turn = 0; turn <= in_a_row; ++turn) {
          const bool ends_with_new = (in_a_row - turn) % 2 == 0;
          const Refit time = time_refit(*ways[i], ends_with_new ? new_fn : old_fn, stream);
          if (round < 0 || turn == 0) continue;
          results[i].call.push_back(time.call);
          results[i].done.push_back(time.done);
        }
      }
    }
  };
  progress("timing refits");
  refits(false, 25, 25, 20);
  refits(true, 1, 3, 3);

  const std::size_t graphs = ways.front()->family().graphs().size();
  const int samples = graphs > 16 ? 21 : 51;
  // Of a few graphs that end soon the host must have several on the way, or its time is measured.
  constexpr std::size_t kReplays = 16;
  const std::size_t turns = (kReplays - 1) / graphs + 1;
  progress("timing replays");
  const holdfast::bench::Event begin;
  const holdfast::bench::Event end;
  for (int sample = -3; sample < samples; ++sample) {
    for (std::size_t turn = 0; turn < ways.size(); ++turn) {
      // Another way goes first each time: none always follows the same one.
      const std::size_t i = (turn + static_cast<std::size_t>(sample + 3)) % ways.size();
      const Family& family = ways[i]->family();
      const auto replay = [&family, turns] {
        for (std::size_t n = 0; n < turns; ++n) family.replay_all();
      };
      replay();  // keeps the GPU busy while the host enqueues the timed ones
      begin.record(stream);
      replay();
      end.record(stream);
      stream.wait();
      if (sample < 0) continue;
      results[i].replay.push_back(end.seconds_since(begin) / static_cast<double>(turns * graphs));
    }
  }
}

/// \throws std::runtime_error if the scene cannot tell fresh from stale.
Run run(const Layer& layer, int graphs, int nodes) {
  const Stream stream;
  Run run{.batches = batch_sizes(graphs), .nodes = nodes};
  const std::string size = std::to_string(graphs) + " graphs: ";
  const std::int64_t most = run.batches.back();

  const std::vector<float> embeddings =
      test::mhc::make_activations(static_cast<std::size_t>(most * layer.hidden), 1);
  const std::vector<float> new_fn_values = new_weights(layer);
  progress(size + "computing what is right, in f64");
  Judge judge(embeddings, oracle_weights(layer, layer.hc_attn_fn),
              oracle_weights(layer, new_fn_values));
  run.telling = judge.telling();
  run.coefficients = judge.coefficients();
  if (judge.blind_tokens() > 0) {
    throw std::runtime_error("this checkpoint cannot show the fault: for " +
                             std::to_string(judge.blind_tokens()) + " of " + std::to_string(most) +
                             " tokens old and new weights give the same coefficients");
  }

  std::vector<std::uint16_t> bits;
  for (const float value : embeddings) bits.push_back(test::mhc::bf16_bits(value));
  const Buffers buffers(layer, bits, most);
  const Array<float> old_fn(layer.hc_attn_fn);
  const Array<float> new_fn(new_fn_values);
  progress(size + "capturing them in six ways");
  std::vector<std::unique_ptr<Way>> ways =
      all_ways({buffers, run.batches, nodes, stream, old_fn.data()});

  for (const std::unique_ptr<Way>& way : ways) {
    WayResult& result = run.ways.emplace_back();
    result.name = way->name();
    result.meaning = way->meaning();
    result.must_be_fresh = way->reaches_graphs();
    progress(size + "refit and replay, " + result.name);
    // Before the refit all must be right for the old weights, or nothing below means anything.
    if (look(*way, buffers, judge, result.why) != Verdict::stale) {
      throw std::runtime_error(
          result.name +
          ": before the refit the graphs are not right for the old weights: " + result.why);
    }
    const float* before = way->address();
    way->refit(new_fn.data());
    stream.wait();
    result.address_kept = way->address() == before;
    result.extra_bytes = way->extra_bytes();
    result.verdict = look(*way, buffers, judge, result.why);
  }
  if (simulated()) return run;
  measure(ways, run.ways, old_fn.data(), new_fn.data(), stream);
  for (std::size_t i = 0; i < ways.size(); ++i) {  // after hundreds of refits, still
    WayResult& result = run.ways[i];
    const Verdict again = look(*ways[i], buffers, judge, result.why);
    if (again == result.verdict) continue;
    result.why = std::string("after the timed refits ") + to_string(again) + " " + result.why;
    result.verdict = Verdict::wrong;
  }
  return run;
}

int main(int argc, char** argv) {
  const Options options = parse(std::span<const char* const>(argv + 1, argv + argc));
  if (options.help) {
    std::printf("%s", kUsage);
    return 0;
  }
  if (!options.json.empty()) expect_writable(options.json);
  Report report;
  const Layer layer = options.checkpoint.empty() ? seeded_layer(options.layer)
                                                 : read_layer(options.checkpoint, options.layer);
  find_device(argv);
  report.simulated = simulated();
  report.machine = holdfast::bench::use_device_0();
  report.checkpoint = layer.source;
  report.hidden = layer.hidden;
  print_head(report);
  for (const int graphs : options.graphs) {
    std::fflush(stdout);
    report.runs.push_back(run(layer, graphs, options.nodes));
    print(report.runs.back());
  }
  print_legend(report);
  if (!options.json.empty()) write_json(report, options.json);
  const bool good = as_it_must_be(report);
  std::printf(
      "\n%s\n",
      good ? "As it must be: after a rebinding refit the graphs are STALE, after the others fresh."
           : "NOT as it must be: see the lines marked above.");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace graph_replay

int main(int argc, char** argv) {
  try {
    return graph_replay::main(argc, argv);
  } catch (const graph_replay::UsageError& error) {
    std::fprintf(stderr, "graph_replay: %s\n", error.what());
    return 2;
  } catch (const holdfast::bench::CheckpointError& error) {
    std::fprintf(stderr, "graph_replay: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "graph_replay: %s\n", error.what());
    return 1;
  }
}
