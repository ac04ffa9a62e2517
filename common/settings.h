// The one table of settings: key, default, unit, range, help, and which programs read it
// (settings_table.cc). A value comes from, in this order: flag (--max-num-seqs 8), environment
// (MAX_NUM_SEQS=8), file (--config FILE or CONFIG=FILE, lines KEY=VALUE, # comments), default. An
// empty string means unset everywhere. Errors name the key, the value and the range.
// deploy/.env.example is made from the table (any program with --print-example) and compared with
// it in a test. Immutable after Parse, so thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark {

enum class SettingType : uint8_t {
  kString,
  kInt,
  kDouble,
  kBool,
  kList
};  // a list is comma-separated

enum Program : uint8_t { kGateway = 1, kShardWorker = 2, kEngramService = 4, kEveryProgram = 7 };

struct SettingSpec {
  const char* key;  // UPPER_CASE; the flag is --lower-case-with-dashes
  SettingType type;
  const char* default_value;  // "" = unset
  double min;                 // numbers only
  double max;
  uint8_t programs;          // bits of Program
  const char* help;          // one sentence with the unit
  const char* choices = "";  // a string that is one of these, separated by spaces; "" = any
};

// Every setting of every program, in the order of the example file.
std::span<const SettingSpec> SettingsTable();

class Settings {
 public:
  using Environment = std::function<std::optional<std::string>(const std::string& key)>;

  // Reads flags (argv without the program name), `environment` and the file they name. Unknown
  // flags and unknown keys of the file are errors; unknown environment variables are none of ours.
  static absl::StatusOr<Settings> Parse(Program program,
                                        std::span<const char* const> flags,
                                        const Environment& environment);

  // As Parse, with the real environment, for main(): prints --help, --version or --print-example
  // and returns nullopt where one was asked for; prints the error and returns it otherwise.
  static absl::StatusOr<std::optional<Settings>> FromMain(Program program,
                                                          int argc,
                                                          const char* const* argv);

  std::string String(std::string_view key) const;
  int64_t Int(std::string_view key) const;
  double Double(std::string_view key) const;
  bool Bool(std::string_view key) const;
  std::vector<std::string> List(std::string_view key) const;
  bool IsSet(std::string_view key) const { return !String(key).empty(); }

  // "flag", "environment", "file" or "default".
  std::string_view Source(std::string_view key) const;

  // What was given, KEY=VALUE (source) separated by blanks, or "none, all are defaults"; every
  // program logs it at start.
  std::string DescribeGiven() const;

 private:
  struct Value {
    std::string text;
    std::string_view source;
  };
  const Value& Get(std::string_view key, SettingType type) const;

  std::map<std::string, Value, std::less<>> values_;
};

std::string SettingsHelp(Program program);
std::string SettingsExampleFile();
std::string_view ProgramName(Program program);

}  // namespace twinspark
