// The service's metrics (operations specification 10, names dsv_engram_*), fed from its statistics
// once a second, and one log line a minute. Owns a thread.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/metrics.h"
#include "engram_service/service/engram_service.h"

namespace twinspark::engram {

class EngramMetrics {
 public:
  // Both outlive this object.
  EngramMetrics(Metrics& metrics, const EngramServiceImpl& service);
  ~EngramMetrics();
  EngramMetrics(const EngramMetrics&) = delete;
  EngramMetrics& operator=(const EngramMetrics&) = delete;

 private:
  void Run();
  void Update();
  void UpdateMeters(const Serving& serving);
  void UpdateLayerClass(const LayerClassMeters& meters, const prometheus::Labels& labels);
  void UpdateTemperature(const Serving& serving);
  // Advances a series that only grows to `value`.
  void Add(const std::string& name,
           const std::string& help,
           uint64_t value,
           const prometheus::Labels& labels = {});
  // `unit`: what one of the distribution's units is in the metric's.
  void Observe(const std::string& name,
               const std::string& help,
               const Distribution& values,
               double unit,
               const prometheus::Labels& labels = {});
  void UpdateScrub(const ScrubStats& scrub);
  void LogLine() const;

  Metrics& metrics_;
  const EngramServiceImpl& service_;
  uint64_t epoch_ = 0;  // of the Serving that `last_` belongs to
  RowServerStats last_;
  std::map<std::pair<std::string, prometheus::Labels>, std::vector<uint64_t>> last_values_;
  uint64_t last_rpc_gathers_ = 0;
  uint64_t last_table_changes_ = 0;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace twinspark::engram
