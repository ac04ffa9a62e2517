// Connect compares before it attaches, so that a wrong service is named by what differs; the digest
// in the handshake then ties the attachment to exactly the service that said Hello.
#include "shard_worker/engram/row_client.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/log.h"
#include "common/status_macros.h"
#include "shard_worker/engram/engram_rpc.h"
#include "shard_worker/engram/ring_client.h"

namespace twinspark {
namespace {

// Of the idle tick, 100 ms apart: as long as a step would wait for rows. With four a machine at a
// load of 18 on 2 cores took a living service for a stopped one.
constexpr int kIdleLooksMin = 10;

// The columns rank r owns: its share of the heads of every order.
std::vector<int> OwnedColumns(const ModelConfig& config, int rank, int world) {
  std::vector<int> columns;
  const int share = config.engram_num_heads / world;
  for (int column = 0; column < config.engram_num_columns(); ++column) {
    if (column % config.engram_num_heads / share == rank) columns.push_back(column);
  }
  return columns;
}

absl::Status Differs(const std::string& what, const std::string& service, const std::string& own) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the row service has ", what, " ", service, "; this worker's model has ", own,
      "; start engram_service with this rank's ENGRAM_RANK, ENGRAM_WORLD and MODEL_DIR, "
      "or correct ENGRAM_ENDPOINTS"));
}

absl::Status CheckHello(const EngramHello& hello,
                        const ModelConfig& config,
                        const RowClientOptions& options) {
  if (hello.rank != options.rank || hello.world != options.world) {
    return Differs("columns of rank", absl::StrCat(hello.rank, " of ", hello.world),
                   absl::StrCat(options.rank, " of ", options.world));
  }
  if (hello.row_weight_bytes != config.engram_head_dim ||
      hello.row_scale_bytes != config.engram_head_dim / 32) {
    return Differs("rows of", absl::StrCat(hello.row_weight_bytes, " weights"),
                   absl::StrCat(config.engram_head_dim));
  }
  if (hello.max_ngram_size != config.engram_max_ngram_size ||
      hello.vocab_size != config.vocab_size) {
    return Differs("n-grams and vocabulary of",
                   absl::StrCat(hello.max_ngram_size, " and ", hello.vocab_size),
                   absl::StrCat(config.engram_max_ngram_size, " and ", config.vocab_size));
  }
  if (hello.layers.size() != config.engram_layer_ids.size()) {
    return Differs("layers:", absl::StrCat(hello.layers.size()),
                   absl::StrCat(config.engram_layer_ids.size()));
  }
  const std::vector<int> columns = OwnedColumns(config, options.rank, options.world);
  for (size_t i = 0; i < hello.layers.size(); ++i) {
    const EngramHello::Layer& layer = hello.layers[i];
    if (layer.layer_id != config.engram_layer_ids[i] ||
        static_cast<int64_t>(layer.num_rows) != config.engram_num_embeddings[i]) {
      return Differs(
          "a table for layer", absl::StrCat(layer.layer_id, " with ", layer.num_rows, " rows"),
          absl::StrCat(config.engram_layer_ids[i], " with ", config.engram_num_embeddings[i]));
    }
    if (layer.columns != columns) {
      return Differs("columns", absl::StrJoin(layer.columns, ","), absl::StrJoin(columns, ","));
    }
    const size_t num_samples = layer.row_samples.size();
    if (num_samples > static_cast<size_t>(config.engram_num_columns())) {
      return Differs("sampled columns", absl::StrCat(num_samples),
                     absl::StrCat(config.engram_num_columns(), " at most"));
    }
  }
  return absl::OkStatus();
}

// The first file of a layer that is not what it was: which, what it is and what it was.
std::string DifferenceOfFiles(const std::vector<std::string>& now,
                              const std::vector<std::string>& last) {
  if (now.size() != last.size()) return absl::StrCat(now.size(), " files, were ", last.size());
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] != last[i]) return absl::StrCat("now ", now[i], "; was ", last[i]);
  }
  return "the same files by their times and sizes";
}

// The tables may have been changed since the last epoch, with this worker and its peers still
// holding results of the old rows. Whoever meant it starts the worker anew.
absl::Status CheckContent(const RowContent& now, const RowContent& last, bool packed) {
  if (now == last) return absl::OkStatus();
  const auto hex = [](const std::string& digest) {
    return absl::BytesToHexString(digest.substr(0, 8));
  };
  std::vector<std::string> differences;
  if (now.model_digest != last.model_digest) {
    differences.push_back(
        absl::StrCat("model digest ", hex(now.model_digest), ", was ", hex(last.model_digest)));
  }
  for (size_t i = 0; i < now.layer_digests.size() && i < last.layer_digests.size(); ++i) {
    if (now.layer_digests[i] == last.layer_digests[i]) continue;
    differences.push_back(absl::StrCat("layer index ", i, ": ",
                                       DifferenceOfFiles(now.layer_files[i], last.layer_files[i])));
  }
  if (now.canary != last.canary) {
    differences.push_back(
        absl::StrCat("canary rows ", hex(now.canary), ", were ", hex(last.canary)));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the Engram tables are not those of the last epoch: ", absl::StrJoin(differences, "; "),
      packed ? "; put the old ones back, or restart all workers to go on with these"
             : "; restart all workers to go on with these, or put the old files back if that was "
               "not meant and restart all workers too: a change time cannot be put back"));
}

}  // namespace

struct RowClient::Transport {
  std::unique_ptr<EngramRpc> rpc;
  EngramHello hello;
  RowContent content;
  std::unique_ptr<RingClient> ring;  // null: rows over gRPC
  std::vector<RowBytes> bytes;       // of the last request, without a ring
  bool asked_late = false;
  AliveWatch idle_watch;
};

RowClient::RowClient() : transport_(std::make_unique<Transport>()) {}
RowClient::~RowClient() = default;

absl::StatusOr<std::unique_ptr<RowClient>> RowClient::Connect(const ModelConfig& config,
                                                              const RowClientOptions& options) {
  if (options.world < 1 || config.engram_num_heads % options.world != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "world size ", options.world, " does not divide engram_n_heads ", config.engram_num_heads));
  }
  std::unique_ptr<RowClient> client(new RowClient);
  Transport& transport = *client->transport_;
  transport.rpc = std::make_unique<EngramRpc>(options.endpoint);
  ASSIGN_OR_RETURN(transport.hello,
                   transport.rpc->Hello(absl::StrCat("shard_worker rank ", options.rank)));
  const EngramHello& hello = transport.hello;
  RETURN_IF_ERROR(CheckHello(hello, config, options));
  RowContent& content = transport.content;
  content.model_digest = hello.model_digest;
  for (const EngramHello::Layer& layer : hello.layers) {
    content.layer_files.push_back(layer.files);
    content.layer_digests.push_back(layer.content_digest);
    content.row_samples.push_back(layer.row_samples);
  }
  ASSIGN_OR_RETURN(content.canary, transport.rpc->Canary());
  if (options.expected.has_value()) {
    RETURN_IF_ERROR(CheckContent(content, *options.expected, hello.tier == "packed"));
  }
  RowAttachRequest request = {};
  request.max_round_rows = static_cast<uint32_t>(options.max_round_rows);
  request.max_chunk_rows =
      static_cast<uint32_t>(std::max(options.max_chunk_rows, options.max_round_rows));
  request.rank = static_cast<uint32_t>(options.rank);
  request.world = static_cast<uint32_t>(options.world);
  request.num_layers = static_cast<uint32_t>(hello.layers.size());
  request.num_columns = static_cast<uint32_t>(hello.layers.front().columns.size());
  request.row_weight_bytes = static_cast<uint32_t>(hello.row_weight_bytes);
  memcpy(request.model_digest, hello.model_digest.data(),
         std::min(hello.model_digest.size(), sizeof(request.model_digest)));
  auto ring = RingClient::Attach(hello.attach_socket, request, {});
  if (ring.ok()) {
    transport.ring = *std::move(ring);
  } else if (absl::IsUnavailable(ring.status())) {
    LOG_WARNING << "no shared memory with the row service, rows come over gRPC endpoint="
                << options.endpoint << " reason=\"" << ring.status().message() << "\"";
  } else {
    return ring.status();
  }
  client->state_.transport = transport.ring != nullptr ? "shm" : "grpc";
  client->state_.tier = hello.tier;
  client->state_.back_end = hello.back_end;
  client->state_.hash_digest = hello.hash_digest;
  client->state_.service_epoch = hello.service_epoch;
  LOG_INFO << "row service joined endpoint=" << options.endpoint
           << " transport=" << client->state_.transport << " tier=" << hello.tier << " back_end=\""
           << hello.back_end << "\"";
  return client;
}

absl::Status RowClient::Note(absl::Status status) {
  if (!status.ok()) {
    const std::lock_guard lock(mutex_);
    ++state_.errors;
    state_.last_error = std::string(status.message());
  }
  return status;
}

absl::Status RowClient::Request(std::span<const RowRange> ranges, RowClass row_class) {
  {
    const std::lock_guard lock(mutex_);
    ++state_.requests;
    for (const RowRange& range : ranges)
      state_.tokens += range.ids.size();
  }
  transport_->asked_late = false;
  if (transport_->ring != nullptr) return Note(transport_->ring->Submit(ranges, row_class));
  auto bytes = transport_->rpc->Gather(ranges, transport_->hello);
  if (!bytes.ok()) return Note(bytes.status());
  transport_->bytes = *std::move(bytes);
  return absl::OkStatus();
}

absl::StatusOr<EngramRows> RowClient::Rows(int module_idx) {
  if (transport_->ring == nullptr) {
    const RowBytes& bytes = transport_->bytes.at(static_cast<size_t>(module_idx));
    return EngramRows{reinterpret_cast<const uint8_t*>(bytes.values.data()),
                      reinterpret_cast<const uint8_t*>(bytes.scales.data())};
  }
  const auto begin = std::chrono::steady_clock::now();
  auto rows = transport_->ring->Wait(module_idx);
  const auto waited = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                                std::chrono::steady_clock::now() - begin)
                                                .count());
  {
    const std::lock_guard lock(mutex_);
    // Anything above a memory access counts as waiting.
    if (waited > 5 && !std::exchange(transport_->asked_late, true)) ++state_.late;
    state_.wait_us_total += waited;
    state_.wait_us_max = std::max(state_.wait_us_max, waited);
  }
  if (!rows.ok()) return Note(rows.status());
  return rows;
}

void RowClient::Hint(std::span<const RowRange> ranges, RowClass row_class) {
  // A hint that cannot be given is no error; the request that follows reports what is wrong.
  if (transport_->ring == nullptr || !transport_->ring->Hint(ranges, row_class)) return;
  const std::lock_guard lock(mutex_);
  ++state_.hints;
}

const RowContent& RowClient::content() const {
  return transport_->content;
}

absl::Status RowClient::CheckAlive() {
  if (transport_->ring == nullptr) return absl::OkStatus();
  return Note(transport_->ring->Probe(transport_->idle_watch, kIdleLooksMin));
}

RowClientState RowClient::state() const {
  const std::lock_guard lock(mutex_);
  RowClientState state = state_;
  state.overloaded = transport_->ring != nullptr && transport_->ring->service_overloaded();
  return state;
}

}  // namespace twinspark
