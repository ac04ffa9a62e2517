// What every format shares: opening files, the check every served row passes, single rows.
#include "engram_service/store/row_table.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark::engram {

bool HasInvalidCode(std::span<const uint8_t> weights, std::span<const uint8_t> scales) {
  // Eight codes at a time: with the sign cleared, 0x7F is the only byte whose sum with 1 sets
  // bit 7.
  constexpr uint64_t kLow7 = 0x7f7f7f7f7f7f7f7full;
  constexpr uint64_t kOnes = 0x0101010101010101ull;
  uint64_t found = 0;
  size_t i = 0;
  for (; i + 8 <= weights.size(); i += 8) {
    uint64_t word;
    memcpy(&word, &weights[i], 8);
    found |= ((word & kLow7) + kOnes) & ~kLow7;
  }
  bool invalid = found != 0;
  for (; i < weights.size(); ++i)
    invalid = invalid || (weights[i] & 0x7f) == 0x7f;
  for (const uint8_t scale : scales)
    invalid = invalid || scale == 255;
  return invalid;
}

absl::StatusOr<TableFile> OpenTableFile(const std::string& path, bool direct) {
  TableFile file;
  file.path = path;
  if (direct) {
    file.fd = Fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    file.direct = file.fd.valid();
  }
  if (!file.fd.valid()) file.fd = Fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.fd.valid()) return ErrnoStatus(errno, path);
  // Rows lie anywhere: reading ahead would only push other things out of memory.
  if (!file.direct) posix_fadvise(file.fd.get(), 0, 0, POSIX_FADV_RANDOM);
  ASSIGN_OR_RETURN(file.identity, IdentityOf(file.fd.get(), path));
  file.bytes = file.identity.bytes;
  return file;
}

absl::StatusOr<FileIdentity> IdentityOf(int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, path);
  const auto nanoseconds = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  return FileIdentity{info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
                      nanoseconds(info.st_mtim), nanoseconds(info.st_ctim)};
}

std::string FileIdentity::Text() const {
  return absl::StrCat("inode ", inode, ", ", bytes, " bytes, modified ", modified_ns, ", changed ",
                      changed_ns);
}

absl::Status RowTable::CheckUnchanged() const {
  for (const TableFile& file : files_) {
    ASSIGN_OR_RETURN(const FileIdentity now, IdentityOf(file.fd.get(), file.path));
    if (now == file.identity) continue;
    return absl::DataLossError(absl::StrCat(file.path, " changed on disk while it was served: was ",
                                            file.identity.Text(), "; is ", now.Text()));
  }
  return absl::OkStatus();
}

std::vector<std::string> RowTable::ReplacedPaths() const {
  std::vector<std::string> replaced;
  for (const TableFile& file : files_) {
    struct stat info;
    if (stat(file.path.c_str(), &info) != 0 || info.st_ino != file.identity.inode ||
        info.st_dev != file.identity.device) {
      replaced.push_back(file.path);
    }
  }
  return replaced;
}

void RowTable::ContentFromFiles() {
  Sha256 hash;
  for (const TableFile& file : files_) {
    hash.UpdateU64(file.identity.bytes);
    hash.UpdateU64(static_cast<uint64_t>(file.identity.modified_ns));
    // What utime() cannot put back after a write in place.
    hash.UpdateU64(static_cast<uint64_t>(file.identity.changed_ns));
    hash.UpdateU64(file.identity.inode);
  }
  content_ = hash.Finish();
}

absl::Status RowTable::ReadRow(int column, uint32_t bucket, std::span<uint8_t> row) const {
  const RowPlace place = Locate(column, bucket);
  for (int i = 0; i < place.num_pieces; ++i) {
    const RowPiece& piece = place.pieces[static_cast<size_t>(i)];
    const TableFile& from = file(piece.file_idx);
    // Whole blocks into an aligned buffer: the file may be open with O_DIRECT.
    alignas(kBlockBytes) uint8_t buffer[3 * kBlockBytes];
    const uint64_t begin = piece.offset / kBlockBytes * kBlockBytes;
    const uint64_t end = (piece.offset + piece.bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    for (uint64_t at = begin; at < end; at += kBlockBytes) {
      std::span<uint8_t> block(buffer + (at - begin), kBlockBytes);
      const ssize_t n = pread(from.fd.get(), block.data(), kBlockBytes, static_cast<off_t>(at));
      if (n < 0) return ErrnoStatus(errno, absl::StrCat(from.path, " at ", at));
      if (at + static_cast<uint64_t>(n) < std::min(piece.offset + piece.bytes, at + kBlockBytes)) {
        return absl::DataLossError(
            absl::StrCat(from.path, " ends at ", at + static_cast<uint64_t>(n)));
      }
      if (static_cast<size_t>(n) == kBlockBytes) {
        const absl::Status checked = CheckBlock(at / kBlockBytes, block);
        if (!checked.ok()) {
          return absl::Status(checked.code(), absl::StrCat(from.path, ": ", checked.message()));
        }
      }
    }
    memcpy(&row[piece.row_byte], buffer + (piece.offset - begin), piece.bytes);
  }
  return absl::OkStatus();
}

}  // namespace twinspark::engram
