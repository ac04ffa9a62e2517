// Counters advance by the difference between two readings; a Reload starts a new Serving, whose
// readings start at zero.
#include "engram_service/service/engram_metrics.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "common/log.h"

namespace twinspark::engram {
namespace {

constexpr auto kPeriod = std::chrono::seconds(1);
constexpr int kPeriodsPerLine = 60;

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
    last_ = RowServerStats{};
  }
  const auto add = [this](const char* name, const char* help, uint64_t value, uint64_t before) {
    metrics_.Counter(name, help).Increment(static_cast<double>(value - before));
  };
  const GatherStats& e = now.engine;
  const GatherStats& b = last_.engine;
  add("dsv_engram_requests_total", "Requests taken from the rings of workers",
      now.sessions.requests, last_.sessions.requests);
  add("dsv_engram_tokens_total", "Tokens of those requests", now.sessions.tokens,
      last_.sessions.tokens);
  add("dsv_engram_refused_total", "Requests refused as malformed, stale or over a bound",
      now.sessions.refused, last_.sessions.refused);
  add("dsv_engram_lookups_total", "Rows wanted", e.rows, b.rows);
  add("dsv_engram_dead_tokens_total", "Tokens without rows", e.dead_tokens, b.dead_tokens);
  add("dsv_engram_deduplicated_total", "Rows whose block was already on its way",
      e.rows_deduplicated, b.rows_deduplicated);
  add("dsv_engram_reads_total", "Blocks read", e.reads, b.reads);
  add("dsv_engram_read_bytes_total", "Bytes read", e.read_bytes, b.read_bytes);
  add("dsv_engram_retries_total", "Reads repeated after an error", e.retries, b.retries);
  add("dsv_engram_check_failures_total", "Pages with a wrong checksum or identity",
      e.check_failures, b.check_failures);
  add("dsv_engram_data_errors_total", "Blocks given up and rows with invalid codes", e.data_errors,
      b.data_errors);
  add("dsv_engram_late_total", "Layers whose rows were not there at the deadline", e.timeouts,
      b.timeouts);
  add("dsv_engram_hints_total", "Hints of workers taken up: rows read ahead", now.sessions.hints,
      last_.sessions.hints);
  add("dsv_engram_dropped_hints_total", "Hints dropped under load", now.sessions.dropped_hints,
      last_.sessions.dropped_hints);
  for (size_t order = 2; order <= kMaxNgram; ++order) {
    const prometheus::Labels labels = {{"order", std::to_string(order)}};
    metrics_.Counter("dsv_engram_cache_hits_total", "N-grams found in the row cache", labels)
        .Increment(static_cast<double>(e.cache.hits[order] - b.cache.hits[order]));
    metrics_.Counter("dsv_engram_cache_misses_total", "N-grams that had to be read", labels)
        .Increment(static_cast<double>(e.cache.misses[order] - b.cache.misses[order]));
  }
  metrics_.Gauge("dsv_engram_cache_bytes", "Memory of the row cache")
      .Set(static_cast<double>(e.cache_bytes));
  metrics_.Gauge("dsv_engram_cache_entries", "N-grams in the row cache")
      .Set(static_cast<double>(e.cache_entries));
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
