// forward_bench [--dir MODEL] [--cases FILE] [--threads N] [--tp N] [--chunk N] [--passes N]
//               [--f16-copy] [--smoke]
// A whole model in one process on stored prompts: prefill of the long ones (300 tokens and more),
// and decoding without and with five drafts, as emitted tokens per second of draft and verify time.
// Per case the best of the passes counts; CPU seconds stand beside, since wall time on a busy
// machine says little. Tokens are not compared here (golden_generate does).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <boost/json.hpp>
#include <time.h>

#include "absl/strings/numbers.h"

#include "common/exit_codes.h"
#include "common/file_util.h"
#include "common/status_macros.h"
#include "tests/golden/model/model_group.h"

namespace twinspark::golden {
namespace {

struct Arguments {
  std::string dir = TWINSPARK_DEMO_MODEL;
  std::string cases;
  int threads = 2;
  int tp = 1;
  int chunk = 512;
  int passes = 5;
  bool f16_copy = false;
  bool smoke = false;
};

struct Prompt {
  std::vector<int32_t> ids;
  size_t output_tokens = 0;
};

struct Clocks {
  double wall = 0;
  double cpu = 0;
};

Clocks Now() {
  timespec cpu{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
  return {
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(),
      static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec)};
}

absl::StatusOr<std::vector<Prompt>> ReadPrompts(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, size_t{64} << 20));
  boost::system::error_code error;
  const boost::json::value root = boost::json::parse(text, error);
  if (error) return absl::InvalidArgumentError(path + ": " + error.message());
  std::vector<Prompt> prompts;
  for (const boost::json::value& entry : root.at("cases").as_array()) {
    Prompt prompt;
    for (const boost::json::value& id : entry.at("prompt_ids").as_array())
      prompt.ids.push_back(id.to_number<int32_t>());
    prompt.output_tokens = entry.at("output_ids").as_array().size();
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

// Sums of the best pass of every prompt.
struct Sums {
  int64_t tokens = 0;
  Clocks best;

  void Print(const char* what) const {
    std::printf("%-28s %7lld tokens  %8.0f tok/s  %8.0f tok per CPU second\n", what,
                static_cast<long long>(tokens), static_cast<double>(tokens) / best.wall,
                static_cast<double>(tokens) / best.cpu);
  }
};

void Best(Clocks& best, const Clocks& begin, const Clocks& end, bool is_first) {
  const Clocks taken = {end.wall - begin.wall, end.cpu - begin.cpu};
  best.wall = is_first ? taken.wall : std::min(best.wall, taken.wall);
  best.cpu = is_first ? taken.cpu : std::min(best.cpu, taken.cpu);
}

absl::Status RunPrompt(ModelGroup& group,
                       const Arguments& arguments,
                       const Prompt& prompt,
                       int drafts,
                       Sums& prefill,
                       Sums& decode) {
  Clocks best_prefill;
  Clocks best_decode;
  int64_t emitted = 0;
  const int64_t length = static_cast<int64_t>(prompt.ids.size());
  for (int pass = 0; pass < arguments.passes; ++pass) {
    OpenSequence open;
    open.ids = prompt.ids;
    open.num_prompt_ids = length;
    RETURN_IF_ERROR(group.Open(open, length + static_cast<int64_t>(prompt.output_tokens) + 16));
    Clocks begin = Now();
    ASSIGN_OR_RETURN(SequenceResult result,
                     group.Prefill(0, 0, length, arguments.chunk, drafts > 0));
    Best(best_prefill, begin, Now(), pass == 0);
    size_t tokens = result.tokens.size();
    emitted = 0;
    begin = Now();
    while (tokens < prompt.output_tokens) {
      ASSIGN_OR_RETURN(result, group.Round(0, drafts, drafts > 0));
      tokens += result.tokens.size();
      emitted += static_cast<int64_t>(result.tokens.size());
    }
    Best(best_decode, begin, Now(), pass == 0);
    RETURN_IF_ERROR(group.Close(0));
  }
  if (length >= 300 || arguments.smoke) {
    prefill.tokens += length;
    prefill.best.wall += best_prefill.wall;
    prefill.best.cpu += best_prefill.cpu;
  }
  decode.tokens += emitted;
  decode.best.wall += best_decode.wall;
  decode.best.cpu += best_decode.cpu;
  return absl::OkStatus();
}

absl::Status Run(const Arguments& arguments) {
  const std::string cases =
      arguments.cases.empty() ? arguments.dir + "/golden.json" : arguments.cases;
  ASSIGN_OR_RETURN(std::vector<Prompt> prompts, ReadPrompts(cases));
  if (arguments.smoke) prompts.resize(std::min<size_t>(prompts.size(), 2));
  int64_t longest = 0;
  for (const Prompt& prompt : prompts)
    longest =
        std::max(longest, static_cast<int64_t>(prompt.ids.size() + prompt.output_tokens) + 16);
  ModelOptions options;
  options.world = arguments.tp;
  options.f16_copy = arguments.f16_copy;
  options.limits.num_slots = 1;
  options.limits.num_pages = static_cast<int>(longest / 64 + 2);
  ASSIGN_OR_RETURN(std::unique_ptr<ModelGroup> group,
                   ModelGroup::Load(arguments.dir, options, arguments.threads));
  std::printf("%s, tp %d, %d threads a rank, %s\n", arguments.dir.c_str(), arguments.tp,
              arguments.threads, arguments.f16_copy ? "f16 copy" : "trellis");
  for (const int drafts : {0, group->model().max_drafts()}) {
    Sums prefill;
    Sums decode;
    for (const Prompt& prompt : prompts)
      RETURN_IF_ERROR(RunPrompt(*group, arguments, prompt, drafts, prefill, decode));
    if (drafts == 0) prefill.Print("prefill");
    decode.Print(drafts == 0 ? "decode, no drafts" : "decode, whole draft block");
    if (group->model().max_drafts() == 0) break;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  constexpr const char* kUsage =
      "usage: forward_bench [--dir MODEL] [--cases FILE] [--threads N] [--tp 1|2] [--chunk ROWS]\n"
      "                     [--passes N] [--f16-copy] [--smoke]\n";
  twinspark::golden::Arguments arguments;
  const std::map<std::string, int*> numbers = {{"--threads", &arguments.threads},
                                               {"--tp", &arguments.tp},
                                               {"--chunk", &arguments.chunk},
                                               {"--passes", &arguments.passes}};
  const std::map<std::string, std::string*> texts = {{"--dir", &arguments.dir},
                                                     {"--cases", &arguments.cases}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    } else if (flag == "--smoke") {
      arguments.smoke = true;
      arguments.passes = 1;
    } else if (flag == "--f16-copy") {
      arguments.f16_copy = true;
    } else if (texts.contains(flag) && *value != 0) {
      *texts.at(flag) = argv[++i];
    } else if (numbers.contains(flag) && absl::SimpleAtoi(value, numbers.at(flag)) &&
               *numbers.at(flag) >= 1) {
      ++i;
    } else {
      std::fprintf(stderr, "forward_bench: '%s %s' is no flag with a value it takes\n%s",
                   flag.c_str(), value, kUsage);
      return twinspark::kExitBadConfig;
    }
  }
  const absl::Status status = twinspark::golden::Run(arguments);
  if (!status.ok()) std::fprintf(stderr, "forward_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
