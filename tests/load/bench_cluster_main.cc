// bench_cluster: load on a running cluster, and what it cost. Latency percentiles, tokens per
// second, CPU per token and memory of every process. Run it after deploy/quickstart.sh; figures go
// into the README with hardware, date and command.
#include <iostream>
#include <string>

#include <boost/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "common/file_util.h"
#include "tests/load/load_generator.h"
#include "tests/load/process_stats.h"

namespace twinspark {
namespace {

constexpr char kUsage[] =
    "usage: bench_cluster [--url U] [--run-dir DIR] [--streams N | --rate R] [--seconds S] "
    "[--requests N] [--max-tokens N]\n"
    "                     [--temperature T] [--prompt-words N] [--disconnects SHARE] [--seed N] "
    "[--json]\n"
    "  --streams N      closed loop: N requests at any time (default 1)\n"
    "  --rate R         open loop: R arrivals per second\n"
    "  --run-dir DIR    the run folder of a local cluster: its processes' CPU and memory are "
    "reported too\n"
    "  --prompt-words N puts some N words before the question\n"
    "Exit codes: 0 done, 1 a request failed, 69 no cluster, 78 bad argument.\n";

const char* const kQuestions[] = {"tell me a story", "count from 1 to 30", "write a poem",
                                  "write a python loop that prints the numbers from 1 to 10",
                                  "tell me a joke"};

struct Arguments {
  LoadOptions load;
  std::string run_dir;
  int64_t prompt_words = 0;
  bool json = false;
};

bool ParseOne(const std::string& flag, const std::string& value, Arguments& arguments) {
  LoadOptions& load = arguments.load;
  int64_t seed = 0;
  if (flag == "--url") return load.url = value, !value.empty();
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

pid_t SupervisorOf(const std::string& run_dir) {
  const auto text = ReadFile(run_dir + "/cluster.json", 1 << 16);
  if (!text.ok()) return 0;
  boost::system::error_code error;
  const boost::json::value json = boost::json::parse(*text, error);
  const auto* pid = error ? nullptr : json.find_pointer("/supervisor_pid", error);
  return pid == nullptr ? 0 : pid->to_number<pid_t>();
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

void Print(const boost::json::object& report) {
  auto number = [](const boost::json::value& value) { return value.to_number<double>(); };
  std::cout << absl::StrFormat("%.0f requests in %.1f s, %.0f hung up, errors %s\n",
                               number(report.at("requests_ok")), number(report.at("wall_seconds")),
                               number(report.at("hung_up")),
                               boost::json::serialize(report.at("errors")));
  std::cout << absl::StrFormat("%.0f tokens, %.1f tok/s together\n",
                               number(report.at("completion_tokens")),
                               number(report.at("tokens_per_second")));
  for (const char* name : {"request_tokens_per_second", "ttft_ms", "itl_ms"}) {
    const auto& quantiles = report.at(name).as_object();
    std::cout << absl::StrFormat("%-26s p50 %8.2f  p90 %8.2f  p99 %8.2f\n", name,
                                 number(quantiles.at("p50")), number(quantiles.at("p90")),
                                 number(quantiles.at("p99")));
  }
  for (const boost::json::value& process : report.at("processes").as_array()) {
    std::cout << absl::StrFormat(
        "%-18s %8.2f s CPU  %8.1f us/token  %7.1f MiB\n",
        std::string(process.at("name").as_string().c_str()), number(process.at("cpu_seconds")),
        number(process.at("cpu_us_per_token")), number(process.at("rss_mib")));
  }
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
    } else if (i + 1 >= argc || !ParseOne(flag, argv[++i], arguments)) {
      std::cerr << "bench_cluster: bad argument '" << flag << "'\n" << kUsage;
      return 78;
    }
  }
  for (const char* question : kQuestions)
    arguments.load.prompts.push_back(MakePrompt(question, arguments.prompt_words));
  std::vector<ProcessStats> before;
  std::vector<ProcessStats> after;
  const pid_t supervisor = arguments.run_dir.empty() ? 0 : SupervisorOf(arguments.run_dir);
  if (!arguments.run_dir.empty()) {
    auto stats = ReadClusterStats(supervisor);
    if (!stats.ok()) {
      std::cerr << "bench_cluster: " << arguments.run_dir << ": " << stats.status().message()
                << "\n";
      return 69;
    }
    before = *stats;
  }
  const auto result = RunLoad(arguments.load);
  if (!result.ok()) {
    std::cerr << "bench_cluster: " << result.status().message() << "\n";
    return 69;
  }
  if (supervisor != 0) after = ReadClusterStats(supervisor).value_or(std::vector<ProcessStats>());
  const boost::json::object report = Report(*result, before, after);
  if (arguments.json) {
    std::cout << boost::json::serialize(report) << "\n";
  } else {
    Print(report);
  }
  return result->errors.empty() && result->requests_ok > 0 ? 0 : 1;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
