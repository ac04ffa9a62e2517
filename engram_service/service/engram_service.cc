// Proto to plain structs and back. A request is refused here when it is malformed; how rows are
// found is below, in read/ and shm/.
#include "engram_service/service/engram_service.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/store/packed_scrub.h"
#include "engram_service/store/packed_table.h"

namespace twinspark::engram {
namespace {

namespace pb = proto::engram;

constexpr uint32_t kProtocolVersion = 1;
constexpr size_t kMaxGatherTokens = 1024;
constexpr int kMaxGatherSequences = 64;
constexpr auto kGatherTimeout = std::chrono::milliseconds(5000);
constexpr int kVerifyTokensPerStep = 256;
constexpr int kVerifySteps = 16;

std::string Bytes(const Sha256Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

template <typename Sequences>
absl::StatusOr<std::vector<Window>> ParseSequences(const Hasher& hasher,
                                                   const Sequences& sequences) {
  size_t tokens = 0;
  for (const pb::Sequence& sequence : sequences) {
    tokens += static_cast<size_t>(sequence.tokens_size());
  }
  if (sequences.empty() || sequences.size() > kMaxGatherSequences || tokens == 0 ||
      tokens > kMaxGatherTokens) {
    return absl::InvalidArgumentError(absl::StrCat(sequences.size(), " sequences with ", tokens,
                                                   " tokens; expected 1 to ", kMaxGatherSequences,
                                                   " with 1 to ", kMaxGatherTokens));
  }
  std::vector<Window> windows;
  for (const pb::Sequence& sequence : sequences) {
    std::vector<int32_t> ids;
    for (const auto* list : {&sequence.history(), &sequence.tokens()}) {
      for (const uint32_t id : *list)
        ids.push_back(static_cast<int32_t>(id));
    }
    std::vector<uint8_t> dead;
    if (!sequence.live().empty()) {
      if (sequence.live().size() != ids.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("live has ", sequence.live().size(), " bytes for ", ids.size(), " ids"));
      }
      for (const char live : sequence.live())
        dead.push_back(live == 0 ? 1 : 0);
    }
    RETURN_IF_ERROR(AppendWindows(
        hasher, {sequence.position(), static_cast<uint32_t>(sequence.history_size()), ids, dead},
        windows));
  }
  return windows;
}

void VerifyQuick(const Serving& serving,
                 const grpc::ServerContext& context,
                 pb::VerifyProgress& progress,
                 grpc::ServerWriter<pb::VerifyProgress>& writer) {
  const TableSet& tables = serving.tables();
  progress.set_pages_total(kVerifySteps);
  for (int step = 0; step < kVerifySteps && !context.IsCancelled(); ++step) {
    std::vector<int32_t> ids;
    for (int i = 0; i < kVerifyTokensPerStep; ++i) {
      ids.push_back(
          static_cast<int32_t>(RandomU64() % static_cast<uint64_t>(tables.shape().vocab_size)));
    }
    std::vector<Window> windows;
    absl::Status status = AppendWindows(tables.hasher(), {0, 0, ids, {}}, windows);
    if (status.ok()) {
      status = serving.server()
                   .Gather(std::move(windows), (1u << tables.num_layers()) - 1, kGatherTimeout)
                   .status();
    }
    progress.set_pages_done(static_cast<uint64_t>(step + 1));
    if (!status.ok()) {
      progress.set_errors(progress.errors() + 1);
      progress.set_text(std::string(status.message()));
    }
    writer.Write(progress);
  }
}

absl::Status VerifyScrub(const Serving& serving,
                         const grpc::ServerContext& context,
                         uint32_t limit_mb_per_s,
                         pb::VerifyProgress& progress,
                         grpc::ServerWriter<pb::VerifyProgress>& writer) {
  const TableSet& tables = serving.tables();
  uint64_t pages_before = 0;
  for (int i = 0; i < tables.num_layers(); ++i) {
    const auto* packed = dynamic_cast<const PackedTable*>(&tables.table(i));
    if (packed == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(tables.table(i).path(), " is not packed: it has no checksums to scrub"));
    }
    progress.set_pages_total(progress.pages_total() + packed->layout().header.pages);
  }
  for (int i = 0; i < tables.num_layers(); ++i) {
    const auto& packed = dynamic_cast<const PackedTable&>(tables.table(i));
    const auto begin = std::chrono::steady_clock::now();
    const uint64_t pages = packed.layout().header.pages;
    const auto findings = ScrubPackedFile(
        packed.file(0), packed.layout(), packed.extents(),
        [&](const std::string& text) { progress.set_text(text); },
        [&](const ScrubProgress& scrubbed) {
          const uint64_t done = std::min(pages, scrubbed.extents_done * kPagesPerExtent);
          progress.set_pages_done(pages_before + done);
          writer.Write(progress);
          if (limit_mb_per_s == 0 || context.IsCancelled()) return;
          const std::chrono::duration<double> due(static_cast<double>(done * kPageBytes) / 1e6 /
                                                  limit_mb_per_s);
          std::this_thread::sleep_until(begin +
                                        std::chrono::duration_cast<std::chrono::nanoseconds>(due));
        });
    RETURN_IF_ERROR(findings.status());
    progress.set_errors(progress.errors() + *findings);
    pages_before += pages;
    if (context.IsCancelled()) break;
  }
  return absl::OkStatus();
}

}  // namespace

EngramServiceImpl::EngramServiceImpl(ServingOptions options)
    : options_(std::move(options)), started_(std::chrono::steady_clock::now()) {}

absl::Status EngramServiceImpl::Open() {
  ASSIGN_OR_RETURN(std::shared_ptr<Serving> serving, Serving::Open(options_));
  const std::lock_guard lock(mutex_);
  serving_ = std::move(serving);
  return absl::OkStatus();
}

void EngramServiceImpl::StartDrain(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  draining_ = true;
  drain_reason_ = reason;
  if (serving_ != nullptr) serving_->server().SetState(kRowServiceDraining);
  LOG_INFO << "draining reason=\"" << reason << "\"";
}

std::shared_ptr<Serving> EngramServiceImpl::serving() const {
  const std::lock_guard lock(mutex_);
  return serving_;
}

uint64_t EngramServiceImpl::attachments() const {
  const auto current = serving();
  return current == nullptr ? 0 : current->server().stats().attachments;
}

absl::StatusOr<std::shared_ptr<Serving>> EngramServiceImpl::Ready() const {
  auto current = serving();
  if (current == nullptr) return absl::UnavailableError("the tables are being opened");
  return current;
}

pb::ServiceState EngramServiceImpl::state(std::string* reason) const {
  std::shared_ptr<Serving> current;
  std::string change;
  std::string replaced;
  std::string reopen_error;
  {
    const std::lock_guard lock(mutex_);
    if (draining_) {
      *reason = drain_reason_;
      return pb::SERVICE_DRAINING;
    }
    current = serving_;
    change = change_;
    replaced = replaced_;
    reopen_error = reopen_error_;
  }
  if (current == nullptr) {
    *reason = "opening the tables";
    return pb::SERVICE_STARTING;
  }
  const RowServerStats stats = current->server().stats();
  if (!stats.failure.empty()) {
    *reason = stats.failure;
    if (!reopen_error.empty()) absl::StrAppend(reason, "; opening it again: ", reopen_error);
    return pb::SERVICE_FAILED;
  }
  if (!change.empty()) {
    *reason = absl::StrCat("opened again after this: ", change, "; Reload says that it is right");
    return pb::SERVICE_DEGRADED;
  }
  if (!replaced.empty()) {
    *reason = absl::StrCat(replaced, " was replaced on disk; the old file is served until Reload");
    return pb::SERVICE_DEGRADED;
  }
  if (!current->compromise().empty()) {
    *reason = current->compromise();
    return pb::SERVICE_DEGRADED;
  }
  if (stats.engine.cache_populate_error != 0) {
    *reason = absl::StrCat("the row cache ends at ", stats.engine.cache_usable,
                           " entries: ", strerror(stats.engine.cache_populate_error),
                           "; lower DSV41_CACHE_GIB");
    return pb::SERVICE_DEGRADED;
  }
  const ScrubStats scrub = current->scrub();
  if (scrub.findings > 0) {
    *reason = absl::StrCat("scrub: ", scrub.last_finding);
    return pb::SERVICE_DEGRADED;
  }
  if (stats.engine.retries + stats.engine.data_errors > 0) {
    *reason = stats.engine.last_error;
    return pb::SERVICE_DEGRADED;
  }
  return pb::SERVICE_READY;
}

grpc::Status EngramServiceImpl::Hello(grpc::ServerContext*,
                                      const pb::HelloRequest* request,
                                      pb::HelloReply* reply) {
  if (request->protocol_version() != kProtocolVersion) {
    return ToGrpcStatus(absl::FailedPreconditionError(
        absl::StrCat("protocol version ", request->protocol_version(), " of ", request->client(),
                     "; the row service speaks ", kProtocolVersion)));
  }
  const auto ready = Ready();
  if (!ready.ok()) return ToGrpcStatus(ready.status());
  const Serving& serving = **ready;
  const TableSet& tables = serving.tables();
  std::string reason;
  reply->set_protocol_version(kProtocolVersion);
  reply->set_build_id(BuildId());
  reply->set_service_epoch(serving.epoch());
  reply->set_attach_socket(serving.server().socket_name());
  for (int i = 0; i < tables.num_layers(); ++i) {
    const RowTable& table = tables.table(i);
    pb::Layer& layer = *reply->add_layers();
    layer.set_layer_id(static_cast<uint32_t>(table.layer_id()));
    layer.set_num_rows(table.num_rows());
    layer.set_table_digest(Bytes(table.digest()));
    for (const int column : tables.columns()) {
      layer.add_columns(static_cast<uint32_t>(column));
    }
    layer.set_source(table.path());
    layer.set_content_digest(Bytes(table.content()));
    for (const std::string& sample : serving.samples(i))
      layer.add_row_samples(sample);
    for (const TableFile& file : table.files()) {
      layer.add_files(absl::StrCat(file.path, ": ", file.identity.Text()));
    }
  }
  reply->set_row_weight_bytes(tables.table(0).row_weight_bytes());
  reply->set_row_scale_bytes(tables.table(0).row_scale_bytes());
  reply->set_rank(static_cast<uint32_t>(tables.options().rank));
  reply->set_world(static_cast<uint32_t>(tables.options().world));
  reply->set_max_ngram_size(static_cast<uint32_t>(tables.shape().max_ngram_size));
  reply->set_vocab_size(static_cast<uint32_t>(tables.shape().vocab_size));
  reply->set_token_map_digest(Bytes(tables.hasher().token_map().digest()));
  reply->set_hash_params_digest(Bytes(tables.hash_params_digest()));
  reply->set_model_digest(Bytes(tables.model_digest()));
  reply->set_tier(std::string(tables.tier()));
  reply->set_back_end(serving.server().reader_name());
  reply->set_state(state(&reason));
  return grpc::Status::OK;
}

grpc::Status EngramServiceImpl::Gather(grpc::ServerContext*,
                                       const pb::GatherRequest* request,
                                       pb::GatherReply* reply) {
  ++rpc_gathers_;
  const auto ready = Ready();
  if (!ready.ok()) return ToGrpcStatus(ready.status());
  const Serving& serving = **ready;
  const TableSet& tables = serving.tables();
  if (request->service_epoch() != 0 && request->service_epoch() != serving.epoch()) {
    return ToGrpcStatus(absl::FailedPreconditionError(
        absl::StrCat("service epoch ", Hex16(request->service_epoch()), " is over; now ",
                     Hex16(serving.epoch()))));
  }
  if (!request->model_digest().empty() && request->model_digest() != Bytes(tables.model_digest())) {
    return ToGrpcStatus(absl::FailedPreconditionError(
        absl::StrCat("another model digest; the service has ", Hex(tables.model_digest()))));
  }
  uint32_t layers = 0;
  for (const uint32_t layer_id : request->layer_ids()) {
    bool known = false;
    for (int i = 0; i < tables.num_layers(); ++i) {
      if (tables.table(i).layer_id() != static_cast<int>(layer_id)) continue;
      layers |= 1u << i;
      known = true;
    }
    if (!known) {
      return ToGrpcStatus(
          absl::InvalidArgumentError(absl::StrCat("layer ", layer_id, " has no Engram table")));
    }
  }
  if (layers == 0) layers = (1u << tables.num_layers()) - 1;
  auto windows = ParseSequences(tables.hasher(), request->sequences());
  if (!windows.ok()) return ToGrpcStatus(windows.status());
  const auto begin = std::chrono::steady_clock::now();
  auto rows = serving.server().Gather(*std::move(windows), layers, kGatherTimeout);
  if (!rows.ok()) return ToGrpcStatus(rows.status());
  reply->set_read_us(static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                               std::chrono::steady_clock::now() - begin)
                                               .count()));
  for (int i = 0; i < tables.num_layers(); ++i) {
    if ((layers >> i & 1) == 0) continue;
    const auto& from = rows->layers[static_cast<size_t>(i)];
    pb::LayerRows& to = *reply->add_layers();
    to.set_layer_id(static_cast<uint32_t>(tables.table(i).layer_id()));
    Sha256 hash;
    hash.Update(from.weights);
    hash.Update(from.scales);
    to.set_digest(Bytes(hash.Finish()));
    if (request->digests_only()) continue;
    to.set_weights(from.weights.data(), from.weights.size());
    to.set_scales(from.scales.data(), from.scales.size());
  }
  std::string prefix;
  for (int i = 0; i < 8; ++i) {
    prefix.push_back(static_cast<char>(tables.table_digest_prefix() >> (8 * i)));
  }
  reply->set_table_digest(prefix);
  return grpc::Status::OK;
}

grpc::Status EngramServiceImpl::Prefetch(grpc::ServerContext*,
                                         const pb::PrefetchRequest* request,
                                         pb::PrefetchReply* reply) {
  const auto ready = Ready();
  if (!ready.ok()) return ToGrpcStatus(ready.status());
  if (request->priority() != 1 && request->priority() != 2) {
    return ToGrpcStatus(absl::InvalidArgumentError(
        absl::StrCat("priority ", request->priority(), "; a hint has 1 or 2")));
  }
  auto windows = ParseSequences((*ready)->tables().hasher(), request->sequences());
  if (!windows.ok()) return ToGrpcStatus(windows.status());
  reply->set_accepted(
      (*ready)->server().Prefetch(*std::move(windows), static_cast<int>(request->priority())));
  return grpc::Status::OK;
}

void EngramServiceImpl::FillStatus(const Serving& serving, pb::StatusReply* reply) const {
  const RowServerStats stats = serving.server().stats();
  reply->set_tier(std::string(serving.tables().tier()));
  reply->set_back_end(serving.server().reader_name());
  reply->set_service_epoch(serving.epoch());
  reply->set_attachments(static_cast<uint32_t>(stats.attachments));
  reply->set_shm_requests(stats.sessions.requests);
  reply->set_shm_tokens(stats.sessions.tokens);
  reply->set_rows(stats.engine.rows);
  reply->set_read_bytes(stats.engine.read_bytes);
  reply->set_errors(stats.engine.data_errors + stats.engine.timeouts + stats.sessions.refused);
  reply->set_last_error(stats.engine.last_error);
  reply->set_reads(stats.engine.reads);
  reply->set_rows_deduplicated(stats.engine.rows_deduplicated);
  reply->set_hints(stats.sessions.hints);
  const GatherMeters& meters = serving.server().meters();
  reply->set_overloaded(meters.overloaded(MonotonicNs()));
  reply->set_overloads(meters.overloads.get());
  reply->set_dropped_prefetches(stats.sessions.dropped_hints);
  reply->set_slab_bytes(stats.slab_bytes);
  reply->set_cache_bytes(stats.engine.cache_bytes);
  reply->set_cache_entries(stats.engine.cache_entries);
  uint64_t hits = 0;
  uint64_t misses = 0;
  for (size_t order = 2; order <= kMaxNgram; ++order) {
    hits += stats.engine.cache.hits[order];
    misses += stats.engine.cache.misses[order];
  }
  reply->set_cache_hits(hits);
  reply->set_cache_misses(misses);
}

grpc::Status EngramServiceImpl::Status(grpc::ServerContext*,
                                       const pb::StatusRequest*,
                                       pb::StatusReply* reply) {
  std::string reason;
  reply->set_state(state(&reason));
  reply->set_reason(reason);
  reply->set_uptime_seconds(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - started_)
          .count()));
  reply->set_rpc_gathers(rpc_gathers_);
  const auto current = serving();
  if (current != nullptr) FillStatus(*current, reply);
  return grpc::Status::OK;
}

grpc::Status EngramServiceImpl::Drain(grpc::ServerContext*,
                                      const pb::DrainRequest* request,
                                      pb::DrainReply*) {
  StartDrain(request->reason());
  return grpc::Status::OK;
}

// quick: random rows through the whole path. scrub: every page of packed tables, with its own
// reads.
grpc::Status EngramServiceImpl::Verify(grpc::ServerContext* context,
                                       const pb::VerifyRequest* request,
                                       grpc::ServerWriter<pb::VerifyProgress>* writer) {
  const auto ready = Ready();
  if (!ready.ok()) return ToGrpcStatus(ready.status());
  pb::VerifyProgress progress;
  if (request->mode() == "quick") {
    VerifyQuick(**ready, *context, progress, *writer);
  } else if (request->mode() == "scrub") {
    const absl::Status scrubbed =
        VerifyScrub(**ready, *context, request->limit_mb_per_s(), progress, *writer);
    if (!scrubbed.ok()) return ToGrpcStatus(scrubbed);
  } else {
    return ToGrpcStatus(
        absl::InvalidArgumentError(absl::StrCat("verify mode '", request->mode(),
                                                "': quick or scrub here; verify_rows "
                                                "compares with the source")));
  }
  progress.set_finished(true);
  writer->Write(progress);
  return grpc::Status::OK;
}

grpc::Status EngramServiceImpl::Reload(grpc::ServerContext*,
                                       const pb::ReloadRequest*,
                                       pb::ReloadReply* reply) {
  const auto opened = Reopen();
  if (!opened.ok()) return ToGrpcStatus(opened.status());
  reply->set_service_epoch((*opened)->epoch());
  reply->set_tier(std::string((*opened)->tables().tier()));
  const std::lock_guard lock(mutex_);
  change_.clear();
  return grpc::Status::OK;
}

// New tables, data plane and epoch in place of the old ones; on an error the old ones stay.
absl::StatusOr<std::shared_ptr<Serving>> EngramServiceImpl::Reopen() {
  const std::lock_guard reload_lock(reload_mutex_);
  // Two data planes cannot share one fixed name: the old one goes first then.
  if (!options_.server.socket.empty()) {
    const std::lock_guard lock(mutex_);
    serving_ = nullptr;
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Serving> opened, Serving::Open(options_));
  LOG_INFO << "tables opened again service_epoch=" << Hex16(opened->epoch())
           << " canary=" << Hex(opened->expected_canary()).substr(0, 16);
  std::shared_ptr<Serving> old;
  {
    const std::lock_guard lock(mutex_);
    old = std::exchange(serving_, opened);
    replaced_.clear();
    reopen_error_.clear();
  }
  return opened;
}

void EngramServiceImpl::CheckTables() {
  const std::shared_ptr<Serving> current = serving();
  std::string failure;
  if (current != nullptr) {
    current->server().CheckTables();
    failure = current->server().stats().failure;
    std::string replaced;
    for (int i = 0; i < current->tables().num_layers() && replaced.empty(); ++i) {
      for (const std::string& path : current->tables().table(i).ReplacedPaths())
        replaced = path;
    }
    const std::lock_guard lock(mutex_);
    if (draining_) return;
    if (replaced != replaced_ && !replaced.empty()) {
      LOG_WARNING << replaced << " was replaced on disk; the old file is served";
    }
    replaced_ = replaced;
    if (failure.empty()) return;
    if (failure != change_) {
      change_ = failure;
      ++table_changes_;
      LOG_ERROR << "nothing is served any more error=\"" << failure << "\"";
    }
  }
  const auto opened = Reopen();
  if (opened.ok()) return;
  const std::lock_guard lock(mutex_);
  const std::string error(opened.status().message());
  if (error != reopen_error_) {
    LOG_ERROR << "cannot open the tables again error=\"" << error << "\"";
  }
  reopen_error_ = error;
}

grpc::Status EngramServiceImpl::Canary(grpc::ServerContext*,
                                       const pb::CanaryRequest*,
                                       pb::CanaryReply* reply) {
  const auto ready = Ready();
  if (!ready.ok()) return ToGrpcStatus(ready.status());
  const auto begin = std::chrono::steady_clock::now();
  const auto digest = (*ready)->RunCanary();
  if (!digest.ok()) return ToGrpcStatus(digest.status());
  reply->set_digest(Bytes(*digest));
  reply->set_expected(Bytes((*ready)->expected_canary()));
  reply->set_micros(static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                              std::chrono::steady_clock::now() - begin)
                                              .count()));
  if (*digest != (*ready)->expected_canary()) {
    LOG_ERROR << "canary differs digest=" << Hex(*digest)
              << " expected=" << Hex((*ready)->expected_canary());
  }
  return grpc::Status::OK;
}

}  // namespace twinspark::engram
