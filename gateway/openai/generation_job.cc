#include "gateway/openai/generation_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/log.h"
#include "common/string_view.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

// A stream whose request waits in the queue gets its headers after this time at the latest.
constexpr int64_t kHeadersAfterMs = 2000;
// GenerateRequest::request_id has at most 128, of which four are for the index of a choice.
constexpr size_t kMaxEngineIdBytes = 124;
// Bytes and ids of the request that are written on the engine's thread.
constexpr size_t kSmallHead = 4096;

// Carries one choice's events from the engine's thread to the connection's executor. What is to be
// done for a round is little, and done there and then where possible. What may be megabytes of JSON
// (an echoed prompt, log-probabilities, a whole answer) is left to the connection's own threads.
class ChoiceEvents : public GenerateEvents {
 public:
  ChoiceEvents(std::shared_ptr<HttpExchange> exchange,
               std::shared_ptr<GenerationJob> job,
               size_t choice)
      : exchange_(std::move(exchange)), job_(std::move(job)), choice_(choice) {}

  void OnAdmitted() override {
    if (job_->is_head_small() && exchange_->TryRun([this] { job_->OnAdmitted(); })) return;
    exchange_->Post([job = job_] { job->OnAdmitted(); });
  }
  void OnPromptLogprobs(std::vector<TokenLogprobs> logprobs) override {
    exchange_->Post([job = job_, choice = choice_, logprobs = std::move(logprobs)] {
      job->OnPromptLogprobs(choice, logprobs);
    });
  }
  void OnTokens(std::span<const int32_t> ids, std::span<const TokenLogprobs> logprobs) override {
    if (exchange_->TryRun([&] { job_->OnTokens(choice_, ids, logprobs); })) return;
    exchange_->Post([job = job_, choice = choice_,
                     ids = std::vector<int32_t>(ids.begin(), ids.end()),
                     logprobs = std::vector<TokenLogprobs>(logprobs.begin(), logprobs.end())] {
      job->OnTokens(choice, ids, logprobs);
    });
  }
  void OnFinish(const FinishInfo& info) override {
    if (exchange_->TryRun([&] { job_->OnFinish(choice_, info); })) return;
    exchange_->Post([job = job_, choice = choice_, info] { job->OnFinish(choice, info); });
  }
  void OnError(const absl::Status& status) override {
    exchange_->Post([job = job_, choice = choice_, status] { job->OnError(choice, status); });
  }

 private:
  const std::shared_ptr<HttpExchange> exchange_;
  const std::shared_ptr<GenerationJob> job_;
  const size_t choice_;
};

int64_t CountCodePoints(std::string_view text) {
  int64_t count = 0;
  for (const char c : text)
    count += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  return count;
}

std::string JsonText(std::string_view text) {
  std::string out;
  AppendJsonString(text, &out);
  return out;
}

OutputOptions ParserOptions(const JobOptions& options, bool with_stops) {
  OutputOptions result;
  result.is_chat = options.head.is_chat;
  result.starts_in_reasoning = options.starts_in_reasoning;
  result.skip_special_tokens = options.common.skip_special_tokens;
  if (with_stops) result.stop = options.common.stop;
  result.include_stop = options.common.include_stop;
  result.min_tokens = options.common.sampling.min_tokens;
  return result;
}

}  // namespace

struct GenerationJob::Choice {
  Choice(const TextModel& text, const JobOptions& options, int index_in, const JobPrompt& prompt_in)
      : index(index_in),
        prompt(prompt_in),
        parser(*text.tokenizer, text.tokens, ParserOptions(options, /*with_stops=*/true)),
        offsets(*text.tokenizer, text.tokens, ParserOptions(options, /*with_stops=*/false)),
        num_code_points(CountCodePoints(prompt_in.echo)) {}

  const int index;
  const JobPrompt& prompt;
  OutputParser parser;
  // Counts code points for text_offset, echo included; it holds nothing back for stop strings.
  OutputParser offsets;
  int64_t num_code_points;
  std::optional<GenerateId> id;
  bool is_finished = false;
  bool has_role = false;  // the role chunk has been sent
  int32_t num_tokens = 0;
  int32_t num_cached = 0;
  std::string finish_reason;
  std::string stop_reason;  // JSON

  // Kept for a response that is not streamed.
  std::string reasoning;
  std::string content;
  std::vector<int32_t> ids;
  std::vector<TokenEntry> entries;
  std::optional<std::vector<TokenLogprobs>> prompt_logprobs;  // once they are there
};

void GenerationJob::Start(std::shared_ptr<HttpExchange> exchange,
                          GenerateService& service,
                          const TextModel& text,
                          JobOptions options) {
  const auto job =
      std::make_shared<GenerationJob>(std::move(exchange), service, text, std::move(options));
  job->Submit();
}

GenerationJob::GenerationJob(std::shared_ptr<HttpExchange> exchange,
                             GenerateService& service,
                             const TextModel& text,
                             JobOptions options)
    : exchange_(std::move(exchange)),
      service_(service),
      text_(text),
      options_(std::move(options)),
      logprob_writer_(*text.tokenizer, options_.common.return_tokens_as_token_ids) {}

void GenerationJob::Submit() {
  const int n = options_.common.num_choices;
  for (const JobPrompt& prompt : options_.prompts) {
    for (int k = 0; k < n; ++k) {
      choices_.push_back(
          std::make_unique<Choice>(text_, options_, static_cast<int>(choices_.size()), prompt));
    }
  }
  num_unfinished_ = choices_.size();
  // The engine's events hold the job; this callback must not, or the two would keep each other.
  exchange_->OnGone([weak = weak_from_this()] {
    if (const std::shared_ptr<GenerationJob> job = weak.lock()) {
      job->is_over_ = true;
      job->CancelAll();
    }
  });
  for (size_t i = 0; i < choices_.size(); ++i) {
    absl::StatusOr<GenerateId> id =
        service_.Submit(MakeRequest(*choices_[i]),
                        std::make_shared<ChoiceEvents>(exchange_, shared_from_this(), i));
    if (!id.ok()) {
      Fail(ApiError::OfSubmit(id.status(), service_.GetStatus().state));
      return;
    }
    choices_[i]->id = *id;
  }
  if (!is_stream()) return;
  exchange_->After(kHeadersAfterMs, [weak = weak_from_this()] {
    if (const std::shared_ptr<GenerationJob> job = weak.lock()) job->OnAdmitted();
  });
}

GenerateRequest GenerationJob::MakeRequest(const Choice& choice) const {
  GenerateRequest request;
  request.request_id = options_.head.id.substr(0, kMaxEngineIdBytes);
  if (choices_.size() > 1) absl::StrAppend(&request.request_id, "-", choice.index);
  request.prompt_ids = choice.prompt.ids;
  request.sampling = options_.common.sampling;
  request.sampling.choice = static_cast<uint32_t>(choice.index % options_.common.num_choices);
  if (SharesPromptLogprobs(choice)) request.sampling.num_prompt_logprobs = -1;
  request.max_tokens = options_.common.max_tokens;
  if (options_.no_output) request.max_tokens = 1;
  request.has_stop_strings = !options_.common.stop.empty();
  return request;
}

// What comes before the first token repeats little of the request. Never changes: for any thread.
bool GenerationJob::is_head_small() const {
  size_t size = options_.prompt_text.size();
  for (const JobPrompt& prompt : options_.prompts)
    size += prompt.echo.size() + (options_.common.return_token_ids ? prompt.ids.size() : 0);
  return size <= kSmallHead;
}

void GenerationJob::OnAdmitted() {
  if (!is_over_ && is_stream()) EnsureStreaming();
}

void GenerationJob::OnPromptLogprobs(size_t choice, std::vector<TokenLogprobs> logprobs) {
  choices_[choice]->prompt_logprobs = std::move(logprobs);
  if (is_over_ || !is_stream()) return;
  EnsureStreaming();
  SendEcho(*choices_[choice]);
}

// The n choices of a prompt have it in common: the first one's are everyone's, except in a stream,
// where no choice waits for another.
bool GenerationJob::SharesPromptLogprobs(const Choice& choice) const {
  return !is_stream() && choice.index % options_.common.num_choices != 0;
}

std::span<const TokenLogprobs> GenerationJob::PromptLogprobs(const Choice& choice) const {
  const int k = SharesPromptLogprobs(choice) ? choice.index % options_.common.num_choices : 0;
  const Choice& owner = *choices_[static_cast<size_t>(choice.index - k)];
  if (!owner.prompt_logprobs.has_value()) return {};
  return *owner.prompt_logprobs;
}

// The prompt's tokens as they stand before the generated ones; the first has nothing before it to
// be predicted from.
std::vector<TokenEntry> GenerationJob::EchoEntries(const Choice& choice) const {
  const std::span<const TokenLogprobs> logprobs = PromptLogprobs(choice);
  std::vector<TokenEntry> entries;
  Detokenizer detokenizer(*text_.tokenizer);
  int64_t offset = 0;
  for (size_t i = 0; i < choice.prompt.ids.size(); ++i) {
    TokenEntry entry{choice.prompt.ids[i], std::nullopt, OutputEvent::Kind::kContent, offset};
    if (i > 0 && i <= logprobs.size()) {
      entry.logprobs = logprobs[i - 1];
      // There may be more of them for `prompt_logprobs`.
      const auto wanted = static_cast<size_t>(options_.common.sampling.num_logprobs);
      if (entry.logprobs->top.size() > wanted) entry.logprobs->top.resize(wanted);
    }
    entries.push_back(std::move(entry));
    if (i == 0 && choice.prompt.has_added_bos) continue;
    std::string piece;
    detokenizer.Push(choice.prompt.ids[i], &piece);
    offset += CountCodePoints(piece);
  }
  return entries;
}

void GenerationJob::OnTokens(size_t choice_index,
                             std::span<const int32_t> ids,
                             std::span<const TokenLogprobs> logprobs) {
  Choice& choice = *choices_[choice_index];
  if (is_over_ || choice.is_finished || options_.no_output) return;
  Step step;
  for (size_t i = 0; i < ids.size() && !choice.parser.done(); ++i) {
    PushToken(choice, ids[i], i < logprobs.size() ? &logprobs[i] : nullptr, &step);
  }
  const bool is_done = choice.parser.done();
  Deliver(choice, std::move(step));
  if (!is_done || is_over_) return;
  service_.Finish(*choice.id);
  FinishChoice(choice, "stop", JsonText(*choice.parser.stopped_by()));
}

void GenerationJob::PushToken(Choice& choice,
                              int32_t id,
                              const TokenLogprobs* logprobs,
                              Step* step) {
  const CommonFields& common = options_.common;
  ++choice.num_tokens;
  const bool is_user_stop = choice.num_tokens >= common.sampling.min_tokens &&
                            std::find(common.stop_token_ids.begin(), common.stop_token_ids.end(),
                                      id) != common.stop_token_ids.end();
  const OutputEvent::Kind kind =
      choice.parser.in_reasoning() ? OutputEvent::Kind::kReasoning : OutputEvent::Kind::kContent;
  if (is_user_stop && !common.include_stop) {
    choice.parser.PushHidden(id);
  } else {
    choice.parser.Push(id, &step->events);
  }
  step->ids.push_back(id);
  if (logprobs == nullptr || !wants_logprobs()) return;
  TokenEntry entry{id, *logprobs, kind, choice.num_code_points};
  if (options_.head.is_chat) {
    const bool is_text = text_.tokens.ClassOf(id) == OutputClass::kOrdinary ||
                         text_.tokens.ClassOf(id) == OutputClass::kLiteral;
    if (common.return_token_ids) {
      entry.kind = OutputEvent::Kind::kContent;
    } else if (!is_text) {
      return;
    }
  } else {
    std::vector<OutputEvent> events;
    choice.offsets.Push(id, &events);
    for (const OutputEvent& event : events)
      choice.num_code_points += CountCodePoints(event.text);
  }
  step->entries.push_back(std::move(entry));
}

void GenerationJob::Deliver(Choice& choice, Step step) {
  if (is_stream()) {
    SendChunks(choice, step);
    return;
  }
  for (const OutputEvent& event : step.events) {
    (event.kind == OutputEvent::Kind::kReasoning ? choice.reasoning : choice.content)
        .append(event.text);
  }
  choice.ids.insert(choice.ids.end(), step.ids.begin(), step.ids.end());
  choice.entries.insert(choice.entries.end(), step.entries.begin(), step.entries.end());
}

// One chunk per event. Ids go with the first chunk, log-probabilities with the first of their kind;
// a chunk with an empty delta carries what has no text to go with.
void GenerationJob::SendChunks(Choice& choice, const Step& step) {
  EnsureStreaming();
  SendEcho(choice);
  const bool is_chat = options_.head.is_chat;
  bool needs_ids = options_.common.return_token_ids && !step.ids.empty();
  bool needs_entries = !step.entries.empty();
  const auto send = [&](std::string body) {
    ChoiceJson chunk;
    chunk.index = choice.index;
    chunk.body = std::move(body);
    if (needs_ids) chunk.token_ids = IdsJson(step.ids);
    if (needs_entries) chunk.logprobs = LogprobsJson(step.entries);
    needs_ids = needs_entries = false;
    SendChoice(chunk);
  };
  for (const OutputEvent& event : step.events) {
    const bool is_reasoning = event.kind == OutputEvent::Kind::kReasoning;
    if (is_reasoning && !options_.include_reasoning) continue;
    if (!is_chat) {
      send(JsonText(event.text));
    } else {
      send(absl::StrCat(
          is_reasoning ? "{\"reasoning_content\":" : "{\"content\":", JsonText(event.text), "}"));
    }
  }
  if (needs_ids || needs_entries) send(is_chat ? "{}" : "\"\"");
}

// The role chunk of a chat, the prompt's text of a completion; before anything else of a choice.
void GenerationJob::SendEcho(Choice& choice) {
  if (choice.has_role || (options_.echo_logprobs && !choice.prompt_logprobs.has_value())) return;
  choice.has_role = true;
  ChoiceJson chunk;
  chunk.index = choice.index;
  if (options_.head.is_chat) {
    chunk.body = "{\"role\":\"assistant\",\"content\":\"\"}";
    SendChoice(chunk);
    if (choice.prompt.echo.empty()) return;
    chunk.body = absl::StrCat("{\"content\":", JsonText(choice.prompt.echo), "}");
    SendChoice(chunk);
  } else if (!choice.prompt.echo.empty() || options_.echo_logprobs) {
    chunk.body = JsonText(choice.prompt.echo);
    if (options_.echo_logprobs) chunk.logprobs = LogprobsJson(EchoEntries(choice));
    SendChoice(chunk);
  }
}

void GenerationJob::EnsureStreaming() {
  if (is_streaming_) return;
  is_streaming_ = true;
  HttpResponse head;
  head.headers = options_.headers;
  head.headers.emplace_back("Content-Type", "text/event-stream; charset=utf-8");
  head.headers.emplace_back("Cache-Control", "no-cache");
  head.headers.emplace_back("X-Accel-Buffering", "no");
  exchange_->StartStream(std::move(head), options_.keepalive);
  for (const std::unique_ptr<Choice>& choice : choices_)
    SendEcho(*choice);
}

void GenerationJob::SendChoice(const ChoiceJson& choice) {
  std::string more;
  if (options_.common.include_usage) {
    more = absl::StrCat(",\"usage\":",
                        options_.common.continuous_usage ? UsageJson(CurrentUsage()) : "null");
  }
  const bool is_first = !std::exchange(has_sent_chunk_, true);
  if (is_first && options_.common.return_token_ids) {
    absl::StrAppend(&more, ",\"prompt_token_ids\":", IdsJson(options_.prompts[0].ids));
  }
  if (is_first && !options_.prompt_text.empty()) {
    absl::StrAppend(&more, ",\"prompt_text\":", JsonText(options_.prompt_text));
  }
  exchange_->Write(
      SseEvent(ResponseText(options_.head, /*is_chunk=*/true,
                            ChoiceText(choice, options_.head.is_chat ? "delta" : "text"), more)));
}

void GenerationJob::OnFinish(size_t choice_index, const FinishInfo& info) {
  Choice& choice = *choices_[choice_index];
  choice.num_cached = info.num_cached_tokens;
  if (is_over_ || choice.is_finished) return;
  if (info.reason == FinishReason::kAbort) {
    Fail(ApiError::OfEngine(absl::UnavailableError("the request was cancelled"),
                            service_.GetStatus().state));
    return;
  }
  Step step;
  choice.parser.Finish(&step.events);
  const std::optional<std::string> stopped_by = choice.parser.stopped_by();
  Deliver(choice, std::move(step));
  if (is_over_) return;
  if (stopped_by.has_value()) {
    FinishChoice(choice, "stop", JsonText(*stopped_by));
  } else if (info.reason == FinishReason::kLength) {
    FinishChoice(choice, "length", "null");
  } else {
    const bool is_user_stop =
        info.stop_token_id.has_value() && *info.stop_token_id != text_.tokens.eos;
    FinishChoice(choice, "stop",
                 is_user_stop ? absl::StrCat(*info.stop_token_id) : std::string("null"));
  }
}

void GenerationJob::FinishChoice(Choice& choice,
                                 std::string finish_reason,
                                 std::string stop_reason) {
  choice.is_finished = true;
  choice.finish_reason = std::move(finish_reason);
  choice.stop_reason = std::move(stop_reason);
  --num_unfinished_;
  if (is_stream()) {
    EnsureStreaming();
    SendEcho(choice);
    ChoiceJson chunk;
    chunk.index = choice.index;
    chunk.body = options_.head.is_chat ? "{}" : "\"\"";
    chunk.finish_reason = choice.finish_reason;
    chunk.stop_reason = choice.stop_reason;
    SendChoice(chunk);
  }
  CompleteIfDone();
}

void GenerationJob::CompleteIfDone() {
  if (num_unfinished_ > 0 || is_over_) return;
  is_over_ = true;
  if (!is_stream()) {
    exchange_->Post([job = shared_from_this()] { job->RespondWhole(); });
    return;
  }
  if (options_.common.include_usage) {
    exchange_->Write(
        SseEvent(ResponseText(options_.head, /*is_chunk=*/true, "",
                              absl::StrCat(",\"usage\":", UsageJson(CurrentUsage())))));
  }
  exchange_->Write(kSseDone);
  exchange_->EndStream(/*close=*/false);
}

std::string GenerationJob::ChoiceOfResponse(const Choice& choice) const {
  ChoiceJson json;
  json.index = choice.index;
  json.finish_reason = choice.finish_reason;
  json.stop_reason = choice.stop_reason;
  if (options_.common.return_token_ids) json.token_ids = IdsJson(choice.ids);
  const std::string text = choice.prompt.echo + choice.content;
  if (wants_logprobs()) {
    std::vector<TokenEntry> entries;
    if (options_.echo_logprobs) entries = EchoEntries(choice);
    entries.insert(entries.end(), choice.entries.begin(), choice.entries.end());
    json.logprobs = LogprobsJson(entries);
  }
  if (!options_.head.is_chat) {
    json.body = JsonText(text);
    if (options_.num_prompt_logprobs >= 0) {
      json.prompt_logprobs = logprob_writer_.Prompt(choice.prompt.ids, PromptLogprobs(choice),
                                                    options_.num_prompt_logprobs);
    }
    return ChoiceText(json, "text");
  }
  json.body = absl::StrCat("{\"role\":\"assistant\",\"content\":", JsonText(text));
  if (options_.include_reasoning && (options_.starts_in_reasoning || !choice.reasoning.empty())) {
    absl::StrAppend(&json.body, ",\"reasoning_content\":", JsonText(choice.reasoning));
  }
  json.body.push_back('}');
  return ChoiceText(json, "message");
}

void GenerationJob::RespondWhole() {
  std::string choices;
  for (const std::unique_ptr<Choice>& choice : choices_) {
    absl::StrAppend(&choices, choices.empty() ? "" : ",", ChoiceOfResponse(*choice));
  }
  std::string more = absl::StrCat(",\"usage\":", UsageJson(CurrentUsage()));
  if (options_.common.return_token_ids) {
    absl::StrAppend(&more, ",\"prompt_token_ids\":", IdsJson(options_.prompts[0].ids));
  }
  if (options_.head.is_chat && options_.num_prompt_logprobs >= 0) {
    absl::StrAppend(&more, ",\"prompt_logprobs\":",
                    logprob_writer_.Prompt(options_.prompts[0].ids, PromptLogprobs(*choices_[0]),
                                           options_.num_prompt_logprobs));
  }
  if (!options_.prompt_text.empty()) {
    absl::StrAppend(&more, ",\"prompt_text\":", JsonText(options_.prompt_text));
  }
  HttpResponse response;
  response.headers = options_.headers;
  response.headers.emplace_back("Content-Type", "application/json");
  response.body = ResponseText(options_.head, /*is_chunk=*/false, choices, more);
  exchange_->Respond(std::move(response));
}

void GenerationJob::OnError(size_t choice, const absl::Status& status) {
  choices_[choice]->id.reset();  // the engine has forgotten it
  if (is_over_) return;
  LOG_WARNING << "request failed id=" << options_.head.id << " choice=" << choice
              << " error=" << std::string(ToStd(status.message()));
  Fail(ApiError::OfEngine(status, service_.GetStatus().state));
}

void GenerationJob::Fail(const ApiError& error) {
  is_over_ = true;
  CancelAll();
  if (!exchange_->is_started()) {
    HttpResponse response = error.Response();
    response.headers.insert(response.headers.end(), options_.headers.begin(),
                            options_.headers.end());
    exchange_->Respond(std::move(response));
    return;
  }
  exchange_->Write(SseEvent(error.Body()));
  exchange_->Write(kSseDone);
  exchange_->EndStream(/*close=*/true);
}

void GenerationJob::CancelAll() {
  for (const std::unique_ptr<Choice>& choice : choices_) {
    if (choice->id.has_value() && !choice->is_finished) service_.Cancel(*choice->id);
  }
}

Usage GenerationJob::CurrentUsage() const {
  Usage usage;
  for (const JobPrompt& prompt : options_.prompts) {
    usage.prompt_tokens += static_cast<int64_t>(prompt.ids.size());
  }
  for (const std::unique_ptr<Choice>& choice : choices_) {
    usage.completion_tokens += choice->num_tokens;
    usage.reasoning_tokens += choice->parser.num_reasoning_tokens();
    if (choice->index % options_.common.num_choices == 0) usage.cached_tokens += choice->num_cached;
  }
  return usage;
}

std::string GenerationJob::LogprobsJson(std::span<const TokenEntry> entries) const {
  return options_.head.is_chat ? logprob_writer_.Chat(entries) : logprob_writer_.Text(entries);
}

}  // namespace twinspark::gateway
