#include "gateway/http/http_connection.h"

#include <algorithm>
#include <ctime>
#include <functional>
#include <iterator>

#include <boost/asio/post.hpp>
#include <netinet/tcp.h>

#include "absl/strings/str_cat.h"

#include "common/log.h"

namespace twinspark::gateway {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr size_t kPiecesPerWrite = 16;
// Bytes that a client may send ahead of the answer it waits for (pipelining).
constexpr size_t kMaxAheadBytes = 256 << 10;
// After an error answer the rest of the request is read and thrown away for so long, because
// closing with unread bytes makes the kernel discard the answer.
constexpr int64_t kLingerMs = 2000;
// Bytes that the kernel takes for a client whose window is closed. Left alone it takes megabytes,
// and a client that never reads would not be noticed before its request has run to its end.
constexpr int kMaxNotSentBytes = 16 << 10;
using NotSentLowWater = asio::detail::socket_option::integer<IPPROTO_TCP, TCP_NOTSENT_LOWAT>;

std::string HttpDate() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[64];
  return {text, std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

}  // namespace

class HttpConnection::Exchange : public HttpExchange,
                                 public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<HttpConnection> connection, HttpRequest request)
      : connection_(std::move(connection)), request_(std::move(request)) {
    connection_->core().num_active.fetch_add(1);
  }
  ~Exchange() override {
    if (is_complete_ || is_gone_) return;
    connection_->core().num_active.fetch_sub(1);
    // The destructor may run on any thread, and under the lock of the connection.
    connection_->Post(
        [connection = connection_, is_started = is_started_] { connection->Abandon(is_started); });
  }

  HttpRequest& request() override { return request_; }
  void Post(std::function<void()> task) override { connection_->Post(std::move(task)); }
  bool TryRun(absl::FunctionRef<void()> task) override { return connection_->TryRun(task); }
  void After(int64_t delay_ms, std::function<void()> task) override {
    connection_->After(delay_ms, std::move(task));
  }
  void OnGone(std::function<void()> callback) override { on_gone_ = std::move(callback); }
  void Respond(HttpResponse response) override {
    if (is_started_ || is_gone_) return;
    is_started_ = true;
    Complete();
    connection_->Respond(request_, response);
  }
  void StartStream(HttpResponse head, std::string keepalive) override {
    if (is_started_ || is_gone_) return;
    is_started_ = true;
    connection_->StartStream(request_, head, std::move(keepalive));
  }
  void Write(std::string_view piece) override {
    if (is_started_ && !is_complete_ && !is_gone_) connection_->Write(piece);
  }
  void EndStream(bool close) override {
    if (!is_started_ || is_complete_ || is_gone_) return;
    Complete();
    connection_->EndStream(close);
  }
  bool is_started() const override { return is_started_; }
  bool is_gone() const override { return is_gone_; }

  // By the connection: the client left. The callback may drop the last reference to this.
  void ClientGone() {
    if (is_complete_ || is_gone_) return;
    is_gone_ = true;
    connection_->core().num_active.fetch_sub(1);
    const std::function<void()> callback = std::exchange(on_gone_, nullptr);
    if (callback != nullptr) callback();
  }

 private:
  void Complete() {
    is_complete_ = true;
    on_gone_ = nullptr;
    connection_->core().num_active.fetch_sub(1);
  }

  std::shared_ptr<HttpConnection> connection_;
  HttpRequest request_;
  std::function<void()> on_gone_;
  bool is_started_ = false;
  bool is_complete_ = false;
  bool is_gone_ = false;
};

void HttpConnection::Start(bool refuse) {
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  socket_.set_option(NotSentLowWater(kMaxNotSentBytes), ignored);
  socket_.non_blocking(true, ignored);
  Read();
  if (refuse) {
    RefuseRequest(503, "Too many connections.");
  } else {
    Advance();
  }
}

void HttpConnection::Post(std::function<void()> task) {
  if (core_->stopped.load()) return;
  num_posted_.fetch_add(1);
  asio::post(socket_.get_executor(), [self = shared_from_this(), task = std::move(task)] {
    const std::lock_guard<std::mutex> lock(self->owner_mutex_);
    if (!self->core_->stopped.load()) self->RunTask(task);
    self->num_posted_.fetch_sub(1);
  });
}

// What was posted before comes first.
bool HttpConnection::TryRun(absl::FunctionRef<void()> task) {
  const std::unique_lock<std::mutex> lock(owner_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || num_posted_.load() > 0 || core_->stopped.load()) return false;
  RunTask(task);
  return true;
}

void HttpConnection::RunTask(absl::FunctionRef<void()> task) {
  is_gathering_ = true;
  task();
  is_gathering_ = false;
  Flush();
}

void HttpConnection::After(int64_t delay_ms, std::function<void()> task) {
  later_.push_back({std::chrono::steady_clock::now() + milliseconds(delay_ms), std::move(task)});
  WaitForLater();
}

void HttpConnection::WaitForLater() {
  if (later_.empty()) return;
  const auto first = std::min_element(later_.begin(), later_.end(),
                                      [](const auto& a, const auto& b) { return a.due < b.due; });
  later_timer_.Set(*this, first->due);
}

void HttpConnection::OnLater() {
  const auto now = std::chrono::steady_clock::now();
  const auto is_due = [&](const LaterTask& task) { return task.due <= now; };
  const auto first_due = std::stable_partition(later_.begin(), later_.end(), std::not_fn(is_due));
  std::vector<LaterTask> due(std::make_move_iterator(first_due),
                             std::make_move_iterator(later_.end()));
  later_.erase(first_due, later_.end());
  WaitForLater();
  for (const LaterTask& task : due) {
    if (!is_closed() && !core_->stopped.load()) RunTask(task.run);
  }
}

void HttpConnection::Read() {
  socket_.async_read_some(asio::buffer(read_buffer_),
                          [self = shared_from_this()](const error_code& ec, size_t n) {
                            const std::lock_guard<std::mutex> lock(self->owner_mutex_);
                            if (self->phase_ == Phase::kClosed) return;
                            if (ec) {
                              self->ClientGone(ec.message());
                              return;
                            }
                            self->OnBytes({self->read_buffer_.data(), n});
                            if (self->phase_ != Phase::kClosed) self->Read();
                          });
}

void HttpConnection::OnBytes(std::string_view bytes) {
  if (phase_ == Phase::kLinger) return;
  parser_.Feed(bytes);
  if (phase_ == Phase::kReading) {
    if (parser_.state() == HttpParser::State::kBody) CountBody(bytes.size());
    if (phase_ == Phase::kReading) Advance();
  } else if (parser_.num_buffered() > kMaxAheadBytes) {
    ClientGone("too many bytes sent ahead of an answer");
  }
}

// Many large bodies at once are a question of memory, whatever each of them may be.
void HttpConnection::CountBody(size_t num_bytes) {
  num_counted_ += num_bytes;
  const size_t total = core_->num_pending_body_bytes.fetch_add(num_bytes) + num_bytes;
  if (total > core_->options.max_pending_body_bytes) {
    RefuseRequest(503, "Too many large requests at once.");
  }
}

void HttpConnection::UncountBody() {
  core_->num_pending_body_bytes.fetch_sub(std::exchange(num_counted_, 0));
}

// In kReading: acts on what the parser has.
void HttpConnection::Advance() {
  switch (parser_.state()) {
    case HttpParser::State::kComplete:
      Handle();
      return;
    case HttpParser::State::kError:
      RefuseRequest(parser_.error_status(), parser_.error_message());
      return;
    case HttpParser::State::kBody:
      if (parser_.ExpectsContinue() && !sent_continue_) {
        sent_continue_ = true;
        Queue("HTTP/1.1 100 Continue\r\n\r\n");
      }
      if (deadline_state_ != HttpParser::State::kBody) {
        deadline_state_ = HttpParser::State::kBody;
        deadline_is_idle_ = false;
        SetDeadline(core_->options.body_read_ms);
      }
      return;
    case HttpParser::State::kHeader:
      if (deadline_state_ != HttpParser::State::kHeader || deadline_is_idle_ != parser_.IsIdle()) {
        deadline_state_ = HttpParser::State::kHeader;
        deadline_is_idle_ = parser_.IsIdle();
        SetDeadline(deadline_is_idle_ ? core_->options.idle_ms : core_->options.header_read_ms);
      }
      return;
  }
}

void HttpConnection::Handle() {
  phase_ = Phase::kHandling;
  UncountBody();
  deadline_.Clear();
  HttpRequest request = parser_.TakeRequest();
  closes_after_ = !request.keep_alive || core_->draining.load();
  answer_complete_ = false;
  const auto exchange = std::make_shared<Exchange>(shared_from_this(), std::move(request));
  exchange_ = exchange;
  core_->handler(exchange);
}

// Answers without the handler and ends the connection.
void HttpConnection::RefuseRequest(int status, std::string_view message) {
  phase_ = Phase::kHandling;
  UncountBody();
  deadline_.Clear();
  closes_after_ = true;
  lingers_ = true;
  HttpResponse response;
  response.status = status;
  if (core_->options.error_body != nullptr) {
    response.headers.emplace_back("Content-Type", "application/json");
    response.body = core_->options.error_body(status, message);
  }
  Respond(HttpRequest(), response);
}

void HttpConnection::SetDeadline(int64_t delay_ms) {
  deadline_.Set(*this, std::chrono::steady_clock::now() + milliseconds(delay_ms));
}

void HttpConnection::OnDeadline() {
  if (phase_ == Phase::kReading) {
    if (deadline_is_idle_) {
      Close();
    } else {
      RefuseRequest(408, deadline_state_ == HttpParser::State::kBody
                             ? "The request body did not arrive in time."
                             : "The request header did not arrive in time.");
    }
  } else if (phase_ == Phase::kLinger) {
    Close();
  }
}

std::string HttpConnection::Head(const HttpRequest& request,
                                 const HttpResponse& response,
                                 bool is_stream) {
  std::string head = absl::StrCat("HTTP/1.1 ", response.status, " ",
                                  std::string(HttpReason(response.status)), "\r\n");
  for (const auto& [name, value] : response.headers) {
    absl::StrAppend(&head, name, ": ", value, "\r\n");
  }
  is_chunked_ = is_stream && request.is_http_1_1;
  if (is_chunked_) {
    head.append("Transfer-Encoding: chunked\r\n");
  } else if (is_stream) {
    closes_after_ = true;  // HTTP/1.0: the end of the connection is the end of the body
  } else {
    absl::StrAppend(&head, "Content-Length: ", response.body.size(), "\r\n");
  }
  absl::StrAppend(&head, "Date: ", HttpDate(), "\r\nServer: ", core_->options.server_name,
                  "\r\nConnection: ", closes_after_ ? "close" : "keep-alive", "\r\n\r\n");
  return head;
}

void HttpConnection::Respond(const HttpRequest& request, const HttpResponse& response) {
  if (phase_ != Phase::kHandling) return;
  std::string bytes = Head(request, response, /*is_stream=*/false);
  if (request.method != "HEAD") bytes.append(response.body);
  answer_complete_ = true;
  Queue(std::move(bytes));
}

void HttpConnection::StartStream(const HttpRequest& request,
                                 const HttpResponse& head,
                                 std::string keepalive) {
  if (phase_ != Phase::kHandling) return;
  Queue(Head(request, head, /*is_stream=*/true));
  if (!head.body.empty()) Write(head.body);
  keepalive_ = std::move(keepalive);
  if (!keepalive_.empty()) {
    last_write_ = std::chrono::steady_clock::now();
    OnKeepalive();
  }
}

// Sends the keep-alive text if nothing was written for the period, and waits for the next time.
void HttpConnection::OnKeepalive() {
  if (phase_ != Phase::kHandling || answer_complete_ || keepalive_.empty()) return;
  const milliseconds period(core_->options.keepalive_ms);
  if (std::chrono::steady_clock::now() - last_write_ >= period) Write(keepalive_);
  keepalive_timer_.Set(*this, last_write_ + period);
}

void HttpConnection::Write(std::string_view piece) {
  if (phase_ != Phase::kHandling || piece.empty()) return;
  last_write_ = std::chrono::steady_clock::now();
  if (num_unsent_ + piece.size() > core_->options.max_unsent_bytes) {
    ClientGone("it reads too slowly");
    return;
  }
  std::string bytes;
  if (is_chunked_) {
    absl::StrAppend(&bytes, absl::Hex(piece.size()), "\r\n");
    bytes.append(piece);
    bytes.append("\r\n");
  } else {
    bytes.assign(piece);
  }
  Queue(std::move(bytes));
}

void HttpConnection::EndStream(bool close) {
  if (phase_ != Phase::kHandling) return;
  keepalive_.clear();
  keepalive_timer_.Clear();
  if (close) closes_after_ = true;
  answer_complete_ = true;
  if (is_chunked_) {
    Queue("0\r\n\r\n");
  } else if (queue_.empty()) {
    OnDrained();
  }
}

// The exchange was dropped before its answer was complete.
void HttpConnection::Abandon(bool is_started) {
  if (phase_ != Phase::kHandling || answer_complete_) return;
  LOG_ERROR << "an HTTP request was dropped without a complete answer";
  if (is_started) {
    Close();
  } else {
    RefuseRequest(500, "The request was dropped.");
  }
}

void HttpConnection::Queue(std::string bytes) {
  num_unsent_ += bytes.size();
  queue_.push_back(std::move(bytes));
  Flush();
}

// Hands the queue to the kernel, which takes small pieces at once: no turn of the io_context, and
// no other thread, for an event of a stream. What it does not take now waits for the socket.
void HttpConnection::Flush() {
  while (!is_writing_ && !is_gathering_ && !queue_.empty() && phase_ != Phase::kClosed) {
    error_code ec;
    const size_t n = socket_.write_some(UnsentPieces(), ec);
    if (ec == asio::error::would_block || ec == asio::error::try_again) {
      WaitAndWrite();
    } else if (ec) {
      ClientGone(ec.message());
    } else if (Sent(n)) {
      OnDrained();
    }
  }
}

// Small pieces that gathered leave together.
std::vector<asio::const_buffer> HttpConnection::UnsentPieces() const {
  std::vector<asio::const_buffer> pieces;
  for (const std::string& piece : queue_) {
    const size_t skip = pieces.empty() ? front_written_ : 0;
    pieces.push_back(asio::buffer(piece.data() + skip, piece.size() - skip));
    if (pieces.size() == kPiecesPerWrite) break;
  }
  return pieces;
}

// True when that was all.
bool HttpConnection::Sent(size_t num_bytes) {
  num_unsent_ -= num_bytes;
  num_bytes += front_written_;
  while (!queue_.empty() && num_bytes >= queue_.front().size()) {
    num_bytes -= queue_.front().size();
    queue_.pop_front();
  }
  front_written_ = num_bytes;
  return queue_.empty();
}

void HttpConnection::WaitAndWrite() {
  is_writing_ = true;
  stall_timer_.Set(*this,
                   std::chrono::steady_clock::now() + milliseconds(core_->options.write_stall_ms));
  socket_.async_write_some(UnsentPieces(),
                           [self = shared_from_this()](const error_code& ec, size_t n) {
                             const std::lock_guard<std::mutex> lock(self->owner_mutex_);
                             self->is_writing_ = false;
                             self->stall_timer_.Clear();
                             if (self->phase_ == Phase::kClosed) return;
                             if (ec) {
                               self->ClientGone(ec.message());
                             } else if (self->Sent(n)) {
                               self->OnDrained();
                             } else {
                               self->Flush();
                             }
                           });
}

// A write has not moved for the whole period.
void HttpConnection::OnStall() {
  ClientGone("it takes no bytes");
}

// Every queued byte is with the kernel.
void HttpConnection::OnDrained() {
  if (phase_ != Phase::kHandling) return;
  if (!answer_complete_) return;
  exchange_.reset();
  later_.clear();
  later_timer_.Clear();
  if (closes_after_ || core_->draining.load()) {
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    if (!lingers_ && parser_.IsIdle()) {
      Close();
      return;
    }
    phase_ = Phase::kLinger;
    SetDeadline(kLingerMs);
    return;
  }
  phase_ = Phase::kReading;
  sent_continue_ = false;
  deadline_state_ = HttpParser::State::kComplete;  // none is set
  if (parser_.state() != HttpParser::State::kComplete) {
    Advance();
    return;
  }
  // Not called directly: many pipelined requests would recurse, and TryRun's thread reads none.
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    const std::lock_guard<std::mutex> lock(self->owner_mutex_);
    if (self->phase_ == Phase::kReading && !self->core_->stopped.load()) self->Advance();
  });
}

void HttpConnection::ClientGone(std::string_view why) {
  const std::shared_ptr<Exchange> exchange = exchange_.lock();
  if (exchange != nullptr && phase_ == Phase::kHandling && !answer_complete_) {
    LOG_INFO << "client gone before its answer was complete: " << why;
  }
  Close();
  if (exchange != nullptr) exchange->ClientGone();
}

void HttpConnection::CloseIfIdle() {
  if (phase_ == Phase::kReading && parser_.IsIdle()) Close();
}

void HttpConnection::TakeAndClose() {
  const std::lock_guard<std::mutex> lock(owner_mutex_);
  Close();
}

void HttpConnection::Close() {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kClosed;
  UncountBody();
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
  for (LazyTimer<HttpConnection>* timer :
       {&deadline_, &keepalive_timer_, &stall_timer_, &later_timer_}) {
    timer->Cancel();
  }
  later_.clear();
}

}  // namespace twinspark::gateway
