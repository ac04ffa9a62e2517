// replay_ops: runs a recorded op log (OP_LOG_DIR of a worker) against workers, without a gateway,
// and compares digests: of every rank with every other, and with the recording. The tool for any
// divergence.
//   replay_ops --log FILE --workers HOST:PORT[,...] [--engram-endpoints HOST:PORT[,...]]
//   [--model-dir DIR]
//              [--stop-at OP] [--verbose]
// Exit codes: 0 all digests equal, 1 a digest differs (the first op is named), 64 unreadable log or
// another number of workers, 69 workers not there or an op failed otherwise than recorded, 78 bad
// argument.
#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

#include "common/exit_codes.h"
#include "common/ids.h"
#include "shard_worker/runtime/op_log.h"
#include "tests/replay/worker_driver.h"

namespace twinspark {
namespace {

constexpr int kEqual = 0;
constexpr int kDiffers = 1;
constexpr int kBadLog = 64;  // or the workers do not fit it
constexpr int kUnavailable = 69;

DriverGroup GroupOf(const RecordedLog& log, const std::map<std::string, std::string>& flags) {
  DriverGroup group;
  const auto flag = [&](const char* name) {
    const auto found = flags.find(name);
    return found == flags.end() ? std::string() : found->second;
  };
  group.workers = absl::StrSplit(flag("--workers"), ',', absl::SkipEmpty());
  group.engram_endpoints = absl::StrSplit(flag("--engram-endpoints"), ',', absl::SkipEmpty());
  group.model_dir = flag("--model-dir").empty() ? log.group.model_dir : flag("--model-dir");
  group.engram_dir = log.group.engram_dir;
  group.simd_target = log.group.simd_target;
  group.f32_numerics = log.group.f32_numerics;
  group.limits.set_num_slots(static_cast<uint32_t>(log.group.limits.num_slots));
  group.limits.set_num_pages(static_cast<uint32_t>(log.group.limits.num_pages));
  group.limits.set_max_round_rows(static_cast<uint32_t>(log.group.limits.max_round_rows));
  group.limits.set_max_short_prefill_rows(
      static_cast<uint32_t>(log.group.limits.max_short_prefill_rows));
  group.limits.set_max_chunk_rows(static_cast<uint32_t>(log.group.limits.max_chunk_rows));
  group.limits.set_max_context(static_cast<uint32_t>(log.group.limits.max_context));
  return group;
}

// 0, or the exit code of the first op that is not as recorded.
int Compare(const RecordedOp& op, const std::vector<proto::OpResult>& results, bool verbose) {
  const uint64_t op_id = results[0].op_id();
  for (size_t rank = 1; rank < results.size(); ++rank) {
    if (results[rank].digest() == results[0].digest()) continue;
    std::cout << "op " << op_id << ": ranks differ: rank 0 " << Hex16(results[0].digest())
              << ", rank " << rank << " " << Hex16(results[rank].digest()) << "\n";
    return kDiffers;
  }
  if (op.has_result && results[0].status().code() != op.status_code) {
    std::cout << "op " << op_id << ": status " << results[0].status().code() << " ("
              << results[0].status().message() << "), recorded " << op.status_code << "\n";
    return kUnavailable;
  }
  if (op.has_result && results[0].digest() != op.digest) {
    std::cout << "op " << op_id << ": digest " << Hex16(results[0].digest()) << ", recorded "
              << Hex16(op.digest) << "\n";
    return kDiffers;
  }
  if (verbose) {
    std::cout << "op " << op_id << " " << Hex16(results[0].digest()) << " "
              << results[0].timings().total_us() << " us\n";
  }
  return kEqual;
}

int Run(const std::map<std::string, std::string>& flags, bool verbose) {
  const absl::StatusOr<RecordedLog> log = ReadOpLog(flags.at("--log"));
  if (!log.ok()) {
    std::cerr << log.status().message() << "\n";
    return kBadLog;
  }
  const DriverGroup group = GroupOf(*log, flags);
  if (static_cast<int>(group.workers.size()) != log->group.world) {
    std::cerr << "the log is of " << log->group.world << " ranks, --workers names "
              << group.workers.size() << "\n";
    return kBadLog;
  }
  int64_t stop_at = INT64_MAX;
  if (flags.contains("--stop-at") &&
      (!absl::SimpleAtoi(flags.at("--stop-at"), &stop_at) || stop_at < 0)) {
    std::cerr << "replay_ops: --stop-at '" << flags.at("--stop-at")
              << "': expected a number of ops\n";
    return kExitBadConfig;
  }
  const auto driver = WorkerDriver::Open(group);
  if (!driver.ok()) {
    std::cerr << driver.status() << "\n";
    return kUnavailable;
  }
  int64_t num_ops = 0;
  for (const RecordedOp& op : log->ops) {
    if (num_ops == stop_at) break;
    const auto results = (*driver)->RunOp(op.bytes);
    if (!results.ok()) {
      std::cerr << "after op " << num_ops << ": " << results.status() << "\n";
      return kUnavailable;
    }
    ++num_ops;
    if (const int code = Compare(op, *results, verbose); code != kEqual) return code;
  }
  if (const absl::Status closed = (*driver)->Close(); !closed.ok()) {
    std::cerr << "at the end: " << closed << "\n";
    return kUnavailable;
  }
  std::cout << num_ops << " ops of epoch " << log->group.epoch << " replayed on "
            << group.workers.size() << " ranks, every digest as recorded\n";
  return kEqual;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  constexpr std::string_view kUsage =
      "usage: replay_ops --log FILE --workers HOST:PORT[,...] [--engram-endpoints "
      "HOST:PORT[,...]]\n"
      "                  [--model-dir DIR] [--stop-at OPS] [--verbose]\n"
      "  --log FILE       epoch-E-rank-R.oplog, which a worker with OP_LOG_DIR wrote\n"
      "  --workers        as many as the log has ranks, without a gateway; rank 0 first\n"
      "  --model-dir DIR  instead of the directory that the log names\n"
      "  --stop-at OPS    ends after so many ops\n"
      "  --verbose        prints every op, its digest and time\n"
      "Exit codes: 0 all digests equal, 1 a digest differs, 64 unreadable log or another number "
      "of\n"
      "workers, 69 workers not there or an op failed otherwise than recorded, 78 bad argument.\n";
  const std::set<std::string> known = {"--log", "--workers", "--engram-endpoints", "--model-dir",
                                       "--stop-at"};
  std::map<std::string, std::string> flags;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      std::cout << kUsage;
      return twinspark::kEqual;
    }
    if (flag == "--verbose") {
      verbose = true;
    } else if (known.contains(flag) && i + 1 < argc) {
      flags[flag] = argv[++i];
    } else {
      std::cerr << "replay_ops: "
                << (known.contains(flag) ? "no value for '" : "unknown argument '") << flag << "'\n"
                << kUsage;
      return twinspark::kExitBadConfig;
    }
  }
  if (!flags.contains("--log") || !flags.contains("--workers")) {
    std::cerr << "replay_ops: --log and --workers are needed\n" << kUsage;
    return twinspark::kExitBadConfig;
  }
  return twinspark::Run(flags, verbose);
}
