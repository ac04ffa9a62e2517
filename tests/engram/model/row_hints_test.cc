// The model over a real row service: what it says it will need is what it then asks for, it arrives
// there, and it changes nothing. A prompt in chunks and drafted rounds are run without hints, with
// hints, and with hints of other rows; tokens and residual digests must be the same bits.
#include "shard_worker/model/row_hints.h"

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "common/rpc/grpc_server.h"
#include "common/testing/seeded_rng.h"
#include "engram_service/service/engram_service.h"
#include "kernels/thread_pool.h"
#include "shard_worker/engram/row_client.h"
#include "shard_worker/model/model.h"
#include "shard_worker/model/sequence_state.h"

namespace twinspark {
namespace {

enum class Hints { kNone, kReal, kWrong };

// Between the model and its row client: notes which of the asked rows had been announced.
class NotedRows : public RowSource {
 public:
  NotedRows(RowClient& client, Hints hints) : client_(client), hints_(hints) {}

  absl::Status Request(std::span<const RowRange> ranges, RowClass row_class) override {
    for (const RowRange& range : ranges) {
      for (size_t i = 0; i < range.ids.size(); ++i) {
        const int64_t position = range.first_position + static_cast<int64_t>(i);
        ++asked;
        announced += said_.contains({range.slot, position, range.ids[i]}) ? 1 : 0;
      }
    }
    return client_.Request(ranges, row_class);
  }
  void Hint(std::span<const RowRange> ranges, RowClass row_class) override {
    std::vector<std::vector<int32_t>> other_ids;
    std::vector<RowRange> other(ranges.begin(), ranges.end());
    for (RowRange& range : other) {
      EXPECT_EQ(static_cast<int64_t>(range.history.size()),
                std::min<int64_t>(3, range.first_position));
      for (size_t i = 0; i < range.ids.size(); ++i)
        said_.insert({range.slot, range.first_position + static_cast<int64_t>(i), range.ids[i]});
      other_ids.emplace_back();
      for (const int32_t id : range.ids)
        other_ids.back().push_back((id + 77) % 4096);
      range.ids = other_ids.back();
    }
    if (hints_ == Hints::kReal) client_.Hint(ranges, row_class);
    if (hints_ == Hints::kWrong) client_.Hint(other, row_class);
  }
  absl::StatusOr<EngramRows> Rows(int module_idx) override { return client_.Rows(module_idx); }

  int asked = 0;
  int announced = 0;

 private:
  RowClient& client_;
  const Hints hints_;
  std::set<std::tuple<int, int64_t, int32_t>> said_;
};

struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<uint64_t> digests;
  int asked = 0;
  int announced = 0;
  uint64_t given = 0;
  engram::RowServerStats service;
};

class RowHintsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ModelOptions options;
    options.limits = {.num_slots = 2, .num_pages = 32, .max_step_rows = 64};
    auto model = Model::Load(TWINSPARK_DEMO_MODEL, options, pool_, {});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    SeededRng rng(TestSeed(71));
    for (int i = 0; i < 500; ++i)
      prompt_.push_back(static_cast<int32_t>(rng.Int(10, rng.OneIn(2) ? 60 : 4000)));
  }

  void Take(const absl::StatusOr<StepResult>& result, Outcome& outcome) {
    ASSERT_TRUE(result.ok()) << result.status();
    outcome.digests.push_back(result->residual_digest);
    for (const SequenceResult& sequence : result->sequences)
      outcome.tokens.insert(outcome.tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
  }

  // A fresh service and a fresh epoch; a bulk prompt, then rounds.
  Outcome Run(Hints hints) {
    Outcome outcome;
    engram::ServingOptions serving;
    serving.tables = {TWINSPARK_DEMO_MODEL, "", 0, 1};
    serving.cache_gib = 1.0 / 64;
    engram::EngramServiceImpl service(serving);
    EXPECT_TRUE(service.Open().ok());
    auto server = GrpcServer::Start("127.0.0.1:0", {&service});
    EXPECT_TRUE(server.ok());
    auto client = RowClient::Connect(model_->config(), {(*server)->address(), 0, 1, 48, 64});
    EXPECT_TRUE(client.ok()) << client.status();
    NotedRows rows(**client, hints);
    EXPECT_TRUE(model_->BeginEpoch(nullptr, &rows).ok());
    OpenSequence open;
    open.slot = 1;
    open.ids = prompt_;
    open.num_prompt_ids = static_cast<int64_t>(prompt_.size());
    EXPECT_TRUE(model_->Open(open).ok());
    std::vector<PageMapping> pages;
    for (int32_t page = 0; page < 12; ++page)
      pages.push_back({page, page});
    EXPECT_TRUE(model_->MapPages(1, pages).ok());
    const auto length = static_cast<int64_t>(prompt_.size());
    for (int64_t begin = 0; begin < length; begin += 150) {
      StepPlan plan;
      plan.bulk = true;
      plan.prefill = {{1, begin, std::min(begin + 150, length), true}};
      Take(model_->RunStep(plan), outcome);
    }
    for (int i = 0; i < 20; ++i) {
      StepPlan plan;
      RoundSequence& round = plan.round.emplace_back();
      round.slot = 1;
      round.after_previous = true;
      round.num_drafts = i % 4;
      round.draft_next = true;
      Take(model_->RunStep(plan), outcome);
    }
    EXPECT_TRUE(model_->Close(1).ok());
    outcome.asked = rows.asked;
    outcome.announced = rows.announced;
    outcome.given = (*client)->state().hints;
    outcome.service = service.serving()->server().stats();
    EXPECT_EQ((*client)->state().errors, 0u);
    (*server)->Shutdown(std::chrono::milliseconds(100));
    return outcome;
  }

  ThreadPool pool_{1};
  std::unique_ptr<Model> model_;
  std::vector<int32_t> prompt_;
};

TEST_F(RowHintsTest, EveryRowIsAnnouncedAndNoResultDependsOnIt) {
  const Outcome none = Run(Hints::kNone);
  const Outcome real = Run(Hints::kReal);
  const Outcome wrong = Run(Hints::kWrong);
  ASSERT_GT(none.tokens.size(), 20u);
  EXPECT_EQ(none.given, 0u);
  for (const Outcome* other : {&real, &wrong}) {
    EXPECT_EQ(none.tokens, other->tokens);
    EXPECT_EQ(none.digests, other->digests);
    EXPECT_GT(other->given, 40u);  // first part, parts that follow, anchors, drafts
    EXPECT_EQ(other->service.sessions.errors, 0u);
  }
  // Prompt parts, anchors and drafts: nothing is asked for that was not announced.
  EXPECT_EQ(real.announced, real.asked);
  // They arrive: the service took hints up, and found more rows in its cache than without them.
  EXPECT_EQ(none.service.sessions.hints, 0u);
  EXPECT_GT(real.service.sessions.hints, 20u);
  const auto hits = [](const Outcome& outcome) {
    uint64_t sum = 0;
    for (const uint64_t count : outcome.service.engine.cache.hits)
      sum += count;
    return sum;
  };
  EXPECT_GT(hits(real), 2 * hits(none));
  printf(
      "%d rows asked for, %d announced; %llu hints given, %llu taken up; cache hits %llu, "
      "without hints %llu\n",
      real.asked, real.announced, static_cast<unsigned long long>(real.given),
      static_cast<unsigned long long>(real.service.sessions.hints),
      static_cast<unsigned long long>(hits(real)), static_cast<unsigned long long>(hits(none)));
}

// The pure part: which rows follow.
TEST(RowHints, PartsOfAPromptAnchorAndDrafts) {
  SequenceState sequence;
  for (int32_t id = 0; id < 100; ++id)
    sequence.ids.push_back(id);
  sequence.num_given = 100;
  EXPECT_EQ(FirstRows(3, sequence, 30).num_rows(), 30);
  EXPECT_EQ(FirstRows(3, sequence, 300).num_rows(), 100);
  Segment part = FirstRows(3, sequence, 60);
  Segment last = part;
  last.first_position = 90;
  last.ids = std::span(sequence.ids).subspan(90, 10);
  const std::vector<Segment> segments = {part, last, part};
  const std::vector<Segment> next = RowsAfter(segments, 50);
  ASSERT_EQ(next.size(), 2u);  // nothing follows the last part; the bound is for all together
  EXPECT_EQ(next[0].first_position, 60);
  EXPECT_EQ(next[0].num_rows(), 40);
  EXPECT_EQ(next[1].num_rows(), 10);
  sequence.ids.push_back(555);
  sequence.kept_drafts = {7, 8};
  EXPECT_EQ(AnchorRow(3, sequence).first_position, 100);
  EXPECT_EQ(AnchorRow(3, sequence).ids[0], 555);
  EXPECT_EQ(DraftRows(3, sequence).first_position, 101);
  EXPECT_EQ(DraftRows(3, sequence).num_rows(), 2);
}

}  // namespace
}  // namespace twinspark
