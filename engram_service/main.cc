// engram_service: the row service of a node. Settings, tables, gRPC control plane, shared-memory
// data plane, then waits for a stop signal. Exit codes: 65 wrong or damaged tables or token map, 75
// no memory, 78 bad setting or taken port, 0 after a drain.
#include <chrono>
#include <optional>
#include <string>
#include <thread>

#include "common/build_info.h"
#include "common/exit_codes.h"
#include "common/file_util.h"
#include "common/lifeline.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/rpc/grpc_server.h"
#include "common/settings.h"
#include "common/signals.h"
#include "engram_service/service/engram_metrics.h"
#include "engram_service/service/engram_service.h"
#include "engram_service/service/table_watch.h"

namespace twinspark::engram {
namespace {

int ExitCodeOf(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? kExitNoMemory : kExitBadData;
}

// Attached workers are served until they leave: their own drain decides when that is.
void DrainClients(EngramServiceImpl& service, double seconds) {
  service.StartDrain("stop signal");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < deadline && service.attachments() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

ServingOptions OptionsOf(const Settings& settings) {
  ServingOptions options;
  options.tables.model_dir = settings.String("MODEL_DIR");
  options.tables.engram_dir = settings.String("ENGRAM_DIR");
  options.tables.rank = static_cast<int>(settings.Int("ENGRAM_RANK"));
  options.tables.world = static_cast<int>(settings.Int("ENGRAM_WORLD"));
  options.tables.packed_dir = settings.String("ENGRAM_PACKED_DIR");
  options.tables.require_packed = settings.Bool("ENGRAM_REQUIRE_PACKED");
  options.server.socket = settings.String("ENGRAM_SOCKET");
  options.reader.kind = settings.String("ENGRAM_IO");
  options.reader.depth = static_cast<size_t>(settings.Int("ENGRAM_QUEUE_DEPTH"));
  options.cache_gib = settings.Double("DSV41_CACHE_GIB");
  options.scrub_bytes_per_second =
      static_cast<uint64_t>(settings.Int("ENGRAM_SCRUB_MB_S")) * 1'000'000;
  return options;
}

int Run(const Settings& settings) {
  InitLog("engram_service", settings.String("LOG_LEVEL"));
  LOG_INFO << "starting build=\"" << BuildId() << "\"";
  LOG_INFO << "settings given: " << settings.DescribeGiven();
  const Lifeline lifeline(static_cast<int>(settings.Int("LIFELINE_FD")));
  const ServingOptions options = OptionsOf(settings);
  if (options.tables.model_dir.empty()) {
    LOG_ERROR << "MODEL_DIR is not set: give --model-dir DIR with config.json and the token map";
    return kExitBadConfig;
  }
  if (options.tables.rank >= options.tables.world) {
    LOG_ERROR << "ENGRAM_RANK=" << options.tables.rank
              << " is not below ENGRAM_WORLD=" << options.tables.world;
    return kExitBadConfig;
  }
  Metrics metrics;
  if (settings.IsSet("METRICS_ADDR")) {
    const absl::Status exposed = metrics.Expose(settings.String("METRICS_ADDR"));
    if (!exposed.ok()) {
      LOG_ERROR << exposed.message();
      return kExitBadConfig;
    }
  }
  EngramServiceImpl service(options);
  // Listening first: whoever waits for this service reads "starting" instead of nothing.
  auto server = GrpcServer::Start(settings.String("ENGRAM_LISTEN"), {&service});
  if (!server.ok()) {
    LOG_ERROR << "ENGRAM_LISTEN " << server.status().message();
    return kExitBadConfig;
  }
  const absl::Status opened = service.Open();
  if (IsWrongPackedDir(opened)) {
    LOG_ERROR << "ENGRAM_PACKED_DIR " << opened.message() << "; run pack_rows, or leave it unset";
    return kExitBadConfig;
  }
  if (!opened.ok()) {
    LOG_ERROR << "cannot serve error=\"" << opened.message()
              << "\" model_dir=" << options.tables.model_dir
              << ", which must be the checkpoint's directory";
    return ExitCodeOf(opened);
  }
  const EngramMetrics feeding(metrics, service);
  const TableWatch watching(service);
  const auto serving = service.serving();
  LOG_INFO << "ready address=" << (*server)->address()
           << " socket=" << serving->server().socket_name() << " rank=" << options.tables.rank
           << " world=" << options.tables.world << " tier=" << serving->tables().tier()
           << " back_end=\"" << serving->server().reader_name() << "\""
           << " cache_bytes=" << serving->server().stats().engine.cache_bytes
           << " sampled_rows=" << serving->self_test().rows
           << " sampled_us=" << serving->self_test().micros
           << " canary=" << Hex(serving->expected_canary()).substr(0, 16);
  (*server)->SetServing(true);
  if (settings.IsSet("PORT_FILE")) {
    const absl::Status written =
        WriteFileAtomically(settings.String("PORT_FILE"), (*server)->address());
    if (!written.ok()) {
      LOG_ERROR << "PORT_FILE " << written.message();
      return kExitBadConfig;
    }
  }
  WaitForStopSignal();
  ExitOnNextStopSignal();
  (*server)->SetServing(false);
  DrainClients(service, settings.Double("DRAIN_SECONDS"));
  (*server)->Shutdown(std::chrono::milliseconds(500));
  LOG_INFO << "stopped";
  return kExitOk;
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  twinspark::BlockStopSignals();
  const auto settings = twinspark::Settings::FromMain(twinspark::kEngramService, argc, argv);
  if (!settings.ok()) return twinspark::kExitBadConfig;
  if (!settings->has_value()) return twinspark::kExitOk;
  return twinspark::engram::Run(**settings);
}
