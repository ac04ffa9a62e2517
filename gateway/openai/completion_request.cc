#include "gateway/openai/completion_request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "gateway/openai/chat_request.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

constexpr int64_t kDefaultMaxTokens = 16;
constexpr size_t kMaxPrompts = 256;

// One list of ids, or nothing when `list` is something else or an id is out of range.
std::optional<std::vector<int32_t>> ReadIds(const Json& list, int32_t vocab_size) {
  std::vector<int32_t> ids;
  for (const Json& item : list.as_array()) {
    const std::optional<int64_t> id = item.is_number() ? item.ToInt64() : std::nullopt;
    if (!id.has_value() || *id < 0 || *id >= vocab_size) return std::nullopt;
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

std::string TextOfIds(const TextModel& text, const std::vector<int32_t>& ids) {
  std::string out;
  AppendUtf8Repaired(text.tokenizer->DecodeBytes(ids), &out);
  return out;
}

// `prompt`: a string, strings, ids, or lists of ids.
void ReadPrompts(FieldReader& reader,
                 const TextModel& text,
                 int32_t vocab_size,
                 bool add_special_tokens,
                 const EncodeBudget& budget,
                 std::vector<JobPrompt>* prompts) {
  const Json* prompt = reader.Get("prompt");
  const auto add_text = [&](const std::string& value) {
    prompts->push_back(EncodePrompt(text, value, add_special_tokens, budget));
  };
  const auto add_ids = [&](const Json& list) {
    std::optional<std::vector<int32_t>> ids = ReadIds(list, vocab_size);
    if (!ids.has_value()) {
      reader.Fail("prompt", absl::StrCat("`prompt` must consist of strings or of token ids of the "
                                         "vocabulary (0 to ",
                                         vocab_size - 1, "), not both."));
    } else if (ids->empty()) {
      reader.Fail("prompt", "`prompt` must not be an empty list.");
    } else {
      std::string echo = TextOfIds(text, *ids);
      prompts->push_back({.ids = *std::move(ids), .echo = std::move(echo)});
    }
  };
  if (prompt == nullptr) {
    reader.Fail("prompt", "`prompt` is missing.");
  } else if (prompt->is_string()) {
    add_text(prompt->as_string());
  } else if (!prompt->is_array()) {
    reader.Fail("prompt", "`prompt` must be a string or an array.");
  } else if (prompt->as_array().empty()) {
    reader.Fail("prompt", "`prompt` must not be an empty list.");
  } else if (prompt->as_array().front().is_number()) {
    add_ids(*prompt);
  } else if (prompt->as_array().size() > kMaxPrompts) {
    reader.Fail("prompt", absl::StrCat("At most ", kMaxPrompts, " prompts are allowed."));
  } else {
    const bool is_text = prompt->as_array().front().is_string();
    for (const Json& item : prompt->as_array()) {
      if (is_text && item.is_string()) {
        add_text(item.as_string());
      } else if (!is_text && item.is_array()) {
        add_ids(item);
      } else {
        reader.Fail("prompt", "`prompt` must be all strings, all ids or all lists of ids.");
      }
      if (reader.failed() || prompts->back().is_cut) return;
    }
  }
}

// Keeps the last tokens of each prompt; -1 stands for as many as the context has room for beside
// `max_tokens` of output.
void Truncate(FieldReader& reader,
              const TextModel& text,
              int64_t max_context,
              int64_t max_tokens,
              std::vector<JobPrompt>* prompts) {
  std::optional<int64_t> keep = reader.Integer("truncate_prompt_tokens", -1, limits::kMaxContext);
  if (keep == 0) reader.Fail("truncate_prompt_tokens", "`truncate_prompt_tokens` must not be 0.");
  if (keep == -1) keep = max_context - std::max<int64_t>(max_tokens, 1);
  if (!keep.has_value() || *keep < 1) return;
  for (JobPrompt& prompt : *prompts) {
    if (prompt.is_cut || prompt.ids.size() <= static_cast<size_t>(*keep)) continue;
    prompt.ids.erase(prompt.ids.begin(), prompt.ids.end() - static_cast<ptrdiff_t>(*keep));
    prompt.echo = TextOfIds(text, prompt.ids);
    prompt.has_added_bos = false;
  }
}

}  // namespace

JobPrompt EncodePrompt(const TextModel& text,
                       const std::string& prompt,
                       bool add_special_tokens,
                       const EncodeBudget& budget) {
  JobPrompt result;
  result.is_cut = !text.tokenizer->EncodeParse(prompt, &result.ids, budget);
  if (result.is_cut) {
    // How many there are at least, whatever was looked at.
    result.num_ids_at_least = std::max(result.ids.size(), text.tokenizer->FewestIds(prompt.size()));
    return result;
  }
  if (add_special_tokens && (result.ids.empty() || result.ids.front() != text.tokens.bos)) {
    result.ids.insert(result.ids.begin(), text.tokens.bos);
    result.has_added_bos = true;
  }
  result.echo = prompt;
  return result;
}

CompletionRequest ReadCompletionRequest(const Json& body,
                                        const TextModel& text,
                                        const FieldLimits& limits,
                                        const std::vector<std::string>& model_names,
                                        const EncodeBudget& budget,
                                        std::optional<ApiError>* error) {
  CompletionRequest request;
  FieldReader reader(body, "", error);
  CheckModel(reader, model_names);
  const bool add_special_tokens = reader.Bool("add_special_tokens").value_or(true);
  ReadPrompts(reader, text, limits.vocab_size, add_special_tokens, budget, &request.prompts);
  request.common = ReadCommonFields(reader, text, limits);
  SamplingParams& sampling = request.common.sampling;

  const bool echo = reader.Bool("echo").value_or(false);
  const int64_t max_tokens =
      reader.Integer("max_tokens", echo ? 0 : 1, INT32_MAX).value_or(kDefaultMaxTokens);
  request.common.max_tokens = static_cast<int32_t>(max_tokens);
  request.no_output = max_tokens == 0;
  if (!request.no_output && sampling.min_tokens > max_tokens) {
    reader.Fail("min_tokens", "`min_tokens` must not be larger than `max_tokens`.");
  }
  const std::optional<int64_t> logprobs = reader.Integer("logprobs", 0, limits::kMaxTopLogprobs);
  sampling.num_logprobs = static_cast<int32_t>(logprobs.value_or(-1));
  if (reader.Get("suffix") != nullptr) {
    reader.Fail("suffix", "`suffix` is not supported by this server.");
  }
  const std::optional<int64_t> best_of = reader.Integer("best_of", 1, limits::kMaxChoices);
  if (best_of.has_value() && *best_of != request.common.num_choices) {
    reader.Fail("best_of", "`best_of` is only supported when it equals `n`.");
  }
  Truncate(reader, text, limits.max_context, max_tokens, &request.prompts);
  request.echo_logprobs = echo && logprobs.has_value();
  request.num_prompt_logprobs = sampling.num_prompt_logprobs;
  if (request.echo_logprobs) {
    sampling.num_prompt_logprobs = std::max(sampling.num_prompt_logprobs, sampling.num_logprobs);
  }
  for (JobPrompt& prompt : request.prompts) {
    if (!echo) prompt.echo.clear();
    if (prompt.ids.empty() && !prompt.is_cut) reader.Fail("prompt", "`prompt` has no tokens.");
  }
  return request;
}

}  // namespace twinspark::gateway
