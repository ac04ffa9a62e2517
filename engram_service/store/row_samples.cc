// One column is one task of a few threads: a sleeping drive is what takes the time.
#include "engram_service/store/row_samples.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/pack_manifest.h"
#include "engram_service/store/packed_table.h"
#include "engram_service/store/sha256.h"

namespace twinspark::engram {
namespace {

constexpr size_t kThreads = 16;

absl::StatusOr<std::string> SampleColumn(const RowTable& table, int column, uint32_t prime) {
  Sha256 hash;
  hash.UpdateU32(static_cast<uint32_t>(table.layer_id()));
  hash.UpdateU32(static_cast<uint32_t>(column));
  hash.UpdateU32(prime);
  std::vector<uint8_t> row(table.row_bytes());
  const uint64_t count = std::min(prime, kSampledRowsPerColumn);
  for (uint64_t i = 0; i < count; ++i) {
    RETURN_IF_ERROR(table.ReadRow(column, static_cast<uint32_t>(i * prime / count), row));
    hash.Update(row);
  }
  const Sha256Digest digest = hash.Finish();
  return std::string(reinterpret_cast<const char*>(digest.data()), kRowSampleBytes);
}

}  // namespace

absl::StatusOr<RowSamples> SampleRows(const RowTable& table, const LayerHash& layer) {
  RowSamples samples(layer.primes.size());
  std::vector<size_t> columns;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (table.HasColumn(static_cast<int>(i))) columns.push_back(i);
  }
  std::mutex mutex;
  absl::Status status;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < columns.size(); i = next++) {
      const size_t column = columns[i];
      auto sample = SampleColumn(table, static_cast<int>(column), layer.primes[column]);
      if (sample.ok()) {
        samples[column] = *std::move(sample);
      } else {
        const std::lock_guard lock(mutex);
        status.Update(sample.status());
        return;
      }
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(kThreads, columns.size()); ++i)
    threads.emplace_back(work);
  work();
  for (std::thread& thread : threads)
    thread.join();
  RETURN_IF_ERROR(status);
  return samples;
}

int FirstDifference(const RowSamples& a, const RowSamples& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!a[i].empty() && !b[i].empty() && a[i] != b[i]) return static_cast<int>(i);
  }
  return -1;
}

absl::StatusOr<RowSamples> SamplesOfWholeTable(const RowTable& table, const LayerHash& layer) {
  ASSIGN_OR_RETURN(RowSamples samples, SampleRows(table, layer));
  const auto* packed = dynamic_cast<const PackedTable*>(&table);
  if (packed == nullptr) return samples;
  const RowSamples stated =
      SamplesInManifest(table.path(), packed->layout().header.footer_digest, samples.size());
  if (const int column = FirstDifference(samples, stated); column >= 0) {
    return absl::DataLossError(absl::StrCat(
        table.path(), ": rows of column ", column, " are not those that ",
        ManifestPath(table.path()), " was written for; delete that file and run pack_rows again"));
  }
  for (size_t i = 0; i < stated.size(); ++i) {
    if (samples[i].empty()) samples[i] = stated[i];
  }
  return samples;
}

}  // namespace twinspark::engram
