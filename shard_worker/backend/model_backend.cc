// See model_backend.h.
#include "shard_worker/backend/model_backend.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/build_info.h"
#include "common/check.h"
#include "common/ids.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "kernels/simd_target.h"
#include "shard_worker/engram/row_client.h"
#include "shard_worker/model/forward.h"
#include "shard_worker/model/sequence_state.h"

namespace twinspark {
namespace {

constexpr int64_t kProgressPeriodMs = 100;

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "CPU";
}

ModelOptions ToModelOptions(const GroupConfig& config,
                            const ModelBackend::Options& options,
                            const GroupLimits& granted) {
  ModelOptions model;
  model.rank = config.rank;
  model.world = config.world;
  model.numerics = config.f32_numerics ? Numerics::kF32 : Numerics::kBf16;
  model.limits.num_slots = granted.num_slots;
  model.limits.num_pages = granted.num_pages;
  model.limits.max_step_rows = limits::kMaxShortPrefillRows + limits::kMaxRoundRows;
  model.limits.max_logits_rows =
      std::max(granted.num_slots, limits::kMaxRoundRows) + limits::kMaxRoundRows;
  model.limits.max_context = granted.max_context;
  model.f16_copy = options.f16_copy;
  model.engram_dir = config.engram_dir;
  return model;
}

bool SameOptions(const ModelOptions& a, const ModelOptions& b) {
  return a.rank == b.rank && a.world == b.world && a.numerics == b.numerics &&
         a.f16_copy == b.f16_copy && a.limits.num_slots == b.limits.num_slots &&
         a.limits.num_pages == b.limits.num_pages &&
         a.limits.max_step_rows == b.limits.max_step_rows &&
         a.limits.max_logits_rows == b.limits.max_logits_rows &&
         a.limits.max_context == b.limits.max_context;
}

// From LoadProgress to LoadState: speed, time left, and not more often than ten times a second.
class ProgressReporter {
 public:
  explicit ProgressReporter(const LoadObserver& observer) : observer_(observer) {}

  void Report(const LoadProgress& progress) {
    const auto now = std::chrono::steady_clock::now();
    const bool last = progress.bytes_done == progress.bytes_total;
    if (!last && now - last_ < std::chrono::milliseconds(kProgressPeriodMs)) return;
    last_ = now;
    LoadState state;
    state.phase = "load";
    state.bytes_done = static_cast<uint64_t>(progress.bytes_done);
    state.bytes_total = static_cast<uint64_t>(progress.bytes_total);
    state.tensors_done = progress.tensors_done;
    state.tensors_total = progress.tensors_total;
    state.current_file = progress.file;
    const double seconds = std::max(1e-6, Seconds(now - start_));
    state.gb_per_second = static_cast<double>(progress.bytes_done) / seconds / 1e9;
    if (state.gb_per_second > 0) {
      state.eta_seconds = static_cast<double>(progress.bytes_total - progress.bytes_done) / 1e9 /
                          state.gb_per_second;
    }
    observer_(state);
  }

 private:
  const LoadObserver& observer_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_{};
};

absl::Status AbortedNow() {
  return absl::CancelledError("the epoch is over");
}

}  // namespace

RowConnector RowServiceConnector() {
  // What the rows were in the last epoch, for as long as the process computes with one model.
  struct LastEpoch {
    std::string model_dir;
    std::optional<RowContent> content;
  };
  return
      [last = std::make_shared<LastEpoch>()](const ModelConfig& model, const GroupConfig& group,
                                             int max_step_rows) -> absl::StatusOr<RowConnection> {
        RowClientOptions options;
        if (last->model_dir == group.model_dir) options.expected = last->content;
        options.endpoint = group.engram_endpoint;
        options.rank = group.rank;
        options.world = group.world;
        options.max_round_rows = limits::kMaxRoundRows;
        options.max_chunk_rows = max_step_rows;
        auto client = RowClient::Connect(model, options);
        if (!client.ok()) {
          return absl::Status(
              client.status().code(),
              absl::StrCat("row service of rank ", group.rank, " at ", group.engram_endpoint, ": ",
                           std::string(client.status().message())));
        }
        RowConnection connection;
        RowClient* raw = client->get();
        connection.source = *std::move(client);
        connection.facts = [raw, endpoint = group.engram_endpoint] {
          const RowClientState state = raw->state();
          RowServiceFacts facts;
          facts.endpoint = endpoint;
          facts.transport = state.transport;
          facts.tier = state.tier;
          facts.table_digest = state.hash_digest;
          facts.errors = state.errors;
          facts.overloaded = state.overloaded;
          facts.requests = state.requests;
          facts.last_error = state.last_error;
          return facts;
        };
        connection.check = [raw] { return raw->CheckAlive(); };
        connection.samples = raw->content().row_samples;
        connection.accepted = [last, content = raw->content(), model_dir = group.model_dir] {
          *last = {model_dir, content};
        };
        return connection;
      };
}

ModelBackend::ModelBackend(const Options& options, RowConnector connect_rows)
    : options_(options),
      connect_rows_(std::move(connect_rows)),
      pool_(std::make_unique<ThreadPool>(
          options.num_threads > 0
              ? options.num_threads
              : std::max(1, static_cast<int>(std::thread::hardware_concurrency())))) {}

ModelBackend::~ModelBackend() = default;

BackendFacts ModelBackend::Facts() const {
  BackendFacts facts;
  facts.backend = "cpu";
  facts.device_name = CpuName();
  facts.simd_targets = SimdTargets();
  if (!options_.simd_target.empty()) facts.simd_targets = {options_.simd_target};
  const HostMemory memory = ReadHostMemory();
  facts.memory_total_bytes = memory.total_bytes;
  facts.memory_available_bytes = memory.available_bytes;
  return facts;
}

std::string ModelBackend::ResidentWeightsDigest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return weights_digest_;
}

std::string ModelBackend::ResidentConfigDigest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return config_digest_;
}

RowServiceFacts ModelBackend::RowService() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rows_.source == nullptr ? last_rows_ : rows_.facts();
}

absl::Status ModelBackend::CheckRowService() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (rows_.check == nullptr) return absl::OkStatus();
  const absl::Status alive = rows_.check();
  if (alive.ok()) return alive;
  return absl::UnavailableError(absl::StrCat("row service: ", std::string(alive.message())));
}

void ModelBackend::Abort() {
  aborted_.store(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (communicator_ != nullptr) communicator_->Abort();
}

absl::StatusOr<std::string> ModelBackend::PrepareGroup(uint64_t, int, int) {
  ASSIGN_OR_RETURN(auto listener, TcpListener::Bind(options_.advertise_host));
  const std::lock_guard<std::mutex> lock(mutex_);
  listener_ = std::move(listener);
  return listener_->address();
}

// ---- Load

bool ModelBackend::IsResident(const GroupConfig& config,
                              const ModelOptions& wanted,
                              uint64_t weights) const {
  return model_ != nullptr && config.model_dir == resident_dir_ &&
         config.engram_dir == resident_engram_dir_ && SameOptions(model_->options(), wanted) &&
         model_->digests().weights == weights;
}

absl::StatusOr<LoadReport> ModelBackend::Load(const GroupConfig& asked,
                                              const LoadObserver& observer) {
  aborted_.store(false);
  GroupConfig config = asked;
  if (!options_.model_dir.empty()) config.model_dir = options_.model_dir;
  if (!options_.engram_dir.empty()) config.engram_dir = options_.engram_dir;
  if (config.model_dir.empty()) {
    return absl::FailedPreconditionError("Configure: no model directory; set MODEL_DIR");
  }
  if (!options_.simd_target.empty() && !config.simd_target.empty() &&
      config.simd_target != options_.simd_target) {
    return absl::FailedPreconditionError(
        absl::StrCat("the group computes with ", config.simd_target,
                     ", SIMD_TARGET pins this worker to ", options_.simd_target));
  }
  if (absl::Status pinned = PinSimdTarget(config.simd_target); !pinned.ok()) {
    return absl::FailedPreconditionError(pinned.message());
  }
  uint64_t checkpoint_digest = 0;
  RETURN_IF_ERROR(Plan(config, &checkpoint_digest));
  const ModelOptions wanted = ToModelOptions(config, options_, plan_.granted);
  LoadReport report;
  if (!config.reload_weights && IsResident(config, wanted, checkpoint_digest)) {
    report.warm = true;
    FillReport(report);
    return report;
  }
  return LoadCold(config, wanted, observer);
}

// The same wishes as last time keep the plan, whatever the host says is free by now: epochs must
// not differ by what else runs on the machine.
absl::Status ModelBackend::Plan(const GroupConfig& config, uint64_t* checkpoint_digest) {
  ASSIGN_OR_RETURN(const ModelConfig model, LoadModelConfig(config.model_dir));
  RETURN_IF_ERROR(CheckTensorParallel(model, config.world));
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                   Checkpoint::Open(config.model_dir));
  *checkpoint_digest = checkpoint->digest();
  MemoryRequest request;
  request.world = config.world;
  request.numerics = config.f32_numerics ? Numerics::kF32 : Numerics::kBf16;
  request.f16_copy = options_.f16_copy;
  request.wanted = config.limits;
  request.budget_bytes =
      config.memory_budget_bytes > 0 ? config.memory_budget_bytes : options_.memory_budget_bytes;
  if (model_ != nullptr && config.model_dir == resident_dir_ && request == planned_for_ &&
      model_->digests().weights == *checkpoint_digest) {
    return absl::OkStatus();
  }
  const MemoryRequest asked = request;
  if (request.budget_bytes == 0) {
    // What is resident now is given back before the new weights come.
    const uint64_t resident = model_ == nullptr ? 0 : plan_.total_bytes();
    request.budget_bytes = ReadHostMemory().available_bytes + resident;
  }
  ASSIGN_OR_RETURN(plan_, PlanMemory(model, *checkpoint, request));
  planned_for_ = asked;  // only what was planned: a worker with weights outlives a refusal
  return absl::OkStatus();
}

absl::StatusOr<LoadReport> ModelBackend::LoadCold(const GroupConfig& config,
                                                  const ModelOptions& options,
                                                  const LoadObserver& observer) {
  Unload();
  const auto start = std::chrono::steady_clock::now();
  ProgressReporter reporter(observer);
  ASSIGN_OR_RETURN(model_,
                   Model::Load(config.model_dir, options, *pool_,
                               [&](const LoadProgress& progress) { reporter.Report(progress); }));
  resident_dir_ = config.model_dir;
  resident_engram_dir_ = config.engram_dir;
  LoadReport report;
  report.load_seconds = Seconds(std::chrono::steady_clock::now() - start);
  FillReport(report);
  const std::lock_guard<std::mutex> lock(mutex_);
  weights_digest_ = report.weights_digest;
  config_digest_ = report.config_digest;
  return report;
}

void ModelBackend::FillReport(LoadReport& report) const {
  const ModelDigests& digests = model_->digests();
  report.config_digest = Hex16(digests.config);
  report.weights_digest = Hex16(digests.weights);
  report.replicated_digest = Hex16(digests.replicated);
  report.own_slices_digest = Hex16(digests.slices);
  report.simd_target = SimdTarget();
  for (const MemoryPlanEntry& entry : model_->memory_plan()) {
    const auto used = static_cast<uint64_t>(entry.bytes);
    uint64_t planned = used;
    if (entry.part == "weights") planned = plan_.weights_bytes;
    if (entry.part == "pages") planned = plan_.pages_bytes;
    if (entry.part == "workspace") planned = plan_.workspace_bytes;
    report.memory_plan.push_back({entry.part, planned, used});
  }
  report.granted = plan_.granted;
  const ModelConfig& config = model_->config();
  report.model.name = resident_dir_.substr(resident_dir_.find_last_of('/') + 1);
  report.model.num_layers = config.num_layers;
  report.model.vocab_size = config.vocab_size;
  report.model.max_drafts = std::min(model_->max_drafts(), limits::kMaxDrafts);
  report.model.page_tokens = model_->tokens_per_page();
  report.model.max_position = config.max_position_embeddings;
  report.model.kv_bytes_per_page = plan_.bytes_per_page;
  report.model.bytes_per_slot = plan_.bytes_per_slot;
}

void ModelBackend::Unload() {
  model_.reset();
  costs_.clear();
  const std::lock_guard<std::mutex> lock(mutex_);
  weights_digest_.clear();
  config_digest_.clear();
}

// ---- Join, Leave

absl::Status ModelBackend::ConnectGroup(const GroupConfig& config) {
  if (config.world == 1) return absl::OkStatus();
  TcpListener* listener = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    listener = listener_.get();
  }
  if (listener == nullptr) {
    return absl::FailedPreconditionError(
        "Configure: PrepareGroup of this epoch did not come first");
  }
  if (static_cast<int>(config.group_endpoints.size()) != config.world) {
    return absl::FailedPreconditionError(absl::StrCat("Configure: ", config.group_endpoints.size(),
                                                      " endpoints for ", config.world, " ranks"));
  }
  TcpGroup group;
  group.epoch = config.epoch;
  group.rank = config.rank;
  group.addresses = config.group_endpoints;
  group.secret = config.group_secret;
  group.connect_timeout_ms = options_.join_wait_ms;
  group.call_timeout_ms = config.communicator_wait_ms > 0 ? config.communicator_wait_ms
                                                          : limits::kCommunicatorWaitMsMax;
  group.cancelled = &aborted_;
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator, ConnectTcpGroup(*listener, group));
  const std::lock_guard<std::mutex> lock(mutex_);
  communicator_ = std::make_unique<WatchedCommunicator>(std::move(communicator));
  return absl::OkStatus();
}

// Ranks measure costs together or not at all: one that has none yet makes all of them measure.
absl::Status ModelBackend::CompareWithRanks(const LoadReport& report) {
  if (communicator_ == nullptr) return absl::OkStatus();
  const std::vector<RankFact> facts = {
      {"build", BuildId()},
      {"config digest", report.config_digest},
      {"weights digest", report.weights_digest},
      {"digest of replicated weights", report.replicated_digest},
      {"SIMD target", report.simd_target},
  };
  RETURN_IF_ERROR(CompareFacts(*communicator_, facts));
  ASSIGN_OR_RETURN(const bool measure, TestGroup(*communicator_, costs_.empty()));
  if (measure) costs_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StepCost>> ModelBackend::Join(const GroupConfig& config,
                                                         const LoadReport& report) {
  CHECK(model_ != nullptr);
  RETURN_IF_ERROR(ConnectGroup(config));
  RETURN_IF_ERROR(CompareWithRanks(report));
  if (!model_->config().engram_layer_ids.empty()) {
    ASSIGN_OR_RETURN(
        RowConnection connection,
        connect_rows_(model_->config(), config, model_->options().limits.max_step_rows));
    const std::lock_guard<std::mutex> lock(mutex_);
    rows_ = std::move(connection);
    watched_rows_ = std::make_unique<WatchedRows>(*rows_.source);
  }
  if (aborted_.load()) return AbortedNow();
  model_->forward().SetLayerHook([this](int layers_done) -> absl::Status {
    layers_done_.store(layers_done, std::memory_order_relaxed);
    return aborted_.load(std::memory_order_relaxed) ? AbortedNow() : absl::OkStatus();
  });
  // Both ranks get here together, with their row services: only now may a wait be short.
  if (communicator_ != nullptr) {
    RETURN_IF_ERROR(communicator_->Barrier());
    RETURN_IF_ERROR(CompareRowSamples(*communicator_, rows_.samples,
                                      model_->config().engram_layer_ids,
                                      model_->config().engram_num_columns()));
  }
  if (rows_.accepted != nullptr) rows_.accepted();
  RETURN_IF_ERROR(model_->BeginEpoch(communicator_.get(), watched_rows_.get()));
  if (options_.measure_costs && costs_.empty()) {
    ASSIGN_OR_RETURN(costs_, MeasureCosts(*this, report.granted, report.model.vocab_size,
                                          report.model.max_drafts));
    RETURN_IF_ERROR(model_->BeginEpoch(communicator_.get(), watched_rows_.get()));
  }
  if (aborted_.load()) return AbortedNow();
  return costs_;
}

void ModelBackend::Leave() {
  std::unique_ptr<TcpListener> listener;
  std::unique_ptr<WatchedCommunicator> communicator;
  std::unique_ptr<WatchedRows> watched;
  RowConnection rows;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rows_.source != nullptr) last_rows_ = rows_.facts();
    last_rows_.transport.clear();  // not attached any more
    listener = std::move(listener_);
    communicator = std::move(communicator_);
    watched = std::move(watched_rows_);
    rows = std::move(rows_);
    rows_ = RowConnection();
  }
  if (communicator != nullptr) communicator->Abort();
  layers_done_.store(0);
}

// ---- Steps

absl::Status ModelBackend::Open(const OpenSequence& open) {
  return model_->Open(open);
}

absl::Status ModelBackend::SetSampling(int slot, const SamplingParams& sampling) {
  return model_->SetSampling(slot, sampling);
}

absl::Status ModelBackend::MapPages(int slot, std::span<const PageMapping> pages) {
  return model_->MapPages(slot, pages);
}

absl::Status ModelBackend::Truncate(int slot, int64_t length) {
  return model_->Truncate(slot, length);
}

absl::Status ModelBackend::Close(int slot) {
  return model_->Close(slot);
}

absl::Status ModelBackend::SetMask(int32_t mask_id, std::span<const uint8_t> bits) {
  return model_->SetMask(mask_id, bits);
}

absl::StatusOr<StepResult> ModelBackend::RunStep(const StepPlan& plan) {
  layers_done_.store(0, std::memory_order_relaxed);
  return model_->RunStep(plan);
}

int64_t ModelBackend::CommittedLength(int slot) const {
  return model_->CommittedLength(slot);
}
int ModelBackend::SlotsInUse() const {
  return model_->slots_in_use();
}
int ModelBackend::PagesInUse() const {
  return model_->pages_in_use();
}

// ---- Faults made on purpose (setting TEST_HOOKS)

absl::Status ModelBackend::FlipCachedRow(const Fault& fault, std::string& what) {
  const int64_t committed = model_->CommittedLength(fault.slot);
  if (committed < 1) {
    return absl::FailedPreconditionError(absl::StrCat("slot ", fault.slot, " has no cached row"));
  }
  KvCache& cache = model_->forward().cache();
  const CacheRows& ring = cache.window_ring(0);
  auto* row = static_cast<uint8_t*>(ring.data) +
              cache.RingRow(fault.slot, committed - 1) * ring.row_bytes();
  // The highest exponent bits of the first codes: an e4m3 byte has its sign at bit 7, exponent
  // below.
  const auto bit = static_cast<uint8_t>(1u << (fault.bit >= 31 ? 7 : 6));
  for (int i = 0; i < 16; ++i)
    row[i] = static_cast<uint8_t>(row[i] ^ bit);
  what = absl::StrCat("cached row of position ", committed - 1, " of slot ", fault.slot);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ModelBackend::Inject(const Fault& fault) {
  if (fault.bit < 0 || fault.bit > 31) {
    return absl::InvalidArgumentError(absl::StrCat("bit ", fault.bit, " of 0 to 31"));
  }
  std::string what;
  switch (fault.target) {
    case Fault::Target::kReplicatedWeight: {
      // The weights are immutable to everyone but this hook; the objects themselves are not const.
      auto& weights = const_cast<ModelWeights&>(model_->forward().weights());
      float& value = weights.blocks.front().attn_norm.values.front();
      value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) ^ (1u << fault.bit));
      what = absl::StrCat("layers.0.attn_norm[0], bit ", fault.bit);
      break;
    }
    case Fault::Target::kCachedRow:
      RETURN_IF_ERROR(FlipCachedRow(fault, what));
      break;
    case Fault::Target::kReducedSum:
      if (communicator_ == nullptr) {
        return absl::FailedPreconditionError("one rank alone reduces nothing");
      }
      communicator_->FlipNextSum(fault.bit);
      what = absl::StrCat("first value of the next reduced sum, bit ", fault.bit);
  }
  return what;
}

}  // namespace twinspark
