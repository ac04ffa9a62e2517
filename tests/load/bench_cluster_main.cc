// bench_cluster: load on a running cluster, and what it cost. Latency percentiles, tokens per
// second, CPU per token and memory of every process. Run it after deploy/quickstart.sh; figures go
// into the README with hardware, date and command.
#include <algorithm>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "common/exit_codes.h"
#include "tests/load/cluster_probe.h"
#include "tests/load/load_generator.h"
#include "tests/load/process_stats.h"
#include "tests/load/run_dir.h"

namespace twinspark {
namespace {

constexpr char kUsage[] =
    "usage: bench_cluster [--url U] [--run-dir DIR] [--streams N | --rate R] [--seconds S] "
    "[--requests N] [--max-tokens N]\n"
    "                     [--temperature T] [--prompt-words N] [--mixed] [--disconnects SHARE] "
    "[--seed N] [--json]\n"
    "  --streams N      closed loop: N requests at any time (default 1)\n"
    "  --rate R         open loop: R arrivals per second\n"
    "  --run-dir DIR    the run folder of a local cluster: its gateway is asked, and its "
    "processes' CPU and\n"
    "                   memory are reported too\n"
    "  --url U          the gateway to ask (default: the run folder's, else "
    "http://127.0.0.1:8888)\n"
    "  --prompt-words N puts some N words before the question\n"
    "  --mixed          draws prompt, n, length, sampling, stops, logprobs, stream or not\n"
    "  --disconnects S  share of the requests whose client vanishes within 0.4 s\n"
    "Exit codes: 0 done; 1 a request failed, slots or pages were still in use 10 s after the last "
    "one,\n"
    "or memory grew (runs of a minute and more); 69 no cluster, 78 bad argument.\n";

constexpr double kUnusedSecondsMax = 10;
constexpr double kFlatFromSeconds = 60;  // shorter runs say nothing about memory

// The names of a round's parts for people, in the order of the table.
constexpr std::pair<const char*, const char*> kParts[] = {
    {"compute", "compute"},
    {"collectives", "all-reduce, with the wait for the other rank"},
    {"engram_wait", "row service"},
    {"transport", "gRPC, and what the other rank is behind"},
    {"gateway", "gateway, as far as compute does not hide it"},
};

const char* const kQuestions[] = {"tell me a story", "count from 1 to 30", "write a poem",
                                  "write a python loop that prints the numbers from 1 to 10",
                                  "tell me a joke"};

struct Arguments {
  LoadOptions load;
  std::string url;
  std::string run_dir;
  int64_t prompt_words = 0;
  bool json = false;
};

bool ParseOne(const std::string& flag, const std::string& value, Arguments& arguments) {
  LoadOptions& load = arguments.load;
  int64_t seed = 0;
  if (flag == "--url") return arguments.url = value, !value.empty();
  if (flag == "--run-dir") return arguments.run_dir = value, !value.empty();
  if (flag == "--streams") return absl::SimpleAtoi(value, &load.streams) && load.streams > 0;
  if (flag == "--rate") return absl::SimpleAtod(value, &load.rate) && load.rate > 0;
  if (flag == "--seconds") return absl::SimpleAtod(value, &load.seconds) && load.seconds > 0;
  if (flag == "--requests") return absl::SimpleAtoi(value, &load.requests_max);
  if (flag == "--max-tokens")
    return absl::SimpleAtoi(value, &load.max_tokens) && load.max_tokens > 0;
  if (flag == "--temperature") return absl::SimpleAtod(value, &load.temperature);
  if (flag == "--disconnects") return absl::SimpleAtod(value, &load.disconnect_share);
  if (flag == "--prompt-words") return absl::SimpleAtoi(value, &arguments.prompt_words);
  if (flag == "--seed")
    return absl::SimpleAtoi(value, &seed) && (load.seed = static_cast<uint64_t>(seed), true);
  return false;
}

// A lead of that many words, then the question.
std::string MakePrompt(const std::string& question, int64_t words) {
  std::string text;
  for (int64_t i = 0; i < words; ++i)
    absl::StrAppend(&text, i % 12 == 11 ? "day. " : i % 2 == 0 ? "the " : "sun ");
  return text + question;
}

boost::json::object Quantiles(std::vector<double> samples) {
  return {{"p50", Percentile(samples, 0.5)},
          {"p90", Percentile(samples, 0.9)},
          {"p99", Percentile(samples, 0.99)},
          {"n", samples.size()}};
}

double MeanMs(const std::vector<double>& samples) {
  double sum = 0;
  for (const double sample : samples)
    sum += sample;
  return samples.empty() ? 0 : sum / static_cast<double>(samples.size());
}

// Where the time of a round went, microseconds. The gateway's sum against what the client saw.
boost::json::object RoundReport(const RoundTimes& rounds, const LoadResult& result) {
  const double per_round = rounds.count > 0 ? 1e6 / rounds.count : 0;
  boost::json::object parts;
  double sum = 0;
  for (const auto& [part, seconds] : rounds.parts) {
    parts[part] = seconds * per_round;
    sum += seconds * per_round;
  }
  const double client_us = 1e3 * MeanMs(result.gap_ms);
  return {{"rounds", rounds.count},
          {"parts_us", parts},
          {"sum_us", sum},
          {"gateway_round_us", rounds.seconds * per_round},
          {"client_gap_us", client_us},
          {"remainder_us", client_us - sum},
          {"client_gaps", result.gap_ms.size()}};
}

boost::json::object Report(const LoadResult& result,
                           const std::vector<ProcessStats>& before,
                           const std::vector<ProcessStats>& after) {
  boost::json::object errors;
  for (const auto& [what, count] : result.errors)
    errors[what] = count;
  boost::json::object report = {
      {"wall_seconds", result.wall_seconds},
      {"requests_ok", result.requests_ok},
      {"hung_up", result.hung_up},
      {"errors", errors},
      {"prompt_tokens", result.prompt_tokens},
      {"completion_tokens", result.completion_tokens},
      {"tokens_per_second", static_cast<double>(result.completion_tokens) / result.wall_seconds},
      {"request_tokens_per_second", Quantiles(result.request_tok_s)},
      {"ttft_ms", Quantiles(result.ttft_ms)},
      {"itl_ms", Quantiles(result.itl_ms)},
  };
  boost::json::array processes;
  double rss = 0;
  for (size_t i = 0; i < after.size() && i < before.size(); ++i) {
    const double cpu = after[i].cpu_seconds - before[i].cpu_seconds;
    rss += after[i].rss_mib;
    processes.push_back(
        {{"name", after[i].name},
         {"cpu_seconds", cpu},
         {"cpu_us_per_token",
          cpu * 1e6 / static_cast<double>(std::max<int64_t>(result.completion_tokens, 1))},
         {"rss_mib", after[i].rss_mib}});
  }
  report["processes"] = processes;
  report["rss_mib_total"] = rss;
  return report;
}

double Number(const boost::json::value& value) {
  return value.to_number<double>();
}

void PrintRounds(const boost::json::object& report) {
  const double client_us = Number(report.at("client_gap_us"));
  if (Number(report.at("rounds")) == 0 || client_us == 0) return;
  const auto line = [&](const char* what, double us) {
    std::cout << absl::StrFormat("  %-48s %9.0f us %6.1f %%\n", what, us, 100 * us / client_us);
  };
  std::cout << absl::StrFormat("time per round, mean of %.0f rounds\n",
                               Number(report.at("rounds")));
  const auto& parts = report.at("parts_us").as_object();
  for (const auto& [part, name] : kParts) {
    if (parts.contains(part)) line(name, Number(parts.at(part)));
  }
  line("HTTP, client, rounds with others' prefill", Number(report.at("remainder_us")));
  line("= from event to event at the client", client_us);
}

void PrintMemory(const std::vector<MemoryWatch::Line>& lines) {
  for (const MemoryWatch::Line& line : lines) {
    std::cout << absl::StrFormat("%-18s MiB: first tenth %7.1f  middle %7.1f  end %7.1f%s\n",
                                 line.name, line.first_mib, line.middle_mib, line.last_mib,
                                 line.is_flat() ? "" : "  GREW");
  }
}

void Print(const boost::json::object& report) {
  std::cout << absl::StrFormat("%.0f requests in %.1f s, %.0f hung up, errors %s\n",
                               Number(report.at("requests_ok")), Number(report.at("wall_seconds")),
                               Number(report.at("hung_up")),
                               boost::json::serialize(report.at("errors")));
  std::cout << absl::StrFormat("%.0f tokens, %.1f tok/s together\n",
                               Number(report.at("completion_tokens")),
                               Number(report.at("tokens_per_second")));
  for (const char* name : {"request_tokens_per_second", "ttft_ms", "itl_ms"}) {
    const auto& quantiles = report.at(name).as_object();
    std::cout << absl::StrFormat("%-26s p50 %8.2f  p90 %8.2f  p99 %8.2f\n", name,
                                 Number(quantiles.at("p50")), Number(quantiles.at("p90")),
                                 Number(quantiles.at("p99")));
  }
  for (const boost::json::value& process : report.at("processes").as_array()) {
    std::cout << absl::StrFormat(
        "%-18s %8.2f s CPU  %8.1f us/token  %7.1f MiB\n",
        std::string(process.at("name").as_string().c_str()), Number(process.at("cpu_seconds")),
        Number(process.at("cpu_us_per_token")), Number(process.at("rss_mib")));
  }
  PrintRounds(report.at("round").as_object());
}

boost::json::array MemoryReport(const std::vector<MemoryWatch::Line>& lines) {
  boost::json::array report;
  for (const MemoryWatch::Line& line : lines) {
    report.push_back({{"name", line.name},
                      {"first_tenth_mib", line.first_mib},
                      {"middle_mib", line.middle_mib},
                      {"end_mib", line.last_mib},
                      {"flat", line.is_flat()}});
  }
  return report;
}

// The load between two looks at everything, then the verdict.
int Run(const Arguments& arguments, pid_t supervisor, const std::vector<ProcessStats>& before) {
  const std::string& url = arguments.load.url;
  const auto rounds_before = ReadRoundTimes(url);
  std::optional<MemoryWatch> memory;
  if (supervisor != 0) memory.emplace(supervisor, arguments.load.seconds);
  const auto result = RunLoad(arguments.load);
  std::vector<ProcessStats> after;
  if (supervisor != 0) after = ReadClusterStats(supervisor).value_or(std::vector<ProcessStats>());
  const auto in_use = WaitUntilUnused(url, kUnusedSecondsMax);
  const auto rounds_after = ReadRoundTimes(url);
  for (const absl::Status& status :
       {result.status(), rounds_before.status(), in_use.status(), rounds_after.status()}) {
    if (status.ok()) continue;
    std::cerr << "bench_cluster: " << status.message() << "\n";
    return kExitUnavailable;
  }
  const std::vector<MemoryWatch::Line> lines =
      memory ? memory->Finish() : std::vector<MemoryWatch::Line>();
  const bool all_flat = arguments.load.seconds < kFlatFromSeconds ||
                        std::all_of(lines.begin(), lines.end(),
                                    [](const MemoryWatch::Line& line) { return line.is_flat(); });
  boost::json::object report = Report(*result, before, after);
  report["round"] = RoundReport(rounds_after->Since(*rounds_before), *result);
  report["memory"] = MemoryReport(lines);
  report["in_use_after"] = in_use->text;
  report["nothing_in_use_after"] = in_use->nothing;
  if (arguments.json) {
    std::cout << boost::json::serialize(report) << "\n";
  } else {
    Print(report);
    PrintMemory(lines);
    std::cout << "in use after the last request: " << in_use->text << "\n";
  }
  const bool answered = result->errors.empty() && result->requests_ok > 0;
  return answered && in_use->nothing && all_flat ? kExitOk : 1;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      std::cout << kUsage;
      return 0;
    }
    if (flag == "--json") {
      arguments.json = true;
    } else if (flag == "--mixed") {
      arguments.load.mixed = true;
    } else if (i + 1 >= argc || !ParseOne(flag, argv[++i], arguments)) {
      std::cerr << "bench_cluster: bad argument '" << flag << "'\n" << kUsage;
      return kExitBadConfig;
    }
  }
  for (const char* question : kQuestions)
    arguments.load.prompts.push_back(MakePrompt(question, arguments.prompt_words));
  std::vector<ProcessStats> before;
  RunDir run;
  if (!arguments.run_dir.empty()) {
    const auto refuse = [](const absl::Status& status) {
      std::cerr << "bench_cluster: " << status.message() << "\n";
      return kExitUnavailable;
    };
    const auto read = ReadRunDir(arguments.run_dir);
    if (!read.ok()) return refuse(read.status());
    run = *read;
    auto stats = ReadClusterStats(run.supervisor);
    if (!stats.ok()) return refuse(stats.status());
    before = *stats;
    arguments.load.url = run.url;
  }
  if (!arguments.url.empty()) arguments.load.url = arguments.url;
  return Run(arguments, run.supervisor, before);
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
