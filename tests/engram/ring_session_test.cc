// The service's side of the ring against a hostile client: random and mutated records must end in a
// refusal or in the loss of the attachment, never in a crash or in rows for a request that is not
// exactly right. Runs in one thread, on a session without a socket.
#include "engram_service/shm/ring_session.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"
#include "engram_service/io/inline_reader.h"
#include "engram_service/read/gather_engine.h"

namespace twinspark::engram {
namespace {

class HostileClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tables = TableSet::Open({TWINSPARK_DEMO_MODEL, "", 0, 2});
    ASSERT_TRUE(tables.ok()) << tables.status();
    tables_ = *std::move(tables);
  }

  void Create() {
    RowAttachRequest request = {};
    request.max_round_rows = 6;
    request.max_chunk_rows = 40;
    auto session = RingSession::Create(77, *tables_, true, request);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    if (control_ != nullptr) munmap(control_, bytes_);
    bytes_ = session_->reply().control_bytes;
    control_ = static_cast<uint8_t*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, session_->descriptors()[0], 0));
    ASSERT_NE(control_, MAP_FAILED);
  }
  void TearDown() override {
    if (control_ != nullptr) munmap(control_, bytes_);
  }

  RowRingHeader& header() { return *reinterpret_cast<RowRingHeader*>(control_); }
  RowCompletion& line(uint32_t index) {
    return reinterpret_cast<RowCompletion*>(control_ + header().lines_offset)[index];
  }

  // Lets the service take everything there is; false = the client lost its attachment.
  bool Run() {
    InlineReader reader(32);
    GatherEngine engine(*tables_, reader);
    SessionStats stats;
    bool kept = true;
    for (bool progress = true; kept && progress;) {
      progress = false;
      kept = session_->TakeRequests(engine, stats, progress);
      while (!engine.idle())
        engine.Poll(true);
    }
    engine.Cancel(77);
    return kept;
  }

  // A right request of two tokens at position 1, one id of history, answered in `slot` (line and
  // slab).
  std::vector<uint8_t> GoodRequest(uint64_t id, uint32_t slot = 5) {
    RowRequest record = {};
    record.id = id;
    record.deadline_ns = INT64_MAX;
    record.attach_epoch = 77;
    record.op = kRowOpGather;
    record.layers = 3;
    record.line = slot;
    record.slab = slot;
    record.num_sequences = 1;
    record.num_ids = 3;
    record.num_tokens = 2;
    record.payload_bytes = sizeof(RowSequence) + 12 + 1;
    const RowSequence sequence = {1, 1, 2};
    const int32_t ids[3] = {10, 20, 30};
    std::vector<uint8_t> bytes(128);
    memcpy(bytes.data(), &record, 64);
    memcpy(&bytes[64], &sequence, sizeof(sequence));
    memcpy(&bytes[64 + sizeof(sequence)], ids, sizeof(ids));
    bytes[64 + sizeof(sequence) + sizeof(ids)] = 7;
    return bytes;
  }

  void Put(const std::vector<uint8_t>& bytes) {
    uint8_t* ring = control_ + header().ring_offset;
    memcpy(ring + header().head % TWINSPARK_ROW_RING_BYTES, bytes.data(), bytes.size());
    std::atomic_ref<uint64_t>(header().head).fetch_add(bytes.size());
  }

  std::unique_ptr<TableSet> tables_;
  std::unique_ptr<RingSession> session_;
  uint8_t* control_ = nullptr;
  size_t bytes_ = 0;
};

TEST_F(HostileClientTest, AGoodRequestWorksAndEachWrongFieldIsRefused) {
  Create();
  Put(GoodRequest(1));
  ASSERT_TRUE(Run());
  EXPECT_EQ(line(5).layer_state[0], static_cast<uint32_t>(kRowReady));
  EXPECT_EQ(line(5).layer_state[1], static_cast<uint32_t>(kRowReady));
  EXPECT_EQ(line(5).id, 1u);

  struct Case {
    size_t offset;
    uint64_t value;
    size_t bytes;
    uint32_t want;  // state of layer 0; kRowPending = the attachment ends
  };
  const Case cases[] = {
      {offsetof(RowRequest, attach_epoch), 76, 8, kRowStaleEpoch},
      {offsetof(RowRequest, op), 9, 1, kRowPending},
      {offsetof(RowRequest, priority), 3, 1, kRowPending},
      {offsetof(RowRequest, layers), 0, 1, kRowPending},
      {offsetof(RowRequest, layers), 4, 1, kRowPending},
      {offsetof(RowRequest, line), 1024, 4, kRowPending},
      {offsetof(RowRequest, num_sequences), 0, 4, kRowBadRequest},
      {offsetof(RowRequest, num_sequences), 2, 4, kRowBadRequest},
      {offsetof(RowRequest, num_sequences), UINT32_MAX, 4, kRowBadRequest},
      {offsetof(RowRequest, num_ids), 2, 4, kRowBadRequest},
      {offsetof(RowRequest, num_ids), UINT32_MAX, 4, kRowBadRequest},
      {offsetof(RowRequest, num_tokens), 3, 4, kRowBadRequest},
      {offsetof(RowRequest, num_tokens), UINT32_MAX, 4, kRowBadRequest},
      {offsetof(RowRequest, slab), 68, 4, kRowBadRequest},
      {offsetof(RowRequest, payload_bytes), 24, 4, kRowBadRequest},
      {offsetof(RowRequest, payload_bytes), UINT32_MAX, 4, kRowPending},
      {offsetof(RowRequest, payload_bytes), 65, 4, kRowPending},
      {64 + offsetof(RowSequence, position), 0, 4, kRowBadRequest},
      {64 + offsetof(RowSequence, position), 2, 4, kRowBadRequest},
      {64 + offsetof(RowSequence, num_history), UINT32_MAX, 4, kRowBadRequest},
      {64 + offsetof(RowSequence, num_tokens), UINT32_MAX, 4, kRowBadRequest},
      {64 + sizeof(RowSequence), 4096, 4, kRowBadRequest},
      {64 + sizeof(RowSequence) + 8, UINT32_MAX, 4, kRowBadRequest},
  };
  for (const Case& c : cases) {
    Create();
    std::vector<uint8_t> bytes = GoodRequest(2);
    memcpy(&bytes[c.offset], &c.value, c.bytes);
    Put(bytes);
    EXPECT_EQ(Run(), c.want != kRowPending) << "offset " << c.offset << " value " << c.value;
    EXPECT_EQ(line(5).layer_state[0], c.want) << "offset " << c.offset << " value " << c.value;
  }
}

// Half of the sessions get only right requests. Whatever the others were sent: the states of all
// lines are ones that the protocol knows, and the session after it is served as if nothing had
// been.
TEST_F(HostileClientTest, RandomMutationsNeverCrash) {
  SeededRng rng(TestSeed(31));
  int num_lost = 0, num_ready = 0, num_refused = 0;
  for (int round = 0; round < 300; ++round) {
    Create();
    const bool hostile = round % 2 == 1;
    bool damaged = false;
    constexpr uint32_t kRequests = 8;  // the bound of their class
    for (uint32_t i = 0; i < kRequests; ++i) {
      std::vector<uint8_t> bytes = GoodRequest(i + 1, i);
      for (int64_t flips = hostile ? rng.Int(0, 4) : 0; flips > 0; --flips) {
        bytes[static_cast<size_t>(rng.Int(0, 127))] ^= static_cast<uint8_t>(1 << rng.Int(0, 7));
        damaged = true;
      }
      Put(bytes);
      if (hostile && rng.OneIn(50)) {
        header().head += static_cast<uint64_t>(rng.Next());
        damaged = true;
      }
    }
    const bool kept = Run();
    if (!kept) ++num_lost;
    for (uint32_t index = 0; index < header().num_lines; ++index) {
      for (const uint32_t state : line(index).layer_state) {
        ASSERT_LE(state, static_cast<uint32_t>(kRowUnavailable)) << "line " << index;
        if (state == kRowReady) ++num_ready;
        if (state == kRowBadRequest) ++num_refused;
      }
    }
    if (damaged) continue;
    EXPECT_TRUE(kept);
    for (uint32_t i = 0; i < kRequests; ++i) {
      EXPECT_EQ(line(i).id, i + 1) << "round " << round;
      EXPECT_EQ(line(i).layer_state[0], static_cast<uint32_t>(kRowReady)) << "round " << round;
    }
  }
  // Each way out is taken, so the mutations reach it.
  EXPECT_GT(num_lost, 0);
  EXPECT_GT(num_ready, 0);
  EXPECT_GT(num_refused, 0);
}

}  // namespace
}  // namespace twinspark::engram
