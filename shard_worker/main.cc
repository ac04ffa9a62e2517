// shard_worker: one rank of the model. Settings, then ShardWorker until it wants to end. Exit
// codes: 0 after a drain, 65 wrong or damaged model, 71 device error, 75 not enough memory, 78 bad
// setting or taken port, 130 when whoever started it is gone or at a second stop signal.
#include <chrono>
#include <optional>
#include <string>
#include <thread>

#include <unistd.h>

#include "common/exit_codes.h"
#include "common/lifeline.h"
#include "common/log.h"
#include "common/settings.h"
#include "common/signals.h"
#include "shard_worker/shard_worker.h"

namespace twinspark {
namespace {

// Replies that tell the caller why get this long to leave.
constexpr auto kLastWords = std::chrono::milliseconds(100);

int Run(const Settings& settings) {
  InitLog("shard_worker", settings.String("LOG_LEVEL"));
  LOG_INFO << "settings given: " << settings.DescribeGiven();
  const Lifeline lifeline(static_cast<int>(settings.Int("LIFELINE_FD")));
  ShardWorker worker(settings);
  if (const absl::Status started = worker.Start(); !started.ok()) {
    LOG_ERROR << "cannot start: " << started.message();
    return kExitBadConfig;
  }
  std::thread([&worker] {
    const int number = WaitForStopSignal();
    ExitOnNextStopSignal();
    worker.Drain("signal " + std::to_string(number));
  }).detach();
  const int exit_code = worker.Wait();
  std::this_thread::sleep_for(kLastWords);
  LOG_INFO << "exit code=" << exit_code;
  // A load or a hung step may still hold threads: nothing of theirs needs an orderly end.
  _exit(exit_code);
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  twinspark::BlockStopSignals();
  const auto settings = twinspark::Settings::FromMain(twinspark::kShardWorker, argc, argv);
  if (!settings.ok()) return twinspark::kExitBadConfig;
  if (!settings->has_value()) return twinspark::kExitOk;
  return twinspark::Run(**settings);
}
