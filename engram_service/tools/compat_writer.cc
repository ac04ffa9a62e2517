// Rows in table order, column by column, a few MiB at a time.
#include "engram_service/tools/compat_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fcntl.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/compat_table.h"
#include "engram_service/store/pack_files.h"
#include "engram_service/store/row_range_reader.h"

namespace twinspark::engram {
namespace {

constexpr uint64_t kRowsPerWrite = 16384;

absl::StatusOr<std::pair<uint64_t, uint64_t>> RowRangeOf(const EngramShape& shape,
                                                         const LayerHash& layer,
                                                         const CompatOptions& options) {
  const auto r = static_cast<uint64_t>(options.rank);
  const auto n = static_cast<uint64_t>(options.world);
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank, " of ", options.world));
  }
  if (options.split == CompatSplit::kEqualRows) {
    return std::pair(layer.num_rows * r / n, layer.num_rows * (r + 1) / n);
  }
  ASSIGN_OR_RETURN(const std::vector<int> columns,
                   ContiguousColumns(shape, options.rank, options.world));
  if (columns.empty()) return absl::InvalidArgumentError("this rank owns no column");
  const auto last = static_cast<size_t>(columns.back());
  return std::pair(layer.offsets[static_cast<size_t>(columns.front())],
                   layer.offsets[last] + layer.primes[last]);
}

}  // namespace

absl::StatusOr<std::string> WriteCompatFile(const RowTable& source,
                                            const EngramShape& shape,
                                            const LayerHash& layer,
                                            const CompatOptions& options) {
  ASSIGN_OR_RETURN(const auto range, RowRangeOf(shape, layer, options));
  const auto [lo, hi] = range;
  const std::string path =
      options.out_dir + "/" + CompatFileName(layer.layer_id, options.rank, options.world);
  const std::string partial = path + ".partial";
  const Fd fd(open(partial.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoStatus(errno, partial);
  const uint32_t width = source.row_weight_bytes();
  const uint32_t groups = source.row_scale_bytes();
  PackFiles files;
  RETURN_IF_ERROR(
      files.Allocate(fd.get(), kCompatHeaderBytes + (hi - lo) * source.row_bytes(), partial));
  std::vector<uint8_t> bytes(kCompatHeaderBytes);
  const CompatHeader header =
      MakeCompatHeader(layer.layer_id, lo, hi, layer.num_rows, source.row_bytes());
  memcpy(bytes.data(), &header, sizeof(header));
  RETURN_IF_ERROR(WriteExactly(fd.get(), 0, bytes, partial));
  std::vector<uint8_t> weights(kRowsPerWrite * width);
  std::vector<uint8_t> scales(kRowsPerWrite * groups);
  AlignedBuffer buffer;
  size_t column = 0;
  for (uint64_t row = lo; row < hi;) {
    while (row >= layer.offsets[column] + layer.primes[column])
      ++column;
    const uint64_t end = std::min(hi, layer.offsets[column] + layer.primes[column]);
    const auto count = static_cast<uint32_t>(std::min(kRowsPerWrite, end - row));
    RETURN_IF_ERROR(ReadColumnRows(source, static_cast<int>(column),
                                   static_cast<uint32_t>(row - layer.offsets[column]), count,
                                   std::span(weights).first(size_t{count} * width),
                                   std::span(scales).first(size_t{count} * groups), buffer));
    bytes.resize(size_t{count} * source.row_bytes());
    for (uint32_t i = 0; i < count; ++i) {
      memcpy(&bytes[size_t{i} * source.row_bytes()], &weights[size_t{i} * width], width);
      memcpy(&bytes[size_t{i} * source.row_bytes() + width], &scales[size_t{i} * groups], groups);
    }
    RETURN_IF_ERROR(WriteExactly(fd.get(), kCompatHeaderBytes + (row - lo) * source.row_bytes(),
                                 bytes, partial));
    row += count;
    if (options.progress) options.progress(row - lo, hi - lo);
  }
  RETURN_IF_ERROR(files.Sync(fd.get(), partial));
  RETURN_IF_ERROR(files.Rename(partial, path));
  return path;
}

}  // namespace twinspark::engram
