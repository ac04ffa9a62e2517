#include "gateway/text/control_tokens.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/string_view.h"

namespace twinspark::gateway {
namespace {

// True for spellings that stand for nothing: reserved ids, and marks used in training only.
bool IsReserved(std::string_view spelling) {
  for (const std::string_view prefix : {"<｜place▁holder", "<|place_holder"}) {
    if (spelling.substr(0, prefix.size()) == prefix) return true;
  }
  for (const std::string_view exact :
       {"<｜▁pad▁｜>", "<|EOT|>", "<｜begin▁sys｜>", "<｜end▁sys｜>", "<｜rl_image_pad｜>",
        "<｜rl_image_start｜>", "<｜deepseek_image｜>"}) {
    if (spelling == exact) return true;
  }
  return false;
}

}  // namespace

std::optional<int32_t> ControlTokens::TaskToken(std::string_view task) const {
  for (const auto& [word, id] : tasks) {
    if (word == task) return id;
  }
  return std::nullopt;
}

absl::StatusOr<ControlTokens> ControlTokens::Find(const Tokenizer& tokenizer) {
  ControlTokens tokens;
  std::string_view missing;
  const auto find = [&](std::string_view spelling) {
    const std::optional<int32_t> id = tokenizer.FindAdded(spelling);
    if (!id.has_value() && missing.empty()) missing = spelling;
    return id.value_or(0);
  };
  tokens.bos = find("<｜begin▁of▁sentence｜>");
  tokens.eos = find("<｜end▁of▁sentence｜>");
  tokens.system = find("<｜System｜>");
  tokens.user = find("<｜User｜>");
  tokens.assistant = find("<｜Assistant｜>");
  tokens.think_open = find("<think>");
  tokens.think_close = find("</think>");
  tokens.dsml = find("｜DSML｜");
  tokens.latest_reminder = find("<｜latest_reminder｜>");
  tokens.image = find("<｜deepseek_image｜>");
  tokens.tasks = {{"action", find("<｜action｜>")},       {"query", find("<｜query｜>")},
                  {"authority", find("<｜authority｜>")}, {"domain", find("<｜domain｜>")},
                  {"title", find("<｜title｜>")},         {"read_url", find("<｜read_url｜>")}};
  for (const std::string_view mark :
       {"<｜/polygon｜>", "<｜polygon｜>", "<｜/point｜>", "<｜point｜>", "<｜/box｜>", "<｜box｜>",
        "<｜/ref｜>", "<｜ref｜>"}) {
    tokens.grounding.emplace_back(mark, find(mark));
  }
  if (!missing.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tokenizer has no token ", ToAbsl(missing),
                     "; it is not one of the DeepSeek-V4.1 chat format"));
  }

  tokens.classes.assign(static_cast<size_t>(tokenizer.vocab_size()), OutputClass::kOrdinary);
  const auto set = [&](int32_t id, OutputClass c) { tokens.classes[static_cast<size_t>(id)] = c; };
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (!tokenizer.IsAdded(id)) continue;
    set(id, OutputClass::kDropped);
    if (IsReserved(tokenizer.TokenBytes(id))) tokens.reserved.push_back(id);
  }
  for (const auto& [spelling, id] : tokens.grounding)
    set(id, OutputClass::kLiteral);
  for (const std::string_view spelling : {"<dsml:", "</dsml:"}) {
    const std::optional<int32_t> id = tokenizer.FindAdded(spelling);
    if (id.has_value()) set(*id, OutputClass::kLiteral);
  }
  set(tokens.think_open, OutputClass::kThinkOpen);
  set(tokens.think_close, OutputClass::kThinkClose);
  set(tokens.dsml, OutputClass::kDsml);
  set(tokens.eos, OutputClass::kEnd);
  return tokens;
}

}  // namespace twinspark::gateway
