// Reactor: rings first, then finished reads, then a short spin, then epoll over everything that can
// bring work. Before it sleeps it says so in every session's header and looks once more, so that no
// doorbell is lost.
#include "engram_service/shm/row_server.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <future>
#include <utility>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark::engram {
namespace {

constexpr auto kHeartbeatPeriod = std::chrono::milliseconds(10);
constexpr auto kCheckWait = std::chrono::seconds(2);
constexpr int kMaxSleepMs = 1000;
constexpr int kMaxEvents = 32;
constexpr size_t kMaxPosted = 64;
constexpr size_t kMaxGathers = 64;  // of the control plane; each may bring 1,024 tokens
constexpr size_t kMaxJobsWithHints = 16;
constexpr int64_t kHandshakeNsMax = 2'000'000'000;

absl::StatusOr<socklen_t> FillAddress(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket name '", name, "' must have 1 to ",
                                                   sizeof(address.sun_path) - 1, " characters"));
  }
  memcpy(address.sun_path, name.data(), name.size());
  if (name[0] == '@') address.sun_path[0] = '\0';
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() +
                                (name[0] == '@' ? 0 : 1));
}

}  // namespace

struct RowServer::Client {
  Fd socket;
  int64_t accepted_ns = 0;
  std::unique_ptr<RingSession> session;  // null until the handshake
  bool dropped = false;
};

RowServer::RowServer(const TableSet& tables,
                     std::unique_ptr<BlockReader> reader,
                     std::unique_ptr<RowCache> cache,
                     RowServerOptions options)
    : tables_(tables),
      options_(std::move(options)),
      reader_(std::move(reader)),
      cache_(std::move(cache)),
      reader_name_(reader_->name()),
      engine_(std::make_unique<GatherEngine>(tables, *reader_, cache_.get())),
      // Attach epochs of different service processes must not be equal by chance.
      next_epoch_(RandomU64() & ~uint64_t{0xffff}) {}

absl::StatusOr<std::unique_ptr<RowServer>> RowServer::Start(const TableSet& tables,
                                                            std::unique_ptr<BlockReader> reader,
                                                            std::unique_ptr<RowCache> cache,
                                                            const RowServerOptions& options) {
  std::unique_ptr<RowServer> server(
      new RowServer(tables, std::move(reader), std::move(cache), options));
  RETURN_IF_ERROR(server->Listen());
  server->reactor_ = std::thread([raw = server.get()] { raw->Run(); });
  server->heartbeat_ = std::thread([raw = server.get()] { raw->RunHeartbeat(); });
  return server;
}

RowServer::~RowServer() {
  stop_ = true;
  Wake();
  if (reactor_.joinable()) reactor_.join();
  if (heartbeat_.joinable()) heartbeat_.join();
  if (!socket_name_.empty() && socket_name_[0] != '@') unlink(socket_name_.c_str());
}

absl::Status RowServer::Listen() {
  const std::string name = options_.socket.empty()
                               ? absl::StrCat("@twinspark-engram-", Hex16(RandomU64()))
                               : options_.socket;
  sockaddr_un address;
  ASSIGN_OR_RETURN(const socklen_t length, FillAddress(name, address));
  listen_fd_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  wake_fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_fd_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!listen_fd_.valid() || !wake_fd_.valid() || !epoll_fd_.valid()) {
    return ErrnoStatus(errno, "descriptors of the row server");
  }
  if (bind(listen_fd_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listen_fd_.get(), 8) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot listen on Unix socket ", name));
  }
  socket_name_ = name;
  const auto watch = [this](int fd) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    return epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  };
  bool watching = watch(listen_fd_.get()) && watch(wake_fd_.get());
  if (reader_->event_fd() >= 0) watching = watching && watch(reader_->event_fd());
  return watching ? absl::OkStatus() : ErrnoStatus(errno, "epoll_ctl");
}

void RowServer::Run() {
  while (!stop_) {
    if (Turn()) continue;
    const int64_t until = MonotonicNs() + options_.spin_us * 1000;
    bool found = false;
    while (!found && MonotonicNs() < until) {
      for (const auto& client : clients_) {
        found = found || (client->session != nullptr && client->session->HasRequests());
      }
    }
    if (!found) Sleep();
  }
  for (const auto& client : clients_) {
    if (client->session != nullptr) engine_->Cancel(client->session->attach_epoch());
    Drop(*client, "service stops");
  }
  RemoveDropped();
  // Reads that are on their way write into the reader's buffers: let them finish.
  while (engine_->reads_in_flight() > 0)
    engine_->Poll(/*wait=*/true);
  TakePosted();
  PublishStats();
}

bool RowServer::Turn() {
  bool progress = TakePosted();
  for (const auto& client : clients_) {
    if (client->session == nullptr || client->dropped) continue;
    if (!client->session->TakeRequests(*engine_, session_stats_, progress)) {
      Drop(*client, "broke the ring protocol");
    }
  }
  progress = engine_->Poll(/*wait=*/false) || progress;
  RemoveDropped();
  if (progress) PublishStats();
  return progress;
}

void RowServer::Sleep() {
  const auto set_sleeping = [this](bool sleeping) {
    bool pending = false;
    for (const auto& client : clients_) {
      if (client->session == nullptr) continue;
      client->session->SetSleeping(sleeping);
      pending = pending || client->session->HasRequests();
    }
    return pending;
  };
  int timeout_ms = kMaxSleepMs;
  if (set_sleeping(true) || !reader_->ArmEvent()) timeout_ms = 0;
  const int64_t next = engine_->NextEventNs();
  if (next != INT64_MAX) {
    const int64_t wait_ms = (next - MonotonicNs()) / 1'000'000 + 1;
    timeout_ms = static_cast<int>(std::clamp<int64_t>(wait_ms, 0, timeout_ms));
  }
  std::array<epoll_event, kMaxEvents> events;
  const int count = epoll_wait(epoll_fd_.get(), events.data(), kMaxEvents, timeout_ms);
  set_sleeping(false);
  for (int i = 0; i < count; ++i) {
    const int fd = events[static_cast<size_t>(i)].data.fd;
    uint64_t ignored;
    if (fd == listen_fd_.get()) {
      Accept();
    } else if (fd == wake_fd_.get()) {
      while (read(fd, &ignored, sizeof(ignored)) > 0) {
      }
    } else if (fd != reader_->event_fd()) {
      for (const auto& client : clients_) {
        if (client->session != nullptr && fd == client->session->doorbell()) {
          while (read(fd, &ignored, sizeof(ignored)) > 0) {
          }
        } else if (fd == client->socket.get() && !client->dropped) {
          Handshake(*client);
        }
      }
    }
  }
  const int64_t now = MonotonicNs();
  for (const auto& client : clients_) {
    if (client->session == nullptr && now - client->accepted_ns > kHandshakeNsMax) {
      Drop(*client, "no handshake");
    }
  }
  RemoveDropped();
}

void RowServer::Accept() {
  Fd fd(accept4(listen_fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) return;
  ucred peer = {};
  socklen_t length = sizeof(peer);
  const bool known = getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
                     (peer.uid == geteuid() || peer.uid == 0);
  if (!known || clients_.size() >= static_cast<size_t>(options_.max_attachments)) {
    ++attachments_refused_;
    LOG_WARNING << "attachment refused pid=" << peer.pid << " uid=" << peer.uid
                << (known ? " reason=too many" : " reason=other user");
    return;
  }
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = fd.get();
  if (epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) return;
  auto client = std::make_unique<Client>();
  client->socket = std::move(fd);
  client->accepted_ns = MonotonicNs();
  clients_.push_back(std::move(client));
}

// Why an attachment cannot be; empty when it can.
std::string RowServer::Refusal(const RowAttachRequest& request) const {
  if (request.magic != TWINSPARK_ROW_RING_MAGIC || request.version != TWINSPARK_ROW_RING_VERSION) {
    return absl::StrCat("ring protocol version ", request.version, "; the service speaks ",
                        TWINSPARK_ROW_RING_VERSION);
  }
  if (service_state_ == kRowServiceDraining) return "the service is draining";
  if (service_state_ == kRowServiceFailed) return stats().failure;
  if (memcmp(request.model_digest, tables_.model_digest().data(), 32) != 0) {
    return absl::StrCat("model digest ", Hex(std::span(request.model_digest, 32)),
                        "; the service has ", Hex(tables_.model_digest()));
  }
  const TableSetOptions& own = tables_.options();
  if (request.rank != static_cast<uint32_t>(own.rank) ||
      request.world != static_cast<uint32_t>(own.world)) {
    return absl::StrCat("rank ", request.rank, " of ", request.world,
                        "; the service owns columns of rank ", own.rank, " of ", own.world);
  }
  if (request.num_layers != static_cast<uint32_t>(tables_.num_layers()) ||
      request.num_columns != tables_.columns().size() ||
      request.row_weight_bytes != tables_.table(0).row_weight_bytes()) {
    return absl::StrCat(request.num_layers, " layers of ", request.num_columns, " columns of ",
                        request.row_weight_bytes, " weights; the service has ",
                        tables_.num_layers(), ", ", tables_.columns().size(), ", ",
                        tables_.table(0).row_weight_bytes());
  }
  return "";
}

// Sends the reply; an accepted client gets the descriptors of its shared memory with it.
bool RowServer::SendReply(int socket, const RingSession* session, const std::string& refusal) {
  RowAttachReply reply = {};
  if (session != nullptr) {
    reply = session->reply();
  } else {
    reply.magic = TWINSPARK_ROW_RING_MAGIC;
    reply.version = TWINSPARK_ROW_RING_VERSION;
    reply.refused = 1;
    memcpy(reply.text, refusal.data(), std::min(refusal.size(), sizeof(reply.text) - 1));
  }
  iovec data = {&reply, sizeof(reply)};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control = {};
  if (session != nullptr) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(3 * sizeof(int));
    const std::array<int, 3> fds = session->descriptors();
    memcpy(CMSG_DATA(header), fds.data(), sizeof(fds));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof(reply);
}

// The first message is the handshake; anything after it is the end of the attachment (a closed
// socket reads as end of file).
void RowServer::Handshake(Client& client) {
  RowAttachRequest request;
  const ssize_t n = recv(client.socket.get(), &request, sizeof(request), MSG_TRUNC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (client.session != nullptr || n != sizeof(request)) {
    Drop(client, n == 0 ? "left" : "broke the handshake");
    return;
  }
  std::string refusal = Refusal(request);
  std::unique_ptr<RingSession> session;
  if (refusal.empty()) {
    auto created = RingSession::Create(++next_epoch_, tables_, engine_->reads_ahead(), request);
    if (created.ok()) {
      session = *std::move(created);
    } else {
      refusal = std::string(created.status().message());
    }
  }
  const bool sent = SendReply(client.socket.get(), session.get(), refusal);
  if (session == nullptr || !sent) {
    ++attachments_refused_;
    Drop(client, refusal.empty() ? "left during the handshake" : refusal.c_str());
    return;
  }
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = session->doorbell();
  if (epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, session->doorbell(), &event) != 0) {
    Drop(client, "epoll is full");
    return;
  }
  client.session = std::move(session);
  ++attachments_total_;
  {
    const std::lock_guard lock(beat_mutex_);
    beating_.push_back(client.session.get());
  }
  LOG_INFO << "worker attached attach_epoch=" << Hex16(client.session->attach_epoch())
           << " rank=" << request.rank << " round_rows=" << request.max_round_rows
           << " chunk_rows=" << request.max_chunk_rows
           << " slab_bytes=" << client.session->slab_bytes();
  PublishStats();
}

void RowServer::Drop(Client& client, const char* why) {
  if (client.dropped) return;
  client.dropped = true;
  if (client.session == nullptr) {
    LOG_INFO << "attachment ended before it began reason=\"" << why << "\"";
    return;
  }
  LOG_INFO << "attachment ended attach_epoch=" << Hex16(client.session->attach_epoch())
           << " reason=\"" << why << "\"";
  engine_->Cancel(client.session->attach_epoch());
  const std::lock_guard lock(beat_mutex_);
  std::erase(beating_, client.session.get());
}

void RowServer::RemoveDropped() {
  const size_t before = clients_.size();
  std::erase_if(clients_, [this](const std::unique_ptr<Client>& client) {
    if (!client->dropped) return false;
    // The kernel keeps a watch as long as any process holds the descriptor: the client has a copy
    // of the doorbell.
    if (client->session != nullptr) {
      epoll_ctl(epoll_fd_.get(), EPOLL_CTL_DEL, client->session->doorbell(), nullptr);
    }
    epoll_ctl(epoll_fd_.get(), EPOLL_CTL_DEL, client->socket.get(), nullptr);
    return true;
  });
  if (clients_.size() != before) PublishStats();
}

void RowServer::RunHeartbeat() {
  // A busy machine must not look like a stopped service; without the right to it, it is as it is.
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), -10);
  while (!stop_) {
    const bool overloaded = engine_->meters().overloaded(MonotonicNs());
    {
      const std::lock_guard lock(beat_mutex_);
      for (RingSession* session : beating_)
        session->Beat(service_state_, overloaded);
    }
    std::this_thread::sleep_for(kHeartbeatPeriod);
  }
}

void RowServer::Wake() {
  const uint64_t one = 1;
  CHECK_EQ(write(wake_fd_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

void RowServer::Post(std::function<void(GatherEngine&)> work) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
  }
  Wake();
}

bool RowServer::TakePosted() {
  std::vector<std::function<void(GatherEngine&)>> posted;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (const auto& work : posted)
    work(*engine_);
  return !posted.empty();
}

absl::StatusOr<GatheredRows> RowServer::Gather(std::vector<Window> windows,
                                               uint32_t layers,
                                               std::chrono::milliseconds timeout,
                                               bool past_cache) {
  struct Shared {
    GatheredRows rows;
    std::promise<absl::Status> promise;
    uint32_t layers_left;
    absl::Status status;
  };
  auto shared = std::make_shared<Shared>();
  shared->layers_left = layers;
  shared->rows.layers.resize(static_cast<size_t>(tables_.num_layers()));
  GatherJob job;
  const size_t num_rows = windows.size() * tables_.columns().size();
  for (int i = 0; i < tables_.num_layers(); ++i) {
    if ((layers >> i & 1) == 0) continue;
    auto& bytes = shared->rows.layers[static_cast<size_t>(i)];
    bytes.weights.resize(num_rows * tables_.table(i).row_weight_bytes());
    bytes.scales.resize(num_rows * tables_.table(i).row_scale_bytes());
    job.destinations[static_cast<size_t>(i)] = {bytes.weights.data(), bytes.scales.data()};
  }
  job.windows = std::move(windows);
  job.layers = layers;
  job.priority = 1;
  job.past_cache = past_cache;
  job.deadline_ns =
      MonotonicNs() + std::chrono::duration_cast<std::chrono::nanoseconds>(timeout).count();
  job.done = [this, shared](int layer_idx, GatherStatus status, const std::string& error) {
    if (status == GatherStatus::kTimeout) {
      shared->status.Update(absl::DeadlineExceededError(error));
    } else if (status != GatherStatus::kOk) {
      shared->status.Update(absl::DataLossError(error));
    }
    shared->layers_left &= ~(1u << layer_idx);
    if (shared->layers_left != 0) return;
    --gathers_;
    shared->promise.set_value(shared->status);
  };
  if (gathers_.fetch_add(1) >= kMaxGathers) {
    --gathers_;
    return absl::ResourceExhaustedError(
        absl::StrCat(kMaxGathers, " gathers are in progress; try again"));
  }
  std::future<absl::Status> done = shared->promise.get_future();
  auto boxed = std::make_shared<GatherJob>(std::move(job));
  Post([boxed](GatherEngine& engine) { engine.Start(std::move(*boxed)); });
  // The engine keeps the deadline; the margin is for a reactor that is stuck in a read.
  if (done.wait_for(2 * timeout) != std::future_status::ready) {
    return absl::DeadlineExceededError("the reader did not answer");
  }
  RETURN_IF_ERROR(done.get());
  return std::move(shared->rows);
}

void RowServer::CheckTables() {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> checked = done->get_future();
  Post([this, done](GatherEngine& engine) {
    engine.CheckTables();
    PublishStats();
    done->set_value();
  });
  checked.wait_for(kCheckWait);  // a reactor that is stuck in a read answers later
}

bool RowServer::Prefetch(std::vector<Window> windows, int priority) {
  {
    const std::lock_guard lock(mutex_);
    if (posted_.size() >= kMaxPosted) return false;
  }
  GatherJob job;
  job.windows = std::move(windows);
  job.layers = (1u << tables_.num_layers()) - 1;
  job.priority = priority;
  auto boxed = std::make_shared<GatherJob>(std::move(job));
  Post([boxed](GatherEngine& engine) {
    // A hint is the first thing to go under load.
    if (engine.num_jobs() < kMaxJobsWithHints) engine.Start(std::move(*boxed));
  });
  return true;
}

void RowServer::PublishStats() {
  RowServerStats stats;
  stats.engine = engine_->stats();
  stats.sessions = session_stats_;
  stats.attachments_total = attachments_total_;
  stats.attachments_refused = attachments_refused_;
  for (const auto& client : clients_) {
    if (client->session == nullptr) continue;
    ++stats.attachments;
    stats.slab_bytes += client->session->slab_bytes();
  }
  for (int i = 0; i < tables_.num_layers() && stats.failure.empty(); ++i)
    stats.failure = engine_->layer_failure(i);
  if (!stats.failure.empty()) service_state_ = kRowServiceFailed;
  const std::lock_guard lock(mutex_);
  published_ = std::move(stats);
}

RowServerStats RowServer::stats() const {
  const std::lock_guard lock(mutex_);
  return published_;
}

}  // namespace twinspark::engram
