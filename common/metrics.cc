// See metrics.h. prometheus-cpp throws; its exceptions end here.
#include "common/metrics.h"

#include <exception>

#include <prometheus/exposer.h>
#include <prometheus/text_serializer.h>

#include "absl/strings/str_cat.h"

namespace twinspark {

Metrics::Metrics() : registry_(std::make_shared<prometheus::Registry>()) {}
Metrics::~Metrics() = default;

prometheus::Counter& Metrics::Counter(const std::string& name,
                                      const std::string& help,
                                      const prometheus::Labels& labels) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add(labels);
}

prometheus::Gauge& Metrics::Gauge(const std::string& name,
                                  const std::string& help,
                                  const prometheus::Labels& labels) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add(labels);
}

prometheus::Histogram& Metrics::Histogram(const std::string& name,
                                          const std::string& help,
                                          const std::vector<double>& buckets,
                                          const prometheus::Labels& labels) {
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add(labels, buckets);
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(registry_->Collect());
}

absl::Status Metrics::Expose(const std::string& address) {
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(address, 1);
    exposer_->RegisterCollectable(registry_);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("METRICS_ADDR='", address, "' cannot be bound: ", error.what()));
  }
  return absl::OkStatus();
}

}  // namespace twinspark
