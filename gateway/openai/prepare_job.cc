#include "gateway/openai/prepare_job.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/clock.h"
#include "common/limits.h"
#include "common/string_view.h"
#include "gateway/openai/chat_request.h"
#include "gateway/openai/completion_request.h"

namespace twinspark::gateway {
namespace {

// Log-probabilities of prompts in one response: about 20 MB of JSON.
constexpr int64_t kMaxPromptLogprobs = 262144;

// How often one token of the prompt is listed in the response: in `prompt_logprobs` (a chat has one
// list, completions have one for every choice) and in the `logprobs` of every choice that echoes.
int64_t PromptEntriesPerId(const JobOptions& job) {
  const int64_t n = job.common.num_choices;
  int64_t entries = 0;
  if (job.num_prompt_logprobs >= 0) {
    entries += (job.head.is_chat ? 1 : n) * (1 + int64_t{job.num_prompt_logprobs});
  }
  if (job.echo_logprobs) entries += n * (1 + int64_t{job.common.sampling.num_logprobs});
  return entries;
}

// Whether the choices can ever wait and run together.
bool FitsQueue(const JobOptions& job, const EngineLimits& engine, std::optional<ApiError>* error) {
  const int64_t most = int64_t{engine.max_queue} + engine.num_slots;
  const auto num_prompts = static_cast<int64_t>(job.prompts.size());
  const int64_t num_choices = num_prompts * job.common.num_choices;
  // Not ready yet: the engine refuses the request.
  if (engine.max_queue == 0 || num_choices <= most) return true;
  *error = ApiError::Invalid(
      num_prompts > most ? "prompt" : "n",
      absl::StrCat("The request has ", num_choices, " choices (prompts x `n`), at most ", most,
                   " can wait and run at the same time."));
  return false;
}

bool FitsContext(const JobOptions& job,
                 const EngineLimits& engine,
                 std::string_view param,
                 std::optional<ApiError>* error) {
  const int64_t context = engine.max_context > 0 ? engine.max_context : limits::kMaxContext;
  const int64_t entries_per_id = PromptEntriesPerId(job);
  int64_t num_logprobs = 0;
  for (const JobPrompt& prompt : job.prompts) {
    const auto num_ids =
        static_cast<int64_t>(prompt.is_cut ? prompt.num_ids_at_least : prompt.ids.size());
    num_logprobs += num_ids * entries_per_id;
    // Not ready yet: the engine refuses the request, whatever its length.
    if (engine.max_context == 0 && !prompt.is_cut) continue;
    const std::optional<int32_t> fits =
        TokensThatFit(context, num_ids, prompt.is_cut,
                      job.no_output ? std::optional<int32_t>(1) : job.common.max_tokens,
                      std::string(param), error);
    if (!fits.has_value()) return false;
    const int64_t most = job.common.max_tokens.has_value()
                             ? *fits
                             : std::min<int64_t>(*fits, engine.max_output_default);
    if (job.common.sampling.min_tokens <= most || job.no_output || engine.max_output_default == 0) {
      continue;
    }
    *error = ApiError::Invalid(
        "min_tokens", absl::StrCat("`min_tokens` is ", job.common.sampling.min_tokens, ", at most ",
                                   most, " tokens can be generated."));
    return false;
  }
  if (num_logprobs <= kMaxPromptLogprobs) return true;
  *error = ApiError::Invalid(
      job.num_prompt_logprobs >= 0 ? "prompt_logprobs" : "logprobs",
      absl::StrCat("The log-probabilities of the prompt would be ", num_logprobs,
                   " entries (tokens of the prompt x ", entries_per_id,
                   ": 1 + the most likely, in every list and choice that shows them), at most ",
                   kMaxPromptLogprobs, " are allowed in one response."));
  return false;
}

// `given`: the request's own `request_id`, or empty.
ResponseHead MakeHead(bool is_chat, const std::string& given, const JobContext& context) {
  ResponseHead head;
  head.is_chat = is_chat;
  head.id =
      absl::StrCat(is_chat ? "chatcmpl-" : "cmpl-", given.empty() ? context.request_id : given);
  head.created = UnixTimeUs() / 1000000;
  head.model = context.options.model_names.front();
  head.fingerprint = absl::StrCat(context.options.build_id, "-", context.engine.weights_digest);
  return head;
}

}  // namespace

// The vocabulary is the model's, once one is there: the engine checks ids against the same.
FieldLimits FieldLimitsOf(const JobContext& context) {
  FieldLimits limits;
  limits.vocab_size = context.engine.limits.vocab_size;
  limits.max_context = context.engine.limits.max_context;
  if (limits.vocab_size == 0) limits.vocab_size = context.text.tokenizer->vocab_size();
  limits.default_temperature = context.options.default_temperature;
  limits.default_top_p = context.options.default_top_p;
  return limits;
}

std::optional<JobOptions> PrepareChat(const Json& body,
                                      const JobContext& context,
                                      std::optional<ApiError>* error) {
  const TextModel& text = context.text;
  ChatRequest request =
      ReadChatRequest(body, text, FieldLimitsOf(context), context.options.model_names, error);
  if (error->has_value()) return std::nullopt;
  const auto segments = EncodeChat(request.messages, request.options, text.tokens);
  if (!segments.ok()) {
    *error = ApiError::Invalid("messages", std::string(ToStd(segments.status().message())));
    return std::nullopt;
  }
  JobOptions job;
  job.head = MakeHead(/*is_chat=*/true, request.common.request_id, context);
  job.common = std::move(request.common);
  job.num_prompt_logprobs = job.common.sampling.num_prompt_logprobs;
  JobPrompt& prompt = job.prompts.emplace_back();
  prompt.is_cut = !SegmentIds(*segments, *text.tokenizer, &prompt.ids, context.budget);
  if (prompt.is_cut) {
    for (const PromptSegment& segment : *segments)
      prompt.num_ids_at_least += text.tokenizer->FewestIds(segment.text.size());
    prompt.num_ids_at_least = std::max(prompt.num_ids_at_least, prompt.ids.size());
  }
  if (!FitsQueue(job, context.engine.limits, error) ||
      !FitsContext(job, context.engine.limits, "messages", error)) {
    return std::nullopt;
  }
  if (request.return_prompt_text) job.prompt_text = SegmentText(*segments, *text.tokenizer);
  if (request.echo) prompt.echo = request.continued_content;
  job.starts_in_reasoning =
      request.options.thinking && !prompt.ids.empty() &&
      (prompt.ids.back() == text.tokens.think_open || request.continues_reasoning);
  job.include_reasoning = request.include_reasoning;
  if (request.wants_format) job.headers.emplace_back("x-structured-output", "prompt-only");
  return job;
}

std::optional<JobOptions> PrepareCompletions(const Json& body,
                                             const JobContext& context,
                                             std::optional<ApiError>* error) {
  const TextModel& text = context.text;
  CompletionRequest request = ReadCompletionRequest(
      body, text, FieldLimitsOf(context), context.options.model_names, context.budget, error);
  if (error->has_value()) return std::nullopt;
  JobOptions job;
  job.head = MakeHead(/*is_chat=*/false, request.common.request_id, context);
  job.common = std::move(request.common);
  job.prompts = std::move(request.prompts);
  job.no_output = request.no_output;
  job.echo_logprobs = request.echo_logprobs;
  job.num_prompt_logprobs = request.num_prompt_logprobs;
  if (FitsQueue(job, context.engine.limits, error) &&
      FitsContext(job, context.engine.limits, "prompt", error)) {
    return job;
  }
  return std::nullopt;
}

}  // namespace twinspark::gateway
