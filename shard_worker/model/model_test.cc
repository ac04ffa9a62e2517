// The model's face on the demo model: plans that do not fit are refused before they have an effect,
// errors of the row source come through, epochs and slots begin empty, truncation and reopening
// give the tokens that an undisturbed run gives. Exactness is the business of tests/golden.
#include "shard_worker/model/model.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard_worker/model/row_source.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Rows that depend on nothing but the token id: enough where values do not matter.
class FakeRows : public RowSource {
 public:
  explicit FakeRows(const ModelConfig& c)
      : columns_(static_cast<size_t>(c.engram_num_columns())),
        width_(static_cast<size_t>(c.engram_head_dim)) {}

  absl::Status Request(std::span<const RowRange> ranges, RowClass) override {
    values_.clear();
    scales_.clear();
    for (const RowRange& range : ranges) {
      EXPECT_EQ(static_cast<int64_t>(range.history.size()),
                std::min<int64_t>(3, range.first_position));
      for (int32_t id : range.ids) {
        values_.insert(values_.end(), columns_ * width_, static_cast<uint8_t>(id % 100));
        scales_.insert(scales_.end(), columns_ * width_ / 32, 120);
      }
    }
    return absl::OkStatus();
  }
  absl::StatusOr<EngramRows> Rows(int) override {
    if (fails) return absl::DeadlineExceededError("rows of layer 1 not there in 1 s");
    return EngramRows{values_.data(), scales_.data()};
  }

  bool fails = false;

 private:
  const size_t columns_;
  const size_t width_;
  std::vector<uint8_t> values_;
  std::vector<uint8_t> scales_;
};

class ModelTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    pool_ = new ThreadPool(1);
    ModelOptions options;
    options.limits.num_slots = 2;
    options.limits.num_pages = 8;
    options.limits.max_step_rows = 64;
    options.limits.max_context = 256;
    auto model = Model::Load(TWINSPARK_DEMO_MODEL, options, *pool_);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = model->release();
  }
  static void TearDownTestSuite() {
    delete model_;
    delete pool_;
  }
  void SetUp() override {
    rows_ = std::make_unique<FakeRows>(model_->config());
    ASSERT_TRUE(model_->BeginEpoch(nullptr, rows_.get()).ok());
  }

  void Open(int slot, int64_t length) {
    OpenSequence open;
    open.slot = slot;
    open.ids.resize(static_cast<size_t>(length));
    std::iota(open.ids.begin(), open.ids.end(), 10 * slot);
    open.num_prompt_ids = length;
    ASSERT_TRUE(model_->Open(open).ok());
    std::vector<PageMapping> pages;
    for (int32_t page = 0; page < 4; ++page)
      pages.push_back({page, 4 * slot + page});
    ASSERT_TRUE(model_->MapPages(slot, pages).ok());
  }
  absl::StatusOr<SequenceResult> Prefill(int slot, int64_t begin, int64_t end, bool draft = false) {
    StepPlan plan;
    plan.prefill.push_back({slot, begin, end, draft, -1});
    auto result = model_->RunStep(plan);
    if (!result.ok()) return result.status();
    return result->sequences[0];
  }
  absl::StatusOr<SequenceResult> Round(int slot, int64_t first, int drafts, bool draft = false) {
    StepPlan plan;
    RoundSequence round;
    round.slot = slot;
    round.first_position = first;
    round.num_drafts = drafts;
    round.draft_next = draft;
    plan.round.push_back(round);
    auto result = model_->RunStep(plan);
    if (!result.ok()) return result.status();
    return result->sequences[0];
  }

  static ThreadPool* pool_;
  static Model* model_;
  std::unique_ptr<FakeRows> rows_;
};
ThreadPool* ModelTest::pool_ = nullptr;
Model* ModelTest::model_ = nullptr;

void ExpectRefused(const absl::Status& status, const std::string& part) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(part));
}

TEST_F(ModelTest, PlansThatDoNotFitAreRefusedWithoutEffect) {
  Open(0, 100);
  ExpectRefused(Prefill(1, 0, 10).status(), "slot 1 is not open");
  ExpectRefused(Prefill(7, 0, 10).status(), "slot 7");
  ExpectRefused(Prefill(0, 5, 10).status(), "committed length is 0");
  ExpectRefused(Prefill(0, 0, 101).status(), "of 100 ids");
  ExpectRefused(Round(0, 0, 0).status(), "round at position 0");
  StepPlan twice;
  twice.prefill = {{0, 0, 10, false, -1}, {0, 0, 20, false, -1}};
  ExpectRefused(model_->RunStep(twice).status(), "twice");
  StepPlan masked;
  masked.prefill = {{0, 0, 10, false, 5}};
  ExpectRefused(model_->RunStep(masked).status(), "mask 5");
  EXPECT_EQ(model_->CommittedLength(0), 0);
  ASSERT_TRUE(Prefill(0, 0, 100).ok());
  ExpectRefused(Round(0, 100, 1).status(), "1 drafts asked for, 0 are there");
  ExpectRefused(Round(0, 99, 0).status(), "round at position 99");
  EXPECT_EQ(model_->CommittedLength(0), 100);
}

TEST_F(ModelTest, UnmappedPagesAndTheContextLimitAreRefused) {
  OpenSequence open;
  open.ids.assign(70, 3);
  open.num_prompt_ids = 70;
  ASSERT_TRUE(model_->Open(open).ok());
  const PageMapping first[] = {{0, 0}};
  ASSERT_TRUE(model_->MapPages(0, first).ok());
  ASSERT_TRUE(Prefill(0, 0, 64).ok());
  ExpectRefused(Prefill(0, 64, 70).status(), "logical page 1 is not mapped");
  const PageMapping beyond[] = {{1, 8}};
  ExpectRefused(model_->MapPages(0, beyond), "physical page 8");
  ASSERT_TRUE(model_->Close(0).ok());
  open.ids.assign(257, 3);
  ExpectRefused(model_->Open(open), "257 ids");
  open.ids.assign(5, 4096);
  open.num_prompt_ids = 5;
  ExpectRefused(model_->Open(open), "token id 4096");
}

TEST_F(ModelTest, ErrorsOfTheRowSourceComeThroughAndAnEpochForgets) {
  Open(0, 20);
  rows_->fails = true;
  EXPECT_EQ(Prefill(0, 0, 20).status().code(), absl::StatusCode::kDeadlineExceeded);
  rows_->fails = false;
  ASSERT_TRUE(model_->BeginEpoch(nullptr, rows_.get()).ok());
  EXPECT_EQ(model_->slots_in_use(), 0);
  EXPECT_EQ(model_->pages_in_use(), 0);
  EXPECT_EQ(model_->CommittedLength(0), -1);
  Open(0, 20);
  EXPECT_EQ(model_->slots_in_use(), 1);
  EXPECT_TRUE(Prefill(0, 0, 20).ok());
}

TEST_F(ModelTest, DraftsComeWhenAskedForAndAreKeptForOneRound) {
  Open(0, 30);
  const auto first = Prefill(0, 0, 30, true);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(first->tokens, SizeIs(1));
  EXPECT_THAT(first->drafts, SizeIs(5));
  EXPECT_THAT(first->draft_confidences, SizeIs(5));
  const auto round = Round(0, 30, 5);
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_THAT(round->tokens, SizeIs(static_cast<size_t>(round->accepted) + 1));
  EXPECT_THAT(round->drafts, IsEmpty());
  EXPECT_EQ(model_->CommittedLength(0), 31 + round->accepted);
  EXPECT_FALSE(Round(0, model_->CommittedLength(0), 1).ok());
}

TEST_F(ModelTest, TruncationAndReopeningContinueAsIfNothingHappened) {
  Open(0, 30);
  std::vector<int32_t> tokens = Prefill(0, 0, 30)->tokens;
  for (int i = 0; i < 6; ++i)
    tokens.push_back(Round(0, 30 + i, 0)->tokens[0]);
  // Back behind emitted tokens: they come again.
  ASSERT_TRUE(model_->Truncate(0, 33).ok());
  for (int i = 3; i < 6; ++i)
    EXPECT_EQ(Round(0, 30 + i, 0)->tokens[0], tokens[static_cast<size_t>(i) + 1]);
  // Back into the prompt: its rest is prefilled again.
  ASSERT_TRUE(model_->Truncate(0, 20).ok());
  EXPECT_EQ(Prefill(0, 20, 30)->tokens[0], tokens[0]);
  EXPECT_EQ(Round(0, 30, 0)->tokens[0], tokens[1]);
  ExpectRefused(model_->Truncate(0, 40), "committed length is 31");
  // Reopened with what was emitted, in the other slot.
  OpenSequence open;
  open.slot = 1;
  open.ids.resize(30);
  std::iota(open.ids.begin(), open.ids.end(), 0);
  open.num_prompt_ids = 30;
  open.ids.insert(open.ids.end(), tokens.begin(), tokens.begin() + 4);
  ASSERT_TRUE(model_->Open(open).ok());
  const PageMapping page[] = {{0, 7}};
  ASSERT_TRUE(model_->MapPages(1, page).ok());
  EXPECT_EQ(Prefill(1, 0, 34)->tokens[0], tokens[4]);
}

TEST_F(ModelTest, MasksForbidTokens) {
  Open(0, 12);
  std::vector<uint8_t> bits(4096 / 8, 0);
  bits[77 / 8] = static_cast<uint8_t>(1 << (77 % 8));
  ExpectRefused(model_->SetMask(1, std::span(bits).first(5)), "5 bytes");
  ASSERT_TRUE(model_->SetMask(1, bits).ok());
  StepPlan plan;
  plan.prefill = {{0, 0, 12, false, 1}};
  const auto result = model_->RunStep(plan);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->sequences[0].tokens, ::testing::ElementsAre(77));
}

}  // namespace
}  // namespace twinspark
