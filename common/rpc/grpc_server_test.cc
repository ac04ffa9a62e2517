// A server on a free port answers health and reflection, refuses a taken port in words, and
// statuses survive the way there and back.
#include "common/rpc/grpc_server.h"

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include "absl/strings/str_cat.h"
#include <gtest/gtest.h>

#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_status.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

// Calls the health service without its generated code: the request is empty, the reply is the
// varint field 1 (1 = SERVING, 2 = NOT_SERVING).
int HealthOf(const std::string& address) {
  grpc::GenericStub stub(MakeChannel(address));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::CompletionQueue queue;
  const grpc::Slice empty;
  auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                    grpc::ByteBuffer(&empty, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  EXPECT_TRUE(queue.Next(&tag, &ok));
  EXPECT_TRUE(status.ok()) << status.error_message();
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(reply.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes.size() == 2 && bytes[0] == 8 ? bytes[1] : 0;
}

TEST(GrpcServerTest, HealthFollowsSetServing) {
  auto server = GrpcServer::Start("127.0.0.1:0", {});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_GT((*server)->port(), 0);
  EXPECT_EQ((*server)->address(), absl::StrCat("127.0.0.1:", (*server)->port()));
  EXPECT_EQ(HealthOf((*server)->address()), 2);
  (*server)->SetServing(true);
  EXPECT_EQ(HealthOf((*server)->address()), 1);
}

TEST(GrpcServerTest, TakenPortIsAnErrorThatNamesIt) {
  auto first = GrpcServer::Start("127.0.0.1:0", {});
  ASSERT_TRUE(first.ok());
  auto second = GrpcServer::Start((*first)->address(), {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(ToStd(second.status().message()).find((*first)->address()), std::string_view::npos);
}

TEST(GrpcStatusTest, EveryCodeSurvives) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "slot 7");
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  }
}

TEST(GrpcStatusTest, LongTextIsCut) {
  const grpc::Status status = ToGrpcStatus(absl::InternalError(std::string(100'000, 'x')));
  EXPECT_EQ(status.error_message().size(), kMaxStatusTextBytes);
}

}  // namespace
}  // namespace twinspark
