// pack_rows --model-dir DIR --out DIR [--engram-dir DIR] [--rank R --world N] [--layer L]
//           [--from native|compat] [--format egpack|compat-columns|compat-rows] [--full]
//           [--limit-mb N] [--rates] [--force]
// Writes this node's packed tables. --rates also measures the drives and says what share of it
// packing got. Killed or stopped at any moment, the same command goes on where
// it was. Exit codes: 0, 65 bad source or refused file, 75 no space, 78 bad flags.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include <sys/statfs.h>

#include "absl/strings/str_cat.h"

#include "common/model_config.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "engram_service/read/table_set.h"
#include "engram_service/store/compat_table.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/row_table_writer.h"
#include "engram_service/tools/compat_writer.h"
#include "engram_service/tools/disk_rates.h"
#include "engram_service/tools/tool_flags.h"

namespace twinspark::engram {
namespace {

constexpr uint64_t kRatesBytes = uint64_t{1} << 30;
constexpr long kNfsMagic = 0x6969;
constexpr long kSmb2Magic = 0xFE534D42;
constexpr long kCifsMagic = 0xFF534D42;

struct Job {
  std::string model_dir;
  std::string engram_dir;
  std::string out_dir;
  std::string from;
  std::string format;
  int rank = 0;
  int world = 1;
  int64_t layer = -1;
  bool full = false;
  bool rates = false;
  uint64_t bytes_per_second = 0;
};

// Packed rows are read at random for months: they belong on the node's own drive.
absl::Status CheckFileSystem(const std::string& dir) {
  struct statfs info;
  if (statfs(dir.c_str(), &info) != 0) return ErrnoStatus(errno, dir);
  const long type = static_cast<long>(info.f_type);
  if (type != kNfsMagic && type != kSmb2Magic && type != kCifsMagic) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(dir, " is on a network file system; give a directory of this node, or --force"));
}

absl::StatusOr<std::unique_ptr<RowTable>> OpenSource(const Job& job,
                                                     const Checkpoint* checkpoint,
                                                     const Hasher& hasher,
                                                     int layer_idx,
                                                     PackSource& provenance) {
  const LayerHash& layer = hasher.layer(layer_idx);
  if (job.from == "compat") {
    ASSIGN_OR_RETURN(auto table, CompatTable::Open(CompatPaths(job.engram_dir, layer.layer_id),
                                                   hasher.shape(), layer, true));
    // Headers of this layout name no checkpoint: their digest stands for it.
    provenance.header_digest = table->digest();
    return std::unique_ptr<RowTable>(std::move(table));
  }
  ASSIGN_OR_RETURN(auto table, NativeTable::Open(*checkpoint, hasher.shape(), layer, true));
  provenance = SourceOf(*table);
  return std::unique_ptr<RowTable>(std::move(table));
}

absl::Status PackLayer(const Job& job,
                       const Checkpoint* checkpoint,
                       const Hasher& hasher,
                       int layer_idx) {
  const LayerHash& layer = hasher.layer(layer_idx);
  PackSource provenance;
  ASSIGN_OR_RETURN(const auto source, OpenSource(job, checkpoint, hasher, layer_idx, provenance));
  ProgressLine line(absl::StrCat("layer ", layer.layer_id));
  if (job.format != "egpack") {
    CompatOptions options = {
        job.out_dir,
        job.rank,
        job.world,
        job.format == "compat-rows" ? CompatSplit::kEqualRows : CompatSplit::kColumns,
        {}};
    options.progress = [&](uint64_t done, uint64_t total) {
      line.Update("write", done * source->row_bytes(), total * source->row_bytes(), true);
    };
    ASSIGN_OR_RETURN(const std::string path,
                     WriteCompatFile(*source, hasher.shape(), layer, options));
    printf("%s written\n", path.c_str());
    return absl::OkStatus();
  }
  PackOptions options;
  options.out_dir = job.out_dir;
  ASSIGN_OR_RETURN(options.target.columns, BalancedColumns(hasher.shape(), job.rank, job.world));
  options.target.node = static_cast<uint32_t>(job.rank);
  options.target.nodes = static_cast<uint32_t>(job.world);
  options.target.scheme = job.world == 1 ? kSchemeAll : kSchemeBalanced;
  options.compare_all_rows = job.full;
  options.bytes_per_second = job.bytes_per_second;
  options.created_unix = static_cast<uint64_t>(std::time(nullptr));
  options.progress = [&](const PackProgress& progress) {
    const std::string phase = progress.phase;
    line.Update(phase, progress.bytes_done, progress.bytes_total, phase != "compare");
  };
  DiskRates drive;
  if (job.rates) {
    ASSIGN_OR_RETURN(drive, MeasureDiskRates(source->path(), job.out_dir, kRatesBytes));
    printf("drive alone: reads %.0f MB/s, writes %.0f MB/s; both at once: %.0f and %.0f MB/s\n",
           drive.read / 1e6, drive.write / 1e6, drive.read_beside / 1e6, drive.write_beside / 1e6);
  }
  PackFiles files;
  ASSIGN_OR_RETURN(const PackResult result,
                   PackTable(*source, provenance, hasher, layer_idx, options, files));
  if (result.already_there) {
    printf("%s is there already\n", result.path.c_str());
    return absl::OkStatus();
  }
  const auto rate = [](uint64_t bytes, double seconds) {
    return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e6 : 0.0;
  };
  printf(
      "%s: %llu pages, %llu of %llu extents resumed, packed %.0f MB/s, verified %.0f MB/s, "
      "%llu rows compared with the source\n",
      result.path.c_str(), static_cast<unsigned long long>(result.pages),
      static_cast<unsigned long long>(result.extents_resumed),
      static_cast<unsigned long long>(result.extents),
      rate(result.packed_bytes, result.pack_seconds),
      rate(result.pages * kPageBytes, result.verify_seconds),
      static_cast<unsigned long long>(result.rows_compared));
  if (job.rates) {
    const double packed = rate(result.packed_bytes, result.pack_seconds) * 1e6;
    printf("packed at %.2f of the drive's slower rate alone, %.2f of it with both at once\n",
           packed / std::min(drive.read, drive.write),
           packed / std::min(drive.read_beside, drive.write_beside));
  }
  return absl::OkStatus();
}

const ToolUsage kUsage = {
    "pack_rows",
    "Writes this node's packed tables. Stopped at any moment, the same command goes on where it "
    "was.",
    WithTableFlags({
        {"--out", "DIR", "where packed files go, a drive of this node; created"},
        {"--layer", "L", "only this layer", "all"},
        {"--from", "KIND", "source: native (checkpoint) or compat (another recipe's pack)",
         "native"},
        {"--format", "F", "egpack, compat-columns or compat-rows", "egpack"},
        {"--full", "", "compares every packed row with the source, not samples"},
        {"--limit-mb", "N", "at most N MB/s", "no limit"},
        {"--rates", "", "also measures the drives and packing's share of them (1 GiB is written)"},
        {"--force", "", "allows --out on a network file system"},
    })};

absl::Status Run(const ToolFlags& flags) {
  Job job;
  job.model_dir = flags.Text("--model-dir");
  job.engram_dir = flags.Text("--engram-dir", job.model_dir);
  job.out_dir = flags.Text("--out");
  job.from = flags.Text("--from", "native");
  job.format = flags.Text("--format", "egpack");
  job.full = flags.Has("--full");
  job.rates = flags.Has("--rates");
  ASSIGN_OR_RETURN(const int64_t rank, flags.Int("--rank", 0));
  ASSIGN_OR_RETURN(const int64_t world, flags.Int("--world", 1));
  ASSIGN_OR_RETURN(job.layer, flags.Int("--layer", -1));
  ASSIGN_OR_RETURN(const int64_t limit_mb, flags.Int("--limit-mb", 0));
  job.rank = static_cast<int>(rank);
  job.world = static_cast<int>(world);
  job.bytes_per_second = static_cast<uint64_t>(limit_mb) * 1000000;
  if (job.model_dir.empty() || job.out_dir.empty()) {
    return absl::InvalidArgumentError("give --model-dir and --out");
  }
  if ((job.from != "native" && job.from != "compat") ||
      (job.format != "egpack" && job.format != "compat-columns" && job.format != "compat-rows")) {
    return absl::InvalidArgumentError(
        "--from is native or compat; --format is egpack, compat-columns or compat-rows");
  }
  ASSIGN_OR_RETURN(const auto hasher, LoadHasher(job.model_dir));
  RETURN_IF_ERROR(MakeDirectories(job.out_dir));
  if (!flags.Has("--force")) RETURN_IF_ERROR(CheckFileSystem(job.out_dir));
  std::unique_ptr<Checkpoint> checkpoint;
  if (job.from == "native") {
    ASSIGN_OR_RETURN(checkpoint, Checkpoint::Open(job.engram_dir));
  }
  for (int i = 0; i < hasher->shape().num_layers(); ++i) {
    if (job.layer >= 0 && hasher->layer(i).layer_id != job.layer) continue;
    RETURN_IF_ERROR(PackLayer(job, checkpoint.get(), *hasher, i));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  return ToolMain(kUsage, argc, argv, Run);
}
