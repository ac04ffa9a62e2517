// golden_engram --dir DIR [--tokenizer FILE]: see engram_checker.h. The tokenizer lets
// make_token_map's result be compared with the map too. Skipped by rule: digests of native files
// that are not here. Exit codes: golden_report.h.
#include <cstdio>
#include <string>
#include <vector>

#include "tests/golden/engram/engram_checker.h"
#include "tests/golden/golden_report.h"

namespace twinspark::golden {
namespace {

constexpr char kUsage[] = "usage: golden_engram --dir DIR [--tokenizer FILE]\n";

int Main(const std::vector<std::string>& args) {
  std::string dir;
  std::string tokenizer;
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    if (args[i] == "--dir") {
      dir = args[i + 1];
    } else if (args[i] == "--tokenizer") {
      tokenizer = args[i + 1];
    } else {
      dir.clear();
      break;
    }
  }
  if (dir.empty() || args.size() % 2 != 0) {
    std::fputs(kUsage, stderr);
    return kExitFailed;
  }
  return EngramChecker(dir, tokenizer).Run();
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  if (twinspark::golden::HelpWasAsked(argc, argv, twinspark::golden::kUsage)) return 0;
  return twinspark::golden::Main(std::vector<std::string>(argv + 1, argv + argc));
}
