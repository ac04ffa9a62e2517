// Metrics of a process (prometheus-cpp): one Registry per program, made in its composition root and
// passed to the parts that count. Exposition: the gateway serves Text() on /metrics; METRICS_ADDR
// gives any program an endpoint of its own. Names: `dsv_` prefix, base units, `_total` on counters
// (operations specification 10); no request ids or user names in labels. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "absl/status/statusor.h"

namespace prometheus {
class Exposer;
}

namespace twinspark {

class Metrics {
 public:
  Metrics();
  ~Metrics();

  // Each returns the one series of (name, labels), made at the first call. References stay valid as
  // long as this object.
  prometheus::Counter& Counter(const std::string& name,
                               const std::string& help,
                               const prometheus::Labels& labels = {});
  prometheus::Gauge& Gauge(const std::string& name,
                           const std::string& help,
                           const prometheus::Labels& labels = {});
  prometheus::Histogram& Histogram(const std::string& name,
                                   const std::string& help,
                                   const std::vector<double>& buckets,
                                   const prometheus::Labels& labels = {});

  // Text exposition format 0.0.4 of every series.
  std::string Text() const;

  // Serves /metrics on host:port from threads of its own until destroyed. kUnavailable when the
  // port is taken.
  absl::Status Expose(const std::string& address);

 private:
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace twinspark
