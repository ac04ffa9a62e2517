// The seam between the API and the engine: what a request asks (token ids in), what comes back
// (token ids out) and the interface that joins them. gateway/openai calls it, EngineLoop implements
// it; the tests of gateway/openai implement a small one of their own. No text crosses this seam:
// stop strings are matched by the caller, which then calls Finish().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "gateway/engine/engine_status.h"
#include "gateway/scheduler/sampling_params.h"
#include "gateway/scheduler/token_logprobs.h"

namespace twinspark::gateway {

struct GenerateRequest {
  std::string request_id;  // for logs, at most 128 characters; unique among running requests
  std::vector<int32_t> prompt_ids;  // at least one
  SamplingParams sampling;
  std::optional<int32_t> max_tokens;  // absent: what fits, at most EngineLimits::max_output_default
  std::optional<int32_t> max_drafts;  // absent: the server's NUM_DRAFTS; 0..5
  bool has_stop_strings = false;      // the caller may Finish() at any token: do not run ahead
};

enum class FinishReason {
  kStop,    // a stop id (FinishInfo::stop_token_id), or the caller's Finish()
  kLength,  // max_tokens or the context limit
  kAbort,   // the caller's Cancel()
};

struct FinishInfo {
  FinishReason reason = FinishReason::kStop;
  std::optional<int32_t> stop_token_id;  // the last token of OnTokens, when it ended the sequence
  int32_t num_prompt_tokens = 0;
  int32_t num_cached_tokens = 0;      // of the prompt: not computed for this request
  int32_t num_completion_tokens = 0;  // all emitted by the engine, the stop id included
  int32_t num_preemptions = 0;
};

// Receives one request's events. Called on the engine thread, in order, never concurrently; must
// not block (post to an executor of your own) and must not call back into GenerateService.
// Exactly one of OnFinish and OnError is called, and nothing after it. The engine drops its
// reference right after that call.
class GenerateEvents {
 public:
  virtual ~GenerateEvents() = default;
  // The sequence got a slot and its prefill starts (again after a preemption or a recovery: once
  // only). A stream may send its headers now.
  virtual void OnAdmitted() {}
  // Before the first OnTokens, when prompt logprobs were asked: num_prompt_tokens - 1 entries.
  virtual void OnPromptLogprobs(std::vector<TokenLogprobs> logprobs) { (void)logprobs; }
  // Tokens of one round, 1..6 of them. logprobs is empty, or as long as token_ids.
  virtual void OnTokens(std::span<const int32_t> token_ids,
                        std::span<const TokenLogprobs> logprobs) = 0;
  virtual void OnFinish(const FinishInfo& info) = 0;
  // UNAVAILABLE: the epoch ended or the gateway drains; INTERNAL: non-finite logits of this row;
  // UNIMPLEMENTED: the workers' build lacks what this request asks for.
  virtual void OnError(const absl::Status& status) = 0;
};

// Thread-safe. Names a request between Submit and its last event; later calls have no effect.
using GenerateId = uint64_t;

class GenerateService {
 public:
  virtual ~GenerateService() = default;

  // Queues a request, or says at once why not:
  //   INVALID_ARGUMENT    it can never fit (context, pages), with need and have: 400
  //   RESOURCE_EXHAUSTED  the waiting queue is full: 429
  //   UNAVAILABLE         not ready, recovering or draining, with the reason: 503 + Retry-After
  // After an error no event is called.
  virtual absl::StatusOr<GenerateId> Submit(GenerateRequest request,
                                            std::shared_ptr<GenerateEvents> events) = 0;

  // The client is gone: slot and pages are free after the next op. OnFinish(kAbort) follows.
  virtual void Cancel(GenerateId id) = 0;

  // The caller has all it wants (a stop string matched): as Cancel, but counted as a success;
  // OnFinish(kStop) follows, perhaps after more OnTokens, which the caller drops.
  virtual void Finish(GenerateId id) = 0;

  // What /health, /ready and /status show; cheap (a copy of a snapshot), callable at any rate.
  virtual EngineStatus GetStatus() const = 0;
};

}  // namespace twinspark::gateway
