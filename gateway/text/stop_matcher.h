// Stop strings in streamed text (chat.md 3.8 of the specification): found across token borders and
// inside tokens, holding back only what really is the beginning of one. Used by OutputParser for
// content and by /v1/completions for the whole text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace twinspark::gateway {

// Thread-compatible. At most 16 strings of a few hundred bytes (limits.h), none empty.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Takes the next text, appends to `out` what is certain to be before any match. Returns true when
  // a stop string is complete: the one that ends first, the longer one of two that end together.
  // Then `out` ends right before it and nothing more may be pushed.
  bool Push(std::string_view text, std::string* out);
  // Gives up the held back beginning of a match: at the end of the text, or where a marker cuts it.
  void Flush(std::string* out);

  // Index of the string that matched; valid after Push returned true.
  size_t matched() const { return matched_; }
  const std::string& matched_string() const { return stops_[matched_]; }
  bool empty() const { return stops_.empty(); }

 private:
  std::vector<std::string> stops_;
  std::string pending_;  // a proper prefix of some stop string
  size_t matched_ = 0;
};

}  // namespace twinspark::gateway
