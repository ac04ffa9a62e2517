// One line per event on stderr: time, level, program, message. Messages are `what key=value
// key=value`, so that one can grep a request id or an epoch across processes. A line is written
// with one system call, so lines of threads never mix. Thread-safe.
//
//   LOG_INFO << "epoch ready epoch=" << epoch << " world=" << world;
#pragma once

#include <sstream>
#include <string_view>

namespace twinspark {

enum class LogLevel : int { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

// Call once at start. `level` is the text of LOG_LEVEL; an unknown one counts as info and is said
// in the log.
void InitLog(std::string_view program, std::string_view level);
bool LogEnabled(LogLevel level);

// Builds one line; written when it goes out of scope. Newlines in the text become spaces.
class LogLine {
 public:
  explicit LogLine(LogLevel level) : level_(level) {}
  ~LogLine();
  LogLine(const LogLine&) = delete;
  LogLine& operator=(const LogLine&) = delete;
  template <class T>
  LogLine& operator<<(const T& value) {
    stream_ << value;
    return *this;
  }

 private:
  LogLevel level_;
  std::ostringstream stream_;
};

}  // namespace twinspark

#define TWINSPARK_LOG(level)             \
  if (!::twinspark::LogEnabled(level)) { \
  } else                                 \
    ::twinspark::LogLine(level)
#define LOG_DEBUG TWINSPARK_LOG(::twinspark::LogLevel::kDebug)
#define LOG_INFO TWINSPARK_LOG(::twinspark::LogLevel::kInfo)
#define LOG_WARNING TWINSPARK_LOG(::twinspark::LogLevel::kWarning)
#define LOG_ERROR TWINSPARK_LOG(::twinspark::LogLevel::kError)
