// Start-up checks read through the same engine that serves.
#include "engram_service/service/serving.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/ids.h"
#include "common/status_macros.h"
#include "engram_service/io/inline_reader.h"
#include "engram_service/read/local_rows.h"

namespace twinspark::engram {
namespace {

constexpr size_t kInlineDepth = 256;
constexpr int kSampledTokens = 64;
constexpr auto kSelfTestTimeout = std::chrono::milliseconds(30'000);
constexpr int kCanaryTokens = 32;

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
                                       const std::vector<int32_t>& ids) {
  std::vector<Window> windows;
  RETURN_IF_ERROR(AppendWindows(tables.hasher(), {0, 0, ids, {}}, windows));
  return server.Gather(std::move(windows), (1u << tables.num_layers()) - 1, kSelfTestTimeout);
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
        const RowPlace place = table.Locate(column, bucket);
        for (int i = 0; i < place.num_pieces; ++i) {
          const RowPiece& piece = place.pieces[static_cast<size_t>(i)];
          RETURN_IF_ERROR(ReadExactly(table.fd(), piece.offset,
                                      std::span(row).subspan(piece.row_byte, piece.bytes),
                                      table.path()));
        }
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
  auto reader = std::make_unique<InlineReader>(kInlineDepth);
  ASSIGN_OR_RETURN(serving->server_,
                   RowServer::Start(*serving->tables_, std::move(reader), options.server));
  serving->epoch_ = RandomU64();
  RETURN_IF_ERROR(serving->CheckRows());
  ASSIGN_OR_RETURN(serving->canary_, serving->RunCanary());
  return serving;
}

absl::Status Serving::CheckRows() {
  RETURN_IF_ERROR(CheckBoundaryRows(*tables_));
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = SpreadIds(tables_->shape(), kSampledTokens, RandomU64());
  RETURN_IF_ERROR(GatherIds(*tables_, *server_, ids).status());
  self_test_.rows =
      ids.size() * tables_->columns().size() * static_cast<uint64_t>(tables_->num_layers());
  self_test_.micros = std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::steady_clock::now() - begin)
                          .count();
  return absl::OkStatus();
}

absl::StatusOr<Sha256Digest> Serving::RunCanary() const {
  ASSIGN_OR_RETURN(const GatheredRows rows,
                   GatherIds(*tables_, *server_, SpreadIds(tables_->shape(), kCanaryTokens, 1)));
  Sha256 hash;
  for (const auto& layer : rows.layers) {
    hash.Update(layer.weights);
    hash.Update(layer.scales);
  }
  return hash.Finish();
}

}  // namespace twinspark::engram
