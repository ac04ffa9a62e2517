#include "gateway/scheduler/sampling_params.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "common/sampling_bounds.h"

namespace twinspark::gateway {
namespace {

namespace bounds = sampling_bounds;

// Keeps the first problem; what comes after it is not looked at.
class Checker {
 public:
  explicit Checker(int32_t vocab_size) : vocab_size_(vocab_size) {}

  void Number(const char* field, double value, const bounds::Range& range) {
    if (value >= range.low && value <= range.high) return;
    Fail(field,
         absl::StrCat("`", field, "` is ", value, ", allowed are ", range.low, " to ", range.high));
  }
  void Count(const char* field, size_t count, size_t most) {
    if (count <= most) return;
    Fail(field, absl::StrCat("`", field, "` has ", count, " entries, allowed are ", most));
  }
  void Token(const char* field, int32_t id) {
    if (id >= 0 && (vocab_size_ == 0 || id < vocab_size_)) return;
    Fail(field, absl::StrCat("`", field, "`: token id ", id, " is not in the vocabulary of ",
                             vocab_size_));
  }
  void Tokens(const char* field, const std::vector<int32_t>& ids) {
    for (const int32_t id : ids)
      Token(field, id);
  }
  void Fail(const char* field, std::string message) {
    if (!problem_.has_value()) problem_ = SamplingProblem{field, std::move(message)};
  }
  bool failed() const { return problem_.has_value(); }
  std::optional<SamplingProblem> problem() && { return std::move(problem_); }

 private:
  const int32_t vocab_size_;
  std::optional<SamplingProblem> problem_;
};

void CheckLists(const SamplingParams& params, Checker& check) {
  check.Count("stop_token_ids", params.stop_token_ids.size(), bounds::kMaxStopIds);
  check.Tokens("stop_token_ids", params.stop_token_ids);
  check.Count("logit_bias", params.logit_bias.size(), bounds::kMaxLogitBiases);
  for (const auto& [id, bias] : params.logit_bias) {
    check.Token("logit_bias", id);
    check.Number("logit_bias", static_cast<double>(bias), bounds::kLogitBias);
  }
  check.Count("bad_words", params.bad_words.size(), bounds::kMaxBadWordSpellings);
  for (const std::vector<int32_t>& word : params.bad_words) {
    if (word.empty()) check.Fail("bad_words", "`bad_words` has an empty word");
    check.Count("bad_words", word.size(), bounds::kMaxBadWordIds);
    check.Tokens("bad_words", word);
  }
  check.Tokens("allowed_token_ids", params.allowed_token_ids);
}

// Some position may come where every allowed token is masked: a token counts as masked when it can
// be anywhere. (Whether a bad word of several tokens completes depends on what is drawn before.)
void CheckThatATokenIsLeft(const SamplingParams& params, int32_t vocab_size, Checker& check) {
  absl::flat_hash_set<int32_t> masked;
  for (const std::vector<int32_t>& word : params.bad_words)
    masked.insert(word.back());
  if (params.min_tokens > 0) {
    masked.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
  }
  const std::vector<int32_t>& allowed = params.allowed_token_ids;
  if (allowed.empty()) {
    if (vocab_size > 0 && masked.size() >= static_cast<size_t>(vocab_size)) {
      check.Fail("bad_words", "`bad_words` and stop tokens mask the whole vocabulary");
    }
    return;
  }
  const auto is_masked = [&](int32_t id) { return masked.contains(id); };
  if (!std::all_of(allowed.begin(), allowed.end(), is_masked)) return;
  check.Fail("allowed_token_ids",
             "`allowed_token_ids` leaves no token to draw: each of them is the last token of a bad "
             "word, or a stop token while `min_tokens` is not reached");
}

}  // namespace

std::optional<SamplingProblem> FindSamplingProblem(const SamplingParams& params,
                                                   int32_t vocab_size) {
  Checker check(vocab_size);
  check.Number("temperature", static_cast<double>(params.temperature), bounds::kTemperature);
  check.Number("top_p", static_cast<double>(params.top_p), bounds::kTopP);
  check.Number("min_p", static_cast<double>(params.min_p), bounds::kMinP);
  check.Number("top_k", params.top_k, bounds::kTopK);
  check.Number("repetition_penalty", static_cast<double>(params.repetition_penalty),
               bounds::kRepetitionPenalty);
  check.Number("presence_penalty", static_cast<double>(params.presence_penalty),
               bounds::kPresencePenalty);
  check.Number("frequency_penalty", static_cast<double>(params.frequency_penalty),
               bounds::kFrequencyPenalty);
  check.Number("min_tokens", params.min_tokens, bounds::kMinTokens);
  // -1: not asked for.
  if (params.num_logprobs != -1) check.Number("logprobs", params.num_logprobs, bounds::kLogprobs);
  if (params.num_prompt_logprobs != -1) {
    check.Number("prompt_logprobs", params.num_prompt_logprobs, bounds::kLogprobs);
  }
  CheckLists(params, check);
  if (!check.failed()) CheckThatATokenIsLeft(params, vocab_size, check);
  return std::move(check).problem();
}

absl::Status CheckSamplingParams(const SamplingParams& params, int32_t vocab_size) {
  const std::optional<SamplingProblem> problem = FindSamplingProblem(params, vocab_size);
  return problem.has_value() ? absl::InvalidArgumentError(problem->message) : absl::OkStatus();
}

}  // namespace twinspark::gateway
