// The service's side of the ring. Every index and length that came from the client is compared with
// header_copy_ before it is used; the payload is parsed from a private copy.
#include "engram_service/shm/ring_session.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/eventfd.h>

#include "absl/strings/str_cat.h"

#include "common/futex.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "engram_service/read/local_rows.h"

namespace twinspark::engram {
namespace {

constexpr std::array<uint32_t, kNumClasses> kMaxActive = {8, 2, 4};
constexpr size_t kHints = 2;  // whose place in kMaxActive hints take
constexpr uint32_t kSmallSlabs = 64;
constexpr uint32_t kLargeSlabs = 4;
constexpr int kRecordsPerTurn = 32;
constexpr int kMaxRefusalsLogged = 10;
// Rows of one step: a chunk, a short prefill and a round may come together.
constexpr uint32_t kMaxStepRows =
    limits::kMaxChunkRows + limits::kMaxShortPrefillRows + limits::kMaxRoundRows;
constexpr uint32_t kUnit = TWINSPARK_ROW_RING_UNIT;

uint64_t RoundUp(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

template <typename T>
T Load(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_acquire);
}
template <typename T>
void Store(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

// Whose place in kMaxActive a record takes. However urgent a hint is read, it takes no request's.
size_t BoundOf(const RowRequest& record) {
  return record.op == kRowOpGather ? record.priority : kHints;
}

uint32_t StateOf(GatherStatus status) {
  switch (status) {
    case GatherStatus::kOk:
      return kRowReady;
    case GatherStatus::kBadRequest:
      return kRowBadRequest;
    case GatherStatus::kDataError:
      return kRowDataError;
    case GatherStatus::kTimeout:
      return kRowTimeout;
    case GatherStatus::kCancelled:
      return kRowUnavailable;
  }
  return kRowDataError;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RingSession>> RingSession::Create(uint64_t attach_epoch,
                                                                 const TableSet& tables,
                                                                 bool wants_hints,
                                                                 const RowAttachRequest& request) {
  if (request.max_round_rows < 1 || request.max_round_rows > kMaxStepRows ||
      request.max_chunk_rows < request.max_round_rows || request.max_chunk_rows > kMaxStepRows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "limits of ", request.max_round_rows, " round rows and ", request.max_chunk_rows,
        " chunk rows; expected 1 to ", kMaxStepRows, ", round rows not above chunk rows"));
  }
  std::unique_ptr<RingSession> session(new RingSession);
  session->attach_epoch_ = attach_epoch;
  session->tables_ = &tables;
  RowRingHeader& h = session->header_copy_;
  h.magic = TWINSPARK_ROW_RING_MAGIC;
  h.version = TWINSPARK_ROW_RING_VERSION;
  h.header_bytes = sizeof(RowRingHeader);
  h.attach_epoch = attach_epoch;
  h.table_digest = tables.table_digest_prefix();
  h.num_layers = static_cast<uint32_t>(tables.num_layers());
  h.num_columns = static_cast<uint32_t>(tables.columns().size());
  h.row_weight_bytes = tables.table(0).row_weight_bytes();
  h.row_scale_bytes = tables.table(0).row_scale_bytes();
  h.num_lines = TWINSPARK_ROW_RING_LINES;
  h.num_small_slabs = kSmallSlabs;
  h.small_slab_tokens = request.max_round_rows;
  h.num_large_slabs = kLargeSlabs;
  h.large_slab_tokens = request.max_chunk_rows;
  h.ring_bytes = TWINSPARK_ROW_RING_BYTES;
  h.wants_hints = wants_hints ? 1 : 0;
  h.lines_offset = sizeof(RowRingHeader);
  h.ring_offset = h.lines_offset + h.num_lines * sizeof(RowCompletion);
  h.control_bytes = h.ring_offset + h.ring_bytes;
  const uint64_t token_bytes = uint64_t{h.num_columns} * tables.table(0).row_bytes();
  h.small_slab_bytes = RoundUp(token_bytes * h.small_slab_tokens, 256) * h.num_layers;
  h.large_slab_bytes = RoundUp(token_bytes * h.large_slab_tokens, 256) * h.num_layers;
  h.slabs_bytes = h.num_small_slabs * h.small_slab_bytes + h.num_large_slabs * h.large_slab_bytes;

  ASSIGN_OR_RETURN(session->control_, SharedMemory::Create("engram-ring", h.control_bytes));
  ASSIGN_OR_RETURN(session->slabs_, SharedMemory::Create("engram-rows", h.slabs_bytes));
  session->doorbell_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!session->doorbell_.valid()) return ErrnoStatus(errno, "eventfd");
  session->header() = h;
  session->slab_busy_.resize(h.num_small_slabs + h.num_large_slabs);
  session->reply_.magic = TWINSPARK_ROW_RING_MAGIC;
  session->reply_.version = TWINSPARK_ROW_RING_VERSION;
  session->reply_.attach_epoch = attach_epoch;
  session->reply_.control_bytes = h.control_bytes;
  session->reply_.slabs_bytes = h.slabs_bytes;
  return session;
}

void RingSession::Beat(uint32_t service_state, bool overloaded) {
  Store(header().service_state, service_state);
  Store(header().overloaded, overloaded ? 1u : 0u);
  std::atomic_ref<uint64_t>(header().heartbeat).fetch_add(1, std::memory_order_release);
}

void RingSession::SetSleeping(bool sleeping) {
  std::atomic_ref<uint32_t>(header().service_sleeping)
      .store(sleeping ? 1 : 0, std::memory_order_seq_cst);
}

bool RingSession::HasRequests() const {
  return std::atomic_ref<uint64_t>(header().head).load(std::memory_order_seq_cst) != tail_;
}

bool RingSession::TakeRequests(GatherEngine& engine, SessionStats& stats, bool& progress) {
  for (int i = 0; i < kRecordsPerTurn && HasRequests(); ++i) {
    progress = true;
    if (!TakeOne(engine, stats)) return false;
  }
  return true;
}

// Copies the next record and its payload out of the ring. A skip record is taken as well.
bool RingSession::TakeRecord(RowRequest& record) {
  const uint64_t available = Load(header().head) - tail_;
  const uint64_t ring_bytes = header_copy_.ring_bytes;
  if (available > ring_bytes || available % kUnit != 0) return false;
  const uint64_t at = tail_ % ring_bytes;
  const uint8_t* ring = control_.data() + header_copy_.ring_offset;
  memcpy(&record, ring + at, sizeof(record));
  uint64_t whole = kUnit + RoundUp(record.payload_bytes, kUnit);
  if (record.op == kRowOpSkip) whole = ring_bytes - at;
  if (whole > available || at + whole > ring_bytes) return false;
  if (record.op != kRowOpSkip) {
    payload_.assign(ring + at + kUnit, ring + at + kUnit + record.payload_bytes);
  }
  tail_ += whole;
  Store(header().tail, tail_);
  return true;
}

bool RingSession::TakeOne(GatherEngine& engine, SessionStats& stats) {
  Accepted accepted;
  RowRequest& record = accepted.record;
  if (!TakeRecord(record)) return false;
  if (record.op == kRowOpSkip) return true;

  ++stats.requests;
  const bool gather = record.op == kRowOpGather;
  const uint32_t all_layers = (1u << header_copy_.num_layers) - 1;
  if ((!gather && record.op != kRowOpPrefetch) || record.line >= header_copy_.num_lines ||
      record.priority >= kNumClasses || record.layers == 0 || record.layers > all_layers) {
    return false;  // nowhere to report it
  }
  ClassMeters& meters = engine.meters().classes[record.priority];
  meters.requests.Add();
  const auto refuse = [&](uint32_t state) {
    if (state == kRowBusy) meters.busy.Add();
    if (!gather) {
      ++stats.dropped_hints;
      return true;
    }
    ++stats.refused;
    Report(record, state);
    return true;
  };
  if (record.attach_epoch != attach_epoch_) return refuse(kRowStaleEpoch);
  const size_t bound = BoundOf(record);
  if (!gather && !engine.reads_ahead()) return refuse(kRowBusy);
  if (active_[bound] >= kMaxActive[bound] && (bound != kHints || !DropOldestHint(engine, stats))) {
    return refuse(kRowBusy);
  }
  accepted.taken_ns = MonotonicNs();
  GatherJob job;
  absl::Status parsed = ParsePayload(record, payload_, job.windows);
  if (parsed.ok() && gather) parsed = ParseSlab(record, job);
  if (!parsed.ok()) {
    // A client that goes on like this must not fill the log.
    if (refusals_logged_++ < kMaxRefusalsLogged) {
      LOG_WARNING << "row request refused attach_epoch=" << attach_epoch_ << " id=" << record.id
                  << " error=" << parsed.message();
    }
    return refuse(kRowBadRequest);
  }
  accepted.hashed_ns = MonotonicNs();
  StartJob(engine, stats, accepted, std::move(job));
  return true;
}

// From here on the job has its place, until its last layer is reported.
void RingSession::StartJob(GatherEngine& engine,
                           SessionStats& stats,
                           const Accepted& accepted,
                           GatherJob job) {
  const RowRequest& record = accepted.record;
  const bool gather = record.op == kRowOpGather;
  const size_t bound = BoundOf(record);
  ClassMeters& meters = engine.meters().classes[record.priority];
  stats.tokens += job.windows.size();
  meters.tokens.Add(job.windows.size());
  // The client wrote when it submitted: anything may be there.
  const int64_t queue_ns = std::max<int64_t>(
      0, accepted.taken_ns - static_cast<int64_t>(std::min<uint64_t>(record.submit_ns, INT64_MAX)));
  meters.queue_ns.Observe(static_cast<uint64_t>(queue_ns));
  if (gather && record.priority == kRowClassPrefill) {
    engine.NoteQueueAge(queue_ns, accepted.taken_ns);
  }
  job.owner = attach_epoch_;
  job.id = ++last_job_;
  if (!gather) hints_.push_back(job.id);
  job.layers = record.layers;
  job.priority = record.priority;
  job.deadline_ns = gather ? static_cast<int64_t>(record.deadline_ns) : 0;
  ++active_[bound];
  stats.hints += gather ? 0 : 1;
  if (gather) slab_busy_[record.slab] = true;
  uint32_t layers_left = record.layers;
  job.done = [this, accepted, bound, gather, layers_left, &stats, &engine, id = job.id](
                 int layer_idx, GatherStatus status, const std::string& error) mutable {
    layers_left &= ~(1u << layer_idx);
    if (layers_left == 0) {
      --active_[bound];
      if (gather) {
        slab_busy_[accepted.record.slab] = false;
      } else {
        std::erase(hints_, id);
      }
    }
    if (status != GatherStatus::kOk) {
      ++stats.errors;
      LOG_ERROR << "row request failed attach_epoch=" << attach_epoch_
                << " id=" << accepted.record.id << " layer=" << layer_idx << " error=" << error;
    }
    if (gather) {
      ReportLayer(accepted, layer_idx, status,
                  engine.meters().layers[static_cast<size_t>(layer_idx)][accepted.record.priority]);
    }
  };
  engine.Start(std::move(job));
}

// Makes place for a newer hint; false when there is no hint in progress.
bool RingSession::DropOldestHint(GatherEngine& engine, SessionStats& stats) {
  if (hints_.empty()) return false;
  engine.Drop(attach_epoch_, hints_.front());
  hints_.pop_front();
  --active_[kHints];
  ++stats.dropped_hints;
  return true;
}

absl::Status RingSession::ParsePayload(const RowRequest& record,
                                       std::span<const uint8_t> payload,
                                       std::vector<Window>& windows) const {
  const uint64_t mask_bytes = (uint64_t{record.num_ids} + 7) / 8;
  const uint64_t want = uint64_t{record.num_sequences} * sizeof(RowSequence) +
                        uint64_t{record.num_ids} * 4 + mask_bytes;
  if (record.num_sequences < 1 || record.num_sequences > 2 * limits::kMaxSlots ||
      record.num_tokens < 1 || record.num_tokens > header_copy_.large_slab_tokens ||
      payload.size() != want) {
    return absl::InvalidArgumentError(absl::StrCat(record.num_sequences, " sequences, ",
                                                   record.num_tokens, " tokens, ", record.num_ids,
                                                   " ids in ", payload.size(), " bytes"));
  }
  std::vector<RowSequence> sequences(record.num_sequences);
  memcpy(sequences.data(), payload.data(), sequences.size() * sizeof(RowSequence));
  std::vector<int32_t> ids(record.num_ids);
  const uint8_t* from = payload.data() + sequences.size() * sizeof(RowSequence);
  memcpy(ids.data(), from, ids.size() * 4);
  const uint8_t* mask = from + ids.size() * 4;
  std::vector<uint8_t> dead(record.num_ids);
  for (size_t i = 0; i < dead.size(); ++i)
    dead[i] = (mask[i / 8] >> (i % 8) & 1) != 0 ? 0 : 1;
  uint64_t at = 0;
  uint64_t tokens = 0;
  for (const RowSequence& sequence : sequences) {
    const uint64_t count = uint64_t{sequence.num_history} + sequence.num_tokens;
    if (count > ids.size() - at) {
      return absl::InvalidArgumentError("sequences hold more ids than the request");
    }
    const SequenceView view{sequence.position, sequence.num_history,
                            std::span(ids).subspan(at, count), std::span(dead).subspan(at, count)};
    RETURN_IF_ERROR(AppendWindows(tables_->hasher(), view, windows));
    at += count;
    tokens += sequence.num_tokens;
  }
  if (at != ids.size() || tokens != record.num_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("sequences hold ", at, " ids and ", tokens,
                                                   " tokens, the request ", record.num_ids, " and ",
                                                   record.num_tokens));
  }
  return absl::OkStatus();
}

absl::Status RingSession::ParseSlab(const RowRequest& record, GatherJob& job) const {
  const RowRingHeader& h = header_copy_;
  const bool small = record.slab < h.num_small_slabs;
  if (record.slab >= h.num_small_slabs + h.num_large_slabs ||
      record.num_tokens > (small ? h.small_slab_tokens : h.large_slab_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab ", record.slab, " cannot hold ", record.num_tokens, " tokens"));
  }
  if (slab_busy_[record.slab]) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab ", record.slab, " belongs to a request in progress"));
  }
  const uint64_t offset = small ? record.slab * h.small_slab_bytes
                                : h.num_small_slabs * h.small_slab_bytes +
                                      (record.slab - h.num_small_slabs) * h.large_slab_bytes;
  const uint64_t layer_bytes = (small ? h.small_slab_bytes : h.large_slab_bytes) / h.num_layers;
  for (uint32_t i = 0; i < h.num_layers; ++i) {
    uint8_t* weights = slabs_.data() + offset + i * layer_bytes;
    job.destinations[i] = {
        weights, weights + uint64_t{record.num_tokens} * h.num_columns * h.row_weight_bytes};
  }
  return absl::OkStatus();
}

void RingSession::Report(const RowRequest& record, uint32_t state) {
  RowCompletion& to = line(record.line);
  to.id = record.id;
  to.table_digest = header_copy_.table_digest;
  for (uint32_t i = 0; i < header_copy_.num_layers; ++i) {
    if ((record.layers >> i & 1) == 0) continue;
    Store(to.layer_state[i], state);
    FutexWakeAll(&to.layer_state[i]);
  }
}

void RingSession::ReportLayer(const Accepted& accepted,
                              int layer_idx,
                              GatherStatus status,
                              LayerClassMeters& meters) {
  RowCompletion& to = line(accepted.record.line);
  to.id = accepted.record.id;
  to.table_digest = header_copy_.table_digest;
  to.queue_ns = static_cast<uint64_t>(accepted.taken_ns) - accepted.record.submit_ns;
  to.hash_ns = static_cast<uint64_t>(accepted.hashed_ns - accepted.taken_ns);
  const auto read_ns = static_cast<uint64_t>(MonotonicNs() - accepted.taken_ns);
  to.read_ns = read_ns;
  meters.gather_ns.Observe(read_ns);
  uint32_t& word = to.layer_state[static_cast<size_t>(layer_idx)];
  Store(word, StateOf(status));
  FutexWakeAll(&word);
}

}  // namespace twinspark::engram
