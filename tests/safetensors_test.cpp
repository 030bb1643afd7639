// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "support/safetensors.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using holdfast::bench::Checkpoint;
using holdfast::bench::CheckpointError;
using holdfast::bench::Dtype;
using holdfast::bench::Metadata;
using holdfast::bench::TensorData;
using holdfast::bench::write_checkpoint;
using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::string golden_path() { return std::string(HOLDFAST_TEST_DATA) + "/small.safetensors"; }
std::string golden_dtypes_path() { return std::string(HOLDFAST_TEST_DATA) + "/dtypes.safetensors"; }

/// Every element type and its size in bits, in the order of the official package.
const std::vector<std::pair<std::string, unsigned>> kBits{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64}};

std::string load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void store(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

/// The elements of one tensor.
template <class T>
std::vector<T> values(const Checkpoint& checkpoint, const std::string& name) {
  const std::vector<std::byte> bytes = checkpoint.read(name);
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

/// Refused means: this error, on one line, naming the file and containing `phrase`.
void expect_refused(const std::function<void()>& call, const std::string& path,
                    const std::string& phrase) {
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const CheckpointError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(path), std::string::npos) << text;
    EXPECT_NE(text.find(phrase), std::string::npos) << text;
    EXPECT_NE(text.find("expected "), std::string::npos) << text;
    EXPECT_NE(text.find("found "), std::string::npos) << text;
    EXPECT_TRUE(std::none_of(text.begin(), text.end(), [](char c) { return c >= 0 && c < ' '; }))
        << text;
    EXPECT_LT(text.size(), 1000U + path.size());
  }
}

void expect_refused(const std::string& path, const std::string& phrase) {
  expect_refused([&] { const Checkpoint refused(path); }, path, phrase);
}

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "holdfast_safetensors_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr) << name;
    folder_ = name;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  [[nodiscard]] std::string path(const std::string& name = "x.safetensors") const {
    return (folder_ / name).string();
  }

 private:
  std::filesystem::path folder_;
};

/// The content of the golden file, as make_small.py has it.
struct Small {
  std::vector<std::uint32_t> weight{0x3F800000, 0xC0200000, 0, 0x80000000, 0x7F7FFFFF, 0x00800000};
  std::vector<std::uint16_t> bias{0x3F80, 0xC020, 0x7F7F};
  std::vector<std::uint32_t> scale{0x3E800000};
  std::vector<std::uint16_t> half_scale{0x4049};
  std::vector<std::int64_t> ids{-1, std::int64_t{1} << 40};
  std::vector<std::uint8_t> mask{1, 0, 0, 1, 1};
  Metadata metadata{{"made_by", "holdfast \"tests/data\", \xC3\xBC\t1"}};

  [[nodiscard]] std::vector<TensorData> tensors() const {
    const auto bytes = [](const auto& data) { return std::as_bytes(std::span(data)); };
    return {{"layer.weight", Dtype::f32, {2, 3}, bytes(weight)},
            {"layer.bias", Dtype::bf16, {3}, bytes(bias)},
            {"layer.scale", Dtype::f32, {}, bytes(scale)},
            {"layer.half_scale", Dtype::bf16, {}, bytes(half_scale)},
            {"layer.empty", Dtype::f32, {0, 3}, {}},
            {"ids", Dtype::i64, {2}, bytes(ids)},
            {"mask", Dtype::boolean, {5}, bytes(mask)}};
  }
};

void expect_small(const Checkpoint& checkpoint) {
  const Small small;
  EXPECT_EQ(checkpoint.metadata(), small.metadata);
  ASSERT_EQ(checkpoint.tensors().size(), 7U);
  checkpoint.expect("layer.weight", Dtype::f32, {2, 3});
  checkpoint.expect("layer.bias", Dtype::bf16, {3});
  checkpoint.expect("layer.scale", Dtype::f32, {});
  checkpoint.expect("layer.half_scale", Dtype::bf16, {});
  checkpoint.expect("layer.empty", Dtype::f32, {0, 3});
  checkpoint.expect("ids", Dtype::i64, {2});
  checkpoint.expect("mask", Dtype::boolean, {5});
  EXPECT_EQ(values<std::uint32_t>(checkpoint, "layer.weight"), small.weight);
  EXPECT_EQ(values<float>(checkpoint, "layer.weight")[1], -2.5F);
  EXPECT_EQ(values<std::uint16_t>(checkpoint, "layer.bias"), small.bias);
  EXPECT_EQ(values<std::uint32_t>(checkpoint, "layer.scale"), small.scale);
  EXPECT_EQ(values<std::uint16_t>(checkpoint, "layer.half_scale"), small.half_scale);
  EXPECT_TRUE(checkpoint.read("layer.empty").empty());
  EXPECT_EQ(values<std::int64_t>(checkpoint, "ids"), small.ids);
  EXPECT_EQ(values<std::uint8_t>(checkpoint, "mask"), small.mask);
  EXPECT_EQ(checkpoint.tensor("layer.weight").elements(), 6U);
  EXPECT_EQ(checkpoint.tensor("layer.scale").elements(), 1U);
  EXPECT_EQ(checkpoint.tensor("layer.empty").elements(), 0U);
}

TEST_F(Safetensors, ReadsAFileOfTheOfficialPackage) { expect_small(Checkpoint(golden_path())); }

TEST_F(Safetensors, WritesTheBytesOfTheOfficialPackage) {
  const Small small;
  std::vector<TensorData> tensors = small.tensors();
  write_checkpoint(path(), tensors, small.metadata);
  EXPECT_EQ(load(path()), load(golden_path()));
  expect_small(Checkpoint(path()));

  std::reverse(tensors.begin(), tensors.end());
  write_checkpoint(path(), tensors, small.metadata);
  EXPECT_EQ(load(path()), load(golden_path())) << "the order given must make no difference";
}

/// The content of the other golden file: two elements of each type, their bytes counted on.
/// The official package reads the 6-bit types, but its Python side has no name to write them by.
struct EveryDtype {
  std::vector<std::byte> bytes = [] {
    std::vector<std::byte> counted(256);
    for (std::size_t i = 0; i < counted.size(); ++i) counted[i] = static_cast<std::byte>(i);
    return counted;
  }();

  [[nodiscard]] std::vector<TensorData> tensors() const {
    std::vector<TensorData> tensors;
    std::size_t begin = 0;
    for (const auto& [name, bits] : kBits) {
      if (bits == 6) continue;
      const std::size_t size = 2 * bits / 8;
      tensors.push_back({name,
                         holdfast::bench::parse_dtype(name).value(),
                         {2},
                         std::span(bytes).subspan(begin, size)});
      begin += size;
    }
    return tensors;
  }
};

void expect_tensors(const Checkpoint& checkpoint, const std::vector<TensorData>& tensors) {
  EXPECT_EQ(checkpoint.tensors().size(), tensors.size());
  for (const TensorData& tensor : tensors) {
    const auto& found = checkpoint.expect(tensor.name, tensor.dtype, tensor.shape);
    EXPECT_EQ(found.begin * 8 % holdfast::bench::bit_size(tensor.dtype), 0U) << tensor.name;
    const std::vector<std::byte> read = checkpoint.read(tensor.name);
    EXPECT_TRUE(std::equal(read.begin(), read.end(), tensor.data.begin(), tensor.data.end()))
        << tensor.name;
  }
}

TEST_F(Safetensors, ReadsEveryDtypeThatTheOfficialPackageWrites) {
  const EveryDtype every;
  EXPECT_EQ(every.tensors().size(), 20U);
  expect_tensors(Checkpoint(golden_dtypes_path()), every.tensors());
}

TEST_F(Safetensors, SortsDtypesAsTheOfficialPackageDoes) {
  const EveryDtype every;
  write_checkpoint(path(), every.tensors());
  EXPECT_EQ(load(path()), load(golden_dtypes_path()));
}

TEST_F(Safetensors, RoundTripsEveryDtypeAligned) {
  std::vector<std::byte> bytes(64);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
  std::vector<TensorData> tensors;
  for (const auto& [name, bits] : kBits) {
    const auto dtype = holdfast::bench::parse_dtype(name);
    ASSERT_TRUE(dtype.has_value()) << name;
    EXPECT_EQ(holdfast::bench::bit_size(*dtype), bits) << name;
    EXPECT_EQ(holdfast::bench::to_string(*dtype), name);
    // Eight elements take as many bytes as one takes bits; four take whole bytes too.
    tensors.push_back({name + "\n\"", *dtype, {2, 4}, std::span(bytes).first(bits)});
    tensors.push_back({name, *dtype, {4}, std::span(bytes).first(bits / 2)});
    tensors.push_back({name + ".empty", *dtype, {0, 3}, {}});
  }
  write_checkpoint(path(), tensors, {{"b", ""}, {"a", "\xE2\x82\xAC"}});

  const Checkpoint checkpoint(path());
  EXPECT_EQ(checkpoint.metadata(), (Metadata{{"b", ""}, {"a", "\xE2\x82\xAC"}}));
  EXPECT_EQ(checkpoint.data_begin() % 8, 0U);
  expect_tensors(checkpoint, tensors);
  EXPECT_EQ(checkpoint.tensor("F4").elements(), 4U);
  EXPECT_EQ(checkpoint.tensor("F6_E2M3").elements(), 4U);
  EXPECT_EQ(checkpoint.tensor("C64").elements(), 4U);
}

TEST_F(Safetensors, RoundTripsNoTensors) {
  write_checkpoint(path(), {});
  const Checkpoint checkpoint(path());
  EXPECT_TRUE(checkpoint.tensors().empty());
  EXPECT_TRUE(checkpoint.metadata().empty());
  EXPECT_EQ(checkpoint.data_bytes(), 0U);
}

TEST_F(Safetensors, ReadsPartsAndRefusesThoseOutside) {
  const Checkpoint checkpoint(golden_path());
  std::vector<std::byte> part(4, std::byte{9});
  checkpoint.read("layer.weight", 4, part);
  EXPECT_EQ(part,
            (std::vector<std::byte>{std::byte{0}, std::byte{0}, std::byte{0x20}, std::byte{0xC0}}));
  checkpoint.read("layer.weight", 20, part);
  checkpoint.read("layer.weight", 24, {});
  const std::vector<std::byte> before = part;
  // The last one wraps around 2^64 to a place inside.
  for (const std::uint64_t offset : {std::uint64_t{21}, std::uint64_t{25}, ~std::uint64_t{0}}) {
    expect_refused([&] { checkpoint.read("layer.weight", offset, part); }, golden_path(),
                   "a read within its 24 bytes");
  }
  EXPECT_EQ(part, before);
}

TEST_F(Safetensors, NamesWhatAMissingOrDifferentTensorShouldBe) {
  const Checkpoint checkpoint(golden_path());
  EXPECT_TRUE(checkpoint.contains("ids"));
  EXPECT_FALSE(checkpoint.contains("id"));
  expect_refused([&] { (void)checkpoint.tensor("no\nsuch"); }, golden_path(),
                 R"(tensor "no\x0asuch")");
  expect_refused([&] { (void)checkpoint.read("nosuch"); }, golden_path(), "tensor \"nosuch\"");
  expect_refused([&] { checkpoint.expect("nosuch", Dtype::f32, {}); }, golden_path(), "7 tensors");
  expect_refused(
      [&] {
        checkpoint.expect("layer.weight", Dtype::f32, {3, 2});
      },
      golden_path(), "expected F32 [3, 2], found F32 [2, 3]");
  expect_refused(
      [&] {
        checkpoint.expect("layer.weight", Dtype::i32, {2, 3});
      },
      golden_path(), "expected I32 [2, 3], found F32 [2, 3]");
}

TEST_F(Safetensors, SurvivesAMove) {
  auto first = std::make_unique<Checkpoint>(golden_path());
  const Checkpoint second(std::move(*first));
  first.reset();  // must not close the file
  expect_small(second);
  write_checkpoint(path(), {});
  Checkpoint third(path());
  third = Checkpoint(golden_path());
  expect_small(third);
  EXPECT_EQ(third.path(), golden_path());
}

// The file is sparse: it takes a few KB of the disk. Reading all of it would take a minute.
TEST_F(Safetensors, ReadsTheEndOfALargeFileAlone) {
  constexpr std::uint64_t size = (std::uint64_t{1} << 33) + 3;
  std::string header = R"({"big":{"dtype":"U8","shape":[8589934595],)"
                       R"("data_offsets":[0,8589934595]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size());
  store(path(), length + header);
  std::error_code error;
  std::filesystem::resize_file(path(), 8 + header.size() + size - 3, error);
  if (error) GTEST_SKIP() << "no file of 8 GiB here: " << error.message();
  std::ofstream(path(), std::ios::binary | std::ios::app) << "end";

  const Checkpoint checkpoint(path());
  std::vector<std::byte> out(4);
  checkpoint.read("big", size - 4, out);
  EXPECT_EQ(std::memcmp(out.data(), "\0end", 4), 0);
}

TEST_F(Safetensors, NoticesThatTheFileBecameShorter) {
  store(path(), load(golden_path()));
  const Checkpoint checkpoint(path());
  std::filesystem::resize_file(path(), std::filesystem::file_size(path()) - 1);
  EXPECT_EQ(checkpoint.read("ids").size(), 16U);
  expect_refused([&] { (void)checkpoint.read("mask"); }, path(), "the end of the file");
}

TEST_F(Safetensors, RefusesWhatIsNotAReadableFile) {
  expect_small(Checkpoint(golden_path()));
  expect_refused(HOLDFAST_TEST_DATA, "a directory");
  expect_refused(path("missing"), "No such file");
  expect_refused("/dev/null", "expected a regular file");
  // open() would read the golden file.
  expect_refused([] { const Checkpoint refused(golden_path() + std::string("\0.x", 3)); },
                 golden_path(), "a NUL inside it");
  store(path("line\nbreak"), "");
  expect_refused([&] { const Checkpoint refused(path("line\nbreak")); }, path("line\\x0abreak"),
                 "expected 8 bytes");
  // Permissions do not bind root, who would read the file.
  if (::geteuid() == 0) return;
  store(path(), load(golden_path()));
  std::filesystem::permissions(path(), std::filesystem::perms::none);
  expect_refused(path(), "Permission denied");
}

TEST_F(Safetensors, RefusesEveryTruncation) {
  const std::string good = load(golden_path());
  expect_small(Checkpoint(golden_path()));
  for (std::size_t size = 0; size < good.size(); ++size) {
    SCOPED_TRACE(size);
    store(path(), good.substr(0, size));
    expect_refused(path(), size < 8 ? "header length" : size < 520 ? "header" : "past the end");
  }
}

// Many of these files stay valid (a letter of a name); the others must all end in the one error.
TEST_F(Safetensors, SurvivesEveryChangeOfOneByte) {
  const std::string good = load(golden_path());
  int accepted = 0;
  int refused = 0;
  for (std::size_t i = 0; i < 520; ++i) {
    for (const char byte : {'\0', '\xFF', '9', '"'}) {
      std::string bytes = good;
      bytes[i] = byte;
      store(path(), bytes);
      try {
        const Checkpoint checkpoint(path());
        for (const auto& tensor : checkpoint.tensors()) (void)checkpoint.read(tensor.name);
        ++accepted;
      } catch (const CheckpointError& error) {
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
        ++refused;
      }
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 1000);
}

TEST_F(Safetensors, WriterRefusesWhatItsReaderWould) {
  const std::vector<std::byte> bytes(8);
  const auto refused = [&](const std::vector<TensorData>& tensors, const Metadata& metadata,
                           const std::string& phrase) {
    expect_refused([&] { write_checkpoint(path(), tensors, metadata); }, path(), phrase);
    EXPECT_FALSE(std::filesystem::exists(path())) << phrase;
  };
  refused({{"a", Dtype::f32, {2}, bytes}, {"a", Dtype::u8, {8}, bytes}}, {}, "every name once");
  refused({{"__metadata__", Dtype::f32, {2}, bytes}}, {}, "another name");
  refused({{"a", Dtype::f32, {3}, bytes}}, {}, "12 bytes for F32 [3]");
  refused({{"a", Dtype::f4, {3, 5}, bytes}}, {}, "F4 [3, 5], which ends inside one");
  refused({{"a", Dtype::f32, {-1, -2}, bytes}}, {}, "extents from 0 on");
  refused({{"a", Dtype::f32, {kMax, 4}, bytes}}, {}, "below 2^63");
  refused({{"a\xFF", Dtype::f32, {2}, bytes}}, {}, "UTF-8");
  refused({{"a", Dtype::f32, {2}, bytes}}, {{"k", "\xFF"}}, "UTF-8");
  refused({}, {{"k", std::string(holdfast::bench::kMaxHeaderBytes, 'x')}}, "at most 100000000");
  expect_refused([&] { write_checkpoint(path("no/folder"), {}); }, path("no/folder"),
                 "No such file");
  if (std::filesystem::exists("/dev/full")) {
    expect_refused([&] { write_checkpoint("/dev/full", {}); }, "/dev/full", "No space left");
  }
  write_checkpoint(path(), std::vector<TensorData>{{"a", Dtype::f32, {2}, bytes}}, {{"k", "v"}});
  EXPECT_EQ(Checkpoint(path()).tensors().size(), 1U);
}

/// A good file by hand, in its three parts. `length` is that of the header until an edit sets it.
struct Parts {
  std::string header = R"({"__metadata__":{"step":"7","run":"x"},)"
                       R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                       R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
                       R"("c":{"dtype":"U8","shape":[0,1],"data_offsets":[32,32]},)"
                       R"("d":{"dtype":"I16","shape":[],"data_offsets":[32,34]}})";
  std::string data = std::string(34, 'd');
  std::uint64_t length = 0;

  [[nodiscard]] std::string bytes() const {
    const std::uint64_t written = length != 0 ? length : header.size();
    std::string out(sizeof written, '\0');
    std::memcpy(out.data(), &written, sizeof written);
    return out + header + data;
  }
};

/// One kind of hostile file: what makes it from the good one, and what its refusal says.
struct Hostile {
  std::string name;
  std::string phrase;
  std::function<void(Parts&)> edit;

  /// For GoogleTest, which prints the bytes of the object otherwise.
  friend std::ostream& operator<<(std::ostream& out, const Hostile& hostile) {
    return out << hostile.name;
  }
};

/// The edit that puts `to` in place of `from`, which the header has once.
std::function<void(Parts&)> put(std::string from, std::string to) {
  return [from = std::move(from), to = std::move(to)](Parts& parts) {
    const std::size_t at = parts.header.find(from);
    if (at == std::string::npos || parts.header.find(from, at + 1) != std::string::npos) {
      throw std::logic_error("the header does not have this once: " + from);
    }
    parts.header.replace(at, from.size(), to);
  };
}

std::string repeat(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

std::vector<Hostile> hostile_files() {
  const std::string a = R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})";
  constexpr int deep = 200'000;
  return {
      // The three parts.
      {"NoHeader", "an empty header",
       [](Parts& p) {
         p = {"", "\0\0\0\0\0\0\0\0", 0};
       }},
      {"LengthPastTheFile", "the end of the file after", [](Parts& p) { p.length = 4096; }},
      {"LengthShort", "JSON", [](Parts& p) { p.length = p.header.size() - 1; }},
      {"LengthAboveTheLimit", "at most 100000000", [](Parts& p) { p.length = 100'000'001; }},
      {"Length2To62", "at most 100000000", [](Parts& p) { p.length = std::uint64_t{1} << 62; }},
      {"LengthMinusOne", "at most 100000000", [](Parts& p) { p.length = ~std::uint64_t{0}; }},
      {"DataTruncated", "past the end of the file", [](Parts& p) { p.data.pop_back(); }},
      {"NoData", "past the end of the file", [](Parts& p) { p.data.clear(); }},
      {"TrailingBytes", "7 trailing bytes", [](Parts& p) { p.data += "trailer"; }},
      {"TrailingByte", "1 trailing bytes", [](Parts& p) { p.data += '\0'; }},
      // Not JSON, or not an object.
      {"NotJson", "'{' as the first byte", [](Parts& p) { p.header = "\x80\x02}q"; }},
      {"AnArray", "'{' as the first byte", [](Parts& p) { p.header = "[" + p.header + "]"; }},
      {"AString", "'{' as the first byte", [](Parts& p) { p.header = "\"header\""; }},
      {"NulFirst", "'{' as the first byte", [](Parts& p) { p.header.insert(0, 1, '\0'); }},
      {"SpaceFirst", "'{' as the first byte", [](Parts& p) { p.header.insert(0, " "); }},
      {"ByteOrderMark", "'{' as the first byte",
       [](Parts& p) { p.header.insert(0, "\xEF\xBB\xBF"); }},
      {"NulLast", "a NUL at byte", [](Parts& p) { p.header += '\0'; }},
      {"NulInAName", "a NUL at byte",
       [](Parts& p) { p.header[p.header.find("\"b\"") + 1] = '\0'; }},
      {"SecondDocument", "expected JSON", [](Parts& p) { p.header += "{}"; }},
      {"Comment", "expected JSON", put("{\"__metadata__\"", "{/**/\"__metadata__\"")},
      {"CommaAtTheEnd", "expected JSON", put("[32,34]}", "[32,34]},")},
      {"SingleQuotes", "expected JSON", put("\"b\"", "'b'")},
      {"InvalidUtf8InAName", "UTF-8", put("\"b\"", "\"b\xFF\"")},
      {"OverlongUtf8", "UTF-8", put("\"b\"", "\"\xC0\xAF\"")},
      {"TruncatedUtf8InMetadata", "UTF-8", put("\"7\"", "\"\xE2\x82\"")},
      {"LoneSurrogate", "surrogate", put("\"b\"", R"("\ud800")")},
      {"DeepObjects", "expected JSON", put("\"b\":{", "\"b\":" + repeat("{\"x\":", deep))},
      {"DeepArrays", "an array", put("\"b\":{", "\"b\":" + repeat("[", deep))},
      {"DeepShape", "found an array", put("[4]", repeat("[", deep) + repeat("]", deep))},
      {"DeepMetadata", "found an object", put("\"7\"", repeat("{\"x\":", deep))},
      // Duplicates.
      {"TensorTwice", "every name once", put(a, a + "," + a)},
      {"TensorTwiceEscaped", "every name once", put("\"b\"", R"("\u0061")")},
      {"MetadataTwice", "__metadata__ once", put(a, R"("__metadata__":{},)" + a)},
      {"MetadataKeyTwice", "every key once", put("\"run\"", "\"step\"")},
      {"DtypeTwice", "dtype once", put("[2,3]", R"([2,3],"dtype":"F32")")},
      {"ShapeTwice", "shape once", put("[2,3]", R"([2,3],"shape":[2,3])")},
      {"OffsetsTwice", "data_offsets once", put("[0,24]", R"([0,24],"data_offsets":[0,24])")},
      // The fields.
      {"EntryANumber", "expected an object, found 3", put(a, "\"a\":3")},
      {"EntryNull", "expected an object, found null", put(a, "\"a\":null")},
      {"EntryEmpty", "the key dtype", put(a, "\"a\":{}")},
      {"NoDtype", "the key dtype", put(R"("dtype":"F32",)", "")},
      {"NoShape", "the key shape", put(R"("shape":[4],)", "")},
      {"NoOffsets", "the key data_offsets", put(R"(,"data_offsets":[24,32])", "")},
      {"KeyOfOtherCase", "the key dtype", put(R"("dtype":"F32")", R"("Dtype":"F32")")},
      {"OtherKeyNotJson", "expected JSON", put("[2,3]", R"([2,3],"stride":[3,1}])")},
      {"OtherKeyInvalidUtf8", "UTF-8", put("[2,3]", "[2,3],\"stride\":\"\xFF\"")},
      {"KeyTwiceAroundAnother", "shape once", put("[2,3]", R"([2,3],"x":[{}],"shape":[2,3])")},
      {"DtypeANumber", "a string as dtype", put("\"F32\"", "32")},
      {"DtypeNull", "a string as dtype", put("\"F32\"", "null")},
      {"ShapeANumber", "an array as shape", put("[4]", "4")},
      {"ShapeAnObject", "an array as shape", put("[4]", "{}")},
      {"ShapeNegative", "found -4", put("[4]", "[-4]")},
      {"ShapeMinusZero", "in shape", put("[0,1]", "[-0,1]")},
      {"ShapeFraction", "found 4.0", put("[4]", "[4.0]")},
      {"ShapeExponent", "found 4e0", put("[4]", "[4e0]")},
      {"ShapeAString", "the string \"4\"", put("[4]", "[\"4\"]")},
      {"ShapeABoolean", "found true", put("[4]", "[true]")},
      {"Shape2To63", "an integer below 2^63", put("[4]", "[9223372036854775808]")},
      {"Shape2To64", "found 18446744073709551616", put("[4]", "[18446744073709551616]")},
      {"ShapeHuge", "expected JSON", put("[4]", "[1e999]")},
      {"ShapeLeadingZero", "expected JSON", put("[4]", "[04]")},
      {"OffsetsAnObject", "an array as data_offsets", put("[0,24]", "{}")},
      {"OffsetsOne", "exactly two", put("[0,24]", "[0]")},
      {"OffsetsThree", "found a third", put("[0,24]", "[0,24,24]")},
      {"OffsetsNegative", "found -1", put("[0,24]", "[-1,23]")},
      {"OffsetsFraction", "found 0.5", put("[0,24]", "[0.5,24]")},
      {"OffsetsExponent", "found 24e0", put("[0,24]", "[0,24e0]")},
      {"OffsetsStrings", "the string \"0\"", put("[0,24]", R"(["0","24"])")},
      {"Offsets2To63", "an integer below 2^63", put("[0,24]", "[0,9223372036854775808]")},
      // The metadata.
      {"MetadataAString", "__metadata__: expected an object",
       put(R"({"step":"7","run":"x"})", "\"x\"")},
      {"MetadataNumber", "a string for \"step\"", put("\"7\"", "7")},
      {"MetadataNull", "a string for \"step\"", put("\"7\"", "null")},
      {"MetadataArray", "a string for \"step\"", put("\"7\"", "[]")},
      // The sizes.
      {"ShapeTooSmall", "16 bytes for BF16 [8]", put("[4]", "[8]")},
      {"DtypeTooLarge", "48 bytes for F64 [2, 3]", put("\"F32\"", "\"F64\"")},
      {"EmptyWithBytes", "0 bytes for I16 [0]", put("[]", "[0]")},
      {"ScalarWithoutBytes", "1 bytes for U8 []", put("[0,1]", "[]")},
      // 2^64 + 4 elements: a product modulo 2^64 fits the 8 bytes.
      {"CountWraps", "a size below 2^63 bytes", put("[4]", "[4611686018427387905,4]")},
      // 2^62 + 4 elements of two bytes: the bytes reach 2^63, the elements do not.
      {"BytesOverflow", "a size below 2^63 bytes", put("[4]", "[4611686018427387908]")},
      {"CountOverflowsBesideZero", "a size below 2^63 bytes",
       put("[0,1]", "[0,9223372036854775807,9223372036854775807]")},
      // A product with the bits of the type instead of its bytes would wrap to 8 bytes.
      {"BitsWrap", "2305843009213693960 bytes for U8 [2305843009213693960]",
       put(R"("BF16","shape":[4])", R"("U8","shape":[2305843009213693960])")},
      {"OddF4", "F4 [15], which ends inside one",
       put(R"("BF16","shape":[4])", R"("F4","shape":[15])")},
      {"OddF4RoundedUp", "F4 [3, 5], which ends inside one",
       put(R"("BF16","shape":[4])", R"("F4","shape":[3,5])")},
      {"SixBitsInsideAByte", "F6_E3M2 [11], which ends inside one",
       put(R"("BF16","shape":[4])", R"("F6_E3M2","shape":[11])")},
      {"ShortF4", "4 bytes for F4 [8]", put(R"("BF16","shape":[4])", R"("F4","shape":[8])")},
      // A type that is not known may have any size, and must have its place.
      {"UnknownDtypeCountOverflows", "a size below 2^63 bytes",
       put(R"("BF16","shape":[4])", R"("F31","shape":[4611686018427387904,4])")},
      {"UnknownDtypeOverlaps", "an overlap",
       put(R"("BF16","shape":[4],"data_offsets":[24,32])",
           R"("F31","shape":[4],"data_offsets":[23,32])")},
      {"UnknownDtypeIsOverlapped", "tensor \"c\": expected begin 33",
       put(R"("BF16","shape":[4],"data_offsets":[24,32])",
           R"("F31","shape":[4],"data_offsets":[24,33])")},
      {"UnknownDtypeAfterAHole", "a hole of 1 bytes",
       put(R"("BF16","shape":[4],"data_offsets":[24,32])",
           R"("F31","shape":[4],"data_offsets":[25,32])")},
      {"UnknownDtypeBeforeAHole", "a hole of 1 bytes",
       put(R"("BF16","shape":[4],"data_offsets":[24,32])",
           R"("F31","shape":[4],"data_offsets":[24,31])")},
      {"UnknownDtypePastTheEnd", "past the end of the file",
       put(R"("I16","shape":[],"data_offsets":[32,34])",
           R"("F31","shape":[],"data_offsets":[32,35])")},
      {"UnknownDtypeBeforeTrailingBytes", "1 trailing bytes",
       put(R"("I16","shape":[],"data_offsets":[32,34])",
           R"("F31","shape":[],"data_offsets":[32,33])")},
      {"UnknownDtypeOffsetsSwapped", "with begin <= end",
       put(R"("I16","shape":[],"data_offsets":[32,34])",
           R"("F31","shape":[],"data_offsets":[34,32])")},
      // The layout.
      {"OffsetsSwapped", "with begin <= end", put("[0,24]", "[24,0]")},
      {"Overlap", "an overlap", put("[24,32]", "[23,31]")},
      {"SameBytes", "an overlap",
       put(R"([4],"data_offsets":[24,32])", R"([12],"data_offsets":[0,24])")},
      {"EmptyInsideAnother", "an overlap", put("[32,32]", "[12,12]")},
      {"Hole", "a hole of 1 bytes", put("[24,32]", "[25,33]")},
      {"HoleAtTheBegin", "a hole of 24 bytes", put(a + ",", "")},
      {"PastTheEnd", "past the end of the file",
       put(R"([],"data_offsets":[32,34])", R"([2],"data_offsets":[32,36])")},
      {"FarPastTheEnd", "past the end of the file",
       put(R"([],"data_offsets":[32,34])",
           R"([4611686018427387885],"data_offsets":[32,9223372036854775802])")},
      {"EmptyPastTheEnd", "a hole of", put("[32,32]", "[99,99]")},
  };
}

TEST_F(Safetensors, UnknownDtypesAreRefusedOnlyToWhoAsksForThem) {
  for (const std::string dtype : {"F31", "f32", "", "F4_\\u00e4\\n"}) {
    SCOPED_TRACE(dtype);
    Parts parts;
    put("\"F32\"", "\"" + dtype + "\"")(parts);
    store(path(), parts.bytes());
    const Checkpoint checkpoint(path());
    EXPECT_EQ(checkpoint.tensors().size(), 4U);
    EXPECT_EQ(checkpoint.tensors()[0].elements(), 6U);
    EXPECT_TRUE(checkpoint.contains("a"));
    EXPECT_EQ(checkpoint.read("b").size(), 8U);
    const std::string phrase = "tensor \"a\": expected a known dtype (BOOL, F4, ";
    expect_refused([&] { (void)checkpoint.tensor("a"); }, path(), phrase);
    expect_refused([&] { (void)checkpoint.read("a"); }, path(), phrase);
    expect_refused([&] { checkpoint.expect("a", Dtype::f32, {2, 3}); }, path(), phrase);
  }
}

TEST_F(Safetensors, OtherKeysOfATensorArePassedOver) {
  for (const std::string value :
       {"[3,1]", "null", "true", "7", "-7", "0.5", R"("dtype")", "{}", "[]", "[[],{}]",
        R"({"dtype":"U8","shape":[[1]],"data_offsets":{"a":[9,9]},"shape":0})"}) {
    SCOPED_TRACE(value);
    for (const std::string where : {R"("dtype":"BF16")", R"("shape":[4])"}) {
      Parts parts;
      put(where, R"("x":)" + value + "," + where + R"(,"y":)" + value)(parts);
      store(path(), parts.bytes());
      const Checkpoint checkpoint(path());
      checkpoint.expect("b", Dtype::bf16, {4});
      EXPECT_EQ(checkpoint.tensors().size(), 4U);
    }
  }
  Parts deep;
  constexpr int depth = 200'000;
  put("[2,3]", R"([2,3],"x":)" + repeat("[{\"x\":", depth) + "1" + repeat("}]", depth))(deep);
  store(path(), deep.bytes());
  Checkpoint(path()).expect("a", Dtype::f32, {2, 3});
}

TEST_F(Safetensors, NamesAGitLfsPointer) {
  store(path(), "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n");
  expect_refused(path(), "found a Git LFS pointer to it; run `git lfs pull`");
}

class SafetensorsHostile : public Safetensors, public ::testing::WithParamInterface<Hostile> {};

TEST_P(SafetensorsHostile, IsRefused) {
  Parts parts;
  store(path(), parts.bytes());
  const Checkpoint good(path());
  ASSERT_EQ(good.tensors().size(), 4U);
  ASSERT_EQ(good.metadata().size(), 2U);

  GetParam().edit(parts);
  store(path(), parts.bytes());
  expect_refused(path(), GetParam().phrase);
}

INSTANTIATE_TEST_SUITE_P(Safetensors, SafetensorsHostile, ::testing::ValuesIn(hostile_files()),
                         [](const auto& hostile) { return hostile.param.name; });

}  // namespace
