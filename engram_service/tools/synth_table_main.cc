// synth_table --out DIR --config CONFIG.json --mib N [--heads H] [--head-dim D] [--vocab V
// --classes C] A checkpoint directory with Engram tables of about N MiB whose bytes follow from the
// row number, for tests and benchmarks. CONFIG gives everything but the Engram keys (any model's
// config.json).
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "engram_service/store/synthetic.h"
#include "engram_service/tools/tool_flags.h"

namespace twinspark::engram {
namespace {

const ToolUsage kUsage = {
    "synth_table",
    "A checkpoint directory with two Engram tables whose bytes follow from the row number, for "
    "tests and benchmarks.",
    {
        {"--out", "DIR", "created"},
        {"--config", "FILE", "any model's config.json: everything but the Engram keys"},
        {"--mib", "N", "size of all tables", "64"},
        {"--heads", "H", "hash heads per n-gram", "8"},
        {"--head-dim", "D", "values of a row", "256"},
        {"--vocab", "V", "token ids", "129280"},
        {"--classes", "C", "compressed token ids", "99092"},
    }};

absl::Status Run(const ToolFlags& flags) {
  ASSIGN_OR_RETURN(const int64_t mib, flags.Int("--mib", 64));
  ASSIGN_OR_RETURN(const int64_t heads, flags.Int("--heads", 8));
  ASSIGN_OR_RETURN(const int64_t head_dim, flags.Int("--head-dim", 256));
  ASSIGN_OR_RETURN(const int64_t vocab, flags.Int("--vocab", 129280));
  ASSIGN_OR_RETURN(const int64_t classes, flags.Int("--classes", 99092));
  if (!flags.Has("--out") || !flags.Has("--config") || mib < 1) {
    return absl::InvalidArgumentError("give --out, --config and --mib");
  }
  ASSIGN_OR_RETURN(const std::string config, ReadFile(flags.Text("--config"), size_t{1} << 20));
  EngramShape shape;
  shape.layer_ids = {1, 4};
  shape.max_ngram_size = 4;
  shape.num_heads = static_cast<int>(heads);
  shape.head_dim = static_cast<int>(head_dim);
  shape.num_classes = static_cast<uint64_t>(classes);
  shape.vocab_size = static_cast<int32_t>(vocab);
  shape.pad_token_id = 2;
  const uint64_t row_bytes =
      static_cast<uint64_t>(shape.row_weight_bytes() + shape.row_scale_bytes());
  shape.bucket_start = (static_cast<uint64_t>(mib) << 20) /
                       (row_bytes * 2 * static_cast<uint64_t>(shape.num_columns()));
  RETURN_IF_ERROR(MakeDirectories(flags.Text("--out")));
  RETURN_IF_ERROR(WriteSyntheticModel(flags.Text("--out"), shape, config));
  printf("%s: 2 layers x %d columns x about %llu rows of %llu bytes\n", flags.Text("--out").c_str(),
         shape.num_columns(), static_cast<unsigned long long>(shape.bucket_start),
         static_cast<unsigned long long>(row_bytes));
  return absl::OkStatus();
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  return ToolMain(kUsage, argc, argv, Run);
}
