// Loading, slots, pages and masks around the forward pass (model.h); model_step.cc is what a step
// does.
#include "shard_worker/model/model.h"

#include <algorithm>
#include <utility>

#include <xxhash.h>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/limits.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "kernels/ops/ops.h"
#include "shard_worker/model/forward.h"
#include "shard_worker/model/kv_cache.h"
#include "shard_worker/model/model_impl.h"
#include "shard_worker/model/row_hints.h"
#include "shard_worker/model/sequence_state.h"
#include "shard_worker/model/weight_loader.h"

namespace twinspark {
namespace {

uint64_t ConfigDigest(const std::string& config_text, const ModelOptions& options) {
  const std::string text =
      absl::StrCat(config_text, "|", options.world, "|", static_cast<int>(options.numerics), "|",
                   options.limits.num_slots, "|", options.limits.num_pages, "|",
                   options.limits.max_step_rows, "|", options.limits.max_context);
  return XXH64(text.data(), text.size(), 0);
}

StepBounds BoundsOf(const ModelConfig& config, const ModelLimits& limits) {
  StepBounds bounds;
  const int64_t draft_rows = static_cast<int64_t>(limits.num_slots) * config.draft_block_size;
  bounds.rows = std::max<int64_t>(limits.max_step_rows, draft_rows);
  bounds.logits_rows = std::max<int64_t>(limits.max_logits_rows, draft_rows);
  bounds.draft_sequences = limits.num_slots;
  return bounds;
}

}  // namespace

void Model::Impl::Build() {
  const bool has_drafts = weights_.draft.has_value();
  if (options_.limits.max_context == 0)
    options_.limits.max_context = config_.max_position_embeddings;
  cache_ = std::make_unique<KvCache>(config_, options_, has_drafts);
  forward_ = std::make_unique<Forward>(config_, weights_, options_,
                                       BoundsOf(config_, options_.limits), Ops(), *cache_, pool_);
  slots_.resize(static_cast<size_t>(options_.limits.num_slots));
  memory_plan_ = {{"weights", weights_.bytes},
                  {"pages", cache_->page_bytes()},
                  {"rings and carries", cache_->ring_bytes()},
                  {"workspace", forward_->bytes()}};
}

absl::StatusOr<SequenceState*> Model::Impl::Slot(int slot) {
  if (!in_epoch_) return absl::FailedPreconditionError("no epoch: BeginEpoch comes first");
  if (slot < 0 || slot >= static_cast<int>(slots_.size()))
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot, " of ", slots_.size(), " does not exist"));
  SequenceState* sequence = &slots_[static_cast<size_t>(slot)];
  if (!sequence->is_open)
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " is not open"));
  return sequence;
}

absl::Status Model::Impl::CheckIds(std::span<const int32_t> ids) const {
  for (int32_t id : ids)
    if (id < 0 || id >= config_.vocab_size)
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", id, " is outside the vocabulary of ", config_.vocab_size));
  return absl::OkStatus();
}

absl::Status Model::Impl::CheckPages(const SequenceState& sequence, int slot, int64_t end) const {
  if (end > options_.limits.max_context)
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, ": position ", end - 1,
                                                   " is beyond the context limit of ",
                                                   options_.limits.max_context));
  const int64_t num_pages = (end + limits::kPageTokens - 1) / limits::kPageTokens;
  for (int64_t page = 0; page < num_pages; ++page)
    if (page >= static_cast<int64_t>(sequence.pages.size()) ||
        sequence.pages[static_cast<size_t>(page)] < 0)
      return absl::InvalidArgumentError(absl::StrCat("slot ", slot, ": logical page ", page,
                                                     " is not mapped, positions up to ", end - 1,
                                                     " were asked for"));
  return absl::OkStatus();
}

absl::StatusOr<const uint8_t*> Model::Impl::Mask(int32_t mask_id) const {
  if (mask_id < 0) return nullptr;
  const auto it = masks_.find(mask_id);
  if (it == masks_.end())
    return absl::InvalidArgumentError(absl::StrCat("mask ", mask_id, " is unknown"));
  return it->second.data();
}

// ------------------------------------------------------------------------------------------------
// The public face

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& model_dir,
                                                   const ModelOptions& options,
                                                   ThreadPool& pool,
                                                   const LoadProgressCallback& progress) {
  if (options.rank < 0 || options.rank >= options.world)
    return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank, " of ", options.world));
  if (options.limits.num_slots < 1 || options.limits.num_slots > limits::kMaxSlots ||
      options.limits.num_pages < 1 || options.limits.max_step_rows < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("limits: ", options.limits.num_slots, " slots (1..", limits::kMaxSlots, "), ",
                     options.limits.num_pages, " pages, ", options.limits.max_step_rows, " rows"));
  const std::string config_path = model_dir + "/config.json";
  ASSIGN_OR_RETURN(const std::string text, ReadFile(config_path, size_t{4} << 20));
  ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text, config_path));
  RETURN_IF_ERROR(CheckTensorParallel(config, options.world));
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(model_dir));
  auto impl = std::make_unique<Impl>(std::move(config), options, pool);
  ASSIGN_OR_RETURN(LoadedWeights loaded,
                   LoadWeights(*checkpoint, impl->config_, impl->options_, progress));
  impl->weights_ = std::move(loaded.weights);
  impl->digests_.config = ConfigDigest(text, options);
  impl->digests_.weights = checkpoint->digest();
  impl->digests_.replicated = loaded.replicated_digest;
  impl->digests_.slices = loaded.slices_digest;
  impl->Build();
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

const ModelConfig& Model::config() const {
  return impl_->config_;
}
const ModelOptions& Model::options() const {
  return impl_->options_;
}
const ModelDigests& Model::digests() const {
  return impl_->digests_;
}
const std::vector<MemoryPlanEntry>& Model::memory_plan() const {
  return impl_->memory_plan_;
}
bool Model::has_drafts() const {
  return impl_->weights_.draft.has_value();
}
int Model::max_drafts() const {
  return has_drafts() ? impl_->config_.draft_block_size : 0;
}

absl::Status Model::BeginEpoch(Communicator* communicator, RowSource* rows) {
  if (impl_->options_.world > 1 &&
      (communicator == nullptr || communicator->world() != impl_->options_.world ||
       communicator->rank() != impl_->options_.rank))
    return absl::InvalidArgumentError(absl::StrCat("the communicator is not that of rank ",
                                                   impl_->options_.rank, " of ",
                                                   impl_->options_.world));
  if (!impl_->config_.engram_layer_ids.empty() && rows == nullptr)
    return absl::InvalidArgumentError("a model with Engram layers needs a row source");
  for (SequenceState& slot : impl_->slots_)
    slot = SequenceState();
  impl_->masks_.clear();
  impl_->forward_->BeginEpoch(communicator, rows);
  impl_->in_epoch_ = true;
  return absl::OkStatus();
}

absl::Status Model::Open(const OpenSequence& open) {
  if (!impl_->in_epoch_) return absl::FailedPreconditionError("no epoch: BeginEpoch comes first");
  if (open.slot < 0 || open.slot >= static_cast<int>(impl_->slots_.size()))
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", open.slot, " of ", impl_->slots_.size(), " does not exist"));
  SequenceState& sequence = impl_->slots_[static_cast<size_t>(open.slot)];
  if (sequence.is_open)
    return absl::InvalidArgumentError(absl::StrCat("slot ", open.slot, " is already open"));
  const int64_t num_ids = static_cast<int64_t>(open.ids.size());
  if (num_ids == 0 || num_ids > impl_->options_.limits.max_context || open.num_prompt_ids < 0 ||
      open.num_prompt_ids > num_ids)
    return absl::InvalidArgumentError(absl::StrCat("slot ", open.slot, ": ", num_ids, " ids (1..",
                                                   impl_->options_.limits.max_context,
                                                   "), of them ", open.num_prompt_ids, " prompt"));
  RETURN_IF_ERROR(impl_->CheckIds(open.ids));
  const size_t width = static_cast<size_t>(impl_->config_.hidden_size);
  if ((!open.image_mask.empty() && open.image_mask.size() != open.ids.size()) ||
      open.embeddings.size() != open.embedding_positions.size() * width)
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", open.slot, ": image mask or embeddings do not fit the ids"));
  for (int64_t position : open.embedding_positions)
    if (position < 0 || position >= num_ids)
      return absl::InvalidArgumentError(
          absl::StrCat("slot ", open.slot, ": embedding at position ", position));
  sequence = SequenceState();
  sequence.is_open = true;
  sequence.ids = open.ids;
  sequence.num_given = num_ids;
  sequence.num_prompt_ids = open.num_prompt_ids;
  sequence.image_mask = open.image_mask;
  sequence.embedding_positions = open.embedding_positions;
  sequence.embeddings = open.embeddings;
  sequence.drafts_allowed = open.drafts_allowed;
  sequence.num_prompt_logprobs = open.num_prompt_logprobs;
  sequence.SetSampling(open.sampling);
  const Segment first = FirstRows(open.slot, sequence, impl_->options_.limits.max_step_rows);
  impl_->forward_->HintRows(std::span(&first, 1), RowClass::kAhead);
  return absl::OkStatus();
}

absl::Status Model::SetSampling(int slot, const SamplingParams& sampling) {
  ASSIGN_OR_RETURN(SequenceState * sequence, impl_->Slot(slot));
  sequence->SetSampling(sampling);
  return absl::OkStatus();
}

absl::Status Model::MapPages(int slot, std::span<const PageMapping> pages) {
  ASSIGN_OR_RETURN(SequenceState * sequence, impl_->Slot(slot));
  const ModelLimits& limits = impl_->options_.limits;
  const int64_t max_pages = (limits.max_context + limits::kPageTokens - 1) / limits::kPageTokens;
  for (const PageMapping& page : pages)
    if (page.logical_page < 0 || page.logical_page >= max_pages || page.physical_page < 0 ||
        page.physical_page >= limits.num_pages)
      return absl::InvalidArgumentError(
          absl::StrCat("slot ", slot, ": logical page ", page.logical_page, " (of ", max_pages,
                       ") to physical page ", page.physical_page, " (of ", limits.num_pages, ")"));
  for (const PageMapping& page : pages) {
    const size_t logical = static_cast<size_t>(page.logical_page);
    if (sequence->pages.size() <= logical) sequence->pages.resize(logical + 1, -1);
    sequence->pages[logical] = page.physical_page;
  }
  return absl::OkStatus();
}

absl::Status Model::Truncate(int slot, int64_t length) {
  ASSIGN_OR_RETURN(SequenceState * sequence, impl_->Slot(slot));
  if (length < 0 || length > sequence->committed)
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, ": truncation to ", length,
                                                   ", committed length is ", sequence->committed));
  if (length == sequence->committed) return absl::OkStatus();
  sequence->committed = length;
  sequence->kept_drafts.clear();
  // Given ids stay: behind a shorter length they are prefilled again.
  sequence->TruncateIds(std::max(length + 1, sequence->num_given));
  return absl::OkStatus();
}

absl::Status Model::Close(int slot) {
  ASSIGN_OR_RETURN(SequenceState * sequence, impl_->Slot(slot));
  *sequence = SequenceState();
  return absl::OkStatus();
}

absl::Status Model::SetMask(int32_t mask_id, std::span<const uint8_t> bits) {
  const size_t bytes = (static_cast<size_t>(impl_->config_.vocab_size) + 7) / 8;
  if (mask_id < 0 || bits.size() != bytes)
    return absl::InvalidArgumentError(absl::StrCat("mask ", mask_id, " has ", bits.size(),
                                                   " bytes, the vocabulary needs ", bytes));
  if (!impl_->masks_.contains(mask_id) &&
      static_cast<int>(impl_->masks_.size()) >= limits::kMaxCachedMasks)
    return absl::ResourceExhaustedError(
        absl::StrCat("mask ", mask_id, ": ", limits::kMaxCachedMasks, " masks are cached"));
  impl_->masks_[mask_id].assign(bits.begin(), bits.end());
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Model::RunStep(const StepPlan& plan) {
  return impl_->RunStep(plan);
}

int64_t Model::CommittedLength(int slot) const {
  if (slot < 0 || slot >= static_cast<int>(impl_->slots_.size())) return -1;
  const SequenceState& sequence = impl_->slots_[static_cast<size_t>(slot)];
  return sequence.is_open ? sequence.committed : -1;
}

int Model::slots_in_use() const {
  return static_cast<int>(std::count_if(impl_->slots_.begin(), impl_->slots_.end(),
                                        [](const SequenceState& s) { return s.is_open; }));
}

int Model::pages_in_use() const {
  int pages = 0;
  for (const SequenceState& sequence : impl_->slots_)
    pages += static_cast<int>(std::count_if(sequence.pages.begin(), sequence.pages.end(),
                                            [](int32_t page) { return page >= 0; }));
  return pages;
}

void Model::SetObserver(ForwardObserver* observer) {
  impl_->observe_all_logits_ = observer != nullptr;
  impl_->forward_->SetObserver(observer);
}

const std::vector<SequenceState>& Model::slots() const {
  return impl_->slots_;
}

Forward& Model::forward() {
  return *impl_->forward_;
}

}  // namespace twinspark
