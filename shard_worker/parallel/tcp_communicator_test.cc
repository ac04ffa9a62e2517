// Ranks over loopback sockets, in threads and in child processes: right sums and gathers, peers
// that are killed, stopped, of another epoch or secret, out of step; strangers during set-up;
// abort. Child processes are ended by the pids that this test got from fork.
#include "shard_worker/parallel/tcp_communicator.h"

#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPatienceMs = 60000;  // for what must succeed, also on a busy machine

struct Ends {
  std::vector<std::unique_ptr<TcpListener>> listeners;
  TcpGroup group;

  explicit Ends(int world) {
    for (int rank = 0; rank < world; ++rank) {
      auto listener = TcpListener::Bind("127.0.0.1");
      EXPECT_TRUE(listener.ok()) << listener.status();
      group.addresses.push_back((*listener)->address());
      listeners.push_back(*std::move(listener));
    }
    group.epoch = 5;
    group.secret = "secret of this test";
    group.connect_timeout_ms = kPatienceMs;
    group.call_timeout_ms = kPatienceMs;
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Join(int rank) {
    TcpGroup mine = group;
    mine.rank = rank;
    return ConnectTcpGroup(*listeners[static_cast<size_t>(rank)], mine);
  }
};

// Runs fn(communicator) on a thread per rank.
void OnAll(Ends& ends, const std::function<void(Communicator&)>& fn) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ends.listeners.size(); ++rank)
    threads.emplace_back([&, rank] {
      auto communicator = ends.Join(static_cast<int>(rank));
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      fn(**communicator);
    });
  for (std::thread& thread : threads)
    thread.join();
}

int Port(const std::string& address) {
  return std::atoi(address.substr(address.rfind(':') + 1).c_str());
}

int ConnectRaw(const std::string& address) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(Port(address)));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  return fd;
}

// A child process that joins as rank 1, runs one barrier and then sleeps.
pid_t ForkRankOne(Ends& ends) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  auto communicator = ends.Join(1);
  if (!communicator.ok() || !(*communicator)->Barrier().ok()) ::_exit(1);
  while (true)
    ::pause();
}

TEST(TcpCommunicator, SumsAndGathersInRankOrder) {
  const uint64_t seed = TestSeed(11);
  for (const int world : {1, 2, 3}) {
    Ends ends(world);
    for (const size_t n : {size_t{1}, size_t{1000}, size_t{300000}}) {
      std::vector<std::vector<float>> values(static_cast<size_t>(world));
      SeededRng rng(seed);
      for (auto& list : values)
        for (size_t i = 0; i < n; ++i)
          list.push_back(rng.Float(-1e4f, 1e4f));
      std::vector<float> want = values[0];
      for (int r = 1; r < world; ++r)
        for (size_t i = 0; i < n; ++i)
          want[i] += values[static_cast<size_t>(r)][i];
      OnAll(ends, [&](Communicator& rank) {
        std::vector<float>& mine = values[static_cast<size_t>(rank.rank())];
        std::vector<std::byte> all(static_cast<size_t>(world) * 8);
        const auto own = std::span(all).subspan(8 * static_cast<size_t>(rank.rank()), 8);
        for (std::byte& b : own)
          b = static_cast<std::byte>(rank.rank() + 1);
        ASSERT_TRUE(rank.AllReduceSum(mine).ok());
        ASSERT_TRUE(rank.AllGather(own, all).ok());
        ASSERT_TRUE(rank.Barrier().ok());
        for (size_t i = 0; i < all.size(); ++i)
          ASSERT_EQ(static_cast<size_t>(all[i]), i / 8 + 1);
      });
      for (const auto& list : values)
        ASSERT_EQ(std::memcmp(list.data(), want.data(), n * sizeof(float)), 0) << world << " " << n;
    }
  }
}

TEST(TcpCommunicator, AKilledPeerIsSeenAtOnce) {
  Ends ends(2);
  const pid_t child = ForkRankOne(ends);
  auto communicator = ends.Join(0);
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  ASSERT_TRUE((*communicator)->Barrier().ok());
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  std::vector<float> values(1000);
  const absl::Status status = (*communicator)->AllReduceSum(values);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  EXPECT_FALSE((*communicator)->Barrier().ok());  // broken for good
}

TEST(TcpCommunicator, AStoppedPeerIsADeadline) {
  Ends ends(2);
  ends.group.call_timeout_ms = 1500;
  const pid_t child = ForkRankOne(ends);
  auto communicator = ends.Join(0);
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  const absl::Status met = (*communicator)->Barrier();
  ::kill(child, SIGSTOP);
  const absl::Status status = met.ok() ? (*communicator)->Barrier() : met;
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST(TcpCommunicator, RanksOutOfStepAreAnError) {
  Ends ends(2);
  OnAll(ends, [](Communicator& rank) {
    std::vector<float> values(16);
    const absl::Status status = rank.rank() == 0 ? rank.AllReduceSum(values) : rank.Barrier();
    // One rank sees the disagreement, the other that or the closed connection.
    EXPECT_TRUE(status.code() == absl::StatusCode::kInternal ||
                status.code() == absl::StatusCode::kUnavailable)
        << status;
  });
}

TEST(TcpCommunicator, StrangersDuringSetUpAreDropped) {
  Ends ends(2);
  // Connected before the peer: one that says nothing, one that talks nonsense, one that leaves.
  const int silent = ConnectRaw(ends.group.addresses[0]);
  const int noisy = ConnectRaw(ends.group.addresses[0]);
  const std::string nonsense(200, 'x');
  ASSERT_EQ(::send(noisy, nonsense.data(), nonsense.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(nonsense.size()));
  ::close(ConnectRaw(ends.group.addresses[0]));
  OnAll(ends, [](Communicator& rank) { EXPECT_TRUE(rank.Barrier().ok()); });
  ::close(silent);
  ::close(noisy);
}

TEST(TcpCommunicator, AnotherEpochOrSecretIsNotLetIn) {
  for (const bool other_epoch : {true, false}) {
    Ends ends(2);
    ends.group.connect_timeout_ms = 400;
    TcpGroup other = ends.group;
    other.rank = 1;
    if (other_epoch) ++other.epoch;
    if (!other_epoch) other.secret = "guessed";
    absl::Status peer;
    std::thread thread([&] { peer = ConnectTcpGroup(*ends.listeners[1], other).status(); });
    const absl::Status status = ends.Join(0).status();
    thread.join();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
    EXPECT_FALSE(peer.ok());
  }
}

TEST(TcpCommunicator, AbortEndsAWaitingCallOnBothSides) {
  Ends ends(2);
  std::vector<absl::Status> statuses(2);
  OnAll(ends, [&](Communicator& rank) {
    std::thread abort;
    if (rank.rank() == 0) {
      abort = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        rank.Abort();
      });
      statuses[0] = rank.Barrier();
      abort.join();
    } else {
      // Comes only after the other side gave up. What that one had already sent still counts.
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      statuses[1] = rank.Barrier();
      if (statuses[1].ok()) statuses[1] = rank.Barrier();
    }
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kUnavailable) << statuses[0];
  EXPECT_FALSE(statuses[1].ok());
}

TEST(TcpCommunicator, AddressesAreChecked) {
  Ends ends(2);
  ends.group.addresses[0] = "no port here";
  EXPECT_EQ(ends.Join(1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace twinspark
