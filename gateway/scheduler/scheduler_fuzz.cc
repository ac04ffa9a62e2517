// Model-based fuzz of the scheduler: random arrivals, cancels, lost epochs, page shortage, run
// ahead and requests that the workers do not know how to serve, against ToyWorker, which refuses
// every op that does not fit its state. After each run: every request ended exactly once, with
// exactly the tokens that the toy language has for it (a prefix of them, when it was cancelled) and
// the log-probabilities of its prompt, or with the workers' refusal, if it asked for what they lack
// and nobody else did; slots and pages are all free, nobody waited longer than the work before
// them. Usage: scheduler_fuzz [--smoke] [--runs N] [--seed S].
#include "gateway/scheduler/scheduler.h"

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <vector>

#include "common/check.h"
#include "common/testing/seeded_rng.h"
#include "gateway/testing/scheduler_driver.h"
#include "gateway/testing/toy_worker.h"

namespace twinspark::gateway {
namespace {

struct Asked {
  std::vector<int32_t> expected;
  std::vector<TokenLogprobs> prompt_logprobs;
  bool is_unbuilt = false;  // the workers refuse it by name
  bool ended_by_us = false;
};

EpochLimits RandomLimits(SeededRng& rng) {
  EpochLimits limits;
  limits.num_slots = static_cast<int>(rng.Int(1, 20));
  limits.num_pages = static_cast<int32_t>(rng.OneIn(2) ? rng.Int(2, 12) : rng.Int(4, 80));
  limits.max_round_rows = rng.OneIn(3) ? static_cast<int>(rng.Int(6, 12)) : 48;
  limits.max_short_prefill_rows = static_cast<int>(rng.Int(64, 512));
  limits.max_chunk_rows = static_cast<int>(rng.Int(64, 1024));
  limits.max_context = static_cast<int32_t>(rng.Int(100, 4000));
  limits.max_drafts = rng.OneIn(5) ? 0 : 5;
  return limits;
}

class Run {
 public:
  explicit Run(uint64_t seed)
      : rng_(seed), limits_(RandomLimits(rng_)), driver_(RandomConfig(), language_, limits_) {
    if (!rng_.OneIn(3)) return;
    driver_.is_unbuilt = IsUnbuilt;
    driver_.worker->is_unbuilt = IsUnbuilt;
  }

  void Go() {
    const int64_t num_events = rng_.Int(50, 600);
    for (int64_t i = 0; i < num_events; ++i) {
      OneEvent();
      driver_.scheduler.CheckInvariants();
    }
    driver_.RunToEnd();
    driver_.scheduler.CheckInvariants();
    CheckAnswers();
  }

  const SchedulerCounters& counters() const { return driver_.scheduler.counters(); }
  int num_refused = 0;

 private:
  // An older worker: it lacks prompt log-probabilities of more than four.
  static bool IsUnbuilt(const OpenSequence& open) {
    return open.wants_prompt_logprobs && open.sampling->num_prompt_logprobs > 4;
  }

  SchedulerConfig RandomConfig() {
    SchedulerConfig config;
    config.max_queue = static_cast<size_t>(rng_.Int(1, 30));
    config.num_drafts = static_cast<int>(rng_.Int(0, 5));
    config.run_ahead = !rng_.OneIn(4);
    config.max_output_default = static_cast<int32_t>(rng_.Int(1, 200));
    return config;
  }

  void OneEvent() {
    switch (rng_.Int(0, 9)) {
      case 0:
      case 1:
        Arrive();
        break;
      case 2:
        if (rng_.OneIn(3)) Cancel();
        break;
      case 3:
        if (rng_.OneIn(30)) LoseEpoch();
        break;
      case 4:
      case 5:
      case 6:
        driver_.Send();
        break;
      default:
        driver_.Receive();
    }
  }

  void Arrive() {
    SequenceSpec spec;
    const int64_t longest = rng_.OneIn(4) ? limits_.max_context : 150;
    const int64_t length = rng_.Int(1, longest);
    for (int64_t i = 0; i < length; ++i) {
      spec.prompt_ids.push_back(static_cast<int32_t>(rng_.Int(0, 96)));
    }
    spec.sampling.seed = rng_.Next();
    if (!rng_.OneIn(3)) spec.sampling.stop_token_ids = {3, 41};
    if (rng_.OneIn(6)) spec.sampling.allowed_token_ids = {3, 5, 7, 11};
    if (rng_.OneIn(4)) spec.sampling.num_prompt_logprobs = static_cast<int32_t>(rng_.Int(0, 6));
    spec.max_tokens = static_cast<int32_t>(rng_.OneIn(4) ? 0 : rng_.Int(1, 120));
    spec.max_drafts = static_cast<int>(rng_.Int(-1, 5));
    spec.run_ahead_allowed = !rng_.OneIn(4);
    const auto prompt = spec.prompt_ids;
    const auto sampling = spec.sampling;
    const int waiting = driver_.scheduler.num_waiting();
    const SequenceId id = next_id_++;
    const absl::Status status = driver_.scheduler.Add(id, std::move(spec), driver_.now_us);
    if (!status.ok()) {
      if (absl::IsResourceExhausted(status)) CHECK(waiting > 0);
      return;
    }
    const Sequence* sequence = driver_.scheduler.Find(id);
    const int max_tokens = sequence->max_total_ids - sequence->num_prompt_ids;
    Asked& asked = asked_[id];
    asked.expected = ToyContinuation(language_, prompt, sampling, max_tokens);
    if (sampling.num_prompt_logprobs < 0) return;
    asked.prompt_logprobs = ToyPromptLogprobs(prompt, sampling.num_prompt_logprobs);
    asked.is_unbuilt = driver_.is_unbuilt && sampling.num_prompt_logprobs > 4;
  }

  void Cancel() {
    if (asked_.empty()) return;
    auto it = asked_.begin();
    std::advance(it, rng_.Int(0, static_cast<int64_t>(asked_.size()) - 1));
    if (driver_.scheduler.Find(it->first) != nullptr) it->second.ended_by_us = true;
    const bool left = rng_.OneIn(2);
    driver_.scheduler.End(it->first, left ? EndReason::kCancelled : EndReason::kFinished);
    driver_.Collect();
  }

  void LoseEpoch() {
    driver_.EndEpoch();
    driver_.scheduler.CheckInvariants();
    driver_.BeginEpoch(limits_);
  }

  void CheckAnswers() {
    CHECK_EQ(driver_.worker->slots_in_use(), 0);
    CHECK_EQ(driver_.worker->pages_in_use(), 0);
    CHECK_EQ(driver_.scheduler.pages_used(), 0);
    CHECK_EQ(driver_.answers.size(), asked_.size());
    for (const auto& [id, asked] : asked_) {
      const SchedulerDriver::Answer& answer = driver_.answers.at(id);
      CHECK_EQ(answer.num_ends, 1) << "sequence " << id;
      CHECK_LE(answer.num_admitted, 1) << "sequence " << id;
      CHECK_EQ(absl::IsUnimplemented(answer.error), asked.is_unbuilt && !asked.ended_by_us)
          << "sequence " << id << " " << answer.error.ToString();
      num_refused += asked.is_unbuilt ? 1 : 0;
      if (asked.is_unbuilt) CHECK(answer.tokens.empty()) << "sequence " << id;
      if (asked.is_unbuilt) continue;
      if (!answer.tokens.empty()) CheckPromptLogprobs(asked, answer);
      CHECK_LE(answer.tokens.size(), asked.expected.size()) << "sequence " << id;
      for (size_t i = 0; i < answer.tokens.size(); ++i) {
        CHECK_EQ(answer.tokens[i], asked.expected[i]) << "sequence " << id << " token " << i;
      }
      if (!asked.ended_by_us) {
        CHECK_EQ(answer.tokens.size(), asked.expected.size()) << "sequence " << id;
      }
    }
  }

  static void CheckPromptLogprobs(const Asked& asked, const SchedulerDriver::Answer& answer) {
    CHECK_EQ(answer.prompt_logprobs.size(), asked.prompt_logprobs.size());
    for (size_t i = 0; i < asked.prompt_logprobs.size(); ++i) {
      CHECK_EQ(answer.prompt_logprobs[i].logprob, asked.prompt_logprobs[i].logprob) << i;
      CHECK_EQ(answer.prompt_logprobs[i].rank, asked.prompt_logprobs[i].rank) << i;
      CHECK_EQ(answer.prompt_logprobs[i].top.size(), asked.prompt_logprobs[i].top.size()) << i;
    }
  }

  SeededRng rng_;
  const ToyLanguage language_;
  const EpochLimits limits_;
  SchedulerDriver driver_;
  std::map<SequenceId, Asked> asked_;
  SequenceId next_id_ = 1;
};

int Main(int argc, char** argv) {
  int num_runs = 2000;
  uint64_t seed = 20261201;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) num_runs = 150;
    if (std::strcmp(argv[i], "--runs") == 0 && i + 1 < argc) num_runs = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    }
  }
  SchedulerCounters sum;
  int num_refused = 0;
  for (int run = 0; run < num_runs; ++run) {
    // Before the run, so that a CHECK that stops it has its seed above it.
    std::cout << "seed " << seed + static_cast<uint64_t>(run) << "\n";
    Run one(seed + static_cast<uint64_t>(run));
    one.Go();
    sum.num_ops += one.counters().num_ops;
    sum.num_run_ahead += one.counters().num_run_ahead;
    sum.num_preemptions += one.counters().num_preemptions;
    sum.num_generated += one.counters().num_generated;
    sum.num_dropped += one.counters().num_dropped;
    sum.num_accepted += one.counters().num_accepted;
    num_refused += one.num_refused;
  }
  std::cout << num_runs << " runs: " << sum.num_ops << " ops, " << sum.num_run_ahead
            << " run ahead, " << sum.num_preemptions << " preemptions, " << sum.num_generated
            << " tokens, " << sum.num_accepted << " accepted drafts, " << sum.num_dropped
            << " dropped tokens, " << num_refused << " requests the workers could not serve\n";
  // A fuzz that never reaches these cases would prove little.
  CHECK(sum.num_run_ahead > 0 && sum.num_preemptions > 0 && sum.num_accepted > 0 &&
        num_refused > 0);
  return 0;
}

}  // namespace
}  // namespace twinspark::gateway

int main(int argc, char** argv) {
  return twinspark::gateway::Main(argc, argv);
}
