// Parsing and progress of the tools.
#include "engram_service/tools/tool_flags.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "common/exit_codes.h"

namespace twinspark::engram {
namespace {

constexpr int64_t kLineEveryMs = 5000;
constexpr int64_t kTerminalEveryMs = 200;

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::vector<ToolFlag> WithTableFlags(std::vector<ToolFlag> own) {
  std::vector<ToolFlag> flags = {
      {"--model-dir", "DIR", "config.json and the token map"},
      {"--engram-dir", "DIR", "checkpoint with the Engram tables", "--model-dir"},
      {"--rank", "R", "this node's rank", "0"},
      {"--world", "N", "number of nodes", "1"}};
  flags.insert(flags.end(), own.begin(), own.end());
  return flags;
}

absl::StatusOr<ToolFlags> ToolFlags::Parse(int argc, char** argv, const ToolUsage& usage) {
  ToolFlags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    flags.asks_help_ = flags.asks_help_ || name == "--help" || name == "-h";
  }
  if (flags.asks_help_) return flags;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto flag =
        std::ranges::find_if(usage.flags, [&](const ToolFlag& f) { return f.name == name; });
    if (flag == usage.flags.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot use '", name, "'; --help lists the flags"));
    }
    if (flag->value.empty()) {
      flags.given_[name] = "";
      continue;
    }
    if (i + 1 == argc) {
      return absl::InvalidArgumentError(absl::StrCat(name, " wants a value: ", flag->value));
    }
    flags.given_[name] = argv[++i];
  }
  return flags;
}

std::string ToolFlags::Text(const std::string& name, const std::string& otherwise) const {
  const auto it = given_.find(name);
  return it == given_.end() ? otherwise : it->second;
}

absl::StatusOr<int64_t> ToolFlags::Int(const std::string& name, int64_t otherwise) const {
  if (!Has(name)) return otherwise;
  const std::string text = Text(name);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " '", text, "' is not a whole number"));
  }
  return value;
}

absl::StatusOr<double> ToolFlags::Number(const std::string& name, double otherwise) const {
  if (!Has(name)) return otherwise;
  double value = 0;
  if (!absl::SimpleAtod(Text(name), &value) || !std::isfinite(value)) {
    return absl::InvalidArgumentError(absl::StrCat(name, " '", Text(name), "' is not a number"));
  }
  return value;
}

std::string UsageText(const ToolUsage& usage) {
  std::string text =
      absl::StrCat("usage: ", usage.program, " [FLAG VALUE] ...\n", usage.what, "\n");
  for (const ToolFlag& flag : usage.flags) {
    const std::string head = absl::StrCat(flag.name, " ", flag.value);
    const std::string otherwise =
        flag.otherwise.empty() ? "" : absl::StrCat(" (default: ", flag.otherwise, ")");
    absl::StrAppendFormat(&text, "  %-20s %s%s\n", head, flag.meaning, otherwise);
  }
  absl::StrAppendFormat(&text, "  %-20s %s\n", "--help", "this text");
  return text;
}

int ToolMain(const ToolUsage& usage,
             int argc,
             char** argv,
             const std::function<absl::Status(const ToolFlags&)>& run) {
  const auto flags = ToolFlags::Parse(argc, argv, usage);
  if (!flags.ok()) return ToolFailure(usage.program, flags.status());
  if (flags->asks_help()) {
    fputs(UsageText(usage).c_str(), stdout);
    return kExitOk;
  }
  const absl::Status status = run(*flags);
  return status.ok() ? kExitOk : ToolFailure(usage.program, status);
}

absl::Status MakeDirectories(const std::string& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(dir, ": ", error.message()));
}

int ToolFailure(const std::string& program, const absl::Status& status) {
  fprintf(stderr, "%s: %s\n", program.c_str(), std::string(status.message()).c_str());
  if (absl::IsInvalidArgument(status)) return kExitBadConfig;
  return absl::IsResourceExhausted(status) ? kExitNoMemory : kExitBadData;
}

void ProgressLine::Update(const std::string& phase, uint64_t done, uint64_t total, bool is_bytes) {
  const int64_t now = NowMs();
  if (phase != phase_) {
    phase_ = phase;
    phase_began_ms_ = now;
    printed_ms_ = now;
    on_terminal_ = isatty(STDERR_FILENO) != 0;
    return;
  }
  if (now - printed_ms_ < (on_terminal_ ? kTerminalEveryMs : kLineEveryMs)) return;
  printed_ms_ = now;
  const double seconds = static_cast<double>(now - phase_began_ms_) / 1000;
  const double rate = static_cast<double>(done) / std::max(seconds, 0.001);
  const double left = static_cast<double>(total - std::min(done, total)) / std::max(rate, 1.0);
  fprintf(stderr, "%s%s %s %3.0f %%", on_terminal_ ? "\r" : "", what_.c_str(), phase.c_str(),
          100.0 * static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(total, 1)));
  if (is_bytes) fprintf(stderr, ", %.0f MB/s", rate / 1e6);
  fprintf(stderr, ", %.0f s left%s", left, on_terminal_ ? "   " : "\n");
  line_open_ = on_terminal_;
}

ProgressLine::~ProgressLine() {
  if (line_open_) fprintf(stderr, "\n");
}

}  // namespace twinspark::engram
