// Sockets, hello and the exchange loop of the TCP communicator (tcp_communicator.h).
#include "shard_worker/parallel/tcp_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/check.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x54574e5350524b31;  // "TWNSPRK1"
constexpr size_t kMaxPending = 16;               // connections that have not said hello yet
constexpr auto kSpin = std::chrono::microseconds(60);

enum class Operation : uint32_t { kAllReduce = 1, kAllGather, kBarrier };

struct Hello {
  uint64_t magic = kMagic;
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint32_t world = 0;
  std::array<char, 64> secret{};
};
static_assert(sizeof(Hello) == 88);

struct MessageHeader {
  uint64_t sequence = 0;
  uint64_t bytes = 0;
  Operation operation = Operation::kBarrier;
  uint32_t rank = 0;
};
static_assert(sizeof(MessageHeader) == 24);

std::string ErrnoText() {
  return std::strerror(errno);
}

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() { Reset(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int fd() const { return fd_; }
  void Reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

void Prepare(int fd) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

int MillisecondsLeft(Clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1000000));
}

absl::StatusOr<std::pair<std::string, std::string>> SplitAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size())
    return absl::InvalidArgumentError(
        absl::StrCat("address of a rank is \"", address, "\", expected host:port"));
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  return std::pair(host, address.substr(colon + 1));
}

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
};

absl::Status Resolve(const std::string& host, const std::string& port, AddressList& list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &list.first);
  if (error != 0)
    return absl::UnavailableError(
        absl::StrCat("cannot resolve ", host, ": ", ::gai_strerror(error)));
  return absl::OkStatus();
}

Hello MakeHello(const TcpGroup& group) {
  Hello hello;
  hello.epoch = group.epoch;
  hello.rank = static_cast<uint32_t>(group.rank);
  hello.world = static_cast<uint32_t>(group.addresses.size());
  std::copy_n(group.secret.data(), std::min(group.secret.size(), hello.secret.size()),
              hello.secret.data());
  return hello;
}

bool SameGroup(const Hello& a, const Hello& b) {
  return a.magic == b.magic && a.epoch == b.epoch && a.world == b.world && a.secret == b.secret;
}

// Sends all of `bytes` or fails; hellos fit into any socket buffer.
bool SendSmall(int fd, const void* bytes, size_t size) {
  return ::send(fd, bytes, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
}

// Joins one group: accepts the higher ranks, connects to the lower ones, all at once, until the
// deadline. Strangers (another job, epoch or secret; half a hello; silence) are dropped.
class Joiner {
 public:
  Joiner(const TcpListener& listener, const TcpGroup& group)
      : listener_(listener),
        group_(group),
        hello_(MakeHello(group)),
        deadline_(Clock::now() + std::chrono::milliseconds(group.connect_timeout_ms)),
        peers_(group.addresses.size()) {}

  absl::StatusOr<std::vector<Socket>> Run() {
    for (int rank = 0; rank < group_.rank; ++rank)
      RETURN_IF_ERROR(ConnectTo(rank));
    while (NumMissing() > 0) {
      std::vector<pollfd> waits = {{listener_.fd(), POLLIN, 0}};
      for (const Pending& pending : pending_)
        waits.push_back({pending.socket.fd(), POLLIN, 0});
      const int ready = ::poll(waits.data(), waits.size(), Slice());
      if (ready < 0 && errno != EINTR)
        return absl::UnavailableError(absl::StrCat("poll failed: ", ErrnoText()));
      if (GivenUp()) return GivenUpError();
      if (ready <= 0) continue;
      for (size_t i = waits.size() - 1; i >= 1; --i)
        if (waits[i].revents != 0) ReadHello(i - 1);
      if ((waits[0].revents & POLLIN) != 0) Accept();
    }
    return std::move(peers_);
  }

 private:
  struct Pending {
    Socket socket;
    Hello hello;
    size_t bytes = 0;
  };

  // Waits go in slices, so that a cancellation is seen.
  int Slice() const { return std::min(100, MillisecondsLeft(deadline_)); }
  bool Cancelled() const { return group_.cancelled != nullptr && group_.cancelled->load(); }
  bool GivenUp() const { return Cancelled() || MillisecondsLeft(deadline_) == 0; }
  absl::Status GivenUpError() const {
    return Cancelled() ? absl::CancelledError("joining the group was called off") : TimeoutError();
  }
  // False when given up before the socket was ready.
  bool WaitFor(int fd, short events) const {
    while (true) {
      pollfd wait = {fd, events, 0};
      const int ready = ::poll(&wait, 1, Slice());
      if (ready > 0) return true;
      if ((ready < 0 && errno != EINTR) || GivenUp()) return false;
    }
  }

  int NumMissing() const {
    int missing = 0;
    for (size_t rank = static_cast<size_t>(group_.rank) + 1; rank < peers_.size(); ++rank)
      missing += peers_[rank].fd() < 0 ? 1 : 0;
    return missing;
  }

  absl::Status TimeoutError() const {
    std::vector<int> missing;
    for (size_t rank = 0; rank < peers_.size(); ++rank)
      if (static_cast<int>(rank) != group_.rank && peers_[rank].fd() < 0)
        missing.push_back(static_cast<int>(rank));
    return absl::DeadlineExceededError(absl::StrCat("rank ", group_.rank, " waited ",
                                                    group_.connect_timeout_ms, " ms for rank ",
                                                    absl::StrJoin(missing, ", ")));
  }

  void Accept() {
    Socket socket(::accept(listener_.fd(), nullptr, nullptr));
    if (socket.fd() < 0) return;
    Prepare(socket.fd());
    if (pending_.size() >= kMaxPending) pending_.erase(pending_.begin());
    pending_.push_back({std::move(socket), {}, 0});
  }

  void ReadHello(size_t i) {
    Pending& pending = pending_[i];
    const ssize_t n =
        ::recv(pending.socket.fd(), reinterpret_cast<char*>(&pending.hello) + pending.bytes,
               sizeof(Hello) - pending.bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) pending.bytes += static_cast<size_t>(n);
    if (n > 0 && pending.bytes < sizeof(Hello)) return;
    const size_t rank = pending.hello.rank;
    const bool welcome = n > 0 && SameGroup(pending.hello, hello_) && rank < peers_.size() &&
                         static_cast<int>(rank) > group_.rank && peers_[rank].fd() < 0 &&
                         SendSmall(pending.socket.fd(), &hello_, sizeof(hello_));
    if (welcome) peers_[rank] = std::move(pending.socket);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  // A lower rank may not listen for our epoch yet, or an old process of it may: try again until it
  // answers with the hello of this group.
  absl::Status ConnectTo(int rank) {
    ASSIGN_OR_RETURN(const auto address, SplitAddress(group_.addresses[static_cast<size_t>(rank)]));
    AddressList list;
    RETURN_IF_ERROR(Resolve(address.first, address.second, list));
    while (true) {
      Socket socket(::socket(list.first->ai_family, SOCK_STREAM, 0));
      if (socket.fd() < 0) return absl::UnavailableError(absl::StrCat("socket: ", ErrnoText()));
      Prepare(socket.fd());
      if (TryConnect(socket.fd(), *list.first) && Greet(socket.fd(), rank)) {
        peers_[static_cast<size_t>(rank)] = std::move(socket);
        return absl::OkStatus();
      }
      if (GivenUp()) return GivenUpError();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  bool TryConnect(int fd, const addrinfo& address) {
    if (::connect(fd, address.ai_addr, address.ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) return false;
    if (!WaitFor(fd, POLLOUT)) return false;
    int error = 0;
    socklen_t size = sizeof(error);
    return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
  }

  bool Greet(int fd, int rank) {
    if (!SendSmall(fd, &hello_, sizeof(hello_))) return false;
    Hello reply;
    size_t bytes = 0;
    while (bytes < sizeof(reply)) {
      if (!WaitFor(fd, POLLIN)) return false;
      const ssize_t n =
          ::recv(fd, reinterpret_cast<char*>(&reply) + bytes, sizeof(reply) - bytes, 0);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) return false;
      bytes += static_cast<size_t>(n);
    }
    return SameGroup(reply, hello_) && static_cast<int>(reply.rank) == rank;
  }

  const TcpListener& listener_;
  const TcpGroup& group_;
  const Hello hello_;
  const Clock::time_point deadline_;
  std::vector<Socket> peers_;
  std::vector<Pending> pending_;
};

class TcpCommunicator : public Communicator {
 public:
  TcpCommunicator(std::vector<Socket> peers, int rank, int64_t timeout_ms)
      : peers_(std::move(peers)), rank_(rank), timeout_ms_(timeout_ms) {}

  int rank() const override { return rank_; }
  int world() const override { return static_cast<int>(peers_.size()); }

  absl::Status AllReduceSum(std::span<float> values) override {
    received_.resize(values.size() * peers_.size());
    const std::span<float> all(received_);
    RETURN_IF_ERROR(
        Exchange(Operation::kAllReduce, std::as_bytes(values), std::as_writable_bytes(all)));
    const size_t n = values.size();
    for (size_t r = 0; r < peers_.size(); ++r) {
      const float* part = static_cast<int>(r) == rank_ ? nullptr : all.data() + r * n;
      // The own values are still in place only until the first addition: keep them aside.
      if (part == nullptr) std::copy_n(values.data(), n, all.data() + r * n);
    }
    std::copy_n(all.data(), n, values.data());
    for (size_t r = 1; r < peers_.size(); ++r) {
      const float* part = all.data() + r * n;
      for (size_t i = 0; i < n; ++i)
        values[i] += part[i];
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    CHECK_EQ(all.size(), mine.size() * peers_.size());
    std::byte* own_place = all.data() + mine.size() * static_cast<size_t>(rank_);
    if (own_place != mine.data() && !mine.empty())
      std::memmove(own_place, mine.data(), mine.size());
    return Exchange(Operation::kAllGather, mine, all);
  }

  absl::Status Barrier() override { return Exchange(Operation::kBarrier, {}, {}); }

  void Abort() override {
    aborted_.store(true);
    for (const Socket& peer : peers_)
      if (peer.fd() >= 0) ::shutdown(peer.fd(), SHUT_RDWR);
  }

 private:
  struct Transfer {
    int fd = -1;
    size_t rank = 0;
    MessageHeader header_in;
    std::byte* in = nullptr;
    size_t sent = 0;  // of header + payload
    size_t received = 0;
  };

  // Sends header + `mine` to every peer and receives theirs into all[rank * mine.size()...].
  absl::Status Exchange(Operation operation,
                        std::span<const std::byte> mine,
                        std::span<std::byte> all) {
    if (!failure_.ok()) return failure_;
    failure_ = TryExchange(operation, mine, all);
    if (!failure_.ok()) Abort();
    return failure_;
  }

  absl::Status TryExchange(Operation operation,
                           std::span<const std::byte> mine,
                           std::span<std::byte> all) {
    const auto start = Clock::now();
    const auto deadline = start + std::chrono::milliseconds(timeout_ms_);
    MessageHeader header;
    header.sequence = ++sequence_;
    header.bytes = mine.size();
    header.operation = operation;
    header.rank = static_cast<uint32_t>(rank_);
    const size_t total = sizeof(header) + mine.size();
    transfers_.clear();
    for (size_t r = 0; r < peers_.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      Transfer transfer;
      transfer.fd = peers_[r].fd();
      transfer.rank = r;
      transfer.in = all.empty() ? nullptr : all.data() + r * mine.size();
      transfers_.push_back(transfer);
    }
    while (true) {
      bool done = true;
      bool progress = false;
      for (Transfer& t : transfers_) {
        if (t.sent < total) RETURN_IF_ERROR(Send(t, header, mine, progress));
        if (t.received < total) RETURN_IF_ERROR(Receive(t, header, mine.size(), progress));
        done = done && t.sent == total && t.received == total;
      }
      if (done) return absl::OkStatus();
      if (progress) continue;
      if (aborted_.load(std::memory_order_relaxed))
        return absl::UnavailableError("communicator aborted");
      const auto now = Clock::now();
      if (now >= deadline) return Silent(total);
      if (now - start < kSpin) {
        ::sched_yield();
        continue;
      }
      WaitForSockets(total, deadline);
    }
  }

  absl::Status Silent(size_t total) const {
    std::vector<size_t> silent;
    for (const Transfer& t : transfers_)
      if (t.received < total) silent.push_back(t.rank);
    return absl::DeadlineExceededError(absl::StrCat("rank ", absl::StrJoin(silent, ", "),
                                                    " did not answer within ", timeout_ms_,
                                                    " ms (step ", sequence_, ")"));
  }

  void WaitForSockets(size_t total, Clock::time_point deadline) {
    waits_.clear();
    for (const Transfer& t : transfers_) {
      short events = 0;
      if (t.sent < total) events = POLLOUT;
      if (t.received < total) events = static_cast<short>(events | POLLIN);
      if (events != 0) waits_.push_back({t.fd, events, 0});
    }
    // Wakes at least every 100 ms to see Abort even where shutdown does not wake a poll.
    ::poll(waits_.data(), waits_.size(), std::min(100, 1 + MillisecondsLeft(deadline)));
  }

  absl::Status Lost(const Transfer& t, const std::string& why) const {
    if (aborted_.load()) return absl::UnavailableError("communicator aborted");
    return absl::UnavailableError(absl::StrCat("lost rank ", t.rank, ": ", why));
  }

  absl::Status Send(Transfer& t,
                    const MessageHeader& header,
                    std::span<const std::byte> mine,
                    bool& progress) {
    std::array<iovec, 2> parts{};
    size_t num_parts = 0;
    if (t.sent < sizeof(header)) {
      auto* bytes = const_cast<char*>(reinterpret_cast<const char*>(&header));
      parts[num_parts++] = {bytes + t.sent, sizeof(header) - t.sent};
    }
    const size_t payload_sent = t.sent < sizeof(header) ? 0 : t.sent - sizeof(header);
    if (payload_sent < mine.size())
      parts[num_parts++] = {const_cast<std::byte*>(mine.data()) + payload_sent,
                            mine.size() - payload_sent};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = num_parts;
    const ssize_t n = ::sendmsg(t.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EAGAIN || errno == EINTR) return absl::OkStatus();
      return Lost(t, ErrnoText());
    }
    t.sent += static_cast<size_t>(n);
    progress = true;
    return absl::OkStatus();
  }

  absl::Status Receive(Transfer& t, const MessageHeader& mine, size_t payload, bool& progress) {
    const bool in_header = t.received < sizeof(MessageHeader);
    char* to = in_header ? reinterpret_cast<char*>(&t.header_in) + t.received
                         : reinterpret_cast<char*>(t.in) + (t.received - sizeof(MessageHeader));
    const size_t want = in_header ? sizeof(MessageHeader) - t.received
                                  : sizeof(MessageHeader) + payload - t.received;
    const ssize_t n = ::recv(t.fd, to, want, MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EAGAIN || errno == EINTR) return absl::OkStatus();
      return Lost(t, ErrnoText());
    }
    if (n == 0) return Lost(t, "connection closed by the peer");
    t.received += static_cast<size_t>(n);
    progress = true;
    if (!in_header || t.received < sizeof(MessageHeader)) return absl::OkStatus();
    const MessageHeader& theirs = t.header_in;
    if (theirs.sequence == mine.sequence && theirs.bytes == mine.bytes &&
        theirs.operation == mine.operation && theirs.rank == t.rank)
      return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("ranks disagree: rank ", rank_, " is at call ", mine.sequence, ", operation ",
                     static_cast<uint32_t>(mine.operation), ", ", mine.bytes, " bytes; rank ",
                     t.rank, " at call ", theirs.sequence, ", operation ",
                     static_cast<uint32_t>(theirs.operation), ", ", theirs.bytes, " bytes"));
  }

  const std::vector<Socket> peers_;  // by rank; the own one is empty
  const int rank_;
  const int64_t timeout_ms_;
  uint64_t sequence_ = 0;
  absl::Status failure_;
  std::atomic<bool> aborted_{false};
  std::vector<Transfer> transfers_;
  std::vector<pollfd> waits_;
  std::vector<float> received_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TcpListener>> TcpListener::Bind(const std::string& host) {
  AddressList list;
  RETURN_IF_ERROR(Resolve(host, "0", list));
  Socket socket(::socket(list.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) return absl::UnavailableError(absl::StrCat("socket: ", ErrnoText()));
  if (::bind(socket.fd(), list.first->ai_addr, list.first->ai_addrlen) != 0 ||
      ::listen(socket.fd(), 64) != 0)
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", host, " for the other ranks: ", ErrnoText()));
  Prepare(socket.fd());
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    return absl::UnavailableError(absl::StrCat("getsockname: ", ErrnoText()));
  const uint16_t port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                        : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  const bool brackets = host.find(':') != std::string::npos && host.front() != '[';
  std::string address =
      brackets ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
  const int fd = ::fcntl(socket.fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("dup: ", ErrnoText()));
  return std::unique_ptr<TcpListener>(new TcpListener(fd, std::move(address)));
}

TcpListener::~TcpListener() {
  ::close(fd_);
}

absl::StatusOr<std::unique_ptr<Communicator>> ConnectTcpGroup(const TcpListener& listener,
                                                              const TcpGroup& group) {
  const int world = static_cast<int>(group.addresses.size());
  if (group.rank < 0 || group.rank >= world)
    return absl::InvalidArgumentError(absl::StrCat("rank ", group.rank, " of ", world));
  if (group.secret.size() > std::tuple_size_v<decltype(Hello::secret)>)
    return absl::InvalidArgumentError("the group's secret is longer than 64 bytes");
  ASSIGN_OR_RETURN(std::vector<Socket> peers, Joiner(listener, group).Run());
  auto communicator =
      std::make_unique<TcpCommunicator>(std::move(peers), group.rank, group.call_timeout_ms);
  RETURN_IF_ERROR(communicator->Barrier());
  return communicator;
}

}  // namespace twinspark
