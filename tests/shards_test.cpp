// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "support/shards.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using holdfast::bench::CheckpointError;
using holdfast::bench::Dtype;
using holdfast::bench::Shards;
using holdfast::bench::TensorData;

void store(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// A folder with the tensors a and b in one file and c in another.
class ShardsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "holdfast_shards_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr) << name;
    folder_ = name;
    write("1.safetensors", {"a", "b"});
    write("2.safetensors", {"c"});
    store(index(), kGood);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const { return folder_ + "/" + name; }
  [[nodiscard]] std::string index() const { return path("model.safetensors.index.json"); }

  /// Each tensor has its own name for content.
  void write(const std::string& file, const std::vector<std::string>& names) const {
    std::vector<TensorData> tensors;
    for (const std::string& name : names) {
      tensors.push_back({name, Dtype::u8, {1}, std::as_bytes(std::span(name))});
    }
    holdfast::bench::write_checkpoint(path(file), tensors);
  }

  /// Refused means: this error, on one line, naming the file and containing `phrase`.
  static void expect_refused(const std::function<void()>& call, const std::string& file,
                             const std::string& phrase) {
    try {
      call();
      ADD_FAILURE() << "not refused: " << phrase;
    } catch (const CheckpointError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find(file + ": "), 0U) << text;
      EXPECT_NE(text.find(phrase), std::string::npos) << text;
      EXPECT_TRUE(std::none_of(text.begin(), text.end(), [](char c) { return c >= 0 && c < ' '; }))
          << text;
      EXPECT_LT(text.size(), 1000U + file.size());
    }
  }
  void expect_index_refused(const std::string& bytes, const std::string& phrase) const {
    store(index(), bytes);
    expect_refused([this] { const Shards refused(folder_); }, index(), phrase);
  }

  static constexpr const char* kGood =
      R"({"metadata":{"total_size":3},"weight_map":{"a":"1.safetensors","b":"1.safetensors",)"
      R"("c":"2.safetensors","d":"3.safetensors"}})";
  std::string folder_;
};

TEST_F(ShardsTest, FindsTheFileOfATensorByTheIndex) {
  for (const std::string& given : {folder_, index()}) {
    Shards shards(given);
    EXPECT_TRUE(shards.contains("a"));
    EXPECT_TRUE(shards.contains("d"));
    EXPECT_FALSE(shards.contains("e"));
    EXPECT_EQ(shards.of("a").path(), path("1.safetensors"));
    EXPECT_EQ(shards.of("c").path(), path("2.safetensors"));
    EXPECT_EQ(&shards.of("a"), &shards.of("b")) << "one file is opened once";
    for (const std::string name : {"a", "b", "c"}) {
      EXPECT_EQ(shards.of(name).read(name), std::vector{static_cast<std::byte>(name[0])});
    }
  }
}

TEST_F(ShardsTest, AnIndexMayStandInTheCurrentFolder) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  Shards shards("model.safetensors.index.json");
  EXPECT_EQ(shards.of("c").path(), "2.safetensors");
  std::filesystem::current_path(before);
}

TEST_F(ShardsTest, OpensOnlyTheFilesThatAreAskedFor) {
  store(path("2.safetensors"), "damaged");
  Shards shards(folder_);
  EXPECT_EQ(shards.of("b").read("b").size(), 1U);
  expect_refused([&] { (void)shards.of("c"); }, path("2.safetensors"), "header length");
  expect_refused([&] { (void)shards.of("d"); }, path("3.safetensors"), "No such file");
  write("3.safetensors", {"x"});
  expect_refused([&] { (void)shards.of("d"); }, path("3.safetensors"), "tensor \"d\"");
  expect_refused([&] { (void)shards.of("e"); }, index(), "tensor \"e\"");
}

TEST_F(ShardsTest, AFolderWithoutAnIndexHasOneFile) {
  std::filesystem::remove(index());
  expect_refused([&] { const Shards refused(folder_); }, folder_, "found neither");
  write("model.safetensors", {"m"});
  Shards shards(folder_);
  EXPECT_TRUE(shards.contains("m"));
  EXPECT_FALSE(shards.contains("a"));
  EXPECT_EQ(shards.of("m").path(), path("model.safetensors"));
  Shards single(path("1.safetensors"));
  EXPECT_TRUE(single.contains("b"));
  expect_refused([&] { (void)single.of("c").tensor("c"); }, path("1.safetensors"), "tensor \"c\"");
}

TEST_F(ShardsTest, LinksAreFollowedAndBrokenOnesNamed) {
  // As the cache of huggingface_hub has it.
  std::filesystem::rename(path("1.safetensors"), path("blob"));
  std::filesystem::create_symlink("blob", path("1.safetensors"));
  EXPECT_EQ(Shards(folder_).of("a").read("a").size(), 1U);
  std::filesystem::remove(index());
  std::filesystem::create_symlink("nowhere", index());
  write("model.safetensors", {"m"});
  expect_refused([&] { const Shards refused(folder_); }, index(), "No such file");
}

TEST_F(ShardsTest, NamesAGitLfsPointer) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
  store(path("1.safetensors"), pointer);
  Shards shards(folder_);
  expect_refused([&] { (void)shards.of("a"); }, path("1.safetensors"), "run `git lfs pull`");
  expect_index_refused(pointer, "run `git lfs pull`");
}

TEST_F(ShardsTest, WhatTheIndexHasBesidesIsPassedOver) {
  for (const std::string other : {"null", "[]", "-1", R"({"weight_map":{"a":"../x"}})",
                                  R"([{"weight_map":[]},"weight_map"])"}) {
    store(index(),
          R"({"x":)" + other + R"(,"weight_map":{"a":"1.safetensors"},"y":)" + other + "}");
    EXPECT_EQ(Shards(folder_).of("a").read("a").size(), 1U) << other;
  }
}

TEST_F(ShardsTest, RefusesEveryTruncationOfTheIndex) {
  const std::string good = kGood;
  for (std::size_t size = 0; size < good.size(); ++size) {
    SCOPED_TRACE(size);
    expect_index_refused(good.substr(0, size), "index: expected JSON");
  }
}

TEST_F(ShardsTest, RefusesIndicesThatLie) {
  const auto map = [](const std::string& entries) { return R"({"weight_map":{)" + entries + "}}"; };
  std::string deep;
  for (int i = 0; i < 200'000; ++i) deep += "{\"x\":";
  const std::vector<std::pair<std::string, std::string>> lies{
      {"layers", "expected JSON"},
      {std::string(kGood) + "{}", "expected JSON"},
      {kGood + std::string(1, '\0'), "a NUL at byte"},
      {map("\"a\":\"\xFF\""), "UTF-8"},
      {"[]", "index: expected an object, found an array"},
      {"\"weight_map\"", "found the string"},
      {"null", "found null"},
      {"{}", "the key weight_map, found none"},
      {R"({"Weight_map":{}})", "the key weight_map, found none"},
      {R"({"x":{"weight_map":{}}})", "the key weight_map, found none"},
      {R"({"weight_map":[]})", "weight_map: expected an object, found an array"},
      {R"({"weight_map":null})", "found null"},
      {R"({"weight_map":"1.safetensors"})", "found the string"},
      {R"({"weight_map":{},"weight_map":{}})", "weight_map once"},
      {map(R"("a":"1.safetensors","a":"2.safetensors")"), "tensor \"a\": expected every name once"},
      {map(R"("a":"1.safetensors","\u0061":"1.safetensors")"), "every name once"},
      {map(R"("a":1)"), "tensor \"a\": expected a string, the name of its file, found 1"},
      {map(R"("a":-1)"), "found -1"},
      {map(R"("a":1.5)"), "found 1.5"},
      {map(R"("a":null)"), "found null"},
      {map(R"("a":["1.safetensors"])"), "found an array"},
      {map(R"("a":{"file":"1.safetensors"})"), "found an object"},
      {map("\"a\":" + deep), "found an object"},
      {"{\"x\":" + deep, "expected JSON"},
      // Names of files elsewhere, whichever tensor they are for.
      {map(R"("a":"1.safetensors","b":"../1.safetensors")"), "tensor \"b\": expected the name of"},
      {map(R"("a":"/etc/passwd")"), "without / and .."},
      {map(R"("a":"x/1.safetensors")"), "without / and .."},
      {map(R"("a":"\u002e\u002e")"), "without / and .."},
      {map(R"("a":"x\n..")"), R"(found "x\x0a..")"},
      {map(R"("a":"")"), "without / and .."},
  };
  for (const auto& [bytes, phrase] : lies) {
    SCOPED_TRACE(bytes.substr(0, 100));
    expect_index_refused(bytes, phrase);
  }
  store(index(), map(R"("a":"1.safetensors\u0000","b":".")"));
  Shards shards(folder_);
  expect_refused([&] { (void)shards.of("a"); }, path("1.safetensors\\x00"), "a NUL inside it");
  expect_refused([&] { (void)shards.of("b"); }, path("."), "a directory");
}

// Sparse: it takes nothing of the disk, and would take memory if it were read.
TEST_F(ShardsTest, RefusesAHugeIndex) {
  std::error_code error;
  std::filesystem::resize_file(index(), std::uintmax_t{1} << 33U, error);
  if (error) GTEST_SKIP() << "no file of 8 GiB here: " << error.message();
  expect_refused([&] { const Shards refused(folder_); }, index(), "at most 100000000 bytes");
}

}  // namespace
