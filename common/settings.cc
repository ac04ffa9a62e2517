// See settings.h.
#include "common/settings.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <limits>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

#include "common/build_info.h"
#include "common/check.h"
#include "common/limits.h"
#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

const SettingSpec* Find(Program program, std::string_view key) {
  for (const SettingSpec& spec : SettingsTable()) {
    if ((spec.programs & program) != 0 && key == spec.key) return &spec;
  }
  return nullptr;
}

std::string FlagName(std::string_view key) {
  std::string flag = "--";
  for (char c : key)
    flag += c == '_' ? '-' : absl::ascii_tolower(static_cast<unsigned char>(c));
  return flag;
}

std::string KeyOfFlag(std::string_view flag) {
  std::string key;
  for (char c : flag.substr(2))
    key += c == '-' ? '_' : absl::ascii_toupper(static_cast<unsigned char>(c));
  return key;
}

std::optional<bool> ParseBool(const std::string& text) {
  const std::string lower = absl::AsciiStrToLower(text);
  if (lower == "1" || lower == "true" || lower == "yes" || lower == "on") return true;
  if (lower == "0" || lower == "false" || lower == "no" || lower == "off") return false;
  return std::nullopt;
}

std::string NumberText(double value) {
  return absl::StrCat(value);
}

absl::Status CheckValue(const SettingSpec& spec, const std::string& text, std::string_view source) {
  const std::string where = absl::StrCat(spec.key, "='", text, "' (from ", ToAbsl(source), ")");
  if (spec.type == SettingType::kBool && !ParseBool(text)) {
    return absl::InvalidArgumentError(where + ": expected 1 or 0");
  }
  const std::vector<std::string> choices = absl::StrSplit(spec.choices, ' ', absl::SkipEmpty());
  if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": expected ", absl::StrJoin(choices, ", ")));
  }
  if (spec.type != SettingType::kInt && spec.type != SettingType::kDouble) return absl::OkStatus();
  double number = 0;
  int64_t integer = 0;
  const bool parsed = spec.type == SettingType::kInt ? absl::SimpleAtoi(text, &integer)
                                                     : absl::SimpleAtod(text, &number);
  if (spec.type == SettingType::kInt) number = static_cast<double>(integer);
  if (!parsed || !std::isfinite(number) || number < spec.min || number > spec.max) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": expected ", spec.type == SettingType::kInt ? "a whole number" : "a number",
        " from ", NumberText(spec.min), " to ", NumberText(spec.max)));
  }
  return absl::OkStatus();
}

// Flags as key > text. A Bool flag may stand alone.
absl::StatusOr<std::map<std::string, std::string>> ParseFlags(Program program,
                                                              std::span<const char* const> flags) {
  std::map<std::string, std::string> values;
  for (size_t i = 0; i < flags.size(); ++i) {
    const std::string_view flag = flags[i];
    const size_t equals = flag.find('=');
    const std::string_view name = flag.substr(0, equals);
    const SettingSpec* spec = name.starts_with("--") ? Find(program, KeyOfFlag(name)) : nullptr;
    if (spec == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag '", ToAbsl(flag), "' of ",
                                                     ToAbsl(ProgramName(program)),
                                                     "; --help lists the flags"));
    }
    const bool next_is_value =
        i + 1 < flags.size() && !std::string_view(flags[i + 1]).starts_with("--");
    if (equals != std::string_view::npos) {
      values[spec->key] = std::string(flag.substr(equals + 1));
    } else if (next_is_value) {
      values[spec->key] = flags[++i];
    } else if (spec->type == SettingType::kBool) {
      values[spec->key] = "1";
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("flag ", ToAbsl(flag), " needs a value: ", spec->help));
    }
  }
  return values;
}

absl::StatusOr<std::map<std::string, std::string>> ParseFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("CONFIG='", path, "': cannot be read"));
  std::stringstream content;
  content << file.rdbuf();
  if (content.str().size() > limits::kMaxSettingsFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat("CONFIG='", path, "': ", content.str().size(),
                                                   " bytes, more than ",
                                                   limits::kMaxSettingsFileBytes));
  }
  std::map<std::string, std::string> values;
  std::string line;
  for (int number = 1; std::getline(content, line); ++number) {
    const std::string text(absl::StripAsciiWhitespace(line));
    if (text.empty() || text[0] == '#') continue;
    const size_t equals = text.find('=');
    const std::string key(absl::StripAsciiWhitespace(text.substr(0, equals)));
    if (equals == std::string::npos || Find(kEveryProgram, key) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": '", text, "' is not KEY=VALUE with a known key"));
    }
    std::string value(absl::StripAsciiWhitespace(text.substr(equals + 1)));
    if (value.size() >= 2 && (value.front() == '"' || value.front() == '\'') &&
        value.back() == value.front()) {
      value = value.substr(1, value.size() - 2);
    }
    values[key] = value;
  }
  return values;
}

}  // namespace

std::string_view ProgramName(Program program) {
  switch (program) {
    case kGateway:
      return "gateway";
    case kShardWorker:
      return "shard_worker";
    case kEngramService:
      return "engram_service";
    case kEveryProgram:
      return "twinspark";
  }
  return "?";
}

absl::StatusOr<Settings> Settings::Parse(Program program,
                                         std::span<const char* const> flags,
                                         const Environment& environment) {
  ASSIGN_OR_RETURN(const auto from_flags, ParseFlags(program, flags));
  auto look_up = [](const std::map<std::string, std::string>& values,
                    const std::string& key) -> std::string {
    const auto found = values.find(key);
    return found == values.end() ? "" : found->second;
  };
  std::string config = look_up(from_flags, "CONFIG");
  if (config.empty()) config = environment("CONFIG").value_or("");
  std::map<std::string, std::string> from_file;
  if (!config.empty()) {
    ASSIGN_OR_RETURN(from_file, ParseFile(config));
  }
  Settings settings;
  for (const SettingSpec& spec : SettingsTable()) {
    if ((spec.programs & program) == 0) continue;
    Value value{look_up(from_flags, spec.key), "flag"};
    if (value.text.empty()) value = {environment(spec.key).value_or(""), "environment"};
    if (value.text.empty()) value = {look_up(from_file, spec.key), "file"};
    if (value.text.empty()) value = {spec.default_value, "default"};
    if (!value.text.empty()) RETURN_IF_ERROR(CheckValue(spec, value.text, value.source));
    settings.values_[spec.key] = value;
  }
  return settings;
}

absl::StatusOr<std::optional<Settings>> Settings::FromMain(Program program,
                                                           int argc,
                                                           const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      std::cout << SettingsHelp(program);
      return std::optional<Settings>();
    }
    if (flag == "--version") {
      std::cout << ProgramName(program) << " " << BuildId() << "\n";
      return std::optional<Settings>();
    }
    if (flag == "--print-example") {
      std::cout << SettingsExampleFile();
      return std::optional<Settings>();
    }
  }
  absl::StatusOr<Settings> settings =
      Parse(program, {argv + 1, static_cast<size_t>(std::max(argc - 1, 0))},
            [](const std::string& key) -> std::optional<std::string> {
              const char* value = std::getenv(key.c_str());
              return value == nullptr ? std::nullopt : std::optional<std::string>(value);
            });
  if (!settings.ok()) {
    std::cerr << ProgramName(program) << ": " << settings.status().message() << "\n";
    return settings.status();
  }
  return std::optional<Settings>(*std::move(settings));
}

const Settings::Value& Settings::Get(std::string_view key, SettingType type) const {
  const auto found = values_.find(key);
  CHECK(found != values_.end()) << "setting " << key << " is not one of this program's";
  const SettingSpec* spec = Find(kEveryProgram, key);
  CHECK(spec != nullptr && (spec->type == type || type == SettingType::kString))
      << "setting " << key << " read as another type";
  return found->second;
}

std::string Settings::String(std::string_view key) const {
  return Get(key, SettingType::kString).text;
}

int64_t Settings::Int(std::string_view key) const {
  int64_t value = 0;
  CHECK(absl::SimpleAtoi(Get(key, SettingType::kInt).text, &value)) << key;
  return value;
}

double Settings::Double(std::string_view key) const {
  double value = 0;
  CHECK(absl::SimpleAtod(Get(key, SettingType::kDouble).text, &value)) << key;
  return value;
}

bool Settings::Bool(std::string_view key) const {
  return ParseBool(Get(key, SettingType::kBool).text).value_or(false);
}

std::vector<std::string> Settings::List(std::string_view key) const {
  std::vector<std::string> items;
  for (absl::string_view item :
       absl::StrSplit(Get(key, SettingType::kList).text, ',', absl::SkipWhitespace())) {
    items.emplace_back(absl::StripAsciiWhitespace(item));
  }
  return items;
}

std::string_view Settings::Source(std::string_view key) const {
  return Get(key, SettingType::kString).source;
}

std::string Settings::DescribeGiven() const {
  std::string text;
  for (const auto& [key, value] : values_) {
    if (value.source == "default") continue;
    absl::StrAppend(&text, text.empty() ? "" : " ", key, "=", value.text, " (",
                    ToAbsl(value.source), ")");
  }
  return text.empty() ? "none, all are defaults" : text;
}

std::string SettingsHelp(Program program) {
  std::string text =
      absl::StrCat("usage: ", ToAbsl(ProgramName(program)),
                   " [--flag VALUE]...\n\nA value comes from the flag, else the "
                   "environment variable of the same name in capitals,"
                   "\nelse the file that --config names, else the default. Lists are "
                   "separated by commas.\n\n");
  for (const SettingSpec& spec : SettingsTable()) {
    if ((spec.programs & program) == 0) continue;
    absl::StrAppend(&text, "  ", FlagName(spec.key), "  [",
                    *spec.default_value == '\0' ? "unset" : spec.default_value, "]\n      ",
                    spec.help, "\n");
  }
  absl::StrAppend(&text, "  --help, --version, --print-example\n");
  return text;
}

std::string SettingsExampleFile() {
  std::string text =
      "# Settings of TwinSpark, made from the table in common/settings_table.cc by `gateway "
      "--print-example`; a test compares the two.\n"
      "# Every line shows the default. Remove the # to change one. An empty value means unset. "
      "Lists are separated by commas.\n";
  for (const SettingSpec& spec : SettingsTable()) {
    std::string programs;
    for (Program program : {kGateway, kShardWorker, kEngramService}) {
      if ((spec.programs & program) != 0)
        absl::StrAppend(&programs, programs.empty() ? "" : ", ", ToAbsl(ProgramName(program)));
    }
    absl::StrAppend(&text, "\n# ", spec.help, " [", programs, "]\n#", spec.key, "=",
                    spec.default_value, "\n");
  }
  return text;
}

}  // namespace twinspark
