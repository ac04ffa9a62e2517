// gather --model-dir DIR [--engram-dir DIR] [--packed-dir DIR] [--rank R --world N] --ids
// 0,671,6102
//        [--rows]
// Token ids in, the rows of every owned column out: one SHA-256 per layer, with --rows also row
// number and bytes in hexadecimal. Reads the tables itself, no service needed.
#include <charconv>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/tools/tool_flags.h"

namespace twinspark::engram {
namespace {

absl::StatusOr<std::vector<int32_t>> ParseIds(const std::string& text) {
  std::vector<int32_t> ids;
  const char* at = text.data();
  const char* end = at + text.size();
  while (at < end) {
    int32_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    if (error != std::errc() || (next != end && *next != ',')) {
      return absl::InvalidArgumentError(absl::StrCat("--ids '", text, "': numbers with commas"));
    }
    ids.push_back(id);
    at = next == end ? end : next + 1;
  }
  return ids;
}

void PrintRows(const LocalRows& rows, const std::vector<int32_t>& ids, int layer_idx) {
  const TableSet& set = rows.tables();
  const uint32_t width = set.table(layer_idx).row_weight_bytes();
  const uint32_t groups = set.table(layer_idx).row_scale_bytes();
  std::vector<Window> windows(ids.size());
  if (!set.hasher().Windows(ids, 0, {}, windows).ok()) return;
  std::vector<uint64_t> numbers(static_cast<size_t>(set.shape().num_columns()));
  size_t row = 0;
  for (size_t t = 0; t < ids.size(); ++t) {
    set.hasher().Rows(layer_idx, windows[t], numbers);
    for (const int column : set.columns()) {
      printf("token %zu column %d row %llu %s %s\n", t, column,
             static_cast<unsigned long long>(numbers[static_cast<size_t>(column)]),
             Hex(rows.weights(layer_idx).subspan(row * width, width)).c_str(),
             Hex(rows.scales(layer_idx).subspan(row * groups, groups)).c_str());
      ++row;
    }
  }
}

const ToolUsage kUsage = {
    "gather",
    "Token ids in, the rows of every owned column out, one SHA-256 per layer; needs no service.",
    WithTableFlags({
        {"--packed-dir", "DIR", "packed files, which must be there for this rank",
         "those in --engram-dir, else its native tables"},
        {"--ids", "A,B,...", "token ids of one sequence"},
        {"--rows", "", "prints row numbers and bytes too"},
    })};

absl::Status Run(const ToolFlags& flags) {
  ASSIGN_OR_RETURN(const int64_t rank, flags.Int("--rank", 0));
  ASSIGN_OR_RETURN(const int64_t world, flags.Int("--world", 1));
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ParseIds(flags.Text("--ids")));
  TableSetOptions options;
  options.model_dir = flags.Text("--model-dir");
  options.engram_dir = flags.Text("--engram-dir");
  options.packed_dir = flags.Text("--packed-dir");
  options.rank = static_cast<int>(rank);
  options.world = static_cast<int>(world);
  if (options.model_dir.empty() || ids.empty()) {
    return absl::InvalidArgumentError("give --model-dir and --ids");
  }
  ASSIGN_OR_RETURN(const auto rows, LocalRows::Open(options));
  const SequenceView view{0, 0, ids, {}};
  RETURN_IF_ERROR(rows->Gather(std::span(&view, 1)));
  for (int i = 0; i < rows->tables().num_layers(); ++i) {
    Sha256 hash;
    hash.Update(rows->weights(i));
    hash.Update(rows->scales(i));
    printf("layer %d tier %s tokens %zu columns %zu sha256 %s\n",
           rows->tables().table(i).layer_id(), std::string(rows->tables().tier()).c_str(),
           ids.size(), rows->tables().columns().size(), Hex(hash.Finish()).c_str());
    if (flags.Has("--rows")) PrintRows(*rows, ids, i);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  return ToolMain(kUsage, argc, argv, Run);
}
