#include "gateway/testing/toy_worker.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/status_macros.h"

namespace twinspark::gateway {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15ULL ^ (b + 0x7f4a7c159e3779b9ULL);
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 32;
  return x;
}

// The token behind a prefix: a function of (prefix, seed, position) only, like keyed sampling.
int32_t NextToken(const ToyLanguage& language,
                  uint64_t prefix,
                  const SamplingParams& sampling,
                  const std::vector<int32_t>* allowed) {
  const uint64_t draw = Mix(prefix, sampling.seed);
  if (allowed != nullptr) return (*allowed)[draw % allowed->size()];
  return static_cast<int32_t>(draw % static_cast<uint64_t>(language.vocab_size));
}

TokenLogprobs ToyLogprobs(uint64_t prefix, int num_top) {
  TokenLogprobs entry;
  entry.logprob = -static_cast<float>(prefix % 1024) / 64;
  entry.rank = static_cast<int32_t>(prefix % 50) + 1;
  for (int32_t i = 0; i < num_top; ++i)
    entry.top.push_back({i, -static_cast<float>(i)});
  return entry;
}

absl::Status Refuse(int slot, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot, ": ", std::string(what)));
}

}  // namespace

std::vector<int32_t> ToyContinuation(const ToyLanguage& language,
                                     const std::vector<int32_t>& prompt,
                                     const SamplingParams& sampling,
                                     int max_tokens) {
  uint64_t prefix = 0;
  for (const int32_t id : prompt)
    prefix = Mix(prefix, static_cast<uint64_t>(id));
  const std::vector<int32_t>* allowed =
      sampling.allowed_token_ids.empty() ? nullptr : &sampling.allowed_token_ids;
  std::vector<int32_t> tokens;
  while (static_cast<int>(tokens.size()) < max_tokens) {
    tokens.push_back(NextToken(language, prefix, sampling, allowed));
    prefix = Mix(prefix, static_cast<uint64_t>(tokens.back()));
    const auto& stops = sampling.stop_token_ids;
    if (std::find(stops.begin(), stops.end(), tokens.back()) != stops.end()) break;
  }
  return tokens;
}

std::vector<TokenLogprobs> ToyPromptLogprobs(const std::vector<int32_t>& prompt, int num_top) {
  std::vector<TokenLogprobs> entries;
  uint64_t prefix = 0;
  for (size_t i = 0; i < prompt.size(); ++i) {
    prefix = Mix(prefix, static_cast<uint64_t>(prompt[i]));
    if (i > 0) entries.push_back(ToyLogprobs(prefix, num_top));
  }
  return entries;
}

ToyWorker::ToyWorker(const ToyLanguage& language, const EpochLimits& limits)
    : language_(language), limits_(limits), slots_(static_cast<size_t>(limits.num_slots)) {}

void ToyWorker::Append(Slot& slot, int32_t id) {
  const uint64_t before = slot.prefix.empty() ? 0 : slot.prefix.back();
  slot.ids.push_back(id);
  slot.prefix.push_back(Mix(before, static_cast<uint64_t>(id)));
}

absl::Status ToyWorker::RunControl(const Control& control) {
  if (const auto* close = std::get_if<CloseSequence>(&control)) {
    Slot& slot = slots_.at(static_cast<size_t>(close->slot));
    if (!slot.open) return Refuse(close->slot, "closed twice");
    slot = Slot();
  } else if (const auto* open = std::get_if<OpenSequence>(&control)) {
    Slot& slot = slots_.at(static_cast<size_t>(open->slot));
    if (slot.open) return Refuse(open->slot, "opened twice");
    slot = Slot();
    slot.open = true;
    slot.sampling = *open->sampling;
    slot.draft_allowed = open->draft_allowed;
    slot.num_open_ids = static_cast<int32_t>(open->ids.size());
    slot.num_prompt_ids = open->num_prompt_ids;
    slot.wants_prompt_logprobs = open->wants_prompt_logprobs;
    for (const int32_t id : open->ids)
      Append(slot, id);
  } else if (const auto* mask = std::get_if<SetMask>(&control)) {
    masks_[mask->mask_id] = mask->allowed_token_ids;
  } else if (const auto* map = std::get_if<MapPages>(&control)) {
    Slot& slot = slots_.at(static_cast<size_t>(map->slot));
    if (!slot.open) return Refuse(map->slot, "pages mapped before it is open");
    for (const PageMapping& page : map->pages) {
      if (page.logical_page != static_cast<int32_t>(slot.pages.size())) {
        return Refuse(map->slot, absl::StrCat("logical page ", page.logical_page, " is not next"));
      }
      for (const Slot& other : slots_) {
        if (std::find(other.pages.begin(), other.pages.end(), page.physical_page) !=
            other.pages.end()) {
          return Refuse(map->slot, absl::StrCat("page ", page.physical_page, " is in use"));
        }
      }
      slot.pages.push_back(page.physical_page);
    }
  }
  return absl::OkStatus();
}

absl::Status ToyWorker::CheckRows(const Slot& slot,
                                  int slot_idx,
                                  int32_t first,
                                  int32_t end) const {
  if (!slot.open) return Refuse(slot_idx, "rows before it is open");
  if (first != slot.committed) {
    return Refuse(slot_idx, absl::StrCat("position ", first, ", committed are ", slot.committed));
  }
  if (KvBlockManager::PagesFor(end) > static_cast<int32_t>(slot.pages.size())) {
    return Refuse(slot_idx,
                  absl::StrCat("rows up to ", end, " with ", slot.pages.size(), " pages"));
  }
  if (end > limits_.max_context) return Refuse(slot_idx, absl::StrCat("position ", end));
  return absl::OkStatus();
}

void ToyWorker::MakeDrafts(Slot& slot, bool draft_next, SequenceResult& result) {
  slot.drafts.clear();
  if (!draft_next || !slot.draft_allowed) return;
  uint64_t prefix = slot.prefix.back();
  for (int j = 0; j < limits_.max_drafts; ++j) {
    int32_t draft = NextToken(language_, prefix, slot.sampling, nullptr);
    if (static_cast<int>(Mix(prefix, 17) % 100) < language_.draft_error_percent) {
      draft = (draft + 1) % language_.vocab_size;
    }
    slot.drafts.push_back(draft);
    prefix = Mix(prefix, static_cast<uint64_t>(draft));
  }
  result.num_drafts = static_cast<int>(slot.drafts.size());
}

absl::StatusOr<SequenceResult> ToyWorker::RunRound(const RoundSequence& round) {
  Slot& slot = slots_.at(static_cast<size_t>(round.slot));
  const int32_t first = round.after_previous ? slot.committed : round.first_position;
  RETURN_IF_ERROR(CheckRows(slot, round.slot, first, first + round.k + 1));
  if (static_cast<int32_t>(slot.ids.size()) != first + 1) return Refuse(round.slot, "no anchor");
  if (round.k > static_cast<int>(slot.drafts.size())) {
    return Refuse(round.slot, absl::StrCat("k = ", round.k, ", kept are ", slot.drafts.size()));
  }
  const std::vector<int32_t>* allowed = nullptr;
  if (round.mask_id > 0) allowed = &masks_.at(round.mask_id);

  SequenceResult result;
  result.slot = round.slot;
  while (true) {
    const int32_t token = NextToken(language_, slot.prefix.back(), slot.sampling, allowed);
    Append(slot, token);
    ++slot.committed;
    result.tokens.push_back(token);
    const size_t j = result.tokens.size() - 1;
    if (static_cast<int>(j) == round.k || slot.drafts[j] != token) break;
    ++result.num_accepted;
  }
  MakeDrafts(slot, round.draft_next, result);
  return result;
}

absl::StatusOr<SequenceResult> ToyWorker::RunPrefill(const PrefillRange& range) {
  Slot& slot = slots_.at(static_cast<size_t>(range.slot));
  RETURN_IF_ERROR(CheckRows(slot, range.slot, range.begin, range.end));
  if (range.end > slot.num_open_ids || range.begin >= range.end) {
    return Refuse(range.slot, "rows beyond the ids");
  }
  const bool ends_prompt = range.end == slot.num_open_ids;
  // A plan that came over the wire has no sequence and does not say where a prompt ends.
  if (range.sequence_id != 0 && range.ends_prompt != ends_prompt) {
    return Refuse(range.slot, "wrong end of prompt");
  }
  SequenceResult result;
  result.slot = range.slot;
  slot.committed = range.end;
  for (int32_t p = range.begin; slot.wants_prompt_logprobs && p < range.end; ++p) {
    if (p + 1 >= slot.num_prompt_ids) break;
    result.prompt_logprobs.push_back(
        ToyLogprobs(slot.prefix[static_cast<size_t>(p) + 1], slot.sampling.num_prompt_logprobs));
  }
  if (!ends_prompt) return result;
  const std::vector<int32_t>* allowed = nullptr;
  if (range.mask_id > 0) allowed = &masks_.at(range.mask_id);
  result.tokens.push_back(NextToken(language_, slot.prefix.back(), slot.sampling, allowed));
  Append(slot, result.tokens.back());
  MakeDrafts(slot, range.draft_next, result);
  return result;
}

absl::StatusOr<StepResult> ToyWorker::Run(const StepPlan& plan) {
  if (plan.op_id != ++last_op_id_) {
    return absl::InvalidArgumentError(absl::StrCat("op ", plan.op_id, " after ", last_op_id_ - 1));
  }
  if (plan.num_round_rows() > limits_.max_round_rows ||
      (plan.chunk
           ? plan.num_prefill_rows() > limits_.max_chunk_rows
           : plan.num_round_rows() + plan.num_prefill_rows() > limits_.max_short_prefill_rows)) {
    return absl::InvalidArgumentError(absl::StrCat("op ", plan.op_id, ": ", plan.num_round_rows(),
                                                   " + ", plan.num_prefill_rows(), " rows"));
  }
  for (const Control& control : plan.controls) {
    const auto* open = std::get_if<OpenSequence>(&control);
    if (open != nullptr && is_unbuilt && is_unbuilt(*open)) {
      return absl::UnimplementedError("OpenSequence: not in this build");
    }
  }
  for (const Control& control : plan.controls)
    RETURN_IF_ERROR(RunControl(control));
  StepResult result;
  result.op_id = plan.op_id;
  for (const RoundSequence& round : plan.round) {
    ASSIGN_OR_RETURN(result.round.emplace_back(), RunRound(round));
  }
  for (const PrefillRange& range : plan.short_prefill) {
    ASSIGN_OR_RETURN(result.short_prefill.emplace_back(), RunPrefill(range));
  }
  if (plan.chunk) {
    ASSIGN_OR_RETURN(result.chunk, RunPrefill(plan.chunk->range));
  }
  return result;
}

int ToyWorker::slots_in_use() const {
  return static_cast<int>(
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.open; }));
}

int ToyWorker::pages_in_use() const {
  std::set<int32_t> pages;
  for (const Slot& slot : slots_)
    pages.insert(slot.pages.begin(), slot.pages.end());
  return static_cast<int>(pages.size());
}

}  // namespace twinspark::gateway
