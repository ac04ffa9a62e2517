// gateway: the OpenAI-compatible server. Reads settings, starts the Gateway, waits for a stop
// signal. Exit codes: 0 after a drain, 64 builds or digests differ, 65 unreadable model directory,
// 69 a worker or row service that never came, 78 bad setting or taken port.
#include "absl/synchronization/mutex.h"

#include "common/build_info.h"
#include "common/exit_codes.h"
#include "common/lifeline.h"
#include "common/log.h"
#include "common/settings.h"
#include "common/signals.h"
#include "gateway/gateway.h"

namespace {

int Run(const twinspark::Settings& settings) {
  twinspark::InitLog("gateway", settings.String("LOG_LEVEL"));
  LOG_INFO << "starting build=\"" << twinspark::BuildId() << "\"";
  LOG_INFO << "settings given: " << settings.DescribeGiven();
  const twinspark::Lifeline lifeline(static_cast<int>(settings.Int("LIFELINE_FD")));
  twinspark::gateway::Gateway gateway(settings);
  if (const twinspark::ExitCode code = gateway.Start(); code != twinspark::kExitOk) return code;
  twinspark::WaitForStopSignal();
  twinspark::ExitOnNextStopSignal();
  gateway.Stop();
  return twinspark::kExitOk;
}

}  // namespace

int main(int argc, char** argv) {
  // Debian's Abseil keeps a graph of gRPC's locks at run time: 3 % of this process's CPU.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  twinspark::BlockStopSignals();
  const auto settings = twinspark::Settings::FromMain(twinspark::kGateway, argc, argv);
  if (!settings.ok()) return twinspark::kExitBadConfig;
  if (!settings->has_value()) return twinspark::kExitOk;
  return Run(**settings);
}
