// The law: a row's bits do not depend on the chunking, the rows that share its step, speculation,
// threads, ranks, the form of the weights, or an interruption. Every test computes the same tokens
// in two ways and compares the residual streams that left the last block, bit for bit, and the
// tokens and drafts. tests/mutants breaks each invariance on purpose and sees exactly its test
// fail.
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"
#include "tests/invariance/row_recorder.h"

namespace twinspark::invariance {
namespace {

constexpr int64_t kMaxLength = 1024;

SamplingParams Greedy() {
  return {};
}

SamplingParams Sampled(uint64_t seed) {
  SamplingParams sampling;
  sampling.temperature =
      4.0f;  // the demo model is sure of itself: less would always draw the likeliest token
  sampling.top_p = 0.98f;
  sampling.min_p = 0.001f;
  sampling.seed = seed;
  return sampling;
}

// Rows of `a` that `b` also has must be the same; at least `at_least` of them.
void ExpectSameRows(const Trace& a, const Trace& b, size_t at_least) {
  size_t compared = 0;
  for (const auto& [position, bits] : a.rows) {
    const auto other = b.rows.find(position);
    if (other == b.rows.end()) continue;
    ++compared;
    ASSERT_TRUE(bits == other->second)
        << "first different row: position " << position << " of " << a.rows.size();
  }
  EXPECT_GE(compared, at_least);
}

void ExpectSameDrafts(const Trace& a, const Trace& b, size_t at_least) {
  size_t compared = 0;
  for (const auto& [position, drafts] : a.drafts) {
    const auto other = b.drafts.find(position);
    if (other == b.drafts.end()) continue;
    ++compared;
    EXPECT_EQ(drafts.first, other->second.first) << "drafts at position " << position;
    EXPECT_EQ(drafts.second, other->second.second) << "confidences at position " << position;
  }
  EXPECT_GE(compared, at_least);
}

// One sequence, alone, whole prompt, no drafts verified: what everything is compared with.
Trace Serial(const std::vector<int32_t>& prompt,
             size_t tokens,
             const SamplingParams& sampling,
             const GroupOptions& options = {}) {
  Runner runner(options);
  runner.Open(0, prompt, static_cast<int64_t>(prompt.size()), sampling, kMaxLength);
  runner.Prefill(0, 1024);
  runner.Generate(0, tokens, 0);
  return runner.trace(0);
}

TEST(InvarianceTest, ChunkedIsWhole) {
  const std::vector<int32_t> prompt = DemoPrompt("recall_300");
  const Trace whole = Serial(prompt, 3, Greedy());
  ASSERT_EQ(whole.rows.size(), prompt.size() + 2);
  for (const int64_t chunk : {1, 4, 7, 64, 129}) {
    SCOPED_TRACE(chunk);
    Runner runner;
    runner.Open(0, prompt, static_cast<int64_t>(prompt.size()), Greedy(), kMaxLength);
    runner.Prefill(0, chunk);
    runner.Generate(0, 3, 0);
    EXPECT_EQ(runner.trace(0).tokens, whole.tokens);
    ExpectSameRows(runner.trace(0), whole, prompt.size());
    ExpectSameDrafts(runner.trace(0), whole, 1);
  }
}

TEST(InvarianceTest, ConcurrentIsSolo) {
  const std::vector<std::vector<int32_t>> prompts = {
      DemoPrompt("memo"), DemoPrompt("story"), DemoPrompt("json_schema"), DemoPrompt("chat_think")};
  constexpr size_t kTokens = 12;
  Runner together;
  for (int slot = 0; slot < 4; ++slot)
    together.Open(slot, prompts[static_cast<size_t>(slot)],
                  static_cast<int64_t>(prompts[static_cast<size_t>(slot)].size()), Sampled(5),
                  kMaxLength);
  // Prompts enter one after the other while the earlier ones already decode; the order within a
  // step turns.
  for (int step = 0;; ++step) {
    StepPlan plan;
    bool busy = false;
    for (int i = 0; i < 4; ++i) {
      const int slot = (i + step) % 4;
      Trace& trace = together.trace(slot);
      const auto length = static_cast<int64_t>(prompts[static_cast<size_t>(slot)].size());
      const auto done = static_cast<int64_t>(trace.rows.size());
      if (done < length) {
        busy = true;
        if (step >= slot)
          plan.prefill.push_back({slot, done, std::min(done + 9 + slot, length), true, -1});
      } else if (trace.tokens.size() < kTokens) {
        busy = true;
        RoundSequence round;
        round.slot = slot;
        round.num_drafts = (step + slot) % 4;
        round.draft_next = true;
        plan.round.push_back(round);
      }
    }
    if (!busy) break;
    together.Step(plan);
  }
  for (int slot = 0; slot < 4; ++slot) {
    SCOPED_TRACE(slot);
    Trace& trace = together.trace(slot);
    const Trace solo = Serial(prompts[static_cast<size_t>(slot)], trace.tokens.size(), Sampled(5));
    EXPECT_EQ(trace.tokens, solo.tokens);
    ExpectSameRows(trace, solo, solo.rows.size());
    ExpectSameDrafts(trace, solo, 3);
  }
}

TEST(InvarianceTest, RejectedRowsLeaveNoTrace) {
  // The prompt is longer than the window, so that a ring without room for drafts loses a row that
  // is still needed.
  const std::vector<int32_t> prompt = DemoPrompt("recall_300");
  const Trace serial = Serial(prompt, 10, Sampled(11));
  SeededRng rng(TestSeed(3));
  Runner runner;
  runner.Open(0, prompt, static_cast<int64_t>(prompt.size()), Sampled(11), kMaxLength);
  runner.Prefill(0, 100);
  while (runner.trace(0).tokens.size() < serial.tokens.size()) {
    StepPlan plan;
    RoundSequence round;
    round.slot = 0;
    round.num_drafts = static_cast<int>(rng.Int(1, 5));
    round.kept_drafts = false;
    round.draft_next = true;
    // Right for some rows, wrong from there on.
    const auto right = static_cast<size_t>(rng.Int(0, round.num_drafts - 1));
    for (size_t j = 0; j < static_cast<size_t>(round.num_drafts); ++j) {
      const size_t index = runner.trace(0).tokens.size() + j;
      const int32_t next = index < serial.tokens.size() ? serial.tokens[index] : 7;
      round.drafts.push_back(j < right ? next
                                       : (next + 1 + static_cast<int32_t>(rng.Int(0, 100))) % 4000);
    }
    plan.round.push_back(round);
    runner.Step(plan);
  }
  Trace& trace = runner.trace(0);
  trace.tokens.resize(serial.tokens.size());
  EXPECT_EQ(trace.tokens, serial.tokens);
  ExpectSameRows(trace, serial, prompt.size() + 5);
  ExpectSameDrafts(trace, serial, 3);
}

TEST(InvarianceTest, DraftedIsSerial) {
  for (const char* name : {"story", "count_think", "haiku"}) {
    for (const bool greedy : {true, false}) {
      SCOPED_TRACE(name);
      const std::vector<int32_t> prompt = DemoPrompt(name);
      const SamplingParams sampling = greedy ? Greedy() : Sampled(77);
      const Trace serial = Serial(prompt, 40, sampling);
      for (const int k : {1, 3, 5}) {
        SCOPED_TRACE(k);
        Runner runner;
        runner.Open(0, prompt, static_cast<int64_t>(prompt.size()), sampling, kMaxLength);
        runner.Prefill(0, 64);
        runner.Generate(0, 40, k);
        Trace& trace = runner.trace(0);
        ExpectSameRows(trace, serial, 35);
        ExpectSameDrafts(trace, serial, 4);
        trace.tokens.resize(40);
        EXPECT_EQ(trace.tokens, serial.tokens);
      }
    }
  }
}

TEST(InvarianceTest, TruncatedGoesOnAsIfNeverLonger) {
  const std::vector<int32_t> prompt = DemoPrompt("story");
  const Trace serial = Serial(prompt, 30, Sampled(9));
  Runner runner;
  runner.Open(0, prompt, static_cast<int64_t>(prompt.size()), Sampled(9), kMaxLength);
  runner.Prefill(0, 64);
  runner.Generate(0, 12, 5);
  // A stop string in the middle of an accepted block: everything after the sixth token is taken
  // back.
  runner.Truncate(0, static_cast<int64_t>(prompt.size()) + 5);
  ASSERT_EQ(runner.trace(0).tokens.size(), 6u);
  runner.Generate(0, 30, 0);
  EXPECT_EQ(runner.trace(0).tokens, serial.tokens);
  ExpectSameRows(runner.trace(0), serial, 30);
}

TEST(InvarianceTest, AnyNumberOfThreads) {
  const std::vector<int32_t> prompt = DemoPrompt("json_schema");
  const Trace one = Serial(prompt, 8, Sampled(4));
  for (const int threads : {2, 3}) {
    SCOPED_TRACE(threads);
    GroupOptions options;
    options.threads = threads;
    const Trace more = Serial(prompt, 8, Sampled(4), options);
    EXPECT_EQ(more.tokens, one.tokens);
    ExpectSameRows(more, one, prompt.size());
    ExpectSameDrafts(more, one, 3);
  }
}

TEST(InvarianceTest, TwoRanksAreOne) {
  const std::vector<int32_t> prompt = DemoPrompt("json_schema");
  const Trace one = Serial(prompt, 8, Sampled(4));
  GroupOptions options;
  options.world = 2;
  const Trace two =
      Serial(prompt, 8, Sampled(4), options);  // the group fails where its ranks differ
  EXPECT_EQ(two.tokens, one.tokens);
  ExpectSameRows(two, one, prompt.size());
  ExpectSameDrafts(two, one, 3);
}

TEST(InvarianceTest, DecodedCopyIsTheTrellis) {
  const std::vector<int32_t> prompt = DemoPrompt("json_schema");
  const Trace trellis = Serial(prompt, 8, Sampled(4));
  GroupOptions options;
  options.f16_copy = true;
  const Trace copy = Serial(prompt, 8, Sampled(4), options);
  EXPECT_EQ(copy.tokens, trellis.tokens);
  ExpectSameRows(copy, trellis, prompt.size());
}

TEST(InvarianceTest, InterruptedGoesOnAsIfNeverInterrupted) {
  const std::vector<int32_t> prompt = DemoPrompt("count_think");
  const Trace serial = Serial(prompt, 24, Sampled(21));
  Runner runner;
  runner.Open(0, prompt, static_cast<int64_t>(prompt.size()), Sampled(21), kMaxLength);
  runner.Prefill(0, 64);
  runner.Generate(0, 9, 3);
  std::vector<int32_t> emitted = runner.trace(0).tokens;
  runner.Close(0);
  // Preempted, or a new epoch: prompt and emitted tokens are one prompt now, in another slot that
  // somebody used before.
  runner.Open(1, DemoPrompt("hello"), 5, Greedy(), kMaxLength);
  runner.Prefill(1, 64);
  runner.Close(1);
  std::vector<int32_t> ids = prompt;
  ids.insert(ids.end(), emitted.begin(), emitted.end());
  Runner other;  // a slot never used, and one used before
  for (Runner* again : {&other, &runner}) {
    again->Open(1, ids, static_cast<int64_t>(prompt.size()), Sampled(21), kMaxLength);
    again->trace(1) = {};
    again->Prefill(1, 1024);
    again->Generate(1, 24 - emitted.size(), 5);
    std::vector<int32_t> all = emitted;
    all.insert(all.end(), again->trace(1).tokens.begin(), again->trace(1).tokens.end());
    all.resize(24);
    EXPECT_EQ(all, serial.tokens);
    ExpectSameRows(again->trace(1), serial, ids.size());
    ExpectSameDrafts(again->trace(1), serial, 1);
  }
}

TEST(InvarianceTest, SamplingDependsOnTheSeed) {
  const std::vector<int32_t> prompt = DemoPrompt("completion");
  EXPECT_NE(Serial(prompt, 12, Sampled(1)).tokens, Serial(prompt, 12, Sampled(2)).tokens)
      << "otherwise the tests above prove little";
}

}  // namespace
}  // namespace twinspark::invariance
