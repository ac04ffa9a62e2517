// Command line of the row service's tools: --name value pairs and --switches, unknown ones refused.
// Plain, because tools are run by people and scripts with a handful of flags each.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <set>
#include <string>

#include "absl/status/statusor.h"

namespace twinspark::engram {

class ToolFlags {
 public:
  // `values` take an argument, `switches` do not.
  static absl::StatusOr<ToolFlags> Parse(int argc,
                                         char** argv,
                                         std::set<std::string> values,
                                         std::set<std::string> switches);

  bool Has(const std::string& name) const { return given_.count(name) != 0; }
  std::string Text(const std::string& name, const std::string& otherwise = "") const;
  // The error names the flag and the text.
  absl::StatusOr<int64_t> Int(const std::string& name, int64_t otherwise) const;

 private:
  std::map<std::string, std::string> given_;
};

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
