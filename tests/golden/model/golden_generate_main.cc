// golden_generate --dir MODEL [--cases FILE] [--tp N] [--drafts K] [--chunk N] [--threads N]
// [--case NAME]
//                 [--f16-copy]
// (FILE: MODEL/golden.json unless given.) Greedy runs of a model against stored ones: every token
// of every case, and with five drafts every stored round (proposed ids, confidences, accepted
// counts). Prints the speed of what it ran.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <boost/json.hpp>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "tests/golden/golden_report.h"
#include "tests/golden/model/model_group.h"

namespace twinspark::golden {
namespace {

constexpr int kStoredDrafts = 5;     // rounds were stored with this depth
constexpr double kTieMargin = 0.25;  // below it, equally right roundings may differ
constexpr double kConfidenceBound = 0.1;

struct Arguments {
  std::string dir;
  std::string cases;
  std::string only;
  int tp = 1;
  int drafts = 0;
  int64_t chunk = 512;
  int threads = 1;  // more only pays on cores that nobody else uses: they spin within a step
  bool f16_copy = false;
};

struct StoredRound {
  size_t at = 0;
  size_t accepted = 0;
  std::vector<int32_t> draft;
  std::vector<double> conf;
  std::vector<double> margins;
};

struct Case {
  std::string name;
  std::vector<int32_t> prompt;
  std::vector<int32_t> output;
  std::vector<StoredRound> rounds;
};

struct Speed {
  int64_t prompt_tokens = 0;
  double prefill_seconds = 0;
  int64_t emitted = 0;
  double decode_seconds = 0;
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
std::vector<T> Numbers(const boost::json::value& list) {
  std::vector<T> out;
  for (const boost::json::value& value : list.as_array())
    out.push_back(value.to_number<T>());
  return out;
}

absl::StatusOr<std::vector<Case>> ReadCases(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, size_t{64} << 20));
  std::vector<Case> cases;
  try {
    const boost::json::value root = boost::json::parse(text);
    for (const boost::json::value& entry : root.at("cases").as_array()) {
      Case c;
      c.name = absl::StrCat(cases.size(), ".", std::string(entry.at("name").as_string()));
      c.prompt = Numbers<int32_t>(entry.at("prompt_ids"));
      c.output = Numbers<int32_t>(entry.at("output_ids"));
      if (const auto* rounds = entry.as_object().if_contains("rounds");
          rounds != nullptr && rounds->is_array())
        for (const boost::json::value& stored : rounds->get_array()) {
          StoredRound round;
          round.at = stored.at("at").to_number<size_t>();
          round.accepted = stored.at("accepted").to_number<size_t>();
          round.draft = Numbers<int32_t>(stored.at("draft"));
          round.conf = Numbers<double>(stored.at("conf"));
          round.margins = Numbers<double>(stored.at("draft_margins"));
          c.rounds.push_back(std::move(round));
        }
      cases.push_back(std::move(c));
    }
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  return cases;
}

// Compares the rounds of one case as they happen.
class RoundChecker {
 public:
  RoundChecker(const Case& c, GoldenReport& report) : case_(c), report_(report) {}

  double confidence_error = 0;
  int64_t num_confidences = 0;
  double worst_margin = 0;

  // Drafts proposed when the output has `at` + 1 tokens, and how many of them agree with the case.
  void Check(size_t at, const std::vector<int32_t>& drafts, const std::vector<float>& conf) {
    if (next_ >= case_.rounds.size()) return;
    const StoredRound& stored = case_.rounds[next_];
    const std::string name = absl::StrCat(case_.name, ".round.", stored.at);
    if (lost_) return;
    if (stored.at != at) {
      report_.CompareRecord(name, false, absl::StrCat("the program drafts at ", at));
      lost_ = true;
      ++next_;
      return;
    }
    ++next_;
    bool ok = true;
    size_t same = 0;
    while (same < drafts.size() && drafts[same] == stored.draft[same])
      ++same;
    if (same < drafts.size()) {
      // Everything up to the first stored near-tie must agree.
      bool tie = false;
      for (size_t i = 0; i <= same; ++i)
        tie = tie || stored.margins[i] < kTieMargin;
      worst_margin = std::max(worst_margin, stored.margins[same]);
      ok = tie;
    } else {
      for (size_t i = 0; i < drafts.size(); ++i)
        confidence_error += std::abs(static_cast<double>(conf[i]) - stored.conf[i]);
      num_confidences += static_cast<int64_t>(drafts.size());
    }
    size_t accepted = 0;
    while (accepted < drafts.size() && at + 1 + accepted < case_.output.size() &&
           drafts[accepted] == case_.output[at + 1 + accepted])
      ++accepted;
    if (accepted != stored.accepted) {
      const bool larger_by_tie = accepted > stored.accepted &&
                                 stored.accepted < stored.margins.size() &&
                                 stored.margins[stored.accepted] < kTieMargin;
      ok = ok && larger_by_tie;
      lost_ = true;  // the following rounds start elsewhere
    }
    report_.CompareRecord(
        name, ok,
        absl::StrCat("drafts equal ", same, ", accepted ", accepted, " of ", stored.accepted));
  }

  void Finish() {
    for (; next_ < case_.rounds.size(); ++next_)
      report_.Info(absl::StrCat(case_.name, ".round.", case_.rounds[next_].at), {},
                   "after a round that accepted more");
  }

 private:
  const Case& case_;
  GoldenReport& report_;
  size_t next_ = 0;
  bool lost_ = false;
};

absl::Status RunCase(ModelGroup& group,
                     const Arguments& arguments,
                     const Case& c,
                     GoldenReport& report,
                     RoundChecker* checker,
                     Speed& speed) {
  OpenSequence open;
  open.ids = c.prompt;
  open.num_prompt_ids = static_cast<int64_t>(c.prompt.size());
  const bool drafting = arguments.drafts > 0;
  const size_t wanted = c.output.size();
  const int64_t length = static_cast<int64_t>(c.prompt.size() + wanted) + 2 * kStoredDrafts;
  RETURN_IF_ERROR(group.Open(open, length));
  double start = Now();
  ASSIGN_OR_RETURN(SequenceResult result, group.Prefill(0, 0, static_cast<int64_t>(c.prompt.size()),
                                                        arguments.chunk, drafting && wanted > 1));
  speed.prompt_tokens += static_cast<int64_t>(c.prompt.size());
  speed.prefill_seconds += Now() - start;
  std::vector<int32_t> output = result.tokens;
  start = Now();
  const size_t first = output.size();
  while (output.size() < wanted && !result.non_finite) {
    const int k = drafting ? arguments.drafts : 0;
    if (checker != nullptr)
      checker->Check(output.size() - 1, result.drafts, result.draft_confidences);
    ASSIGN_OR_RETURN(result, group.Round(0, k, drafting));
    output.insert(output.end(), result.tokens.begin(), result.tokens.end());
  }
  speed.emitted += static_cast<int64_t>(output.size() - first);
  speed.decode_seconds += Now() - start;
  output.resize(std::min(output.size(), wanted));
  int64_t differing = static_cast<int64_t>(wanted - output.size());
  for (size_t i = 0; i < output.size(); ++i)
    differing += output[i] != c.output[i] ? 1 : 0;
  report.CompareExact(absl::StrCat(c.name, ".tokens"), differing, static_cast<int64_t>(wanted));
  if (checker != nullptr) checker->Finish();
  return group.Close(0);
}

int Run(const Arguments& arguments) {
  GoldenReport report;
  absl::StatusOr<std::vector<Case>> cases = ReadCases(arguments.cases);
  if (!cases.ok()) {
    report.Error(cases.status().ToString());
    return report.Finish();
  }
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(arguments.dir);
  if (config.ok() && arguments.tp > 1) {
    const absl::Status split = CheckTensorParallel(*config, arguments.tp);
    if (!split.ok()) return CannotRun(std::string(split.message()));
  }
  int64_t longest = 0;
  for (const Case& c : *cases)
    longest = std::max(longest, static_cast<int64_t>(c.prompt.size() + c.output.size()));
  ModelOptions options;
  options.world = arguments.tp;
  options.f16_copy = arguments.f16_copy;
  options.limits.num_slots = 1;
  options.limits.num_pages = static_cast<int>((longest + 64 + 63) / 64 + 1);
  const int threads = arguments.threads;
  absl::StatusOr<std::unique_ptr<ModelGroup>> group =
      ModelGroup::Load(arguments.dir, options, threads);
  if (!group.ok()) {
    report.Error(group.status().ToString());
    return report.Finish();
  }
  const bool checks_rounds = arguments.drafts == kStoredDrafts;
  Speed speed;
  double confidence_error = 0;
  int64_t num_confidences = 0;
  double worst_margin = 0;
  for (const Case& c : *cases) {
    if (!arguments.only.empty() && c.name.find(arguments.only) == std::string::npos) continue;
    report.Plan(1);
    if (checks_rounds) report.Plan(static_cast<int64_t>(c.rounds.size()));
    RoundChecker checker(c, report);
    const absl::Status status =
        RunCase(**group, arguments, c, report, checks_rounds ? &checker : nullptr, speed);
    if (!status.ok()) {
      report.Error(absl::StrCat(c.name, ": ", status.ToString()));
      return report.Finish();
    }
    confidence_error += checker.confidence_error;
    num_confidences += checker.num_confidences;
    worst_margin = std::max(worst_margin, checker.worst_margin);
  }
  if (num_confidences > 0) {
    report.Plan(1);
    const double mean = confidence_error / static_cast<double>(num_confidences);
    report.Compare("conf.mean_difference", {mean, 0}, mean, kConfidenceBound);
  }
  if (checks_rounds) std::printf("worst margin at which a draft differed: %.4f\n", worst_margin);
  std::printf(
      "prefill %lld tokens, %.0f tok/s; decode %lld tokens, %.0f tok/s (k = %d, tp %d, %d "
      "threads a rank)\n",
      static_cast<long long>(speed.prompt_tokens),
      static_cast<double>(speed.prompt_tokens) / speed.prefill_seconds,
      static_cast<long long>(speed.emitted),
      static_cast<double>(speed.emitted) / std::max(1e-9, speed.decode_seconds), arguments.drafts,
      arguments.tp, threads);
  return report.Finish();
}

constexpr char kUsage[] =
    "usage: golden_generate --dir MODEL [--cases FILE] [--tp N] [--drafts K] [--chunk N] "
    "[--threads N] [--case NAME] [--f16-copy]\n";

int Usage() {
  std::fputs(kUsage, stderr);
  return kExitFailed;
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  if (twinspark::golden::HelpWasAsked(argc, argv, twinspark::golden::kUsage)) return 0;
  twinspark::golden::Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--f16-copy") {
      arguments.f16_copy = true;
      continue;
    }
    if (i + 1 >= argc) return twinspark::golden::Usage();
    const std::string value = argv[++i];
    if (flag == "--dir") {
      arguments.dir = value;
    } else if (flag == "--cases") {
      arguments.cases = value;
    } else if (flag == "--case") {
      arguments.only = value;
    } else if (flag == "--tp") {
      arguments.tp = std::atoi(value.c_str());
    } else if (flag == "--drafts") {
      arguments.drafts = std::atoi(value.c_str());
    } else if (flag == "--chunk") {
      arguments.chunk = std::atoll(value.c_str());
    } else if (flag == "--threads") {
      arguments.threads = std::atoi(value.c_str());
    } else {
      return twinspark::golden::Usage();
    }
  }
  if (arguments.cases.empty()) arguments.cases = arguments.dir + "/golden.json";
  if (arguments.dir.empty() || arguments.tp < 1 || arguments.threads < 1 || arguments.drafts < 0 ||
      arguments.drafts > 5 || arguments.chunk < 1)
    return twinspark::golden::Usage();
  return twinspark::golden::Run(arguments);
}
