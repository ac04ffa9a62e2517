#include "tests/load/cluster_probe.h"

#include <chrono>
#include <string_view>

#include <boost/json.hpp>
#include <curl/curl.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace twinspark {
namespace {

constexpr long kGetMsMax = 10000;
constexpr int kReadings = 10;
constexpr int64_t kPollMs = 50;

size_t AppendTo(char* data, size_t size, size_t count, void* text) {
  static_cast<std::string*>(text)->append(data, size * count);
  return size * count;
}

absl::StatusOr<std::string> Get(const std::string& url) {
  std::string text;
  CURL* curl = curl_easy_init();
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, kGetMsMax);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, AppendTo);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &text);
  const CURLcode code = curl_easy_perform(curl);
  curl_easy_cleanup(curl);
  if (code != CURLE_OK)
    return absl::UnavailableError(absl::StrCat(url, ": ", curl_easy_strerror(code)));
  return text;
}

// The value of `key="..."` in a series' labels.
std::string LabelOf(absl::string_view series, absl::string_view key) {
  const std::string start = absl::StrCat(key, "=\"");
  const size_t begin = series.find(start);
  if (begin == absl::string_view::npos) return "";
  const size_t value = begin + start.size();
  return std::string(series.substr(value, series.find('"', value) - value));
}

double NumberAt(const boost::json::value& json, const char* pointer) {
  boost::system::error_code error;
  const boost::json::value* found = json.find_pointer(pointer, error);
  return found != nullptr && found->is_number() ? found->to_number<double>() : -1;
}

}  // namespace

RoundTimes RoundTimes::Since(const RoundTimes& earlier) const {
  RoundTimes difference = *this;
  difference.count -= earlier.count;
  difference.seconds -= earlier.seconds;
  for (const auto& [part, time] : earlier.parts)
    difference.parts[part] -= time;
  return difference;
}

absl::StatusOr<RoundTimes> ReadRoundTimes(const std::string& url) {
  const absl::StatusOr<std::string> text = Get(url + "/metrics");
  if (!text.ok()) return text.status();
  RoundTimes times;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    const size_t space = line.rfind(' ');
    double value = 0;
    if (space == absl::string_view::npos || !absl::StartsWith(line, "dsv_step_") ||
        !absl::SimpleAtod(line.substr(space + 1), &value)) {
      continue;
    }
    const absl::string_view series = line.substr(0, space);
    if (LabelOf(series, "kind") != "round") continue;
    if (absl::StartsWith(series, "dsv_step_seconds_count")) times.count = value;
    if (absl::StartsWith(series, "dsv_step_seconds_sum")) times.seconds += value;
    if (absl::StartsWith(series, "dsv_step_part_seconds_total")) {
      times.parts[LabelOf(series, "part")] = value;
      if (LabelOf(series, "part") == "gateway") times.seconds += value;
    }
  }
  return times;
}

absl::StatusOr<InUse> WaitUntilUnused(const std::string& url, double seconds_max) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds_max);
  while (true) {
    const absl::StatusOr<std::string> text = Get(url + "/status");
    if (!text.ok()) return text.status();
    boost::system::error_code error;
    const boost::json::value status = boost::json::parse(*text, error);
    if (error) return absl::InternalError("/status is no JSON");
    double sum = 0;
    InUse in_use;
    const auto add = [&](const char* what, const boost::json::value& json, const char* pointer) {
      const double number = NumberAt(json, pointer);
      sum += number < 0 ? 1 : number;  // a count that is missing counts as one in use
      absl::StrAppend(&in_use.text, " ", what, " ", number);
    };
    in_use.text = "gateway:";
    add("slots", status, "/slots/used");
    add("pages", status, "/pages/used");
    add("waiting", status, "/requests/waiting");
    if (const auto* workers = status.find_pointer("/workers", error); workers != nullptr) {
      for (const boost::json::value& worker : workers->as_array()) {
        absl::StrAppend(&in_use.text, "; rank ", NumberAt(worker, "/rank"), ":");
        add("slots", worker, "/slots_used");
        add("pages", worker, "/pages_used");
      }
    }
    in_use.nothing = sum == 0;
    if (in_use.nothing || std::chrono::steady_clock::now() > end) return in_use;
    std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
  }
}

MemoryWatch::MemoryWatch(pid_t supervisor, double seconds)
    : supervisor_(supervisor), period_s_(seconds / kReadings), thread_([this] { Run(); }) {}

MemoryWatch::~MemoryWatch() {
  Finish();
}

void MemoryWatch::Run() {
  std::unique_lock lock(mutex_);
  const auto period = std::chrono::duration<double>(period_s_);
  while (!stopped_.wait_for(lock, period, [this] { return stop_; }))
    Read();
}

void MemoryWatch::Read() {
  auto stats = ReadClusterStats(supervisor_);
  if (stats.ok()) readings_.push_back(*std::move(stats));
}

std::vector<MemoryWatch::Line> MemoryWatch::Finish() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
    Read();
  }
  std::vector<Line> lines;
  if (readings_.empty()) return lines;
  const std::vector<ProcessStats>& middle = readings_[readings_.size() / 2];
  for (size_t i = 0; i < readings_.front().size(); ++i) {
    const ProcessStats& first = readings_.front()[i];
    if (i >= middle.size() || i >= readings_.back().size() || middle[i].pid != first.pid ||
        readings_.back()[i].pid != first.pid) {
      return {};
    }
    lines.push_back({first.name, first.rss_mib, middle[i].rss_mib, readings_.back()[i].rss_mib});
  }
  return lines;
}

}  // namespace twinspark
