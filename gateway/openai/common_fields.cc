#include "gateway/openai/common_fields.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/ids.h"
#include "common/limits.h"
#include "common/sampling_bounds.h"

namespace twinspark::gateway {
namespace {

namespace bounds = sampling_bounds;

constexpr size_t kMaxRequestIdBytes = 128;

void ReadStop(FieldReader& reader, CommonFields* fields) {
  const Json* stop = reader.Get("stop");
  if (stop == nullptr) return;
  if (stop->is_string()) {
    fields->stop.push_back(stop->as_string());
  } else if (stop->is_array()) {
    for (const Json& item : stop->as_array()) {
      if (!item.is_string()) {
        reader.Fail("stop", "`stop` must be a string or an array of strings.");
        return;
      }
      fields->stop.push_back(item.as_string());
    }
  } else {
    reader.Fail("stop", "`stop` must be a string or an array of strings.");
    return;
  }
  if (fields->stop.size() > limits::kMaxStopStrings) {
    reader.Fail("stop", absl::StrCat("At most ", limits::kMaxStopStrings,
                                     " stop strings are allowed, not ", fields->stop.size(), "."));
    return;
  }
  for (const std::string& text : fields->stop) {
    if (text.empty()) {
      reader.Fail("stop", "A stop string must not be empty.");
    } else if (text.size() > limits::kMaxStopStringBytes) {
      reader.Fail("stop", absl::StrCat("A stop string may have at most ",
                                       limits::kMaxStopStringBytes, " bytes."));
    }
  }
}

void ReadLogitBias(FieldReader& reader, int32_t vocab_size, SamplingParams* sampling) {
  const Json* bias = reader.Object("logit_bias");
  if (bias == nullptr) return;
  if (bias->as_object().size() > bounds::kMaxLogitBiases) {
    reader.Fail("logit_bias", absl::StrCat("`logit_bias` may have at most ",
                                           bounds::kMaxLogitBiases, " entries."));
    return;
  }
  for (const auto& [key, value] : bias->as_object()) {
    int32_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < 0) {
      reader.Fail("logit_bias",
                  absl::StrCat("`logit_bias`: the key ", Quoted(key), " is no token id."));
      return;
    }
    if (id >= vocab_size) {
      reader.Fail("logit_bias", absl::StrCat("`logit_bias`: token ", id,
                                             " is outside the vocabulary of ", vocab_size, "."));
      return;
    }
    if (!value.is_number() || value.as_double() < bounds::kLogitBias.low ||
        value.as_double() > bounds::kLogitBias.high) {
      reader.Fail("logit_bias", absl::StrCat("`logit_bias`: the value of token ", id,
                                             " must be a number between ", bounds::kLogitBias.low,
                                             " and ", bounds::kLogitBias.high, "."));
      return;
    }
    sampling->logit_bias.emplace_back(id, static_cast<float>(value.as_double()));
  }
}

// A bad word is masked in both spellings that the tokenizer may give it.
void ReadBadWords(FieldReader& reader, const TextModel& text, SamplingParams* sampling) {
  const Json::Array* words = reader.Array("bad_words");
  if (words == nullptr) return;
  if (words->size() > bounds::kMaxBadWords) {
    reader.Fail("bad_words",
                absl::StrCat("At most ", bounds::kMaxBadWords, " bad words are allowed."));
    return;
  }
  EncodeBudget budget;
  budget.max_ids = bounds::kMaxBadWordIds;
  for (const Json& word : *words) {
    if (!word.is_string() || word.as_string().empty()) {
      reader.Fail("bad_words", "`bad_words` must be an array of non-empty strings.");
      return;
    }
    for (const std::string& spelling : {word.as_string(), " " + word.as_string()}) {
      std::vector<int32_t> ids;
      if (!text.tokenizer->EncodePlain(spelling, &ids, budget)) {
        reader.Fail("bad_words",
                    absl::StrCat("The bad word ", Quoted(word.as_string()), " has more than ",
                                 bounds::kMaxBadWordIds, " tokens."));
        return;
      }
      sampling->bad_words.push_back(std::move(ids));
    }
  }
}

void ReadSampling(FieldReader& reader,
                  const TextModel& text,
                  const FieldLimits& limits,
                  CommonFields* fields) {
  SamplingParams& sampling = fields->sampling;
  const auto number = [&](std::string_view key, const bounds::Range& range, double fallback) {
    return static_cast<float>(reader.Number(key, range.low, range.high).value_or(fallback));
  };
  // Greater than 0, however little.
  const auto positive = [&](std::string_view key, const bounds::Range& range, double fallback) {
    const double value =
        reader.Number(key, 0, range.high, /*min_excluded=*/true).value_or(fallback);
    return static_cast<float>(std::max(value, range.low));
  };
  sampling.temperature = number("temperature", bounds::kTemperature, limits.default_temperature);
  sampling.top_p = positive("top_p", bounds::kTopP, limits.default_top_p);
  sampling.min_p = number("min_p", bounds::kMinP, 0);
  sampling.top_k = static_cast<int32_t>(
      std::max<int64_t>(0, reader.Integer("top_k", -1, int64_t{INT32_MAX}).value_or(0)));
  sampling.frequency_penalty = number("frequency_penalty", bounds::kFrequencyPenalty, 0);
  sampling.presence_penalty = number("presence_penalty", bounds::kPresencePenalty, 0);
  sampling.repetition_penalty = positive("repetition_penalty", bounds::kRepetitionPenalty, 1);
  const std::optional<int64_t> seed = reader.Integer("seed", INT64_MIN, INT64_MAX);
  // A drawn one is a value that may be asked for, so that a request can be repeated from the log.
  sampling.seed = seed.has_value() && *seed != -1 ? static_cast<uint64_t>(*seed) : RandomU64() >> 1;
  fields->num_choices =
      static_cast<int32_t>(reader.Integer("n", 1, limits::kMaxChoices).value_or(1));
  if (fields->num_choices > 1 && sampling.temperature < 1e-5f) {
    reader.Fail("n", "`n` must be 1 with greedy sampling (`temperature` 0).");
  }
  ReadLogitBias(reader, limits.vocab_size, &sampling);
  ReadBadWords(reader, text, &sampling);
  sampling.allowed_token_ids =
      reader
          .TokenIds("allowed_token_ids", static_cast<size_t>(limits.vocab_size), limits.vocab_size)
          .value_or(std::vector<int32_t>());
}

// Fields that are known, not built, and refused when they ask for something.
void RefuseUnbuilt(FieldReader& reader) {
  const std::optional<int64_t> priority = reader.Integer("priority", INT32_MIN, INT32_MAX);
  if (priority.value_or(0) != 0) {
    reader.Fail("priority", "`priority` is not supported by this server.");
  }
}

void ReadRequestId(FieldReader& reader, CommonFields* fields) {
  const std::string* id = reader.String("request_id");
  if (id == nullptr) return;
  if (!IsRequestId(*id)) {
    reader.Fail("request_id", absl::StrCat("`request_id` must have 1 to ", kMaxRequestIdBytes,
                                           " characters of A-Z, a-z, 0-9, '.', '_', '-'."));
    return;
  }
  fields->request_id = *id;
}

}  // namespace

bool IsRequestId(std::string_view id) {
  return !id.empty() && id.size() <= kMaxRequestIdBytes &&
         std::all_of(id.begin(), id.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
         });
}

CommonFields ReadCommonFields(FieldReader& reader,
                              const TextModel& text,
                              const FieldLimits& limits) {
  CommonFields fields;
  ReadSampling(reader, text, limits, &fields);
  ReadStop(reader, &fields);
  fields.stop_token_ids =
      reader
          .TokenIds("stop_token_ids", bounds::kMaxStopTokenIds, limits.vocab_size,
                    /*may_be_empty=*/true)
          .value_or(std::vector<int32_t>());
  fields.sampling.stop_token_ids = fields.stop_token_ids;
  if (!reader.Bool("ignore_eos").value_or(false)) {
    fields.sampling.stop_token_ids.push_back(text.tokens.eos);
  }
  const std::optional<int64_t> min_tokens = reader.Integer("min_tokens", 0, limits::kMaxContext);
  fields.sampling.min_tokens = static_cast<int32_t>(min_tokens.value_or(0));
  fields.include_stop = reader.Bool("include_stop_str_in_output").value_or(false);
  fields.skip_special_tokens = reader.Bool("skip_special_tokens").value_or(true);
  reader.Bool("spaces_between_special_tokens");
  fields.return_token_ids = reader.Bool("return_token_ids").value_or(false);
  fields.return_tokens_as_token_ids = reader.Bool("return_tokens_as_token_ids").value_or(false);
  fields.stream = reader.Bool("stream").value_or(false);
  if (const Json* options = reader.Object("stream_options")) {
    if (!fields.stream) {
      reader.Fail("stream_options", "Stream options can only be defined when `stream=True`.");
      return fields;
    }
    std::optional<ApiError> error;
    FieldReader stream_reader(*options, reader.Path("stream_options."), &error);
    fields.include_usage = stream_reader.Bool("include_usage").value_or(false);
    fields.continuous_usage = stream_reader.Bool("continuous_usage_stats").value_or(false);
    if (error.has_value()) reader.FailAt(error->param, error->message);
  }
  const std::optional<int64_t> prompt_logprobs =
      reader.Integer("prompt_logprobs", 0, limits::kMaxTopLogprobs);
  if (prompt_logprobs.has_value() && fields.stream) {
    reader.Fail("prompt_logprobs", "`prompt_logprobs` cannot be used with `stream`.");
  }
  fields.sampling.num_prompt_logprobs = static_cast<int32_t>(prompt_logprobs.value_or(-1));
  if (const std::string* salt = reader.String("cache_salt"); salt != nullptr && salt->empty()) {
    reader.Fail("cache_salt", "`cache_salt` must not be empty.");
  }
  RefuseUnbuilt(reader);
  ReadRequestId(reader, &fields);
  // What no field shows alone, and what the engine would refuse without a name.
  if (!reader.failed()) {
    const auto problem = FindSamplingProblem(fields.sampling, limits.vocab_size);
    if (problem.has_value()) reader.Fail(problem->field, problem->message + ".");
  }
  return fields;
}

std::optional<int32_t> TokensThatFit(int64_t max_model_len,
                                     int64_t num_prompt,
                                     bool is_cut,
                                     std::optional<int32_t> requested,
                                     const std::string& param,
                                     std::optional<ApiError>* error) {
  const int64_t wanted = requested.value_or(1);
  if (!is_cut && num_prompt + wanted <= max_model_len) {
    return static_cast<int32_t>(requested.value_or(max_model_len - num_prompt));
  }
  // Too much for the shortest prompt: no other prompt would help.
  const bool is_all_output = requested.has_value() && *requested >= max_model_len;
  *error = ApiError::Invalid(
      is_all_output ? "max_tokens" : param,
      absl::StrCat("This model's maximum context length is ", max_model_len,
                   " tokens. However, you requested ", wanted,
                   " output tokens and your prompt contains ", is_cut ? "at least " : "",
                   num_prompt, " input tokens, for a total of ", num_prompt + wanted,
                   " tokens. Please reduce the length of the input prompt or the number of "
                   "requested output tokens."));
  (*error)->code = "context_length_exceeded";
  return std::nullopt;
}

}  // namespace twinspark::gateway
