// See op_log.h.
#include "shard_worker/runtime/op_log.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "common/file_util.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr std::string_view kMagic = "TSOPLOG1";
constexpr uint8_t kGroup = 1;
constexpr uint8_t kOp = 2;
constexpr uint8_t kResult = 3;
constexpr size_t kResultBytes = 8 + 8 + 4;
constexpr size_t kMaxLogBytes = size_t{4} << 30;

std::string GroupText(const GroupConfig& group) {
  return absl::StrCat("epoch=", group.epoch, "\nrank=", group.rank, "\nworld=", group.world,
                      "\nmodel_dir=", group.model_dir, "\nengram_dir=", group.engram_dir,
                      "\nf32=", group.f32_numerics ? 1 : 0, "\nsimd_target=", group.simd_target,
                      "\nnum_slots=", group.limits.num_slots,
                      "\nnum_pages=", group.limits.num_pages,
                      "\nmax_round_rows=", group.limits.max_round_rows,
                      "\nmax_short_prefill_rows=", group.limits.max_short_prefill_rows,
                      "\nmax_chunk_rows=", group.limits.max_chunk_rows,
                      "\nmax_context=", group.limits.max_context, "\n");
}

GroupConfig ParseGroup(const std::string& text) {
  std::map<std::string, std::string> values;
  for (const auto line : absl::StrSplit(text, '\n')) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(line, absl::MaxSplits('=', 1));
    values[pair.first] = pair.second;
  }
  const auto number = [&](const char* key) {
    int64_t value = 0;
    return absl::SimpleAtoi(values[key], &value) ? value : 0;
  };
  GroupConfig group;
  group.epoch = static_cast<uint64_t>(number("epoch"));
  group.rank = static_cast<int>(number("rank"));
  group.world = static_cast<int>(number("world"));
  group.model_dir = values["model_dir"];
  group.engram_dir = values["engram_dir"];
  group.f32_numerics = number("f32") != 0;
  group.simd_target = values["simd_target"];
  group.limits.num_slots = static_cast<int>(number("num_slots"));
  group.limits.num_pages = static_cast<int>(number("num_pages"));
  group.limits.max_round_rows = static_cast<int>(number("max_round_rows"));
  group.limits.max_short_prefill_rows = static_cast<int>(number("max_short_prefill_rows"));
  group.limits.max_chunk_rows = static_cast<int>(number("max_chunk_rows"));
  group.limits.max_context = number("max_context");
  return group;
}

template <class T>
T ReadInt(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

template <class T>
void AppendInt(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

OpLogWriter::~OpLogWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

void OpLogWriter::OpenFor(const GroupConfig& group) {
  if (file_ != nullptr) std::fclose(file_);
  epoch_ = group.epoch;
  const std::string path =
      absl::StrCat(dir_, "/epoch-", group.epoch, "-rank-", group.rank, ".oplog");
  file_ = std::fopen(path.c_str(), "wb");
  if (file_ == nullptr) {
    LOG_ERROR << "op log not recorded path=" << path << " reason=\"" << std::strerror(errno)
              << "\"";
    return;
  }
  LOG_INFO << "recording ops path=" << path;
  std::fwrite(kMagic.data(), 1, kMagic.size(), file_);
  Record(kGroup, GroupText(group));
}

void OpLogWriter::Record(uint8_t kind, const std::string& bytes) {
  if (file_ == nullptr) return;
  std::string header(1, static_cast<char>(kind));
  AppendInt(header, static_cast<uint32_t>(bytes.size()));
  const bool ok = std::fwrite(header.data(), 1, header.size(), file_) == header.size() &&
                  std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size() &&
                  std::fflush(file_) == 0;
  if (ok) return;
  LOG_ERROR << "op log not recorded any more reason=\"" << std::strerror(errno) << "\"";
  std::fclose(file_);
  file_ = nullptr;
}

void OpLogWriter::Write(const GroupConfig& group, const WorkerOp& op, const OpOutcome& outcome) {
  if (group.epoch != epoch_) OpenFor(group);
  Record(kOp, op.bytes);
  std::string result;
  AppendInt(result, outcome.op_id);
  AppendInt(result, outcome.digest);
  AppendInt(result, static_cast<uint32_t>(outcome.status.code()));
  Record(kResult, result);
}

absl::StatusOr<RecordedLog> ReadOpLog(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxLogBytes));
  if (text.compare(0, kMagic.size(), kMagic) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not an op log: no ", std::string(kMagic)));
  }
  RecordedLog log;
  size_t at = kMagic.size();
  while (text.size() - at >= 5) {
    const auto kind = static_cast<uint8_t>(text[at]);
    const size_t size = ReadInt<uint32_t>(&text[at + 1]);
    at += 5;
    if (size > limits::kMaxMessageBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": a record of ", size, " bytes at ", at));
    }
    if (text.size() - at < size) break;
    if (kind == kGroup) {
      log.group = ParseGroup(text.substr(at, size));
    } else if (kind == kOp) {
      log.ops.push_back({text.substr(at, size)});
    } else if (kind == kResult && size == kResultBytes && !log.ops.empty()) {
      RecordedOp& op = log.ops.back();
      op.has_result = true;
      op.op_id = ReadInt<uint64_t>(&text[at]);
      op.digest = ReadInt<uint64_t>(&text[at + 8]);
      op.status_code = ReadInt<uint32_t>(&text[at + 16]);
    } else {
      return absl::InvalidArgumentError(absl::StrCat(path, ": unknown record ", kind, " at ", at));
    }
    at += size;
  }
  return log;
}

}  // namespace twinspark
