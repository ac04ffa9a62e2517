// See table_watch.h.
#include "engram_service/service/table_watch.h"

namespace twinspark::engram {

TableWatch::TableWatch(EngramServiceImpl& service, std::chrono::milliseconds period)
    : service_(service), period_(period), thread_([this] { Run(); }) {}

TableWatch::~TableWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void TableWatch::Run() {
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, period_, [this] { return stop_; })) {
    lock.unlock();
    service_.CheckTables();
    lock.lock();
  }
}

}  // namespace twinspark::engram
