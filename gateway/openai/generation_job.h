// One request of the chat or completions API while it runs: submits its choices to the engine,
// turns their tokens into text, and writes the response, whole or as a stream. Everything happens
// on the connection's executor, which for a round is mostly the engine's thread (TryRun).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gateway/engine/generate_request.h"
#include "gateway/http/http_server.h"
#include "gateway/openai/api_error.h"
#include "gateway/openai/common_fields.h"
#include "gateway/openai/response_json.h"
#include "gateway/text/output_parser.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {

struct JobPrompt {
  std::vector<int32_t> ids;
  std::string echo;  // text put in front of the output: the prompt's, or the continued message's
  bool has_added_bos = false;  // the first id is not in the text
  // Too long for any request, and therefore not encoded to its end; it has at least so many ids.
  bool is_cut = false;
  size_t num_ids_at_least = 0;
};

struct JobOptions {
  ResponseHead head;
  CommonFields common;
  std::vector<JobPrompt> prompts;  // one for chat; choices are prompt-major
  bool starts_in_reasoning = false;
  bool include_reasoning = true;     // chat: false drops the reasoning from the response
  bool echo_logprobs = false;        // completions: the prompt's tokens come first in logprobs
  int32_t num_prompt_logprobs = -1;  // what `prompt_logprobs` asked for; -1: there was none
  bool no_output = false;            // completions: max_tokens 0, only the echo
  std::string prompt_text;           // chat: returned when not empty
  HttpHeaders headers;               // of the response
  std::string keepalive{kSseKeepalive};
};

class GenerationJob : public std::enable_shared_from_this<GenerationJob> {
 public:
  // Submits every choice; answers at once when the engine refuses. The engine keeps the job alive.
  // `service` and `text` must outlive it.
  static void Start(std::shared_ptr<HttpExchange> exchange,
                    GenerateService& service,
                    const TextModel& text,
                    JobOptions options);

  GenerationJob(std::shared_ptr<HttpExchange> exchange,
                GenerateService& service,
                const TextModel& text,
                JobOptions options);

  bool is_head_small() const;
  // From the engine, on the executor.
  void OnAdmitted();
  void OnPromptLogprobs(size_t choice, std::vector<TokenLogprobs> logprobs);
  void OnTokens(size_t choice,
                std::span<const int32_t> ids,
                std::span<const TokenLogprobs> logprobs);
  void OnFinish(size_t choice, const FinishInfo& info);
  void OnError(size_t choice, const absl::Status& status);

 private:
  struct Choice;
  // What one batch of tokens gave: events and, if asked for, ids and log-probabilities.
  struct Step {
    std::vector<OutputEvent> events;
    std::vector<int32_t> ids;
    std::vector<TokenEntry> entries;
  };

  void Submit();
  GenerateRequest MakeRequest(const Choice& choice) const;
  void PushToken(Choice& choice, int32_t id, const TokenLogprobs* logprobs, Step* step);
  void Deliver(Choice& choice, Step step);
  void SendChunks(Choice& choice, const Step& step);
  void FinishChoice(Choice& choice, std::string finish_reason, std::string stop_reason);
  void EnsureStreaming();
  void SendChoice(const ChoiceJson& choice);
  void SendEcho(Choice& choice);
  bool SharesPromptLogprobs(const Choice& choice) const;
  std::span<const TokenLogprobs> PromptLogprobs(const Choice& choice) const;
  std::vector<TokenEntry> EchoEntries(const Choice& choice) const;
  void CompleteIfDone();
  void RespondWhole();
  std::string ChoiceOfResponse(const Choice& choice) const;
  void Fail(const ApiError& error);
  void CancelAll();
  Usage CurrentUsage() const;
  std::string LogprobsJson(std::span<const TokenEntry> entries) const;
  bool wants_logprobs() const { return options_.common.sampling.num_logprobs >= 0; }
  bool is_stream() const { return options_.common.stream; }

  std::shared_ptr<HttpExchange> exchange_;
  GenerateService& service_;
  const TextModel& text_;
  const JobOptions options_;
  const LogprobWriter logprob_writer_;
  std::vector<std::unique_ptr<Choice>> choices_;
  size_t num_unfinished_ = 0;
  bool has_sent_chunk_ = false;
  bool is_streaming_ = false;  // the head of the stream has been sent
  bool is_over_ = false;       // answered, failed, or the client is gone
};

}  // namespace twinspark::gateway
