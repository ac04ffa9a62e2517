// verify_rows --model-dir DIR [--engram-dir DIR] [--packed-dir DIR] [--rank R --world N]
//             [--mode quick|scrub|source|source-full]
// quick: headers, footer digest, sampled and border rows. scrub: every page of packed files.
// source: sampled rows against the native tables; source-full: every row. Exit 0 only if nothing is
// wrong.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/ids.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "engram_service/read/table_set.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/packed_scrub.h"
#include "engram_service/store/packed_table.h"
#include "engram_service/store/row_range_reader.h"
#include "engram_service/tools/tool_flags.h"

namespace twinspark::engram {
namespace {

constexpr int kSampledRows = 64;
constexpr uint32_t kRowsPerCompare = 16384;

// Border rows of every owned column and some between; each read checks its page.
absl::Status CheckSampledRows(const TableSet& set, int layer_idx, const RowTable* source) {
  const RowTable& table = set.table(layer_idx);
  std::vector<uint8_t> row(table.row_bytes());
  std::vector<uint8_t> want(table.row_bytes());
  for (const int column : set.columns()) {
    const uint32_t prime = set.hasher().layer(layer_idx).primes[static_cast<size_t>(column)];
    std::vector<uint32_t> buckets = {0, prime - 1};
    for (int i = 0; i < kSampledRows; ++i) {
      buckets.push_back(static_cast<uint32_t>(RandomU64() % prime));
    }
    for (const uint32_t bucket : buckets) {
      RETURN_IF_ERROR(table.ReadRow(column, bucket, row));
      if (HasInvalidCode(std::span(row).first(table.row_weight_bytes()),
                         std::span(row).subspan(table.row_weight_bytes()))) {
        return absl::DataLossError(absl::StrCat(table.path(), ": bucket ", bucket, " of column ",
                                                column, " has a NaN code or scale 255"));
      }
      if (source == nullptr) continue;
      RETURN_IF_ERROR(source->ReadRow(column, bucket, want));
      if (row != want) {
        return absl::DataLossError(absl::StrCat(table.path(), ": bucket ", bucket, " of column ",
                                                column, " differs from ", source->path()));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> CompareAllRows(const TableSet& set,
                                        int layer_idx,
                                        const RowTable& source,
                                        ProgressLine& line) {
  const RowTable& table = set.table(layer_idx);
  AlignedBuffer buffer;
  std::vector<uint8_t> bytes[4];
  for (size_t i = 0; i < 4; ++i) {
    bytes[i].resize(size_t{kRowsPerCompare} *
                    (i % 2 == 0 ? table.row_weight_bytes() : table.row_scale_bytes()));
  }
  uint64_t rows = 0;
  const uint64_t total =
      table.num_rows() * set.columns().size() / static_cast<uint64_t>(set.shape().num_columns());
  for (const int column : set.columns()) {
    const uint32_t prime = set.hasher().layer(layer_idx).primes[static_cast<size_t>(column)];
    for (uint32_t first = 0; first < prime; first += kRowsPerCompare) {
      const uint32_t count = std::min(kRowsPerCompare, prime - first);
      const size_t weights = size_t{count} * table.row_weight_bytes();
      const size_t scales = size_t{count} * table.row_scale_bytes();
      RETURN_IF_ERROR(ReadColumnRows(table, column, first, count,
                                     std::span(bytes[0]).first(weights),
                                     std::span(bytes[1]).first(scales), buffer));
      RETURN_IF_ERROR(ReadColumnRows(source, column, first, count,
                                     std::span(bytes[2]).first(weights),
                                     std::span(bytes[3]).first(scales), buffer));
      if (bytes[0] != bytes[2] || bytes[1] != bytes[3]) {
        return absl::DataLossError(absl::StrCat(table.path(), ": rows of column ", column,
                                                " from bucket ", first, " differ from ",
                                                source.path()));
      }
      rows += count;
      line.Update("compare", rows * table.row_bytes(), total * table.row_bytes(), true);
    }
  }
  return rows;
}

absl::Status VerifyLayer(const TableSet& set,
                         int layer_idx,
                         const std::string& mode,
                         const Checkpoint* checkpoint) {
  const RowTable& table = set.table(layer_idx);
  ProgressLine line(absl::StrCat("layer ", table.layer_id()));
  if (mode == "scrub") {
    const auto* packed = dynamic_cast<const PackedTable*>(&table);
    if (packed == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(table.path(), " is not packed: it has no checksums to scrub"));
    }
    ASSIGN_OR_RETURN(const uint64_t findings,
                     ScrubPackedFile(
                         table.file(0), packed->layout(), packed->extents(),
                         [](const std::string& text) { fprintf(stderr, "%s\n", text.c_str()); },
                         [&](const ScrubProgress& p) {
                           line.Update("scrub", p.extents_done, p.extents_total, false);
                         }));
    if (findings > 0) {
      return absl::DataLossError(absl::StrCat(table.path(), ": ", findings, " findings"));
    }
    printf("%s: every page is right\n", table.path().c_str());
    return absl::OkStatus();
  }
  std::unique_ptr<NativeTable> source;
  if (mode != "quick") {
    ASSIGN_OR_RETURN(
        source, NativeTable::Open(*checkpoint, set.shape(), set.hasher().layer(layer_idx), true));
  }
  if (mode == "source-full") {
    ASSIGN_OR_RETURN(const uint64_t rows, CompareAllRows(set, layer_idx, *source, line));
    printf("%s: %llu rows equal %s\n", table.path().c_str(), static_cast<unsigned long long>(rows),
           source->path().c_str());
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckSampledRows(set, layer_idx, source.get()));
  printf("%s: header, borders and %d sampled rows of every column are right\n",
         table.path().c_str(), kSampledRows);
  return absl::OkStatus();
}

const ToolUsage kUsage = {
    "verify_rows", "Checks the tables of one rank; exit code 0 only if nothing is wrong.",
    WithTableFlags({
        {"--packed-dir", "DIR", "packed files, which must be there for this rank",
         "those in --engram-dir, else its native tables"},
        {"--mode", "MODE",
         "quick: headers, borders, sampled rows; scrub: every page of packed files; source: "
         "samples against the checkpoint; source-full: every row",
         "quick"},
    })};

absl::Status Run(const ToolFlags& flags) {
  ASSIGN_OR_RETURN(const int64_t rank, flags.Int("--rank", 0));
  ASSIGN_OR_RETURN(const int64_t world, flags.Int("--world", 1));
  const std::string mode = flags.Text("--mode", "quick");
  if (mode != "quick" && mode != "scrub" && mode != "source" && mode != "source-full") {
    return absl::InvalidArgumentError("--mode is quick, scrub, source or source-full");
  }
  TableSetOptions options;
  options.model_dir = flags.Text("--model-dir");
  options.engram_dir = flags.Text("--engram-dir", options.model_dir);
  options.packed_dir = flags.Text("--packed-dir");
  options.rank = static_cast<int>(rank);
  options.world = static_cast<int>(world);
  options.direct = true;
  if (options.model_dir.empty()) return absl::InvalidArgumentError("give --model-dir");
  ASSIGN_OR_RETURN(const auto set, TableSet::Open(options));
  printf("tier %s\n", std::string(set->tier()).c_str());
  std::unique_ptr<Checkpoint> checkpoint;
  if (mode == "source" || mode == "source-full") {
    ASSIGN_OR_RETURN(checkpoint, Checkpoint::Open(options.engram_dir));
  }
  for (int i = 0; i < set->num_layers(); ++i) {
    RETURN_IF_ERROR(VerifyLayer(*set, i, mode, checkpoint.get()));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  return ToolMain(kUsage, argc, argv, Run);
}
