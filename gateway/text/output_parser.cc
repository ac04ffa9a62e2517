#include "gateway/text/output_parser.h"

#include <utility>

#include "common/check.h"

namespace twinspark::gateway {
namespace {

void Append(OutputEvent::Kind kind, std::string text, std::vector<OutputEvent>* events) {
  if (text.empty()) return;
  if (!events->empty() && events->back().kind == kind) {
    events->back().text.append(text);
  } else {
    events->push_back({kind, std::move(text)});
  }
}

}  // namespace

OutputParser::OutputParser(const Tokenizer& tokenizer,
                           const ControlTokens& tokens,
                           OutputOptions options)
    : tokenizer_(tokenizer),
      tokens_(tokens),
      options_(std::move(options)),
      detokenizer_(tokenizer),
      stops_(options_.stop),
      in_reasoning_(options_.is_chat && options_.starts_in_reasoning) {}

void OutputParser::Push(int32_t id, std::vector<OutputEvent>* events) {
  DCHECK(!done());
  PushHidden(id);
  const OutputClass output_class = tokens_.ClassOf(id);
  if (output_class == OutputClass::kOrdinary) {
    std::string text;
    detokenizer_.Push(id, &text);
    Emit(text, events);
    return;
  }
  std::string pending;
  detokenizer_.Flush(&pending);
  Emit(pending, events);
  if (done()) return;
  const bool is_marker =
      output_class == OutputClass::kThinkOpen || output_class == OutputClass::kThinkClose;
  if (options_.is_chat && is_marker) {
    EndText(events);
    in_reasoning_ = output_class == OutputClass::kThinkOpen;
    return;
  }
  const bool is_literal = output_class == OutputClass::kLiteral ||
                          (options_.is_chat && output_class == OutputClass::kDsml);
  if (output_class != OutputClass::kEnd && (is_literal || !options_.skip_special_tokens)) {
    Emit(tokenizer_.TokenBytes(id), events);
  }
}

void OutputParser::PushHidden(int32_t id) {
  ++num_tokens_;
  const OutputClass output_class = tokens_.ClassOf(id);
  if (in_reasoning_ && output_class != OutputClass::kThinkClose &&
      output_class != OutputClass::kEnd) {
    ++num_reasoning_tokens_;
  }
}

void OutputParser::Emit(std::string_view text, std::vector<OutputEvent>* events) {
  if (in_reasoning_) {
    Append(OutputEvent::Kind::kReasoning, std::string(text), events);
    return;
  }
  std::string out;
  if (num_tokens_ < options_.min_tokens) {
    stops_.Flush(&out);
    out.append(text);
  } else if (stops_.Push(text, &out)) {
    stopped_by_ = stops_.matched_string();
    if (options_.include_stop) out.append(*stopped_by_);
  }
  Append(OutputEvent::Kind::kContent, std::move(out), events);
}

void OutputParser::EndText(std::vector<OutputEvent>* events) {
  if (in_reasoning_) return;
  std::string held;
  stops_.Flush(&held);
  Append(OutputEvent::Kind::kContent, std::move(held), events);
}

void OutputParser::Finish(std::vector<OutputEvent>* events) {
  if (done()) return;
  std::string pending;
  detokenizer_.Flush(&pending);
  Emit(pending, events);
  if (!done()) EndText(events);
}

}  // namespace twinspark::gateway
