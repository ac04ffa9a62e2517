// Works on any format through Locate: consecutive rows whose pieces follow each other at a constant
// distance in one file are read as one range and taken apart in memory.
#include "engram_service/store/row_range_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/status_macros.h"

namespace twinspark::engram {

void AlignedBuffer::Free::operator()(uint8_t* p) const {
  free(p);
}

std::span<uint8_t> AlignedBuffer::Get(size_t bytes) {
  if (bytes > size_) {
    size_ = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    data_.reset(static_cast<uint8_t*>(aligned_alloc(kBlockBytes, size_)));
    CHECK(data_ != nullptr) << "no memory for a buffer of " << size_ << " bytes";
  }
  return {data_.get(), size_};
}

absl::Status ReadFileRange(const TableFile& file,
                           uint64_t offset,
                           std::span<uint8_t> out,
                           AlignedBuffer& buffer) {
  const uint64_t begin = offset / kBlockBytes * kBlockBytes;
  const uint64_t end = offset + out.size();
  if (end > file.bytes) {
    return absl::DataLossError(
        absl::StrCat(file.path, " has ", file.bytes, " bytes; rows end at ", end));
  }
  const uint64_t aligned_end = (end + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  const std::span<uint8_t> to = buffer.Get(aligned_end - begin);
  uint64_t at = begin;
  while (at < end) {
    const ssize_t n =
        pread(file.fd.get(), to.data() + (at - begin), aligned_end - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat(file.path, " at ", at));
    if (n == 0) return absl::DataLossError(absl::StrCat(file.path, " ends at ", at));
    at += static_cast<uint64_t>(n);
    // O_DIRECT goes on at a block border only; a short read that is not at the end starts again
    // there.
    if (at < end) at = std::max(begin, at / kBlockBytes * kBlockBytes);
  }
  memcpy(out.data(), to.data() + (offset - begin), out.size());
  return absl::OkStatus();
}

absl::Status ReadColumnRows(const RowTable& table,
                            int column,
                            uint32_t first,
                            uint32_t count,
                            std::span<uint8_t> weights,
                            std::span<uint8_t> scales,
                            AlignedBuffer& buffer) {
  const uint32_t width = table.row_weight_bytes();
  const uint32_t groups = table.row_scale_bytes();
  std::vector<uint8_t> scattered;
  for (uint32_t done = 0; done < count;) {
    const RowPlace start = table.Locate(column, first + done);
    uint32_t run = 1;
    while (done + run < count) {
      const RowPlace next = table.Locate(column, first + done + run);
      const RowPlace before = table.Locate(column, first + done + run - 1);
      const bool follows = next.pieces[0].file_idx == start.pieces[0].file_idx &&
                           next.pieces[0].offset > before.pieces[0].offset &&
                           next.pieces[0].offset - before.pieces[0].offset <= kBlockBytes &&
                           next.pieces[1].offset > before.pieces[1].offset &&
                           next.pieces[1].offset - before.pieces[1].offset <= kBlockBytes;
      if (!follows) break;
      ++run;
    }
    const RowPlace last = table.Locate(column, first + done + run - 1);
    for (size_t piece = 0; piece < 2; ++piece) {
      const uint32_t bytes = piece == 0 ? width : groups;
      std::span<uint8_t> to = (piece == 0 ? weights : scales).subspan(size_t{done} * bytes);
      const TableFile& file = table.file(start.pieces[piece].file_idx);
      const uint64_t begin = start.pieces[piece].offset;
      const uint64_t end = last.pieces[piece].offset + bytes;
      if (end - begin == uint64_t{run} * bytes) {
        RETURN_IF_ERROR(ReadFileRange(file, begin, to.first(size_t{run} * bytes), buffer));
        continue;
      }
      scattered.resize(end - begin);
      RETURN_IF_ERROR(ReadFileRange(file, begin, scattered, buffer));
      for (uint32_t i = 0; i < run; ++i) {
        const RowPlace place = table.Locate(column, first + done + i);
        memcpy(&to[size_t{i} * bytes], &scattered[place.pieces[piece].offset - begin], bytes);
      }
    }
    done += run;
  }
  return absl::OkStatus();
}

}  // namespace twinspark::engram
