// The gather engine against a reference that computes every row from its number, on a synthetic
// table; then with faults: nothing but right rows or an error may come out.
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"
#include "common/testing/temp_dir.h"
#include "engram_service/io/faulty_reader.h"
#include "engram_service/io/inline_reader.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/store/synthetic.h"
#include "engram_service/testing/small_model.h"

namespace twinspark::engram {
namespace {

using ::testing::HasSubstr;

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(WriteSmallModel(dir_.path()).ok()); }

  std::unique_ptr<TableSet> OpenTables(int rank, int world) {
    auto tables = TableSet::Open({dir_.path(), "", rank, world});
    EXPECT_TRUE(tables.ok()) << tables.status();
    return *std::move(tables);
  }

  TempDir dir_;
};

struct Tokens {
  std::vector<int32_t> ids;
  std::vector<uint8_t> dead;
};

Tokens RandomTokens(SeededRng& rng, size_t count, bool with_dead) {
  Tokens tokens;
  for (size_t i = 0; i < count; ++i) {
    tokens.ids.push_back(static_cast<int32_t>(rng.Int(0, rng.OneIn(2) ? 20 : 4095)));
    tokens.dead.push_back(with_dead && rng.OneIn(7) ? 1 : 0);
  }
  return tokens;
}

// Checks the rows of a whole sequence from position 0.
void ExpectRows(const TableSet& tables,
                const Tokens& tokens,
                int layer_idx,
                const uint8_t* weights,
                const uint8_t* scales) {
  std::vector<Window> windows(tokens.ids.size());
  ASSERT_TRUE(tables.hasher().Windows(tokens.ids, 0, tokens.dead, windows).ok());
  std::vector<uint64_t> rows(static_cast<size_t>(tables.shape().num_columns()));
  std::vector<uint8_t> want_weights(256);
  std::vector<uint8_t> want_scales(8);
  for (size_t t = 0; t < windows.size(); ++t) {
    tables.hasher().Rows(layer_idx, windows[t], rows);
    for (const int column : tables.columns()) {
      if (windows[t].live) {
        SyntheticRow(rows[static_cast<size_t>(column)], want_weights, want_scales);
      } else {
        want_weights.assign(256, 0);
        want_scales.assign(8, 127);
      }
      ASSERT_EQ(std::vector<uint8_t>(weights, weights + 256), want_weights) << t << " " << column;
      ASSERT_EQ(std::vector<uint8_t>(scales, scales + 8), want_scales) << t << " " << column;
      weights += 256;
      scales += 8;
    }
  }
}

TEST_F(EngineTest, EveryRowIsTheReferenceRow) {
  SeededRng rng(TestSeed(1));
  for (const auto& [rank, world] : {std::pair{0, 1}, {0, 2}, {1, 2}, {3, 4}}) {
    const auto tables = OpenTables(rank, world);
    const auto rows = LocalRows::Over(*tables);
    for (const size_t count : {1u, 2u, 6u, 300u}) {
      const Tokens tokens = RandomTokens(rng, count, true);
      const SequenceView view{0, 0, tokens.ids, tokens.dead};
      ASSERT_TRUE(rows->Gather(std::span(&view, 1)).ok());
      for (int layer = 0; layer < 2; ++layer) {
        ExpectRows(*tables, tokens, layer, rows->weights(layer).data(), rows->scales(layer).data());
      }
    }
  }
}

TEST_F(EngineTest, SeveralSequencesInChunksGiveTheRowsOfTheWhole) {
  SeededRng rng(TestSeed(2));
  const auto tables = OpenTables(1, 2);
  const auto rows = LocalRows::Over(*tables);
  const Tokens tokens = RandomTokens(rng, 60, true);
  std::vector<uint8_t> weights;
  std::vector<uint8_t> scales;
  for (uint32_t begin = 0; begin < 60;) {
    const uint32_t end = std::min<uint32_t>(60, begin + static_cast<uint32_t>(rng.Int(1, 17)));
    const uint32_t middle = (begin + end) / 2;  // two sequences of one request
    std::vector<SequenceView> views;
    for (const auto& [a, b] : {std::pair{begin, middle}, {middle, end}}) {
      if (a == b) continue;
      const uint32_t history = std::min(a, 3u);
      views.push_back({a, history, std::span(tokens.ids).subspan(a - history, b - a + history),
                       std::span(tokens.dead).subspan(a - history, b - a + history)});
    }
    ASSERT_TRUE(rows->Gather(views).ok());
    weights.insert(weights.end(), rows->weights(1).begin(), rows->weights(1).end());
    scales.insert(scales.end(), rows->scales(1).begin(), rows->scales(1).end());
    begin = end;
  }
  ExpectRows(*tables, tokens, 1, weights.data(), scales.data());
}

TEST_F(EngineTest, RefusesWrongHistoryAndIds) {
  const auto tables = OpenTables(0, 1);
  const auto rows = LocalRows::Over(*tables);
  const std::vector<int32_t> ids = {5, 6, 7};
  const SequenceView missing{9, 2, ids, {}};
  EXPECT_THAT(rows->Gather(std::span(&missing, 1)).message(), HasSubstr("history"));
  const std::vector<int32_t> wrong = {5, 4096};
  const SequenceView outside{0, 0, wrong, {}};
  EXPECT_THAT(rows->Gather(std::span(&outside, 1)).message(), HasSubstr("4096"));
}

struct Outcome {
  std::vector<GatherStatus> status;
  std::vector<std::string> errors;
  std::vector<uint8_t> weights[2];
  std::vector<uint8_t> scales[2];
};

// One job over both layers through a reader that `spoil` damages.
Outcome RunWithFaults(const TableSet& tables,
                      const Tokens& tokens,
                      FaultyReader::Spoil spoil,
                      GatherStats* stats) {
  FaultyReader reader(std::make_unique<InlineReader>(16), std::move(spoil));
  GatherEngine engine(tables, reader);
  Outcome outcome;
  outcome.status.resize(2, GatherStatus::kCancelled);
  outcome.errors.resize(2);
  GatherJob job;
  job.windows.resize(tokens.ids.size());
  EXPECT_TRUE(tables.hasher().Windows(tokens.ids, 0, tokens.dead, job.windows).ok());
  job.layers = 3;
  for (size_t l = 0; l < 2; ++l) {
    outcome.weights[l].resize(tokens.ids.size() * tables.columns().size() * 256);
    outcome.scales[l].resize(tokens.ids.size() * tables.columns().size() * 8);
    job.destinations[l] = {outcome.weights[l].data(), outcome.scales[l].data()};
  }
  job.done = [&](int layer, GatherStatus status, const std::string& error) {
    EXPECT_EQ(outcome.status[static_cast<size_t>(layer)], GatherStatus::kCancelled)
        << "reported twice";
    outcome.status[static_cast<size_t>(layer)] = status;
    outcome.errors[static_cast<size_t>(layer)] = error;
  };
  engine.Start(std::move(job));
  while (!engine.idle())
    engine.Poll(true);
  *stats = engine.stats();
  return outcome;
}

TEST_F(EngineTest, FaultsThatPassAreRetriedAndLeaveNoTrace) {
  SeededRng rng(TestSeed(3));
  const auto tables = OpenTables(0, 2);
  const Tokens tokens = RandomTokens(rng, 40, false);
  GatherStats stats;
  const Outcome outcome = RunWithFaults(
      *tables, tokens,
      [&](const BlockRead& read, int attempt, BlockDone& done, std::span<uint8_t> data) {
        if (attempt > 0 || read.block_idx % 3 != 0) return;
        for (auto& byte : data)
          byte = 0;  // whatever a failed read left behind
        if (read.block_idx % 2 == 0) {
          done.error = EIO;
        } else {
          done.bytes /= 2;
        }
      },
      &stats);
  EXPECT_GT(stats.retries, 0u);
  for (size_t l = 0; l < 2; ++l) {
    ASSERT_EQ(outcome.status[l], GatherStatus::kOk) << outcome.errors[l];
    ExpectRows(*tables, tokens, static_cast<int>(l), outcome.weights[l].data(),
               outcome.scales[l].data());
  }
}

TEST_F(EngineTest, FaultsThatStayFailTheLayerAndNameTheBlock) {
  SeededRng rng(TestSeed(4));
  const auto tables = OpenTables(0, 2);
  const Tokens tokens = RandomTokens(rng, 40, false);
  const int broken_fd = tables->table(1).file(0).fd.get();
  GatherStats stats;
  const Outcome outcome = RunWithFaults(
      *tables, tokens,
      [&](const BlockRead& read, int, BlockDone& done, std::span<uint8_t>) {
        if (read.fd == broken_fd && read.block_idx % 4 == 0) done.error = EIO;
      },
      &stats);
  EXPECT_EQ(outcome.status[0], GatherStatus::kOk);
  ExpectRows(*tables, tokens, 0, outcome.weights[0].data(), outcome.scales[0].data());
  EXPECT_EQ(outcome.status[1], GatherStatus::kDataError);
  EXPECT_THAT(outcome.errors[1], HasSubstr("Input/output error"));
  EXPECT_GT(stats.data_errors, 0u);
}

// A drive that finishes nothing until it is let go.
class HeldReader : public BlockReader {
 public:
  std::string name() const override { return "held"; }
  size_t depth() const override { return inner_.depth(); }
  size_t in_flight() const override { return inner_.in_flight(); }
  void Submit(const BlockRead& read) override { inner_.Submit(read); }
  void Flush() override { inner_.Flush(); }
  size_t Reap(std::span<BlockDone> out, bool wait) override {
    return held ? 0 : inner_.Reap(out, wait);
  }
  void Release(uint32_t buffer) override { inner_.Release(buffer); }

  bool held = true;

 private:
  InlineReader inner_{16};
};

TEST_F(EngineTest, BulkRequestsThatWaitTooLongForTheirFirstRowAreOverload) {
  SeededRng rng(TestSeed(6));
  const auto tables = OpenTables(0, 2);
  HeldReader reader;
  GatherEngine engine(*tables, reader);
  std::vector<uint8_t> weights(2 * 8 * tables->columns().size() * 256);
  std::vector<uint8_t> scales(2 * 8 * tables->columns().size() * 8);
  int done = 0;
  const auto start = [&](int priority, bool hint) {
    const Tokens tokens = RandomTokens(rng, 8, false);
    GatherJob job;
    job.windows.resize(8);
    ASSERT_TRUE(tables->hasher().Windows(tokens.ids, 0, tokens.dead, job.windows).ok());
    job.layers = 1;
    job.priority = priority;
    if (!hint) job.destinations[0] = {weights.data(), scales.data()};
    job.done = [&done](int, GatherStatus status, const std::string& error) {
      EXPECT_EQ(status, GatherStatus::kOk) << error;
      ++done;
    };
    engine.Start(std::move(job));
  };
  const auto wait = [&] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kQueueAgeNsMax + 1'000'000));
    engine.Poll(false);
  };
  const GatherMeters& meters = engine.meters();
  start(0, false);  // decode has its deadline, hints have time
  start(1, true);
  start(2, true);
  wait();
  EXPECT_EQ(meters.overloads.get(), 0u);
  EXPECT_FALSE(meters.overloaded(MonotonicNs()));
  start(1, false);
  EXPECT_LE(engine.NextEventNs(), MonotonicNs() + kQueueAgeNsMax);  // nobody sleeps over it
  wait();
  EXPECT_EQ(meters.overloads.get(), 1u);
  const int64_t now = MonotonicNs();
  EXPECT_GT(engine.NextEventNs(), now);  // and nobody looks all the time either
  EXPECT_FALSE(meters.overloaded(now + kOverloadHoldNs));
  reader.held = false;
  while (!engine.idle())
    engine.Poll(true);
  EXPECT_EQ(done, 4);
  wait();
  EXPECT_EQ(meters.overloads.get(), 1u);
}

TEST_F(EngineTest, TimeInTheRingCountsAsWaitingToo) {
  const auto tables = OpenTables(0, 1);
  InlineReader reader(16);
  GatherEngine engine(*tables, reader);
  engine.NoteQueueAge(kQueueAgeNsMax, 1000);
  EXPECT_FALSE(engine.meters().overloaded(1000));
  engine.NoteQueueAge(kQueueAgeNsMax + 1, 1000);
  EXPECT_TRUE(engine.meters().overloaded(1000 + kOverloadHoldNs - 1));
  EXPECT_FALSE(engine.meters().overloaded(1000 + kOverloadHoldNs));
  engine.NoteQueueAge(kQueueAgeNsMax + 1, 2000);  // the same overload goes on
  EXPECT_EQ(engine.meters().overloads.get(), 1u);
}

TEST_F(EngineTest, InvalidCodesAreNotPassedOn) {
  SeededRng rng(TestSeed(5));
  const auto tables = OpenTables(0, 1);
  const Tokens tokens = RandomTokens(rng, 4, false);
  GatherStats stats;
  const Outcome outcome = RunWithFaults(
      *tables, tokens,
      [&](const BlockRead&, int, BlockDone&, std::span<uint8_t> data) {
        for (size_t i = 0; i < data.size(); i += 128)
          data[i] = 0xff;
      },
      &stats);
  EXPECT_EQ(outcome.status[0], GatherStatus::kDataError);
  EXPECT_EQ(outcome.status[1], GatherStatus::kDataError);
}

TEST_F(EngineTest, ATruncatedFileStopsItsLayer) {
  const auto tables = OpenTables(0, 1);
  const auto rows = LocalRows::Over(*tables);
  std::filesystem::resize_file(tables->table(0).path(), 5000);
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5, 6, 7, 8};
  const SequenceView view{0, 0, ids, {}};
  EXPECT_THAT(rows->Gather(std::span(&view, 1)).message(), HasSubstr("truncated"));
  EXPECT_THAT(rows->Gather(std::span(&view, 1)).message(), HasSubstr("truncated"));
}

// Whatever moves in a file under the engine: bytes of a row, its length, only its times. Nothing
// read afterwards is passed on, rows from the cache neither, and the layer stays failed.
TEST_F(EngineTest, AFileThatChangesUnderItStopsItsLayer) {
  const auto touch = [](const std::string& path) {
    const timespec times[2] = {{0, UTIME_OMIT}, {12345, 678}};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  const auto poke = [](const std::string& path) {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-20, std::ios::end);
    file.put('\1');
  };
  const auto append = [](const std::string& path) {
    std::ofstream(path, std::ios::binary | std::ios::app) << "more";
  };
  const auto mode = [](const std::string& path) { ASSERT_EQ(chmod(path.c_str(), 0600), 0); };
  SeededRng rng(TestSeed(6));
  const Tokens tokens = RandomTokens(rng, 30, false);
  const SequenceView view{0, 0, tokens.ids, tokens.dead};
  for (const std::function<void(const std::string&)>& change :
       {std::function<void(const std::string&)>(touch), {poke}, {append}, {mode}}) {
    ASSERT_TRUE(WriteSmallModel(dir_.path()).ok());
    const auto tables = OpenTables(0, 1);
    const auto rows = LocalRows::Over(*tables);
    ASSERT_TRUE(rows->Gather(std::span(&view, 1)).ok());
    ExpectRows(*tables, tokens, 1, rows->weights(1).data(), rows->scales(1).data());
    // Longer than a tick of the file system's clock.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    change(tables->table(1).path());
    ASSERT_FALSE(tables->table(1).CheckUnchanged().ok());
    ASSERT_TRUE(tables->table(0).CheckUnchanged().ok());
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(rows->Gather(std::span(&view, 1)).message(), HasSubstr("changed on disk"));
    }
  }
}

TEST_F(EngineTest, CachedRowsOfAChangedFileAreNotServed) {
  const auto tables = OpenTables(0, 1);
  auto cache = RowCache::Create({4, 2, 256, 8}, size_t{4} << 20);
  ASSERT_TRUE(cache.ok());
  InlineReader reader(16);
  GatherEngine engine(*tables, reader, cache->get());
  const std::vector<int32_t> ids = {1, 2, 3, 4};
  std::vector<uint8_t> bytes(4 * 12 * 264);
  const auto gather = [&](bool past_cache) {
    GatherStatus result = GatherStatus::kCancelled;
    GatherJob job;
    job.windows.resize(ids.size());
    EXPECT_TRUE(tables->hasher().Windows(ids, 0, {}, job.windows).ok());
    job.layers = 1;
    job.past_cache = past_cache;
    job.destinations[0] = {bytes.data(), bytes.data() + size_t{4 * 12 * 256}};
    job.done = [&result](int, GatherStatus status, const std::string&) { result = status; };
    engine.Start(std::move(job));
    while (!engine.idle())
      engine.Poll(true);
    return result;
  };
  ASSERT_EQ(gather(false), GatherStatus::kOk);
  const uint64_t reads = engine.stats().reads;
  ASSERT_EQ(gather(false), GatherStatus::kOk);
  EXPECT_EQ(engine.stats().reads, reads) << "all in the cache";
  ASSERT_EQ(gather(true), GatherStatus::kOk);
  EXPECT_GT(engine.stats().reads, reads) << "past the cache";
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::ofstream(tables->table(0).path(), std::ios::binary | std::ios::app) << "more";
  EXPECT_EQ(gather(false), GatherStatus::kDataError);
  EXPECT_THAT(engine.layer_failure(0), HasSubstr("changed on disk"));
  EXPECT_TRUE(engine.layer_failure(1).empty());
}

// A dropped job is not reported; only what the reader has already is read for it, and what another
// job wants as well reaches that one.
TEST_F(EngineTest, ADroppedJobTakesBackItsReads) {
  constexpr size_t kDepth = 4;
  SeededRng rng(TestSeed(9));
  const auto tables = OpenTables(0, 1);
  const Tokens tokens = RandomTokens(rng, 40, false);
  const Tokens begin = {{tokens.ids.begin(), tokens.ids.begin() + 10}, {}};
  InlineReader reader(kDepth);
  GatherEngine engine(*tables, reader);
  int reported = 0;
  const auto start_hint = [&](uint64_t id) {
    GatherJob job;
    job.owner = 1;
    job.id = id;
    job.windows.resize(tokens.ids.size());
    ASSERT_TRUE(tables->hasher().Windows(tokens.ids, 0, {}, job.windows).ok());
    job.layers = 3;
    job.priority = 2;
    job.done = [&](int, GatherStatus, const std::string&) { ++reported; };
    engine.Start(std::move(job));
  };
  const auto finish = [&] {
    while (!engine.idle())
      engine.Poll(true);
  };
  start_hint(1);
  finish();
  ASSERT_EQ(reported, 2);
  const uint64_t whole = engine.stats().reads;
  ASSERT_GT(whole, 10 * kDepth);

  start_hint(2);
  engine.Drop(1, 7);  // neither another job
  engine.Drop(2, 2);  // nor another owner's
  engine.Drop(1, 2);
  finish();
  EXPECT_EQ(engine.stats().reads - whole, kDepth);
  EXPECT_EQ(engine.num_jobs(), 0u);
  EXPECT_EQ(reported, 2);

  start_hint(3);
  GatherJob job;
  job.owner = 1;
  job.id = 4;
  job.windows.resize(begin.ids.size());
  ASSERT_TRUE(tables->hasher().Windows(begin.ids, 0, {}, job.windows).ok());
  job.layers = 1;
  std::vector<uint8_t> bytes(10 * 12 * 264);
  job.destinations[0] = {bytes.data(), bytes.data() + size_t{10 * 12 * 256}};
  GatherStatus status = GatherStatus::kCancelled;
  job.done = [&](int, GatherStatus result, const std::string&) { status = result; };
  const uint64_t before = engine.stats().reads;
  engine.Start(std::move(job));
  engine.Drop(1, 3);
  finish();
  EXPECT_EQ(status, GatherStatus::kOk);
  ExpectRows(*tables, {begin.ids, std::vector<uint8_t>(10)}, 0, bytes.data(),
             bytes.data() + size_t{10 * 12 * 256});
  EXPECT_LT(engine.stats().reads - before, whole / 2);
  EXPECT_EQ(engine.stats().data_errors, 0u);
  EXPECT_EQ(reported, 2);
}

TEST_F(EngineTest, SharedBlocksAreReadOnce) {
  const auto tables = OpenTables(0, 1);
  InlineReader reader(16);
  GatherEngine engine(*tables, reader);
  const std::vector<int32_t> ids(50, 9);
  std::vector<Window> windows(50);
  ASSERT_TRUE(tables->hasher().Windows(ids, 0, {}, windows).ok());
  const size_t columns = tables->columns().size();
  std::vector<uint8_t> weights(50 * columns * 256);
  std::vector<uint8_t> scales(50 * columns * 8);
  GatherJob job;
  job.windows = windows;
  job.layers = 1;
  job.destinations[0] = {weights.data(), scales.data()};
  engine.Start(std::move(job));
  while (!engine.idle())
    engine.Poll(true);
  // Four different windows, 12 columns, at most 3 blocks per row.
  EXPECT_LE(engine.stats().reads, 4 * columns * 3);
  EXPECT_EQ(engine.stats().rows, 50 * columns);
  EXPECT_GT(engine.stats().rows_deduplicated, 40 * columns);
  ExpectRows(*tables, {ids, std::vector<uint8_t>(50)}, 0, weights.data(), scales.data());
}

// Requests of a small vocabulary through caches from tiny to ample, with reads that fail or come
// spoilt now and then: whatever is reported as there is the reference row.
TEST_F(EngineTest, CachedRowsAreTheReferenceRowsAlsoAfterFaults) {
  SeededRng rng(TestSeed(6));
  const auto tables = OpenTables(1, 2);
  for (const size_t bytes : {size_t{60} << 10, size_t{600} << 10, size_t{32} << 20}) {
    RowCacheShape shape = {2, 2, 256, 8};
    auto cache = RowCache::Create(shape, bytes);
    ASSERT_TRUE(cache.ok()) << cache.status();
    FaultyReader reader(std::make_unique<InlineReader>(16),
                        [&](const BlockRead&, int, BlockDone& done, std::span<uint8_t> data) {
                          if (rng.OneIn(100)) done.error = EIO;
                          if (!rng.OneIn(200)) return;
                          // Every row of the block then holds an invalid code.
                          for (size_t i = 0; i < data.size(); i += 8)
                            data[i] = 0xff;
                        });
    GatherEngine engine(*tables, reader, cache->get());
    const size_t columns = tables->columns().size();
    int failed = 0;
    for (int round = 0; round < 150; ++round) {
      Tokens tokens = RandomTokens(rng, static_cast<size_t>(rng.Int(1, 30)), rng.OneIn(3));
      for (auto& id : tokens.ids)
        id %= 40;
      const bool hint = rng.OneIn(4);
      std::vector<uint8_t> weights[2];
      std::vector<uint8_t> scales[2];
      GatherJob job;
      job.windows.resize(tokens.ids.size());
      ASSERT_TRUE(tables->hasher().Windows(tokens.ids, 0, tokens.dead, job.windows).ok());
      job.layers = 3;
      job.priority = hint ? 2 : 0;
      for (size_t l = 0; l < 2 && !hint; ++l) {
        weights[l].resize(tokens.ids.size() * columns * 256);
        scales[l].resize(tokens.ids.size() * columns * 8);
        job.destinations[l] = {weights[l].data(), scales[l].data()};
      }
      GatherStatus status[2] = {GatherStatus::kCancelled, GatherStatus::kCancelled};
      job.done = [&](int layer, GatherStatus s, const std::string&) { status[layer] = s; };
      engine.Start(std::move(job));
      while (!engine.idle())
        engine.Poll(true);
      for (size_t l = 0; l < 2; ++l) {
        ASSERT_NE(status[l], GatherStatus::kCancelled);
        failed += status[l] == GatherStatus::kOk ? 0 : 1;
        if (hint || status[l] != GatherStatus::kOk) continue;
        ExpectRows(*tables, tokens, static_cast<int>(l), weights[l].data(), scales[l].data());
        if (HasFatalFailure()) return;
      }
    }
    const RowCacheStats stats = engine.stats().cache;
    printf("cache of %zu bytes: %llu bigram hits, %llu misses, %d layers failed\n", bytes,
           static_cast<unsigned long long>(stats.hits[2]),
           static_cast<unsigned long long>(stats.misses[2]), failed);
    EXPECT_GT(stats.hits[2], 0u);
  }
}

TEST_F(EngineTest, CancelledAndLateJobsWriteNothingMore) {
  const auto tables = OpenTables(0, 1);
  InlineReader reader(2);
  GatherEngine engine(*tables, reader);
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5};
  const size_t columns = tables->columns().size();
  std::vector<uint8_t> weights(5 * columns * 256, 0xaa);
  std::vector<uint8_t> scales(5 * columns * 8, 0xaa);
  for (const bool cancel : {true, false}) {
    int reports = 0;
    GatherJob job;
    job.owner = 7;
    job.windows.resize(5);
    ASSERT_TRUE(tables->hasher().Windows(ids, 0, {}, job.windows).ok());
    job.layers = 1;
    job.deadline_ns = cancel ? 0 : 1;
    job.destinations[0] = {weights.data(), scales.data()};
    job.done = [&](int, GatherStatus status, const std::string&) {
      ++reports;
      EXPECT_EQ(status, GatherStatus::kTimeout);
    };
    engine.Start(std::move(job));
    if (cancel) engine.Cancel(7);
    while (!engine.idle())
      engine.Poll(true);
    EXPECT_EQ(reports, cancel ? 0 : 1);
    EXPECT_EQ(weights, std::vector<uint8_t>(weights.size(), 0xaa));
    EXPECT_EQ(engine.num_jobs(), 0u);
  }
}

}  // namespace
}  // namespace twinspark::engram
