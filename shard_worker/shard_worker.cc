// See shard_worker.h.
#include "shard_worker/shard_worker.h"

#include <chrono>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include <grpcpp/impl/service_type.h>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/file_util.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr int kTicksPerRefresh = 10;

}  // namespace

ModelBackend::Options ShardWorker::BackendOptions(const Settings& settings) {
  ModelBackend::Options options;
  options.advertise_host = settings.String("ADVERTISE_ADDR");
  options.num_threads = static_cast<int>(settings.Int("COMPUTE_THREADS"));
  options.simd_target = settings.String("SIMD_TARGET");
  options.f16_copy = settings.Bool("DECODED_F16");
  options.memory_budget_bytes =
      static_cast<uint64_t>(settings.Double("MEMORY_BUDGET_GIB") * static_cast<double>(1u << 30));
  options.model_dir = settings.String("MODEL_DIR");
  options.engram_dir = settings.String("ENGRAM_DIR");
  return options;
}

ShardWorker::ShardWorker(const Settings& settings)
    : settings_(settings),
      worker_metrics_(metrics_),
      backend_(BackendOptions(settings), RowServiceConnector()) {
  if (settings.IsSet("OP_LOG_DIR")) op_log_.emplace(settings.String("OP_LOG_DIR"));
}

ShardWorker::~ShardWorker() {
  server_.reset();  // no more calls into the state machine
  core_.reset();
}

absl::Status ShardWorker::Start() {
  if (settings_.String("BACKEND") != "cpu") {
    return absl::InvalidArgumentError(
        absl::StrCat("BACKEND is \"", settings_.String("BACKEND"), "\", this build has: cpu"));
  }
  if (settings_.IsSet("OP_LOG_DIR")) {
    std::error_code error;
    std::filesystem::create_directories(settings_.String("OP_LOG_DIR"), error);
    if (error) {
      return absl::InvalidArgumentError(absl::StrCat("OP_LOG_DIR='", settings_.String("OP_LOG_DIR"),
                                                     "' cannot be made: ", error.message()));
    }
  }
  if (settings_.IsSet("METRICS_ADDR")) {
    RETURN_IF_ERROR(metrics_.Expose(settings_.String("METRICS_ADDR")));
  }
  WorkerCore::Options options;
  options.drain_seconds = settings_.Double("DRAIN_SECONDS");
  core_ = std::make_unique<WorkerCore>(
      options, backend_, clock_,
      [this](int exit_code, const std::string& reason) {
        LOG_INFO << "exit wanted code=" << exit_code << " reason=\"" << reason << "\"";
        const std::lock_guard<std::mutex> lock(mutex_);
        exit_code_ = exit_code;
        exit_wanted_.notify_all();
      },
      [this](const GroupConfig& group, const WorkerOp& op, const OpOutcome& outcome) {
        worker_metrics_.OnOp(op, outcome);
        if (op_log_.has_value()) op_log_->Write(group, op, outcome);
      });
  service_ = NewShardWorkerService(*core_, ProcessFacts::Own());
  std::vector<grpc::Service*> services = {service_.get()};
  if (settings_.Bool("TEST_HOOKS")) {
    test_hooks_ = NewTestHooksService(*core_);
    services.push_back(test_hooks_.get());
    LOG_WARNING << "TEST_HOOKS is on: this worker computes wrong results when asked to";
  }
  ASSIGN_OR_RETURN(server_, GrpcServer::Start(settings_.String("WORKER_LISTEN"), services));
  server_->SetServing(true);
  if (settings_.IsSet("PORT_FILE")) {
    RETURN_IF_ERROR(WriteFileAtomically(settings_.String("PORT_FILE"), server_->address()));
  }
  LOG_INFO << "listening address=" << server_->address() << " build=\"" << BuildId() << "\""
           << " backend=cpu simd=" << backend_.Facts().simd_targets.front();
  return absl::OkStatus();
}

int ShardWorker::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (int tick = 0; !exit_code_.has_value(); ++tick) {
    exit_wanted_.wait_for(lock, kTick, [this] { return exit_code_.has_value(); });
    lock.unlock();
    core_->Tick();
    if (tick % kTicksPerRefresh == 0) worker_metrics_.Refresh(core_->Status());
    lock.lock();
  }
  return *exit_code_;
}

}  // namespace twinspark
