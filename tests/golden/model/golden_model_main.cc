// golden_model --dir DIR [--tp N] [--chunk N] [--case NAME] [--threads N] [--rung N]
//              [--backend cpu|cuda]
// Every tensor of every case of a directory of model vectors: end to end, and every block alone
// from its stored inputs. Rules: the vectors' README; what is compared how: tensor_compare.h.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "common/status_macros.h"
#include "shard_worker/model/forward.h"
#include "shard_worker/model/sequence_state.h"
#include "tests/golden/golden_report.h"
#include "tests/golden/model/block_alone.h"
#include "tests/golden/model/golden_case.h"
#include "tests/golden/model/model_group.h"
#include "tests/golden/model/reference_ops.h"
#include "tests/golden/model/tensor_collector.h"
#include "tests/golden/model/tensor_compare.h"

namespace twinspark::golden {
namespace {

struct Arguments {
  std::string dir;
  std::string only;
  std::string backend = "cpu";
  int tp = 1;
  int64_t chunk = 0;  // 0 = whole
  int threads = 1;
  int rung = -1;  // only this one (Rungs); -1 = as near as each case needs
};

// How near to the published code a run is. Bounds of bf16 vectors were measured with its rounding
// places and with EXL3 matrices rounded to bf16; single rows behind a 4-bit quantiser can leave
// them for no other reason. So what the engine as it serves does not meet is looked at again one
// step nearer, and the line says so. Errors of logic show on every step; f32 vectors need only the
// first.
struct Rung {
  const char* name;
  ReferenceComparison reference;
};

// Runs cases of a directory with one model and compares; no printing.
class CaseRunner {
 public:
  static absl::StatusOr<std::unique_ptr<CaseRunner>> Load(const Arguments& arguments,
                                                          const Rung& rung,
                                                          GoldenDirectory& directory) {
    std::unique_ptr<CaseRunner> runner(new CaseRunner(arguments, directory));
    int64_t longest = 1;
    for (const GoldenCase& c : directory.cases())
      longest = std::max(longest, static_cast<int64_t>(c.ids.size()));
    ModelOptions options;
    options.world = arguments.tp;
    options.numerics = directory.is_f32() ? Numerics::kF32 : Numerics::kBf16;
    options.reference = rung.reference;
    options.limits.num_slots = 1;
    options.limits.num_pages = static_cast<int>(longest / 64 + 2);
    options.limits.max_step_rows = static_cast<int>(longest);
    options.limits.max_logits_rows = static_cast<int>(longest);
    ASSIGN_OR_RETURN(runner->group_, ModelGroup::Load(arguments.dir, options, arguments.threads));
    for (int rank = 0; rank < arguments.tp; ++rank)
      runner->collectors_.push_back(std::make_unique<TensorCollector>(
          runner->group_->rows(rank), runner->group_->model().config().engram_layer_ids));
    return runner;
  }

  // Everything the case stores, in one fixed order.
  absl::StatusOr<std::vector<Outcome>> Run(const GoldenCase& c) {
    outcomes_.clear();
    affected_.clear();
    RETURN_IF_ERROR(RunEndToEnd(c));
    RETURN_IF_ERROR(RunAlone(c));
    return std::move(outcomes_);
  }

  // What the directory holds for the case.
  int64_t NumPlanned(const GoldenCase& c) const {
    return static_cast<int64_t>(c.tensors.size() + (c.argmax.empty() ? 0 : 1) +
                                AloneItems(c).size());
  }

 private:
  // A tensor of a block alone, or of its Engram step alone.
  struct AloneItem {
    int layer = 0;
    bool engram = false;
    const ExpectedTensor* tensor = nullptr;
  };

  CaseRunner(const Arguments& arguments, GoldenDirectory& directory)
      : arguments_(arguments), directory_(directory) {}

  // Starts a fresh collection.
  void Observe() {
    for (int rank = 0; rank < group_->world(); ++rank) {
      TensorCollector& collector = *collectors_[static_cast<size_t>(rank)];
      collector.Clear();
      group_->model(rank).SetObserver(&collector);
    }
  }

  void StopObserving() {
    for (int rank = 0; rank < group_->world(); ++rank)
      group_->model(rank).SetObserver(nullptr);
  }

  // Embeddings of an image span: the stored aligner outputs and the learned delimiters.
  absl::Status AddImage(const GoldenCase& c, OpenSequence& open) {
    if (c.image.start < 0) return absl::OkStatus();
    const GoldenCase* holder = nullptr;
    for (const GoldenCase& other : directory_.cases())
      if (other.Find("vision.embeds") != nullptr && other.image.types == c.image.types)
        holder = &other;
    if (holder == nullptr)
      return absl::NotFoundError(absl::StrCat(c.name, ": no case stores vision.embeds"));
    ASSIGN_OR_RETURN(const Values embeds, directory_.ReadOptional(*holder, "vision.embeds"));
    ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                     Checkpoint::Open(arguments_.dir));
    int64_t next = 0;
    for (size_t i = 0; i < c.image.types.size(); ++i) {
      open.embedding_positions.push_back(c.image.start + static_cast<int64_t>(i));
      if (c.image.types[i] == 1) {
        if (next >= embeds.rows)
          return absl::InvalidArgumentError("more image tokens than vision.embeds");
        open.embeddings.insert(open.embeddings.end(), embeds.Row(next),
                               embeds.Row(next) + embeds.cols);
        ++next;
        continue;
      }
      const char* name = c.image.types[i] == 0   ? "image_start"
                         : c.image.types[i] == 2 ? "image_newline"
                                                 : "image_end";
      const StoredTensor* tensor = checkpoint->Find(name);
      if (tensor == nullptr || tensor->type != StoredType::kBf16)
        return absl::NotFoundError(absl::StrCat(name, " is missing or not BF16"));
      std::vector<Bf16> values(static_cast<size_t>(tensor->num_elements()));
      RETURN_IF_ERROR(checkpoint->Read(*tensor, 0, std::as_writable_bytes(std::span(values))));
      for (Bf16 value : values)
        open.embeddings.push_back(ToF32(value));
    }
    return absl::OkStatus();
  }

  const GoldenCase& ImageOwner(const GoldenCase& c) const {
    if (c.image.start >= 0) return c;
    for (const GoldenCase& other : directory_.cases())
      if (other.image.start >= 0 && absl::StartsWith(c.name, other.name + ".")) return other;
    return c;
  }

  absl::Status Open(const GoldenCase& c) {
    OpenSequence open;
    open.ids = c.ids;
    open.num_prompt_ids = static_cast<int64_t>(c.ids.size());
    open.image_mask = c.image_mask;
    RETURN_IF_ERROR(AddImage(ImageOwner(c), open));
    return group_->Open(open, static_cast<int64_t>(c.ids.size()));
  }

  absl::Status RunEndToEnd(const GoldenCase& c) {
    RETURN_IF_ERROR(Open(c));
    const int64_t end = static_cast<int64_t>(c.ids.size());
    const int64_t chunk = arguments_.chunk > 0 ? arguments_.chunk : std::max<int64_t>(1, end);
    const bool is_prefill = c.kind == "prefill";
    // Rows that are not stored are not observed, except that a draft needs the last one.
    const int64_t observed_from = is_prefill ? 0 : c.kind == "dspark" ? end - 1 : c.first_row;
    const int64_t prompt = std::min(c.prompt_tokens, observed_from);
    if (is_prefill) {
      Observe();
      RETURN_IF_ERROR(group_->Prefill(0, 0, end, chunk, false).status());
    } else {
      RETURN_IF_ERROR(group_->Prefill(0, 0, prompt, chunk, false).status());
      RETURN_IF_ERROR(group_->Prefill(0, prompt, observed_from, 1, false).status());
      Observe();
      RETURN_IF_ERROR(group_->Prefill(0, observed_from, end, 1, false).status());
    }
    drafts_.clear();
    confidences_.clear();
    if (c.kind == "dspark") RETURN_IF_ERROR(Draft(c));
    StopObserving();
    RETURN_IF_ERROR(group_->Close(0));
    return CompareCase(c);
  }

  absl::Status Draft(const GoldenCase& c) {
    const size_t block = static_cast<size_t>(group_->model().config().draft_block_size);
    std::vector<std::vector<int32_t>> drafts(static_cast<size_t>(group_->world()));
    std::vector<std::vector<float>> confidences(drafts.size());
    RETURN_IF_ERROR(group_->OnAllRanks([&](int rank, Model& model) -> absl::Status {
      const size_t r = static_cast<size_t>(rank);
      drafts[r].resize(block);
      confidences[r].resize(block);
      DraftRequest request;
      request.sequence = &model.slots()[0];
      request.position = static_cast<int64_t>(c.ids.size());
      request.anchor = c.anchor;
      return model.forward().Draft(std::span(&request, 1), drafts[r], confidences[r]);
    }));
    drafts_ = drafts[0];
    confidences_ = confidences[0];
    return absl::OkStatus();
  }

  // The observed tensor in the shape that the case stores; empty when nothing was observed.
  Values Observed(const GoldenCase& c, const std::string& name, const Values& want) const {
    const auto last_row = [](const Values& all) {
      Values row;
      row.rows = 1;
      row.cols = all.cols;
      if (all.rows > 0) row.data.assign(all.Row(all.rows - 1), all.Row(all.rows - 1) + all.cols);
      return row;
    };
    if (name == "dspark.conf") {
      return {confidences_, 1, static_cast<int64_t>(confidences_.size())};
    }
    if (name == "dspark.logits") {
      Values all;
      for (size_t k = 0; k < drafts_.size(); ++k) {
        const Values* row = collectors_[0]->Find(absl::StrCat("dspark.logits.", k));
        if (row == nullptr) return {};
        all.data.insert(all.data.end(), row->data.begin(), row->data.end());
        all.cols = row->cols;
        ++all.rows;
      }
      return all;
    }
    const Values* found = collectors_[0]->Find(name);
    if (found == nullptr) return {};
    Values got = *found;
    // Queries and attention outputs: every rank has its heads.
    if (group_->world() > 1 && (absl::EndsWith(name, ".q") || absl::EndsWith(name, ".o"))) {
      Values all;
      all.rows = got.rows;
      all.cols = got.cols * group_->world();
      for (int64_t r = 0; r < got.rows; ++r)
        for (const auto& collector : collectors_) {
          const float* row = collector->Find(name)->Row(r);
          all.data.insert(all.data.end(), row, row + got.cols);
        }
      got = std::move(all);
    }
    if (name == "dspark.main_hidden" || name == "dspark.main_x") return last_row(got);
    if (c.kind == "prefill" && got.rows > want.rows && want.rows == c.end_row - c.first_row) {
      got.data.erase(got.data.begin(), got.data.begin() + c.first_row * got.cols);
      got.data.resize(static_cast<size_t>(want.rows * got.cols));
      got.rows = want.rows;
    }
    // A vector is one row.
    if (want.rows == 1 && got.rows > 1 && got.cols == 1) std::swap(got.rows, got.cols);
    return got;
  }

  absl::Status CompareCase(const GoldenCase& c) {
    CompareContext context;
    context.is_f32 = directory_.is_f32();
    context.decisions_count = directory_.decisions_count();
    context.window = group_->model().config().sliding_window;
    if (c.kind == "dspark") context.drafts_differ = drafts_ != c.draft_ids;
    for (const ExpectedTensor& tensor : c.tensors)
      RETURN_IF_ERROR(CompareTensor(c, tensor, absl::StrCat(c.name, "/", tensor.name), context));
    if (c.argmax.empty()) return absl::OkStatus();
    context.drafts_differ = false;
    ASSIGN_OR_RETURN(const Values logits, directory_.ReadOptional(c, "logits"));
    const Values got = Observed(c, "logits", logits);
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < got.rows; ++r)
      ids.push_back(
          static_cast<int32_t>(std::max_element(got.Row(r), got.Row(r) + got.cols) - got.Row(r)));
    outcomes_.push_back(
        CompareChoices(c.name + "/argmax", ids, c.argmax, c.argmax_margin, logits, false, context));
    return absl::OkStatus();
  }

  absl::Status CompareTensor(const GoldenCase& c,
                             const ExpectedTensor& tensor,
                             const std::string& label,
                             CompareContext context) {
    ASSIGN_OR_RETURN(Outcome outcome, Compare(c, tensor, label, context));
    outcomes_.push_back(std::move(outcome));
    return absl::OkStatus();
  }

  absl::StatusOr<Outcome> Compare(const GoldenCase& c,
                                  const ExpectedTensor& tensor,
                                  const std::string& label,
                                  CompareContext context) {
    Outcome outcome;
    outcome.label = label;
    if (absl::StartsWith(tensor.name, "vision.")) {
      outcome.kind = Outcome::Kind::kSkip;
      outcome.detail = "no vision tower yet";
      return outcome;
    }
    outcome.kind = Outcome::Kind::kInfo;
    outcome.detail = "not compared";
    if (tensor.metric == "info") return outcome;
    ASSIGN_OR_RETURN(const Values want, directory_.Read(tensor));
    if (tensor.metric == "argmax_if_margin") return CompareDrafts(c, label, want, context);
    Values got = Observed(c, tensor.name, want);
    const std::string prefix = tensor.name.substr(0, tensor.name.find('.') + 1);
    const bool depends_on_drafts = tensor.name == "dspark.conf" || tensor.name == "dspark.logits";
    context.drafts_differ = context.drafts_differ && depends_on_drafts;
    if (tensor.metric == "rel_l2") {
      outcome.distance =
          Distance::Of(std::span<const float>(got.data), std::span<const float>(want.data));
      outcome.detail = "no bound";
      return outcome;
    }
    if (tensor.metric == "exact") {
      outcome.kind = Outcome::Kind::kExact;
      outcome.total = static_cast<int64_t>(want.data.size());
      outcome.differing = std::abs(static_cast<int64_t>(got.data.size()) - outcome.total);
      for (size_t i = 0; i < std::min(got.data.size(), want.data.size()); ++i)
        outcome.differing += got.data[i] != want.data[i] ? 1 : 0;
      return outcome;
    }
    if (tensor.metric == "row_rel_l2") {
      if (absl::EndsWith(tensor.name, "route.w")) {
        ASSIGN_OR_RETURN(const Values ids, directory_.ReadOptional(c, prefix + "route.ids"));
        if (!ids.empty()) got = InOrderOf(got, Observed(c, prefix + "route.ids", ids), ids);
      }
      return CompareRows(label, tensor, got, want, context);
    }
    if (tensor.metric == "set_if_margin") {
      ASSIGN_OR_RETURN(const Values gaps, directory_.ReadOptional(c, prefix + tensor.gap));
      ASSIGN_OR_RETURN(Values scores, directory_.ReadOptional(c, prefix + "score"));
      if (scores.empty())
        if (const Values* own = collectors_[0]->Find(prefix + "score"); own != nullptr)
          scores = *own;
      const int64_t first_token = want.rows == c.end_row - c.first_row ? c.first_row : 0;
      return CompareSets(label, tensor, got, want, gaps, scores, first_token,
                         TokensPerEntry(tensor.name), context, affected_);
    }
    outcome.kind = Outcome::Kind::kRecord;
    outcome.holds = false;
    outcome.detail = absl::StrCat("unknown metric ", tensor.metric);
    return outcome;
  }

  // Tokens behind one entry of L.sel (a compressed row) or L.cand (a block of them).
  int64_t TokensPerEntry(const std::string& name) const {
    const ModelConfig& config = group_->model().config();
    const bool is_candidates = absl::EndsWith(name, ".cand");
    if (name[0] != 'L' || (!is_candidates && !absl::EndsWith(name, ".sel"))) return 0;
    const size_t layer = static_cast<size_t>(std::atoi(name.c_str() + 1));
    if (layer >= config.layers.size()) return 0;
    return config.layers[layer].ratio * (is_candidates ? config.candidate_block_size : 1);
  }

  absl::StatusOr<Outcome> CompareDrafts(const GoldenCase& c,
                                        const std::string& label,
                                        const Values& want,
                                        const CompareContext& context) {
    std::vector<int32_t> ids = drafts_;
    ids.insert(ids.begin(), c.anchor);
    std::vector<int32_t> stored;
    for (float id : want.data)
      stored.push_back(static_cast<int32_t>(id));
    std::vector<double> margins = c.draft_margin;
    margins.insert(margins.begin(), HUGE_VAL);
    ASSIGN_OR_RETURN(Values logits, directory_.ReadOptional(c, "dspark.logits"));
    // Row i of the logits chose id i + 1.
    if (!logits.empty()) {
      logits.data.insert(logits.data.begin(), static_cast<size_t>(logits.cols), 0.0f);
      ++logits.rows;
    }
    return CompareChoices(label, ids, stored, margins, logits, true, context);
  }

  std::vector<AloneItem> AloneItems(const GoldenCase& c) const {
    std::vector<AloneItem> items;
    if (c.kind != "prefill" || (c.level != "full" && c.level != "mid")) return items;
    const ModelConfig& config = group_->model().config();
    for (int layer = 0; layer < config.num_layers; ++layer) {
      const bool has_inputs = HasBlockInputs(c, config, layer);
      const bool has_engram = config.layers[static_cast<size_t>(layer)].engram_module >= 0 &&
                              (layer == 0 || c.Find(absl::StrCat("L", layer - 1, ".S_out")));
      const std::string prefix = absl::StrCat("L", layer, ".");
      for (const ExpectedTensor& tensor : c.tensors) {
        if (!absl::StartsWith(tensor.name, prefix)) continue;
        const std::string name = tensor.name.substr(prefix.size());
        if (tensor.isolated_bound <= 0 && tensor.metric != "set_if_margin") continue;
        if (name == "S_in" || name == "pre_in") continue;  // what it starts from
        const bool is_engram = absl::StartsWith(name, "engram.");
        if (is_engram ? has_engram : has_inputs) items.push_back({layer, is_engram, &tensor});
      }
    }
    return items;
  }

  absl::Status RunAlone(const GoldenCase& c) {
    const std::vector<AloneItem> items = AloneItems(c);
    if (items.empty()) return absl::OkStatus();
    RETURN_IF_ERROR(Open(c));
    CompareContext context;
    context.is_f32 = directory_.is_f32();
    context.alone = true;
    for (size_t i = 0; i < items.size(); ++i) {
      const AloneItem& item = items[i];
      const bool is_first =
          i == 0 || items[i - 1].layer != item.layer || items[i - 1].engram != item.engram;
      if (is_first) {
        Observe();
        RETURN_IF_ERROR(group_->OnAllRanks([&](int, Model& model) {
          return RunBlockAlone(directory_, c, item.layer, item.engram, model);
        }));
      }
      RETURN_IF_ERROR(CompareTensor(
          c, *item.tensor, absl::StrCat(c.name, "/", item.tensor->name, " alone"), context));
    }
    StopObserving();
    return group_->Close(0);
  }

  const Arguments& arguments_;
  GoldenDirectory& directory_;
  std::unique_ptr<ModelGroup> group_;
  std::vector<std::unique_ptr<TensorCollector>> collectors_;
  std::vector<int32_t> drafts_;
  std::vector<float> confidences_;
  std::vector<Outcome> outcomes_;
  AffectedTokens affected_;
};

std::vector<Rung> Rungs(bool is_f32) {
  std::vector<Rung> rungs = {{"", {}}};
  if (is_f32) return rungs;
  rungs.push_back({" (reference weights)", {true, true, false, nullptr}});
  rungs.push_back({" (reference rounding)", {true, true, true, &ReferenceRoundingOps()}});
  return rungs;
}

absl::Status RunDirectory(const Arguments& arguments,
                          GoldenDirectory& directory,
                          GoldenReport& report) {
  const std::vector<Rung> rungs = Rungs(directory.is_f32());
  const bool is_there = std::any_of(directory.cases().begin(), directory.cases().end(),
                                    [&](const GoldenCase& c) { return c.name == arguments.only; });
  if (!arguments.only.empty() && !is_there) {
    return absl::NotFoundError(
        absl::StrCat("--case ", arguments.only, ": ", arguments.dir, " has no such case"));
  }
  std::vector<std::unique_ptr<CaseRunner>> runners(rungs.size());
  for (const GoldenCase& c : directory.cases()) {
    if (!arguments.only.empty() && c.name != arguments.only) continue;
    std::vector<Outcome> best;
    for (size_t r = 0; r < rungs.size(); ++r) {
      if (arguments.rung >= 0 && r != static_cast<size_t>(arguments.rung)) continue;
      if (runners[r] == nullptr) {
        ASSIGN_OR_RETURN(runners[r], CaseRunner::Load(arguments, rungs[r], directory));
      }
      ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, runners[r]->Run(c));
      bool all_ok = true;
      if (best.empty()) best = outcomes;
      for (size_t i = 0; i < best.size(); ++i) {
        if (!best[i].ok() && outcomes[i].Better(best[i])) {
          best[i] = outcomes[i];
          best[i].label += rungs[r].name;
        }
        all_ok = all_ok && best[i].ok();
      }
      if (all_ok) break;
    }
    report.Plan(
        runners[arguments.rung < 0 ? 0 : static_cast<size_t>(arguments.rung)]->NumPlanned(c));
    for (const Outcome& outcome : best)
      outcome.Report(report);
  }
  return absl::OkStatus();
}

int Run(const Arguments& arguments) {
  if (arguments.backend != "cpu")
    return CannotRun(absl::StrCat("backend ", arguments.backend, " is not in this build"));
  GoldenReport report;
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(arguments.dir);
  if (config.ok()) {
    const absl::Status split = CheckTensorParallel(*config, arguments.tp);
    if (!split.ok()) return CannotRun(std::string(split.message()));
  }
  absl::StatusOr<std::unique_ptr<GoldenDirectory>> directory = GoldenDirectory::Open(arguments.dir);
  absl::Status status = directory.status();
  if (status.ok()) status = RunDirectory(arguments, **directory, report);
  if (!status.ok()) report.Error(status.ToString());
  return report.Finish();
}

constexpr char kUsage[] =
    "usage: golden_model --dir DIR [--tp N] [--chunk N] [--case NAME] [--threads N] [--rung N] "
    "[--backend cpu|cuda]\n";

int Usage() {
  std::fputs(kUsage, stderr);
  return kExitFailed;
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  if (twinspark::golden::HelpWasAsked(argc, argv, twinspark::golden::kUsage)) return 0;
  twinspark::golden::Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 >= argc) return twinspark::golden::Usage();
    const std::string flag = argv[i];
    const std::string value = argv[i + 1];
    if (flag == "--dir") {
      arguments.dir = value;
    } else if (flag == "--case") {
      arguments.only = value;
    } else if (flag == "--tp") {
      arguments.tp = std::atoi(value.c_str());
    } else if (flag == "--chunk") {
      arguments.chunk = std::atoll(value.c_str());
    } else if (flag == "--threads") {
      arguments.threads = std::atoi(value.c_str());
    } else if (flag == "--rung") {
      arguments.rung = std::atoi(value.c_str());
    } else if (flag == "--backend") {
      arguments.backend = value;
    } else {
      return twinspark::golden::Usage();
    }
  }
  if (arguments.dir.empty() || arguments.tp < 1 || arguments.chunk < 0 || arguments.threads < 1 ||
      arguments.rung > 2)
    return twinspark::golden::Usage();
  return twinspark::golden::Run(arguments);
}
