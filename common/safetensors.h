// Reads safetensors files and sharded checkpoints with pread: no mmap, so that weights are read
// once into the memory they live in and a truncated file is an error message, not a SIGBUS. The
// header is checked completely before any tensor is handed out: length, JSON, types, shapes,
// offsets within the file, size = shape x type, no overlap. A checkpoint is a directory with
// model.safetensors.index.json (tensor name > file, relative to the directory, may start with
// "../"), or one model.safetensors. Errors name file, tensor, expected and found. Thread-safe after
// Open (const methods only). Callers: shard_worker/model, engram_service/store, tests/golden.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark {

enum class StoredType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
};
const char* StoredTypeName(StoredType type);  // as in the file: "BF16", "F8_E4M3", ...
size_t StoredTypeBytes(StoredType type);

struct StoredTensor {
  std::string name;
  StoredType type = StoredType::kU8;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // of the first byte in the file
  int64_t bytes = 0;
  int file_idx = 0;  // within its checkpoint; 0 for a single file

  int64_t num_elements() const;
  std::string ShapeText() const;  // "[24, 1024]"
};

// One parsed header: what a file's first bytes say. Separate from the file so that it can be tested
// and fuzzed alone. `header` is the JSON text, `data_offset` where the data begins.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(std::string_view header,
                                                                 int64_t data_offset,
                                                                 int64_t file_bytes,
                                                                 std::string_view file_name);

class SafetensorsFile {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t file_bytes() const { return file_bytes_; }
  std::string_view header() const { return header_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // by offset
  const StoredTensor* Find(std::string_view name) const;                 // null when absent

  // Bytes [begin, begin + out.size()) of the tensor.
  absl::Status Read(const StoredTensor& tensor, int64_t begin, std::span<std::byte> out) const;
  absl::StatusOr<std::vector<std::byte>> ReadAll(const StoredTensor& tensor) const;
  int fd() const { return fd_; }

 private:
  SafetensorsFile() = default;
  std::string path_;
  int fd_ = -1;
  int64_t file_bytes_ = 0;
  std::string header_;
  std::vector<StoredTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> by_name_;
};

class Checkpoint {
 public:
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& dir);

  const std::string& dir() const { return dir_; }
  // Names of the index, ascending; only these exist, whatever else the files hold.
  const std::vector<std::string>& names() const { return names_; }
  const StoredTensor* Find(std::string_view name) const;
  const SafetensorsFile& file(int file_idx) const { return *files_[static_cast<size_t>(file_idx)]; }
  int num_files() const { return static_cast<int>(files_.size()); }

  absl::Status Read(const StoredTensor& tensor, int64_t begin, std::span<std::byte> out) const {
    return file(tensor.file_idx).Read(tensor, begin, out);
  }
  absl::StatusOr<std::vector<std::byte>> ReadAll(const StoredTensor& tensor) const {
    return file(tensor.file_idx).ReadAll(tensor);
  }

  // xxhash64 over the index text, shard sizes and shard headers (protocol specification section 2).
  uint64_t digest() const { return digest_; }

 private:
  Checkpoint() = default;
  std::string dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::string> names_;
  absl::flat_hash_map<std::string, StoredTensor> tensors_;
  uint64_t digest_ = 0;
};

}  // namespace twinspark
