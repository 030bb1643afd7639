// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

/// \file
/// graph_replay as a user runs it: its exit codes, what it says, and checkpoints that lie. The
/// program is the one of the simulated runtime.

#include "graph_replay/model.hpp"
#include "graph_replay/options.hpp"
#include "graph_replay/verdict.hpp"
#include "support/mhc_oracle.hpp"
#include "support/safetensors.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using graph_replay::Verdict;
using holdfast::bench::Dtype;

struct Ended {
  int code;
  std::string out;
  std::string error;
};

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class GraphReplay : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "holdfast.XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
    std::filesystem::remove_all(folder_);
  }

  [[nodiscard]] std::string path(const char* name) const { return (folder_ / name).string(); }

  [[nodiscard]] Ended run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), HOLDFAST_GRAPH_REPLAY);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const std::string out = path("stdout");
    const std::string error = path("stderr");
    const pid_t child = ::fork();
    if (child == 0) {
      if (std::freopen(out.c_str(), "w", stdout) == nullptr ||
          std::freopen(error.c_str(), "w", stderr) == nullptr) {
        ::_exit(126);
      }
      ::execv(pointers[0], pointers.data());
      ::_exit(127);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(error)};
  }

  std::filesystem::path folder_;
};

// --- A good checkpoint, and edits of it

constexpr std::int64_t kHidden = 64;

struct Tensors {
  std::vector<float> fn;
  std::vector<float> base;
  std::vector<float> scale;
  std::vector<std::uint16_t> norm;
  std::int64_t hidden = kHidden;
  std::string prefix = "layers.3.";
};

Tensors good_tensors() {
  const auto w = test::mhc::make_weights(4 * kHidden, kHidden, 5);
  Tensors result{.fn = w.fn, .base = w.base, .scale = w.scale, .norm = {}};
  for (const float value : w.norm_weight) result.norm.push_back(test::mhc::bf16_bits(value));
  return result;
}

void write(const std::string& path, const Tensors& t) {
  const holdfast::bench::TensorData tensors[] = {
      {t.prefix + "hc_attn_fn", Dtype::f32, {24, 4 * t.hidden}, std::as_bytes(std::span(t.fn))},
      {t.prefix + "hc_attn_base", Dtype::f32, {24}, std::as_bytes(std::span(t.base))},
      {t.prefix + "hc_attn_scale", Dtype::f32, {3}, std::as_bytes(std::span(t.scale))},
      {t.prefix + "attn_norm.weight", Dtype::bf16, {t.hidden}, std::as_bytes(std::span(t.norm))}};
  holdfast::bench::write_checkpoint(path, tensors);
}

/// Header and data of a checkpoint, to be changed and put together again.
struct Parts {
  std::string header;
  std::string data;

  void replace(const std::string& from, const std::string& to) {
    const std::size_t at = header.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    header.replace(at, from.size(), to);
  }
  [[nodiscard]] std::string joined() const {
    const std::uint64_t size = header.size();
    std::string bytes(sizeof size, '\0');
    std::memcpy(bytes.data(), &size, sizeof size);
    return bytes + header + data;
  }
};

Parts good_parts(const std::string& path) {
  write(path, good_tensors());
  const std::string bytes = read_file(path);
  std::uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof size);
  return {bytes.substr(8, size), bytes.substr(8 + size)};
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

const std::vector<std::string> kSmall{"--layer", "3", "--graphs", "2", "--nodes", "3"};

std::vector<std::string> with_checkpoint(const std::string& path) {
  std::vector<std::string> arguments = kSmall;
  arguments.insert(arguments.end(), {"--checkpoint", path});
  return arguments;
}

// --- What it shows

TEST_F(GraphReplay, OnlyTheRebindingWayIsStale) {
  const std::string file = path("good.safetensors");
  write(file, good_tensors());
  auto arguments = with_checkpoint(file);
  arguments.insert(arguments.end(), {"--json", path("out.json")});
  const Ended ended = run(arguments);
  EXPECT_EQ(ended.code, 0) << ended.out << ended.error;
  EXPECT_NE(ended.out.find("SIMULATED"), std::string::npos);
  const auto json = nlohmann::json::parse(read_file(path("out.json")));
  EXPECT_TRUE(json.at("simulated").get<bool>());
  EXPECT_TRUE(json.at("as_it_must_be").get<bool>());
  EXPECT_EQ(json.at("hidden"), kHidden);
  const auto& ways = json.at("runs").at(0).at("ways");
  const std::vector<std::string> names{"stable",        "rebind",           "rebind+setparams",
                                       "rebind+update", "rebind+recapture", "indirection"};
  ASSERT_EQ(ways.size(), names.size());
  for (const std::string& name : names) {
    EXPECT_EQ(ways.at(name).at("graphs_read"), name == "rebind" ? "STALE" : "fresh") << name;
    EXPECT_EQ(ways.at(name).at("address_kept"), name == "stable") << name;
    EXPECT_TRUE(ways.at(name).at("done").is_null()) << "a simulation measures nothing";
    EXPECT_NE(ended.out.find(name), std::string::npos);
  }
  EXPECT_EQ(ways.at("stable").at("peak_extra_bytes"), 0);
  EXPECT_EQ(ways.at("rebind").at("peak_extra_bytes"), 24 * kHidden * 4);
}

TEST_F(GraphReplay, NamesMayStandUnderModel) {
  Tensors tensors = good_tensors();
  tensors.prefix = "model.layers.3.";
  write(path("model.safetensors"), tensors);
  const Ended ended = run(with_checkpoint(path("model.safetensors")));
  EXPECT_EQ(ended.code, 0) << ended.out << ended.error;
  EXPECT_NE(ended.out.find("model.layers.3."), std::string::npos);
}

TEST_F(GraphReplay, SeveralFamiliesInOneRun) {
  write(path("good"), good_tensors());
  const Ended ended =
      run({"--layer=3", "--graphs=1,5", "--nodes=2", "--checkpoint=" + path("good")});
  EXPECT_EQ(ended.code, 0) << ended.out << ended.error;
  EXPECT_NE(ended.out.find("1 graph of 2 nodes"), std::string::npos);
  EXPECT_NE(ended.out.find("5 graphs of 2 nodes"), std::string::npos);
}

TEST_F(GraphReplay, WeightsThatCannotShowTheFaultAreAnError) {
  Tensors tensors = good_tensors();
  std::ranges::fill(tensors.scale, 0.0F);  // no weight reaches any coefficient
  write(path("blind"), tensors);
  const Ended ended = run(with_checkpoint(path("blind")));
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.error.find("cannot show the fault"), std::string::npos) << ended.error;
}

// --- A checkpoint as DeepSeek V4 ships it

/// Writes a folder of three shards, each with tensors that nobody asks for, and its index. Layer 3
/// lies in the first two; the third is left out.
void write_v4(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const Tensors t = good_tensors();
  const std::vector<std::byte> other(512, std::byte{7});
  const auto bytes = [&other](std::size_t count) { return std::span(other).first(count); };
  const std::vector<std::vector<holdfast::bench::TensorData>> shards{
      {{t.prefix + "attn.wq_a.scale", Dtype::f8_e8m0, {1, 1}, bytes(1)},
       {t.prefix + "attn.wq_a.weight", Dtype::f8_e4m3, {4, 128}, bytes(512)},
       {t.prefix + "attn_norm.weight", Dtype::bf16, {t.hidden}, std::as_bytes(std::span(t.norm))},
       {t.prefix + "hc_attn_base", Dtype::f32, {24}, std::as_bytes(std::span(t.base))},
       {t.prefix + "hc_attn_fn", Dtype::f32, {24, 4 * t.hidden}, std::as_bytes(std::span(t.fn))}},
      {{t.prefix + "ffn.experts.0.w1.scale", Dtype::f8_e8m0, {4, 1}, bytes(4)},
       {t.prefix + "ffn.experts.0.w1.weight", Dtype::f4, {4, 32}, bytes(64)},
       {t.prefix + "ffn.gate.bias", Dtype::f32, {8}, bytes(32)},
       {t.prefix + "hc_attn_scale", Dtype::f32, {3}, std::as_bytes(std::span(t.scale))}},
      {{"head.weight", Dtype::bf16, {2, 4}, bytes(16)},
       {"hc_head_scale", Dtype::f32, {1}, bytes(4)}}};
  nlohmann::json index{{"metadata", {{"total_size", 0}}}, {"weight_map", nlohmann::json::object()}};
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = "model-0000" + std::to_string(i + 1) + "-of-00003.safetensors";
    for (const auto& tensor : shards[i]) index["weight_map"][tensor.name] = name;
    if (i < 2) holdfast::bench::write_checkpoint((folder / name).string(), shards[i]);
  }
  write_bytes((folder / "model.safetensors.index.json").string(), index.dump(2));
}

/// Exit code 0 and the report's line of `stable` says fresh.
void expect_fresh(const Ended& ended) {
  EXPECT_EQ(ended.code, 0) << ended.out << ended.error;
  const std::size_t line = ended.out.find("\n  stable ");
  ASSERT_NE(line, std::string::npos) << ended.out;
  const std::string row = ended.out.substr(line + 1, ended.out.find('\n', line + 1) - line);
  EXPECT_NE(row.find("fresh"), std::string::npos) << row;
}

TEST_F(GraphReplay, TakesAFolderAnIndexOrOneOfItsFiles) {
  const std::filesystem::path folder = folder_ / "v4";
  write_v4(folder);
  expect_fresh(run(with_checkpoint(folder.string())));
  expect_fresh(run(with_checkpoint(folder.string() + "/")));
  expect_fresh(run(with_checkpoint((folder / "model.safetensors.index.json").string())));
  std::filesystem::rename(folder / "model.safetensors.index.json", folder / "other.json");
  expect_fresh(run(with_checkpoint((folder / "other.json").string())));

  // One file, with all that layer 3 needs and tensors that nobody asks for.
  Parts parts = good_parts((folder / "model.safetensors").string());
  parts.header.insert(1, R"("layers.3.attn.wq_a.scale":{"dtype":"F8_E8M0","shape":[1,1],)"
                         R"("data_offsets":[SIZE,SIZE1]},)"
                         R"("unknown":{"dtype":"F31","shape":[9],"of":[{}],)"
                         R"("data_offsets":[SIZE1,SIZE3]},)");
  const std::size_t size = parts.data.size();
  parts.replace("SIZE,SIZE1", std::to_string(size) + "," + std::to_string(size + 1));
  parts.replace("SIZE1,SIZE3", std::to_string(size + 1) + "," + std::to_string(size + 3));
  parts.data += "123";
  write_bytes((folder / "model.safetensors").string(), parts.joined());
  expect_fresh(run(with_checkpoint((folder / "model.safetensors").string())));
  expect_fresh(run(with_checkpoint(folder.string())));
}

// --- What it refuses

/// Exit code 2, and one line that names the file.
void expect_refused(const Ended& ended, const std::string& file, const std::string& kind) {
  EXPECT_EQ(ended.code, 2) << kind << ": " << ended.error;
  EXPECT_EQ(std::ranges::count(ended.error, '\n'), 1) << kind << ": " << ended.error;
  EXPECT_NE(ended.error.find(file), std::string::npos) << kind << ": " << ended.error;
  EXPECT_EQ(ended.out, "") << kind;
}

TEST_F(GraphReplay, EditsOfAGoodFileAreRefused) {
  const std::string file = path("edited");
  const Parts good = good_parts(file);
  ASSERT_EQ(run(with_checkpoint(file)).code, 0) << "the file that is edited must be good";
  const std::string fn_end = std::to_string(24 * 4 * kHidden * 4);
  using Edit = std::function<void(Parts&)>;
  const auto swap = [](const std::string& from, const std::string& to) -> Edit {
    return [from, to](Parts& parts) { parts.replace(from, to); };
  };
  // The order of the data: base, fn, scale (f32, by name), then the norm weight.
  const std::string base = R"("shape":[24],"data_offsets":[0,96])";
  const std::vector<std::pair<std::string, Edit>> edits{
      {"data cut short", [](Parts& p) { p.data.resize(p.data.size() - 1); }},
      {"bytes after the data", [](Parts& p) { p.data += '\0'; }},
      {"not JSON", [](Parts& p) { p.header[5] = '\1'; }},
      {"a byte before the brace", [](Parts& p) { p.header.insert(0, " "); }},
      {"a NUL after the header", [](Parts& p) { p.header += '\0'; }},
      {"a NUL in a name", swap("hc_attn_base", std::string("hc_attn\0base", 12))},
      {"an array instead of an object", [](Parts& p) { p.header = "[]"; }},
      {"deep nesting", [](Parts& p) { p.header = R"({"a":)" + std::string(100000, '['); }},
      {"another dtype", swap(R"("BF16","shape":[64])", R"("F16","shape":[64])")},
      {"an unknown dtype", swap("BF16", "BF17")},
      {"bytes of another dtype", swap(R"("BF16","shape":[64])", R"("F32","shape":[32])")},
      {"another shape of the same size", swap(base, R"("shape":[4,6],"data_offsets":[0,96])")},
      {"a size that is not the shape's", swap(base, R"("shape":[25],"data_offsets":[0,96])")},
      {"offsets that overlap", swap(base, R"("shape":[25],"data_offsets":[0,100])")},
      {"a hole", swap(base, R"("shape":[23],"data_offsets":[4,96])")},
      {"negative offsets", swap(base, R"("shape":[24],"data_offsets":[-96,0])")},
      {"swapped offsets", swap(base, R"("shape":[24],"data_offsets":[96,0])")},
      {"fractional offsets", swap(base, R"("shape":[24],"data_offsets":[0,96.0])")},
      {"offsets as text", swap(base, R"("shape":[24],"data_offsets":["0","96"])")},
      {"three offsets", swap(base, R"("shape":[24],"data_offsets":[0,96,96])")},
      {"a negative extent", swap(base, R"("shape":[-24],"data_offsets":[0,96])")},
      {"a count that overflows",
       swap(base, R"("shape":[4294967296,4294967296,24],"data_offsets":[0,96])")},
      {"an extent beyond 63 bits",
       swap(base, R"("shape":[18446744073709551615],"data_offsets":[0,96])")},
      {"past the end", swap(R"("BF16","shape":[64])", R"("BF16","shape":[640])")},
      {"a missing tensor", swap("hc_attn_base", "hc_attn_bass")},
      {"a tensor twice", swap("hc_attn_base", "hc_attn_fn")},
      {"a key twice", swap(base, R"("shape":[24],"shape":[24],"data_offsets":[0,96])")},
      {"a key missing", swap(base, R"("data_offsets":[0,96])")},
      {"a number that is not finite",
       [](Parts& p) { std::memcpy(p.data.data() + 4, "\x00\x00\xC0\x7F", 4); }},
      {"an infinite norm weight",
       [](Parts& p) { std::memcpy(&p.data[p.data.size() - 2], "\x80\x7F", 2); }},
      {"an unfinished header", [](Parts& p) { p.header.resize(p.header.size() / 2); }},
  };
  for (const auto& [kind, edit] : edits) {
    Parts parts = good;
    edit(parts);
    ASSERT_NE(parts.joined(), good.joined()) << kind;
    write_bytes(file, parts.joined());
    expect_refused(run(with_checkpoint(file)), file, kind);
  }
}

TEST_F(GraphReplay, FoldersThatAreNoneAreRefused) {
  const std::string folder = path("v4");
  const std::string first = folder + "/model-00001-of-00003.safetensors";
  const std::string second = folder + "/model-00002-of-00003.safetensors";
  const std::string index = folder + "/model.safetensors.index.json";
  write_v4(folder);
  const std::string good = read_file(index);
  ASSERT_EQ(run(with_checkpoint(folder)).code, 0) << "the folder that is edited must be good";
  const auto expect_text = [&](const std::string& file, const std::string& text) {
    const Ended ended = run(with_checkpoint(folder));
    expect_refused(ended, file + ": ", text);
    EXPECT_NE(ended.error.find(text), std::string::npos) << ended.error;
  };
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string bytes = good;
    const std::size_t at = bytes.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    if (at != std::string::npos) bytes.replace(at, from.size(), to);
    write_bytes(index, bytes);
  };
  const std::string lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";

  with("layers.3.hc_attn_fn", "layers.3.hc_attn_fm");
  expect_text(index, "layers.3.hc_attn_fn");
  // The file that has hc_attn_scale.
  const std::string scale = R"("layers.3.hc_attn_scale": "model-00002-of-00003.safetensors")";
  with(scale, R"("layers.3.hc_attn_scale": "model-00003-of-00003.safetensors")");
  expect_text(folder + "/model-00003-of-00003.safetensors", "No such file");
  with(scale, R"("layers.3.hc_attn_scale": "model-00001-of-00003.safetensors")");
  expect_text(first, "tensor \"layers.3.hc_attn_scale\"");
  for (const std::string outside :
       {"../v4/model-00002-of-00003.safetensors", "..", second.c_str()}) {
    with(scale, R"("layers.3.hc_attn_scale": ")" + outside + "\"");
    expect_text(index, "without / and ..");
  }
  with(scale, R"("layers.3.hc_attn_scale": 2)");
  expect_text(index, "found 2");
  with("\"weight_map\"", "\"weights\"");
  expect_text(index, "the key weight_map");
  write_bytes(index, "[");
  expect_text(index, "an array");
  write_bytes(index, lfs);
  expect_text(index, "git lfs pull");
  write_bytes(index, good);

  const std::string bytes = read_file(second);
  write_bytes(second, lfs);
  expect_text(second, "git lfs pull");
  write_bytes(second, bytes.substr(0, bytes.size() - 1));
  expect_text(second, "past the end of the file");
  std::filesystem::remove(second);
  expect_text(second, "No such file");
  std::filesystem::remove(index);
  expect_text(folder, "expected model.safetensors.index.json or model.safetensors in it");
  write_bytes(folder + "/model.safetensors", lfs);
  expect_text(folder + "/model.safetensors", "git lfs pull");
}

TEST_F(GraphReplay, FilesThatAreNoneAreRefused) {
  const std::string file = path("file");
  const std::string good = good_parts(file).joined();
  const auto with_length = [&good](std::uint64_t length) {
    std::string bytes = good;
    std::memcpy(bytes.data(), &length, sizeof length);
    return bytes;
  };
  const std::vector<std::pair<std::string, std::string>> files{
      {"empty", ""},
      {"seven bytes", good.substr(0, 7)},
      {"only a length", good.substr(0, 8)},
      {"a header longer than the file", with_length(good.size())},
      {"a header of 2^62 bytes", with_length(std::uint64_t{1} << 62U)},
      {"a header of 2^64 - 1 bytes", with_length(~std::uint64_t{0})},
      {"no header", with_length(0)},
      {"text", "layers.3.hc_attn_fn"},
  };
  for (const auto& [kind, bytes] : files) {
    write_bytes(file, bytes);
    expect_refused(run(with_checkpoint(file)), file, kind);
  }
  expect_refused(run(with_checkpoint(path("nothing"))), "nothing", "no such file");
  expect_refused(run(with_checkpoint(folder_.string())), folder_.string(), "a directory");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  expect_refused(run(with_checkpoint(path("fifo"))), "fifo", "a FIFO");
  write_bytes(file, good);
  std::filesystem::permissions(file, std::filesystem::perms::none);
  if (::geteuid() != 0) expect_refused(run(with_checkpoint(file)), file, "unreadable");
}

TEST_F(GraphReplay, OtherModelsAreRefused) {
  const auto expect_text = [&](const Tensors& tensors, const std::string& text) {
    write(path("other"), tensors);
    const Ended ended = run(with_checkpoint(path("other")));
    expect_refused(ended, "other", text);
    EXPECT_NE(ended.error.find(text), std::string::npos) << ended.error;
  };
  Tensors other = good_tensors();
  other.prefix = "layers.4.";
  expect_text(other, "layers.3.hc_attn_fn");
  other = good_tensors();
  other.hidden = 60;  // no multiple of 8
  other.fn.resize(24 * 4 * 60);
  other.norm.resize(60);
  expect_text(other, "multiple of 8");
}

TEST_F(GraphReplay, ArgumentsThatCannotBeUsedAreRefused) {
  const std::vector<std::vector<std::string>> all{{"--nonsense"},
                                                  {"positional"},
                                                  {"--graphs"},
                                                  {"--graphs", "0"},
                                                  {"--graphs", "65"},
                                                  {"--graphs", "1,"},
                                                  {"--graphs", "1;2"},
                                                  {"--graphs=,1"},
                                                  {"--nodes", "1"},
                                                  {"--nodes", "ten"},
                                                  {"--nodes", "5x"},
                                                  {"--layer", "-1"},
                                                  {"--layer", "1e3"},
                                                  {"--layer="},
                                                  {"--checkpoint"},
                                                  {"--json"},
                                                  {"--nodes", "99999999999999999999"}};
  for (const auto& arguments : all) {
    const Ended ended = run(arguments);
    EXPECT_EQ(ended.code, 2) << arguments.front();
    EXPECT_EQ(std::ranges::count(ended.error, '\n'), 1) << ended.error;
    EXPECT_EQ(ended.out, "");
  }
  const Ended help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.out.find("--checkpoint"), std::string::npos);
}

TEST_F(GraphReplay, AReportThatCannotBeWrittenIsAnError) {
  write(path("good"), good_tensors());
  const auto run_with = [&](const std::string& report) {
    auto arguments = with_checkpoint(path("good"));
    arguments.insert(arguments.end(), {"--json", report});
    return run(arguments);
  };
  for (const std::string& report : {path("no/such/folder.json"), folder_.string()}) {
    const Ended ended = run_with(report);  // before anything is measured
    EXPECT_EQ(ended.code, 2) << report;
    EXPECT_EQ(std::ranges::count(ended.error, '\n'), 1) << ended.error;
    EXPECT_NE(ended.error.find("\"" + report + "\""), std::string::npos) << ended.error;
    EXPECT_EQ(ended.out, "");
  }
  const Ended full = run_with("/dev/full");  // only writing shows it
  EXPECT_EQ(full.code, 1);
  EXPECT_NE(full.error.find("cannot write"), std::string::npos) << full.error;
}

// --- How it judges

TEST(GraphReplayVerdict, TellsFreshFromStaleFromWrong) {
  constexpr std::size_t hidden = 64;
  const std::vector<float> x = test::mhc::make_activations(2 * hidden, 1);
  const auto old_weights = test::mhc::make_weights(hidden, hidden, 2);
  auto new_weights = old_weights;
  new_weights.fn = test::mhc::make_weights(hidden, hidden, 3).fn;
  graph_replay::Judge judge(x, old_weights, new_weights);
  EXPECT_EQ(judge.coefficients(), 40U);
  EXPECT_GT(judge.telling(), 36U);
  EXPECT_EQ(judge.blind_tokens(), 0U);
  const std::size_t token = 1;
  const std::span<const float> own(x.data() + hidden, hidden);
  const auto left = [&](const test::mhc::Weights& w) {
    const auto out = test::mhc::pre_broadcast(own, w, {});
    struct {
      std::vector<float> post, comb;
      std::vector<std::uint16_t> layer_input, residual;
    } result{{out.post.begin(), out.post.end()}, {out.comb.begin(), out.comb.end()}, {}, {}};
    for (const float value : test::mhc::layer_input(out, w, {})) {
      result.layer_input.push_back(test::mhc::bf16_bits(value));
    }
    for (int s = 0; s < 4; ++s) {
      for (const float value : own) result.residual.push_back(test::mhc::bf16_bits(value));
    }
    return result;
  };
  std::string why;
  const auto judged = [&](const auto& l) {
    return judge.judge(token, {l.post, l.comb, l.layer_input, l.residual, l.layer_input}, why);
  };
  const auto fresh = left(new_weights);
  EXPECT_EQ(judged(fresh), Verdict::fresh);
  EXPECT_EQ(judged(left(old_weights)), Verdict::stale);
  EXPECT_EQ(judged(fresh), Verdict::fresh);  // the bits that were accepted before
  EXPECT_EQ(why, "");
  const auto expect_wrong = [&](const auto& l, const std::string& text) {
    EXPECT_EQ(judged(l), Verdict::wrong);
    EXPECT_NE(why.find(text), std::string::npos) << why;
  };
  auto wrong = fresh;
  wrong.post[3] += 1e-5F;
  expect_wrong(wrong, "post[3]");
  wrong = fresh;
  wrong.comb = left(old_weights).comb;  // torn: part new, part old
  expect_wrong(wrong, "comb[");
  wrong = fresh;
  wrong.comb[15] = std::numeric_limits<float>::quiet_NaN();
  expect_wrong(wrong, "comb[15]");
  wrong = fresh;
  wrong.layer_input[hidden - 1] ^= 0x8000U;
  expect_wrong(wrong, "layer_input");
  wrong = fresh;
  wrong.residual[255] ^= 1U;
  expect_wrong(wrong, "residual_out[255]");
  auto moved = fresh.layer_input;
  moved[7] ^= 1U;
  EXPECT_EQ(
      judge.judge(token, {fresh.post, fresh.comb, fresh.layer_input, fresh.residual, moved}, why),
      Verdict::wrong);
  EXPECT_NE(why.find("last node"), std::string::npos);
}

}  // namespace
