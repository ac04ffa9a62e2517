// Start-up checks read through the same engine that serves.
#include "engram_service/service/serving.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/ids.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "engram_service/read/local_rows.h"

namespace twinspark::engram {
namespace {

constexpr uint64_t kLargeTableBytes = uint64_t{1} << 30;
constexpr double kDefaultCacheGib = 2;
constexpr int kSampledTokens = 64;
constexpr auto kSelfTestTimeout = std::chrono::milliseconds(30'000);
constexpr int kCanaryTokens = 32;
// Coarser than any file system's clock: a file written to after this long has another time.
constexpr int64_t kSettleNs = 20'000'000;

// Fixed ids, spread over the vocabulary.
std::vector<int32_t> SpreadIds(const EngramShape& shape, int count, uint64_t seed) {
  std::vector<int32_t> ids;
  uint64_t state = seed;
  for (int i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    ids.push_back(static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(shape.vocab_size)));
  }
  return ids;
}

absl::StatusOr<GatheredRows> GatherIds(const TableSet& tables,
                                       RowServer& server,
                                       const std::vector<int32_t>& ids,
                                       bool past_cache) {
  std::vector<Window> windows;
  RETURN_IF_ERROR(AppendWindows(tables.hasher(), {0, 0, ids, {}}, windows));
  return server.Gather(std::move(windows), (1u << tables.num_layers()) - 1, kSelfTestTimeout,
                       past_cache);
}

// First and last row of every owned column: the rows where a wrong offset or split shows.
absl::Status CheckBoundaryRows(const TableSet& tables) {
  std::vector<uint8_t> row;
  for (int layer_idx = 0; layer_idx < tables.num_layers(); ++layer_idx) {
    const RowTable& table = tables.table(layer_idx);
    row.resize(table.row_bytes());
    for (const int column : tables.columns()) {
      const uint32_t prime = tables.hasher().layer(layer_idx).primes[static_cast<size_t>(column)];
      for (const uint32_t bucket : {0u, prime - 1}) {
        RETURN_IF_ERROR(table.ReadRow(column, bucket, row));
        if (HasInvalidCode(std::span(row).first(table.row_weight_bytes()),
                           std::span(row).subspan(table.row_weight_bytes()))) {
          return absl::DataLossError(absl::StrCat(table.path(), ": row ", bucket, " of column ",
                                                  column, " has a NaN code or scale 255"));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Serving>> Serving::Open(const ServingOptions& options) {
  std::shared_ptr<Serving> serving(new Serving);
  ASSIGN_OR_RETURN(serving->tables_, TableSet::Open(options.tables));
  uint64_t bytes = 0;
  for (int i = 0; i < serving->tables_->num_layers(); ++i) {
    for (const TableFile& file : serving->tables_->table(i).files())
      bytes += file.bytes;
  }
  serving->large_ = bytes >= kLargeTableBytes;
  const bool direct = options.reader.kind == "uring" || options.reader.kind == "threads" ||
                      (options.reader.kind == "auto" && serving->large_);
  if (direct) {
    TableSetOptions again = options.tables;
    again.direct = true;
    ASSIGN_OR_RETURN(serving->tables_, TableSet::Open(again));
  }
  RETURN_IF_ERROR(serving->WaitUntilSettled());
  for (int i = 0; i < serving->tables_->num_layers(); ++i) {
    ASSIGN_OR_RETURN(RowSamples samples, SamplesOfWholeTable(serving->tables_->table(i),
                                                             serving->tables_->hasher().layer(i)));
    serving->samples_.push_back(std::move(samples));
  }
  ASSIGN_OR_RETURN(auto reader, serving->MakeTableReader(options.reader));
  ASSIGN_OR_RETURN(auto cache, serving->MakeCache(options.cache_gib));
  RowCache* const populated_last = cache.get();
  ASSIGN_OR_RETURN(serving->server_, RowServer::Start(*serving->tables_, std::move(reader),
                                                      std::move(cache), options.server));
  serving->epoch_ = RandomU64();
  RETURN_IF_ERROR(serving->CheckRows());
  ASSIGN_OR_RETURN(serving->canary_, serving->RunCanary());
  ScrubOptions scrub;
  scrub.bytes_per_second = options.scrub_bytes_per_second;
  scrub.requests = [server = serving->server_.get()] { return server->stats().engine.jobs; };
  if (populated_last != nullptr) populated_last->PopulateBehind();
  serving->scrubber_ = std::make_unique<TableScrubber>(*serving->tables_, std::move(scrub));
  return serving;
}

// A file whose last change is no older than a tick of its clock could change again unseen.
absl::Status Serving::WaitUntilSettled() const {
  for (int i = 0; i < tables_->num_layers(); ++i) {
    for (const TableFile& file : tables_->table(i).files()) {
      const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::system_clock::now().time_since_epoch())
                              .count();
      const int64_t age = now - std::max(file.identity.modified_ns, file.identity.changed_ns);
      if (age < 0 || age >= kSettleNs) continue;
      std::this_thread::sleep_for(std::chrono::nanoseconds(kSettleNs - age));
    }
    RETURN_IF_ERROR(tables_->table(i).CheckUnchanged());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<BlockReader>> Serving::MakeTableReader(const ReaderChoice& choice) {
  std::vector<int> fds;
  bool direct = tables_->options().direct;
  for (int i = 0; i < tables_->num_layers(); ++i) {
    for (const TableFile& file : tables_->table(i).files()) {
      fds.push_back(file.fd.get());
      if (!direct || file.direct) continue;
      // Served all the same, but memory that the model needs goes to the page cache.
      compromise_ =
          absl::StrCat(file.path, ": the file system refuses O_DIRECT, reads are buffered");
      LOG_WARNING << compromise_;
    }
  }
  ASSIGN_OR_RETURN(MadeReader made, MakeReader(choice, fds, direct));
  if (!made.why_not_uring.empty()) {
    compromise_ = made.why_not_uring;
    LOG_WARNING << made.why_not_uring << "; reading with " << made.reader->name();
  }
  return std::move(made.reader);
}

absl::StatusOr<std::unique_ptr<RowCache>> Serving::MakeCache(double gib) const {
  if (gib < 0) gib = large_ ? kDefaultCacheGib : 0;
  if (gib == 0) return nullptr;
  RowCacheShape shape;
  shape.heads = static_cast<uint32_t>(tables_->columns().size()) /
                static_cast<uint32_t>(tables_->shape().max_ngram_size - 1);
  shape.layers = static_cast<uint32_t>(tables_->num_layers());
  shape.weight_bytes = tables_->table(0).row_weight_bytes();
  shape.scale_bytes = tables_->table(0).row_scale_bytes();
  if (shape.heads * shape.layers > 32) {
    return absl::InvalidArgumentError(
        absl::StrCat("the row cache holds at most 32 rows per n-gram, this model has ",
                     shape.heads * shape.layers, "; set DSV41_CACHE_GIB=0"));
  }
  return RowCache::Create(shape, static_cast<size_t>(gib * (uint64_t{1} << 30)),
                          RowCache::Populate::kBehind);
}

absl::Status Serving::CheckRows() {
  RETURN_IF_ERROR(CheckBoundaryRows(*tables_));
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = SpreadIds(tables_->shape(), kSampledTokens, RandomU64());
  RETURN_IF_ERROR(GatherIds(*tables_, *server_, ids, false).status());
  self_test_.rows =
      ids.size() * tables_->columns().size() * static_cast<uint64_t>(tables_->num_layers());
  self_test_.micros = std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::steady_clock::now() - begin)
                          .count();
  return absl::OkStatus();
}

absl::StatusOr<Sha256Digest> Serving::RunCanary() const {
  ASSIGN_OR_RETURN(
      const GatheredRows rows,
      GatherIds(*tables_, *server_, SpreadIds(tables_->shape(), kCanaryTokens, 1), true));
  Sha256 hash;
  for (const auto& layer : rows.layers) {
    hash.Update(layer.weights);
    hash.Update(layer.scales);
  }
  return hash.Finish();
}

}  // namespace twinspark::engram
