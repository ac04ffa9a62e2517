// One layer's table on disk, whatever its format: where a row's bytes lie (pieces of files) and how
// to take the row out of the 4 KiB blocks that hold them. Reading itself belongs to
// engram_service/io and the gather engine, so that every format shares one scheduler, one dedup and
// one set of retries. Immutable after Open, so thread-safe. Implementations: native_table.h
// (safetensors), packed_table.h (EGPACK01), compat_table.h (DSV41EN1). Spec: engram.md 3.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/store/file_io.h"
#include "engram_service/store/sha256.h"

namespace twinspark::engram {

inline constexpr uint32_t kBlockBytes = 4096;  // what one read fetches, aligned

// Consecutive bytes of a table file that belong to one row.
struct RowPiece {
  uint64_t offset = 0;  // in the file
  uint16_t bytes = 0;
  uint16_t row_byte = 0;  // where they go in the row: weights first, then scales
  uint16_t file_idx = 0;  // which of the table's files
};

// What an open file was when its content was checked. Whoever writes to it moves at least one of
// these before a byte of the content changes (through the page cache, past it and by mapping).
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;  // Unix time
  int64_t changed_ns = 0;

  bool operator==(const FileIdentity&) const = default;
  std::string Text() const;
};
absl::StatusOr<FileIdentity> IdentityOf(int fd, const std::string& path);

// A file of a table, open for reading.
struct TableFile {
  std::string path;
  Fd fd;
  uint64_t bytes = 0;
  FileIdentity identity;  // when it was opened
  bool direct = false;    // opened with O_DIRECT
};

// Opens for reading; with `direct` past the page cache where the file system allows it.
absl::StatusOr<TableFile> OpenTableFile(const std::string& path, bool direct);

struct RowPlace {
  std::array<RowPiece, 2> pieces;
  int num_pieces = 0;
};

class RowTable {
 public:
  virtual ~RowTable() = default;

  int layer_id() const { return layer_id_; }
  uint64_t num_rows() const { return num_rows_; }  // of the whole table
  uint32_t row_bytes() const { return row_weight_bytes_ + row_scale_bytes_; }
  uint32_t row_weight_bytes() const { return row_weight_bytes_; }
  uint32_t row_scale_bytes() const { return row_scale_bytes_; }
  const std::vector<TableFile>& files() const { return files_; }
  const TableFile& file(size_t file_idx) const { return files_[file_idx]; }
  const std::string& path() const { return files_.front().path; }
  // Identifies the content: what the source file's header and index say (engram.md 3.3).
  const Sha256Digest& digest() const { return digest_; }
  virtual std::string_view tier() const = 0;  // "native", "packed" or "compat"
  // Identifies the row bytes as far as the format can: the digests of a packed file's footer; for
  // files without checksums their sizes, times of modification and change, and inodes, so that a
  // chmod or a new hard link counts as other content too. The same across restarts.
  const Sha256Digest& content() const { return content_; }
  // OK as long as the open files are what they were at Open; else DATA_LOSS with both identities.
  // To be asked after reading and before passing on what was read.
  absl::Status CheckUnchanged() const;
  // Paths that by now lead to another file than the open one, or to none.
  std::vector<std::string> ReplacedPaths() const;

  // Whether this file holds the column (packed files hold one node's columns only).
  virtual bool HasColumn(int column) const = 0;
  // Pieces of row `bucket` of `column`; bucket < prime of the column, HasColumn(column).
  virtual RowPlace Locate(int column, uint32_t bucket) const = 0;
  // Checks a whole block as it came from the disk (packed pages carry checksums and identity).
  virtual absl::Status CheckBlock(uint64_t block_idx, std::span<const uint8_t> block) const = 0;

  // One row with plain reads, for tools and start-up checks.
  absl::Status ReadRow(int column, uint32_t bucket, std::span<uint8_t> row) const;

 protected:
  int layer_id_ = 0;
  uint64_t num_rows_ = 0;
  uint32_t row_weight_bytes_ = 0;
  uint32_t row_scale_bytes_ = 0;
  std::vector<TableFile> files_;  // at least one after Open
  Sha256Digest digest_{};
  Sha256Digest content_{};
  // For formats without checksums, once files_ is complete.
  void ContentFromFiles();
};

// True when a row holds a NaN weight code (0x7F, 0xFF) or scale 255: damage that must not be passed
// on (engram.md 4.9).
bool HasInvalidCode(std::span<const uint8_t> weights, std::span<const uint8_t> scales);

}  // namespace twinspark::engram
