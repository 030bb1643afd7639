// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A checkpoint as people have it: one safetensors file, or a folder of them with an index that
/// says which tensor lies in which. Hundreds of gigabytes may be there in part only, so a file is
/// opened when one of its tensors is asked for, and no other has to exist.
/// The index is believed as little as the files: it names files of its own folder, or is refused.

#include "support/checkpoint_error.hpp"
#include "support/json_events.hpp"
#include "support/safetensors.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace holdfast::bench {

namespace detail {

inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr const char* kDamagedIndex =
    "the index is damaged or not one of safetensors files: fetch it again";

/// The index: an object whose weight_map has the name of a file for that of each tensor. What else
/// it has is passed over.
class IndexEvents : public JsonEvents {
 public:
  explicit IndexEvents(const std::string& path) : JsonEvents(path, "index", kDamagedIndex) {}

  std::map<std::string, std::string, std::less<>> weight_map;

 private:
  enum class State : std::uint8_t { index, key, weight_map, tensor, shard };

  void on_object() override {
    switch (state_) {
      case State::index: state_ = State::key; return;
      case State::weight_map: state_ = State::tensor; return;
      default: unexpected("an object");
    }
  }

  void on_object_end() override {
    if (state_ == State::key && !seen_weight_map_) {
      refuse(path(), "index", "the key weight_map", "none", kDamagedIndex);
    }
    state_ = State::key;  // also after the index's own end, where no event follows
  }

  void on_key(std::string& key) override {
    if (state_ == State::tensor) {
      if (weight_map.contains(key)) {
        refuse(path(), in_tensor(key), "every name once", "a second file for it", kDamagedIndex);
      }
      tensor_ = std::move(key);
      state_ = State::shard;
    } else if (key == "weight_map") {
      if (seen_weight_map_) {
        refuse(path(), "index", "weight_map once", "a second one", kDamagedIndex);
      }
      seen_weight_map_ = true;
      state_ = State::weight_map;
    } else {
      pass_over_value();
    }
  }

  void on_string(std::string& value) override {
    if (state_ != State::shard) JsonEvents::on_string(value);
    if (value.empty() || value.find('/') != std::string::npos ||
        value.find("..") != std::string::npos) {
      refuse(path(), in_tensor(tensor_), "the name of a file beside the index, without / and ..",
             "\"" + printable(value) + "\"", kDamagedIndex);
    }
    weight_map.emplace(std::move(tensor_), std::move(value));
    state_ = State::tensor;
  }

  [[noreturn]] void unexpected(const std::string& found) const override {
    switch (state_) {
      case State::weight_map: refuse(path(), "weight_map", "an object", found, kDamagedIndex);
      case State::shard:
        refuse(path(), in_tensor(tensor_), "a string, the name of its file", found, kDamagedIndex);
      // The parser itself refuses anything but keys in the other states.
      default: refuse(path(), "index", "an object", found, kDamagedIndex);
    }
  }

  State state_ = State::index;
  std::string tensor_;
  bool seen_weight_map_ = false;
};

/// The file, or the index, that `path` leads to.
[[nodiscard]] inline std::string find_in_folder(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return path;
  for (const char* const name : {kIndexName, "model.safetensors"}) {
    std::string inside = (std::filesystem::path(path) / name).string();
    // What is there but cannot be opened, such as a link to nowhere, is for open() to name.
    const auto status = std::filesystem::symlink_status(inside, error);
    if (status.type() != std::filesystem::file_type::not_found) return inside;
  }
  refuse(path, "folder", std::string(kIndexName) + " or model.safetensors in it", "neither",
         "pass the folder of a checkpoint, its index, or one .safetensors file");
}

}  // namespace detail

/// The tensors of one file, or of all files that an index names.
class Shards {
 public:
  /// `path` is a file, an index (*.json), or the folder of a model.safetensors.index.json or else
  /// of a model.safetensors. With an index no other file is opened yet.
  /// \throws CheckpointError if it is none of these, or not valid.
  explicit Shards(const std::string& path) : path_(detail::find_in_folder(path)) {
    if (!path_.ends_with(".json")) {
      single_.emplace(path_);
      return;
    }
    const detail::File file = detail::open_file(path_);
    if (file.size() > kMaxHeaderBytes) {
      detail::refuse(path_, "index", "at most " + std::to_string(kMaxHeaderBytes) + " bytes",
                     std::to_string(file.size()), detail::kDamagedIndex);
    }
    std::string text(file.size(), '\0');
    file.read(0, std::as_writable_bytes(std::span(text)));
    detail::IndexEvents events(path_);
    events.parse(text);
    weight_map_ = std::move(events.weight_map);
  }

  [[nodiscard]] bool contains(std::string_view name) const {
    return single_ ? single_->contains(name) : weight_map_.find(name) != weight_map_.end();
  }

  /// The file of a tensor, opened if this is the first one asked for. It lives as long as this
  /// object. Without an index it is the one file, which refuses names that it lacks itself.
  /// \throws CheckpointError if the index lacks the tensor, or its file is missing, not valid or
  ///     lacks it.
  [[nodiscard]] const Checkpoint& of(std::string_view name) {
    if (single_) return *single_;
    const auto found = weight_map_.find(name);
    if (found == weight_map_.end()) {
      detail::refuse(path_, detail::in_tensor(name), "that tensor in weight_map",
                     std::to_string(weight_map_.size()) + " others",
                     "check the name, or use the checkpoint of this model");
    }
    const std::string& shard = found->second;
    auto opened = opened_.find(shard);
    if (opened == opened_.end()) {
      const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
      opened = opened_.emplace(shard, (folder / shard).string()).first;
    }
    if (!opened->second.contains(name)) {
      detail::refuse(opened->second.path(), detail::in_tensor(name),
                     "that tensor, as " + detail::printable(path_, path_.size()) + " says", "none",
                     "fetch index and files again, from one revision of the model");
    }
    return opened->second;
  }

 private:
  std::string path_;
  std::optional<Checkpoint> single_;
  std::map<std::string, std::string, std::less<>> weight_map_;
  std::map<std::string, Checkpoint, std::less<>> opened_;
};

}  // namespace holdfast::bench
