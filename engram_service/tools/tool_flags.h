// Command line of the row service's tools: --name value pairs and --switches, unknown ones refused,
// --help from the same table. Plain, because tools are run by people and scripts with a handful of
// flags each.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark::engram {

struct ToolFlag {
  std::string name;   // "--out"
  std::string value;  // what its argument is, "DIR"; empty: a switch without one
  std::string meaning;
  std::string otherwise = {};  // what holds without it, for --help; empty: nothing to say
};

struct ToolUsage {
  std::string program;
  std::string what;  // a sentence or two
  std::vector<ToolFlag> flags;
};

// The flags of every tool that opens tables (--model-dir, --engram-dir, --rank, --world), then
// `own`.
std::vector<ToolFlag> WithTableFlags(std::vector<ToolFlag> own);

class ToolFlags {
 public:
  // Refuses unknown flags and values that are missing. With --help (or -h) anywhere nothing is
  // refused: see asks_help().
  static absl::StatusOr<ToolFlags> Parse(int argc, char** argv, const ToolUsage& usage);

  bool asks_help() const { return asks_help_; }
  bool Has(const std::string& name) const { return given_.count(name) != 0; }
  std::string Text(const std::string& name, const std::string& otherwise = "") const;
  // The errors name the flag and the text.
  absl::StatusOr<int64_t> Int(const std::string& name, int64_t otherwise) const;
  absl::StatusOr<double> Number(const std::string& name, double otherwise) const;

 private:
  std::map<std::string, std::string> given_;
  bool asks_help_ = false;
};

// What --help prints: the sentence, then a line per flag with its meaning and default.
std::string UsageText(const ToolUsage& usage);

// main() of a tool: parses, answers --help, runs; returns the exit code.
int ToolMain(const ToolUsage& usage,
             int argc,
             char** argv,
             const std::function<absl::Status(const ToolFlags&)>& run);

// Makes a directory of --out, with those above it; there already is fine.
absl::Status MakeDirectories(const std::string& dir);

// Prints "PROGRAM: text" to stderr and returns the exit code that fits the status.
int ToolFailure(const std::string& program, const absl::Status& status);

// One line on stderr that replaces itself on a terminal, else at most one every five seconds:
// phase, share, MB/s, ETA.
class ProgressLine {
 public:
  explicit ProgressLine(std::string what) : what_(std::move(what)) {}
  ~ProgressLine();
  void Update(const std::string& phase, uint64_t done, uint64_t total, bool is_bytes);

 private:
  const std::string what_;
  std::string phase_;
  int64_t phase_began_ms_ = 0;
  int64_t printed_ms_ = 0;
  bool on_terminal_ = false;
  bool line_open_ = false;
};

}  // namespace twinspark::engram
