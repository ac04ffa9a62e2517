// See log.h. The level and the program's name are the only process-wide state we keep: a log has
// one sink by nature.
#include "common/log.h"

#include <atomic>
#include <cstdio>
#include <ctime>
#include <string>

#include <unistd.h>

#include "common/clock.h"

namespace twinspark {
namespace {

std::atomic<int> g_level{static_cast<int>(LogLevel::kInfo)};
char g_program[32] = "-";

constexpr const char* kNames[] = {"DEBUG", "INFO", "WARN", "ERROR"};

}  // namespace

void InitLog(std::string_view program, std::string_view level) {
  std::snprintf(g_program, sizeof(g_program), "%.*s", static_cast<int>(program.size()),
                program.data());
  constexpr std::string_view kLevels[] = {"debug", "info", "warning", "error"};
  for (int i = 0; i < 4; ++i) {
    if (level == kLevels[i]) {
      g_level.store(i);
      return;
    }
  }
  LOG_WARNING << "unknown LOG_LEVEL='" << level
              << "', using info; expected debug, info, warning or error";
}

bool LogEnabled(LogLevel level) {
  return static_cast<int>(level) >= g_level.load(std::memory_order_relaxed);
}

LogLine::~LogLine() {
  const int64_t now_us = UnixTimeUs();
  const std::time_t seconds = now_us / 1000000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char time_text[32];
  const size_t length = std::strftime(time_text, sizeof(time_text), "%Y-%m-%dT%H:%M:%S", &utc);
  char head[96];
  std::snprintf(head, sizeof(head), "%.*s.%03dZ %s %s ", static_cast<int>(length), time_text,
                static_cast<int>(now_us / 1000 % 1000), kNames[static_cast<int>(level_)],
                g_program);
  std::string line = head + stream_.str();
  for (char& c : line) {
    if (c == '\n') c = ' ';
  }
  line += '\n';
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace twinspark
