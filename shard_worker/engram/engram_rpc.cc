// Hello and Gather of proto/engram.proto. A range longer than a call may carry is cut; the later
// pieces take their history from the ids before them.
#include "shard_worker/engram/engram_rpc.h"

#include <algorithm>
#include <chrono>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "proto/engram.grpc.pb.h"

namespace twinspark {
namespace {

namespace pb = proto::engram;

constexpr size_t kMaxGatherTokens = 1024;
constexpr size_t kHistory = 3;

void SetDeadline(grpc::ClientContext& context, int64_t ms) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(ms));
}

std::string ShortHex(const std::string& digest) {
  return absl::BytesToHexString(digest.substr(0, 8));
}

}  // namespace

struct EngramRpc::Impl {
  std::string endpoint;
  std::unique_ptr<pb::EngramService::Stub> stub;

  absl::Status Wrap(const grpc::Status& status) const {
    const absl::Status converted = FromGrpcStatus(status);
    return absl::Status(
        converted.code(),
        absl::StrCat("row service at ", endpoint, ": ", converted.message(),
                     absl::IsUnavailable(converted)
                         ? "; start engram_service there or correct ENGRAM_ENDPOINTS"
                         : ""));
  }
};

EngramRpc::EngramRpc(const std::string& endpoint) : impl_(std::make_unique<Impl>()) {
  impl_->endpoint = endpoint;
  impl_->stub = pb::EngramService::NewStub(MakeChannel(endpoint));
}

EngramRpc::~EngramRpc() = default;

absl::StatusOr<EngramHello> EngramRpc::Hello(const std::string& client) const {
  pb::HelloRequest request;
  request.set_client(client);
  request.set_protocol_version(1);
  pb::HelloReply reply;
  grpc::ClientContext context;
  SetDeadline(context, 2 * limits::kRowWaitMsMax);
  const grpc::Status status = impl_->stub->Hello(&context, request, &reply);
  if (!status.ok()) return impl_->Wrap(status);
  EngramHello hello;
  hello.build_id = reply.build_id();
  hello.service_epoch = reply.service_epoch();
  hello.attach_socket = reply.attach_socket();
  for (const pb::Layer& layer : reply.layers()) {
    hello.layers.push_back({static_cast<int>(layer.layer_id()),
                            layer.num_rows(),
                            {layer.columns().begin(), layer.columns().end()},
                            layer.content_digest(),
                            {layer.files().begin(), layer.files().end()},
                            {layer.row_samples().begin(), layer.row_samples().end()}});
  }
  hello.row_weight_bytes = static_cast<int>(reply.row_weight_bytes());
  hello.row_scale_bytes = static_cast<int>(reply.row_scale_bytes());
  hello.rank = static_cast<int>(reply.rank());
  hello.world = static_cast<int>(reply.world());
  hello.max_ngram_size = static_cast<int>(reply.max_ngram_size());
  hello.vocab_size = static_cast<int>(reply.vocab_size());
  hello.model_digest = reply.model_digest();
  hello.hash_digest = ShortHex(reply.token_map_digest()) + ShortHex(reply.hash_params_digest());
  hello.tier = reply.tier();
  hello.back_end = reply.back_end();
  return hello;
}

absl::StatusOr<std::string> EngramRpc::Canary() const {
  pb::CanaryReply reply;
  grpc::ClientContext context;
  SetDeadline(context, 5 * limits::kRowWaitMsMax);
  const grpc::Status status = impl_->stub->Canary(&context, {}, &reply);
  if (!status.ok()) return impl_->Wrap(status);
  if (reply.digest() != reply.expected()) {
    return absl::DataLossError(absl::StrCat(
        "row service at ", impl_->endpoint, ": its canary rows are ", ShortHex(reply.digest()),
        ", at its start they were ", ShortHex(reply.expected())));
  }
  return reply.digest();
}

absl::StatusOr<std::vector<RowBytes>> EngramRpc::Gather(std::span<const RowRange> ranges,
                                                        const EngramHello& hello) const {
  std::vector<RowBytes> rows(hello.layers.size());
  for (const RowRange& range : ranges) {
    std::vector<int32_t> all(range.history.begin(), range.history.end());
    all.insert(all.end(), range.ids.begin(), range.ids.end());
    const size_t first = range.history.size();
    for (size_t begin = 0; begin < range.ids.size(); begin += kMaxGatherTokens) {
      const size_t end = std::min(begin + kMaxGatherTokens, range.ids.size());
      const size_t history = std::min(first + begin, kHistory);
      pb::GatherRequest request;
      request.set_service_epoch(hello.service_epoch);
      request.set_model_digest(hello.model_digest);
      pb::Sequence& sequence = *request.add_sequences();
      sequence.set_position(static_cast<uint32_t>(range.first_position) +
                            static_cast<uint32_t>(begin));
      for (size_t i = first + begin - history; i < first + end; ++i) {
        if (i < first + begin) {
          sequence.add_history(static_cast<uint32_t>(all[i]));
        } else {
          sequence.add_tokens(static_cast<uint32_t>(all[i]));
        }
        if (!range.dead.empty()) sequence.mutable_live()->push_back(range.dead[i] == 0 ? 1 : 0);
      }
      pb::GatherReply reply;
      grpc::ClientContext context;
      SetDeadline(context, limits::kRowWaitMsMax);
      const grpc::Status status = impl_->stub->Gather(&context, request, &reply);
      if (!status.ok()) return impl_->Wrap(status);
      if (reply.layers_size() != static_cast<int>(rows.size())) {
        return absl::InternalError("the row service answered for other layers");
      }
      const size_t columns = hello.layers.front().columns.size() * (end - begin);
      for (int i = 0; i < reply.layers_size(); ++i) {
        const pb::LayerRows& layer = reply.layers(i);
        if (layer.weights().size() != columns * static_cast<size_t>(hello.row_weight_bytes) ||
            layer.scales().size() != columns * static_cast<size_t>(hello.row_scale_bytes)) {
          return absl::DataLossError("the row service answered with rows missing");
        }
        rows[static_cast<size_t>(i)].values += layer.weights();
        rows[static_cast<size_t>(i)].scales += layer.scales();
      }
    }
  }
  return rows;
}

}  // namespace twinspark
