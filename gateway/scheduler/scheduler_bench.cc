// Time of the scheduler per op: NextStep, Apply and TakeEvents of a full house of decoding
// sequences, the toy worker not counted. Usage: scheduler_bench [--smoke].
#include "gateway/scheduler/scheduler.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>

#include "common/check.h"
#include "gateway/testing/toy_worker.h"

namespace twinspark::gateway {
namespace {

using BenchClock = std::chrono::steady_clock;

double MicrosSince(BenchClock::time_point start) {
  return std::chrono::duration<double, std::micro>(BenchClock::now() - start).count();
}

void Bench(int num_sequences, int num_drafts, int num_ops) {
  EpochLimits limits;
  limits.num_slots = 64;
  limits.num_pages = 200000;
  limits.max_context = 1 << 20;
  limits.max_drafts = 5;
  SchedulerConfig config;
  config.num_drafts = num_drafts;
  Scheduler scheduler(config);
  scheduler.BeginEpoch(limits);
  ToyWorker worker({}, limits);
  for (int i = 1; i <= num_sequences; ++i) {
    SequenceSpec spec;
    spec.prompt_ids.assign(16, i);
    spec.max_tokens = 1000000 / num_sequences;
    CHECK(scheduler.Add(static_cast<SequenceId>(i), std::move(spec), 0).ok());
  }
  std::deque<StepResult> results;
  double micros = 0;
  uint64_t tokens = 0;
  int ops = 0;
  while (ops < num_ops) {
    auto start = BenchClock::now();
    while (true) {
      start = BenchClock::now();
      std::optional<StepPlan> plan = scheduler.NextStep(0);
      micros += MicrosSince(start);
      if (!plan) break;
      auto result = worker.Run(*plan);
      CHECK(result.ok());
      results.push_back(*std::move(result));
    }
    if (results.empty()) break;
    start = BenchClock::now();
    CHECK(scheduler.Apply(results.front()).ok());
    for (const SequenceEvent& event : scheduler.TakeEvents())
      tokens += event.tokens.size();
    micros += MicrosSince(start);
    results.pop_front();
    ++ops;
  }
  std::printf("sequences %2d  k %d  ops %6d  %7.2f us/op  %6.3f us/token\n", num_sequences,
              num_drafts, ops, micros / ops, micros / static_cast<double>(tokens));
}

}  // namespace
}  // namespace twinspark::gateway

int main(int argc, char** argv) {
  const bool smoke = argc > 1 && std::strcmp(argv[1], "--smoke") == 0;
  for (const int sequences : {1, 4, 16, 60}) {
    for (const int drafts : {0, 3})
      twinspark::gateway::Bench(sequences, drafts, smoke ? 50 : 20000);
  }
  return 0;
}
