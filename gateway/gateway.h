// The composition root of the gateway: owns every part and knows the order in which they start and
// stop, and why. Start: text (a wrong model directory shows before anything listens), engine
// (workers load while nothing else happens), API, HTTP server last, since from then on requests
// come. Stop: the engine drains while HTTP still answers 503 and finishes its streams, then HTTP,
// then the engine's epoch. Used by main.cc only.
#pragma once

#include <cstdint>
#include <memory>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/metrics.h"
#include "common/settings.h"
#include "gateway/engine/engine.h"
#include "gateway/http/http_server.h"
#include "gateway/openai/openai_api.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {

class Gateway {
 public:
  explicit Gateway(const Settings& settings);
  ~Gateway();

  // kExitOk when everything listens; otherwise the reason is in the log.
  ExitCode Start();

  // Lets running streams finish for at most DRAIN_SECONDS, then stops.
  void Stop();

 private:
  ExitCode StartMetrics();
  ExitCode StartText();
  ExitCode StartEngine();
  ExitCode StartHttp();

  const Settings& settings_;
  SteadyClock clock_;
  Metrics metrics_;
  TextModel text_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<OpenAiApi> api_;
  std::unique_ptr<HttpServer> http_;
};

}  // namespace twinspark::gateway
