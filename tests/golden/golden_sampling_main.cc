// golden_sampling --dir DIR: keyed noise, filters and choices against DIR/keyed.json (format 1).
// Noise: the Philox word is exact, the Gumbel value may differ by one unit in the last place (the
// logarithm of the C library). Choices: the ids kept by the filters and the token, exact; -inf in
// the stored logits means masked, and goes through the mask of the op.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "kernels/sampling/choose_tokens.h"
#include "kernels/sampling/keyed_noise.h"
#include "tests/golden/golden_report.h"

namespace twinspark::golden {
namespace {

namespace json = boost::json;

constexpr size_t kMaxFileBytes = size_t{256} << 20;
constexpr size_t kMaxVocabulary = size_t{1} << 22;

absl::StatusOr<double> Number(const json::object& entry, const char* key) {
  const json::value* v = entry.if_contains(key);
  if (v == nullptr || !v->is_number()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\": expected a number"));
  }
  return v->to_number<double>();
}

absl::StatusOr<std::string> Text(const json::object& entry, const char* key) {
  const json::value* v = entry.if_contains(key);
  if (v == nullptr || !v->is_string()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\": expected a string"));
  }
  return std::string(v->as_string().data(), v->as_string().size());
}

absl::StatusOr<uint32_t> Unsigned(const json::object& entry, const char* key) {
  ASSIGN_OR_RETURN(const double number, Number(entry, key));
  if (!(number >= 0 && number <= 4294967295.0 && number == std::floor(number))) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\": ", number, " is no u32"));
  }
  return static_cast<uint32_t>(number);
}

// Seeds are decimal strings: JSON numbers do not hold 64 bits.
absl::StatusOr<uint64_t> Seed(const json::object& entry) {
  ASSIGN_OR_RETURN(const std::string text, Text(entry, "seed"));
  uint64_t seed = 0;
  if (!absl::SimpleAtoi(text, &seed)) {
    return absl::InvalidArgumentError(absl::StrCat("\"seed\": '", text, "' is no u64"));
  }
  return seed;
}

absl::Status CompareNoise(const std::string& name,
                          const json::object& entry,
                          GoldenReport& report) {
  ASSIGN_OR_RETURN(const uint64_t seed, Seed(entry));
  ASSIGN_OR_RETURN(const uint32_t position, Unsigned(entry, "position"));
  ASSIGN_OR_RETURN(const uint32_t token, Unsigned(entry, "token"));
  ASSIGN_OR_RETURN(const uint32_t choice, Unsigned(entry, "choice"));
  ASSIGN_OR_RETURN(const uint32_t want_word, Unsigned(entry, "word"));
  ASSIGN_OR_RETURN(const std::string hex, Text(entry, "gumbel_f32_hex"));
  uint32_t want_bits = 0;
  if (!absl::SimpleHexAtoi(hex, &want_bits)) {
    return absl::InvalidArgumentError(absl::StrCat("\"gumbel_f32_hex\": '", hex, "'"));
  }
  const uint32_t word = NoiseWord({seed, position, choice}, token);
  const float gumbel = GumbelFromWord(word), want = std::bit_cast<float>(want_bits);
  const bool near = gumbel == want || std::nextafter(gumbel, want) == want;
  report.CompareRecord(name, word == want_word && near,
                       absl::StrCat("word ", word, " want ", want_word, ", max_abs ",
                                    std::abs(gumbel - want), " bound 1 unit"));
  return absl::OkStatus();
}

struct Choice {
  std::vector<float> logits;
  std::vector<uint8_t> mask;
  ChoiceRow row;
};

absl::StatusOr<Choice> ReadChoice(const json::object& entry) {
  Choice c;
  ASSIGN_OR_RETURN(const std::string base64, Text(entry, "logits_f32_base64"));
  std::string bytes;
  if (!absl::Base64Unescape(base64, &bytes) || bytes.empty() || bytes.size() % sizeof(float) != 0 ||
      bytes.size() / sizeof(float) > kMaxVocabulary) {
    return absl::InvalidArgumentError("\"logits_f32_base64\": not base64 of f32 values");
  }
  c.logits.resize(bytes.size() / sizeof(float));
  std::memcpy(c.logits.data(), bytes.data(), bytes.size());
  c.mask.assign(c.logits.size() / 8 + 1, 0xff);
  for (size_t v = 0; v < c.logits.size(); ++v) {
    if (c.logits[v] != -HUGE_VALF) continue;
    c.logits[v] = 0;
    c.mask[v / 8] = static_cast<uint8_t>(c.mask[v / 8] & ~(1u << (v % 8)));
  }
  c.row.allowed_mask = c.mask.data();
  ASSIGN_OR_RETURN(const double temperature, Number(entry, "temperature"));
  ASSIGN_OR_RETURN(const double min_p, Number(entry, "min_p"));
  ASSIGN_OR_RETURN(const double top_k, Number(entry, "top_k"));
  ASSIGN_OR_RETURN(const double top_p, Number(entry, "top_p"));
  c.row.temperature = static_cast<float>(temperature);
  c.row.min_p = static_cast<float>(min_p);
  c.row.top_k = static_cast<int>(top_k);
  c.row.top_p = static_cast<float>(top_p);
  ASSIGN_OR_RETURN(c.row.seed, Seed(entry));
  ASSIGN_OR_RETURN(c.row.position, Unsigned(entry, "position"));
  ASSIGN_OR_RETURN(c.row.choice, Unsigned(entry, "choice"));
  return c;
}

absl::Status CompareChoice(const std::string& name,
                           const json::object& entry,
                           GoldenReport& report) {
  ASSIGN_OR_RETURN(const Choice c, ReadChoice(entry));
  ASSIGN_OR_RETURN(const double want_token, Number(entry, "token"));
  const int64_t vocab = static_cast<int64_t>(c.logits.size());

  Arena arena(static_cast<size_t>(ChooseTokensScratchBytesCpu(vocab, 1)));
  int32_t token = -2;
  ChooseTokensCpu({.logits = MakeView(c.logits.data(), 1, vocab), .rows = &c.row, .tokens = &token},
                  {.arena = &arena});
  bool same_kept = true;
  const json::value* kept = entry.if_contains("kept");
  if (kept == nullptr) return absl::InvalidArgumentError("\"kept\": missing");
  if (kept->is_array()) {
    std::vector<int32_t> want;
    for (const json::value& id : kept->as_array())
      want.push_back(id.to_number<int32_t>());
    same_kept = KeptTokens(c.logits.data(), vocab, c.row) == want;
  }
  report.CompareRecord(name, same_kept && token == static_cast<int32_t>(want_token),
                       absl::StrCat("token ", token, " want ", want_token, ", kept ids ",
                                    same_kept ? "equal" : "differ", ", max_abs 0 bound exact"));
  return absl::OkStatus();
}

using Compare = absl::Status (*)(const std::string&, const json::object&, GoldenReport&);

void CompareAll(const json::object& file, const char* key, Compare compare, GoldenReport& report) {
  const json::value* list = file.if_contains(key);
  if (list == nullptr || !list->is_array()) {
    report.Error(absl::StrCat("keyed.json: \"", key, "\" is no list"));
    return;
  }
  const json::array& records = list->as_array();
  report.Plan(static_cast<int64_t>(records.size()));
  for (size_t i = 0; i < records.size(); ++i) {
    const std::string name = absl::StrCat(key, "[", i, "]");
    const absl::Status status = records[i].is_object()
                                    ? compare(name, records[i].as_object(), report)
                                    : absl::InvalidArgumentError("not an object");
    if (!status.ok()) report.Error(absl::StrCat(name, ": ", status.ToString()));
  }
}

int Run(const std::string& dir) {
  GoldenReport report;
  const absl::StatusOr<std::string> text =
      ReadFile(absl::StrCat(dir, "/keyed.json"), kMaxFileBytes);
  json::error_code error;
  const json::value file = text.ok() ? json::parse(*text, error) : json::value();
  if (!text.ok() || error || !file.is_object()) {
    report.Error(
        absl::StrCat("keyed.json: ", text.ok() ? error.message() : text.status().ToString()));
    return report.Finish();
  }
  const json::value* format = file.as_object().if_contains("format");
  if (format == nullptr || *format != 1) report.Error("keyed.json: \"format\" is not 1");
  CompareAll(file.as_object(), "noise", CompareNoise, report);
  CompareAll(file.as_object(), "choices", CompareChoice, report);
  return report.Finish();
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  constexpr char kUsage[] = "usage: golden_sampling --dir DIR\n";
  if (twinspark::golden::HelpWasAsked(argc, argv, kUsage)) return 0;
  if (argc != 3 || std::string_view(argv[1]) != "--dir") {
    std::fputs(kUsage, stderr);
    return twinspark::golden::kExitFailed;
  }
  return twinspark::golden::Run(argv[2]);
}
