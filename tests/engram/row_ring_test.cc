// The row ring between two processes: a forked child runs the data plane of the service, this
// process is the worker. Rows equal the reference; a killed, stopped or unreadable service is an
// error within its bound; a client that breaks the protocol loses its attachment and harms nobody.
#include "proto/row_ring.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/limits.h"
#include "common/testing/seeded_rng.h"
#include "engram_service/io/inline_reader.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/shm/row_server.h"
#include "shard_worker/engram/ring_client.h"

namespace twinspark {
namespace {

using engram::LocalRows;
using engram::SequenceView;
using engram::TableSet;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// Scaled like the limits of the code under test: sanitizers are slow.
constexpr int64_t kScale = limits::kTimeScale;

int64_t MsSince(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

// A reader whose reads never finish, for waits that must end by themselves.
class NeverReader : public engram::BlockReader {
 public:
  std::string name() const override { return "never"; }
  size_t depth() const override { return 16; }
  size_t in_flight() const override { return stuck_; }
  void Submit(const engram::BlockRead&) override { ++stuck_; }
  void Flush() override {}
  size_t Reap(std::span<engram::BlockDone> out, bool wait) override {
    // At shutdown everything comes back as an error.
    if (!wait) return 0;
    const size_t count = std::min(out.size(), stuck_);
    for (size_t i = 0; i < count; ++i)
      out[i] = {i, EIO, 0, {}, 0};
    stuck_ = 0;
    return count;
  }
  void Release(uint32_t) override {}

 private:
  size_t stuck_ = 0;
};

// The service in a child process, forked before this process starts any thread.
class ServiceProcess {
 public:
  explicit ServiceProcess(const TableSet& tables, bool never_reads = false, size_t cache_bytes = 0)
      : socket_("@twinspark-test-" + std::to_string(getpid()) + "-" +
                std::to_string(++num_started_)) {
    int ready[2];
    if (pipe(ready) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing stays behind when this test is killed
      std::unique_ptr<engram::BlockReader> reader = std::make_unique<engram::InlineReader>(64);
      if (never_reads) reader = std::make_unique<NeverReader>();
      engram::RowServerOptions options;
      options.socket = socket_;
      std::unique_ptr<engram::RowCache> cache;
      if (cache_bytes > 0) {
        const auto heads = static_cast<uint32_t>(tables.columns().size() / 3);
        auto made = engram::RowCache::Create(
            {heads, 2, tables.table(0).row_weight_bytes(), tables.table(0).row_scale_bytes()},
            cache_bytes);
        if (!made.ok()) _exit(1);
        cache = *std::move(made);
      }
      auto server = engram::RowServer::Start(tables, std::move(reader), std::move(cache), options);
      const char ok = server.ok() ? 1 : 0;
      if (write(ready[1], &ok, 1) != 1) _exit(1);
      for (;;)
        pause();
    }
    char ok = 0;
    close(ready[1]);
    if (read(ready[0], &ok, 1) != 1 || ok != 1) ADD_FAILURE() << "service did not start";
    close(ready[0]);
  }
  ~ServiceProcess() {
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void Signal(int number) const { kill(pid_, number); }
  // Returns once the process stands still.
  void Stop() const {
    Signal(SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  const std::string& socket() const { return socket_; }

 private:
  static int num_started_;
  std::string socket_;
  pid_t pid_ = 0;
};
int ServiceProcess::num_started_ = 0;

RowAttachRequest AttachRequest(const TableSet& tables, uint32_t round_rows, uint32_t chunk_rows) {
  RowAttachRequest request = {};
  request.max_round_rows = round_rows;
  request.max_chunk_rows = chunk_rows;
  request.rank = static_cast<uint32_t>(tables.options().rank);
  request.world = static_cast<uint32_t>(tables.options().world);
  request.num_layers = static_cast<uint32_t>(tables.num_layers());
  request.num_columns = static_cast<uint32_t>(tables.columns().size());
  request.row_weight_bytes = tables.table(0).row_weight_bytes();
  memcpy(request.model_digest, tables.model_digest().data(), 32);
  return request;
}

class RowRingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tables = TableSet::Open({TWINSPARK_DEMO_MODEL, "", 1, 2});
    ASSERT_TRUE(tables.ok()) << tables.status();
    tables_ = *std::move(tables);
    reference_ = LocalRows::Over(*tables_);
  }

  std::unique_ptr<RingClient> Attach(const std::string& socket, RingClientLimits limits = {}) {
    auto client = RingClient::Attach(socket, AttachRequest(*tables_, 6, 300), limits);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  // Rows of both layers equal those that the engine gives in this process.
  void ExpectRightRows(RingClient& client, std::span<const RowRange> ranges, RowClass row_class) {
    std::vector<SequenceView> views;
    std::vector<std::vector<int32_t>> ids(ranges.size());
    size_t tokens = 0;
    for (size_t i = 0; i < ranges.size(); ++i) {
      ids[i].assign(ranges[i].history.begin(), ranges[i].history.end());
      ids[i].insert(ids[i].end(), ranges[i].ids.begin(), ranges[i].ids.end());
      views.push_back({static_cast<uint32_t>(ranges[i].first_position),
                       static_cast<uint32_t>(ranges[i].history.size()), ids[i], ranges[i].dead});
      tokens += ranges[i].ids.size();
    }
    ASSERT_TRUE(reference_->Gather(views).ok());
    ASSERT_TRUE(client.Submit(ranges, row_class).ok());
    const size_t columns = tables_->columns().size();
    for (int layer = 0; layer < tables_->num_layers(); ++layer) {
      const auto rows = client.Wait(layer);
      ASSERT_TRUE(rows.ok()) << rows.status();
      const size_t weight_bytes = tokens * columns * tables_->table(layer).row_weight_bytes();
      const size_t scale_bytes = tokens * columns * tables_->table(layer).row_scale_bytes();
      ASSERT_EQ(reference_->weights(layer).size(), weight_bytes);
      ASSERT_EQ(memcmp(rows->values, reference_->weights(layer).data(), weight_bytes), 0);
      ASSERT_EQ(memcmp(rows->scales, reference_->scales(layer).data(), scale_bytes), 0);
    }
  }

  std::unique_ptr<TableSet> tables_;
  std::unique_ptr<LocalRows> reference_;
};

struct RandomRanges {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<uint8_t>> dead;
  std::vector<RowRange> ranges;
};

RandomRanges MakeRanges(SeededRng& rng, int sequences, int max_tokens) {
  RandomRanges out;
  for (int s = 0; s < sequences; ++s) {
    const int64_t position = rng.OneIn(3) ? rng.Int(0, 4) : rng.Int(0, 100000);
    const int64_t history = std::min<int64_t>(position, 3);
    std::vector<int32_t> ids;
    std::vector<uint8_t> dead;
    const int64_t count = history + rng.Int(1, max_tokens);
    for (int64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<int32_t>(rng.Int(0, 4095)));
      dead.push_back(rng.OneIn(9) ? 1 : 0);
    }
    out.ids.push_back(std::move(ids));
    out.dead.push_back(std::move(dead));
    RowRange range;
    range.slot = s;
    range.first_position = position;
    range.history = std::span(out.ids.back()).first(static_cast<size_t>(history));
    range.ids = std::span(out.ids.back()).subspan(static_cast<size_t>(history));
    if (rng.OneIn(2)) range.dead = out.dead.back();
    out.ranges.push_back(range);
  }
  return out;
}

// Several hundred KiB of requests go round the 1 MiB ring more than once.
TEST_F(RowRingTest, RowsEqualTheReference) {
  SeededRng rng(TestSeed(21));
  const ServiceProcess service(*tables_);
  const auto client = Attach(service.socket());
  ASSERT_NE(client, nullptr);
  for (int i = 0; i < 1500; ++i) {
    const bool bulk = rng.OneIn(2);
    const RandomRanges random =
        MakeRanges(rng, bulk ? 1 : static_cast<int>(rng.Int(1, 3)), bulk ? 300 : 2);
    ExpectRightRows(*client, random.ranges, bulk ? RowClass::kBulk : RowClass::kDecode);
    // Small tables without a cache: the service said that a hint is of no use.
    if (rng.OneIn(4)) {
      EXPECT_FALSE(client->Hint(random.ranges, RowClass::kAhead));
    }
    if (HasFatalFailure()) return;
  }
}

// Hints before, between and instead of requests, of any class, right and wrong ones, many more than
// the service takes: every row is still the reference's, and none of them costs a request its
// place.
TEST_F(RowRingTest, HintsChangeNoRow) {
  SeededRng rng(TestSeed(24));
  const ServiceProcess service(*tables_, /*never_reads=*/false, /*cache_bytes=*/size_t{4} << 20);
  const auto client = Attach(service.socket());
  ASSERT_NE(client, nullptr);
  int given = 0;
  for (int i = 0; i < 600; ++i) {
    const bool bulk = rng.OneIn(2);
    const RandomRanges random =
        MakeRanges(rng, bulk ? 1 : static_cast<int>(rng.Int(1, 3)), bulk ? 300 : 2);
    const RandomRanges other = MakeRanges(rng, 1, 300);
    for (int64_t hints = rng.Int(0, 12); hints > 0; --hints) {
      const RandomRanges& hinted = rng.OneIn(2) ? random : other;
      given += client->Hint(hinted.ranges, rng.OneIn(2) ? RowClass::kBulk : RowClass::kAhead);
    }
    ExpectRightRows(*client, random.ranges, bulk ? RowClass::kBulk : RowClass::kDecode);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(given, 1000);
  // Too many tokens for a slab, or none at all, never get into the ring.
  const std::vector<int32_t> many(301, 5);
  RowRange large;
  large.ids = many;
  EXPECT_FALSE(client->Hint(std::span(&large, 1), RowClass::kBulk));
  EXPECT_FALSE(client->Hint({}, RowClass::kBulk));
}

// A service that takes nothing: hints fill at most half of the ring, a request still fits.
TEST_F(RowRingTest, HintsLeaveRoomForRequests) {
  const ServiceProcess service(*tables_, /*never_reads=*/true, /*cache_bytes=*/size_t{4} << 20);
  const auto client = Attach(service.socket());
  ASSERT_NE(client, nullptr);
  service.Stop();
  SeededRng rng(6);
  const RandomRanges random = MakeRanges(rng, 1, 300);
  int given = 0;
  while (given < 100000 && client->Hint(random.ranges, RowClass::kAhead))
    ++given;
  EXPECT_GT(given, 100);
  EXPECT_LT(given, 100000);
  EXPECT_TRUE(client->Submit(random.ranges, RowClass::kBulk).ok());
  service.Signal(SIGCONT);
}

TEST_F(RowRingTest, TwoClientsAtOnce) {
  const ServiceProcess service(*tables_);
  const auto first = Attach(service.socket());
  const auto second = Attach(service.socket());
  ASSERT_TRUE(first != nullptr && second != nullptr);
  SeededRng rng(TestSeed(22));
  for (int i = 0; i < 50; ++i) {
    const RandomRanges a = MakeRanges(rng, 2, 3);
    const RandomRanges b = MakeRanges(rng, 1, 100);
    ExpectRightRows(*first, a.ranges, RowClass::kDecode);
    ExpectRightRows(*second, b.ranges, RowClass::kBulk);
  }
}

// A service that is killed is noticed at once; one that is stopped within its heartbeat limit, well
// below the row wait; and rows that do not come within the row wait.
TEST_F(RowRingTest, KilledServiceIsAnErrorAtOnce) {
  const ServiceProcess service(*tables_, /*never_reads=*/true);
  const auto client = Attach(service.socket());
  ASSERT_NE(client, nullptr);
  SeededRng rng(1);
  ASSERT_TRUE(client->Submit(MakeRanges(rng, 1, 1).ranges, RowClass::kDecode).ok());
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    service.Signal(SIGKILL);
  });
  const auto begin = Clock::now();
  const auto rows = client->Wait(0);
  EXPECT_LT(MsSince(begin), 600 * kScale);
  killer.join();
  EXPECT_EQ(rows.status().code(), absl::StatusCode::kUnavailable) << rows.status();
  EXPECT_THAT(rows.status().message(), HasSubstr("ended the attachment"));
  // The attachment stays ended.
  EXPECT_FALSE(client->Submit(MakeRanges(rng, 1, 1).ranges, RowClass::kDecode).ok());
}

TEST_F(RowRingTest, StoppedServiceIsAnErrorWithinTheHeartbeatLimit) {
  const ServiceProcess service(*tables_);
  const auto client = Attach(service.socket());
  ASSERT_NE(client, nullptr);
  SeededRng rng(2);
  const RandomRanges random = MakeRanges(rng, 1, 3);
  ExpectRightRows(*client, random.ranges, RowClass::kDecode);
  service.Stop();
  // Whatever was already on its way may still come; a stopped service must not be trusted to
  // answer.
  const auto begin = Clock::now();
  absl::Status status;
  for (int i = 0; i < 3 && status.ok(); ++i) {
    status = client->Submit(random.ranges, RowClass::kDecode);
    if (status.ok()) status = client->Wait(1).status();
  }
  EXPECT_LT(MsSince(begin), 900 * kScale);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(status.message(), HasSubstr("stands still"));
  service.Signal(SIGCONT);
}

TEST_F(RowRingTest, RowsThatDoNotComeEndTheWait) {
  const ServiceProcess service(*tables_, /*never_reads=*/true);
  RingClientLimits limits;
  limits.row_wait_ns = 300'000'000 * kScale;
  const auto client = Attach(service.socket(), limits);
  ASSERT_NE(client, nullptr);
  SeededRng rng(3);
  ASSERT_TRUE(client->Submit(MakeRanges(rng, 1, 3).ranges, RowClass::kDecode).ok());
  const auto begin = Clock::now();
  const auto rows = client->Wait(1);
  EXPECT_EQ(rows.status().code(), absl::StatusCode::kDeadlineExceeded) << rows.status();
  EXPECT_THAT(rows.status().message(), HasSubstr("layer index 1"));
  EXPECT_GE(MsSince(begin), 250 * kScale);
  EXPECT_LT(MsSince(begin), 800 * kScale);
}

TEST_F(RowRingTest, ARestartedServiceIsUsedByTheNextAttachment) {
  SeededRng rng(4);
  const RandomRanges random = MakeRanges(rng, 2, 3);
  for (int i = 0; i < 3; ++i) {
    const ServiceProcess service(*tables_);
    const auto client = Attach(service.socket());
    ASSERT_NE(client, nullptr);
    ExpectRightRows(*client, random.ranges, RowClass::kDecode);
    service.Signal(SIGKILL);
  }
  EXPECT_EQ(RingClient::Attach("@twinspark-test-nobody", AttachRequest(*tables_, 6, 300), {})
                .status()
                .code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(RowRingTest, AnotherModelOrRankOrLimitIsRefusedWithBothValues) {
  const ServiceProcess service(*tables_);
  const auto refusal = [&](const std::function<void(RowAttachRequest&)>& change) {
    RowAttachRequest request = AttachRequest(*tables_, 6, 300);
    change(request);
    const auto client = RingClient::Attach(service.socket(), request, {});
    EXPECT_EQ(client.status().code(), absl::StatusCode::kFailedPrecondition) << client.status();
    return std::string(client.status().message());
  };
  EXPECT_THAT(refusal([](RowAttachRequest& r) { r.model_digest[0] ^= 1; }),
              HasSubstr("model digest"));
  EXPECT_THAT(refusal([](RowAttachRequest& r) { r.rank = 0; }), HasSubstr("rank 0 of 2"));
  EXPECT_THAT(refusal([](RowAttachRequest& r) { r.num_columns = 12; }), HasSubstr("12 columns"));
  EXPECT_THAT(refusal([](RowAttachRequest& r) { r.max_chunk_rows = 1u << 30; }),
              HasSubstr("chunk rows"));
  EXPECT_THAT(refusal([](RowAttachRequest& r) { r.max_round_rows = 0; }), HasSubstr("round rows"));
}

TEST_F(RowRingTest, MalformedRequestsFailAloneAndATooLargeStepIsRefusedHere) {
  const ServiceProcess service(*tables_);
  SeededRng rng(5);
  const std::vector<int32_t> outside = {1, 4096};
  const std::vector<int32_t> fine = {1, 2, 3};
  RowRange bad_id;
  bad_id.ids = outside;
  RowRange bad_history;
  bad_history.first_position = 7;
  bad_history.history = std::span(fine).first(2);
  bad_history.ids = fine;
  for (const RowRange& range : {bad_id, bad_history}) {
    const auto client = Attach(service.socket());
    ASSERT_NE(client, nullptr);
    ASSERT_TRUE(client->Submit(std::span(&range, 1), RowClass::kDecode).ok());
    EXPECT_EQ(client->Wait(0).status().code(), absl::StatusCode::kInternal);
  }
  const auto client = Attach(service.socket());
  const std::vector<int32_t> many(301, 5);
  RowRange large;
  large.ids = many;
  EXPECT_EQ(client->Submit(std::span(&large, 1), RowClass::kBulk).code(),
            absl::StatusCode::kInvalidArgument);
  ExpectRightRows(*client, MakeRanges(rng, 1, 3).ranges, RowClass::kDecode);
}

// A client without our library: garbage in the handshake and in the ring.
class RawClient {
 public:
  explicit RawClient(const std::string& socket_name) {
    fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, socket_name.data(), socket_name.size());
    address.sun_path[0] = '\0';
    const auto length =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_name.size());
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), length), 0);
  }
  ~RawClient() { close(fd_); }
  void Send(const void* data, size_t bytes) const {
    EXPECT_EQ(send(fd_, data, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
  }
  // True when the service closes the connection within five seconds.
  bool Closed() const {
    const timeval timeout = {5 * kScale, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    char byte[512];
    ssize_t n;
    while ((n = recv(fd_, byte, sizeof(byte), 0)) > 0) {
    }
    return n == 0 || errno == ECONNRESET;
  }

 private:
  int fd_ = -1;
};

TEST_F(RowRingTest, GarbageHandshakesAreDroppedAndOthersGoOn) {
  const ServiceProcess service(*tables_);
  const auto good = Attach(service.socket());
  ASSERT_NE(good, nullptr);
  SeededRng rng(TestSeed(23));
  for (const size_t bytes : {size_t{1}, sizeof(RowAttachRequest) - 1, sizeof(RowAttachRequest),
                             sizeof(RowAttachRequest) + 1, size_t{4096}}) {
    std::vector<uint8_t> garbage(bytes);
    for (auto& byte : garbage)
      byte = static_cast<uint8_t>(rng.Next());
    const RawClient raw(service.socket());
    raw.Send(garbage.data(), garbage.size());
    EXPECT_TRUE(raw.Closed()) << bytes;
    ExpectRightRows(*good, MakeRanges(rng, 1, 3).ranges, RowClass::kDecode);
  }
}

}  // namespace
}  // namespace twinspark
