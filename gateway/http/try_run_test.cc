// Goal: what another thread writes itself arrives, in order with what is posted, and neither a
// client that reads nothing nor one that leaves holds that thread up. Method: TryRun from the
// test's thread, over real sockets. Times are bounds of waiting, never of passing.
#include <atomic>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gateway/http/http_server.h"
#include "gateway/http/testing/held_server.h"
#include "gateway/http/testing/raw_client.h"

namespace twinspark::gateway {
namespace {

// A connection has nothing to do once its handler has returned, which may be after the exchange is
// here.
bool RunHere(HttpExchange& exchange, absl::FunctionRef<void()> task) {
  return Eventually([&] { return exchange.TryRun(task); });
}

TEST(TryRun, WritesOnTheCallersThread) {
  Holder holder;
  const auto server = StartServer(TestOptions(), holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/stream");
  const auto exchange = holder.Next();
  std::thread::id thread;
  ASSERT_TRUE(RunHere(*exchange, [&] {
    thread = std::this_thread::get_id();
    exchange->StartStream({}, "");
    exchange->Write("one,");
  }));
  EXPECT_EQ(thread, std::this_thread::get_id());
  ASSERT_TRUE(client.ReadUntil("one,"));
  ASSERT_TRUE(RunHere(*exchange, [&] {
    exchange->Write("two");
    exchange->EndStream(false);
  }));
  EXPECT_EQ(client.Read().body, "one,two");
  EXPECT_EQ(server->num_active(), 0);
  // The connection is ready for its next request.
  client.SendRequest("GET", "/again");
  const auto again = holder.Next();
  ASSERT_TRUE(RunHere(*again, [&] { again->Respond({}); }));
  EXPECT_EQ(client.Read().status, 200);
}

TEST(TryRun, LeavesABusyConnectionAlone) {
  Holder holder;
  const auto server = StartServer(TestOptions(), holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/stream");
  const auto exchange = holder.Next();
  std::atomic<bool> is_running{false};
  std::atomic<bool> may_end{false};
  exchange->Post([&, exchange] {
    is_running = true;
    EXPECT_TRUE(Eventually([&] { return may_end.load(); }));
    exchange->StartStream({}, "");
    exchange->Write("one,");
  });
  const auto never = [] { FAIL() << "a task ran beside another one, or before one that waits"; };
  EXPECT_FALSE(exchange->TryRun(never));  // posted
  ASSERT_TRUE(Eventually([&] { return is_running.load(); }));
  EXPECT_FALSE(exchange->TryRun(never));  // running
  exchange->Post([exchange] { exchange->Write("two,"); });
  EXPECT_FALSE(exchange->TryRun(never));
  may_end = true;
  ASSERT_TRUE(RunHere(*exchange, [&] {
    exchange->Write("three");
    exchange->EndStream(false);
  }));
  EXPECT_EQ(client.Read().body, "one,two,three");
}

// The socket takes some kilobytes; what it does not take waits in the connection, not the caller.
TEST(TryRun, IsNotHeldUpByAClientThatReadsNothing) {
  for (const bool is_full : {false, true}) {
    HttpServerOptions options = TestOptions();
    if (is_full) {
      options.max_unsent_bytes = 64 << 10;  // the task that exceeds it drops the client
    } else {
      options.write_stall_ms = 50;  // a timer does
      options.max_unsent_bytes = size_t{1} << 30;
    }
    Holder holder;
    const auto server = StartServer(options, holder.Handler());
    RawClient client(server->port());
    client.SendRequest("GET", "/flood");
    auto exchange = holder.Next();
    ASSERT_TRUE(RunHere(*exchange, [&] { exchange->StartStream({}, ""); }));
    const std::string piece(16 << 10, 'x');
    for (int i = 0; i < 4096 && holder.num_gone.load() == 0; ++i)
      exchange->TryRun([&] { exchange->Write(piece); });
    EXPECT_TRUE(Eventually([&] { return holder.num_gone.load() == 1; }));
    ASSERT_TRUE(RunHere(*exchange, [&] { EXPECT_TRUE(exchange->is_gone()); }));
    exchange.reset();
    EXPECT_TRUE(Eventually([&] { return server->num_connections() == 0; }));
  }
}

// Whoever notices first, the writer or the read that is always pending, tells it, once.
TEST(TryRun, NoticesAClientThatLeavesBetweenWrites) {
  Holder holder;
  const auto server = StartServer(TestOptions(), holder.Handler());
  for (int round = 0; round < 20; ++round) {
    RawClient client(server->port());
    client.SendRequest("GET", "/stream");
    auto exchange = holder.Next();
    ASSERT_TRUE(RunHere(*exchange, [&] { exchange->StartStream({}, ""); }));
    std::thread leaver([&] { client.Reset(); });
    bool is_gone = false;
    const auto write = [&] {
      is_gone = exchange->is_gone();
      exchange->Write("data: x\n\n");
    };
    EXPECT_TRUE(Eventually([&] { return exchange->TryRun(write) && is_gone; }));
    leaver.join();
    EXPECT_EQ(holder.num_gone.load(), round + 1);
    EXPECT_EQ(server->num_active(), 0);
    exchange.reset();
    EXPECT_TRUE(Eventually([&] { return server->num_connections() == 0; }));
  }
}

TEST(TryRun, EndsWithTheServer) {
  Holder holder;
  auto server = StartServer(TestOptions(), holder.Handler());
  RawClient client(server->port());
  client.SendRequest("GET", "/stream");
  const auto exchange = holder.Next();
  ASSERT_TRUE(RunHere(*exchange, [&] { exchange->StartStream({}, ""); }));
  // A thread that goes on writing while the server stops.
  std::atomic<bool> may_end{false};
  std::thread writer([&] {
    while (!may_end.load())
      exchange->TryRun([&] { exchange->Write("x"); });
  });
  server.reset();
  may_end = true;
  writer.join();
  EXPECT_FALSE(exchange->TryRun([] { FAIL() << "no task runs after the server has stopped"; }));
}

}  // namespace
}  // namespace twinspark::gateway
