// A session whose ring this test writes itself, over an engine that nobody polls: hints beyond the
// bound drop the oldest one, also for a request of their class, and what was counted is there.
#include "engram_service/shm/ring_session.h"

#include <cstring>
#include <memory>
#include <vector>

#include <sys/mman.h>

#include <gtest/gtest.h>

#include "engram_service/io/inline_reader.h"
#include "engram_service/read/local_rows.h"

namespace twinspark::engram {
namespace {

constexpr int kTokens = 40;

class RingSessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tables = TableSet::Open({TWINSPARK_DEMO_MODEL, "", 0, 2});
    ASSERT_TRUE(tables.ok()) << tables.status();
    tables_ = *std::move(tables);
    const auto orders = static_cast<size_t>(tables_->shape().max_ngram_size - 1);
    auto cache = RowCache::Create(
        {static_cast<uint32_t>(tables_->columns().size() / orders),
         static_cast<uint32_t>(tables_->num_layers()), tables_->table(0).row_weight_bytes(),
         tables_->table(0).row_scale_bytes()},
        size_t{8} << 20);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_ = *std::move(cache);
    engine_ = std::make_unique<GatherEngine>(*tables_, reader_, cache_.get());
    RowAttachRequest request = {};
    request.max_round_rows = 6;
    request.max_chunk_rows = 300;
    auto session = RingSession::Create(1, *tables_, true, request);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    control_bytes_ = session_->reply().control_bytes;
    control_ = mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED,
                    session_->descriptors()[0], 0);
    ASSERT_NE(control_, MAP_FAILED);
  }
  void TearDown() override {
    if (engine_ != nullptr) Finish();
    if (control_ != nullptr) munmap(control_, control_bytes_);
  }

  // Ids of the n-th request; no two requests share an n-gram.
  static std::vector<int32_t> Ids(int n) {
    std::vector<int32_t> ids;
    for (int i = 0; i < kTokens; ++i)
      ids.push_back(10 + n * kTokens + i);
    return ids;
  }
  // Puts a request for Ids(n) into the ring and lets the session take it.
  void Send(int n, uint8_t op, uint8_t priority) {
    auto* header = static_cast<RowRingHeader*>(control_);
    const std::vector<int32_t> ids = Ids(n);
    const RowSequence sequence = {0, 0, kTokens};
    std::vector<uint8_t> payload(sizeof(sequence) + ids.size() * 4 + kTokens / 8, 0xff);
    memcpy(payload.data(), &sequence, sizeof(sequence));
    memcpy(&payload[sizeof(sequence)], ids.data(), ids.size() * 4);
    RowRequest record = {};
    record.id = static_cast<uint64_t>(n) + 1;
    record.attach_epoch = 1;
    record.op = op;
    record.priority = priority;
    record.layers = 3;
    record.line = static_cast<uint32_t>(n);
    record.num_sequences = 1;
    record.num_ids = kTokens;
    record.num_tokens = kTokens;
    record.slab = header->num_small_slabs;
    record.payload_bytes = static_cast<uint32_t>(payload.size());
    record.submit_ns = static_cast<uint64_t>(MonotonicNs());
    auto* to = static_cast<uint8_t*>(control_) + header->ring_offset + header->head;
    memcpy(to, &record, sizeof(record));
    memcpy(to + sizeof(record), payload.data(), payload.size());
    header->head += (sizeof(record) + payload.size() + TWINSPARK_ROW_RING_UNIT - 1) /
                    TWINSPARK_ROW_RING_UNIT * TWINSPARK_ROW_RING_UNIT;
    bool progress = false;
    ASSERT_TRUE(session_->TakeRequests(*engine_, stats_, progress));
    ASSERT_TRUE(progress);
  }
  void Finish() {
    while (!engine_->idle())
      engine_->Poll(true);
  }
  // Blocks read for the rows of Ids(n): none when a hint brought all of them.
  uint64_t ReadsFor(int n) {
    const uint64_t before = engine_->stats().reads;
    GatherJob job;
    EXPECT_TRUE(AppendWindows(tables_->hasher(), {0, 0, Ids(n), {}}, job.windows).ok());
    job.layers = 3;
    engine_->Start(std::move(job));
    Finish();
    return engine_->stats().reads - before;
  }

  std::unique_ptr<TableSet> tables_;
  std::unique_ptr<RowCache> cache_;
  InlineReader reader_{4};
  std::unique_ptr<RingSession> session_;  // outlives the engine, whose jobs report to it
  std::unique_ptr<GatherEngine> engine_;
  SessionStats stats_;
  size_t control_bytes_ = 0;
  void* control_ = nullptr;
};

TEST_F(RingSessionTest, TheOldestOfTooManyHintsIsDropped) {
  for (int n = 0; n < 4; ++n)
    Send(n, kRowOpPrefetch, kRowClassHint);
  EXPECT_EQ(stats_.dropped_hints, 0u);
  Send(4, kRowOpPrefetch, kRowClassHint);
  EXPECT_EQ(stats_.hints, 5u);
  EXPECT_EQ(stats_.dropped_hints, 1u);
  Finish();
  for (int n = 1; n <= 4; ++n)
    EXPECT_EQ(ReadsFor(n), 0u) << "hint " << n;
  EXPECT_GT(ReadsFor(0), 0u);
  // The places are free again: four more fit.
  for (int n = 5; n < 9; ++n)
    Send(n, kRowOpPrefetch, kRowClassPrefill);
  EXPECT_EQ(stats_.dropped_hints, 1u);
}

TEST_F(RingSessionTest, ARequestOfTheirClassTakesTheOldestHintsPlace) {
  for (int n = 0; n < 4; ++n)
    Send(n, kRowOpPrefetch, kRowClassHint);
  Send(4, kRowOpGather, kRowClassHint);
  EXPECT_EQ(stats_.refused, 0u);
  EXPECT_EQ(stats_.dropped_hints, 1u);
  Finish();
  EXPECT_EQ(ReadsFor(1), 0u);
  EXPECT_GT(ReadsFor(0), 0u);
  const GatherMeters& meters = engine_->meters();
  EXPECT_EQ(meters.classes[2].requests.get(), 5u);
  EXPECT_EQ(meters.classes[2].tokens.get(), 5u * kTokens);
  uint64_t taken = 0;
  for (const Count& count : meters.classes[2].queue_ns.counts())
    taken += count.get();
  EXPECT_EQ(taken, 5u);
  for (size_t layer = 0; layer < 2; ++layer) {
    uint64_t gathered = 0;
    for (const Count& count : meters.layers[layer][2].gather_ns.counts())
      gathered += count.get();
    EXPECT_EQ(gathered, 1u) << "layer " << layer;
  }
}

}  // namespace
}  // namespace twinspark::engram
