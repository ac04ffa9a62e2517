// HTTP/1.1 server of the gateway: accepts connections, reads requests within bounds of size and
// time, hands them to one handler and carries the answer back, whole or as a stream. Notices at
// once when a client goes, also while nothing is written. Knows nothing of JSON or models;
// gateway/openai gives it a handler, main starts and stops it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

#include "common/limits.h"
#include "gateway/http/http_message.h"

namespace twinspark::gateway {

// One request and the way back to its client. Everything but Post and TryRun may be called only on
// the connection's executor: inside the handler, in tasks given to Post, TryRun or After, and in
// OnGone's callback. Those never run concurrently for one connection.
class HttpExchange {
 public:
  // Dropping an exchange that was not answered answers 500; dropping one in mid-stream closes the
  // connection.
  virtual ~HttpExchange() = default;

  virtual HttpRequest& request() = 0;

  // Thread-safe. Runs `task` on the connection's executor, in order; not at all once the server has
  // been stopped.
  virtual void Post(std::function<void()> task) = 0;
  // Runs `task` as part of the connection's executor, but at once and on the calling thread, if the
  // connection has nothing else to do; false: it does, and `task` is to be posted. Spares the
  // wake-up of a thread. For tasks that take microseconds: the connection's own thread may wait for
  // them. Thread-safe, but not to be called on the connection's executor.
  virtual bool TryRun(absl::FunctionRef<void()> task) = 0;
  // Runs `task` after so many milliseconds unless the answer has left or the connection is gone by
  // then.
  virtual void After(int64_t delay_ms, std::function<void()> task) = 0;
  // Called once if the client goes, or reads too slowly, before the answer is complete.
  virtual void OnGone(std::function<void()> callback) = 0;

  // A complete answer.
  virtual void Respond(HttpResponse response) = 0;

  // A stream: head (its body is sent as first piece), pieces, end. While nothing is written for
  // limits::kSseKeepaliveMs, `keepalive` is sent (empty: nothing).
  virtual void StartStream(HttpResponse head, std::string keepalive) = 0;
  virtual void Write(std::string_view piece) = 0;
  // `close`: the connection is closed afterwards even if the client would keep it.
  virtual void EndStream(bool close) = 0;

  // An answer has been started (Respond or StartStream).
  virtual bool is_started() const = 0;
  virtual bool is_gone() const = 0;
};

using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;

struct HttpServerOptions {
  std::string address = "0.0.0.0";
  uint16_t port = 0;  // 0: a free one
  int num_threads = 2;
  std::string server_name = "twinspark";
  // Body of the errors that the server itself answers (400, 408, 413, 431, 503).
  std::function<std::string(int status, std::string_view message)> error_body;

  size_t max_header_bytes = limits::kMaxHeaderBytes;
  size_t max_body_bytes = limits::kMaxBodyBytes;
  size_t max_pending_body_bytes = 256u << 20;         // of all requests that are being received
  size_t max_unsent_bytes = limits::kMaxUnsentBytes;  // of a stream
  int max_connections = limits::kMaxConnections;
  int64_t header_read_ms = limits::kHeaderReadMsMax;
  int64_t body_read_ms = limits::kBodyReadMsMax;
  int64_t idle_ms = 120000;        // between requests of one connection
  int64_t write_stall_ms = 10000;  // without a byte taken by a client that has some to take
  int64_t keepalive_ms = limits::kSseKeepaliveMs;
};

// Thread-safe. Destroying it stops it.
class HttpServer {
 public:
  // Binds and starts. UNAVAILABLE names the address when it is taken.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpServerOptions options,
                                                           HttpHandler handler);
  virtual ~HttpServer() = default;

  virtual uint16_t port() const = 0;
  virtual int num_connections() const = 0;
  // Requests handed to the handler whose answer is not complete.
  virtual int num_active() const = 0;
  // No new connections; idle ones are closed, running answers go on.
  virtual void StopAccepting() = 0;
  // Closes everything and joins the threads. Pending tasks are dropped.
  virtual void Stop() = 0;
};

}  // namespace twinspark::gateway
