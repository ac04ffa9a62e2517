#include "gateway/openai/response_json.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

#include "common/string_view.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

constexpr double kLowestLogprob = -9999.0;  // JSON has no minus infinity

void AppendLogprob(float logprob, std::string* out) {
  const double value = std::isfinite(logprob) ? static_cast<double>(logprob) : kLowestLogprob;
  AppendJsonReal(std::max(value, kLowestLogprob), out);
}

template <class List, class Append>
std::string JoinList(const List& items, Append append) {
  std::string out = "[";
  bool is_first = true;
  for (const auto& item : items) {
    if (!is_first) out.push_back(',');
    is_first = false;
    append(item, &out);
  }
  out.push_back(']');
  return out;
}

}  // namespace

std::string UsageJson(const Usage& usage) {
  return absl::StrCat(
      "{\"prompt_tokens\":", usage.prompt_tokens,
      ",\"completion_tokens\":", usage.completion_tokens,
      ",\"total_tokens\":", usage.prompt_tokens + usage.completion_tokens,
      ",\"prompt_tokens_details\":{\"cached_tokens\":", usage.cached_tokens,
      "},\"completion_tokens_details\":{\"reasoning_tokens\":", usage.reasoning_tokens,
      "},\"prompt_cache_hit_tokens\":", usage.cached_tokens,
      ",\"prompt_cache_miss_tokens\":", usage.prompt_tokens - usage.cached_tokens, "}");
}

std::string LogprobWriter::Name(int32_t id) const {
  if (as_token_ids_) return absl::StrCat("token_id:", id);
  std::string text;
  AppendUtf8Repaired(tokenizer_.TokenBytes(id), &text);
  return text;
}

void LogprobWriter::AppendEntry(int32_t id, float logprob, std::string* out) const {
  out->append("{\"token\":");
  AppendJsonString(Name(id), out);
  out->append(",\"logprob\":");
  AppendLogprob(logprob, out);
  out->append(",\"bytes\":");
  out->append(JoinList(tokenizer_.TokenBytes(id), [](char c, std::string* list) {
    absl::StrAppend(list, static_cast<int>(static_cast<uint8_t>(c)));
  }));
}

void LogprobWriter::AppendChatList(std::span<const TokenEntry> entries,
                                   OutputEvent::Kind kind,
                                   std::string* out) const {
  out->push_back('[');
  bool is_first = true;
  for (const TokenEntry& entry : entries) {
    if (entry.kind != kind || !entry.logprobs.has_value()) continue;
    if (!is_first) out->push_back(',');
    is_first = false;
    AppendEntry(entry.id, entry.logprobs->logprob, out);
    out->append(",\"top_logprobs\":");
    out->append(JoinList(entry.logprobs->top, [this](const TokenLogprob& top, std::string* list) {
      AppendEntry(top.token_id, top.logprob, list);
      list->push_back('}');
    }));
    out->push_back('}');
  }
  out->push_back(']');
}

std::string LogprobWriter::Chat(std::span<const TokenEntry> entries) const {
  std::string out = "{\"content\":";
  AppendChatList(entries, OutputEvent::Kind::kContent, &out);
  if (std::any_of(entries.begin(), entries.end(), [](const TokenEntry& entry) {
        return entry.kind == OutputEvent::Kind::kReasoning;
      })) {
    out.append(",\"reasoning_content\":");
    AppendChatList(entries, OutputEvent::Kind::kReasoning, &out);
  }
  out.push_back('}');
  return out;
}

std::string LogprobWriter::Text(std::span<const TokenEntry> entries) const {
  std::string out = "{\"tokens\":";
  out.append(JoinList(entries, [this](const TokenEntry& entry, std::string* list) {
    AppendJsonString(Name(entry.id), list);
  }));
  out.append(",\"token_logprobs\":");
  out.append(JoinList(entries, [](const TokenEntry& entry, std::string* list) {
    if (entry.logprobs.has_value()) {
      AppendLogprob(entry.logprobs->logprob, list);
    } else {
      list->append("null");
    }
  }));
  out.append(",\"top_logprobs\":");
  out.append(JoinList(entries, [this](const TokenEntry& entry, std::string* list) {
    if (!entry.logprobs.has_value()) {
      list->append("null");
      return;
    }
    // Two tokens can have one text; an object can hold only the first of them.
    Json::Object members;
    const auto add = [&](int32_t id, float logprob) {
      const std::string name = Name(id);
      for (const Json::Member& member : members) {
        if (member.first == name) return;
      }
      const double value = std::isfinite(logprob) ? static_cast<double>(logprob) : kLowestLogprob;
      members.emplace_back(name, Json::Real(std::max(value, kLowestLogprob)));
    };
    for (const TokenLogprob& top : entry.logprobs->top)
      add(top.token_id, top.logprob);
    add(entry.id, entry.logprobs->logprob);
    Json::FromObject(std::move(members)).AppendTo(list);
  }));
  out.append(",\"text_offset\":");
  out.append(JoinList(entries, [](const TokenEntry& entry, std::string* list) {
    absl::StrAppend(list, entry.text_offset);
  }));
  out.push_back('}');
  return out;
}

std::string LogprobWriter::Prompt(std::span<const int32_t> prompt_ids,
                                  std::span<const TokenLogprobs> logprobs,
                                  int32_t num_top) const {
  std::string out = "[null";
  for (size_t i = 0; i < logprobs.size() && i + 1 < prompt_ids.size(); ++i) {
    out.append(",{");
    bool is_first = true;
    const auto add = [&](int32_t id, float logprob, int64_t rank) {
      absl::StrAppend(&out, is_first ? "" : ",", "\"", id, "\":{\"logprob\":");
      is_first = false;
      AppendLogprob(logprob, &out);
      absl::StrAppend(&out, ",\"rank\":", rank, ",\"decoded_token\":");
      AppendJsonString(Name(id), &out);
      out.push_back('}');
    };
    const int32_t actual = prompt_ids[i + 1];
    add(actual, logprobs[i].logprob, logprobs[i].rank);
    const size_t num_listed = std::min(logprobs[i].top.size(), static_cast<size_t>(num_top));
    for (size_t k = 0; k < num_listed; ++k) {
      const TokenLogprob& top = logprobs[i].top[k];
      if (top.token_id != actual) add(top.token_id, top.logprob, static_cast<int64_t>(k) + 1);
    }
    out.push_back('}');
  }
  out.push_back(']');
  return out;
}

std::string IdsJson(std::span<const int32_t> ids) {
  return JoinList(ids, [](int32_t id, std::string* list) { absl::StrAppend(list, id); });
}

std::string ChoiceText(const ChoiceJson& choice, std::string_view body_key) {
  std::string out = absl::StrCat(
      "{\"index\":", choice.index, ",\"", ToAbsl(body_key), "\":", choice.body,
      ",\"logprobs\":", choice.logprobs.empty() ? "null" : choice.logprobs, ",\"finish_reason\":");
  if (choice.finish_reason.empty()) {
    out.append("null");
  } else {
    absl::StrAppend(&out, "\"", choice.finish_reason, "\",\"stop_reason\":",
                    choice.stop_reason.empty() ? "null" : choice.stop_reason);
  }
  if (!choice.token_ids.empty()) absl::StrAppend(&out, ",\"token_ids\":", choice.token_ids);
  if (!choice.prompt_logprobs.empty()) {
    absl::StrAppend(&out, ",\"prompt_logprobs\":", choice.prompt_logprobs);
  }
  out.push_back('}');
  return out;
}

std::string ResponseText(const ResponseHead& head,
                         bool is_chunk,
                         std::string_view choices,
                         std::string_view more) {
  std::string out = absl::StrCat("{\"id\":\"", head.id, "\",\"object\":\"",
                                 !head.is_chat ? "text_completion"
                                 : is_chunk    ? "chat.completion.chunk"
                                               : "chat.completion",
                                 "\",\"created\":", head.created, ",\"model\":");
  AppendJsonString(head.model, &out);
  if (!is_chunk) {
    out.append(",\"system_fingerprint\":");
    AppendJsonString(head.fingerprint, &out);
  }
  absl::StrAppend(&out, ",\"choices\":[", ToAbsl(choices), "]", ToAbsl(more), "}");
  return out;
}

std::string SseEvent(std::string_view json) {
  return absl::StrCat("data: ", ToAbsl(json), "\n\n");
}

}  // namespace twinspark::gateway
