// A timer for what hardly ever happens to a connection. It is set and cleared with every request;
// doing so to a wait that ends earlier leaves that wait alone, which spares the system call and the
// thread that a cancelled wait wakes. When the wait ends it looks what is due, and waits on or
// rings. Owner: std::enable_shared_from_this, `owner_mutex()`, held by whoever calls anything here
// and while it rings. Brings Boost.Asio with it.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>

namespace twinspark::gateway {

template <class Owner>
class LazyTimer {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  LazyTimer(const boost::asio::any_io_executor& executor, void (Owner::*ring)())
      : timer_(executor), ring_(ring) {}

  // Rings once, at `due` instead of when it would have; `owner` holds this.
  void Set(Owner& owner, TimePoint due) {
    due_ = due;
    if (!is_waiting_ || timer_.expiry() > due) Wait(owner);
  }
  void Clear() { due_.reset(); }
  // Ends the wait, too.
  void Cancel() {
    due_.reset();
    is_waiting_ = false;
    timer_.cancel();
  }

 private:
  void Wait(Owner& owner) {
    is_waiting_ = true;
    timer_.expires_at(*due_);
    timer_.async_wait([this, weak = owner.weak_from_this()](const boost::system::error_code& ec) {
      const std::shared_ptr<Owner> held = weak.lock();
      if (ec || held == nullptr) return;
      const std::lock_guard<std::mutex> lock(held->owner_mutex());
      // A wait that ended just before the timer was set again, or cancelled, must not count.
      const TimePoint now = std::chrono::steady_clock::now();
      if (!is_waiting_ || timer_.expiry() > now) return;
      is_waiting_ = false;
      if (!due_.has_value()) return;
      if (*due_ > now) {
        Wait(*held);
        return;
      }
      due_.reset();
      ((*held).*ring_)();
    });
  }

  boost::asio::steady_timer timer_;
  void (Owner::*const ring_)();
  std::optional<TimePoint> due_;
  bool is_waiting_ = false;
};

}  // namespace twinspark::gateway
