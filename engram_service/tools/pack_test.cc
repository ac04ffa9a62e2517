// Packing end to end on synthetic tables: every row of native, EGPACK01 and DSV41EN1 is the same;
// the packer killed at any of its disk operations, a full disk and read errors end in a file that
// resumes or in a refusal, never in a wrong row; one flipped bit in any structure is caught.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/safetensors.h"
#include "common/testing/seeded_rng.h"
#include "common/testing/temp_dir.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/store/compat_table.h"
#include "engram_service/store/pack_journal.h"
#include "engram_service/store/pack_manifest.h"
#include "engram_service/store/packed_table.h"
#include "engram_service/store/row_samples.h"
#include "engram_service/store/row_table_writer.h"
#include "engram_service/store/synthetic.h"
#include "engram_service/testing/small_model.h"
#include "engram_service/tools/compat_writer.h"

namespace twinspark::engram {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// In memory where there is such a file system: hundreds of runs sync tens of MiB each, and a killed
// process leaves the same bytes behind on any of them.
class OutDir : public TempDir {
 public:
  OutDir() : TempDir(InMemory()) {}
};

// A synthetic model and its native tables; 12 columns of `bucket_start` or a little more rows.
struct Source {
  explicit Source(uint64_t bucket_start) {
    EXPECT_TRUE(WriteSmallModel(dir.path(), bucket_start).ok());
    auto loaded = LoadHasher(dir.path());
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    hasher = *std::move(loaded);
    auto opened = Checkpoint::Open(dir.path());
    EXPECT_TRUE(opened.ok()) << opened.status();
    checkpoint = *std::move(opened);
    for (int i = 0; i < 2; ++i) {
      auto table = NativeTable::Open(*checkpoint, hasher->shape(), hasher->layer(i), false);
      EXPECT_TRUE(table.ok()) << table.status();
      tables.push_back(*std::move(table));
    }
  }
  OutDir dir;
  std::unique_ptr<Hasher> hasher;
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<std::unique_ptr<NativeTable>> tables;
};

PackOptions Options(const Source& source, const std::string& out, int rank, int world) {
  PackOptions options;
  options.out_dir = out;
  options.target = {static_cast<uint32_t>(rank), static_cast<uint32_t>(world),
                    world == 1 ? kSchemeAll : kSchemeBalanced,
                    *BalancedColumns(source.hasher->shape(), rank, world)};
  options.created_unix = 1;
  options.extents_per_sync = 1;
  return options;
}

absl::StatusOr<PackResult> Pack(const Source& source,
                                int layer_idx,
                                const PackOptions& options,
                                PackFiles& files) {
  const NativeTable& table = *source.tables[static_cast<size_t>(layer_idx)];
  return PackTable(table, SourceOf(table), *source.hasher, layer_idx, options, files);
}

// Number of rows of a table that are not what their number says.
uint64_t WrongRows(const Source& source, const RowTable& table, int layer_idx) {
  const LayerHash& layer = source.hasher->layer(layer_idx);
  std::vector<uint8_t> got(264);
  std::vector<uint8_t> want(264);
  uint64_t wrong = 0;
  for (int column = 0; column < 12; ++column) {
    if (!table.HasColumn(column)) continue;
    const size_t c = static_cast<size_t>(column);
    for (uint32_t bucket = 0; bucket < layer.primes[c]; ++bucket) {
      SyntheticRow(layer.offsets[c] + bucket, std::span(want).first(256),
                   std::span(want).subspan(256));
      const absl::Status status = table.ReadRow(column, bucket, got);
      wrong += status.ok() && got == want ? 0 : 1;
    }
  }
  return wrong;
}

std::string Content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Pack, NativePackedAndCompatRowsAreEqual) {
  const Source source(1000);
  PackFiles files;
  for (const auto& [rank, world] : {std::pair{0, 1}, {0, 2}, {1, 2}}) {
    OutDir out;
    PackOptions options = Options(source, out.path(), rank, world);
    options.compare_all_rows = rank == 1;
    for (int layer = 0; layer < 2; ++layer) {
      const auto result = Pack(source, layer, options, files);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_FALSE(result->already_there);
      const auto table =
          PackedTable::Open(result->path, *source.hasher, layer, options.target.columns, true);
      ASSERT_TRUE(table.ok()) << table.status();
      EXPECT_EQ(WrongRows(source, **table, layer), 0u);
      const auto again = Pack(source, layer, options, files);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_TRUE(again->already_there);
    }
    // The service's view of the directory.
    const auto set = TableSet::Open({source.dir.path(), "", rank, world, out.path()});
    ASSERT_TRUE(set.ok()) << set.status();
    EXPECT_EQ((*set)->tier(), "packed");
    const auto native = TableSet::Open({source.dir.path(), "", rank, world});
    ASSERT_TRUE(native.ok()) << native.status();
    EXPECT_EQ((*set)->model_digest(), (*native)->model_digest());
    std::vector<int32_t> ids;
    for (int i = 0; i < 300; ++i)
      ids.push_back(i * 7 % 2000);
    const SequenceView view{0, 0, ids, {}};
    const auto a = LocalRows::Over(**set);
    const auto b = LocalRows::Over(**native);
    ASSERT_TRUE(a->Gather(std::span(&view, 1)).ok());
    ASSERT_TRUE(b->Gather(std::span(&view, 1)).ok());
    for (int layer = 0; layer < 2; ++layer) {
      EXPECT_TRUE(std::ranges::equal(a->weights(layer), b->weights(layer)));
      EXPECT_TRUE(std::ranges::equal(a->scales(layer), b->scales(layer)));
    }
  }
}

// Samples of the whole table, as every node that serves it can tell them.
RowSamples WholeTable(const RowTable& table, const LayerHash& layer) {
  const auto samples = SamplesOfWholeTable(table, layer);
  EXPECT_TRUE(samples.ok()) << samples.status();
  return samples.ok() ? *samples : RowSamples();
}

TEST(Pack, EveryFormatOfOneTableHasTheSameSamplesAndAnotherTableHasOthers) {
  const Source source(400);
  const LayerHash& layer = source.hasher->layer(0);
  const RowSamples native = WholeTable(*source.tables[0], layer);
  ASSERT_EQ(native.size(), 12u);
  for (const std::string& sample : native)
    EXPECT_EQ(sample.size(), kRowSampleBytes);
  EXPECT_GE(FirstDifference(native, WholeTable(*source.tables[1], source.hasher->layer(1))), 0);
  PackFiles files;
  for (int rank = 0; rank < 2; ++rank) {
    OutDir out;
    const PackOptions options = Options(source, out.path(), rank, 2);
    const auto packed = Pack(source, 0, options, files);
    ASSERT_TRUE(packed.ok()) << packed.status();
    const auto table =
        PackedTable::Open(packed->path, *source.hasher, 0, options.target.columns, false);
    ASSERT_TRUE(table.ok()) << table.status();
    EXPECT_EQ(WholeTable(**table, layer), native);
    // Without the manifest it knows its own columns; pack_rows puts the manifest back.
    fs::remove(ManifestPath(packed->path));
    const RowSamples own = WholeTable(**table, layer);
    EXPECT_EQ(FirstDifference(own, native), -1);
    EXPECT_EQ(std::count(own.begin(), own.end(), ""), 6);
    ASSERT_TRUE(Pack(source, 0, options, files).ok());
    EXPECT_EQ(WholeTable(**table, layer), native);
    // A manifest of another content, or no JSON, says nothing.
    for (const char* text : {"{\"footer_sha256\": \"00\"}", "{"}) {
      std::ofstream(ManifestPath(packed->path)) << text;
      EXPECT_EQ(WholeTable(**table, layer), own);
    }
  }
}

TEST(Pack, AManifestThatContradictsItsFileIsRefused) {
  const Source source(400);
  const LayerHash& layer = source.hasher->layer(0);
  OutDir out;
  PackFiles files;
  const PackOptions options = Options(source, out.path(), 0, 2);
  const auto packed = Pack(source, 0, options, files);
  ASSERT_TRUE(packed.ok()) << packed.status();
  const auto table =
      PackedTable::Open(packed->path, *source.hasher, 0, options.target.columns, false);
  ASSERT_TRUE(table.ok()) << table.status();
  RowSamples wrong = WholeTable(**table, layer);
  wrong[static_cast<size_t>(options.target.columns[2])][0] ^= 1;
  ASSERT_TRUE(WriteManifest(packed->path, (*table)->layout().header, {}, wrong).ok());
  const auto samples = SamplesOfWholeTable(**table, layer);
  EXPECT_EQ(samples.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(samples.status().message(),
              HasSubstr("column " + std::to_string(options.target.columns[2])));
}

// The header of a source says nothing about its rows.
TEST(Pack, AnExistingFileGetsNoManifestOfASourceWithOtherRows) {
  const Source source(400);
  OutDir out;
  PackFiles files;
  const PackOptions options = Options(source, out.path(), 0, 2);
  const auto packed = Pack(source, 0, options, files);
  ASSERT_TRUE(packed.ok()) << packed.status();
  fs::remove(ManifestPath(packed->path));
  const std::string path = source.tables[0]->path();
  std::string bytes = Content(path);
  for (size_t i = source.tables[0]->weight_offset(); i < bytes.size(); ++i) {
    if ((bytes[i] & 0x7f) != 0x7f) bytes[i] = static_cast<char>(bytes[i] ^ 0x80);
  }
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << bytes;
  const auto again = Pack(source, 0, options, files);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(again.status().message(), HasSubstr("differ from"));
  EXPECT_FALSE(fs::exists(ManifestPath(packed->path)));
}

TEST(Pack, CompatFilesOfBothSplitsAreReadFromTheirHeaders) {
  const Source source(500);
  for (const CompatSplit split : {CompatSplit::kColumns, CompatSplit::kEqualRows}) {
    OutDir out;
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<std::string> paths;
      for (int rank = 0; rank < 2; ++rank) {
        const auto path =
            WriteCompatFile(*source.tables[static_cast<size_t>(layer)], source.hasher->shape(),
                            source.hasher->layer(layer), {out.path(), rank, 2, split, {}});
        ASSERT_TRUE(path.ok()) << path.status();
        paths.push_back(*path);
      }
      const auto table =
          CompatTable::Open(paths, source.hasher->shape(), source.hasher->layer(layer), true);
      ASSERT_TRUE(table.ok()) << table.status();
      for (int column = 0; column < 12; ++column)
        EXPECT_TRUE((*table)->HasColumn(column));
      EXPECT_EQ(WrongRows(source, **table, layer), 0u);
    }
    const auto set = TableSet::Open({source.dir.path(), "", 1, 2, out.path()});
    ASSERT_TRUE(set.ok()) << set.status();
    EXPECT_EQ((*set)->tier(), "compat");
    // One rank's file alone does not hold a balanced half.
    fs::remove(out.path() + "/" + CompatFileName(1, 0, 2));
    const auto half = TableSet::Open({source.dir.path(), "", 1, 2, out.path()});
    EXPECT_THAT(half.status().message(), HasSubstr("do not cover column"));
  }
}

TEST(Pack, CompatFilesOfTwoSplitsInOneDirectoryAndWrongHeadersAreRefused) {
  const Source source(200);
  OutDir out;
  const NativeTable& table = *source.tables[0];
  const EngramShape& shape = source.hasher->shape();
  const LayerHash& layer = source.hasher->layer(0);
  const auto a =
      WriteCompatFile(table, shape, layer, {out.path(), 0, 2, CompatSplit::kColumns, {}});
  const auto b =
      WriteCompatFile(table, shape, layer, {out.path(), 1, 3, CompatSplit::kEqualRows, {}});
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_THAT(CompatTable::Open({*a, *b}, shape, layer, false).status().message(),
              HasSubstr("another file too"));
  // Every bit of the header fields: refused, or a range that the file size contradicts.
  const std::string whole = Content(*a);
  for (size_t bit = 0; bit < 48 * 8; ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    std::ofstream(*a, std::ios::binary | std::ios::trunc) << bytes;
    EXPECT_FALSE(CompatTable::Open({*a}, shape, layer, false).ok()) << "bit " << bit;
  }
}

// Kills the process at its n-th disk operation, in the middle of a write where `torn`.
class KillingFiles : public PackFiles {
 public:
  KillingFiles(int64_t operations_left, bool torn) : left_(operations_left), torn_(torn) {}
  absl::Status Allocate(int fd, uint64_t bytes, const std::string& path) override {
    Step();
    return PackFiles::Allocate(fd, bytes, path);
  }
  absl::Status Write(int fd,
                     uint64_t offset,
                     std::span<const uint8_t> bytes,
                     const std::string& path) override {
    if (left_ == 1 && torn_) {
      const size_t half = bytes.size() > 4096 ? bytes.size() / 2 / 4096 * 4096 : bytes.size() / 2;
      // A torn journal record is written without alignment, a torn extent with it.
      PackFiles::Write(fd, offset, bytes.first(half), path).IgnoreError();
    }
    Step();
    return PackFiles::Write(fd, offset, bytes, path);
  }
  absl::Status Sync(int fd, const std::string& path) override {
    Step();
    return PackFiles::Sync(fd, path);
  }
  absl::Status Truncate(int fd, uint64_t bytes, const std::string& path) override {
    Step();
    return PackFiles::Truncate(fd, bytes, path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    Step();
    return PackFiles::Rename(from, to);
  }
  absl::Status Unlink(const std::string& path) override {
    Step();
    return PackFiles::Unlink(path);
  }
  int64_t left() const { return left_; }

 private:
  void Step() {
    if (--left_ == 0) kill(getpid(), SIGKILL);
  }
  std::atomic<int64_t> left_;  // the packer writes from several threads
  const bool torn_;
};

// Runs the packer in a child that dies at operation n; true when it was killed.
bool PackAndDie(const Source& source, const PackOptions& options, int64_t n, bool torn) {
  const pid_t child = fork();
  if (child == 0) {
    KillingFiles files(n, torn);
    _exit(Pack(source, 0, options, files).ok() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

TEST(Pack, KilledAtTwoHundredPoints) {
  const uint64_t seed = TestSeed(20261201);
  SeededRng rng(seed);
  // Two extents of 16 MiB, each journalled by itself.
  const Source source(5400);
  OutDir reference_dir;
  PackFiles files;
  const auto reference = Pack(source, 0, Options(source, reference_dir.path(), 0, 1), files);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const std::string want = Content(reference->path);
  KillingFiles counter(INT64_MAX, false);
  OutDir count_dir;
  ASSERT_TRUE(Pack(source, 0, Options(source, count_dir.path(), 0, 1), counter).ok());
  const int64_t operations = INT64_MAX - counter.left();

  int kills = 0;
  int resumed = 0;
  int refused = 0;
  int wrong = 0;
  while (kills < 200) {
    OutDir out;
    const PackOptions options = Options(source, out.path(), 0, 1);
    // One to three kills before the run that may finish.
    int killed_here = 0;
    for (int64_t i = rng.Int(1, 3); i > 0 && kills + killed_here < 200; --i) {
      killed_here += PackAndDie(source, options, rng.Int(1, operations), rng.OneIn(2)) ? 1 : 0;
    }
    kills += killed_here;
    // What has the final name now must be the whole file.
    const std::string final_path = out.path() + "/" + fs::path(reference->path).filename().string();
    if (fs::exists(final_path) && Content(final_path) != want) ++wrong;
    const auto result = Pack(source, 0, options, files);
    if (!result.ok()) {
      refused += killed_here;
      continue;
    }
    resumed += killed_here;
    if (Content(result->path) != want) ++wrong;
  }
  printf("%d kills, %d resumed, %d refused, %d wrong rows\n", kills, resumed, refused, wrong);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(refused, 0);
}

// Fails one operation with an error instead of killing.
class FailingFiles : public PackFiles {
 public:
  FailingFiles(int64_t at, absl::Status error) : left_(at), error_(std::move(error)) {}
  absl::Status Allocate(int fd, uint64_t bytes, const std::string& path) override {
    return Fails() ? error_ : PackFiles::Allocate(fd, bytes, path);
  }
  absl::Status Write(int fd,
                     uint64_t offset,
                     std::span<const uint8_t> bytes,
                     const std::string& path) override {
    return Fails() ? error_ : PackFiles::Write(fd, offset, bytes, path);
  }
  absl::Status Read(int fd,
                    uint64_t offset,
                    std::span<uint8_t> bytes,
                    const std::string& path) override {
    return Fails() ? error_ : PackFiles::Read(fd, offset, bytes, path);
  }
  absl::Status Sync(int fd, const std::string& path) override {
    return Fails() ? error_ : PackFiles::Sync(fd, path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Fails() ? error_ : PackFiles::Rename(from, to);
  }

 private:
  bool Fails() { return --left_ == 0; }
  std::atomic<int64_t> left_;
  const absl::Status error_;
};

TEST(Pack, AFullDiskOrAnErrorAtAnyOperationIsReportedAndTheNextRunFinishes) {
  const Source source(1500);
  OutDir reference_dir;
  PackFiles files;
  const auto reference = Pack(source, 0, Options(source, reference_dir.path(), 0, 2), files);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const std::string want = Content(reference->path);
  int failures = 0;
  for (int64_t at = 1; at < 100; ++at) {
    OutDir out;
    const PackOptions options = Options(source, out.path(), 0, 2);
    FailingFiles failing(at, at % 2 == 0 ? absl::ResourceExhaustedError("no space left")
                                         : absl::DataLossError("Input/output error"));
    const auto first = Pack(source, 0, options, failing);
    if (first.ok()) break;
    ++failures;
    const auto second = Pack(source, 0, options, files);
    ASSERT_TRUE(second.ok()) << at << " " << second.status();
    EXPECT_EQ(Content(second->path), want) << at;
  }
  EXPECT_GE(failures, 10);
}

TEST(Pack, DamagedSourceStopsThePackerAndNamesTheRow) {
  const Source source(300);
  const std::string path = source.tables[0]->path();
  const std::string whole = Content(path);
  PackFiles files;
  {
    OutDir out;
    std::string bytes = whole;
    bytes[source.tables[0]->weight_offset() + 1234 * 256 + 17] = static_cast<char>(0xff);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    const auto result = Pack(source, 0, Options(source, out.path(), 0, 1), files);
    EXPECT_THAT(result.status().message(), HasSubstr("row 1234"));
    EXPECT_FALSE(fs::exists(out.path() + "/engram-l01.n0of1.all.egp"));
  }
  {
    OutDir out;
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole.substr(0, whole.size() / 2);
    EXPECT_FALSE(Pack(source, 0, Options(source, out.path(), 0, 1), files).ok());
  }
}

TEST(Pack, TwoPackersOfOneFile) {
  const Source source(300);
  OutDir out;
  PackOptions options = Options(source, out.path(), 0, 1);
  PackFiles files;
  absl::Status second;
  options.progress = [&](const PackProgress&) {
    if (!second.ok()) return;
    PackFiles other;
    PackOptions inner = options;
    inner.progress = nullptr;
    second = Pack(source, 0, inner, other).status();
  };
  EXPECT_TRUE(Pack(source, 0, options, files).ok());
  EXPECT_THAT(second.message(), HasSubstr("locked"));
}

// Flips every bit of a structure (or a sample of the bits of large ones) and counts what is caught.
struct Flips {
  uint64_t tried = 0;
  uint64_t caught = 0;
};

// A journal record with a flipped bit, and all after it, are not believed.
Flips FlipJournal() {
  Flips count;
  std::vector<JournalRecord> records;
  for (uint64_t i = 0; i < 4; ++i)
    records.push_back(MakeJournalRecord(i, {1, 2, {}}, 99));
  std::vector<uint8_t> journal(records.size() * sizeof(JournalRecord));
  memcpy(journal.data(), records.data(), journal.size());
  EXPECT_EQ(ParseJournal(journal, 99).size(), 4u);
  EXPECT_TRUE(ParseJournal(journal, 98).empty());
  for (size_t byte = 0; byte < journal.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      journal[byte] = static_cast<uint8_t>(journal[byte] ^ (1 << bit));
      ++count.tried;
      count.caught += ParseJournal(journal, 99).size() == byte / sizeof(JournalRecord) ? 1 : 0;
      journal[byte] = static_cast<uint8_t>(journal[byte] ^ (1 << bit));
    }
  }
  return count;
}

TEST(Pack, EveryFlippedBitIsCaught) {
  SeededRng rng(TestSeed(41));
  const Source source(300);
  OutDir out;
  PackFiles files;
  const PackOptions options = Options(source, out.path(), 0, 2);
  const auto packed = Pack(source, 0, options, files);
  ASSERT_TRUE(packed.ok()) << packed.status();
  const std::string whole = Content(packed->path);
  const auto parsed = ParseHeaderRegion(
      std::span(reinterpret_cast<const uint8_t*>(whole.data()), whole.size()), whole.size());
  ASSERT_TRUE(parsed.ok());
  const PackedHeader& h = parsed->header;
  std::map<std::string, Flips> flips;
  const std::string path = out.path() + "/flipped";
  std::ofstream(path, std::ios::binary) << whole;
  const Fd fd(open(path.c_str(), O_RDWR));
  // Caught = the file is refused at opening, or the page is refused when it is read.
  const auto try_bit = [&](const std::string& structure, uint64_t byte, int bit) {
    const auto put = [&](uint8_t value) {
      ASSERT_TRUE(WriteExactly(fd.get(), byte, std::span(&value, 1), path).ok());
    };
    put(static_cast<uint8_t>(whole[byte] ^ (1 << bit)));
    Flips& count = flips[structure];
    ++count.tried;
    const auto table = PackedTable::Open(path, *source.hasher, 0, options.target.columns, false);
    if (!table.ok()) ++count.caught;
    std::vector<uint8_t> page(kPageBytes);
    const uint64_t block = byte / kPageBytes;
    ASSERT_TRUE(ReadExactly(fd.get(), block * kPageBytes, page, path).ok());
    if (table.ok() && byte >= kHeaderRegionBytes && byte < h.footer_offset &&
        !(*table)->CheckBlock(block, page).ok()) {
      ++count.caught;
    }
    put(static_cast<uint8_t>(whole[byte]));
  };
  for (uint64_t byte = 0; byte < 4096; ++byte) {
    try_bit("header", byte, static_cast<int>(rng.Int(0, 7)));
  }
  for (uint64_t byte = 0; byte < h.segments * 64; ++byte) {
    for (int bit = 0; bit < 8; ++bit)
      try_bit("segment", 4096 + byte, bit);
  }
  for (int i = 0; i < 4096; ++i) {
    const auto page = static_cast<uint64_t>(rng.Int(0, static_cast<int64_t>(h.pages) - 1));
    try_bit("page",
            kHeaderRegionBytes + page * kPageBytes + static_cast<uint64_t>(rng.Int(0, 3959)),
            static_cast<int>(rng.Int(0, 7)));
  }
  for (uint32_t byte = kPageTrailerOffset; byte < kPageBytes; ++byte) {
    for (int bit = 0; bit < 8; ++bit)
      try_bit("trailer", kHeaderRegionBytes + byte, bit);
  }
  for (uint64_t byte = h.footer_offset; byte < h.file_bytes; ++byte) {
    try_bit("footer", byte, static_cast<int>(rng.Int(0, 7)));
  }
  flips["journal"] = FlipJournal();
  for (const auto& [structure, count] : flips) {
    printf("%-8s %llu flips tried = %llu caught\n", structure.c_str(),
           static_cast<unsigned long long>(count.tried),
           static_cast<unsigned long long>(count.caught));
    EXPECT_EQ(count.caught, count.tried) << structure;
  }
}

}  // namespace
}  // namespace twinspark::engram
