#include "tests/packs/pack_run.h"

#include "common/status_macros.h"
#include "tests/golden/model/model_group.h"

namespace twinspark::packs {

absl::StatusOr<PackRun> RunPack(const std::string& dir, Numerics numerics) {
  constexpr int kPromptIds = 40;
  constexpr int kNewIds = 12;
  ModelOptions options;
  options.numerics = numerics;
  options.limits.num_slots = 1;
  options.limits.num_pages = 4;
  options.limits.max_step_rows = 64;
  ASSIGN_OR_RETURN(const auto group, golden::ModelGroup::Load(dir, options, 1));
  PackRun run;
  run.has_drafts = group->model().has_drafts();
  OpenSequence open;
  for (int i = 0; i < kPromptIds; ++i)
    open.ids.push_back((i * 37 + 11) % (group->model().config().vocab_size - 2));
  open.num_prompt_ids = kPromptIds;
  open.sampling.num_logprobs = 5;
  RETURN_IF_ERROR(group->Open(open, kPromptIds + kNewIds + 8));
  ASSIGN_OR_RETURN(SequenceResult result, group->Prefill(0, 0, kPromptIds, 64, run.has_drafts));
  while (true) {
    run.tokens.insert(run.tokens.end(), result.tokens.begin(), result.tokens.end());
    run.logprobs.insert(run.logprobs.end(), result.logprobs.begin(), result.logprobs.end());
    run.drafts.insert(run.drafts.end(), result.drafts.begin(), result.drafts.end());
    if (run.tokens.size() >= kNewIds) return run;
    ASSIGN_OR_RETURN(result, group->Round(0, 0, run.has_drafts));
  }
}

}  // namespace twinspark::packs
