// Slab i always reports on completion line i, so a slab is free exactly when its line has no
// pending layer. The header is copied once and checked; afterwards only words that change are read
// from shared memory.
#include "shard_worker/engram/ring_client.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <utility>

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/futex.h"
#include "common/limits.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kAttachTimeoutMs = 5000 * limits::kTimeScale;
constexpr int64_t kLookNs = 20 * kMs;  // how often a sleeping waiter looks around
constexpr int kLooksMin = 12;          // a busy machine delays the watcher as much as the watched
constexpr uint32_t kUnit = TWINSPARK_ROW_RING_UNIT;

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t LoadState(uint32_t& word) {
  return std::atomic_ref<uint32_t>(word).load(std::memory_order_acquire);
}

uint64_t RoundUpToUnit(uint64_t value) {
  return (value + kUnit - 1) / kUnit * kUnit;
}

uint64_t PayloadBytes(std::span<const RowRange> ranges) {
  uint64_t num_ids = 0;
  for (const RowRange& range : ranges)
    num_ids += range.history.size() + range.ids.size();
  return ranges.size() * sizeof(RowSequence) + num_ids * 4 + (num_ids + 7) / 8;
}

absl::Status SystemError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

absl::Status RowError(uint32_t state, int layer_idx) {
  const std::string where = absl::StrCat("engram rows of layer index ", layer_idx, ": ");
  switch (state) {
    case kRowBadRequest:
      return absl::InternalError(where + "the row service refused the request as malformed");
    case kRowDataError:
      return absl::DataLossError(where +
                                 "the row service cannot read its table or it changed on disk");
    case kRowTimeout:
      return absl::DeadlineExceededError(where + "not read in time");
    case kRowStaleEpoch:
      return absl::FailedPreconditionError(where + "request of an earlier attachment");
    case kRowBusy:
      return absl::UnavailableError(where + "too many requests in progress");
    default:
      return absl::UnavailableError(where + absl::StrCat("state ", state));
  }
}

}  // namespace

// Descriptors and mapped areas; closed and unmapped together.
struct RingClient::Mapping {
  int socket = -1;
  std::array<int, 3> fds = {-1, -1, -1};  // control, slabs, doorbell
  uint8_t* control = nullptr;
  size_t control_bytes = 0;
  uint8_t* slabs = nullptr;
  size_t slabs_bytes = 0;

  ~Mapping() {
    if (control != nullptr) munmap(control, control_bytes);
    if (slabs != nullptr) munmap(slabs, slabs_bytes);
    for (const int fd : fds) {
      if (fd >= 0) close(fd);
    }
    if (socket >= 0) close(socket);
  }
};

RingClient::RingClient() : mapping_(std::make_unique<Mapping>()) {}
RingClient::~RingClient() = default;

RowCompletion& RingClient::line(uint32_t index) const {
  return reinterpret_cast<RowCompletion*>(mapping_->control + header_copy_.lines_offset)[index];
}

RowRingHeader& RingClient::shared_header() const {
  return *reinterpret_cast<RowRingHeader*>(mapping_->control);
}

uint32_t RingClient::service_state() const {
  return LoadState(shared_header().service_state);
}

bool RingClient::service_overloaded() const {
  return LoadState(shared_header().overloaded) != 0;
}

absl::StatusOr<std::unique_ptr<RingClient>> RingClient::Attach(const std::string& socket_name,
                                                               RowAttachRequest request,
                                                               const RingClientLimits& limits) {
  std::unique_ptr<RingClient> client(new RingClient);
  Mapping& mapping = *client->mapping_;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (socket_name.empty() || socket_name.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("bad socket name '", socket_name, "'"));
  }
  memcpy(address.sun_path, socket_name.data(), socket_name.size());
  const bool abstract_name = socket_name[0] == '@';
  if (abstract_name) address.sun_path[0] = '\0';
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_name.size() +
                                             (abstract_name ? 0 : 1));
  mapping.socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (mapping.socket < 0) return SystemError("socket");
  // A stopped service accepts nothing: connect and receive are bounded by these.
  const timeval timeout = {kAttachTimeoutMs / 1000, 0};
  setsockopt(mapping.socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  setsockopt(mapping.socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  int connected = -1;
  do {
    connected = connect(mapping.socket, reinterpret_cast<sockaddr*>(&address), length);
  } while (connected != 0 && errno == EINTR);
  if (connected != 0) {
    return SystemError(absl::StrCat("cannot attach to the row service at ", socket_name));
  }
  request.magic = TWINSPARK_ROW_RING_MAGIC;
  request.version = TWINSPARK_ROW_RING_VERSION;
  if (send(mapping.socket, &request, sizeof(request), MSG_NOSIGNAL) != sizeof(request)) {
    return SystemError(absl::StrCat("attaching to the row service at ", socket_name));
  }
  RowAttachReply reply = {};
  iovec data = {&reply, sizeof(reply)};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control = {};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t n = -1;
  do {  // the wait is bounded by SO_RCVTIMEO; io_uring's task work interrupts it
    n = recvmsg(mapping.socket, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return SystemError(absl::StrCat("no answer from the row service at ", socket_name));
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(3 * sizeof(int))) {
    memcpy(mapping.fds.data(), CMSG_DATA(header), sizeof(mapping.fds));
  }
  if (n != sizeof(reply) || reply.magic != TWINSPARK_ROW_RING_MAGIC) {
    return absl::UnavailableError(
        absl::StrCat("the row service at ", socket_name, " closed or garbled the handshake"));
  }
  reply.text[sizeof(reply.text) - 1] = '\0';
  if (reply.refused != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the row service refuses the attachment: ", reply.text));
  }
  RETURN_IF_ERROR(client->Map(reply, limits));
  const RowRingHeader& h = client->header_copy_;
  if (h.num_layers != request.num_layers || h.num_columns != request.num_columns ||
      h.row_weight_bytes != request.row_weight_bytes) {
    return absl::FailedPreconditionError("the row ring has another geometry than asked for");
  }
  return client;
}

absl::Status RingClient::Map(const RowAttachReply& reply, const RingClientLimits& limits) {
  Mapping& mapping = *mapping_;
  for (size_t i = 0; i < 2; ++i) {
    struct stat info;
    const uint64_t want = i == 0 ? reply.control_bytes : reply.slabs_bytes;
    if (mapping.fds[i] < 0 || fstat(mapping.fds[i], &info) != 0 ||
        static_cast<uint64_t>(info.st_size) != want || want < sizeof(RowRingHeader)) {
      return absl::FailedPreconditionError("the row service passed unusable shared memory");
    }
    void* memory = mmap(nullptr, want, PROT_READ | PROT_WRITE, MAP_SHARED, mapping.fds[i], 0);
    if (memory == MAP_FAILED) return SystemError(absl::StrCat("mapping ", want, " bytes of rows"));
    (i == 0 ? mapping.control : mapping.slabs) = static_cast<uint8_t*>(memory);
    (i == 0 ? mapping.control_bytes : mapping.slabs_bytes) = want;
  }
  memcpy(&header_copy_, mapping.control, sizeof(header_copy_));
  RETURN_IF_ERROR(CheckHeader());
  if (header_copy_.attach_epoch != reply.attach_epoch) {
    return absl::FailedPreconditionError("the row ring belongs to another attachment");
  }
  limits_ = limits;
  if (limits_.row_wait_ns == 0) limits_.row_wait_ns = limits::kRowWaitMsMax * kMs;
  if (limits_.heartbeat_ns == 0) limits_.heartbeat_ns = 500 * limits::kTimeScale * kMs;
  slab_used_.resize(header_copy_.num_small_slabs + header_copy_.num_large_slabs);
  return absl::OkStatus();
}

absl::Status RingClient::CheckHeader() const {
  const RowRingHeader& h = header_copy_;
  const uint64_t row_bytes = uint64_t{h.row_weight_bytes} + h.row_scale_bytes;
  const uint64_t token_bytes = row_bytes * h.num_columns;
  const bool fits =
      h.magic == TWINSPARK_ROW_RING_MAGIC && h.version == TWINSPARK_ROW_RING_VERSION &&
      h.num_layers >= 1 && h.num_layers <= TWINSPARK_ROW_RING_MAX_LAYERS && h.num_columns >= 1 &&
      h.num_columns <= TWINSPARK_ROW_RING_MAX_COLUMNS && h.ring_bytes == TWINSPARK_ROW_RING_BYTES &&
      h.num_lines == TWINSPARK_ROW_RING_LINES &&
      h.num_small_slabs + h.num_large_slabs < h.num_lines && h.num_large_slabs >= 1 &&
      h.lines_offset >= sizeof(RowRingHeader) && h.lines_offset % 64 == 0 &&
      h.lines_offset + h.num_lines * sizeof(RowCompletion) <= h.ring_offset &&
      h.ring_offset % 64 == 0 && h.ring_offset + h.ring_bytes <= mapping_->control_bytes &&
      h.small_slab_bytes >= token_bytes * h.small_slab_tokens * h.num_layers &&
      h.large_slab_bytes >= token_bytes * h.large_slab_tokens * h.num_layers &&
      h.num_small_slabs * h.small_slab_bytes + h.num_large_slabs * h.large_slab_bytes <=
          mapping_->slabs_bytes;
  return fits ? absl::OkStatus()
              : absl::FailedPreconditionError("the header of the row ring makes no sense");
}

absl::Status RingClient::End(absl::Status why) {
  if (ended_.ok()) ended_ = why;
  return why;
}

absl::StatusOr<uint32_t> RingClient::TakeSlab(uint32_t num_tokens) {
  const RowRingHeader& h = header_copy_;
  if (num_tokens > h.large_slab_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a step of ", num_tokens, " tokens; the row ring was sized for ", h.large_slab_tokens));
  }
  const bool small = num_tokens <= h.small_slab_tokens;
  const uint32_t first = small ? 0 : h.num_small_slabs;
  const uint32_t count = small ? h.num_small_slabs : h.num_large_slabs;
  for (uint32_t i = 0; i < count; ++i) {
    // Start behind the last one: its rows stay readable until the caller submits again.
    const uint32_t slab = first + (slab_ + 1 + i) % count;
    bool free = true;
    for (uint32_t layer = 0; layer < h.num_layers && slab_used_[slab]; ++layer) {
      free = free && LoadState(line(slab).layer_state[layer]) != kRowPending;
    }
    if (free) return slab;
  }
  return absl::UnavailableError(absl::StrCat("all ", count, " row slabs have reads in progress"));
}

absl::Status RingClient::Submit(std::span<const RowRange> ranges, RowClass row_class) {
  RETURN_IF_ERROR(ended_);
  RETURN_IF_ERROR(CheckAlive());
  size_t num_tokens = 0;
  for (const RowRange& range : ranges)
    num_tokens += range.ids.size();
  if (num_tokens == 0) return absl::InvalidArgumentError("a row request without tokens");
  ASSIGN_OR_RETURN(const uint32_t slab,
                   TakeSlab(static_cast<uint32_t>(std::min<size_t>(num_tokens, UINT32_MAX))));
  RowCompletion& completion = line(slab);
  memset(&completion, 0, sizeof(completion));
  slab_used_[slab] = true;
  id_ = next_id_++;
  slab_ = slab;
  num_tokens_ = static_cast<uint32_t>(num_tokens);
  submitted_ns_ = NowNs();
  RowRequest record = {};
  record.id = id_;
  // A little before the client's own limit, so that the service's answer is the one reported.
  record.deadline_ns = static_cast<uint64_t>(submitted_ns_ + limits_.row_wait_ns * 19 / 20);
  record.op = kRowOpGather;
  record.priority = static_cast<uint8_t>(row_class);
  record.line = slab;
  record.slab = slab;
  return Push(record, ranges);
}

bool RingClient::Hint(std::span<const RowRange> ranges, RowClass row_class) {
  const RowRingHeader& h = header_copy_;
  if (!ended_.ok() || h.wants_hints == 0) return false;
  const uint64_t tail =
      std::atomic_ref<uint64_t>(shared_header().tail).load(std::memory_order_acquire);
  const uint64_t payload_bytes = PayloadBytes(ranges);
  uint64_t num_tokens = 0;
  for (const RowRange& range : ranges)
    num_tokens += range.ids.size();
  // Half of the ring is kept for requests: they must never wait for a hint.
  if (num_tokens == 0 || num_tokens > h.large_slab_tokens ||
      head_ - tail + 2 * (kUnit + RoundUpToUnit(payload_bytes)) > h.ring_bytes / 2) {
    return false;
  }
  RowRequest record = {};
  record.id = next_id_++;
  record.op = kRowOpPrefetch;
  record.priority = static_cast<uint8_t>(row_class);
  return Push(record, ranges).ok();
}

absl::Status RingClient::Push(RowRequest record, std::span<const RowRange> ranges) {
  const RowRingHeader& h = header_copy_;
  uint64_t num_ids = 0;
  uint64_t num_tokens = 0;
  for (const RowRange& range : ranges) {
    num_ids += range.history.size() + range.ids.size();
    num_tokens += range.ids.size();
  }
  const uint64_t payload_bytes = PayloadBytes(ranges);
  const uint64_t whole = kUnit + RoundUpToUnit(payload_bytes);
  RowRingHeader& shared = shared_header();
  const uint64_t tail = std::atomic_ref<uint64_t>(shared.tail).load(std::memory_order_acquire);
  const uint64_t to_end = h.ring_bytes - head_ % h.ring_bytes;
  const uint64_t skip = to_end < whole ? to_end : 0;
  if (whole + skip > h.ring_bytes - (head_ - tail)) {
    return absl::UnavailableError("the request ring is full");
  }
  uint8_t* ring = mapping_->control + h.ring_offset;
  if (skip > 0) {
    RowRequest filler = {};
    filler.op = kRowOpSkip;
    memcpy(ring + head_ % h.ring_bytes, &filler, sizeof(filler));
    head_ += skip;
  }
  record.attach_epoch = h.attach_epoch;
  record.layers = static_cast<uint8_t>((1u << h.num_layers) - 1);
  record.num_sequences = static_cast<uint32_t>(ranges.size());
  record.num_ids = static_cast<uint32_t>(num_ids);
  record.num_tokens = static_cast<uint32_t>(num_tokens);
  record.payload_bytes = static_cast<uint32_t>(payload_bytes);
  record.submit_ns = static_cast<uint64_t>(NowNs());
  uint8_t* to = ring + head_ % h.ring_bytes;
  memcpy(to, &record, sizeof(record));
  to += kUnit;
  for (const RowRange& range : ranges) {
    const RowSequence sequence = {static_cast<uint32_t>(range.first_position),
                                  static_cast<uint32_t>(range.history.size()),
                                  static_cast<uint32_t>(range.ids.size())};
    memcpy(to, &sequence, sizeof(sequence));
    to += sizeof(sequence);
  }
  uint8_t* mask = to + num_ids * 4;
  memset(mask, 0, (num_ids + 7) / 8);
  size_t bit = 0;
  for (const RowRange& range : ranges) {
    for (const auto& ids : {range.history, range.ids}) {
      if (!ids.empty()) memcpy(to, ids.data(), ids.size() * 4);  // no null to memcpy
      to += ids.size() * 4;
    }
    const size_t count = range.history.size() + range.ids.size();
    for (size_t i = 0; i < count; ++i, ++bit) {
      if (range.dead.empty() || range.dead[i] == 0) {
        mask[bit / 8] = static_cast<uint8_t>(mask[bit / 8] | (1u << (bit % 8)));
      }
    }
  }
  head_ += whole;
  std::atomic_ref<uint64_t>(shared.head).store(head_, std::memory_order_seq_cst);
  if (std::atomic_ref<uint32_t>(shared.service_sleeping).load(std::memory_order_seq_cst) != 0) {
    const uint64_t one = 1;
    // A full counter already wakes the service.
    if (write(mapping_->fds[2], &one, sizeof(one)) < 0 && errno != EAGAIN) {
      return End(SystemError("doorbell of the row service"));
    }
  }
  return absl::OkStatus();
}

absl::Status RingClient::Probe(AliveWatch& watch, int looks_min) const {
  pollfd socket = {mapping_->socket, POLLIN, 0};
  if (poll(&socket, 1, 0) > 0) {
    return absl::UnavailableError(
        "the row service ended the attachment (it died, was reloaded, or refused the last "
        "request)");
  }
  if (service_state() == kRowServiceFailed) {
    return absl::UnavailableError("the row service has failed; its Status and log say why");
  }
  const uint64_t beat =
      std::atomic_ref<uint64_t>(shared_header().heartbeat).load(std::memory_order_acquire);
  const int64_t now = NowNs();
  if (beat != watch.beat || watch.beat_ns == 0) {
    watch = {beat, now, 0};
  } else if (++watch.looks >= looks_min && now - watch.beat_ns > limits_.heartbeat_ns) {
    return absl::UnavailableError(absl::StrCat("the row service stands still: no heartbeat for ",
                                               (now - watch.beat_ns) / kMs, " ms"));
  }
  return absl::OkStatus();
}

absl::Status RingClient::CheckAlive() {
  const absl::Status alive = Probe(watch_, kLooksMin);
  return alive.ok() ? alive : End(alive);
}

absl::StatusOr<EngramRows> RingClient::Wait(int layer_idx) {
  RETURN_IF_ERROR(ended_);
  const RowRingHeader& h = header_copy_;
  CHECK(id_ != 0 && layer_idx >= 0 && layer_idx < static_cast<int>(h.num_layers));
  const size_t l = static_cast<size_t>(layer_idx);
  uint32_t& word = line(slab_).layer_state[l];
  const int64_t give_up_ns = submitted_ns_ + limits_.row_wait_ns;
  const int64_t spin_until_ns = NowNs() + limits_.spin_ns;
  uint32_t state = LoadState(word);
  while (state == kRowPending && NowNs() < spin_until_ns) {
    Pause();
    state = LoadState(word);
  }
  while (state == kRowPending) {
    RETURN_IF_ERROR(CheckAlive());
    const int64_t left = give_up_ns - NowNs();
    if (left <= 0) {
      return End(absl::DeadlineExceededError(absl::StrCat("engram rows of layer index ", layer_idx,
                                                          " were not there in ",
                                                          limits_.row_wait_ns / kMs, " ms")));
    }
    FutexWait(&word, kRowPending, std::min(left, kLookNs));
    state = LoadState(word);
  }
  if (state != kRowReady) return End(RowError(state, layer_idx));
  const RowCompletion& completion = line(slab_);
  if (completion.id != id_ || completion.table_digest != h.table_digest) {
    return End(absl::InternalError(absl::StrCat("rows of request ", completion.id,
                                                " of another table came for request ", id_)));
  }
  timings_ = {completion.queue_ns, completion.hash_ns, completion.read_ns};
  const bool small = slab_ < h.num_small_slabs;
  const uint64_t offset = small ? slab_ * h.small_slab_bytes
                                : h.num_small_slabs * h.small_slab_bytes +
                                      (slab_ - h.num_small_slabs) * h.large_slab_bytes;
  const uint64_t layer_bytes = (small ? h.small_slab_bytes : h.large_slab_bytes) / h.num_layers;
  EngramRows rows;
  rows.values = mapping_->slabs + offset + l * layer_bytes;
  rows.scales = rows.values + uint64_t{num_tokens_} * h.num_columns * h.row_weight_bytes;
  return rows;
}

}  // namespace twinspark
