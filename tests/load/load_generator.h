// Streams chats against a gateway and records when every event came. One thread, libcurl's multi
// interface, so that the generator itself takes little of a small machine. Closed loop: `streams`
// requests at any time. Open loop: arrivals by a Poisson process of `rate` per second, whatever is
// still running (at most kMaxOpenRequests). A share of the requests hangs up after a random time.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace twinspark {

struct LoadOptions {
  std::string url = "http://127.0.0.1:8888";
  std::string model = "DeepSeek-v4.1-Flash-EXL3";
  std::vector<std::string> prompts;
  int streams = 1;
  double rate = 0;           // > 0: open loop
  double seconds = 10;       // no request starts after that; running ones finish
  int64_t requests_max = 0;  // 0: no limit
  int max_tokens = 160;
  double temperature = 0;
  double disconnect_share = 0;  // of requests that hang up within kHangUpMsMax
  bool mixed = false;           // draws prompt, n, length, sampling, stops, logprobs, stream or not
  uint64_t seed = 1;
};

struct LoadResult {
  static constexpr int kMaxOpenRequests = 512;

  double wall_seconds = 0;
  int64_t requests_ok = 0;
  int64_t hung_up = 0;
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  std::map<std::string, int64_t> errors;  // "HTTP 429", a transport error, "no finish reason"
  std::vector<double> ttft_ms;            // request sent to first text, per request
  std::vector<double> itl_ms;  // gap between two events over the tokens of the second, per token
  std::vector<double> gap_ms;  // between two events with tokens: a round, with one choice
  std::vector<double> request_tok_s;  // tokens after the first over the time they took, per request
};

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

// The value below which `share` (0..1) of the samples lie; 0 for none. Sorts.
double Percentile(std::vector<double>& samples, double share);

}  // namespace twinspark
