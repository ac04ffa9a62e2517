#include "tests/load/load_generator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <list>
#include <memory>
#include <string_view>

#include <boost/json.hpp>
#include <curl/curl.h>

#include "absl/strings/str_cat.h"

#include "common/clock.h"
#include "common/testing/seeded_rng.h"

namespace twinspark {
namespace {

constexpr int64_t kHangUpMsMax = 400;
constexpr int64_t kLongWordsMax = 4000;
constexpr size_t kErrorBytesMax = 200;
constexpr const char* kWords[] = {"one", "two", "three", "the", "sun", "model", "row", "47", "(a)"};
constexpr long kRequestMsMax = 300000;

struct Request {
  CURL* curl = nullptr;
  curl_slist* headers = nullptr;
  std::string body;
  std::string pending;
  int64_t start_us = 0;
  int64_t first_us = 0;
  int64_t last_us = 0;
  int64_t hang_up_us = 0;  // absolute; 0: never
  int64_t tokens_seen = 0;
  int64_t completion_tokens = 0;
  int64_t prompt_tokens = 0;
  bool is_stream = true;
  int num_choices = 1;
  int num_finished = 0;
  std::vector<double>* itl_ms = nullptr;
  std::vector<double>* gap_ms = nullptr;

  bool finished() const { return num_finished == num_choices; }

  // An event of a stream, or the whole answer.
  void Take(std::string_view payload) {
    boost::system::error_code error;
    const boost::json::value json = boost::json::parse({payload.data(), payload.size()}, error);
    if (error) return;
    if (const auto* usage = json.find_pointer("/usage/completion_tokens", error)) {
      completion_tokens = usage->to_number<int64_t>();
      if (const auto* prompt = json.find_pointer("/usage/prompt_tokens", error))
        prompt_tokens = prompt->to_number<int64_t>();
    }
    const auto* choices = json.find_pointer("/choices", error);
    if (choices == nullptr || !choices->is_array()) return;
    int64_t tokens = 0;
    for (const boost::json::value& choice : choices->as_array()) {
      const auto* reason = choice.find_pointer("/finish_reason", error);
      num_finished += reason != nullptr && reason->is_string();
      const auto* ids = choice.find_pointer("/token_ids", error);
      if (ids != nullptr && ids->is_array()) tokens += static_cast<int64_t>(ids->as_array().size());
    }
    if (tokens > 0) Count(tokens);
  }

  void Count(int64_t tokens) {
    const int64_t now_us = SteadyClock().NowUs();
    if (first_us == 0) {
      first_us = now_us;
    } else if (num_choices == 1) {
      const double gap_ms_now = static_cast<double>(now_us - last_us) / 1e3;
      gap_ms->push_back(gap_ms_now);
      itl_ms->insert(itl_ms->end(), static_cast<size_t>(tokens),
                     gap_ms_now / static_cast<double>(tokens));
    }
    last_us = now_us;
    tokens_seen += tokens;
  }

  static size_t OnBytes(char* data, size_t size, size_t count, void* user) {
    auto* request = static_cast<Request*>(user);
    request->pending.append(data, size * count);
    if (!request->is_stream) return size * count;
    size_t begin = 0;
    for (size_t end; (end = request->pending.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      std::string_view line(request->pending.data() + begin, end - begin);
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (line.starts_with("data: ")) request->Take(line.substr(6));
    }
    request->pending.erase(0, begin);
    return size * count;
  }
};

class Generator {
 public:
  explicit Generator(const LoadOptions& options)
      : options_(options), rng_(options.seed), multi_(curl_multi_init()) {
    curl_multi_setopt(multi_, CURLMOPT_MAXCONNECTS, 64L);
  }
  ~Generator() { curl_multi_cleanup(multi_); }

  LoadResult Run() {
    start_us_ = clock_.NowUs();
    next_arrival_us_ = start_us_;
    while (true) {
      StartDue();
      if (running_.empty() && !MayStart()) break;
      int still_running = 0;
      curl_multi_perform(multi_, &still_running);
      HangUpDue();
      // In a closed loop the next request takes the place of one that ended without a pause.
      if (!Reap()) curl_multi_poll(multi_, nullptr, 0, 5, nullptr);
    }
    result_.wall_seconds = static_cast<double>(clock_.NowUs() - start_us_) / 1e6;
    return std::move(result_);
  }

 private:
  bool MayStart() const {
    const double age = static_cast<double>(clock_.NowUs() - start_us_) / 1e6;
    return age < options_.seconds &&
           (options_.requests_max == 0 || started_ < options_.requests_max);
  }

  void StartDue() {
    if (options_.rate <= 0) {
      while (MayStart() && static_cast<int>(running_.size()) < options_.streams)
        Start();
      return;
    }
    while (MayStart() && clock_.NowUs() >= next_arrival_us_ &&
           static_cast<int>(running_.size()) < LoadResult::kMaxOpenRequests) {
      Start();
      next_arrival_us_ += static_cast<int64_t>(-std::log(1 - rng_.Unit()) / options_.rate * 1e6);
    }
  }

  void Start() {
    auto request = std::make_unique<Request>();
    boost::json::object body = {
        {"model", options_.model},  {"temperature", options_.temperature},
        {"seed", started_},         {"max_tokens", options_.max_tokens},
        {"return_token_ids", true}, {"chat_template_kwargs", {{"enable_thinking", false}}},
    };
    std::string prompt = options_.prompts[static_cast<size_t>(started_) % options_.prompts.size()];
    if (options_.mixed) {
      prompt = Words() + prompt;
      Mix(body);
      // Several greedy choices would be the same one: refused.
      const bool is_greedy = body["temperature"].to_number<double>() == 0;
      request->num_choices = is_greedy ? 1 : static_cast<int>(rng_.Int(1, 3));
      request->is_stream = !rng_.OneIn(5);
      body["n"] = request->num_choices;
    }
    body["messages"] = {boost::json::object{{"role", "user"}, {"content", prompt}}};
    body["stream"] = request->is_stream;
    if (request->is_stream) body["stream_options"] = {{"include_usage", true}};
    request->body = boost::json::serialize(body);
    ++started_;
    request->itl_ms = &result_.itl_ms;
    request->gap_ms = &result_.gap_ms;
    request->start_us = clock_.NowUs();
    if (rng_.Unit() < options_.disconnect_share)
      request->hang_up_us = request->start_us + rng_.Int(1, kHangUpMsMax) * 1000;
    CURL* curl = curl_easy_init();
    request->curl = curl;
    request->headers = curl_slist_append(nullptr, "Content-Type: application/json");
    curl_easy_setopt(curl, CURLOPT_URL, absl::StrCat(options_.url, "/v1/chat/completions").c_str());
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, request->headers);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, request->body.c_str());
    curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, kRequestMsMax);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, Request::OnBytes);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, request.get());
    curl_easy_setopt(curl, CURLOPT_PRIVATE, request.get());
    curl_multi_add_handle(multi_, curl);
    running_.push_back(std::move(request));
  }

  // Mostly nothing, sometimes a page or two, rarely many chunks.
  std::string Words() {
    const int64_t count = rng_.OneIn(12)  ? rng_.Int(600, kLongWordsMax)
                          : rng_.OneIn(3) ? rng_.Int(1, 300)
                                          : 0;
    std::string text;
    for (int64_t i = 0; i < count; ++i)
      absl::StrAppend(&text, kWords[rng_.Int(0, std::ssize(kWords) - 1)], " ");
    return text;
  }

  void Mix(boost::json::object& body) {
    constexpr double kTemperatures[] = {0, 0.7, 1.5};
    body["temperature"] = kTemperatures[rng_.Int(0, 2)];
    body["max_tokens"] = rng_.Int(1, 2 * options_.max_tokens);
    if (rng_.OneIn(2)) body["ignore_eos"] = true;
    if (rng_.OneIn(3)) body["top_p"] = 0.9;
    if (rng_.OneIn(4)) body["top_k"] = 20;
    if (rng_.OneIn(4)) body["presence_penalty"] = 0.5;
    if (rng_.OneIn(5)) body["stop"] = boost::json::array{"morning", "three"};
    if (rng_.OneIn(5)) {
      body["logprobs"] = true;
      body["top_logprobs"] = rng_.Int(0, 5);
    }
  }

  // True when a request has ended.
  bool Reap() {
    int left = 0;
    bool has_ended = false;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      Request* request = nullptr;
      curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &request);
      long status = 0;
      curl_easy_getinfo(message->easy_handle, CURLINFO_RESPONSE_CODE, &status);
      if (message->data.result != CURLE_OK) {
        ++result_.errors[curl_easy_strerror(message->data.result)];
      } else if (status != 200) {
        ++result_.errors[absl::StrCat("HTTP ", status, ": ",
                                      request->pending.substr(0, kErrorBytesMax))];
      } else {
        if (!request->is_stream) request->Take(request->pending);
        if (request->finished()) {
          Record(*request);
        } else {
          ++result_.errors["no finish reason"];
        }
      }
      Remove(request);
      has_ended = true;
    }
    return has_ended;
  }

  void Record(const Request& request) {
    ++result_.requests_ok;
    result_.completion_tokens += request.completion_tokens;
    result_.prompt_tokens += request.prompt_tokens;
    if (request.first_us == 0 || !request.is_stream) return;
    result_.ttft_ms.push_back(static_cast<double>(request.first_us - request.start_us) / 1e3);
    if (request.last_us > request.first_us) {
      result_.request_tok_s.push_back(
          static_cast<double>(request.tokens_seen - 1) /
          (static_cast<double>(request.last_us - request.first_us) / 1e6));
    }
  }

  void HangUpDue() {
    const int64_t now_us = clock_.NowUs();
    std::vector<Request*> due;
    for (const auto& request : running_) {
      if (request->hang_up_us != 0 && now_us >= request->hang_up_us) due.push_back(request.get());
    }
    for (Request* request : due) {
      ++result_.hung_up;
      result_.completion_tokens += request->tokens_seen;
      Remove(request);
    }
  }

  void Remove(Request* request) {
    curl_multi_remove_handle(multi_, request->curl);
    curl_easy_cleanup(request->curl);
    curl_slist_free_all(request->headers);
    running_.remove_if([&](const auto& other) { return other.get() == request; });
  }

  const LoadOptions& options_;
  SteadyClock clock_;
  SeededRng rng_;
  CURLM* multi_;
  std::list<std::unique_ptr<Request>> running_;
  int64_t started_ = 0;
  int64_t start_us_ = 0;
  int64_t next_arrival_us_ = 0;
  LoadResult result_;
};

}  // namespace

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  if (options.prompts.empty()) return absl::InvalidArgumentError("no prompts");
  return Generator(options).Run();
}

double Percentile(std::vector<double>& samples, double share) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const auto index = static_cast<size_t>(std::ceil(share * static_cast<double>(samples.size())));
  return samples[std::min(std::max<size_t>(index, 1), samples.size()) - 1];
}

}  // namespace twinspark
