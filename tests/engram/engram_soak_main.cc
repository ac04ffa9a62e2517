// engram_soak --seconds N [--clients K] [--seed S]: one service process, clients that attach, ask
// for rows, check every row against the engine, and leave or are killed at random moments. At the
// end the service must hold as many descriptors and as much memory as after its first clients, no
// slab, and every read buffer must be back. Exit 0 only if no row was wrong and nothing leaked.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/numbers.h"

#include "common/check.h"
#include "common/exit_codes.h"
#include "common/testing/seeded_rng.h"
#include "engram_service/io/pread_pool.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/read/row_cache.h"
#include "engram_service/shm/row_server.h"
#include "shard_worker/engram/ring_client.h"

namespace twinspark::engram {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kExitGood = 0;
constexpr int kExitWrongRows = 3;
constexpr int kExitServiceLost = 4;

RowAttachRequest AttachRequest(const TableSet& tables, SeededRng& rng) {
  RowAttachRequest request = {};
  request.max_round_rows = static_cast<uint32_t>(rng.Int(1, 48));
  request.max_chunk_rows = request.max_round_rows + static_cast<uint32_t>(rng.Int(0, 600));
  request.rank = static_cast<uint32_t>(tables.options().rank);
  request.world = static_cast<uint32_t>(tables.options().world);
  request.num_layers = static_cast<uint32_t>(tables.num_layers());
  request.num_columns = static_cast<uint32_t>(tables.columns().size());
  request.row_weight_bytes = tables.table(0).row_weight_bytes();
  memcpy(request.model_digest, tables.model_digest().data(), 32);
  return request;
}

int Lost(const absl::Status& why) {
  fprintf(stderr, "client: %s\n", std::string(why.message()).c_str());
  return kExitServiceLost;
}

// Asks and compares until it has had enough or is killed.
int RunClient(const TableSet& tables, const std::string& socket, uint64_t seed) {
  SeededRng rng(seed);
  const RowAttachRequest request = AttachRequest(tables, rng);
  // A full house refuses by closing; the parent starts another client later.
  const auto client = RingClient::Attach(socket, request, {});
  if (!client.ok()) return kExitGood;
  const auto reference = LocalRows::Over(tables);
  for (int64_t round = rng.Int(1, 200); round > 0; --round) {
    std::vector<int32_t> ids(static_cast<size_t>(rng.Int(1, request.max_chunk_rows)));
    for (auto& id : ids)
      id = static_cast<int32_t>(rng.Int(0, rng.OneIn(2) ? 50 : 4095));
    RowRange range;
    range.ids = ids;
    if (rng.OneIn(3)) {
      (*client)->Hint(std::span(&range, 1), rng.OneIn(2) ? RowClass::kBulk : RowClass::kAhead);
    }
    const absl::Status asked = (*client)->Submit(std::span(&range, 1), RowClass::kBulk);
    if (!asked.ok()) return Lost(asked);
    if (rng.OneIn(20)) return kExitGood;  // leaves with a request on its way
    const SequenceView view{0, 0, ids, {}};
    CHECK(reference->Gather(std::span(&view, 1)).ok());
    for (int layer = 0; layer < tables.num_layers(); ++layer) {
      const auto rows = (*client)->Wait(layer);
      if (!rows.ok()) return Lost(rows.status());
      const auto weights = reference->weights(layer);
      const auto scales = reference->scales(layer);
      if (memcmp(rows->values, weights.data(), weights.size()) != 0 ||
          memcmp(rows->scales, scales.data(), scales.size()) != 0) {
        return kExitWrongRows;
      }
    }
  }
  return kExitGood;
}

size_t OpenDescriptors(pid_t pid) {
  size_t count = 0;
  DIR* dir = opendir(("/proc/" + std::to_string(pid) + "/fd").c_str());
  if (dir == nullptr) return 0;
  while (readdir(dir) != nullptr)
    ++count;
  closedir(dir);
  return count;
}

// Private and shared memory: slabs that are not unmapped count as the latter.
uint64_t ResidentKib(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::string word;
  uint64_t total = 0;
  while (file >> word) {
    if (word != "RssAnon:" && word != "RssShmem:") continue;
    uint64_t kib = 0;
    file >> kib;
    total += kib;
  }
  return total;
}

// Counts the read buffers that are out; reads come from threads, so that many are on their way when
// a client dies.
class CountedReader : public BlockReader {
 public:
  CountedReader(std::unique_ptr<BlockReader> inner, int64_t& out)
      : inner_(std::move(inner)), out_(out) {}
  std::string name() const override { return inner_->name(); }
  size_t depth() const override { return inner_->depth(); }
  size_t in_flight() const override { return inner_->in_flight(); }
  void Submit(const BlockRead& read) override {
    ++out_;
    inner_->Submit(read);
  }
  void Flush() override { inner_->Flush(); }
  size_t Reap(std::span<BlockDone> done, bool wait) override { return inner_->Reap(done, wait); }
  void Release(uint32_t buffer) override {
    --out_;
    inner_->Release(buffer);
  }
  int event_fd() const override { return inner_->event_fd(); }

 private:
  std::unique_ptr<BlockReader> inner_;
  int64_t& out_;
};

// Until SIGTERM; then everything the clients had must be back.
[[noreturn]] void RunService(std::unique_ptr<RowServer> server, const int64_t& buffers_out) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  int number = 0;
  sigwait(&signals, &number);
  const RowServerStats stats = server->stats();
  server.reset();
  printf("service: %llu hints, attachments %llu, slabs %llu bytes, read buffers out %lld\n",
         static_cast<unsigned long long>(stats.sessions.hints),
         static_cast<unsigned long long>(stats.attachments),
         static_cast<unsigned long long>(stats.slab_bytes), static_cast<long long>(buffers_out));
  fflush(stdout);
  _exit(stats.attachments == 0 && stats.slab_bytes == 0 && buffers_out == 0 ? 0 : 1);
}

pid_t StartService(const TableSet& tables, const std::string& socket) {
  int ready[2];
  CHECK_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid != 0) {
    char ok = 0;
    close(ready[1]);
    CHECK(read(ready[0], &ok, 1) == 1 && ok == 1) << "the service did not start";
    close(ready[0]);
    return pid;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // of all threads to come: RunService waits for it
  RowCacheShape shape = {2, 2, tables.table(0).row_weight_bytes(),
                         tables.table(0).row_scale_bytes()};
  auto cache = RowCache::Create(shape, size_t{1} << 20);
  CHECK(cache.ok()) << cache.status();
  RowServerOptions options;
  options.socket = socket;
  int64_t buffers_out = 0;
  auto reader = std::make_unique<CountedReader>(std::make_unique<PreadPool>(8, 64), buffers_out);
  auto server = RowServer::Start(tables, std::move(reader), *std::move(cache), options);
  const char ok = server.ok() ? 1 : 0;
  if (write(ready[1], &ok, 1) != 1 || ok == 0) _exit(1);
  RunService(*std::move(server), buffers_out);
}

struct Counts {
  int started = 0;
  int killed = 0;
  int wrong = 0;
  int lost = 0;
};

void Reap(pid_t pid, Counts& counts) {
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFSIGNALED(status)) ++counts.killed;
  if (!WIFEXITED(status)) return;
  counts.wrong += WEXITSTATUS(status) == kExitWrongRows ? 1 : 0;
  counts.lost += WEXITSTATUS(status) == kExitServiceLost ? 1 : 0;
}

// Clients for `seconds`, `parallel` at a time; each lives up to 200 ms before it is killed.
void Churn(const TableSet& tables,
           const std::string& socket,
           double seconds,
           int parallel,
           SeededRng& rng,
           Counts& counts) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    std::vector<pid_t> clients;
    for (int i = 0; i < parallel; ++i) {
      const uint64_t seed = rng.Next();
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(RunClient(tables, socket, seed));
      }
      clients.push_back(pid);
      ++counts.started;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(rng.Int(0, 200)));
    for (const pid_t pid : clients) {
      if (rng.OneIn(2)) kill(pid, SIGKILL);
      Reap(pid, counts);
    }
  }
}

int Run(double seconds, int parallel, uint64_t seed) {
  auto tables = TableSet::Open({TWINSPARK_DEMO_MODEL, "", 0, 2});
  CHECK(tables.ok()) << tables.status();
  const std::string socket = "@twinspark-soak-" + std::to_string(getpid());
  const pid_t service = StartService(**tables, socket);
  SeededRng rng(seed);
  Counts counts;
  Churn(**tables, socket, std::min(2.0, seconds / 4), parallel, rng, counts);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const size_t fds_before = OpenDescriptors(service);
  const uint64_t kib_before = ResidentKib(service);
  Churn(**tables, socket, seconds, parallel, rng, counts);
  // Every client is gone; a busy machine may need a while to let the service see it.
  const auto give_up = Clock::now() + std::chrono::seconds(30);
  while (OpenDescriptors(service) > fds_before && Clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const size_t fds_after = OpenDescriptors(service);
  const uint64_t kib_after = ResidentKib(service);
  const bool alive = waitpid(service, nullptr, WNOHANG) == 0;
  bool all_back = false;
  if (alive) {
    int status = 0;
    kill(service, SIGTERM);
    waitpid(service, &status, 0);
    all_back = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  printf(
      "seed %llu: %d clients, %d killed, %d wrong, %d lost the service; descriptors %zu > %zu, "
      "memory %llu > %llu KiB, service %s, slabs and buffers %s\n",
      static_cast<unsigned long long>(seed), counts.started, counts.killed, counts.wrong,
      counts.lost, fds_before, fds_after, static_cast<unsigned long long>(kib_before),
      static_cast<unsigned long long>(kib_after), alive ? "alive" : "dead",
      all_back ? "all back" : "missing");
#ifdef TWINSPARK_SANITIZER  // keeps what was freed, and a shadow of what was touched
  const bool flat = true;
#else
  const bool flat = kib_after <= kib_before + 4096;
#endif
  // A machine with far more to do than cores may be late now and then; that is an error the client
  // sees, not a wrong row.
  const bool good = alive && all_back && counts.wrong == 0 && counts.lost <= counts.started / 10 &&
                    counts.started > 0 && fds_after == fds_before && flat;
  return good ? 0 : 1;
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  double seconds = 10;
  int clients = 4;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--help") {
      std::puts("usage: engram_soak [--seconds N] [--clients N] [--seed N]");
      return 0;
    }
    const char* const value = i + 1 < argc ? argv[i + 1] : "";
    const bool taken = (flag == "--seconds" && absl::SimpleAtod(value, &seconds) && seconds > 0) ||
                       (flag == "--clients" && absl::SimpleAtoi(value, &clients) && clients > 0) ||
                       (flag == "--seed" && absl::SimpleAtoi(value, &seed));
    if (!taken) {
      std::fprintf(stderr, "engram_soak: '%s %s' is no flag with a value it takes; see --help\n",
                   flag.c_str(), value);
      return twinspark::kExitBadConfig;
    }
  }
  return twinspark::engram::Run(seconds, clients, seed);
}
