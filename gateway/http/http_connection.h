// One HttpConnection per client. It always has a read pending: in kReading the bytes go to the
// parser, in kHandling they are the next request (or, when the read ends, the sign that the client
// has gone). Writes go through one queue: at once where the socket takes them, together at the end
// of a task, else with one asynchronous write in flight.
//
// Whose it is: everything of a connection is touched under owner_mutex_ only. HTTP threads take it
// for each completion and posted task, in the order of the strand; another thread gets it with
// TryRun while no HTTP thread has it and no posted task waits.
//
// Ownership: pending asynchronous operations and the exchange hold the connection; every connection
// holds the HttpServerCore (io_context and counters), so that an exchange may outlive the server.
// Made by http_server.cc; brings Boost.Asio with it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"

#include "gateway/http/http_parser.h"
#include "gateway/http/http_server.h"
#include "gateway/http/lazy_timer.h"

namespace twinspark::gateway {

class HttpConnection;

// What the server and its connections share. Thread-safe but for what `mutex` guards.
struct HttpServerCore {
  explicit HttpServerCore(HttpServerOptions o) : options(std::move(o)), io(options.num_threads) {}

  const HttpServerOptions options;
  HttpHandler handler;
  boost::asio::io_context io;
  std::atomic<bool> stopped{false};
  std::atomic<bool> draining{false};
  std::atomic<int> num_active{0};
  std::atomic<size_t> num_pending_body_bytes{0};
  std::mutex mutex;
  absl::flat_hash_map<HttpConnection*, std::weak_ptr<HttpConnection>> connections;  // under mutex

  int num_connections() {
    const std::lock_guard<std::mutex> lock(mutex);
    return static_cast<int>(connections.size());
  }
};

// Post, TryRun, TakeAndClose and core are thread-safe, everything else belongs to its owner.
class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(std::shared_ptr<HttpServerCore> core, boost::asio::ip::tcp::socket socket)
      : core_(std::move(core)),
        socket_(std::move(socket)),
        deadline_(socket_.get_executor(), &HttpConnection::OnDeadline),
        keepalive_timer_(socket_.get_executor(), &HttpConnection::OnKeepalive),
        stall_timer_(socket_.get_executor(), &HttpConnection::OnStall),
        later_timer_(socket_.get_executor(), &HttpConnection::OnLater),
        parser_({core_->options.max_header_bytes, core_->options.max_body_bytes}) {}
  ~HttpConnection() {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    core_->connections.erase(this);
  }

  void Start(bool refuse);
  void Post(std::function<void()> task);
  bool TryRun(absl::FunctionRef<void()> task);
  void CloseIfIdle();
  void Close();
  // Close for a thread that does not own the connection.
  void TakeAndClose();
  HttpServerCore& core() { return *core_; }
  std::mutex& owner_mutex() { return owner_mutex_; }

  // Called by the exchange, by its owner.
  void Respond(const HttpRequest& request, const HttpResponse& response);
  void StartStream(const HttpRequest& request, const HttpResponse& head, std::string keepalive);
  void Write(std::string_view piece);
  void EndStream(bool close);
  void Abandon(bool is_started);
  void After(int64_t delay_ms, std::function<void()> task);
  bool is_closed() const { return phase_ == Phase::kClosed; }

 private:
  class Exchange;
  enum class Phase { kReading, kHandling, kLinger, kClosed };
  struct LaterTask {
    std::chrono::steady_clock::time_point due;
    std::function<void()> run;
  };

  void RunTask(absl::FunctionRef<void()> task);
  void Read();
  void OnBytes(std::string_view bytes);
  void Advance();
  void Handle();
  void RefuseRequest(int status, std::string_view message);
  void CountBody(size_t num_bytes);
  void UncountBody();
  void SetDeadline(int64_t delay_ms);
  void OnDeadline();
  void Queue(std::string bytes);
  void Flush();
  std::vector<boost::asio::const_buffer> UnsentPieces() const;
  bool Sent(size_t num_bytes);
  void WaitAndWrite();
  void OnDrained();
  void OnKeepalive();
  void OnStall();
  void OnLater();
  void WaitForLater();
  std::string Head(const HttpRequest& request, const HttpResponse& response, bool is_stream);
  void ClientGone(std::string_view why);

  std::shared_ptr<HttpServerCore> core_;
  std::mutex owner_mutex_;
  std::atomic<int> num_posted_{0};  // tasks of Post that have not run
  boost::asio::ip::tcp::socket socket_;
  LazyTimer<HttpConnection> deadline_;         // of a request that is read, or does not come
  LazyTimer<HttpConnection> keepalive_timer_;  // of a stream
  LazyTimer<HttpConnection> stall_timer_;      // of a write
  LazyTimer<HttpConnection> later_timer_;
  std::vector<LaterTask> later_;  // of the request that is handled
  HttpParser parser_;
  std::array<char, 16 << 10> read_buffer_;

  Phase phase_ = Phase::kReading;
  HttpParser::State deadline_state_ = HttpParser::State::kComplete;  // what the deadline is for
  bool deadline_is_idle_ = false;
  bool sent_continue_ = false;
  bool closes_after_ = false;     // the answer in progress ends the connection
  bool answer_complete_ = false;  // every byte of the answer is queued
  bool is_chunked_ = false;
  bool lingers_ = false;
  std::string keepalive_;
  std::chrono::steady_clock::time_point last_write_;
  std::weak_ptr<Exchange> exchange_;

  size_t num_counted_ = 0;  // body bytes of this request in num_pending_body_bytes

  std::deque<std::string> queue_;
  size_t front_written_ = 0;
  size_t num_unsent_ = 0;
  bool is_writing_ = false;    // waits for the socket to take more
  bool is_gathering_ = false;  // a task runs: what it writes leaves at its end
};

}  // namespace twinspark::gateway
