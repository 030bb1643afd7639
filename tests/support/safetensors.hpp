// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Reads and writes safetensors checkpoints, for benchmarks and tests only. Host code for 64-bit
/// little-endian POSIX.
///
/// A file is a header length (8 bytes, little-endian), a JSON header, and the data of the tensors.
/// A checkpoint comes from outside, so nothing in it is believed: the constructor of Checkpoint
/// checks the whole header against the size of the file.
/// It knows the element types of the official package 0.8, and like its reader passes over other
/// keys of a tensor than dtype, shape and data_offsets. It is stricter with names: of two tensors
/// of one name the official reader keeps the last, this one refuses the file. And it is milder with
/// types that it does not know, where the official reader refuses the file: such a tensor must have
/// its place among the others, but only who asks for it is refused.

#include "support/checkpoint_error.hpp"
#include "support/json_events.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <system_error>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

namespace holdfast::bench {

static_assert(std::endian::native == std::endian::little, "tensor bytes are handed on as they lie");
static_assert(sizeof(off_t) == 8, "checkpoints are larger than 2 GiB");

/// The official limit. It also bounds the memory that a hostile header can ask for.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// Element types, in the order of the official package: its writer sorts by them.
enum class Dtype : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

namespace detail {

struct DtypeInfo {
  const char* name;
  unsigned bits;
};

/// Indexed by Dtype.
inline constexpr std::array<DtypeInfo, 22> kDtypes{
    {{"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
     {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
     {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
     {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
     {"I64", 64},        {"U64", 64}}};
static_assert(static_cast<std::size_t>(Dtype::u64) + 1 == kDtypes.size());

}  // namespace detail

/// The name of a type in a header.
[[nodiscard]] constexpr const char* to_string(Dtype dtype) noexcept {
  return detail::kDtypes[static_cast<std::size_t>(dtype)].name;
}

/// The size of one element: 4, 6, or a multiple of 8.
[[nodiscard]] constexpr unsigned bit_size(Dtype dtype) noexcept {
  return detail::kDtypes[static_cast<std::size_t>(dtype)].bits;
}

[[nodiscard]] constexpr std::optional<Dtype> parse_dtype(std::string_view name) noexcept {
  for (std::size_t i = 0; i < detail::kDtypes.size(); ++i) {
    if (name == detail::kDtypes[i].name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

/// One tensor of a checkpoint. Its bytes are `[begin, end)` of the data, row-major.
struct Tensor {
  std::string name;
  std::optional<Dtype> dtype;  ///< none: not a type that this reader knows
  std::string dtype_name;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t bytes() const noexcept { return end - begin; }
  [[nodiscard]] std::uint64_t elements() const noexcept {
    std::uint64_t product = 1;
    for (const std::int64_t extent : shape) product *= static_cast<std::uint64_t>(extent);
    return product;
  }
};

/// A tensor for write_checkpoint. The bytes are borrowed for the call.
struct TensorData {
  std::string name;
  Dtype dtype = Dtype::u8;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

using Metadata = std::map<std::string, std::string>;

namespace detail {

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

[[nodiscard]] inline std::string print_shape(std::span<const std::int64_t> shape) {
  constexpr std::size_t shown = 8;
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size() && i < shown; ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  if (shape.size() > shown) out += ", ... (rank " + std::to_string(shape.size()) + ")";
  return out + "]";
}

[[nodiscard]] inline std::string print_range(std::uint64_t begin, std::uint64_t end) {
  return "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "]";
}

[[nodiscard]] inline std::string print_kind(const Tensor& tensor) {
  return printable(tensor.dtype_name, 40) + " " + print_shape(tensor.shape);
}

/// The product of the extents that are not zero, or nothing if it does not fit an int64: a zero
/// does not excuse other extents whose strides overflow.
[[nodiscard]] inline std::optional<std::uint64_t> largest_stride(
    std::span<const std::int64_t> shape) noexcept {
  std::uint64_t product = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) continue;
    if (product > kMaxBytes / static_cast<std::uint64_t>(extent)) return std::nullopt;
    product *= static_cast<std::uint64_t>(extent);
  }
  return product;
}

/// \throws CheckpointError unless the tensor's bytes are those of its type and shape. An unknown
///     type may take any number of bytes.
inline void check_size(const std::string& path, const Tensor& tensor,
                       const std::string& advice = kDamaged) {
  const std::string subject = in_tensor(tensor.name);
  const std::string kind = print_kind(tensor);
  const std::optional<std::uint64_t> elements = largest_stride(tensor.shape);
  const std::uint64_t bits = tensor.dtype ? bit_size(*tensor.dtype) : 0;
  // Eight elements take `bits` bytes; this way nothing overflows before the check.
  const std::uint64_t rest = elements.value_or(0) % 8 * bits;
  if (!elements || (bits > 0 && *elements / 8 > (kMaxBytes - rest / 8) / bits)) {
    refuse(path, subject, "extents from 0 on and a size below 2^63 bytes", kind, advice);
  }
  if (!tensor.dtype) return;
  const bool empty = tensor.elements() == 0;
  if (!empty && rest % 8 != 0) {
    refuse(path, subject, "whole bytes", kind + ", which ends inside one", advice);
  }
  const std::uint64_t bytes = empty ? 0 : *elements / 8 * bits + rest / 8;
  if (bytes != tensor.bytes()) {
    refuse(path, subject, std::to_string(bytes) + " bytes for " + kind,
           std::to_string(tensor.bytes()) + " bytes", advice);
  }
}

/// A regular file, open for reading at any offset by any number of threads.
class File {
 public:
  explicit File(const std::string& path) : path_(path) {
    // open() would stop at the NUL, and open another file than the one that messages name.
    if (path.find('\0') != std::string::npos) {
      refuse(path, "open", "a path", "a NUL inside it", "pass another path");
    }
    // O_NONBLOCK: a FIFO must be refused below, not waited for here.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor_ < 0) {
      refuse(path, "open", "a readable file", std::generic_category().message(errno),
             "check the path and its permissions");
    }
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(descriptor_);
      refuse(path, "open", "a regular file",
             S_ISDIR(status.st_mode) ? "a directory" : "something else",
             "pass the path of one .safetensors file");
    }
    size_ = static_cast<std::uint64_t>(status.st_size);
  }
  File(File&& other) noexcept
      : path_(std::move(other.path_)),
        descriptor_(std::exchange(other.descriptor_, -1)),
        size_(std::exchange(other.size_, 0)) {}
  File& operator=(File&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(descriptor_, other.descriptor_);
    std::swap(size_, other.size_);
    return *this;
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  /// Fills `out` from `offset` on, or throws.
  void read(std::uint64_t offset, std::span<std::byte> out) const {
    // Linux returns at most about 2 GiB from one call.
    constexpr std::size_t chunk = std::size_t{1} << 30U;
    while (!out.empty()) {
      const ssize_t count =
          ::pread(descriptor_, out.data(), std::min(out.size(), chunk), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        refuse(path_, "read", std::to_string(out.size()) + " bytes at " + std::to_string(offset),
               std::generic_category().message(errno), "check the disk");
      }
      if (count == 0) {
        refuse(path_, "read", std::to_string(out.size()) + " bytes at " + std::to_string(offset),
               "the end of the file", "it became shorter after it was opened: open it again");
      }
      out = out.subspan(static_cast<std::size_t>(count));
      offset += static_cast<std::uint64_t>(count);
    }
  }

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// Opens the file itself, or throws.
[[nodiscard]] inline File open_file(const std::string& path) {
  // What a checkout has in place of gigabytes where git-lfs is not installed: a few lines.
  constexpr std::string_view pointer = "version https://git-lfs.github.com/spec/";
  File file(path);
  std::string start(std::min<std::uint64_t>(file.size(), pointer.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(start)));
  if (start == pointer) {
    refuse(path, "open", "the file itself", "a Git LFS pointer to it",
           "run `git lfs pull` in its folder");
  }
  return file;
}

/// The header, as the format has it: every state allows a few events and refuses all others.
class HeaderEvents : public JsonEvents {
 public:
  explicit HeaderEvents(const std::string& path) : JsonEvents(path, "header", kDamaged) {}

  std::vector<Tensor> tensors;
  Metadata metadata;

 private:
  /// What comes next.
  enum class State : std::uint8_t {
    header,
    name,  ///< of a tensor, or __metadata__
    entry,
    field,  ///< a key of an entry
    dtype,
    shape,
    extent,
    offsets,
    offset,
    metadata,
    metadata_key,
    metadata_value,
  };

  [[nodiscard]] std::string subject() const {
    switch (state_) {
      case State::header:
      case State::name: return "header";
      case State::metadata:
      case State::metadata_key:
      case State::metadata_value: return "__metadata__";
      default: return in_tensor(tensor_.name);
    }
  }

  void on_unsigned(std::uint64_t value) override {
    if (state_ != State::extent && state_ != State::offset) unexpected(std::to_string(value));
    if (value > kMaxBytes) {
      refuse(path(), subject(), "an integer below 2^63", std::to_string(value));
    }
    if (state_ == State::extent) {
      tensor_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (offsets_ == 2) refuse(path(), subject(), "exactly two data_offsets", "a third");
      (offsets_ == 0 ? tensor_.begin : tensor_.end) = value;
      ++offsets_;
    }
  }

  void on_string(std::string& value) override {
    if (state_ == State::metadata_value) {
      metadata.insert_or_assign(std::move(key_), std::move(value));
      state_ = State::metadata_key;
    } else if (state_ == State::dtype) {
      tensor_.dtype = parse_dtype(value);
      tensor_.dtype_name = std::move(value);
      state_ = State::field;
    } else {
      JsonEvents::on_string(value);
    }
  }

  void on_object() override {
    switch (state_) {
      case State::header: state_ = State::name; return;
      case State::entry: state_ = State::field; return;
      case State::metadata: state_ = State::metadata_key; return;
      default: unexpected("an object");
    }
  }

  void on_array() override {
    switch (state_) {
      case State::shape: state_ = State::extent; return;
      case State::offsets: state_ = State::offset; return;
      default: unexpected("an array");
    }
  }

  void on_array_end() override {
    if (state_ == State::offset && offsets_ != 2) {
      refuse(path(), subject(), "exactly two data_offsets", std::to_string(offsets_));
    }
    state_ = State::field;
  }

  void on_object_end() override {
    if (state_ == State::field) finish_tensor();
    state_ = State::name;  // also after the header's own end, where no event follows
  }

  void on_key(std::string& value) override {
    if (state_ == State::name) {
      start_entry(std::move(value));
    } else if (state_ == State::metadata_key) {
      if (metadata.contains(value)) {
        refuse(path(), "__metadata__", "every key once", "a second \"" + printable(value) + "\"");
      }
      key_ = std::move(value);
      state_ = State::metadata_value;
    } else if (value == "dtype") {
      start_field(seen_dtype_, "dtype", State::dtype);
    } else if (value == "shape") {
      start_field(seen_shape_, "shape", State::shape);
    } else if (value == "data_offsets") {
      start_field(seen_offsets_, "data_offsets", State::offsets);
    } else {
      pass_over_value();
    }
  }

  [[noreturn]] void unexpected(const std::string& found) const override {
    switch (state_) {
      case State::entry: refuse(path(), subject(), "an object", found);
      case State::dtype: refuse(path(), subject(), "a string as dtype", found);
      case State::shape: refuse(path(), subject(), "an array as shape", found);
      case State::extent: refuse(path(), subject(), "unsigned integers in shape", found);
      case State::offsets: refuse(path(), subject(), "an array as data_offsets", found);
      case State::offset: refuse(path(), subject(), "unsigned integers in data_offsets", found);
      case State::metadata: refuse(path(), subject(), "an object", found);
      case State::metadata_value:
        refuse(path(), subject(), "a string for \"" + printable(key_) + "\"", found);
      // The parser itself refuses anything but keys in the other states.
      default: refuse(path(), subject(), "an object", found);
    }
  }

  void start_entry(std::string name) {
    if (name == kMetadataKey) {
      if (seen_metadata_) refuse(path(), "header", "__metadata__ once", "a second one");
      seen_metadata_ = true;
      state_ = State::metadata;
      return;
    }
    if (!names_.emplace(name, true).second) {
      refuse(path(), in_tensor(name), "every name once", "a second tensor of that name");
    }
    tensor_ = Tensor{};
    tensor_.name = std::move(name);
    seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    offsets_ = 0;
    state_ = State::entry;
  }

  void start_field(bool& seen, const char* field, State next) {
    if (seen) refuse(path(), subject(), std::string(field) + " once", "a second one");
    seen = true;
    state_ = next;
  }

  void finish_tensor() {
    const std::array<std::pair<bool, const char*>, 3> fields{
        {{seen_dtype_, "dtype"}, {seen_shape_, "shape"}, {seen_offsets_, "data_offsets"}}};
    for (const auto& [seen, field] : fields) {
      if (!seen) refuse(path(), subject(), std::string("the key ") + field, "none");
    }
    if (tensor_.end < tensor_.begin) {
      refuse(path(), subject(), "data_offsets [begin, end] with begin <= end",
             print_range(tensor_.begin, tensor_.end));
    }
    check_size(path(), tensor_);
    tensors.push_back(std::move(tensor_));
  }

  State state_ = State::header;
  Tensor tensor_;
  std::string key_;
  std::map<std::string, bool, std::less<>> names_;
  int offsets_ = 0;
  bool seen_dtype_ = false;
  bool seen_shape_ = false;
  bool seen_offsets_ = false;
  bool seen_metadata_ = false;
};

/// Sorts the tensors by their place, and throws unless they cover the data exactly.
inline void check_layout(const std::string& path, std::vector<Tensor>& tensors,
                         std::uint64_t data_bytes) {
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t next = 0;
  std::string previous = "the data begins";
  for (const Tensor& tensor : tensors) {
    const auto wrong = [&](const std::string& what) {
      refuse(path, in_tensor(tensor.name), "begin " + std::to_string(next) + ", where " + previous,
             print_range(tensor.begin, tensor.end) + ", " + what);
    };
    if (tensor.begin < next) wrong("an overlap");
    if (tensor.begin > next) wrong("a hole of " + std::to_string(tensor.begin - next) + " bytes");
    if (tensor.end > data_bytes) {
      refuse(path, in_tensor(tensor.name),
             "data_offsets within the " + std::to_string(data_bytes) + " bytes of data",
             print_range(tensor.begin, tensor.end) + ", past the end of the file",
             "the file is truncated or damaged: fetch or write it again");
    }
    next = tensor.end;
    previous = in_tensor(tensor.name) + " ends";
  }
  if (next != data_bytes) {
    refuse(path, "data", std::to_string(next) + " bytes, the size of all tensors",
           std::to_string(data_bytes - next) + " trailing bytes after them");
  }
}

}  // namespace detail

/// A checkpoint that is open for reading. The header is in memory, the data stays in the file.
/// Reading is const and safe from several threads. A moved-from object can only be assigned to or
/// destroyed.
class Checkpoint {
 public:
  /// \throws CheckpointError unless the file is a regular one whose whole header is valid.
  explicit Checkpoint(const std::string& path) : file_(detail::open_file(path)) {
    constexpr std::uint64_t length_bytes = 8;
    if (file_.size() < length_bytes) {
      detail::refuse(path, "header length", "8 bytes", std::to_string(file_.size()));
    }
    std::uint64_t header_bytes = 0;
    file_.read(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
    if (header_bytes > kMaxHeaderBytes) {
      detail::refuse(path, "header length", "at most " + std::to_string(kMaxHeaderBytes) + " bytes",
                     std::to_string(header_bytes));
    }
    if (header_bytes > file_.size() - length_bytes) {
      detail::refuse(path, "header", std::to_string(header_bytes) + " bytes",
                     "the end of the file after " + std::to_string(file_.size() - length_bytes));
    }
    data_begin_ = length_bytes + header_bytes;

    std::string header(header_bytes, '\0');
    file_.read(length_bytes, std::as_writable_bytes(std::span(header)));
    // Checked here because the parser skips a byte order mark.
    if (header.empty() || header.front() != '{') {
      detail::refuse(path, "header", "'{' as the first byte",
                     header.empty()
                         ? "an empty header"
                         : "byte " + std::to_string(static_cast<unsigned char>(header.front())));
    }
    detail::HeaderEvents events(path);
    events.parse(header);
    tensors_ = std::move(events.tensors);
    metadata_ = std::move(events.metadata);
    detail::check_layout(path, tensors_, data_bytes());
    for (std::size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
  }

  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }

  /// All tensors, in the order of their bytes.
  [[nodiscard]] const std::vector<Tensor>& tensors() const noexcept { return tensors_; }

  /// The offset of the data in the file; a multiple of 8 in files of this and the official writer.
  [[nodiscard]] std::uint64_t data_begin() const noexcept { return data_begin_; }
  [[nodiscard]] std::uint64_t data_bytes() const noexcept { return file_.size() - data_begin_; }

  [[nodiscard]] bool contains(std::string_view name) const {
    return index_.find(name) != index_.end();
  }

  /// \throws CheckpointError if there is no such tensor, or its type is not known.
  [[nodiscard]] const Tensor& tensor(std::string_view name) const {
    const auto found = index_.find(name);
    if (found == index_.end()) {
      std::string names = std::to_string(tensors_.size()) + " tensors";
      for (std::size_t i = 0; i < tensors_.size() && i < 3; ++i) {
        names += (i == 0 ? ": \"" : ", \"") + detail::printable(tensors_[i].name, 60) + "\"";
      }
      if (tensors_.size() > 3) names += ", ...";
      detail::refuse(path(), detail::in_tensor(name), "that tensor", names,
                     "check the name, or use the checkpoint of this model");
    }
    const Tensor& tensor = tensors_[found->second];
    if (!tensor.dtype) {
      std::string known = "a known dtype (";
      for (const detail::DtypeInfo& info : detail::kDtypes) known += std::string(info.name) + ", ";
      known.replace(known.size() - 2, 2, ")");
      detail::refuse(path(), detail::in_tensor(name), known,
                     "\"" + detail::printable(tensor.dtype_name, 40) + "\"",
                     "convert the tensor to one of these");
    }
    return tensor;
  }

  /// The tensor, if it is what the caller's code was written for.
  /// \throws CheckpointError if it is missing, or has another type or shape.
  // NOLINTNEXTLINE(modernize-use-nodiscard): a call for the check alone is right
  const Tensor& expect(std::string_view name, Dtype dtype,
                       const std::vector<std::int64_t>& shape) const {
    const Tensor& found = tensor(name);
    if (found.dtype != dtype || found.shape != shape) {
      detail::refuse(path(), detail::in_tensor(name),
                     std::string(to_string(dtype)) + " " + detail::print_shape(shape),
                     detail::print_kind(found), "use the checkpoint of this model");
    }
    return found;
  }

  /// All bytes of one tensor. Large ones are better read in parts, into memory that is there.
  [[nodiscard]] std::vector<std::byte> read(std::string_view name) const {
    std::vector<std::byte> out(tensor(name).bytes());
    read(name, 0, out);
    return out;
  }

  /// Fills `out` with the bytes of one tensor from its byte `offset` on.
  /// \throws CheckpointError if these are not all bytes of the tensor; `out` is as it was then.
  void read(std::string_view name, std::uint64_t offset, std::span<std::byte> out) const {
    const Tensor& found = tensor(name);
    if (offset > found.bytes() || out.size() > found.bytes() - offset) {
      detail::refuse(path(), detail::in_tensor(name),
                     "a read within its " + std::to_string(found.bytes()) + " bytes",
                     std::to_string(out.size()) + " bytes at " + std::to_string(offset),
                     "ask for less");
    }
    file_.read(data_begin_ + found.begin + offset, out);
  }

 private:
  detail::File file_;
  std::uint64_t data_begin_ = 0;
  std::vector<Tensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> index_;
  Metadata metadata_;
};

/// Writes a checkpoint, byte for byte as the official writer does: tensors sorted by type (widest
/// first, so each one is aligned to its elements) and name, and a header padded with spaces to a
/// multiple of 8. Metadata is sorted by key. The order of `tensors` makes no difference.
/// \throws CheckpointError before the file is touched if a tensor is not valid, and later if it
///     cannot be written; then a part of it is left, which Checkpoint refuses.
inline void write_checkpoint(const std::string& path, std::span<const TensorData> tensors,
                             const Metadata& metadata = {}) {
  const std::string advice = "pass other tensors or metadata";
  std::vector<const TensorData*> order;
  order.reserve(tensors.size());
  std::map<std::string_view, bool> names;
  for (const TensorData& tensor : tensors) {
    const std::string subject = detail::in_tensor(tensor.name);
    if (tensor.name == detail::kMetadataKey) {
      detail::refuse(path, subject, "another name", "the one of the metadata", advice);
    }
    if (!names.emplace(tensor.name, true).second) {
      detail::refuse(path, subject, "every name once", "a second tensor of that name", advice);
    }
    detail::check_size(
        path,
        {tensor.name, tensor.dtype, to_string(tensor.dtype), tensor.shape, 0, tensor.data.size()},
        advice);
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const TensorData* a, const TensorData* b) {
    return std::tie(b->dtype, a->name) < std::tie(a->dtype, b->name);
  });

  const auto quoted = [&](const std::string& text) {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
      // The text itself would make the message invalid UTF-8.
      detail::refuse(path, "header", "names and metadata in UTF-8", "other bytes", advice);
    }
  };
  std::string header = "{";
  const auto separate = [&header] {
    if (header.back() != '{') header += ',';
  };
  if (!metadata.empty()) {
    header += quoted(std::string(detail::kMetadataKey)) + ":{";
    for (const auto& [key, value] : metadata) {
      separate();
      header += quoted(key) + ':' + quoted(value);
    }
    header += '}';
  }
  std::uint64_t begin = 0;
  for (const TensorData* tensor : order) {
    separate();
    header += quoted(tensor->name) + R"(:{"dtype":")" + to_string(tensor->dtype) + R"(","shape":[)";
    for (std::size_t i = 0; i < tensor->shape.size(); ++i) {
      if (i > 0) header += ',';
      header += std::to_string(tensor->shape[i]);
    }
    const std::uint64_t end = begin + tensor->data.size();
    header += R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(end) + "]}";
    begin = end;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > kMaxHeaderBytes) {
    detail::refuse(path, "header", "at most " + std::to_string(kMaxHeaderBytes) + " bytes",
                   std::to_string(header.size()), advice);
  }

  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const auto write = [&file](std::span<const std::byte> bytes) {
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  };
  const std::uint64_t header_bytes = header.size();
  write(std::as_bytes(std::span(&header_bytes, 1)));
  write(std::as_bytes(std::span(header)));
  for (const TensorData* tensor : order) write(tensor->data);
  file.close();
  if (!file) {
    detail::refuse(path, "write",
                   std::to_string(sizeof header_bytes + header.size() + begin) + " bytes written",
                   errno == 0 ? "a failure" : std::generic_category().message(errno),
                   "check the path, its permissions and the space on the disk");
  }
}

}  // namespace holdfast::bench
