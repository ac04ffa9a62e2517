// Goal: answers, streams, bounds and the detection of clients that leave, over real sockets.
// Method: a handler that records exchanges; raw clients that behave and misbehave. Times are bounds
// of waiting, never of passing.
#include "gateway/http/http_server.h"

#include <atomic>

#include <poll.h>

#include "absl/strings/str_cat.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gateway/http/testing/held_server.h"
#include "gateway/http/testing/raw_client.h"

namespace twinspark::gateway {
namespace {

using ::testing::HasSubstr;

void Echo(std::shared_ptr<HttpExchange> exchange) {
  HttpResponse response;
  response.body = absl::StrCat(exchange->request().method, " ", exchange->request().path, " ",
                               exchange->request().body);
  exchange->Respond(std::move(response));
}

TEST(HttpServer, KeepsConnectionsAndAnswersInOrder) {
  const auto server = StartServer(TestOptions(), Echo);
  RawClient client(server->port());
  for (int i = 0; i < 3; ++i) {
    client.SendRequest("POST", absl::StrCat("/", i), "body");
    const RawClient::Response response = client.Read();
    EXPECT_EQ(response.status, 200);
    EXPECT_EQ(response.body, absl::StrCat("POST /", i, " body"));
    EXPECT_EQ(response.Header("Connection"), "keep-alive");
  }
  // Pipelined, and the last one asks to close.
  client.Send(
      "GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\nGET /c HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(client.Read().body, "GET /a ");
  EXPECT_EQ(client.Read().body, "GET /b ");
  EXPECT_EQ(client.Read().body, "GET /c ");
  EXPECT_TRUE(client.WaitClosed());
}

TEST(HttpServer, HeadHasNoBodyAndContinueIsSent) {
  const auto server = StartServer(TestOptions(), Echo);
  RawClient client(server->port());
  client.SendRequest("HEAD", "/x");
  ASSERT_TRUE(client.ReadUntil("\r\n\r\n"));
  EXPECT_THAT(client.received(), HasSubstr("Content-Length: 8"));
  EXPECT_THAT(client.received(), testing::EndsWith("\r\n\r\n"));
  RawClient second(server->port());
  second.Send("POST /y HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(second.Read().status, 100);
  second.Send("ok");
  EXPECT_EQ(second.Read().body, "POST /y ok");
}

TEST(HttpServer, StreamsPiecesAndKeepalives) {
  HttpServerOptions options = TestOptions();
  options.keepalive_ms = 20;
  Holder holder;
  const auto server = StartServer(options, holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/stream");
  const auto exchange = holder.Next();
  exchange->Post([exchange] {
    exchange->StartStream({}, ": alive\n\n");
    exchange->Write("one");
  });
  ASSERT_TRUE(client.ReadUntil("one"));
  ASSERT_TRUE(client.ReadUntil(": alive"));
  exchange->Post([exchange] {
    exchange->Write("two");
    exchange->EndStream(false);
  });
  const RawClient::Response response = client.Read();
  EXPECT_THAT(response.body, testing::StartsWith("one: alive\n\n"));
  EXPECT_THAT(response.body, testing::EndsWith("two"));
  EXPECT_EQ(response.Header("Transfer-Encoding"), "chunked");
  client.SendRequest("GET", "/again");
  const auto again = holder.Next();
  again->Post([again] { again->Respond({}); });
  EXPECT_EQ(client.Read().status, 200);
}

TEST(HttpServer, OldClientsGetAStreamThatEndsWithTheConnection) {
  Holder holder;
  const auto server = StartServer(TestOptions(), holder.Handler());
  RawClient client(server->port());
  client.Send("GET / HTTP/1.0\r\n\r\n");
  const auto exchange = holder.Next();
  exchange->Post([exchange] {
    exchange->StartStream({}, "");
    exchange->Write("text");
    exchange->EndStream(false);
  });
  const RawClient::Response response = client.Read();
  EXPECT_EQ(response.body, "text");
  EXPECT_EQ(response.Header("Connection"), "close");
}

TEST(HttpServer, NoticesClientsThatLeaveWhileNothingIsWritten) {
  Holder holder;
  const auto server = StartServer(TestOptions(), holder.Handler());
  for (const bool reset : {true, false}) {
    RawClient client(server->port());
    client.SendRequest("POST", "/wait", "x");
    auto exchange = holder.Next();
    EXPECT_EQ(server->num_active(), 1);
    const int before = holder.num_gone.load();
    if (reset) {
      client.Reset();
    } else {
      client.ShutdownSend();  // a half-closed connection counts as gone
    }
    EXPECT_TRUE(Eventually([&] { return holder.num_gone.load() == before + 1; }));
    EXPECT_EQ(server->num_active(), 0);
    exchange.reset();
    EXPECT_TRUE(Eventually([&] { return server->num_connections() == 0; }));
  }
}

TEST(HttpServer, DropsReadersThatAreTooSlow) {
  HttpServerOptions options = TestOptions();
  options.max_unsent_bytes = 64 << 10;
  Holder holder;
  const auto server = StartServer(options, holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/flood");
  const auto exchange = holder.Next();
  exchange->Post([exchange] { exchange->StartStream({}, ""); });
  const std::string piece(16 << 10, 'x');
  // The kernel takes a few megabytes before the server's own queue fills.
  for (int i = 0; i < 4096 && holder.num_gone.load() == 0; ++i) {
    std::atomic<bool> done{false};
    exchange->Post([&] {
      exchange->Write(piece);
      done = true;
    });
    ASSERT_TRUE(Eventually([&] { return done.load(); }));
  }
  EXPECT_EQ(holder.num_gone.load(), 1);
}

TEST(HttpServer, DropsReadersThatTakeNothing) {
  HttpServerOptions options = TestOptions();
  options.write_stall_ms = 50;
  Holder holder;
  const auto server = StartServer(options, holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/");
  std::shared_ptr<HttpExchange> exchange = holder.Next();
  HttpExchange& answer = *exchange;
  answer.Post([exchange = std::move(exchange)] {
    HttpResponse response;
    response.body = std::string(64 << 20, 'x');  // more than the kernel takes
    exchange->Respond(std::move(response));
  });
  EXPECT_TRUE(Eventually([&] { return server->num_connections() == 0; }));
}

// A stream that nobody reads: the kernel takes some kilobytes, not megabytes, so that the client is
// dropped after the stall time, long before the stream has filled its own buffer.
TEST(HttpServer, DropsStreamsThatNobodyReads) {
  HttpServerOptions options = TestOptions();
  options.write_stall_ms = 50;
  options.max_unsent_bytes = size_t{1} << 30;
  Holder holder;
  const auto server = StartServer(options, holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/");
  std::shared_ptr<HttpExchange> exchange = holder.Next();
  exchange->Post([exchange] { exchange->StartStream({}, ""); });
  // One megabyte, which a kernel left alone would take.
  for (int i = 0; i < 1000; ++i)
    exchange->Post([exchange] { exchange->Write(std::string(1000, 'x')); });
  EXPECT_TRUE(Eventually([&] { return holder.num_gone.load() == 1; }));
  exchange.reset();
  EXPECT_TRUE(Eventually([&] { return server->num_connections() == 0; }));
}

TEST(HttpServer, AnswersRequestsOutOfBounds) {
  HttpServerOptions options = TestOptions();
  options.max_body_bytes = 1000;
  options.max_header_bytes = 500;
  options.header_read_ms = 50;
  options.body_read_ms = 50;
  const auto server = StartServer(options, Echo);
  const auto answer = [&](std::string_view bytes) {
    RawClient client(server->port());
    client.Send(bytes);
    const RawClient::Response response = client.Read();
    EXPECT_EQ(response.body, absl::StrCat("error ", response.status));
    EXPECT_TRUE(client.WaitClosed());
    return response.status;
  };
  EXPECT_EQ(answer("POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n" + std::string(1001, 'x')),
            413);
  EXPECT_EQ(answer("GET / HTTP/1.1\r\nA: " + std::string(600, 'b')), 431);
  EXPECT_EQ(answer("BREW\r\n\r\n"), 400);
  EXPECT_EQ(answer("GET / HTT"), 408);
  EXPECT_EQ(answer("POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc"), 408);
}

TEST(HttpServer, BoundsTheBodiesOfAllRequestsTogether) {
  HttpServerOptions options = TestOptions();
  options.max_pending_body_bytes = 100000;
  const auto server = StartServer(options, Echo);
  const std::string head = "POST / HTTP/1.1\r\nContent-Length: 90000\r\n\r\n";
  RawClient first(server->port());
  RawClient second(server->port());
  first.Send(head + std::string(60000, 'x'));
  second.Send(head + std::string(60000, 'x'));
  // One of the two is one too many; which one is not ours to say.
  pollfd waits[2] = {{first.fd(), POLLIN, 0}, {second.fd(), POLLIN, 0}};
  ASSERT_GE(poll(waits, 2, 30000), 1);
  RawClient& refused = waits[0].revents != 0 ? first : second;
  RawClient& accepted = waits[0].revents != 0 ? second : first;
  EXPECT_EQ(refused.Read().status, 503);
  accepted.Send(std::string(30000, 'y'));
  EXPECT_EQ(accepted.Read().status, 200);
}

TEST(HttpServer, ClosesIdleConnections) {
  HttpServerOptions options = TestOptions();
  options.idle_ms = 50;
  const auto server = StartServer(options, Echo);
  RawClient client(server->port());
  client.SendRequest("GET", "/");
  EXPECT_EQ(client.Read().status, 200);
  EXPECT_TRUE(client.WaitClosed());
}

TEST(HttpServer, RefusesConnectionsBeyondTheLimit) {
  HttpServerOptions options = TestOptions();
  options.max_connections = 2;
  const auto server = StartServer(options, Echo);
  RawClient first(server->port());
  RawClient second(server->port());
  ASSERT_TRUE(Eventually([&] { return server->num_connections() == 2; }));
  RawClient third(server->port());
  EXPECT_EQ(third.Read().status, 503);
  first.SendRequest("GET", "/");
  EXPECT_EQ(first.Read().status, 200);
}

TEST(HttpServer, ADroppedExchangeIsAnswered) {
  const auto server = StartServer(TestOptions(), [](std::shared_ptr<HttpExchange>) {});
  RawClient client(server->port());
  client.SendRequest("GET", "/");
  EXPECT_EQ(client.Read().status, 500);
}

TEST(HttpServer, DrainsAndStops) {
  Holder holder;
  auto server = StartServer(TestOptions(), holder.Handler());
  const uint16_t port = server->port();
  RawClient idle(port);
  RawClient busy(port);
  busy.SendRequest("GET", "/");
  auto exchange = holder.Next();
  ASSERT_TRUE(Eventually([&] { return server->num_connections() == 2; }));
  server->StopAccepting();
  EXPECT_TRUE(idle.WaitClosed());
  exchange->Post([exchange] { exchange->Respond({}); });
  const RawClient::Response response = busy.Read();
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(busy.WaitClosed());
  server.reset();
  exchange->Post([] { FAIL() << "no task runs after the server has stopped"; });
}

TEST(HttpServer, PortTakenIsNamed) {
  const auto server = StartServer(TestOptions(), Echo);
  HttpServerOptions options = TestOptions();
  options.port = server->port();
  const auto second = HttpServer::Start(options, Echo);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr(absl::StrCat("127.0.0.1:", server->port())));
}

}  // namespace
}  // namespace twinspark::gateway
