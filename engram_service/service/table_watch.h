// Looks once a second whether the table files on disk are still the ones that were checked, also
// when nobody asks for rows. Owns a thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engram_service/service/engram_service.h"

namespace twinspark::engram {

class TableWatch {
 public:
  // `service` outlives this object.
  explicit TableWatch(EngramServiceImpl& service,
                      std::chrono::milliseconds period = std::chrono::seconds(1));
  ~TableWatch();
  TableWatch(const TableWatch&) = delete;
  TableWatch& operator=(const TableWatch&) = delete;

 private:
  void Run();

  EngramServiceImpl& service_;
  const std::chrono::milliseconds period_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace twinspark::engram
