// The settings that a cluster gets from the environment of `up` and from the file that CONFIG
// names. Paths are relative to the caller's folder. Errors are kInvalidArgument and name the
// setting. Not thread-safe: changes the environment.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/settings.h"

namespace twinspark {

using SettingsInForce = std::map<std::string, std::string>;  // key > value

std::string AbsolutePath(const std::string& path);

// Every setting of every program, from this process's environment and CONFIG.
absl::StatusOr<Settings> ReadGivenSettings();

// Refuses what each part must be told on its own (kSetPerPart) and what cannot start: no readable
// key file, a bad address or METRICS_ADDR.
absl::Status CheckGivenSettings(const Settings& settings, int tp);

// Makes the environment what the parts shall inherit: absolute paths, `model_dir` for all of them,
// 127.0.0.1 unless LISTEN_ADDR was given, port 0 of METRICS_ADDR for a smoke test beside another.
void PrepareEnvironment(const Settings& settings, const std::string& model_dir, bool smoke);

// What differs from the defaults in the prepared environment; the key file with a digest of its
// content, so that changed keys are another value. Without PORT and MODEL_DIR.
absl::StatusOr<SettingsInForce> ReadSettingsInForce();

// Keys whose values differ.
std::vector<std::string> DifferentKeys(const SettingsInForce& a, const SettingsInForce& b);

// kUnavailable when somebody else listens on this port of LISTEN_ADDR (of the prepared
// environment).
absl::Status CheckPortIsFree(int port);

// `--metrics-addr` for a part, or nothing when METRICS_ADDR is unset: the gateway (index 0) has the
// port that was given, the others (row service 1 + 2 rank, worker 2 + 2 rank) the ones after it.
std::vector<std::string> MetricsFlags(const std::string& metrics_addr, int index);

}  // namespace twinspark
