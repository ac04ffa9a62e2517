// See fake_backend.h.
#include "shard_worker/testing/fake_backend.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/ids.h"
#include "common/limits.h"
#include "common/status_macros.h"

namespace twinspark {

void FakeBackend::FailNextStep(const absl::Status& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  next_step_ = status;
}

void FakeBackend::FailNextLoad(const absl::Status& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  next_load_ = status;
}

void FakeBackend::FailNextJoin(const absl::Status& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  next_join_ = status;
}

absl::Status FakeBackend::TakeFailure(absl::Status& failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(failure, absl::OkStatus());
}

int32_t FakeBackend::NextToken(const std::vector<int32_t>& ids) {
  int64_t sum = 0;
  for (const int32_t id : ids)
    sum += id;
  return static_cast<int32_t>((sum * 31 + static_cast<int64_t>(ids.size())) % kVocab);
}

BackendFacts FakeBackend::Facts() const {
  return {"fake", "no device", {"FAKE2", "FAKE1"}, uint64_t{1} << 30, uint64_t{1} << 29};
}

std::string FakeBackend::ResidentWeightsDigest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return weights_digest_;
}

std::string FakeBackend::ResidentConfigDigest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return config_digest_;
}

absl::Status FakeBackend::CheckRowService() {
  return row_service_lost.load() ? absl::UnavailableError("row service: no heartbeat")
                                 : absl::OkStatus();
}

RowServiceFacts FakeBackend::RowService() const {
  RowServiceFacts facts;
  facts.transport = "shm";
  return facts;
}

absl::StatusOr<std::string> FakeBackend::PrepareGroup(uint64_t epoch, int rank, int) {
  return absl::StrCat("fake:", epoch, ":", rank);
}

absl::StatusOr<LoadReport> FakeBackend::Load(const GroupConfig& config,
                                             const LoadObserver& observer) {
  aborted_.store(false);
  RETURN_IF_ERROR(TakeFailure(next_load_));
  LoadReport report;
  report.weights_digest = Hex16(Hash64(config.model_dir));
  report.config_digest = Hex16(Hash64(absl::StrCat(config.world, config.f32_numerics)));
  report.replicated_digest = report.weights_digest;
  report.own_slices_digest = report.weights_digest;
  report.granted = {8, 64, limits::kMaxRoundRows, 256, 2048, 4096};
  report.model = {"fake", kLayers, kVocab, kMaxDrafts, limits::kPageTokens, 4096, 1, 1};
  report.memory_plan = {{"weights", 4096, 4096}};
  const std::lock_guard<std::mutex> lock(mutex_);
  report.warm = !config.reload_weights && report.weights_digest == weights_digest_ &&
                report.config_digest == config_digest_;
  if (!report.warm) {
    ++loads;
    observer({"load", 2048, 4096, 1, 2, "model.safetensors", 1.0, 0.0});
    observer({"load", 4096, 4096, 2, 2, "model.safetensors", 1.0, 0.0});
  }
  weights_digest_ = report.weights_digest;
  config_digest_ = report.config_digest;
  return report;
}

absl::StatusOr<std::vector<StepCost>> FakeBackend::Join(const GroupConfig&, const LoadReport&) {
  ++joins;
  RETURN_IF_ERROR(TakeFailure(next_join_));
  return std::vector<StepCost>{{StepCost::Kind::kRound, 1, 100.0}};
}

void FakeBackend::Leave() {
  ++leaves;
  slots_.clear();
  masks_.clear();
}

void FakeBackend::Unload() {
  const std::lock_guard<std::mutex> lock(mutex_);
  weights_digest_.clear();
  config_digest_.clear();
}

absl::Status FakeBackend::Open(const OpenSequence& open) {
  Slot& slot = slots_[open.slot];
  if (!slot.ids.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", open.slot, " is open"));
  }
  slot.ids = open.ids;
  return absl::OkStatus();
}

absl::Status FakeBackend::SetSampling(int slot, const SamplingParams&) {
  if (slots_.contains(slot)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("SetSampling: slot ", slot, " is not open"));
}

absl::Status FakeBackend::MapPages(int slot, std::span<const PageMapping> pages) {
  if (!slots_.contains(slot)) {
    return absl::InvalidArgumentError(absl::StrCat("MapPages: slot ", slot, " is not open"));
  }
  for (const PageMapping& page : pages) {
    slots_[slot].logical_pages.insert(page.logical_page);
    slots_[slot].physical_pages.insert(page.physical_page);
  }
  return absl::OkStatus();
}

absl::Status FakeBackend::Truncate(int slot, int64_t length) {
  if (!slots_.contains(slot) || length > slots_[slot].committed) {
    return absl::InvalidArgumentError(absl::StrCat("Truncate: slot ", slot, " to ", length));
  }
  slots_[slot].committed = length;
  slots_[slot].ids.resize(static_cast<size_t>(length) + 1);
  slots_[slot].kept.clear();
  return absl::OkStatus();
}

absl::Status FakeBackend::Close(int slot) {
  if (slots_.erase(slot) == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("CloseSequence: slot ", slot, " is not open"));
}

absl::Status FakeBackend::SetMask(int32_t mask_id, std::span<const uint8_t> bits) {
  masks_[mask_id].assign(bits.begin(), bits.end());
  return absl::OkStatus();
}

absl::Status FakeBackend::SpendTime() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(step_ms.load());
  layers_done_.store(0);
  while (hang.load() || std::chrono::steady_clock::now() < end) {
    if (aborted_.load() && !deaf.load()) return absl::UnavailableError("aborted");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    layers_done_.store(1);
  }
  return absl::OkStatus();
}

absl::Status FakeBackend::CheckPages(const Slot& slot, int64_t end) const {
  for (int64_t page = 0; page * limits::kPageTokens < end; ++page) {
    if (!slot.logical_pages.contains(static_cast<int32_t>(page))) {
      return absl::InvalidArgumentError(absl::StrCat("page ", page, " is not mapped"));
    }
  }
  return absl::OkStatus();
}

std::vector<int32_t> FakeBackend::MakeDrafts(const Slot& slot) const {
  std::vector<int32_t> ids = slot.ids;
  std::vector<int32_t> drafts;
  for (int i = 0; i < kMaxDrafts; ++i) {
    int32_t draft = NextToken(ids);
    if (ids.size() % 3 == 0) draft = (draft + 1) % kVocab;
    drafts.push_back(draft);
    ids.push_back(draft);
  }
  return drafts;
}

absl::StatusOr<SequenceResult> FakeBackend::RunRound(const RoundSequence& sequence) {
  if (!slots_.contains(sequence.slot)) {
    return absl::InvalidArgumentError(absl::StrCat("Round: slot ", sequence.slot, " is not open"));
  }
  Slot& slot = slots_[sequence.slot];
  if (static_cast<int64_t>(slot.ids.size()) != slot.committed + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Round: slot ", sequence.slot, " has no anchor"));
  }
  RETURN_IF_ERROR(CheckPages(slot, slot.committed + 1 + sequence.num_drafts));
  std::vector<int32_t> drafts = sequence.kept_drafts ? slot.kept : sequence.drafts;
  if (static_cast<int>(drafts.size()) < sequence.num_drafts) {
    return absl::InvalidArgumentError("Round: no drafts were kept");
  }
  for (const int32_t mask_id : sequence.mask_ids) {
    if (mask_id >= 0 && !masks_.contains(mask_id)) {
      return absl::InvalidArgumentError(absl::StrCat("Round: mask ", mask_id, " is unknown"));
    }
  }
  SequenceResult result;
  result.slot = sequence.slot;
  for (int row = 0; row <= sequence.num_drafts; ++row) {
    const int32_t token = NextToken(slot.ids);
    result.tokens.push_back(token);
    slot.ids.push_back(token);
    if (row == sequence.num_drafts || drafts[static_cast<size_t>(row)] != token) break;
    ++result.accepted;
  }
  slot.committed += static_cast<int64_t>(result.tokens.size());
  slot.kept = sequence.draft_next ? MakeDrafts(slot) : std::vector<int32_t>();
  result.drafts = slot.kept;
  result.draft_confidences.assign(result.drafts.size(), 0.5f);
  return result;
}

absl::StatusOr<SequenceResult> FakeBackend::RunPrefill(const PrefillRange& range) {
  if (!slots_.contains(range.slot)) {
    return absl::InvalidArgumentError(absl::StrCat("prefill: slot ", range.slot, " is not open"));
  }
  Slot& slot = slots_[range.slot];
  if (range.end > static_cast<int64_t>(slot.ids.size())) {
    return absl::InvalidArgumentError(absl::StrCat("prefill: slot ", range.slot, " ends at ",
                                                   range.end, ", it has ", slot.ids.size(),
                                                   " ids"));
  }
  RETURN_IF_ERROR(CheckPages(slot, range.end));
  SequenceResult result;
  result.slot = range.slot;
  slot.committed = range.end;
  if (range.end == static_cast<int64_t>(slot.ids.size())) {
    result.tokens.push_back(NextToken(slot.ids));
    slot.ids.push_back(result.tokens[0]);
    if (range.draft_next) slot.kept = MakeDrafts(slot);
    result.drafts = slot.kept;
    result.draft_confidences.assign(result.drafts.size(), 0.5f);
  }
  return result;
}

absl::StatusOr<StepResult> FakeBackend::RunStep(const StepPlan& plan) {
  RETURN_IF_ERROR(SpendTime());
  RETURN_IF_ERROR(TakeFailure(next_step_));
  StepResult step;
  for (const RoundSequence& sequence : plan.round) {
    ASSIGN_OR_RETURN(SequenceResult result, RunRound(sequence));
    step.sequences.push_back(std::move(result));
  }
  for (const PrefillRange& range : plan.prefill) {
    ASSIGN_OR_RETURN(SequenceResult result, RunPrefill(range));
    step.sequences.push_back(std::move(result));
  }
  if (non_finite.load()) {
    for (SequenceResult& result : step.sequences) {
      result.non_finite = true;
      result.tokens.clear();
      result.accepted = 0;
      // Like the real one: the row counts as computed, there is no next id.
      slots_[result.slot].ids.resize(static_cast<size_t>(slots_[result.slot].committed));
    }
  }
  step.residual_digest = 42 + static_cast<uint64_t>(faults.load());
  step.timings.forward_us = 10;
  return step;
}

int64_t FakeBackend::CommittedLength(int slot) const {
  const auto found = slots_.find(slot);
  return found == slots_.end() ? -1 : found->second.committed;
}

int FakeBackend::PagesInUse() const {
  size_t pages = 0;
  for (const auto& [id, slot] : slots_)
    pages += slot.physical_pages.size();
  return static_cast<int>(pages);
}

absl::StatusOr<std::string> FakeBackend::Inject(const Fault& fault) {
  ++faults;
  return absl::StrCat("bit ", fault.bit);
}

}  // namespace twinspark
