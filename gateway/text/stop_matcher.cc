#include "gateway/text/stop_matcher.h"

#include <algorithm>

namespace twinspark::gateway {

bool StopMatcher::Push(std::string_view text, std::string* out) {
  if (stops_.empty()) {
    out->append(text);
    return false;
  }
  pending_.append(text);
  size_t best_end = std::string::npos;
  size_t best_start = 0;
  for (size_t i = 0; i < stops_.size(); ++i) {
    const size_t start = pending_.find(stops_[i]);
    if (start == std::string::npos) continue;
    const size_t end = start + stops_[i].size();
    if (best_end == std::string::npos || end < best_end ||
        (end == best_end && start < best_start)) {
      best_end = end;
      best_start = start;
      matched_ = i;
    }
  }
  if (best_end != std::string::npos) {
    out->append(pending_, 0, best_start);
    pending_.clear();
    return true;
  }
  // Keep the longest suffix that a stop string begins with.
  size_t held = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, pending_.size()); n > held; --n) {
      if (std::string_view(pending_).substr(pending_.size() - n) ==
          std::string_view(stop).substr(0, n)) {
        held = n;
        break;
      }
    }
  }
  out->append(pending_, 0, pending_.size() - held);
  pending_.erase(0, pending_.size() - held);
  return false;
}

void StopMatcher::Flush(std::string* out) {
  out->append(pending_);
  pending_.clear();
}

}  // namespace twinspark::gateway
