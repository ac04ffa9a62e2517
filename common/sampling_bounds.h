// What sampling parameters may be (chat specification 4.3), in one place: gateway/openai refuses
// what lies outside by the field's name, the engine and the workers check the same numbers where a
// request or an op enters, so none of them refuses what another let through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/limits.h"

namespace twinspark::sampling_bounds {

struct Range {
  double low;
  double high;  // both are allowed
};

// What must be greater than 0 begins at the smallest normal float; smaller numbers of a request are
// raised to it, since 0 means "off" between the processes.
inline constexpr double kSmallest = std::numeric_limits<float>::min();

inline constexpr Range kTemperature = {0, 2};
inline constexpr Range kTopP = {kSmallest, 1};
inline constexpr Range kMinP = {0, 1};
inline constexpr Range kTopK = {0, INT32_MAX};
inline constexpr Range kRepetitionPenalty = {kSmallest, 10};
inline constexpr Range kFrequencyPenalty = {-2, 2};
inline constexpr Range kPresencePenalty = {-2, 2};
inline constexpr Range kLogitBias = {-100, 100};
inline constexpr Range kMinTokens = {0, static_cast<double>(limits::kMaxContext)};
inline constexpr Range kLogprobs = {0, limits::kMaxTopLogprobs};  // also of prompts
inline constexpr size_t kMaxLogitBiases = limits::kMaxLogitBias;
inline constexpr size_t kMaxStopTokenIds = limits::kMaxStopIds;   // of a request
inline constexpr size_t kMaxStopIds = kMaxStopTokenIds + 1;       // with the end of a turn
inline constexpr size_t kMaxBadWords = limits::kMaxBadWords;      // of a request
inline constexpr size_t kMaxBadWordSpellings = 2 * kMaxBadWords;  // with and without a space before
inline constexpr size_t kMaxBadWordIds = limits::kMaxBadWordIds;

}  // namespace twinspark::sampling_bounds
