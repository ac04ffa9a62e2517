// Counters advance by the difference between two readings; a Reload starts a new Serving, whose
// readings start at zero.
#include "engram_service/service/engram_metrics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>

#include "common/log.h"
#include "engram_service/service/drive_temperature.h"

namespace twinspark::engram {
namespace {

constexpr auto kPeriod = std::chrono::seconds(1);
constexpr int kPeriodsPerLine = 60;
constexpr double kNanosecond = 1e-9;
constexpr std::array<const char*, kNumClasses> kClassNames = {"decode", "prefill", "hint"};

double HitRate(const RowCacheStats& stats, size_t order) {
  const uint64_t all = stats.hits[order] + stats.misses[order];
  return all == 0 ? 0 : static_cast<double>(stats.hits[order]) / static_cast<double>(all);
}

}  // namespace

EngramMetrics::EngramMetrics(Metrics& metrics, const EngramServiceImpl& service)
    : metrics_(metrics), service_(service), thread_([this] { Run(); }) {}

EngramMetrics::~EngramMetrics() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void EngramMetrics::Run() {
  std::unique_lock lock(mutex_);
  for (int period = 1; !stop_; ++period) {
    Update();
    if (period % kPeriodsPerLine == 0) LogLine();
    stopped_.wait_for(lock, kPeriod, [this] { return stop_; });
  }
}

void EngramMetrics::Update() {
  std::string reason;
  metrics_.Gauge("dsv_engram_state", "0 starting, 1 ready, 2 degraded, 3 draining, 4 failed")
      .Set(static_cast<double>(service_.state(&reason)));
  const auto serving = service_.serving();
  if (serving == nullptr) return;
  const RowServerStats now = serving->server().stats();
  if (serving->epoch() != epoch_) {
    epoch_ = serving->epoch();
    last_values_.clear();
  }
  Add("dsv_engram_refused_total", "Requests refused as malformed, stale or over a bound",
      now.sessions.refused);
  Add("dsv_engram_data_errors_total", "Blocks given up and rows with invalid codes",
      now.engine.data_errors);
  Add("dsv_engram_hints_total", "Hints of workers taken up: rows read ahead", now.sessions.hints);
  Add("dsv_engram_dropped_hints_total", "Hints dropped under load", now.sessions.dropped_hints);
  UpdateMeters(*serving);
  UpdateTemperature(*serving);
  metrics_.Gauge("dsv_engram_cache_bytes", "Memory of the row cache")
      .Set(static_cast<double>(now.engine.cache_bytes));
  metrics_.Gauge("dsv_engram_cache_entries", "N-grams in the row cache")
      .Set(static_cast<double>(now.engine.cache_entries));
  metrics_.Counter("dsv_engram_rpc_gathers_total", "Gather calls over gRPC")
      .Increment(static_cast<double>(service_.rpc_gathers() - last_rpc_gathers_));
  UpdateScrub(serving->scrub());
  last_rpc_gathers_ = service_.rpc_gathers();
  metrics_.Counter("dsv_engram_table_changes_total", "Table files found changed on disk")
      .Increment(static_cast<double>(service_.table_changes() - last_table_changes_));
  last_table_changes_ = service_.table_changes();
  metrics_.Gauge("dsv_engram_attachments", "Workers attached to shared memory")
      .Set(static_cast<double>(now.attachments));
  metrics_.Gauge("dsv_engram_slab_bytes", "Shared memory of row slabs")
      .Set(static_cast<double>(now.slab_bytes));
  metrics_
      .Gauge("dsv_engram_info", "What the tables are read from and how",
             {{"tier", std::string(serving->tables().tier())},
              {"back_end", serving->server().reader_name()}})
      .Set(1);
  last_ = now;
}

void EngramMetrics::UpdateMeters(const Serving& serving) {
  const GatherMeters& meters = serving.server().meters();
  for (size_t c = 0; c < kNumClasses; ++c) {
    const ClassMeters& of_class = meters.classes[c];
    const prometheus::Labels labels = {{"class", kClassNames[c]}};
    Add("dsv_engram_requests_total", "Requests taken from the rings of workers",
        of_class.requests.get(), labels);
    Add("dsv_engram_tokens_total", "Tokens of those requests", of_class.tokens.get(), labels);
    Add("dsv_engram_dead_tokens_total", "Tokens without rows", of_class.dead_tokens.get(), labels);
    Add("dsv_engram_busy_total", "Requests and hints over the bound of their class",
        of_class.busy.get(), labels);
    Observe("dsv_engram_queue_seconds", "From a request's submission until it was taken",
            of_class.queue_ns, kNanosecond, labels);
    const auto& layer_ids = serving.tables().shape().layer_ids;
    for (size_t i = 0; i < layer_ids.size(); ++i) {
      UpdateLayerClass(meters.layers[i][c],
                       {{"class", kClassNames[c]}, {"layer", std::to_string(layer_ids[i])}});
    }
  }
  Observe("dsv_engram_read_seconds", "From a block handed to the drive until it was there",
          meters.read_ns, kNanosecond);
  Observe("dsv_engram_read_depth", "Reads on their way when more were handed over", meters.depth,
          1);
  Add("dsv_engram_overloads_total", "Times that overload began", meters.overloads.get());
  metrics_
      .Gauge("dsv_engram_overloaded",
             "1: a bulk request waited over 50 ms for its first row, in the last second")
      .Set(meters.overloaded(MonotonicNs()) ? 1 : 0);
  metrics_.Gauge("dsv_engram_reads_in_flight", "Reads on their way")
      .Set(static_cast<double>(meters.in_flight.get()));
}

void EngramMetrics::UpdateLayerClass(const LayerClassMeters& meters,
                                     const prometheus::Labels& labels) {
  Add("dsv_engram_lookups_total", "Rows wanted", meters.rows.get(), labels);
  Add("dsv_engram_deduplicated_total", "Rows whose block was already on its way",
      meters.rows_deduplicated.get(), labels);
  Add("dsv_engram_reads_total", "Blocks read", meters.reads.get(), labels);
  Add("dsv_engram_read_bytes_total", "Bytes read", meters.read_bytes.get(), labels);
  Add("dsv_engram_retries_total", "Reads repeated after an error", meters.retries.get(), labels);
  Add("dsv_engram_check_failures_total", "Pages with a wrong checksum or identity",
      meters.check_failures.get(), labels);
  Add("dsv_engram_late_total", "Layers whose rows were not there at the deadline",
      meters.timeouts.get(), labels);
  for (size_t order = 2; order <= kMaxNgram; ++order) {
    prometheus::Labels with_order = labels;
    with_order["order"] = std::to_string(order);
    Add("dsv_engram_cache_hits_total", "N-grams found in the row cache",
        meters.cache_hits[order].get(), with_order);
    Add("dsv_engram_cache_misses_total", "N-grams that had to be read",
        meters.cache_misses[order].get(), with_order);
  }
  Observe("dsv_engram_gather_seconds", "From a request taken until the layer's last row was there",
          meters.gather_ns, kNanosecond, labels);
}

// All tables of a service lie on one drive. Absent without a sensor.
void EngramMetrics::UpdateTemperature(const Serving& serving) {
  struct stat info;
  if (fstat(serving.tables().table(0).file(0).fd.get(), &info) != 0) return;
  const auto celsius = DriveTemperature(info.st_dev);
  if (!celsius) return;
  metrics_.Gauge("dsv_engram_drive_temperature_celsius", "Temperature of the tables' drive")
      .Set(*celsius);
}

void EngramMetrics::Add(const std::string& name,
                        const std::string& help,
                        uint64_t value,
                        const prometheus::Labels& labels) {
  std::vector<uint64_t>& last = last_values_[{name, labels}];
  last.resize(1);
  metrics_.Counter(name, help, labels).Increment(static_cast<double>(value - last[0]));
  last[0] = value;
}

void EngramMetrics::Observe(const std::string& name,
                            const std::string& help,
                            const Distribution& values,
                            double unit,
                            const prometheus::Labels& labels) {
  std::vector<double> bounds;
  for (const uint64_t bound : values.bounds())
    bounds.push_back(static_cast<double>(bound) * unit);
  const size_t buckets = values.counts().size();
  std::vector<uint64_t>& last = last_values_[{name, labels}];
  last.resize(buckets + 1);  // and the sum
  std::vector<double> increments;
  const auto advance = [&last](size_t i, uint64_t value) {
    return static_cast<double>(value - std::exchange(last[i], value));
  };
  for (size_t i = 0; i < buckets; ++i)
    increments.push_back(advance(i, values.counts()[i].get()));
  metrics_.Histogram(name, help, bounds, labels)
      .ObserveMultiple(increments, advance(buckets, values.sum()) * unit);
}

void EngramMetrics::UpdateScrub(const ScrubStats& scrub) {
  metrics_.Gauge("dsv_engram_scrub_findings", "Damaged pages and extents found while idle")
      .Set(static_cast<double>(scrub.findings));
  metrics_.Gauge("dsv_engram_scrub_progress", "Share of the packed tables checked in this pass")
      .Set(static_cast<double>(scrub.pages_done) /
           static_cast<double>(std::max<uint64_t>(1, scrub.pages_total)));
}

void EngramMetrics::LogLine() const {
  LOG_INFO << "rows requests=" << last_.sessions.requests << " tokens=" << last_.sessions.tokens
           << " rows=" << last_.engine.rows << " deduplicated=" << last_.engine.rows_deduplicated
           << " hit_rate_2=" << HitRate(last_.engine.cache, 2)
           << " hit_rate_3=" << HitRate(last_.engine.cache, 3)
           << " hit_rate_4=" << HitRate(last_.engine.cache, 4) << " reads=" << last_.engine.reads
           << " retries=" << last_.engine.retries << " errors=" << last_.engine.data_errors
           << " late=" << last_.engine.timeouts;
}

}  // namespace twinspark::engram
