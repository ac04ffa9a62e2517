// The listening side: binds, accepts, refuses what is too many, stops. What a client sends and gets
// is http_connection's.
#include "gateway/http/http_server.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <sys/resource.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/log.h"
#include "gateway/http/http_connection.h"

namespace twinspark::gateway {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr int kMaxRefusedConnections = 64;  // beyond max_connections, answered with 503
constexpr int64_t kAcceptRetryMs = 50;

class ServerImpl : public HttpServer {
 public:
  ServerImpl(HttpServerOptions options, HttpHandler handler)
      : core_(std::make_shared<HttpServerCore>(std::move(options))),
        acceptor_(asio::make_strand(core_->io)),
        retry_timer_(acceptor_.get_executor()) {
    core_->handler = std::move(handler);
  }
  ~ServerImpl() override { Stop(); }

  absl::Status Bind() {
    const HttpServerOptions& options = core_->options;
    error_code ec;
    const asio::ip::address address = asio::ip::make_address(options.address, ec);
    if (ec) {
      return absl::InvalidArgumentError(
          absl::StrCat("LISTEN_ADDR ", options.address, " is no IP address: ", ec.message()));
    }
    const tcp::endpoint endpoint(address, options.port);
    acceptor_.open(endpoint.protocol(), ec);
    if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
    if (!ec) acceptor_.bind(endpoint, ec);
    if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
    if (!ec) port_ = acceptor_.local_endpoint(ec).port();
    if (ec) {
      return absl::UnavailableError(absl::StrCat("cannot listen on ", options.address, ":",
                                                 options.port, ": ", ec.message(),
                                                 "; choose another PORT"));
    }
    return absl::OkStatus();
  }

  void Run() {
    Accept();
    for (int i = 0; i < core_->options.num_threads; ++i) {
      threads_.emplace_back([core = core_] { core->io.run(); });
    }
  }

  uint16_t port() const override { return port_; }
  int num_connections() const override { return core_->num_connections(); }
  int num_active() const override { return core_->num_active.load(); }

  void StopAccepting() override {
    core_->draining.store(true);
    asio::post(acceptor_.get_executor(), [this] {
      error_code ignored;
      acceptor_.close(ignored);
    });
    for (const std::shared_ptr<HttpConnection>& connection : Connections()) {
      connection->Post([connection] { connection->CloseIfIdle(); });
    }
  }

  void Stop() override {
    if (core_->stopped.exchange(true)) return;
    core_->io.stop();
    for (std::thread& thread : threads_)
      thread.join();
    // No HTTP thread is left: let every aborted operation give its connection back.
    error_code ignored;
    acceptor_.close(ignored);
    retry_timer_.cancel();
    for (const std::shared_ptr<HttpConnection>& connection : Connections())
      connection->TakeAndClose();
    core_->io.restart();
    core_->io.poll();
  }

 private:
  std::vector<std::shared_ptr<HttpConnection>> Connections() {
    std::vector<std::shared_ptr<HttpConnection>> result;
    const std::lock_guard<std::mutex> lock(core_->mutex);
    for (const auto& [pointer, weak] : core_->connections) {
      if (std::shared_ptr<HttpConnection> connection = weak.lock()) result.push_back(connection);
    }
    return result;
  }

  void Accept() {
    acceptor_.async_accept(asio::make_strand(core_->io),
                           [this](const error_code& ec, tcp::socket socket) {
                             if (core_->stopped.load() || !acceptor_.is_open()) return;
                             if (ec) {
                               RetryAccept(ec);
                               return;
                             }
                             Admit(std::move(socket));
                             Accept();
                           });
  }

  // Out of file descriptors, most likely: others must close first.
  void RetryAccept(const error_code& ec) {
    LOG_WARNING << "cannot accept a connection: " << ec.message();
    retry_timer_.expires_after(milliseconds(kAcceptRetryMs));
    retry_timer_.async_wait([this](const error_code& wait_error) {
      if (!wait_error && acceptor_.is_open()) Accept();
    });
  }

  void Admit(tcp::socket socket) {
    const int num = core_->num_connections();
    if (num >= core_->options.max_connections + kMaxRefusedConnections) return;
    const bool refuse = num >= core_->options.max_connections;
    const auto connection = std::make_shared<HttpConnection>(core_, std::move(socket));
    {
      const std::lock_guard<std::mutex> lock(core_->mutex);
      core_->connections.emplace(connection.get(), connection);
    }
    connection->Post([connection, refuse] { connection->Start(refuse); });
  }

  std::shared_ptr<HttpServerCore> core_;
  tcp::acceptor acceptor_;
  asio::steady_timer retry_timer_;
  std::vector<std::thread> threads_;
  uint16_t port_ = 0;
};

// A descriptor for every connection, and some for the rest of the process: many systems start
// programs with a soft limit of 1,024.
void RaiseFileLimit(int max_connections) {
  constexpr rlim_t kOtherFiles = 512;
  const rlim_t wanted = static_cast<rlim_t>(max_connections + kMaxRefusedConnections) + kOtherFiles;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < wanted) {
    LOG_WARNING << "file descriptors are limited to " << limit.rlim_cur << ", " << wanted
                << " are wanted for " << max_connections << " connections";
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpServerOptions options,
                                                              HttpHandler handler) {
  RaiseFileLimit(options.max_connections);
  auto server = std::make_unique<ServerImpl>(std::move(options), std::move(handler));
  const absl::Status status = server->Bind();
  if (!status.ok()) return status;
  server->Run();
  return server;
}

}  // namespace twinspark::gateway
