#include "gateway/gateway.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/api_keys.h"
#include "common/build_info.h"
#include "common/file_util.h"
#include "common/host_port.h"
#include "common/limits.h"
#include "common/log.h"

namespace twinspark::gateway {
namespace {

constexpr int kHttpThreads = 2;
constexpr int64_t kCloseWaitUs = 5000;  // of an op that only closes; less than a heartbeat
constexpr int64_t kLastBytesMs = 1000;  // for answers that are complete but not all sent

ExitCode BadConfig(const std::string& what) {
  LOG_ERROR << what;
  return kExitBadConfig;
}

// What requests may ask for and this build renders or reads without enforcing it.
std::vector<std::string> NotEnforced() {
  return {"tools: rendered into the prompt, calls come back as content",
          "response_format: rendered into the prompt, not enforced"};
}

// As the workers are told it: they have working directories of their own.
std::string AbsolutePath(const std::string& path) {
  return path.empty() ? path : std::filesystem::absolute(path).lexically_normal().string();
}

// One worker cannot be two ranks: the second PrepareGroup would end the first.
absl::Status CheckAllDiffer(const std::vector<std::string>& workers) {
  for (size_t rank = 0; rank < workers.size(); ++rank) {
    const auto first = std::find(workers.begin(), workers.end(), workers[rank]);
    const auto first_rank = static_cast<size_t>(first - workers.begin());
    if (first_rank == rank) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "WORKERS='", absl::StrJoin(workers, ","), "' names ", workers[rank], " for rank ",
        first_rank, " and for rank ", rank, ": give every rank a shard_worker of its own"));
  }
  return absl::OkStatus();
}

EngineOptions ReadEngineOptions(const Settings& settings) {
  EngineOptions options;
  options.worker_endpoints = settings.List("WORKERS");
  options.worker_silence_ms = settings.Int("WORKER_SILENCE_MS") * limits::kTimeScale;

  EpochManagerConfig& epochs = options.epochs;
  epochs.model_dir = AbsolutePath(settings.String("MODEL_DIR"));
  epochs.engram_dir = AbsolutePath(settings.String("ENGRAM_DIR"));
  epochs.engram_endpoints = settings.List("ENGRAM_ENDPOINTS");
  epochs.wanted.num_slots = static_cast<int>(settings.Int("MAX_NUM_SEQS"));
  epochs.wanted.num_pages = static_cast<int32_t>(settings.Int("KV_PAGES"));
  epochs.wanted.max_chunk_rows = static_cast<int>(settings.Int("MAX_NUM_BATCHED_TOKENS"));
  epochs.wanted.max_context = static_cast<int32_t>(settings.Int("MAX_MODEL_LEN"));
  epochs.rendezvous_timeout_ms = static_cast<int64_t>(1000 * settings.Double("RENDEZVOUS_TIMEOUT"));
  epochs.gateway_silence_ms = settings.Int("GATEWAY_SILENCE_MS") * limits::kTimeScale;

  EngineConfig& engine = options.engine;
  engine.scheduler.max_output_default = static_cast<int32_t>(settings.Int("MAX_OUTPUT_DEFAULT"));
  engine.scheduler.num_drafts = static_cast<int>(settings.Int("DSPARK_TOKENS"));
  engine.scheduler.close_wait_us = kCloseWaitUs;
  engine.scheduler.run_ahead = settings.Bool("RUN_AHEAD");
  engine.recovery_timeout_ms = static_cast<int64_t>(1000 * settings.Double("RECOVERY_TIMEOUT"));
  engine.model_id = settings.List("SERVED_MODEL_NAME").front();
  engine.not_enforced = NotEnforced();
  return options;
}

}  // namespace

Gateway::Gateway(const Settings& settings) : settings_(settings) {}

Gateway::~Gateway() = default;

ExitCode Gateway::Start() {
  for (const auto& step :
       {&Gateway::StartMetrics, &Gateway::StartText, &Gateway::StartEngine, &Gateway::StartHttp}) {
    if (const ExitCode code = (this->*step)(); code != kExitOk) return code;
  }
  engine_->Begin();
  return kExitOk;
}

ExitCode Gateway::StartMetrics() {
  if (!settings_.IsSet("METRICS_ADDR")) return kExitOk;
  const absl::Status exposed = metrics_.Expose(settings_.String("METRICS_ADDR"));
  return exposed.ok() ? kExitOk : BadConfig(std::string(exposed.message()));
}

ExitCode Gateway::StartText() {
  if (!settings_.IsSet("MODEL_DIR")) {
    return BadConfig("MODEL_DIR is not set: give --model-dir DIR with the checkpoint");
  }
  auto text = TextModel::Load(AbsolutePath(settings_.String("MODEL_DIR")));
  if (!text.ok()) {
    LOG_ERROR << "cannot read the tokenizer: " << text.status().message();
    return kExitBadData;
  }
  text_ = *std::move(text);
  return kExitOk;
}

ExitCode Gateway::StartEngine() {
  EngineOptions options = ReadEngineOptions(settings_);
  options.epochs.tokenizer_vocab_size = text_.tokenizer->vocab_size();
  if (options.worker_endpoints.empty() || settings_.List("SERVED_MODEL_NAME").empty()) {
    return BadConfig("WORKERS and SERVED_MODEL_NAME need at least one entry each");
  }
  if (options.worker_endpoints.size() != options.epochs.engram_endpoints.size()) {
    return BadConfig(absl::StrCat(
        "WORKERS names ", options.worker_endpoints.size(), " workers, ENGRAM_ENDPOINTS ",
        options.epochs.engram_endpoints.size(), " row services: one of each per rank"));
  }
  for (const std::string& worker : options.worker_endpoints) {
    const auto parsed = ParseHostPort("WORKERS", worker);
    if (!parsed.ok()) return BadConfig(std::string(parsed.status().message()));
  }
  if (const absl::Status differ = CheckAllDiffer(options.worker_endpoints); !differ.ok()) {
    return BadConfig(std::string(differ.message()));
  }
  LOG_INFO << "model dir=" << options.epochs.model_dir;
  engine_ = std::make_unique<Engine>(
      options, clock_, metrics_, [](ExitCode code, const std::string& reason) {
        LOG_ERROR << "cannot start: " << reason << " exit_code=" << code;
        _exit(code);  // nothing was ever ready: there is nothing to end in order
      });
  return kExitOk;
}

ExitCode Gateway::StartHttp() {
  OpenAiOptions api_options;
  if (settings_.IsSet("API_KEY_FILE")) {
    auto keys = ReadApiKeys(settings_.String("API_KEY_FILE"));
    if (!keys.ok()) return BadConfig(absl::StrCat("API_KEY_FILE: ", keys.status().message()));
    api_options.api_keys = *std::move(keys);
  }
  api_options.model_names = settings_.List("SERVED_MODEL_NAME");
  api_options.cors_origins = settings_.List("CORS_ALLOW_ORIGIN");
  api_options.model_root = AbsolutePath(settings_.String("MODEL_DIR"));
  api_options.build_id = BuildId();
  api_ = std::make_unique<OpenAiApi>(std::move(api_options), text_, engine_->service(), metrics_);

  HttpServerOptions http_options;
  http_options.address = settings_.String("LISTEN_ADDR");
  http_options.port = static_cast<uint16_t>(settings_.Int("PORT"));
  http_options.num_threads = kHttpThreads;
  http_options.write_stall_ms =
      static_cast<int64_t>(1000 * settings_.Double("SLOW_CLIENT_SECONDS"));
  http_options.error_body = &OpenAiApi::HttpErrorBody;
  auto http = HttpServer::Start(std::move(http_options),
                                [api = api_.get()](std::shared_ptr<HttpExchange> exchange) {
                                  api->Handle(std::move(exchange));
                                });
  if (!http.ok()) {
    return BadConfig(std::string(http.status().message()));
  }
  http_ = *std::move(http);
  const std::string address = absl::StrCat(settings_.String("LISTEN_ADDR"), ":", http_->port());
  LOG_INFO << "listening address=" << address << " model=" << settings_.String("SERVED_MODEL_NAME");
  if (settings_.IsSet("PORT_FILE")) {
    const absl::Status written = WriteFileAtomically(settings_.String("PORT_FILE"), address);
    if (!written.ok()) return BadConfig(absl::StrCat("PORT_FILE: ", written.message()));
  }
  return kExitOk;
}

void Gateway::Stop() {
  engine_->Drain(static_cast<int64_t>(1000 * settings_.Double("DRAIN_SECONDS")));
  http_->StopAccepting();
  for (int64_t waited_ms = 0; http_->num_active() > 0 && waited_ms < kLastBytesMs;
       waited_ms += 10) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  http_->Stop();
  api_.reset();
  engine_.reset();
  LOG_INFO << "stopped";
}

}  // namespace twinspark::gateway
