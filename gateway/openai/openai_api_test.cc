// Goal: the API over real HTTP, against an engine that plays scripts: whole and streamed answers,
// usage, stop strings, log-probabilities, errors before and after the headers, clients that leave.
// Method: the demo model's tokenizer; texts go through it, so tokens mean something.
#include "gateway/openai/openai_api.h"

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/file_util.h"
#include "gateway/http/testing/raw_client.h"
#include "gateway/text/ordered_json.h"

namespace twinspark::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const TextModel& DemoText() {
  static const TextModel* const kModel = [] {
    absl::StatusOr<TextModel> model =
        TextModel::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model");
    CHECK(model.ok()) << model.status();
    return new TextModel(*std::move(model));
  }();
  return *kModel;
}

std::vector<int32_t> Ids(std::string_view text) {
  std::vector<int32_t> ids;
  DemoText().tokenizer->EncodeParse(text, &ids);
  return ids;
}

// Plays `script` for every request on a thread of its own, as the engine's thread would.
class FakeEngine : public GenerateService {
 public:
  using Script = std::function<void(const GenerateRequest&, GenerateEvents&)>;

  ~FakeEngine() override {
    for (std::thread& thread : threads_)
      thread.join();
  }
  absl::StatusOr<GenerateId> Submit(GenerateRequest request,
                                    std::shared_ptr<GenerateEvents> events) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!refusal.ok()) return refusal;
    requests.push_back(request);
    changed_.notify_all();
    threads_.emplace_back([script = script, request, events = std::move(events)]() mutable {
      script(request, *events);
      events.reset();
    });
    return requests.size();
  }
  void Cancel(GenerateId id) override { Note(&cancelled, id); }
  void Finish(GenerateId id) override { Note(&finished, id); }
  EngineStatus GetStatus() const override { return status; }

  // Waits until `count` of `list` is there.
  bool Wait(const std::vector<GenerateId>& list, size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30), [&] { return list.size() >= count; });
  }
  bool WaitForRequests(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30),
                             [&] { return requests.size() >= count; });
  }
  GenerateRequest Request(size_t i) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return requests[i];
  }

  Script script;
  absl::Status refusal;
  EngineStatus status;
  std::vector<GenerateRequest> requests;
  std::vector<GenerateId> cancelled;
  std::vector<GenerateId> finished;

 private:
  void Note(std::vector<GenerateId>* list, GenerateId id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    list->push_back(id);
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
};

// Emits the tokens of `text` three at a time, then EOS.
FakeEngine::Script Say(std::string text) {
  return [text](const GenerateRequest& request, GenerateEvents& events) {
    std::vector<int32_t> ids = Ids(text);
    ids.push_back(DemoText().tokens.eos);
    events.OnAdmitted();
    if (request.sampling.num_prompt_logprobs >= 0) {
      std::vector<TokenLogprobs> prompt(request.prompt_ids.size() - 1);
      for (size_t i = 0; i < prompt.size(); ++i) {
        prompt[i] = {-0.5f * static_cast<float>(i), 1, {{request.prompt_ids[i + 1], -0.25f}}};
      }
      events.OnPromptLogprobs(std::move(prompt));
    }
    FinishInfo info;
    info.num_prompt_tokens = static_cast<int32_t>(request.prompt_ids.size());
    info.reason = FinishReason::kStop;
    info.stop_token_id = ids.back();
    if (request.max_tokens.has_value() && *request.max_tokens < static_cast<int32_t>(ids.size())) {
      ids.resize(static_cast<size_t>(*request.max_tokens));
      info.reason = FinishReason::kLength;
      info.stop_token_id.reset();
    }
    for (size_t i = 0; i < ids.size(); i += 3) {
      const size_t n = std::min<size_t>(3, ids.size() - i);
      std::vector<TokenLogprobs> logprobs;
      for (size_t k = 0; request.sampling.num_logprobs >= 0 && k < n; ++k) {
        logprobs.push_back({-1.5f, 2, {}});
        for (int32_t t = 0; t < request.sampling.num_logprobs; ++t) {
          logprobs.back().top.push_back({100 + t, -0.5f});
        }
      }
      events.OnTokens({ids.data() + i, n}, logprobs);
    }
    info.num_completion_tokens = static_cast<int32_t>(ids.size());
    events.OnFinish(info);
  };
}

class OpenAiApiTest : public ::testing::Test {
 protected:
  OpenAiApiTest() {
    engine_.status.state = EngineState::kReady;
    engine_.status.limits.max_context = 4096;
    engine_.script = Say("Hello there.");
  }
  ~OpenAiApiTest() override { server_.reset(); }

  uint16_t Port() {
    if (server_ == nullptr) {
      options_.model_names = {"m", "alias"};
      api_ = std::make_unique<OpenAiApi>(options_, DemoText(), engine_, metrics_);
      HttpServerOptions http;
      http.address = "127.0.0.1";
      http.error_body = &OpenAiApi::HttpErrorBody;
      http.max_body_bytes = max_body_bytes_;
      auto server = HttpServer::Start(http, [this](std::shared_ptr<HttpExchange> exchange) {
        api_->Handle(std::move(exchange));
      });
      CHECK(server.ok()) << server.status();
      server_ = *std::move(server);
    }
    return server_->port();
  }
  RawClient::Response Post(std::string_view path,
                           std::string_view body,
                           std::string_view headers = {}) {
    RawClient client(Port());
    client.SendRequest("POST", path, body, headers);
    return client.Read();
  }
  RawClient::Response Get(std::string_view path, std::string_view headers = {}) {
    RawClient client(Port());
    client.SendRequest("GET", path, {}, headers);
    return client.Read();
  }
  Json Chat(std::string_view more) {
    const RawClient::Response response = Post("/v1/chat/completions", ChatBody(more));
    CHECK_EQ(response.status, 200) << response.body;
    absl::StatusOr<Json> json = Json::Parse(response.body);
    CHECK(json.ok()) << json.status() << response.body;
    return *std::move(json);
  }
  static std::string ChatBody(std::string_view more) {
    return absl::StrCat(R"({"model":"m","messages":[{"role":"user","content":"Hi"}])",
                        more.empty() ? "" : ",", std::string(more), "}");
  }
  // The JSON of every data event; "[DONE]" must be last.
  static std::vector<Json> Events(const std::string& body) {
    std::vector<Json> events;
    bool done = false;
    for (const std::string& event :
         std::vector<std::string>(absl::StrSplit(body, "\n\n", absl::SkipEmpty()))) {
      if (event[0] == ':') continue;
      EXPECT_TRUE(absl::StartsWith(event, "data: ")) << event;
      EXPECT_FALSE(done);
      done = event == "data: [DONE]";
      if (done) continue;
      absl::StatusOr<Json> json = Json::Parse(event.substr(6));
      CHECK(json.ok()) << event;
      events.push_back(*std::move(json));
    }
    EXPECT_TRUE(done) << body;
    return events;
  }

  Metrics metrics_;  // outlives the engine, whose threads may hold the last of an exchange
  FakeEngine engine_;
  OpenAiOptions options_;
  size_t max_body_bytes_ = limits::kMaxBodyBytes;
  std::unique_ptr<OpenAiApi> api_;
  std::unique_ptr<HttpServer> server_;
};

constexpr char kOff[] = R"("thinking":{"type":"disabled"})";

const Json& At(const Json& json, std::string_view path) {
  const Json* value = &json;
  for (const std::string& key : std::vector<std::string>(absl::StrSplit(std::string(path), '.'))) {
    if (value->is_array()) {
      value = &value->as_array().at(std::stoul(key));
    } else {
      value = value->Find(key);
      CHECK(value != nullptr) << key << " in " << json.Dump();
    }
  }
  return *value;
}

TEST_F(OpenAiApiTest, WholeAnswer) {
  const Json json = Chat(kOff);
  EXPECT_EQ(At(json, "object").as_string(), "chat.completion");
  EXPECT_EQ(At(json, "choices.0.message.content").as_string(), "Hello there.");
  EXPECT_EQ(At(json, "choices.0.message").Find("reasoning_content"), nullptr);
  EXPECT_EQ(At(json, "choices.0.finish_reason").as_string(), "stop");
  EXPECT_TRUE(At(json, "choices.0.stop_reason").is_null());
  const int64_t num_prompt = static_cast<int64_t>(engine_.Request(0).prompt_ids.size());
  const int64_t num_output = static_cast<int64_t>(Ids("Hello there.").size()) + 1;
  EXPECT_EQ(At(json, "usage.prompt_tokens").ToInt64(), num_prompt);
  EXPECT_EQ(At(json, "usage.completion_tokens").ToInt64(), num_output);
  EXPECT_EQ(At(json, "usage.total_tokens").ToInt64(), num_prompt + num_output);
  EXPECT_EQ(engine_.Request(0).sampling.stop_token_ids, std::vector<int32_t>{1});
}

TEST_F(OpenAiApiTest, ReasoningIsSplitOff) {
  engine_.script = Say("Let me think.</think>42");
  const Json json = Chat("");
  EXPECT_EQ(At(json, "choices.0.message.reasoning_content").as_string(), "Let me think.");
  EXPECT_EQ(At(json, "choices.0.message.content").as_string(), "42");
  EXPECT_EQ(At(json, "usage.completion_tokens_details.reasoning_tokens").ToInt64(),
            static_cast<int64_t>(Ids("Let me think.").size()));
  const Json hidden = Chat(R"("include_reasoning":false)");
  EXPECT_EQ(At(hidden, "choices.0.message").Find("reasoning_content"), nullptr);
}

TEST_F(OpenAiApiTest, StreamWithUsage) {
  engine_.script = Say("Let me think.</think>The answer is forty-two.");
  const RawClient::Response response = Post(
      "/v1/chat/completions",
      ChatBody(R"("stream":true,"stream_options":{"include_usage":true},"return_token_ids":true)"));
  EXPECT_EQ(response.status, 200);
  EXPECT_THAT(response.Header("Content-Type"), HasSubstr("text/event-stream"));
  EXPECT_NE(response.Header("X-Request-Id"), "");
  const std::vector<Json> events = Events(response.body);
  EXPECT_EQ(At(events[0], "choices.0.delta.role").as_string(), "assistant");
  EXPECT_EQ(At(events[0], "prompt_token_ids").as_array().size(),
            engine_.Request(0).prompt_ids.size());
  std::string reasoning, content;
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    EXPECT_EQ(At(events[i], "object").as_string(), "chat.completion.chunk");
    EXPECT_EQ(At(events[i], "id"), At(events[0], "id"));
    EXPECT_TRUE(At(events[i], "usage").is_null());
    const Json& choice = At(events[i], "choices.0");
    const Json& delta = At(choice, "delta");
    EXPECT_FALSE(delta.Find("content") != nullptr && delta.Find("reasoning_content") != nullptr);
    if (const Json* text = delta.Find("content")) content += text->as_string();
    if (const Json* text = delta.Find("reasoning_content")) reasoning += text->as_string();
    if (const Json* list = choice.Find("token_ids")) {
      for (const Json& id : list->as_array())
        ids.push_back(static_cast<int32_t>(*id.ToInt64()));
    }
  }
  EXPECT_EQ(reasoning, "Let me think.");
  EXPECT_EQ(content, "The answer is forty-two.");
  std::vector<int32_t> expected = Ids("Let me think.</think>The answer is forty-two.");
  expected.push_back(1);
  EXPECT_EQ(ids, expected);
  EXPECT_EQ(At(events[events.size() - 2], "choices.0.finish_reason").as_string(), "stop");
  EXPECT_TRUE(At(events.back(), "choices").as_array().empty());
  EXPECT_EQ(At(events.back(), "usage.completion_tokens").ToInt64(),
            static_cast<int64_t>(expected.size()));
}

TEST_F(OpenAiApiTest, StopStringEndsTheSequence) {
  // The engine goes on after the stop; its tokens are not text and not counted.
  engine_.script = [this](const GenerateRequest& request, GenerateEvents& events) {
    EXPECT_TRUE(request.has_stop_strings);
    const std::vector<int32_t> before = Ids("one two STOP");
    const std::vector<int32_t> after = Ids(" and more");
    events.OnTokens(before, {});
    EXPECT_TRUE(engine_.Wait(engine_.finished, 1));
    events.OnTokens(after, {});
    events.OnFinish({});
  };
  const Json json = Chat(absl::StrCat(kOff, R"(,"stop":["STOP"])"));
  EXPECT_EQ(At(json, "choices.0.message.content").as_string(), "one two ");
  EXPECT_EQ(At(json, "choices.0.finish_reason").as_string(), "stop");
  EXPECT_EQ(At(json, "choices.0.stop_reason").as_string(), "STOP");
  EXPECT_EQ(At(json, "usage.completion_tokens").ToInt64(),
            static_cast<int64_t>(Ids("one two STOP").size()));
}

TEST_F(OpenAiApiTest, LengthAndSeveralChoices) {
  const Json json = Chat(absl::StrCat(kOff, R"(,"max_tokens":2,"n":3,"seed":7)"));
  ASSERT_EQ(At(json, "choices").as_array().size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(At(json, absl::StrCat("choices.", i, ".finish_reason")).as_string(), "length");
    EXPECT_EQ(At(json, absl::StrCat("choices.", i, ".index")).ToInt64(), i);
    EXPECT_EQ(engine_.Request(static_cast<size_t>(i)).sampling.seed, 7u);
    EXPECT_EQ(engine_.Request(static_cast<size_t>(i)).sampling.choice, static_cast<uint32_t>(i));
  }
  EXPECT_EQ(At(json, "usage.completion_tokens").ToInt64(), 6);
}

TEST_F(OpenAiApiTest, ChatLogprobs) {
  engine_.script = Say("a</think>b");
  const Json json = Chat(R"("logprobs":true,"top_logprobs":2)");
  const Json& content = At(json, "choices.0.logprobs.content");
  ASSERT_EQ(content.as_array().size(), 1u);
  EXPECT_EQ(At(content, "0.token").as_string(), "b");
  EXPECT_EQ(At(content, "0.logprob").as_double(), -1.5);
  EXPECT_EQ(At(content, "0.bytes").Dump(), "[98]");
  EXPECT_EQ(At(content, "0.top_logprobs").as_array().size(), 2u);
  EXPECT_EQ(At(json, "choices.0.logprobs.reasoning_content.0.token").as_string(), "a");
}

TEST_F(OpenAiApiTest, TextCompletions) {
  const RawClient::Response response = Post(
      "/v1/completions", R"({"model":"m","prompt":"Say","echo":true,"logprobs":1,"max_tokens":3})");
  ASSERT_EQ(response.status, 200) << response.body;
  const Json json = *Json::Parse(response.body);
  EXPECT_EQ(At(json, "object").as_string(), "text_completion");
  const std::vector<int32_t> prompt = engine_.Request(0).prompt_ids;
  EXPECT_EQ(prompt.front(), DemoText().tokens.bos);
  EXPECT_TRUE(absl::StartsWith(At(json, "choices.0.text").as_string(), "SayHello"));
  const Json& logprobs = At(json, "choices.0.logprobs");
  EXPECT_EQ(At(logprobs, "tokens").as_array().size(), prompt.size() + 3);
  EXPECT_TRUE(At(logprobs, "token_logprobs.0").is_null());
  EXPECT_EQ(At(logprobs, "token_logprobs.1").as_double(), 0.0);
  EXPECT_TRUE(At(logprobs, "top_logprobs.0").is_null());
  EXPECT_EQ(At(logprobs, absl::StrCat("top_logprobs.", prompt.size())).as_object().size(), 2u);

  engine_.script = Say("x");
  const Json many = *Json::Parse(Post("/v1/completions", R"({"model":"m","prompt":["a",")"
                                                         "<think>"
                                                         R"("],"n":2,"return_token_ids":true})")
                                     .body);
  EXPECT_EQ(At(many, "choices").as_array().size(), 4u);
  EXPECT_EQ(At(many, "choices.3.index").ToInt64(), 3);
  EXPECT_EQ(At(many, "choices.0.text").as_string(), "x");

  const Json only_echo = *Json::Parse(
      Post("/v1/completions", R"({"model":"m","prompt":"only","max_tokens":0,"echo":true})").body);
  EXPECT_EQ(At(only_echo, "choices.0.text").as_string(), "only");
  EXPECT_EQ(At(only_echo, "usage.completion_tokens").ToInt64(), 0);
}

TEST_F(OpenAiApiTest, CompletionStreamStartsWithText) {
  const RawClient::Response response =
      Post("/v1/completions", R"({"model":"m","prompt":"Say","echo":true,"stream":true})");
  const std::vector<Json> events = Events(response.body);
  EXPECT_EQ(At(events[0], "choices.0.text").as_string(), "Say");
  std::string text;
  for (const Json& event : events)
    text += At(event, "choices.0.text").as_string();
  EXPECT_EQ(text, "SayHello there.");
}

TEST_F(OpenAiApiTest, PromptLogprobs) {
  const Json json = Chat(absl::StrCat(kOff, R"(,"prompt_logprobs":1,"n":2)"));
  const std::vector<int32_t> prompt = engine_.Request(0).prompt_ids;
  const Json::Array& list = At(json, "prompt_logprobs").as_array();
  ASSERT_EQ(list.size(), prompt.size());
  EXPECT_TRUE(list[0].is_null());
  for (size_t i = 1; i < list.size(); ++i) {
    ASSERT_EQ(list[i].as_object().size(), 1u) << "the token itself is the most likely one";
    const Json& entry = At(list[i], absl::StrCat(prompt[i]));
    EXPECT_EQ(At(entry, "logprob").as_double(), -0.5 * static_cast<double>(i - 1));
    EXPECT_EQ(At(entry, "rank").ToInt64(), 1);
    EXPECT_EQ(At(entry, "decoded_token").as_string(), DemoText().tokenizer->TokenBytes(prompt[i]));
  }
  EXPECT_EQ(engine_.Request(0).sampling.num_prompt_logprobs, 1);
  EXPECT_EQ(engine_.Request(1).sampling.num_prompt_logprobs, -1) << "choices share the prompt's";

  const Json text = *Json::Parse(
      Post("/v1/completions", R"({"prompt":"Say","prompt_logprobs":3,"logprobs":0,"echo":true})")
          .body);
  EXPECT_EQ(At(text, "choices.0.prompt_logprobs").as_array().size(),
            engine_.Request(2).prompt_ids.size());
  EXPECT_EQ(At(text, "choices.0.logprobs.top_logprobs.1").as_object().size(), 1u)
      << "echo shows as many as `logprobs` says";

  std::string ids = "7";
  for (int i = 1; i < 13000; ++i)
    ids += ",7";
  engine_.status.limits.max_context = 20000;
  const RawClient::Response too_many =
      Post("/v1/completions", absl::StrCat(R"({"prompt_logprobs":20,"prompt":[)", ids, "]}"));
  EXPECT_EQ(too_many.status, 400);
  EXPECT_THAT(too_many.body, HasSubstr(R"("param":"prompt_logprobs")"));
  EXPECT_THAT(too_many.body, HasSubstr("273000"));

  // Every list of every choice counts; a chat has one list for all its choices.
  const size_t num_before = engine_.requests.size();
  const std::tuple<std::string, std::string, std::string> cases[] = {
      {R"("prompt_logprobs":1,"n":11)", "prompt_logprobs", "286000"},
      {R"("echo":true,"logprobs":1,"n":11)", "logprobs", "286000"},
      {R"("echo":true,"logprobs":10,"prompt_logprobs":9)", "prompt_logprobs", "273000"}};
  for (const auto& [fields, param, count] : cases) {
    const RawClient::Response refused =
        Post("/v1/completions", absl::StrCat("{", fields, R"(,"prompt":[)", ids, "]}"));
    EXPECT_EQ(refused.status, 400) << fields;
    EXPECT_THAT(refused.body, HasSubstr(absl::StrCat("\"param\":\"", param, "\""))) << fields;
    EXPECT_THAT(refused.body, HasSubstr(count)) << fields;
  }
  EXPECT_EQ(engine_.requests.size(), num_before) << "before anything runs";
  const std::string long_chat =
      absl::StrCat(R"({"messages":[{"role":"user","content":")", std::string(9000, 'q'),
                   R"("}],"prompt_logprobs":9,"n":4})");
  EXPECT_EQ(Post("/v1/chat/completions", long_chat).status, 200);
}

// What fills the queue by itself would be told to try again for ever.
TEST_F(OpenAiApiTest, MoreChoicesThanCanWait) {
  engine_.status.limits.max_queue = 4;
  engine_.status.limits.num_slots = 2;
  const auto answer = [this](std::string_view fields) {
    return Post("/v1/completions", absl::StrCat("{", std::string(fields), "}"));
  };
  const RawClient::Response by_n = answer(R"("prompt":["a","b"],"n":4)");
  EXPECT_EQ(by_n.status, 400);
  EXPECT_THAT(by_n.body, HasSubstr(R"("param":"n")"));
  EXPECT_THAT(by_n.body, HasSubstr("8 choices"));
  const RawClient::Response by_prompts = answer(R"("prompt":["a","b","c","d","e","f","g"])");
  EXPECT_EQ(by_prompts.status, 400);
  EXPECT_THAT(by_prompts.body, HasSubstr(R"("param":"prompt")"));
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody(R"("n":7)")).status, 400);
  EXPECT_TRUE(engine_.requests.empty()) << "before anything is queued";
  EXPECT_EQ(answer(R"("prompt":["a","b"],"n":3)").status, 200);
}

// The legacy format in a stream: the prompt's chunk has the log-probabilities of its tokens, and
// offsets count from the start of the choice's text.
TEST_F(OpenAiApiTest, EchoWithLogprobsInAStream) {
  const RawClient::Response response =
      Post("/v1/completions",
           R"({"prompt":"Say né","echo":true,"logprobs":1,"stream":true,"n":2,"max_tokens":3})");
  ASSERT_EQ(response.status, 200) << response.body;
  const std::vector<int32_t> prompt = engine_.Request(0).prompt_ids;
  for (int choice = 0; choice < 2; ++choice) {
    std::vector<Json> events;
    for (const Json& event : Events(response.body)) {
      if (At(event, "choices.0.index").ToInt64() == choice) events.push_back(event);
    }
    EXPECT_EQ(At(events[0], "choices.0.text").as_string(), "Say né");
    const Json& echoed = At(events[0], "choices.0.logprobs");
    ASSERT_EQ(At(echoed, "tokens").as_array().size(), prompt.size());
    EXPECT_TRUE(At(echoed, "token_logprobs.0").is_null());
    EXPECT_EQ(At(echoed, "token_logprobs.2").as_double(), -0.5);
    EXPECT_EQ(At(echoed, "text_offset.0").ToInt64(), 0);
    EXPECT_EQ(At(echoed, "text_offset.1").ToInt64(), 0) << "BOS was added: it is not in the text";
    EXPECT_EQ(At(events[1], "choices.0.logprobs.text_offset.0").ToInt64(), 6);
    size_t num_entries = 0;
    for (size_t i = 1; i < events.size(); ++i) {
      const Json& logprobs = At(events[i], "choices.0.logprobs");
      if (!logprobs.is_null()) num_entries += At(logprobs, "tokens").as_array().size();
    }
    EXPECT_EQ(num_entries, 3u);
  }
}

// Megabytes that no request can have are refused without being read to their end.
TEST_F(OpenAiApiTest, EndlessPrompts) {
  const size_t most_ids = 2 * 4096 + 65536;
  for (const char fill : {'q', ' '}) {
    const std::string text(size_t{16} << 20, fill);
    for (const std::string& body :
         {absl::StrCat(R"({"messages":[{"role":"user","content":")", text, "\"}]}"),
          absl::StrCat(R"({"prompt":[")", text, R"(","a"]})")}) {
      const RawClient::Response response =
          Post(body[2] == 'm' ? "/v1/chat/completions" : "/v1/completions", body);
      EXPECT_EQ(response.status, 400);
      EXPECT_THAT(response.body, HasSubstr("context_length_exceeded"));
      EXPECT_THAT(response.body, HasSubstr("maximum context length is 4096 tokens"));
      constexpr std::string_view kAtLeast = "your prompt contains at least ";
      const size_t at = response.body.find(kAtLeast);
      ASSERT_NE(at, std::string::npos) << response.body;
      const size_t counted = std::stoul(response.body.substr(at + kAtLeast.size()));
      EXPECT_GT(counted, most_ids / 2);
      // Known from the length alone: nothing was encoded.
      EXPECT_LT(counted, text.size() / 8);
    }
  }
  EXPECT_TRUE(engine_.requests.empty());
}

// A prompt that is only somewhat too long is counted to its end; one of more than twice the context
// is given up in the middle.
TEST_F(OpenAiApiTest, PromptsAreCountedAsFarAsItHelps) {
  const auto problem = [this](size_t num_letters) {
    return Post("/v1/completions",
                absl::StrCat(R"({"prompt":")", std::string(num_letters, 'q'), "\"}"))
        .body;
  };
  ASSERT_EQ(Ids("qqqq").size(), 4u);
  EXPECT_THAT(problem(50000), HasSubstr("your prompt contains 50001 input tokens"));
  const std::string cut = problem(300000);
  EXPECT_THAT(cut, HasSubstr("your prompt contains at least "));
  EXPECT_THAT(cut, Not(HasSubstr("300001")));
}

TEST_F(OpenAiApiTest, FieldsTheEngineWouldRefuse) {
  engine_.status.limits.vocab_size = 2000;
  engine_.status.limits.max_output_default = 20;
  const std::pair<std::string, std::string> cases[] = {
      {R"("allowed_token_ids":[1999,2000])", "allowed_token_ids"},
      {R"("stop_token_ids":[2000])", "stop_token_ids"},
      {R"("logit_bias":{"2000":1})", "logit_bias"},
      {R"("allowed_token_ids":[1],"min_tokens":1)", "allowed_token_ids"},
      {R"("min_tokens":21)", "min_tokens"},
  };
  for (const auto& [field, param] : cases) {
    const RawClient::Response response = Post("/v1/chat/completions", ChatBody(field));
    EXPECT_EQ(response.status, 400) << field;
    EXPECT_THAT(response.body, HasSubstr(absl::StrCat("\"param\":\"", param, "\""))) << field;
  }
  EXPECT_TRUE(engine_.requests.empty()) << "before anything runs";
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody(R"("min_tokens":20)")).status, 200);
}

TEST_F(OpenAiApiTest, PagesOfOtherOrigins) {
  const auto options = [this](std::string_view path, std::string_view headers) {
    RawClient client(Port());
    client.SendRequest("OPTIONS", path, {}, headers);
    return client.Read();
  };
  const std::string ours = "Origin: https://a.example\r\n",
                    theirs = "Origin: https://b.example\r\n";
  EXPECT_EQ(options("/v1/models", ours).status, 405) << "off by default";
  EXPECT_EQ(Get("/v1/models", ours).Header("Access-Control-Allow-Origin"), "");
  server_.reset();
  options_.cors_origins = {"https://a.example", "https://c.example"};
  options_.api_keys = {"k"};
  const RawClient::Response preflight = options(
      "/v1/chat/completions", ours +
                                  "Access-Control-Request-Method: POST\r\n"
                                  "Access-Control-Request-Headers: authorization,content-type\r\n");
  EXPECT_EQ(preflight.status, 200) << "without a key";
  EXPECT_EQ(preflight.Header("Access-Control-Allow-Origin"), "https://a.example");
  EXPECT_EQ(preflight.Header("Access-Control-Allow-Methods"), "POST, OPTIONS");
  EXPECT_EQ(preflight.Header("Access-Control-Allow-Headers"), "authorization,content-type");
  EXPECT_EQ(preflight.Header("Vary"), "Origin");
  EXPECT_EQ(options("/v1/chat/completions", theirs).Header("Access-Control-Allow-Origin"), "");
  // Errors and streams can be read too.
  const RawClient::Response refused = Post("/v1/chat/completions", ChatBody(""), ours);
  EXPECT_EQ(refused.status, 401);
  EXPECT_EQ(refused.Header("Access-Control-Allow-Origin"), "https://a.example");
  const RawClient::Response stream =
      Post("/v1/chat/completions", ChatBody(R"("stream":true)"), ours + "x-api-key: k\r\n");
  EXPECT_EQ(stream.status, 200);
  EXPECT_EQ(stream.Header("Access-Control-Allow-Origin"), "https://a.example");
  EXPECT_THAT(stream.Header("Access-Control-Expose-Headers"), HasSubstr("X-Request-Id"));
  EXPECT_EQ(Get("/health", theirs).Header("Access-Control-Allow-Origin"), "");
  server_.reset();
  options_.cors_origins = {"*"};
  EXPECT_EQ(Get("/health", theirs).Header("Access-Control-Allow-Origin"), "*");
}

TEST_F(OpenAiApiTest, RefusalsOfTheEngine) {
  engine_.refusal = absl::ResourceExhaustedError("256 requests wait already");
  RawClient::Response response = Post("/v1/chat/completions", ChatBody(""));
  EXPECT_EQ(response.status, 429);
  EXPECT_THAT(response.body, HasSubstr(R"("code":"queue_full")"));
  EXPECT_NE(response.Header("Retry-After"), "");
  engine_.refusal = absl::UnavailableError("waiting for rank 1");
  response = Post("/v1/chat/completions", ChatBody(R"("stream":true)"));
  EXPECT_EQ(response.status, 503);
  EXPECT_THAT(response.body, HasSubstr("waiting for rank 1"));
  engine_.refusal = absl::InvalidArgumentError("needs 9 pages, there are 4");
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody("")).status, 400);
}

TEST_F(OpenAiApiTest, ErrorAfterTheHeaders) {
  engine_.script = [](const GenerateRequest&, GenerateEvents& events) {
    const std::vector<int32_t> ids = Ids("Hel");
    events.OnTokens(ids, {});
    events.OnError(absl::InternalError("logits of row 0 are not finite"));
  };
  RawClient client(Port());
  client.SendRequest("POST", "/v1/chat/completions",
                     ChatBody(absl::StrCat(R"("stream":true,)", kOff)));
  const RawClient::Response response = client.Read();
  EXPECT_EQ(response.status, 200);
  const std::vector<Json> events = Events(response.body);
  EXPECT_EQ(At(events.back(), "error.code").as_string(), "engine_error");
  EXPECT_EQ(At(events.back(), "error.type").as_string(), "server_error");
  EXPECT_TRUE(client.WaitClosed());
  // The same error before any header is a status.
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody(kOff)).status, 500);
}

// The request's fault, not the engine's.
TEST_F(OpenAiApiTest, WhatTheWorkersLackIsABadRequest) {
  engine_.script = [](const GenerateRequest&, GenerateEvents& events) {
    events.OnError(absl::UnimplementedError("OpenSequence.image_spans"));
  };
  const RawClient::Response response = Post("/v1/chat/completions", ChatBody(kOff));
  EXPECT_EQ(response.status, 400);
  EXPECT_THAT(response.body, HasSubstr("OpenSequence.image_spans"));
}

TEST_F(OpenAiApiTest, AClientThatLeavesCancels) {
  size_t num_requests = 0;
  for (const char* more : {R"("stream":true)", R"("stream":false)"}) {
    engine_.script = [this, wanted = num_requests + 1](const GenerateRequest&,
                                                       GenerateEvents& events) {
      const std::vector<int32_t> ids = Ids("a");
      events.OnTokens(ids, {});
      EXPECT_TRUE(engine_.Wait(engine_.cancelled, wanted));
      FinishInfo info;
      info.reason = FinishReason::kAbort;
      events.OnFinish(info);
    };
    RawClient client(Port());
    client.SendRequest("POST", "/v1/chat/completions", ChatBody(more));
    if (absl::StrContains(more, "true")) {
      ASSERT_TRUE(client.ReadUntil("data: "));
    }
    ASSERT_TRUE(engine_.WaitForRequests(++num_requests));
    const size_t before = num_requests - 1;
    client.Reset();
    EXPECT_TRUE(engine_.Wait(engine_.cancelled, before + 1));
  }
}

TEST_F(OpenAiApiTest, ModelsHealthAndErrorsOfTheRouter) {
  const Json models = *Json::Parse(Get("/v1/models").body);
  EXPECT_EQ(At(models, "data.0.id").as_string(), "m");
  EXPECT_EQ(At(models, "data.0.max_model_len").ToInt64(), 4096);
  EXPECT_EQ(At(models, "data").as_array().size(), 2u);
  EXPECT_EQ(Get("/v1/models/alias").status, 200);
  EXPECT_EQ(Get("/v1/models/nope").status, 404);
  EXPECT_EQ(Get("/health").status, 200);
  EXPECT_EQ(Get("/live").status, 200);
  engine_.status.state = EngineState::kRecovering;
  EXPECT_EQ(Get("/health").status, 503);
  EXPECT_EQ(Get("/status").status, 200);
  EXPECT_THAT(Get("/metrics").body, HasSubstr("http_requests_total"));
  EXPECT_EQ(Get("/v1/nothing").status, 404);
  const RawClient::Response bytes = Get("/v1/models/%ff%00\"");
  EXPECT_EQ(bytes.status, 404);
  EXPECT_TRUE(Json::Parse(bytes.body).ok()) << bytes.body;
  const RawClient::Response method = Get("/v1/chat/completions");
  EXPECT_EQ(method.status, 405);
  EXPECT_EQ(method.Header("Allow"), "POST");
  EXPECT_EQ(Post("/v1/responses", "{}").status, 400);
}

TEST_F(OpenAiApiTest, BodiesThatAreNotJson) {
  const auto problem = [&](std::string_view body) {
    const RawClient::Response response = Post("/v1/chat/completions", body);
    EXPECT_EQ(response.status, 400);
    return response.body;
  };
  EXPECT_THAT(problem("{\"model\":"), HasSubstr("JSON"));
  EXPECT_THAT(problem("[1]"), HasSubstr("object"));
  EXPECT_THAT(problem("{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud800\"}]}"),
              HasSubstr("Unicode"));
  EXPECT_THAT(problem("{\"a\":\"\xFF\"}"), HasSubstr("UTF-8"));
  EXPECT_THAT(problem(std::string(200000, '[')), HasSubstr("levels"));
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody(""), "Content-Type: text/plain\r\n").status, 415);
  EXPECT_EQ(
      Post("/v1/chat/completions", ChatBody(""), "Content-Type: application/json; charset=x\r\n")
          .status,
      200);
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody(""), "Content-Encoding: gzip\r\n").status, 415);
}

TEST_F(OpenAiApiTest, KeysLimitsAndContext) {
  options_.api_keys = {"k"};
  max_body_bytes_ = 300;
  engine_.status.limits.max_context = 12;
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody("")).status, 401);
  EXPECT_EQ(Post("/v1/chat/completions", ChatBody(""), "Authorization: Bearer x\r\n").status, 401);
  EXPECT_EQ(Get("/health").status, 200);
  const RawClient::Response fits =
      Post("/v1/chat/completions", ChatBody(kOff), "x-api-key: k\r\nX-Request-Id: abc.1\r\n");
  EXPECT_EQ(fits.status, 200);
  EXPECT_EQ(fits.Header("X-Request-Id"), "abc.1");
  EXPECT_THAT(fits.body, HasSubstr(R"("id":"chatcmpl-abc.1")"));
  const RawClient::Response too_long =
      Post("/v1/chat/completions", ChatBody(R"("max_tokens":100)"), "Authorization: bearer k\r\n");
  EXPECT_EQ(too_long.status, 400);
  EXPECT_THAT(too_long.body, HasSubstr("maximum context length is 12 tokens"));
  EXPECT_THAT(too_long.body, HasSubstr(R"("param":"max_tokens")"));
  EXPECT_THAT(too_long.body, HasSubstr("context_length_exceeded"));
  const RawClient::Response too_large =
      Post("/v1/chat/completions", absl::StrCat("{\"a\":\"", std::string(400, 'x'), "\"}"));
  EXPECT_EQ(too_large.status, 413);
  EXPECT_THAT(too_large.body, HasSubstr("300"));
}

// -1: as much of the prompt's end as there is room for beside the output; k: its last k tokens.
TEST_F(OpenAiApiTest, PromptsAreTruncatedAtTheirBeginning) {
  engine_.status.limits.max_context = 12;
  const std::string text = "one two three four five six seven eight nine ten eleven twelve";
  const std::vector<int32_t> ids = Ids(text);
  ASSERT_GT(ids.size(), 12u);
  const auto body = [&](std::string_view more) {
    return absl::StrCat(R"({"model":"m","max_tokens":5,"add_special_tokens":false,"prompt":")",
                        text, "\"", std::string(more), "}");
  };
  EXPECT_EQ(Post("/v1/completions", body("")).status, 400);
  ASSERT_EQ(Post("/v1/completions", body(R"(,"truncate_prompt_tokens":-1)")).status, 200);
  EXPECT_EQ(engine_.Request(0).prompt_ids, std::vector<int32_t>(ids.end() - 7, ids.end()));
  ASSERT_EQ(Post("/v1/completions", body(R"(,"truncate_prompt_tokens":3)")).status, 200);
  EXPECT_EQ(engine_.Request(1).prompt_ids, std::vector<int32_t>(ids.end() - 3, ids.end()));
  EXPECT_EQ(Post("/v1/completions", body(R"(,"truncate_prompt_tokens":8)")).status, 400);
  EXPECT_EQ(Post("/v1/completions", body(R"(,"truncate_prompt_tokens":0)")).status, 400);
  EXPECT_EQ(Post("/v1/completions", body(R"(,"truncate_prompt_tokens":-2)")).status, 400);
}

// More than is read on the connection's own thread.
TEST_F(OpenAiApiTest, LargeBodies) {
  engine_.status.limits.max_context = 1 << 20;
  std::string text;
  for (int i = 0; i < 20000; ++i)
    absl::StrAppend(&text, "word", i, " ");
  const std::string body = absl::StrCat(R"({"messages":[{"role":"user","content":")", text,
                                        R"("}],"enable_thinking":false})");
  const RawClient::Response answer = Post("/v1/chat/completions", body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(At(*Json::Parse(answer.body), "choices.0.message.content").as_string(), "Hello there.");
  std::vector<int32_t> ids =
      Ids("<｜begin▁of▁sentence｜><｜User｜>" + text + "<｜Assistant｜></think>");
  EXPECT_EQ(engine_.Request(0).prompt_ids, ids);
  EXPECT_EQ(Post("/v1/chat/completions", body + "x").status, 400);
}

TEST_F(OpenAiApiTest, TokenizeAndBack) {
  const Json parsed = *Json::Parse(Post("/tokenize", R"({"prompt":"a</think>b"})").body);
  EXPECT_EQ(At(parsed, "count").ToInt64(), 4);
  EXPECT_EQ(At(parsed, "tokens.0").ToInt64(), 0);
  EXPECT_EQ(At(parsed, "tokens.2").ToInt64(), DemoText().tokens.think_close);
  const Json chat = *Json::Parse(
      Post(
          "/tokenize",
          R"({"messages":[{"role":"user","content":"x"}],"enable_thinking":false,"return_token_strs":true})")
          .body);
  EXPECT_EQ(At(chat, "token_strs.1").as_string(), "<｜User｜>");
  const std::string tokens = At(chat, "tokens").Dump();
  const Json back =
      *Json::Parse(Post("/detokenize", absl::StrCat("{\"tokens\":", tokens, "}")).body);
  EXPECT_EQ(At(back, "prompt").as_string(),
            "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜></think>");
  EXPECT_EQ(Post("/detokenize", R"({"tokens":[99999]})").status, 400);
}

// The prompts of the demo model's golden chats, tools and response format lifted to the request.
TEST_F(OpenAiApiTest, GoldenPrompts) {
  const auto file =
      ReadFile(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model/golden.json", 16 << 20);
  ASSERT_TRUE(file.ok());
  const Json golden = *Json::Parse(*file);
  size_t num_compared = 0;
  for (const Json& test : At(golden, "cases").as_array()) {
    const Json* messages = test.Find("messages");
    if (messages == nullptr || messages->is_null()) continue;
    Json body;
    body.Set("model", Json::String("m"));
    Json::Array plain = messages->as_array();
    for (Json& message : plain) {
      Json::Object members;
      for (const auto& [key, value] : message.as_object()) {
        if (key == "tools") {
          body.Set("tools", value);
        } else if (key == "response_format") {
          Json format;
          format.Set("type", Json::String("json_schema"));
          Json schema;
          schema.Set("name", Json::String("n"));
          schema.Set("schema", value);
          format.Set("json_schema", schema);
          body.Set("response_format", format);
        } else {
          members.emplace_back(key, value);
        }
      }
      message = Json::FromObject(std::move(members));
    }
    body.Set("messages", Json::FromArray(std::move(plain)));
    body.Set("enable_thinking", At(test, "thinking"));
    if (!At(test, "effort").is_null()) body.Set("reasoning_effort", At(test, "effort"));
    const size_t index = engine_.requests.size();
    const RawClient::Response response = Post("/v1/chat/completions", body.Dump());
    ASSERT_EQ(response.status, 200) << response.body;
    std::vector<int32_t> expected;
    for (const Json& id : At(test, "prompt_ids").as_array()) {
      expected.push_back(static_cast<int32_t>(*id.ToInt64()));
    }
    EXPECT_EQ(engine_.Request(index).prompt_ids, expected) << At(test, "name").Dump();
    ++num_compared;
  }
  EXPECT_GE(num_compared, 9u);
}

}  // namespace
}  // namespace twinspark::gateway
