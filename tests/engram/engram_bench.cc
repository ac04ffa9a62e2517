// The row service against the drive: random reads beside fio's on the same file, a decode step, a
// prefill chunk, rows from the cache, and what the service adds to the library. Tables: packed
// files of a model directory, best far larger than memory (synth_table, pack_rows).
//
//   engram_bench --dir MODEL --packed DIR      (--help: all flags)
//   engram_bench --smoke                       a tiny table of its own, everything once
//
// Refuses tables so small that the rows of a chunk meet in the same blocks. Ends with one line per
// bound of the row service, and exit code 1 when one is missed (not with
// --smoke). tests/engram/row_bench.sh makes tables, packs them and runs this.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "boost/json.hpp"
#include "common/check.h"
#include "common/file_util.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "common/testing/seeded_rng.h"
#include "common/testing/temp_dir.h"
#include "engram_service/io/inline_reader.h"
#include "engram_service/io/make_reader.h"
#include "engram_service/read/gather_engine.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/shm/row_server.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/row_table_writer.h"
#include "engram_service/store/synthetic.h"
#include "engram_service/tools/tool_flags.h"
#include "shard_worker/engram/ring_client.h"

namespace twinspark::engram {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kChunkTokens = 2048;
constexpr size_t kReadRounds = 8;
// Blocks of a file per row of a chunk: with 8, one row in 16 finds its block already read.
constexpr uint64_t kBlocksPerRow = 8;

double Micros(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// CPU time of this thread: what a figure costs, whatever else the machine does.
double CpuMicros() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double Quantile(std::vector<double> values, double q) {
  CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(q * static_cast<double>(values.size())))];
}

struct Options {
  std::string dir;
  std::string packed;
  int rank = 0;
  int world = 2;
  size_t depth = 32;
  double seconds = 2;
  bool fio = true;
  bool smoke = false;
};

// What the row service has to reach, as measured in this run.
struct Bound {
  std::string what;
  double value = 0;
  bool at_least = true;
  double limit = 0;

  bool met() const { return at_least ? value >= limit : value <= limit; }
};
using Bounds = std::vector<Bound>;

std::vector<int> Fds(const TableSet& tables) {
  std::vector<int> fds;
  for (int i = 0; i < tables.num_layers(); ++i) {
    for (const TableFile& file : tables.table(i).files())
      fds.push_back(file.fd.get());
  }
  return fds;
}

std::unique_ptr<BlockReader> Reader(const TableSet& tables, size_t depth) {
  auto made = MakeReader({"auto", depth, 96}, Fds(tables), true);
  CHECK(made.ok()) << made.status();
  return std::move(made->reader);
}

struct Rate {
  double per_second = 0;
  double cpu_micros = 0;  // of the reading thread, per read
};

// Blocks of random rows of all tables at constant depth. With `look_at` their checksums are
// compared, as every row's are: who reads the bytes takes their cache lines from whoever writes the
// next block there, on a virtual drive 7 to 9 % of all reads.
Rate RandomReads(const TableSet& tables, const Options& options, bool look_at, SeededRng& rng) {
  const auto reader = Reader(tables, options.depth);
  uint64_t finished = 0;
  const double cpu_begin = CpuMicros();
  const auto begin = Clock::now();
  std::array<BlockDone, kReapMax> done;
  while (Micros(begin) < options.seconds * 1e6) {
    while (reader->in_flight() < reader->depth()) {
      const auto layer_idx = static_cast<int>(rng.Int(0, tables.num_layers() - 1));
      const auto owned = rng.Int(0, static_cast<int64_t>(tables.columns().size()) - 1);
      const int column = tables.columns()[static_cast<size_t>(owned)];
      const uint32_t prime = tables.hasher().layer(layer_idx).primes[static_cast<size_t>(column)];
      const RowPlace place = tables.table(layer_idx).Locate(
          column, static_cast<uint32_t>(rng.Int(0, int64_t{prime} - 1)));
      const TableFile& file = tables.table(layer_idx).file(place.pieces[0].file_idx);
      const uint64_t block_idx = place.pieces[0].offset / kBlockBytes;
      reader->Submit({file.fd.get(), block_idx, kBlockBytes,
                      block_idx * kMaxLayers + static_cast<uint64_t>(layer_idx)});
    }
    reader->Flush();
    const size_t count = reader->Reap(done, true);
    for (const BlockDone& block : std::span(done).first(count)) {
      if (look_at) {
        const auto layer_idx = static_cast<int>(block.tag % kMaxLayers);
        CHECK(tables.table(layer_idx).CheckBlock(block.tag / kMaxLayers, block.data).ok());
      }
      reader->Release(block.buffer);
    }
    finished += count;
  }
  const double seconds = Micros(begin) / 1e6;
  const double cpu = CpuMicros() - cpu_begin;
  while (reader->in_flight() > 0) {
    const size_t count = reader->Reap(done, true);
    for (size_t i = 0; i < count; ++i)
      reader->Release(done[i].buffer);
  }
  return {static_cast<double>(finished) / seconds, cpu / static_cast<double>(finished)};
}

struct FioFigures {
  double per_second = 0;
  double p50_us = 0;
};

// fio's figures for the same files, depth and kind of read; zeros when fio is not installed. Other
// blocks every time, as ours: a drive with a cache of its own is faster with what it has read
// before.
FioFigures FioReads(const TableSet& tables, size_t depth, double seconds) {
  std::string files;
  for (int i = 0; i < tables.num_layers(); ++i)
    absl::StrAppend(&files, i == 0 ? "" : ":", tables.table(i).path());
  const std::string command = absl::StrCat(
      "fio --name=rows --filename=", files, " --file_service_type=random --readonly --rw=randread ",
      "--bs=4k --direct=1 --ioengine=io_uring --fixedbufs --registerfiles --iodepth=", depth,
      " --time_based --runtime=", static_cast<int>(std::max(1.0, seconds)),
      " --norandommap --randrepeat=0 --output-format=json 2>/dev/null");
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::string text;
  char buffer[4096];
  size_t n;
  while ((n = fread(buffer, 1, sizeof(buffer), pipe)) > 0)
    text.append(buffer, n);
  pclose(pipe);
  boost::system::error_code error;
  const size_t start = text.find('{');
  if (start == std::string::npos) return {};
  const boost::json::value value = boost::json::parse(text.substr(start), error);
  if (error) return {};
  const boost::json::value& read = value.at("jobs").at(0).at("read");
  return {read.at("iops").to_number<double>(),
          read.at("clat_ns").at("percentile").at("50.000000").to_number<double>() / 1000};
}

std::vector<int32_t> RandomIds(const TableSet& tables, SeededRng& rng, size_t count) {
  std::vector<int32_t> ids(count);
  for (auto& id : ids)
    id = static_cast<int32_t>(rng.Int(0, tables.shape().vocab_size - 1));
  return ids;
}

struct Destination {
  Destination(const TableSet& tables, size_t tokens) {
    for (int i = 0; i < tables.num_layers(); ++i) {
      const size_t rows = tokens * tables.columns().size();
      bytes[static_cast<size_t>(i)].resize(rows * tables.table(i).row_bytes());
      places[static_cast<size_t>(i)] = {
          bytes[static_cast<size_t>(i)].data(),
          bytes[static_cast<size_t>(i)].data() + rows * tables.table(i).row_weight_bytes()};
    }
  }
  std::array<std::vector<uint8_t>, kMaxLayers> bytes;
  std::array<GatherJob::Destination, kMaxLayers> places;
};

// One gather through the engine, until the last row.
void Gather(GatherEngine& engine,
            const TableSet& tables,
            const std::vector<int32_t>& ids,
            const Destination& destination,
            int priority) {
  GatherJob job;
  job.windows.resize(ids.size());
  CHECK(tables.hasher().Windows(ids, 0, {}, job.windows).ok());
  job.layers = (1u << tables.num_layers()) - 1;
  job.priority = priority;
  job.destinations = destination.places;
  bool ok = true;
  job.done = [&ok](int, GatherStatus status, const std::string&) {
    ok = ok && status == GatherStatus::kOk;
  };
  engine.Start(std::move(job));
  while (!engine.idle())
    engine.Poll(true);
  CHECK(ok);
}

// A batch of `count` random reads at once, and single reads while `count` are kept in flight.
std::pair<double, double> RawBatch(const TableSet& tables,
                                   size_t count,
                                   int rounds,
                                   SeededRng& rng) {
  const auto reader = Reader(tables, std::max<size_t>(count, 8));
  const TableFile& file = tables.table(0).file(0);
  const auto blocks = static_cast<int64_t>(file.bytes / kBlockBytes);
  std::vector<double> batches;
  std::vector<double> singles;
  std::array<BlockDone, kReapMax> done;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = Clock::now();
    for (size_t i = 0; i < count; ++i) {
      reader->Submit(
          {file.fd.get(), static_cast<uint64_t>(rng.Int(0, blocks - 1)), kBlockBytes, 0});
    }
    reader->Flush();
    size_t finished = 0;
    while (finished < count) {
      const size_t reaped = reader->Reap(done, true);
      for (size_t i = 0; i < reaped; ++i) {
        reader->Release(done[i].buffer);
        singles.push_back(Micros(begin));
      }
      finished += reaped;
    }
    batches.push_back(Micros(begin));
  }
  return {Quantile(batches, 0.5), Quantile(singles, 0.5)};
}

void BenchReads(const TableSet& tables, const Options& options, SeededRng& rng, Bounds& bounds) {
  const size_t tokens = options.smoke ? 64 : kChunkTokens;
  std::vector<double> ours;
  std::vector<double> fio;
  std::vector<double> chunks;
  std::vector<double> looked_at;
  // A drive that others share changes from second to second: what was measured side by side is
  // compared, then the median taken.
  std::vector<double> of_fio;
  std::vector<double> of_reads;
  std::vector<double> our_cpu;
  std::vector<double> chunk_cpu;
  const Destination destination(tables, tokens);
  const auto random_reads = [&] {
    const Rate rate = RandomReads(tables, options, /*look_at=*/false, rng);
    ours.push_back(rate.per_second);
    our_cpu.push_back(rate.cpu_micros);
  };
  const auto checked_reads = [&] {
    looked_at.push_back(RandomReads(tables, options, /*look_at=*/true, rng).per_second);
  };
  const auto fio_reads = [&] {
    if (options.fio) fio.push_back(FioReads(tables, options.depth, options.seconds).per_second);
  };
  // Distinct blocks of prefill chunks.
  const auto chunk_reads = [&] {
    const auto reader = Reader(tables, options.depth);
    GatherEngine engine(tables, *reader);
    const double cpu_begin = CpuMicros();
    const auto begin = Clock::now();
    while (engine.stats().reads == 0 || Micros(begin) < options.seconds * 1e6) {
      Gather(engine, tables, RandomIds(tables, rng, tokens), destination, 1);
    }
    const auto reads = static_cast<double>(engine.stats().reads);
    chunks.push_back(reads / Micros(begin) * 1e6);
    chunk_cpu.push_back((CpuMicros() - cpu_begin) / reads);
  };
  // Taking turns, each first in a quarter of the rounds, so that what else the machine does and
  // what the drive still has to do fall on all.
  const std::array<std::function<void()>, 4> turns = {random_reads, fio_reads, checked_reads,
                                                      chunk_reads};
  for (size_t i = 0; i < (options.smoke ? 1 : kReadRounds); ++i) {
    for (size_t turn = 0; turn < turns.size(); ++turn)
      turns[(i + turn) % turns.size()]();
    of_reads.push_back(chunks.back() / looked_at.back());
    if (options.fio && fio.back() > 0) of_fio.push_back(ours.back() / fio.back());
  }
  const double of_fio_p50 = of_fio.empty() ? 0 : Quantile(of_fio, 0.5);
  const double of_reads_p50 = Quantile(of_reads, 0.5);
  printf("random reads, depth %zu: %.0f /s, %.2f us of CPU each; fio %.0f /s; ratio %.3f\n",
         options.depth, Quantile(ours, 0.5), Quantile(our_cpu, 0.5),
         fio.empty() ? 0 : Quantile(fio, 0.5), of_fio_p50);
  printf("the same, checked: %.0f /s\n", Quantile(looked_at, 0.5));
  printf("chunks of %zu tokens: %.0f reads/s, %.2f us of CPU each; %.3f of the checked reads\n",
         tokens, Quantile(chunks, 0.5), Quantile(chunk_cpu, 0.5), of_reads_p50);
  if (!of_fio.empty()) {
    bounds.push_back({"random reads per second, of fio's", of_fio_p50, true, 0.95});
  }
  bounds.push_back({"distinct rows of chunks, of our random reads that are checked too",
                    of_reads_p50, true, 0.95});
}

void BenchDecode(const TableSet& tables, const Options& options, SeededRng& rng, Bounds& bounds) {
  const int rounds = options.smoke ? 5 : 2000;
  const size_t rows = tables.columns().size() * static_cast<size_t>(tables.num_layers());
  const auto reader = Reader(tables, std::max<size_t>(options.depth, rows));
  GatherEngine engine(tables, *reader);
  const Destination destination(tables, 1);
  std::vector<double> gathers;
  for (int i = 0; i < rounds; ++i) {
    const std::vector<int32_t> ids = RandomIds(tables, rng, 1);
    const auto begin = Clock::now();
    Gather(engine, tables, ids, destination, 0);
    gathers.push_back(Micros(begin));
  }
  const auto [batch, single] = RawBatch(tables, rows, rounds, rng);
  const double p50 = Quantile(gathers, 0.5);
  printf(
      "decode gather of 1 token, %zu rows: p50 %.0f us, p99 %.0f us; %zu raw reads at once: last "
      "one p50 %.0f us, any one p50 %.0f us; ratio %.2f of the last\n",
      rows, p50, Quantile(gathers, 0.99), rows, batch, single, p50 / batch);
  if (options.fio) {
    printf("fio's read at depth %zu: p50 %.0f us\n", rows,
           FioReads(tables, rows, options.seconds).p50_us);
  }
  bounds.push_back({"decode gather p50, of the raw reads at once", p50 / batch, false, 1.3});
}

std::unique_ptr<RowCache> Cache(const TableSet& tables, const Options& options) {
  RowCacheShape shape;
  shape.heads = static_cast<uint32_t>(tables.columns().size()) /
                static_cast<uint32_t>(tables.shape().max_ngram_size - 1);
  shape.layers = static_cast<uint32_t>(tables.num_layers());
  shape.weight_bytes = tables.table(0).row_weight_bytes();
  shape.scale_bytes = tables.table(0).row_scale_bytes();
  auto cache = RowCache::Create(shape, size_t{options.smoke ? 8u : 64u} << 20);
  CHECK(cache.ok()) << cache.status();
  return *std::move(cache);
}

void BenchCache(const TableSet& tables, const Options& options, SeededRng& rng, Bounds& bounds) {
  const size_t tokens = options.smoke ? 64 : kChunkTokens;
  const auto cache = Cache(tables, options);
  const auto reader = Reader(tables, options.depth);
  GatherEngine engine(tables, *reader, cache.get());
  const Destination destination(tables, tokens);
  const std::vector<int32_t> ids = RandomIds(tables, rng, tokens);
  Gather(engine, tables, ids, destination, 1);
  const uint64_t reads = engine.stats().reads;
  std::vector<double> rates;
  const size_t rows = tokens * tables.columns().size() * static_cast<size_t>(tables.num_layers());
  for (int i = 0; i < (options.smoke ? 1 : 20); ++i) {
    const double begin = CpuMicros();
    Gather(engine, tables, ids, destination, 1);
    rates.push_back(static_cast<double>(rows) / (CpuMicros() - begin));
  }
  printf("rows from the cache: %.1f M rows/s/core (%llu reads meanwhile)\n", Quantile(rates, 0.5),
         static_cast<unsigned long long>(engine.stats().reads - reads));
  bounds.push_back({"rows from the cache, M/s/core", Quantile(rates, 0.5), true, 2});
}

// The same decode gather through shared memory and the reactor, rows in the cache in both cases.
void BenchRing(const TableSet& tables, const Options& options, SeededRng& rng, Bounds& bounds) {
  const int rounds = options.smoke ? 5 : 20000;
  const std::vector<int32_t> ids = RandomIds(tables, rng, 1);
  InlineReader reader(64);
  const auto cache = Cache(tables, options);
  GatherEngine engine(tables, reader, cache.get());
  const Destination destination(tables, 1);
  std::vector<double> library;
  for (int i = 0; i < rounds; ++i) {
    const auto begin = Clock::now();
    Gather(engine, tables, ids, destination, 0);
    library.push_back(Micros(begin));
  }
  auto server =
      RowServer::Start(tables, std::make_unique<InlineReader>(64), Cache(tables, options), {});
  CHECK(server.ok()) << server.status();
  RowAttachRequest request = {};
  request.max_round_rows = 6;
  request.max_chunk_rows = 64;
  request.rank = static_cast<uint32_t>(tables.options().rank);
  request.world = static_cast<uint32_t>(tables.options().world);
  request.num_layers = static_cast<uint32_t>(tables.num_layers());
  request.num_columns = static_cast<uint32_t>(tables.columns().size());
  request.row_weight_bytes = tables.table(0).row_weight_bytes();
  memcpy(request.model_digest, tables.model_digest().data(), 32);
  auto client = RingClient::Attach((*server)->socket_name(), request, {});
  CHECK(client.ok()) << client.status();
  std::vector<double> ring;
  RowRange range;
  range.ids = ids;
  for (int i = 0; i < rounds; ++i) {
    const auto begin = Clock::now();
    CHECK((*client)->Submit(std::span(&range, 1), RowClass::kDecode).ok());
    for (int layer = 0; layer < tables.num_layers(); ++layer)
      CHECK((*client)->Wait(layer).ok());
    ring.push_back(Micros(begin));
  }
  printf(
      "decode gather from the cache: library p50 %.1f us, through the service p50 %.1f us (p99 "
      "%.1f), overhead %.1f us\n",
      Quantile(library, 0.5), Quantile(ring, 0.5), Quantile(ring, 0.99),
      Quantile(ring, 0.5) - Quantile(library, 0.5));
  bounds.push_back({"the service over the library per decode gather, us",
                    Quantile(ring, 0.5) - Quantile(library, 0.5), false, 60});
}

// A packed table of a few MiB in a temporary directory.
absl::Status MakeTinyTable(const std::string& dir) {
  const auto config = ReadFile(TWINSPARK_DEMO_MODEL "/config.json", size_t{1} << 20);
  if (!config.ok()) return config.status();
  EngramShape shape;
  shape.layer_ids = {1, 4};
  shape.max_ngram_size = 4;
  shape.num_heads = 8;
  shape.head_dim = 256;
  shape.bucket_start = 200;
  shape.num_classes = 3449;
  shape.pad_token_id = 2;
  shape.vocab_size = 4096;
  return WriteSyntheticModel(dir, shape, *config);
}

// A line per measurement, before it begins: the first takes half a minute.
void Say(const Options& options, const std::string& what) {
  if (options.smoke) return;
  printf("-- %s\n", what.c_str());
  fflush(stdout);
}

absl::Status CheckSize(const TableSet& tables) {
  const TableFile& file = tables.table(0).file(0);
  const uint64_t wanted = kChunkTokens * tables.columns().size() * kBlocksPerRow * kBlockBytes;
  if (file.bytes >= wanted) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      file.path, " has ", file.bytes >> 20, " MiB: too small to measure, want ", wanted >> 20,
      " MiB a file and more; synth_table --mib N and pack_rows make "
      "them, or use --smoke"));
}

absl::Status Measure(const Options& options, Bounds& bounds) {
  TableSetOptions open = {options.dir, "", options.rank, options.world};
  open.packed_dir = options.packed;
  open.direct = true;
  ASSIGN_OR_RETURN(const auto tables, TableSet::Open(open));
  if (!options.smoke) RETURN_IF_ERROR(CheckSize(*tables));
  SeededRng rng(TestSeed(61));
  printf("tier %s, %.2f GiB a file, reader %s\n", std::string(tables->tier()).c_str(),
         static_cast<double>(tables->table(0).file(0).bytes) / (1 << 30),
         Reader(*tables, options.depth)->name().c_str());
  Say(options, absl::StrCat("random reads", options.fio ? ", fio's" : "", " and chunks, ",
                            kReadRounds, " rounds of ", options.seconds, " s each"));
  BenchReads(*tables, options, rng, bounds);
  Say(options, "decode gathers, one token at a time, beside raw reads");
  BenchDecode(*tables, options, rng, bounds);
  Say(options, "rows from the cache");
  BenchCache(*tables, options, rng, bounds);
  Say(options, "decode gathers through the service");
  BenchRing(*tables, options, rng, bounds);
  return absl::OkStatus();
}

int Run(Options options) {
  Bounds bounds;
  std::optional<TempDir> temporary;
  if (options.smoke) {
    options.dir = temporary.emplace().path();
    CHECK(MakeTinyTable(options.dir).ok());
    options.seconds = 0.05;
    options.fio = false;
  }
  const absl::Status measured = Measure(options, bounds);
  if (!measured.ok()) return ToolFailure("engram_bench", measured);
  bool all = true;
  for (const Bound& bound : bounds) {
    printf("%s: %.2f, wanted %s %.2f: %s\n", bound.what.c_str(), bound.value,
           bound.at_least ? ">=" : "<=", bound.limit, bound.met() ? "yes" : "NO");
    all = all && bound.met();
  }
  return all || options.smoke ? 0 : 1;
}

const ToolUsage kUsage = {
    "engram_bench",
    "The row service against the drive. Exit code 1 when a bound is missed, 65 for wrong tables.",
    {
        {"--dir", "DIR", "model directory with the tables"},
        {"--packed", "DIR", "packed tables of the rank", "the native ones of --dir"},
        {"--rank", "R", "whose tables", "0"},
        {"--world", "N", "number of nodes", "2"},
        {"--depth", "N", "reads in flight", "32"},
        {"--seconds", "S", "per measurement", "2"},
        {"--fio", "0|1", "fio beside it, where installed", "1"},
        {"--smoke", "", "everything once on a tiny table of its own; no bounds"},
    }};

absl::StatusOr<Options> OptionsOf(const ToolFlags& flags) {
  Options options;
  options.smoke = flags.Has("--smoke");
  options.dir = flags.Text("--dir");
  options.packed = flags.Text("--packed");
  options.fio = flags.Text("--fio", "1") != "0";
  ASSIGN_OR_RETURN(const int64_t rank, flags.Int("--rank", options.rank));
  ASSIGN_OR_RETURN(const int64_t world, flags.Int("--world", options.world));
  ASSIGN_OR_RETURN(const int64_t depth, flags.Int("--depth", 32));
  ASSIGN_OR_RETURN(options.seconds, flags.Number("--seconds", options.seconds));
  if (!options.smoke && options.dir.empty()) {
    return absl::InvalidArgumentError("give --dir and --packed, or --smoke");
  }
  if (depth < 1 || depth > 4096 || options.seconds <= 0) {
    return absl::InvalidArgumentError("--depth is 1 to 4096, --seconds above 0");
  }
  options.rank = static_cast<int>(rank);
  options.world = static_cast<int>(world);
  options.depth = static_cast<size_t>(depth);
  return options;
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  int code = 0;
  const int failed = ToolMain(kUsage, argc, argv, [&](const ToolFlags& flags) -> absl::Status {
    ASSIGN_OR_RETURN(const Options options, OptionsOf(flags));
    code = Run(options);
    return absl::OkStatus();
  });
  return failed != 0 ? failed : code;
}
