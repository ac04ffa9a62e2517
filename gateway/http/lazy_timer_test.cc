// Goal: a lazy timer rings once, when it was last set for, however often it was set or cleared
// before. Method: real waits of an io_context that the test runs itself; it asks what has rung by
// when nothing is waited for any more, never how fast.
#include "gateway/http/lazy_timer.h"

#include <vector>

#include <boost/asio/io_context.hpp>

#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class Owner : public std::enable_shared_from_this<Owner> {
 public:
  explicit Owner(boost::asio::io_context& io) : timer(io.get_executor(), &Owner::OnRing) {}
  std::mutex& owner_mutex() { return mutex_; }
  void SetAfter(int64_t ms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    due = Clock::now() + milliseconds(ms);
    timer.Set(*this, due);
  }

  LazyTimer<Owner> timer;
  Clock::time_point due;
  std::vector<Clock::time_point> rings;

 private:
  void OnRing() { rings.push_back(Clock::now()); }

  std::mutex mutex_;
};

TEST(LazyTimer, RingsOnceWhenLastSetFor) {
  boost::asio::io_context io;
  const auto owner = std::make_shared<Owner>(io);
  owner->SetAfter(1);
  owner->SetAfter(60'000);
  owner->SetAfter(30);  // later than the wait under way, earlier than what was due
  io.run();
  ASSERT_EQ(owner->rings.size(), 1u);
  EXPECT_GE(owner->rings[0], owner->due);
  // Earlier than the wait under way, which would keep run() for a minute.
  io.restart();
  owner->SetAfter(60'000);
  owner->SetAfter(5);
  io.run();
  ASSERT_EQ(owner->rings.size(), 2u);
  EXPECT_LT(owner->rings[1] - owner->due, milliseconds(30'000));
}

TEST(LazyTimer, IsSilentWhenClearedCancelledOrWithoutOwner) {
  boost::asio::io_context io;
  auto owner = std::make_shared<Owner>(io);
  owner->SetAfter(1);
  owner->timer.Clear();
  io.run();
  EXPECT_TRUE(owner->rings.empty());
  // Cleared and set again during the same wait.
  io.restart();
  owner->SetAfter(1);
  owner->timer.Clear();
  owner->SetAfter(5);
  io.run();
  EXPECT_EQ(owner->rings.size(), 1u);
  io.restart();
  owner->SetAfter(60'000);
  owner->timer.Cancel();
  io.run();  // returns: nothing waits
  EXPECT_EQ(owner->rings.size(), 1u);
  io.restart();
  owner->SetAfter(60'000);
  owner.reset();
  io.run();
}

}  // namespace
}  // namespace twinspark::gateway
