// CHECK macros: broken invariants of ours stop the process with the values that broke them, in
// release builds too. Debian 12's Abseil has no absl/log, so the spellings of absl/log/check.h are
// provided here. Errors caused from outside (clients, peers, disks, settings) are absl::Status,
// never CHECK.
#pragma once

#include <sstream>
#include <string>

namespace twinspark::internal {

// Prints "FILE:LINE check failed: TEXT VALUES" with one write to stderr, then aborts.
[[noreturn]] void CheckFailed(const char* file,
                              int line,
                              const char* text,
                              const std::string& values);

// Collects what the caller streams after a CHECK; its destructor does not return.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* text)
      : file_(file), line_(line), text_(text) {}
  [[noreturn]] ~CheckFailure() { CheckFailed(file_, line_, text_, stream_.str()); }
  CheckFailure(const CheckFailure&) = delete;
  CheckFailure& operator=(const CheckFailure&) = delete;
  std::ostream& stream() { return stream_; }

 private:
  const char* file_;
  int line_;
  const char* text_;
  std::ostringstream stream_;
};

}  // namespace twinspark::internal

#define CHECK(condition) \
  while (!(condition))   \
  [[unlikely]] ::twinspark::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

#define TWINSPARK_CHECK_OP(a, b, op)                                                               \
  while (!((a)op(b)))                                                                              \
  [[unlikely]] ::twinspark::internal::CheckFailure(__FILE__, __LINE__, #a " " #op " " #b).stream() \
      << "(" << (a) << " vs " << (b) << ") "

#define CHECK_EQ(a, b) TWINSPARK_CHECK_OP(a, b, ==)
#define CHECK_NE(a, b) TWINSPARK_CHECK_OP(a, b, !=)
#define CHECK_LT(a, b) TWINSPARK_CHECK_OP(a, b, <)
#define CHECK_LE(a, b) TWINSPARK_CHECK_OP(a, b, <=)
#define CHECK_GT(a, b) TWINSPARK_CHECK_OP(a, b, >)
#define CHECK_GE(a, b) TWINSPARK_CHECK_OP(a, b, >=)

#ifdef TWINSPARK_SANITIZER
#define DCHECK(condition) CHECK(condition)
#else
#define DCHECK(condition)       \
  while (false && !(condition)) \
  ::twinspark::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()
#endif
