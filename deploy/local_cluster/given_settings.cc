// See given_settings.h.
#include "deploy/local_cluster/given_settings.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>
#include <string_view>

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "common/api_keys.h"
#include "common/host_port.h"
#include "common/ids.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr int kPortMax = 65535;

// One value for all parts would be wrong, and the supervisor gives each its own.
constexpr const char* kSetPerPart[] = {
    "WORKERS",     "ENGRAM_ENDPOINTS", "WORKER_LISTEN", "ENGRAM_LISTEN", "ENGRAM_SOCKET",
    "ENGRAM_RANK", "ENGRAM_WORLD",     "PORT_FILE",     "LIFELINE_FD",   "RENDEZVOUS_TIMEOUT",
};
constexpr const char* kPaths[] = {"CONFIG", "API_KEY_FILE", "ENGRAM_DIR", "ENGRAM_PACKED_DIR",
                                  "OP_LOG_DIR"};

bool IsGiven(const Settings& settings, const char* key) {
  return settings.IsSet(key) && settings.Source(key) != "default";
}

absl::Status CheckMetricsAddress(const std::string& text, int tp) {
  ASSIGN_OR_RETURN(const HostPort address, ParseHostPort("METRICS_ADDR", text));
  if (address.port >= 1 && address.port + 2 * tp <= kPortMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("METRICS_ADDR='", text, "': expected a port from 1 to ", kPortMax - 2 * tp,
                   ": the gateway takes it, the other ", 2 * tp, " processes the ones after it"));
}

absl::Status CheckListenAddress(const std::string& text) {
  unsigned char bytes[sizeof(in6_addr)];
  if (inet_pton(AF_INET, text.c_str(), bytes) == 1 || inet_pton(AF_INET6, text.c_str(), bytes) == 1)
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("LISTEN_ADDR='", text, "': expected an IP address without a port"));
}

}  // namespace

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return path;
  const std::filesystem::path resolved = std::filesystem::weakly_canonical(absolute, error);
  return error ? absolute.string() : resolved.string();
}

absl::StatusOr<Settings> ReadGivenSettings() {
  return Settings::Parse(kEveryProgram, {}, [](const std::string& key) {
    const char* value = std::getenv(key.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

absl::Status CheckGivenSettings(const Settings& settings, int tp) {
  std::vector<std::string> refused;
  for (const char* key : kSetPerPart) {
    if (IsGiven(settings, key)) refused.emplace_back(key);
  }
  if (!refused.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        absl::StrJoin(refused, ", "), refused.size() == 1 ? " is" : " are",
        " set for each process by quickstart itself; unset it, or start the five programs by hand "
        "(README, \"On two machines\")"));
  }
  if (settings.IsSet("API_KEY_FILE")) {
    if (const auto keys = ReadApiKeys(AbsolutePath(settings.String("API_KEY_FILE"))); !keys.ok())
      return absl::InvalidArgumentError(absl::StrCat("API_KEY_FILE: ", keys.status().message()));
  }
  if (settings.IsSet("METRICS_ADDR"))
    RETURN_IF_ERROR(CheckMetricsAddress(settings.String("METRICS_ADDR"), tp));
  return CheckListenAddress(settings.String("LISTEN_ADDR"));
}

void PrepareEnvironment(const Settings& settings, const std::string& model_dir, bool smoke) {
  for (const char* key : kPaths) {
    if (settings.IsSet(key)) setenv(key, AbsolutePath(settings.String(key)).c_str(), 1);
  }
  setenv("MODEL_DIR", model_dir.c_str(), 1);
  const bool is_open = IsGiven(settings, "LISTEN_ADDR");
  setenv("LISTEN_ADDR", is_open ? settings.String("LISTEN_ADDR").c_str() : "127.0.0.1", 1);
  if (smoke && settings.IsSet("METRICS_ADDR")) {
    HostPort address = *ParseHostPort("METRICS_ADDR", settings.String("METRICS_ADDR"));
    address.port = 0;
    setenv("METRICS_ADDR", address.ToString().c_str(), 1);
  }
}

absl::StatusOr<SettingsInForce> ReadSettingsInForce() {
  ASSIGN_OR_RETURN(const Settings settings, ReadGivenSettings());
  SettingsInForce in_force;
  for (const SettingSpec& spec : SettingsTable()) {
    const std::string_view key = spec.key;
    const std::string value = settings.String(key);
    if (key == "PORT" || key == "MODEL_DIR" || value == spec.default_value) continue;
    // The values of the file are here one by one.
    if (key != "CONFIG") in_force[spec.key] = value;
  }
  if (settings.IsSet("API_KEY_FILE")) {
    ASSIGN_OR_RETURN(const std::vector<std::string> keys,
                     ReadApiKeys(settings.String("API_KEY_FILE")));
    // 32 bits find a change and do not give a key away.
    absl::StrAppend(&in_force["API_KEY_FILE"],
                    absl::StrFormat(" (content %08x)",
                                    static_cast<uint32_t>(Hash64(absl::StrJoin(keys, "\n")))));
  }
  return in_force;
}

std::vector<std::string> DifferentKeys(const SettingsInForce& a, const SettingsInForce& b) {
  std::set<std::string> different;
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    for (const auto& [key, value] : *one) {
      const auto found = other->find(key);
      if (found == other->end() || found->second != value) different.insert(key);
    }
  }
  return {different.begin(), different.end()};
}

absl::Status CheckPortIsFree(int port) {
  const char* host = std::getenv("LISTEN_ADDR");
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host, absl::StrCat(port).c_str(), &hints, &found) != 0)
    return absl::InvalidArgumentError(absl::StrCat("LISTEN_ADDR='", host, "' is no address"));
  const int probe = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, 0);
  const int yes = 1;  // as the gateway: connections that ended a moment ago do not hold a port
  setsockopt(probe, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  const bool is_free = bind(probe, found->ai_addr, found->ai_addrlen) == 0;
  const std::string why = std::strerror(errno);
  close(probe);
  freeaddrinfo(found);
  if (is_free) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("port ", port, " of ", host, ": ", why));
}

std::vector<std::string> MetricsFlags(const std::string& metrics_addr, int index) {
  const auto address = ParseHostPort("METRICS_ADDR", metrics_addr);
  if (!address.ok()) return {};
  HostPort own = *address;
  if (own.port != 0) own.port += index;
  return {"--metrics-addr", own.ToString()};
}

}  // namespace twinspark
