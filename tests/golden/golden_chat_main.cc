// golden_chat --dir DIR [--tokenizer FILE] [--only PREFIX]...: the text side of the gateway against
// golden data. Every .json file of DIR is a set of cases; the first word of its name says of what
// kind. Without --tokenizer the file that tests/fetch_tokenizer.sh made is used. Where DIR has
// special_tokens_v41.json, a released tokenizer gets its added tokens from there (the public
// package has an older table).
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "gateway/text/chat_template.h"
#include "gateway/text/control_tokens.h"
#include "gateway/text/detokenizer.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/tokenizer.h"
#include "gateway/text/utf8.h"
#include "tests/golden/golden_report.h"

namespace twinspark::golden {
namespace {

using gateway::AddedToken;
using gateway::ChatMessage;
using gateway::ChatOptions;
using gateway::ControlTokens;
using gateway::Json;
using gateway::PromptSegment;
using gateway::Tokenizer;

constexpr size_t kMaxFileBytes = size_t{256} << 20;

struct Context {
  std::unique_ptr<Tokenizer> tokenizer;
  ControlTokens tokens;
  GoldenReport report;
};

// One checked case: empty when right, else what differs.
using CaseCheck = std::function<std::string(const Json& file, const Json& test, Context& context)>;

std::vector<int32_t> ReadIds(const Json& list) {
  std::vector<int32_t> ids;
  if (!list.is_array()) return ids;
  for (const Json& id : list.as_array())
    ids.push_back(static_cast<int32_t>(*id.ToInt64()));
  return ids;
}

std::string Show(std::string_view text) {
  std::string out;
  gateway::AppendJsonString(text, &out);
  return out.size() > 300 ? out.substr(0, 300) + "..." : out;
}

// Empty when equal, else the first place where the lists part.
std::string CompareIds(std::string_view what,
                       const std::vector<int32_t>& got,
                       const std::vector<int32_t>& want) {
  if (got == want) return {};
  size_t i = 0;
  while (i < got.size() && i < want.size() && got[i] == want[i])
    ++i;
  const auto at = [i](const std::vector<int32_t>& ids) {
    return i < ids.size() ? std::to_string(ids[i]) : std::string("the end");
  };
  return absl::StrCat(std::string(what), " differ at ", i, ": got ", at(got), ", want ", at(want),
                      " (", got.size(), " and ", want.size(), " ids). ");
}

std::string CompareText(std::string_view what, std::string_view got, std::string_view want) {
  if (got == want) return {};
  return absl::StrCat(std::string(what), ": got ", Show(got), ", want ", Show(want), ". ");
}

std::string CheckTokenizer(const Json& file, const Json& test, Context& context) {
  const std::string& text = test.Find("text")->as_string();
  std::vector<int32_t> plain;
  std::vector<int32_t> parsed;
  context.tokenizer->EncodePlain(text, &plain);
  context.tokenizer->EncodeParse(text, &parsed);
  std::string problem;
  if (const Json* ids = test.Find("ids")) {
    const Json* mode = file.Find("mode");
    const bool is_plain = mode != nullptr && mode->is_string() && mode->as_string() == "plain";
    problem += CompareIds("ids", is_plain ? plain : parsed, ReadIds(*ids));
  }
  if (const Json* ids = test.Find("ids_parse")) {
    problem += CompareIds("ids_parse", parsed, ReadIds(*ids));
  }
  if (const Json* ids = test.Find("ids_plain")) {
    problem += CompareIds("ids_plain", plain, ReadIds(*ids));
  }
  if (const Json* pieces = test.Find("pretokens")) {
    std::vector<std::string_view> got;
    context.tokenizer->pre_tokenizer().Split(text, &got);
    const Json::Array& want = pieces->as_array();
    bool equal = got.size() == want.size();
    for (size_t i = 0; equal && i < got.size(); ++i)
      equal = got[i] == want[i].as_string();
    if (!equal) {
      problem += absl::StrCat("pieces differ (", got.size(), " and ", want.size(), "). ");
    }
  }
  problem += CompareText("decoded", context.tokenizer->DecodeBytes(plain), text);
  return problem;
}

ChatOptions ReadOptions(const Json* options) {
  ChatOptions result;
  if (options == nullptr || !options->is_object()) return result;
  const auto flag = [options](std::string_view key, bool fallback) {
    const Json* value = options->Find(key);
    return value != nullptr && value->is_bool() ? value->as_bool() : fallback;
  };
  result.thinking = flag("thinking", true);
  result.drop_thinking = flag("drop_thinking", true);
  result.add_bos = flag("bos", flag("add_bos", true));
  result.continue_final = flag("continue_final", false);
  result.force_calls = flag("force_calls", false);
  const Json* header = options->Find("add_generation_prompt");
  if (header != nullptr && header->is_bool()) result.add_generation_prompt = header->as_bool();
  if (const Json* effort = options->Find("effort")) {
    if (effort->is_string()) {
      const std::string& word = effort->as_string();
      result.effort = word == "low" ? 50 : word == "max" ? 100 : 75;
    } else if (effort->is_number()) {
      result.effort = static_cast<int>(*effort->ToInt64());
    }
  }
  return result;
}

absl::StatusOr<std::vector<PromptSegment>> EncodeCase(const Json& test,
                                                      const ControlTokens& tokens) {
  std::vector<ChatMessage> messages;
  for (const Json& entry : test.Find("messages")->as_array()) {
    absl::StatusOr<ChatMessage> message = gateway::ChatMessageFromJson(entry);
    if (!message.ok()) return message.status();
    messages.push_back(*std::move(message));
  }
  return gateway::EncodeChat(messages, ReadOptions(test.Find("options")), tokens);
}

std::string CheckEncode(const Json&, const Json& test, Context& context) {
  const auto segments = EncodeCase(test, context.tokens);
  if (test.Find("prompt") == nullptr && test.Find("error") != nullptr) {
    return segments.ok() ? "accepted, but must be refused" : std::string();
  }
  if (!segments.ok()) return std::string(segments.status().message());
  std::string problem;
  const std::string prompt = gateway::SegmentText(*segments, *context.tokenizer);
  std::vector<int32_t> ids;
  gateway::SegmentIds(*segments, *context.tokenizer, &ids);
  if (const Json* want = test.Find("prompt")) {
    problem += CompareText("prompt", prompt, want->as_string());
  }
  if (const Json* want = test.Find("ids")) problem += CompareIds("ids", ids, ReadIds(*want));
  if (const Json* want = test.Find("ids_parse_mode")) {
    std::vector<int32_t> parsed;
    context.tokenizer->EncodeParse(prompt, &parsed);
    problem += CompareIds("ids_parse_mode", parsed, ReadIds(*want));
  }
  if (const Json* want = test.Find("ids_expanded")) {
    std::vector<std::pair<int, int>> grids;
    for (const Json& grid : test.Find("image_grids_w_h")->as_array()) {
      grids.emplace_back(static_cast<int>(*grid.as_array()[0].ToInt64()),
                         static_cast<int>(*grid.as_array()[1].ToInt64()));
    }
    const auto expanded = gateway::ExpandImages(ids, context.tokens.image, grids);
    problem += expanded.ok() ? CompareIds("ids_expanded", *expanded, ReadIds(*want))
                             : std::string(expanded.status().message());
  }
  return problem;
}

std::string CheckSpecialToken(const Json&, const Json& test, Context& context) {
  const std::string& text = test.Find("text")->as_string();
  const int32_t id = static_cast<int32_t>(*test.Find("id")->ToInt64());
  const std::optional<int32_t> found = context.tokenizer->FindAdded(text);
  std::string problem;
  if (found != id) problem = absl::StrCat(text, " is ", found.value_or(-1), ", want ", id, ". ");
  return problem + CompareText("spelling", context.tokenizer->TokenBytes(id), text);
}

std::string CheckDetokenizer(const Json&, const Json& test, Context& context) {
  gateway::Detokenizer detokenizer(*context.tokenizer);
  std::string problem;
  std::string text;
  const std::vector<int32_t> ids = ReadIds(*test.Find("ids"));
  const Json::Array& pieces = test.Find("pieces")->as_array();
  for (size_t i = 0; i < ids.size(); ++i) {
    std::string piece;
    if (context.tokenizer->IsAdded(ids[i])) detokenizer.Flush(&piece);
    detokenizer.Push(ids[i], &piece);
    problem += CompareText(absl::StrCat("piece ", i), piece, pieces[i].as_string());
    text += piece;
  }
  std::string rest;
  detokenizer.Flush(&rest);
  problem += CompareText("at_end", rest, test.Find("at_end")->as_string());
  return problem + CompareText("text", text + rest, test.Find("text")->as_string());
}

std::string CheckJsonStyle(const Json&, const Json& test, Context&) {
  const absl::StatusOr<Json> value = Json::Parse(test.Find("input")->as_string());
  const Json* want = test.Find("output");
  if (want == nullptr || want->is_null()) {
    return value.ok() ? "accepted, but must be refused" : std::string();
  }
  if (!value.ok()) return std::string(value.status().message());
  return CompareText("output", value->Dump(), want->as_string());
}

struct FileKind {
  std::string_view prefix;
  std::string_view list;  // key of the array of cases
  CaseCheck check;
};

std::vector<FileKind> FileKinds() {
  return {{"tokenizer_", "cases", CheckTokenizer},
          {"encode_", "cases", CheckEncode},
          {"special_tokens", "tokens", CheckSpecialToken},
          {"detok_", "cases", CheckDetokenizer},
          {"json_style", "cases", CheckJsonStyle}};
}

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

void RunFile(const std::filesystem::path& path, bool is_selected, Context& context) {
  const std::string name = path.stem().string();
  if (!is_selected) {
    context.report.Plan(1);
    context.report.Skip(name, "left out by --only", /*allowed=*/true);
    return;
  }
  const absl::StatusOr<std::string> text = ReadFile(path.string(), kMaxFileBytes);
  const absl::StatusOr<Json> file =
      text.ok() ? Json::Parse(*text) : absl::StatusOr<Json>(text.status());
  if (!file.ok()) {
    context.report.Error(absl::StrCat(path.string(), ": ", file.status().message()));
    return;
  }
  for (const FileKind& kind : FileKinds()) {
    const Json* cases = file->Find(kind.list);
    if (!StartsWith(name, kind.prefix) || cases == nullptr || !cases->is_array()) continue;
    context.report.Plan(static_cast<int64_t>(cases->as_array().size()));
    for (size_t i = 0; i < cases->as_array().size(); ++i) {
      const Json& test = cases->as_array()[i];
      const Json* label = test.Find("name");
      const std::string problem = kind.check(*file, test, context);
      context.report.CompareRecord(
          absl::StrCat(
              name, "/",
              label != nullptr && label->is_string() ? label->as_string() : std::to_string(i)),
          problem.empty(), problem);
    }
    return;
  }
  context.report.Plan(1);
  context.report.Skip(name, "this program does not read such files", /*allowed=*/false);
}

// CHECKOUT of CHECKOUT/build/PRESET/bin/golden_chat.
std::filesystem::path Checkout() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  return program.parent_path().parent_path().parent_path().parent_path();
}

// The tokenizer of `path`. A released one gets the added tokens of special_tokens_v41.json, from
// DIR or, where that has none, from our own data.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& path,
                                                         const std::filesystem::path& dir) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(path);
  if (!tokenizer.ok() || (*tokenizer)->num_base_tokens() != 128000) return tokenizer;
  absl::StatusOr<std::string> table =
      ReadFile((dir / "special_tokens_v41.json").string(), kMaxFileBytes);
  if (!table.ok()) {
    table = ReadFile((Checkout() / "tests/golden/data/chat/special_tokens_v41.json").string(),
                     kMaxFileBytes);
  }
  if (!table.ok()) return tokenizer;
  const absl::StatusOr<Json> json = Json::Parse(*table);
  if (!json.ok()) return json.status();
  std::vector<AddedToken> added;
  size_t num_changed = 0;
  for (const Json& token : json->Find("tokens")->as_array()) {
    added.push_back(
        {static_cast<int32_t>(*token.Find("id")->ToInt64()), token.Find("text")->as_string()});
    num_changed += (*tokenizer)->FindAdded(added.back().text) != added.back().id;
  }
  if (num_changed == 0) return tokenizer;
  std::printf("%zu added tokens of %s replaced by those of special_tokens_v41.json\n", num_changed,
              path.c_str());
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxFileBytes);
  if (!text.ok()) return text.status();
  return Tokenizer::FromJson(*text, added);
}

// Where tests/fetch_tokenizer.sh puts it.
std::string DefaultTokenizer() {
  return (Checkout() / "build/tokenizer/tokenizer.json").string();
}

constexpr char kUsage[] = "usage: golden_chat --dir DIR [--tokenizer FILE] [--only PREFIX]...\n";

int Main(const std::vector<std::string_view>& args) {
  std::filesystem::path dir;
  std::string tokenizer_path = DefaultTokenizer();
  std::vector<std::string_view> only;
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    if (args[i] == "--dir") {
      dir = args[i + 1];
    } else if (args[i] == "--tokenizer") {
      tokenizer_path = args[i + 1];
    } else if (args[i] == "--only") {
      only.push_back(args[i + 1]);
    } else {
      dir.clear();
      break;
    }
  }
  if (dir.empty() || args.size() % 2 != 0) {
    std::fputs(kUsage, stderr);
    return kExitFailed;
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(tokenizer_path, dir);
  if (!tokenizer.ok()) {
    return CannotRun(absl::StrCat(tokenizer.status().message(),
                                  " (tests/fetch_tokenizer.sh gets the released tokenizer)"));
  }
  absl::StatusOr<ControlTokens> tokens = ControlTokens::Find(**tokenizer);
  if (!tokens.ok()) return CannotRun(std::string(tokens.status().message()));
  Context context{*std::move(tokenizer), *std::move(tokens), {}};

  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  if (error || files.empty()) {
    context.report.Error(absl::StrCat("no .json files in ", dir.string()));
  }
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& path : files) {
    const std::string name = path.stem().string();
    const bool is_selected =
        only.empty() || std::any_of(only.begin(), only.end(),
                                    [&](std::string_view p) { return StartsWith(name, p); });
    RunFile(path, is_selected, context);
  }
  return context.report.Finish();
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  if (twinspark::golden::HelpWasAsked(argc, argv, twinspark::golden::kUsage)) return 0;
  return twinspark::golden::Main(std::vector<std::string_view>(argv + 1, argv + argc));
}
