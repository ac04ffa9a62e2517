// From the JSON of a chat or completions request to a job that can be submitted, or a 4xx with its
// reason: fields read, prompt encoded, checked against what the engine can ever run. Pure; called
// by OpenAiApi on a connection's executor or, for large bodies, on a thread of PrepareWorker.
#pragma once

#include <optional>
#include <string>

#include "gateway/engine/engine_status.h"
#include "gateway/openai/api_error.h"
#include "gateway/openai/common_fields.h"
#include "gateway/openai/generation_job.h"
#include "gateway/openai/openai_options.h"
#include "gateway/text/encode_budget.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {

// What a request is prepared with. `engine`: one look at the status for everything.
struct JobContext {
  const OpenAiOptions& options;
  const TextModel& text;
  const EngineStatus& engine;
  const std::string& request_id;  // unless the body has one
  EncodeBudget budget;
};

FieldLimits FieldLimitsOf(const JobContext& context);

// Nothing when `error` is set.
std::optional<JobOptions> PrepareChat(const Json& body,
                                      const JobContext& context,
                                      std::optional<ApiError>* error);
std::optional<JobOptions> PrepareCompletions(const Json& body,
                                             const JobContext& context,
                                             std::optional<ApiError>* error);

}  // namespace twinspark::gateway
