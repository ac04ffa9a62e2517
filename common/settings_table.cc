// The settings themselves. Names follow the kit that people switch from, where it has the same
// thing. A key enters here when a program reads it, not before.
#include "common/limits.h"
#include "common/settings.h"

namespace twinspark {
namespace {

constexpr double kNoMax = 9e18;

constexpr SettingSpec kTable[] = {
    // Every program
    {"CONFIG", SettingType::kString, "", 0, 0, kEveryProgram,
     "File of KEY=VALUE lines with the same keys as this one."},
    {"LOG_LEVEL", SettingType::kString, "info", 0, 0, kEveryProgram,
     "Least severe level logged: debug, info, warning, error.", "debug info warning error"},
    {"LIFELINE_FD", SettingType::kInt, "-1", -1, 1048576, kEveryProgram,
     "File descriptor of a pipe: the program ends at once when its other end closes (-1: none)."},
    {"METRICS_ADDR", SettingType::kString, "", 0, 0, kEveryProgram,
     "host:port of a Prometheus endpoint of this program's own; the gateway also serves /metrics "
     "on PORT. Unset: none."},
    {"PORT_FILE", SettingType::kString, "", 0, 0, kEveryProgram,
     "File to which the program writes the address it listens on, once it does (for port 0)."},
    {"DRAIN_SECONDS", SettingType::kDouble, "20", 0, 3600, kEveryProgram,
     "Seconds that running streams may go on after SIGTERM."},

    // Model
    {"MODEL_DIR", SettingType::kString, "", 0, 0, kEveryProgram,
     "Directory of the checkpoint: config.json, index, shards, tokenizer."},
    {"ENGRAM_DIR", SettingType::kString, "", 0, 0, kEveryProgram,
     "Directory of the Engram tables, where they do not lie in MODEL_DIR."},

    // Gateway
    {"LISTEN_ADDR", SettingType::kString, "0.0.0.0", 0, 0, kGateway,
     "Address that the HTTP server binds."},
    {"PORT", SettingType::kInt, "8888", 0, 65535, kGateway,
     "Port of the HTTP server; 0 takes a free one."},
    {"SERVED_MODEL_NAME", SettingType::kList, "DeepSeek-v4.1-Flash-EXL3", 0, 0, kGateway,
     "Model id that clients see; more names in the list are aliases."},
    {"API_KEY_FILE", SettingType::kString, "", 0, 0, kGateway,
     "File with one accepted API key per line. Unset: open to everyone who reaches the port."},
    {"CORS_ALLOW_ORIGIN", SettingType::kList, "", 0, 0, kGateway,
     "Origins (https://host:port) whose pages may call from a browser, or *. Unset: none."},
    {"SLOW_CLIENT_SECONDS", SettingType::kDouble, "10", 0.1, 3600, kGateway,
     "Seconds without taking a byte of its answer after which a client is dropped and its request "
     "ends."},
    {"WORKERS", SettingType::kList, "127.0.0.1:9472", 0, 0, kGateway,
     "host:port of every shard_worker, rank 0 first; their number is the tensor-parallel size."},
    {"ENGRAM_ENDPOINTS", SettingType::kList, "127.0.0.1:9471", 0, 0, kGateway,
     "host:port of the engram_service of every rank, as that rank's worker reaches it."},
    {"MAX_MODEL_LEN", SettingType::kInt, "0", 0, 1048576, kGateway,
     "Longest prompt plus output in tokens; 0: what the model was made for."},
    {"MAX_NUM_SEQS", SettingType::kInt, "0", 0, limits::kMaxSlots, kGateway,
     "Requests that run at once; 0: 8 on GPUs, 16 on the CPU backend."},
    {"MAX_NUM_BATCHED_TOKENS", SettingType::kInt, "2048", 64, limits::kMaxChunkRows, kGateway,
     "Largest prefill chunk in tokens."},
    {"KV_PAGES", SettingType::kInt, "0", 0, 1 << 24, kGateway,
     "KV pages of 64 tokens; 0: what the memory budget leaves."},
    {"MAX_OUTPUT_DEFAULT", SettingType::kInt, "32768", 1, 1048576, kGateway,
     "Output tokens of a request that names no maximum."},
    {"DSPARK_TOKENS", SettingType::kInt, "3", 0, limits::kMaxDrafts, kGateway,
     "Draft tokens verified per sequence and round; 0: no drafting. Results do not depend on it."},
    {"RENDEZVOUS_TIMEOUT", SettingType::kDouble, "600", 1, 86400, kGateway,
     "Seconds that the first start waits for every worker and row service."},
    {"RECOVERY_TIMEOUT", SettingType::kDouble, "0", 0, 86400, kGateway,
     "Seconds that running requests wait for a new epoch before they end with an error; 0: they "
     "end at once."},
    {"WORKER_SILENCE_MS", SettingType::kInt, "1000", 500, 600000, kGateway,
     "Milliseconds of a worker's silence after which the gateway ends the epoch."},
    {"GATEWAY_SILENCE_MS", SettingType::kInt, "2000", 1000, 600000, kGateway,
     "Milliseconds of the gateway's silence after which workers end the epoch."},
    {"RUN_AHEAD", SettingType::kBool, "1", 0, 0, kGateway,
     "Sends the next step before the result of the last one, where that is safe."},

    // Shard worker
    {"WORKER_LISTEN", SettingType::kString, "127.0.0.1:9472", 0, 0, kShardWorker,
     "host:port of the worker's gRPC server; port 0 takes a free one."},
    {"ADVERTISE_ADDR", SettingType::kString, "127.0.0.1", 0, 0, kShardWorker,
     "Address of this node that the other rank reaches."},
    {"BACKEND", SettingType::kString, "cpu", 0, 0, kShardWorker, "Where it computes: cpu."},
    {"COMPUTE_THREADS", SettingType::kInt, "0", 0, 1024, kShardWorker,
     "Compute threads; 0: the cores of this node."},
    {"SIMD_TARGET", SettingType::kString, "", 0, 0, kShardWorker,
     "Pins the instruction set of the CPU kernels (AVX2, AVX3, NEON, ...). Unset: the best one."},
    {"DECODED_F16", SettingType::kBool, "0", 0, 0, kShardWorker,
     "Keeps an exact f16 copy of every EXL3 matrix: faster on a CPU, needs up to five times the "
     "memory."},
    {"MEMORY_BUDGET_GIB", SettingType::kDouble, "0", 0, kNoMax, kShardWorker,
     "Memory this worker may take in GiB; 0: what the system says is available."},
    {"OP_LOG_DIR", SettingType::kString, "", 0, 0, kShardWorker,
     "Directory, made if need be, where the ops of every epoch are recorded for replay_ops. Unset: "
     "not recorded."},
    {"TEST_HOOKS", SettingType::kBool, "0", 0, 0, kShardWorker,
     "Accepts the fault injection used by the tests. Never on a server."},

    // Row service
    {"ENGRAM_LISTEN", SettingType::kString, "127.0.0.1:9471", 0, 0, kEngramService,
     "host:port of the row service's gRPC server; port 0 takes a free one."},
    {"ENGRAM_SOCKET", SettingType::kString, "", 0, 0, kEngramService,
     "Path of the Unix socket where workers attach; unset: a fresh one in the temporary "
     "directory."},
    {"ENGRAM_RANK", SettingType::kInt, "0", 0, 63, kEngramService,
     "Rank whose columns this service owns."},
    {"ENGRAM_WORLD", SettingType::kInt, "1", 1, 64, kEngramService,
     "Tensor-parallel size that the columns are split over."},
    {"ENGRAM_PACKED_DIR", SettingType::kString, "", 0, 0, kEngramService,
     "Directory of the packed tables that pack_rows wrote; unset: ENGRAM_DIR."},
    {"ENGRAM_REQUIRE_PACKED", SettingType::kBool, "0", 0, 0, kEngramService,
     "Refuses to serve from unpacked tables."},
    {"ENGRAM_IO", SettingType::kString, "auto", 0, 0, kEngramService,
     "How tables are read: uring or threads past the page cache, inline through it; auto: uring, "
     "where it is allowed, for tables of 1 GiB and more, else inline.",
     "auto uring threads inline"},
    {"ENGRAM_QUEUE_DEPTH", SettingType::kInt, "128", 8, 1024, kEngramService,
     "Reads in flight to the drive."},
    {"ENGRAM_SCRUB_MB_S", SettingType::kInt, "30", 0, 200, kEngramService,
     "Megabytes a second of packed tables that an idle service reads and checks; 0: none."},
    {"DSV41_CACHE_GIB", SettingType::kDouble, "-1", -1, 64, kEngramService,
     "Memory for recently used rows in GiB, taken at start; 0: none; -1: 2 for tables of 1 GiB and "
     "more, else none."},
};

}  // namespace

std::span<const SettingSpec> SettingsTable() {
  return kTable;
}

}  // namespace twinspark
