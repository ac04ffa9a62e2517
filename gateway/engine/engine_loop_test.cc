// The whole engine against a group of fake workers over real gRPC. Goal: a request gets exactly the
// tokens of the toy language, alone or in a crowd, with any number of drafts; every way to lose a
// worker ends every request once and without a wrong token; slots and pages come back. Method:
// wait for conditions with generous limits, never for times.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/metrics.h"
#include "gateway/engine/engine.h"
#include "gateway/engine/testing/fake_worker.h"
#include "gateway/testing/toy_worker.h"

namespace twinspark::gateway {
namespace {

constexpr int64_t kPatienceMs = 20'000 * limits::kTimeScale;

bool WaitUntil(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// What one request heard.
class Recorder : public GenerateEvents {
 public:
  void OnAdmitted() override {
    std::lock_guard lock(mutex_);
    ++num_admitted_;
  }
  void OnPromptLogprobs(std::vector<TokenLogprobs> logprobs) override {
    std::lock_guard lock(mutex_);
    EXPECT_TRUE(tokens_.empty()) << "they come before the first token";
    prompt_logprobs_ = std::move(logprobs);
  }
  void OnTokens(std::span<const int32_t> ids, std::span<const TokenLogprobs>) override {
    std::lock_guard lock(mutex_);
    tokens_.insert(tokens_.end(), ids.begin(), ids.end());
    changed_.notify_all();
  }
  void OnFinish(const FinishInfo& info) override {
    std::lock_guard lock(mutex_);
    ++num_ends_;
    finish_ = info;
    changed_.notify_all();
  }
  void OnError(const absl::Status& status) override {
    std::lock_guard lock(mutex_);
    ++num_ends_;
    error_ = status;
    changed_.notify_all();
  }

  bool WaitForEnd() {
    return Wait([this] { return num_ends_ > 0; });
  }
  bool WaitForTokens(size_t count) {
    return Wait([this, count] { return tokens_.size() >= count || num_ends_ > 0; });
  }
  std::vector<int32_t> tokens() {
    std::lock_guard lock(mutex_);
    return tokens_;
  }
  std::vector<TokenLogprobs> prompt_logprobs() {
    std::lock_guard lock(mutex_);
    return prompt_logprobs_;
  }
  int num_ends() {
    std::lock_guard lock(mutex_);
    return num_ends_;
  }
  int num_admitted() {
    std::lock_guard lock(mutex_);
    return num_admitted_;
  }
  std::optional<FinishInfo> finish() {
    std::lock_guard lock(mutex_);
    return finish_;
  }
  absl::Status error() {
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  bool Wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs), condition);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int32_t> tokens_;
  std::vector<TokenLogprobs> prompt_logprobs_;
  int num_admitted_ = 0;
  int num_ends_ = 0;
  std::optional<FinishInfo> finish_;
  absl::Status error_;
};

class EngineTest : public ::testing::Test {
 protected:
  EngineTest() {
    worker_config_.limits.num_slots = 16;
    worker_config_.limits.num_pages = 200;
    worker_config_.limits.max_context = 4096;
    worker_config_.limits.max_drafts = 5;
    worker_config_.op_delay_us = 200;
    options_.engine.scheduler.num_drafts = 3;
    options_.engine.model_id = "toy";
    options_.epochs.rendezvous_timeout_ms = kPatienceMs;
  }

  void StartWorkers(int world) {
    for (int rank = 0; rank < world; ++rank) {
      workers_.push_back(std::make_unique<FakeWorker>(worker_config_));
    }
  }

  void StartEngine() {
    for (const auto& worker : workers_) {
      options_.worker_endpoints.push_back(worker->address());
      options_.epochs.engram_endpoints.push_back("127.0.0.1:1");
    }
    engine_ = std::make_unique<Engine>(options_, clock_, metrics_,
                                       [this](ExitCode code, const std::string& reason) {
                                         std::lock_guard lock(fatal_mutex_);
                                         fatal_ = code;
                                         fatal_reason_ = reason;
                                       });
    engine_->Begin();
  }

  void Start(int world = 2) {
    StartWorkers(world);
    StartEngine();
    ASSERT_TRUE(WaitUntil([this] { return engine_->service().GetStatus().ready(); }))
        << EngineStatusJson(engine_->service().GetStatus());
  }

  GenerateRequest Request(int length, int max_tokens, uint64_t seed) {
    GenerateRequest request;
    request.request_id = "test-" + std::to_string(seed);
    for (int i = 0; i < length; ++i) {
      request.prompt_ids.push_back((i * 31 + static_cast<int>(seed)) % 97);
    }
    request.max_tokens = max_tokens;
    request.sampling.seed = seed;
    return request;
  }

  std::vector<int32_t> Expected(const GenerateRequest& request) {
    return ToyContinuation(worker_config_.language, request.prompt_ids, request.sampling,
                           *request.max_tokens);
  }

  GenerateId Submit(const GenerateRequest& request, const std::shared_ptr<Recorder>& recorder) {
    const auto id = engine_->service().Submit(request, recorder);
    EXPECT_TRUE(id.ok()) << id.status().ToString();
    return id.value_or(0);
  }

  void ExpectRight(const GenerateRequest& request) {
    const auto recorder = std::make_shared<Recorder>();
    Submit(request, recorder);
    ASSERT_TRUE(recorder->WaitForEnd());
    EXPECT_TRUE(recorder->error().ok()) << recorder->error().ToString();
    EXPECT_EQ(recorder->tokens(), Expected(request));
    EXPECT_EQ(recorder->num_admitted(), 1);
  }

  void ExpectAllFree() {
    EXPECT_TRUE(WaitUntil([this] {
      const EngineStatus status = engine_->service().GetStatus();
      if (status.num_running != 0 || status.num_waiting != 0 || status.pages_used != 0)
        return false;
      for (const auto& worker : workers_) {
        if (worker->slots_in_use() != 0 || worker->pages_in_use() != 0) return false;
      }
      return true;
    })) << EngineStatusJson(engine_->service().GetStatus());
  }

  // A long stream runs, then `fault` happens: it must end once with an error, and what it heard
  // before must be right.
  void ExpectFaultEndsEpoch(const std::function<void()>& fault, const std::string& reason_part) {
    Start();
    const GenerateRequest request = Request(40, 3000, 5);
    const auto recorder = std::make_shared<Recorder>();
    Submit(request, recorder);
    ASSERT_TRUE(recorder->WaitForTokens(20));
    fault();
    ASSERT_TRUE(recorder->WaitForEnd());
    EXPECT_TRUE(absl::IsUnavailable(recorder->error())) << recorder->error().ToString();
    EXPECT_NE(recorder->error().message().find(reason_part), std::string::npos)
        << recorder->error().ToString();
    const std::vector<int32_t> expected = Expected(request);
    const std::vector<int32_t> got = recorder->tokens();
    ASSERT_LT(got.size(), expected.size());
    EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin()));
    EXPECT_EQ(recorder->num_ends(), 1);
    EXPECT_EQ(engine_->service().GetStatus().num_epochs_ended, 1u);
  }

  FakeWorkerConfig worker_config_;
  EngineOptions options_;
  SteadyClock clock_;
  Metrics metrics_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::mutex fatal_mutex_;
  std::optional<ExitCode> fatal_;
  std::string fatal_reason_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, AnswersWithTheTokensOfTheModel) {
  Start();
  ExpectRight(Request(10, 50, 1));
  ExpectRight(Request(1, 1, 2));
  ExpectRight(Request(64, 64, 3));
  ExpectRight(Request(1500, 20, 4));  // bulk chunks
  ExpectAllFree();
}

TEST_F(EngineTest, DraftsDoNotChangeTheAnswer) {
  Start();
  for (int drafts = 0; drafts <= 5; ++drafts) {
    GenerateRequest request = Request(30, 80, 7);
    request.max_drafts = drafts;
    ExpectRight(request);
  }
  EXPECT_TRUE(WaitUntil([this] {
    const EngineStatus status = engine_->service().GetStatus();
    return status.num_drafted > 0 && status.num_accepted > 0;
  }));
}

TEST_F(EngineTest, ManyAtOnceAnswerAsAlone) {
  worker_config_.limits.num_pages = 40;  // too few for all: some wait, some are preempted
  Start();
  std::vector<GenerateRequest> requests;
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    requests.push_back(Request(static_cast<int>(5 + 17 * seed % 700), 100, seed));
    requests.back().has_stop_strings = seed % 5 == 0;
    recorders.push_back(std::make_shared<Recorder>());
    Submit(requests.back(), recorders.back());
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(recorders[i]->WaitForEnd()) << i;
    EXPECT_EQ(recorders[i]->tokens(), Expected(requests[i])) << i;
    EXPECT_EQ(recorders[i]->num_ends(), 1);
  }
  ExpectAllFree();
}

TEST_F(EngineTest, StopIdEndsTheStream) {
  Start();
  GenerateRequest request = Request(12, 500, 9);
  const std::vector<int32_t> all = Expected(request);
  request.sampling.stop_token_ids = {all[7]};
  const auto recorder = std::make_shared<Recorder>();
  Submit(request, recorder);
  ASSERT_TRUE(recorder->WaitForEnd());
  EXPECT_EQ(recorder->tokens(), Expected(request));
  EXPECT_EQ(recorder->finish()->reason, FinishReason::kStop);
  EXPECT_EQ(recorder->finish()->stop_token_id, all[7]);
  ExpectAllFree();
}

TEST_F(EngineTest, AllowedTokensGoThroughAMask) {
  Start();
  GenerateRequest request = Request(12, 60, 10);
  request.sampling.allowed_token_ids = {5, 50, 90};
  ExpectRight(request);
}

TEST_F(EngineTest, PromptLogprobsAloneAndInACrowd) {
  Start();
  std::vector<GenerateRequest> requests;
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    requests.push_back(Request(seed % 4 == 0 ? 1500 : static_cast<int>(1 + 20 * seed), 30, seed));
    if (seed % 3 != 1) {
      requests.back().sampling.num_prompt_logprobs = static_cast<int32_t>(seed % 3);
    }
    recorders.push_back(std::make_shared<Recorder>());
    Submit(requests.back(), recorders.back());
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(recorders[i]->WaitForEnd()) << i;
    EXPECT_EQ(recorders[i]->tokens(), Expected(requests[i])) << i;
    const int32_t num_top = requests[i].sampling.num_prompt_logprobs;
    const std::vector<TokenLogprobs> got = recorders[i]->prompt_logprobs();
    if (num_top < 0) {
      EXPECT_TRUE(got.empty());
      continue;
    }
    const std::vector<TokenLogprobs> expected = ToyPromptLogprobs(requests[i].prompt_ids, num_top);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t j = 0; j < got.size(); ++j) {
      EXPECT_EQ(got[j].logprob, expected[j].logprob) << i << " entry " << j;
      EXPECT_EQ(got[j].rank, expected[j].rank) << i << " entry " << j;
      EXPECT_EQ(got[j].top.size(), expected[j].top.size()) << i << " entry " << j;
    }
  }
  ExpectAllFree();
}

TEST_F(EngineTest, WhatTheWorkersLackFailsAlone) {
  worker_config_.max_prompt_logprobs = 4;
  Start();
  std::vector<GenerateRequest> requests;
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    requests.push_back(Request(static_cast<int>(10 + 5 * seed), 200, seed));
    if (seed % 4 == 3) requests.back().sampling.num_prompt_logprobs = seed % 8 == 3 ? 5 : 4;
    recorders.push_back(std::make_shared<Recorder>());
    Submit(requests.back(), recorders.back());
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(recorders[i]->WaitForEnd()) << i;
    EXPECT_EQ(recorders[i]->num_ends(), 1);
    if (requests[i].sampling.num_prompt_logprobs == 5) {
      EXPECT_TRUE(absl::IsUnimplemented(recorders[i]->error())) << recorders[i]->error();
    } else {
      EXPECT_TRUE(recorders[i]->error().ok()) << i << recorders[i]->error();
      EXPECT_EQ(recorders[i]->tokens(), Expected(requests[i])) << i;
    }
  }
  ExpectAllFree();
  EXPECT_EQ(engine_->service().GetStatus().num_epochs_ended, 0u);
}

TEST_F(EngineTest, ARefusalByOneRankEndsTheEpoch) {
  StartWorkers(1);
  worker_config_.max_prompt_logprobs = 4;
  StartWorkers(1);
  StartEngine();
  ASSERT_TRUE(WaitUntil([this] { return engine_->service().GetStatus().ready(); }));
  GenerateRequest request = Request(20, 20, 1);
  request.sampling.num_prompt_logprobs = 5;
  const auto recorder = std::make_shared<Recorder>();
  Submit(request, recorder);
  ASSERT_TRUE(recorder->WaitForEnd());
  EXPECT_TRUE(absl::IsUnavailable(recorder->error())) << recorder->error();
  EXPECT_NE(recorder->error().message().find("disagree about op 1"), std::string::npos)
      << recorder->error();
}

TEST_F(EngineTest, CancelFreesSlotAndPages) {
  Start();
  const auto recorder = std::make_shared<Recorder>();
  const GenerateId id = Submit(Request(40, 3000, 11), recorder);
  ASSERT_TRUE(recorder->WaitForTokens(10));
  engine_->service().Cancel(id);
  ASSERT_TRUE(recorder->WaitForEnd());
  EXPECT_EQ(recorder->finish()->reason, FinishReason::kAbort);
  ExpectAllFree();
  engine_->service().Cancel(id);  // no effect
  ExpectRight(Request(10, 20, 12));
  EXPECT_EQ(recorder->num_ends(), 1);
}

TEST_F(EngineTest, RefusesWhatCanNeverRun) {
  Start();
  const auto recorder = std::make_shared<Recorder>();
  GenerateRequest request = Request(10, 5000, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->service().Submit(request, recorder).status()));
  request = Request(10, 50, 1);
  request.prompt_ids[3] = 97;  // the vocabulary ends before it
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->service().Submit(request, recorder).status()));
  request = Request(10, 50, 1);
  request.sampling.stop_token_ids = {-4};
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->service().Submit(request, recorder).status()));
  EXPECT_EQ(recorder->num_ends(), 0);
}

TEST_F(EngineTest, FullQueueIsSaidAtOnce) {
  worker_config_.limits.num_slots = 1;
  options_.engine.scheduler.max_queue = 2;
  Start();
  const auto running = std::make_shared<Recorder>();
  Submit(Request(10, 4000, 1), running);
  ASSERT_TRUE(running->WaitForTokens(1));
  const auto waiting = std::make_shared<Recorder>();
  const GenerateId first = Submit(Request(10, 10, 2), waiting);
  Submit(Request(10, 10, 3), std::make_shared<Recorder>());
  const auto refused = engine_->service().Submit(Request(10, 10, 4), std::make_shared<Recorder>());
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status().ToString();
  engine_->service().Cancel(first);
  ASSERT_TRUE(waiting->WaitForEnd());
  EXPECT_EQ(waiting->num_admitted(), 0);
  // The place is free once the engine has taken the end into account.
  EXPECT_TRUE(WaitUntil([this] {
    return engine_->service().Submit(Request(10, 10, 5), std::make_shared<Recorder>()).ok();
  }));
}

TEST_F(EngineTest, SilentWorkerEndsTheEpoch) {
  ExpectFaultEndsEpoch([this] { workers_[1]->Freeze(true); }, "silent");
  // Not ready while it is stopped; the next epoch comes when it goes on.
  EXPECT_FALSE(engine_->service().GetStatus().ready());
  EXPECT_TRUE(absl::IsUnavailable(
      engine_->service().Submit(Request(3, 3, 1), std::make_shared<Recorder>()).status()));
  EXPECT_TRUE(WaitUntil([this] { return !workers_[0]->is_serving(); }));
  workers_[1]->Freeze(false);
  ASSERT_TRUE(WaitUntil([this] { return engine_->service().GetStatus().ready(); }));
  ExpectRight(Request(10, 30, 13));
}

TEST_F(EngineTest, LateOpEndsTheEpoch) {
  ExpectFaultEndsEpoch([this] { workers_[0]->StickOps(true); }, "not finished");
  workers_[0]->StickOps(false);
  ASSERT_TRUE(WaitUntil([this] { return engine_->service().GetStatus().ready(); }));
  ExpectRight(Request(10, 30, 14));
}

// The engine's thread sleeps longer than an op may take, as under SIGSTOP, while results lie
// unread.
TEST_F(EngineTest, AGatewayThatSleepsBlamesNobody) {
  class Sleeper : public Recorder {
   public:
    void OnTokens(std::span<const int32_t> ids, std::span<const TokenLogprobs> logprobs) override {
      Recorder::OnTokens(ids, logprobs);
      if (++num_calls_ != 10) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(limits::kOpDeadlineMsMin + 300));
    }

   private:
    int num_calls_ = 0;
  };
  Start();
  const GenerateRequest request = Request(40, 600, 15);
  const auto recorder = std::make_shared<Sleeper>();
  Submit(request, recorder);
  ASSERT_TRUE(WaitUntil([&] { return recorder->num_ends() > 0; }));
  EXPECT_TRUE(recorder->error().ok()) << recorder->error().ToString();
  EXPECT_EQ(recorder->tokens(), Expected(request));
  EXPECT_EQ(engine_->service().GetStatus().num_epochs_ended, 0u);
}

TEST_F(EngineTest, AWorkerThatIsLateByItsOwnClockIsLate) {
  ExpectFaultEndsEpoch(
      [this] { workers_[1]->FailAt(2, absl::DeadlineExceededError("layers done: 3")); },
      "layers done: 3");
  EXPECT_NE(metrics_.Text().find("dsv_epochs_ended_total{cause=\"deadline\"} 1"), std::string::npos)
      << metrics_.Text();
}

TEST_F(EngineTest, DivergenceSendsNoTokenOfThatOp) {
  ExpectFaultEndsEpoch([this] { workers_[1]->DivergeAt(3); }, "different results");
  EXPECT_EQ(engine_->service().GetStatus().num_divergences, 1u);
}

TEST_F(EngineTest, FailedOpEndsTheEpoch) {
  ExpectFaultEndsEpoch([this] { workers_[1]->FailAt(2); }, "asked to fail");
}

TEST_F(EngineTest, DeadWorkerEndsTheEpoch) {
  ExpectFaultEndsEpoch([this] { workers_[1]->Die(); }, "ended its step stream");
}

TEST_F(EngineTest, WithARecoveryTimeTheStreamGoesOn) {
  options_.engine.recovery_timeout_ms = kPatienceMs;
  Start();
  const GenerateRequest request = Request(40, 600, 15);
  const auto recorder = std::make_shared<Recorder>();
  Submit(request, recorder);
  ASSERT_TRUE(recorder->WaitForTokens(30));
  workers_[1]->DivergeAt(0);
  ASSERT_TRUE(recorder->WaitForEnd());
  EXPECT_TRUE(recorder->error().ok()) << recorder->error().ToString();
  EXPECT_EQ(recorder->tokens(), Expected(request));
  EXPECT_EQ(recorder->num_admitted(), 1);
  EXPECT_EQ(engine_->service().GetStatus().num_epochs_ended, 1u);
}

TEST_F(EngineTest, OtherContentsOfARanksWeightsAreNotTakenBack) {
  Start();
  workers_[1]->ChangeSlices("00000000000000ee");
  workers_[1]->DivergeAt(0);
  const auto recorder = std::make_shared<Recorder>();
  Submit(Request(40, 600, 15), recorder);
  ASSERT_TRUE(recorder->WaitForEnd());
  ASSERT_TRUE(WaitUntil([this] {
    return engine_->service().GetStatus().reason.find("00000000000000ee") != std::string::npos;
  })) << engine_->service().GetStatus().reason;
  EXPECT_FALSE(engine_->service().GetStatus().ready());
  workers_[1]->ChangeSlices("00000000000000dd");
  EXPECT_TRUE(WaitUntil([this] { return engine_->service().GetStatus().ready(); }));
}

TEST_F(EngineTest, WorkersMayComeInAnyOrder) {
  StartWorkers(2);
  workers_[1]->RefuseConfigure("the row service is not there");
  StartEngine();
  ASSERT_TRUE(WaitUntil([this] {
    return engine_->service().GetStatus().reason.find("the row service is not there") !=
           std::string::npos;
  })) << engine_->service().GetStatus().reason;
  workers_[1]->RefuseConfigure("");
  ASSERT_TRUE(WaitUntil([this] { return engine_->service().GetStatus().ready(); }));
}

// A worker that cannot load its model says why and exits: the reason stays where people look.
TEST_F(EngineTest, WhatAWorkerSaidBeforeItWentIsKept) {
  StartWorkers(2);
  workers_[1]->RefuseConfigure("there is no /models/elsewhere/config.json");
  StartEngine();
  const auto status = [this] { return engine_->service().GetStatus(); };
  const auto worker_says = [&] {
    return status().workers[1].last_reason.find("/models/elsewhere") != std::string::npos;
  };
  ASSERT_TRUE(WaitUntil(worker_says)) << EngineStatusJson(status());
  workers_[1]->Die();
  ASSERT_TRUE(WaitUntil([&] {
    return status().workers[1].state == "UNREACHABLE" &&
           status().reason.find("does not answer") != std::string::npos;
  })) << EngineStatusJson(status());
  EXPECT_TRUE(worker_says()) << EngineStatusJson(status());
  EXPECT_NE(status().reason.find("it said before: "), std::string::npos) << status().reason;
  EXPECT_NE(status().reason.find("/models/elsewhere"), std::string::npos) << status().reason;
  EXPECT_TRUE(status().workers[0].last_reason.empty()) << status().workers[0].last_reason;
}

TEST_F(EngineTest, OtherBuildIs64) {
  StartWorkers(1);
  worker_config_.build = "another build";
  StartWorkers(1);
  StartEngine();
  ASSERT_TRUE(WaitUntil([this] {
    std::lock_guard lock(fatal_mutex_);
    return fatal_.has_value();
  }));
  EXPECT_EQ(fatal_, kExitMismatch);
  EXPECT_NE(fatal_reason_.find("another build"), std::string::npos) << fatal_reason_;
}

TEST_F(EngineTest, OtherWeightsAre64) {
  StartWorkers(1);
  worker_config_.weights_digest = "00000000000000bb";
  StartWorkers(1);
  StartEngine();
  ASSERT_TRUE(WaitUntil([this] {
    std::lock_guard lock(fatal_mutex_);
    return fatal_.has_value();
  }));
  EXPECT_EQ(fatal_, kExitMismatch);
  EXPECT_NE(fatal_reason_.find("00000000000000bb"), std::string::npos) << fatal_reason_;
}

TEST_F(EngineTest, TokenizerOfALargerModelIs65) {
  options_.epochs.tokenizer_vocab_size = worker_config_.language.vocab_size + 1;
  StartWorkers(2);
  StartEngine();
  ASSERT_TRUE(WaitUntil([this] {
    std::lock_guard lock(fatal_mutex_);
    return fatal_.has_value();
  }));
  EXPECT_EQ(fatal_, kExitBadData);
  EXPECT_NE(fatal_reason_.find("tokenizer.json"), std::string::npos) << fatal_reason_;
}

TEST_F(EngineTest, AbsentWorkerIs69) {
  options_.epochs.rendezvous_timeout_ms = 300;
  StartWorkers(2);
  workers_[1]->Die();
  StartEngine();
  ASSERT_TRUE(WaitUntil([this] {
    std::lock_guard lock(fatal_mutex_);
    return fatal_.has_value();
  }));
  EXPECT_EQ(fatal_, kExitUnavailable);
  EXPECT_NE(fatal_reason_.find("rank 1"), std::string::npos) << fatal_reason_;
}

TEST_F(EngineTest, DrainLetsStreamsFinishAndRefusesNewOnes) {
  Start();
  const GenerateRequest request = Request(20, 400, 16);
  const auto recorder = std::make_shared<Recorder>();
  Submit(request, recorder);
  ASSERT_TRUE(recorder->WaitForTokens(5));
  std::thread drain([this] { engine_->Drain(kPatienceMs); });
  ASSERT_TRUE(
      WaitUntil([this] { return engine_->service().GetStatus().state == EngineState::kDraining; }));
  EXPECT_TRUE(absl::IsUnavailable(
      engine_->service().Submit(Request(3, 3, 1), std::make_shared<Recorder>()).status()));
  drain.join();
  EXPECT_EQ(recorder->tokens(), Expected(request));
  EXPECT_EQ(recorder->num_ends(), 1);
}

TEST_F(EngineTest, DrainTimeEndsWithAnError) {
  Start();
  const auto recorder = std::make_shared<Recorder>();
  Submit(Request(20, 3900, 17), recorder);
  ASSERT_TRUE(recorder->WaitForTokens(5));
  engine_->Drain(20);
  EXPECT_EQ(recorder->num_ends(), 1);
  EXPECT_TRUE(absl::IsUnavailable(recorder->error()));
  EXPECT_NE(recorder->error().message().find("shutting_down"), std::string::npos);
}

TEST_F(EngineTest, StatusAndMetricsTellTheState) {
  Start();
  ExpectRight(Request(10, 30, 18));
  ASSERT_TRUE(WaitUntil([this] {
    const EngineStatus status = engine_->service().GetStatus();
    return status.workers.size() == 2 && status.workers[1].engram.transport == "shm" &&
           status.workers[1].state == "SERVING";
  }));
  const std::string json = EngineStatusJson(engine_->service().GetStatus());
  EXPECT_NE(json.find("\"transport\":\"shm\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"state\":\"READY\""), std::string::npos) << json;
  const std::string text = metrics_.Text();
  EXPECT_NE(text.find("dsv_requests_total{finish_reason=\"length\"} 1"), std::string::npos) << text;
  EXPECT_NE(text.find("vllm:generation_tokens_total"), std::string::npos);
}

}  // namespace
}  // namespace twinspark::gateway
