#include "gateway/text/detokenizer.h"

#include "gateway/text/utf8.h"

namespace twinspark::gateway {

void Detokenizer::Push(int32_t id, std::string* out) {
  const std::string_view bytes = tokenizer_.TokenBytes(id);
  if (pending_.empty() && IncompleteUtf8Tail(bytes) == 0) {
    AppendUtf8Repaired(bytes, out);
    return;
  }
  pending_.append(bytes);
  const size_t tail = IncompleteUtf8Tail(pending_);
  AppendUtf8Repaired(std::string_view(pending_).substr(0, pending_.size() - tail), out);
  pending_.erase(0, pending_.size() - tail);
}

void Detokenizer::Flush(std::string* out) {
  if (pending_.empty()) return;
  out->append(kReplacementCharacter);
  pending_.clear();
}

}  // namespace twinspark::gateway
