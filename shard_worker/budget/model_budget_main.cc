// model_budget: what a model takes, part by part, before anything is loaded. From the headers of a
// pack, or from a configuration and a K map when the pack is not at hand.
#include <iostream>
#include <optional>
#include <string>

#include <boost/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

#include "common/exit_codes.h"
#include "common/file_util.h"
#include "common/status_macros.h"
#include "shard_worker/budget/budget.h"

namespace twinspark {
namespace {

constexpr double kGiB = 1073741824.0;
constexpr size_t kMaxJsonBytes = size_t{16} << 20;
constexpr char kUsage[] =
    "usage: model_budget --model DIR [--k-map FILE] [--tp N] [--memory-gib G [--reserve-gib R] "
    "[--slots N]] [--json]\n"
    "  --model DIR      config.json, and the pack's headers where no K map is given\n"
    "  --k-map FILE     plan from config.json and this map; with a pack in DIR the two are "
    "compared too\n"
    "  --memory-gib G   what fits into G GiB of a rank, beside a reserve of R (default 8) and the "
    "rings of N sequences (default 8)\n"
    "Exit codes: 0 done, 1 pack and map differ, 65 bad model or map, 78 bad argument.\n";

struct Arguments {
  std::string model;
  std::string k_map;
  int tp = 2;
  double memory_gib = 0;
  double reserve_gib = 8;
  int slots = 8;
  bool json = false;
};

std::optional<Arguments> Parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      a.json = true;
      continue;
    }
    const std::string value = i + 1 < argc ? argv[++i] : "";
    const bool good =
        flag == "--model"         ? (a.model = value, !value.empty())
        : flag == "--k-map"       ? (a.k_map = value, !value.empty())
        : flag == "--tp"          ? absl::SimpleAtoi(value, &a.tp) && (a.tp == 1 || a.tp == 2)
        : flag == "--memory-gib"  ? absl::SimpleAtod(value, &a.memory_gib) && a.memory_gib > 0
        : flag == "--reserve-gib" ? absl::SimpleAtod(value, &a.reserve_gib) && a.reserve_gib >= 0
        : flag == "--slots"       ? absl::SimpleAtoi(value, &a.slots) && a.slots >= 0
                                  : false;
    if (!good) {
      std::cerr << "model_budget: bad argument '" << flag << " " << value << "'\n" << kUsage;
      return std::nullopt;
    }
  }
  if (a.model.empty()) {
    std::cerr << "model_budget: --model is missing\n" << kUsage;
    return std::nullopt;
  }
  return a;
}

void PrintTable(const Budget& budget, const Arguments& a, int64_t tokens) {
  std::cout << absl::StrFormat("%-32s %9s %8s %10s %12s %13s %13s\n", "part", "matrices", "natives",
                               "bits/w", "total GiB", "kit GiB/rank", "held GiB/rank");
  auto line = [](const BudgetPart& part) {
    std::cout << absl::StrFormat(
        "%-32s %9d %8d %10.3f %12.2f %13.2f %13.2f\n", part.name, part.num_matrices,
        part.num_natives, part.bits_per_weight(), static_cast<double>(part.total_bytes) / kGiB,
        static_cast<double>(part.kit_bytes) / kGiB, static_cast<double>(part.held_bytes) / kGiB);
  };
  for (const BudgetPart& part : budget.parts)
    line(part);
  line(budget.total);
  std::cout << absl::StrFormat("%d packed groups and %d native tensors, %d tensors; TP %d\n",
                               budget.total.num_matrices, budget.total.num_natives,
                               budget.num_tensors, budget.world);
  std::cout << absl::StrFormat(
      "KV: %.1f bytes per token and rank; rings %.2f MiB per sequence and rank\n",
      budget.kv_bytes_per_token, static_cast<double>(budget.ring_bytes_per_sequence) / (1 << 20));
  if (a.memory_gib > 0) {
    std::cout << absl::StrFormat(
        "in %.1f GiB per rank (%.1f reserved, %d sequences): %d tokens of KV state\n", a.memory_gib,
        a.reserve_gib, a.slots, tokens);
  }
}

boost::json::object PartJson(const BudgetPart& part) {
  return {{"part", part.name},
          {"matrices", part.num_matrices},
          {"natives", part.num_natives},
          {"bits_per_weight", part.bits_per_weight()},
          {"total_bytes", part.total_bytes},
          {"kit_bytes_per_rank", part.kit_bytes},
          {"held_bytes_per_rank", part.held_bytes}};
}

void PrintJson(const Budget& budget, const Arguments& a, int64_t tokens) {
  boost::json::array parts;
  for (const BudgetPart& part : budget.parts)
    parts.push_back(PartJson(part));
  boost::json::object report = {{"tp", budget.world},
                                {"parts", parts},
                                {"total", PartJson(budget.total)},
                                {"tensors", budget.num_tensors},
                                {"kv_bytes_per_token", budget.kv_bytes_per_token},
                                {"ring_bytes_per_sequence", budget.ring_bytes_per_sequence}};
  if (a.memory_gib > 0) report["kv_tokens_that_fit"] = tokens;
  std::cout << boost::json::serialize(report) << "\n";
}

absl::StatusOr<int> Run(const Arguments& a) {
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(a.model));
  RETURN_IF_ERROR(CheckTensorParallel(config, a.tp));
  ASSIGN_OR_RETURN(const std::string config_json,
                   ReadFile(a.model + "/config.json", kMaxJsonBytes));
  ASSIGN_OR_RETURN(const VisionShape vision, ParseVisionShape(config_json));
  absl::StatusOr<std::vector<InventoryItem>> items = InventoryFromHeaders(a.model);
  int code = kExitOk;
  if (!a.k_map.empty()) {
    ASSIGN_OR_RETURN(const std::string map_json, ReadFile(a.k_map, kMaxJsonBytes));
    ASSIGN_OR_RETURN(const KMap map, ParseKMap(map_json, a.k_map));
    if (items.ok()) {
      const std::vector<std::string> differences = CompareWithKMap(*items, map);
      for (const std::string& difference : differences)
        std::cerr << difference << "\n";
      if (!differences.empty()) code = 1;
    } else {
      items = InventoryFromKMap(config, vision, map);
    }
  }
  if (!items.ok()) return items.status();
  const Budget budget = ComputeBudget(config, *items, a.tp);
  const int64_t tokens = TokensThatFit(budget, static_cast<int64_t>(a.memory_gib * kGiB),
                                       static_cast<int64_t>(a.reserve_gib * kGiB), a.slots);
  (a.json ? PrintJson : PrintTable)(budget, a, tokens);
  return code;
}

int Main(int argc, char** argv) {
  if (argc == 2 && (std::string(argv[1]) == "--help" || std::string(argv[1]) == "-h")) {
    std::cout << kUsage;
    return kExitOk;
  }
  const std::optional<Arguments> arguments = Parse(argc, argv);
  if (!arguments.has_value()) return kExitBadConfig;
  const absl::StatusOr<int> code = Run(*arguments);
  if (!code.ok()) {
    std::cerr << "model_budget: " << code.status().message() << "\n";
    return kExitBadData;
  }
  return *code;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
