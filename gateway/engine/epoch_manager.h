// Sets epochs up, on a thread of its own: Hello > PrepareGroup > Configure > Steps over whoever
// answers, in any start order, with back-off; says what it waits for. A finished group goes into
// the engine's inbox; EpochEnded asks for the next one. Before the first READY some failures end
// the process (protocol specification 9): 64 when builds or digests differ, 65 when the tokenizer
// is not the model's, 69 when a rank or row service does not come in time. After it, it tries
// without end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/clock.h"
#include "common/exit_codes.h"
#include "gateway/engine/engine_inbox.h"
#include "gateway/engine/worker_board.h"
#include "gateway/engine/worker_client.h"
#include "gateway/engine/worker_group.h"

namespace twinspark::gateway {

struct EpochManagerConfig {
  std::string model_dir;
  std::string engram_dir;
  std::vector<std::string> engram_endpoints;  // by rank
  EpochLimits wanted;                         // zeros: the worker's default
  int slots_on_cpu = 16;                      // where wanted.num_slots is 0
  int slots_on_gpu = 8;
  int64_t rendezvous_timeout_ms = 600'000;
  int64_t gateway_silence_ms = 0;    // 0: the worker's default
  int32_t tokenizer_vocab_size = 0;  // ids that requests may hold; a smaller model is not theirs
};

// What the running (or coming) epoch is, for /status.
struct EpochFacts {
  uint64_t epoch = 0;
  bool ever_ready = false;
  std::string waiting_for;  // empty when an epoch runs
  std::string config_digest;
  std::string weights_digest;
};

class EpochManager {
 public:
  // Called once, on the epoch thread, when the first start failed for good.
  using FatalCallback = std::function<void(ExitCode code, const std::string& reason)>;

  EpochManager(const EpochManagerConfig& config,
               const std::vector<std::unique_ptr<WorkerClient>>& clients,
               const Clock& clock,
               WorkerBoard& board,
               EngineInbox& inbox,
               FatalCallback on_fatal);
  ~EpochManager();
  EpochManager(const EpochManager&) = delete;
  EpochManager& operator=(const EpochManager&) = delete;

  // From now on it sets epochs up. Before that nothing is asked of anybody.
  void Begin() { EpochEnded(/*diverged=*/false); }

  // Calls off what is being set up; nothing more is. For the owner, once; the destructor stops too.
  void Stop();

  // The group of the last ReadyMessage is over. `diverged`: its ranks computed different results,
  // so the next one loads its weights again.
  void EpochEnded(bool diverged);

  EpochFacts Facts() const;

 private:
  struct Setup {
    std::shared_ptr<WorkerGroup> group;
    EpochLimits limits;
    std::vector<CostEntry> costs;
  };

  void Run();
  absl::StatusOr<Setup> TrySetUp();
  absl::StatusOr<std::vector<WorkerHello>> HelloAll();
  absl::StatusOr<std::vector<WorkerReady>> ConfigureAll(const GroupConfig& config);
  absl::Status CheckAlike(const std::vector<WorkerReady>& ready) const;
  bool RanOutOfTime(int64_t now_us) const;
  void SayWaiting(const std::string& reason, int64_t now_us);
  // True when asked to stop.
  bool Sleep(int64_t ms);

  const EpochManagerConfig config_;
  const std::vector<std::unique_ptr<WorkerClient>>& clients_;
  std::vector<std::string> last_slices_;  // by rank, of the last epoch that opened
  const Clock& clock_;
  WorkerBoard& board_;
  EngineInbox& inbox_;
  const FatalCallback on_fatal_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  bool needed_ = false;
  bool reload_weights_ = false;  // until a group is ready again
  EpochFacts facts_;

  // Epoch thread only.
  uint64_t last_epoch_ = 0;
  int64_t last_said_us_ = 0;
  std::string last_said_;
  std::atomic<int64_t> last_progress_us_;  // start, or when a load last moved
  std::thread thread_;
};

}  // namespace twinspark::gateway
