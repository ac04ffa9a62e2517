// Parsing and reading of safetensors files and sharded checkpoints (safetensors.h).
#include "common/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include <boost/json.hpp>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/file_util.h"
#include "common/limits.h"
#include "common/status_macros.h"
#include "common/string_view.h"
#include "common/unique_keys.h"

namespace twinspark {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr size_t kMaxDims = 8;

struct TypeInfo {
  StoredType type;
  const char* name;
  size_t bytes;
};
constexpr std::array<TypeInfo, 16> kTypes = {{
    {StoredType::kBool, "BOOL", 1},
    {StoredType::kU8, "U8", 1},
    {StoredType::kI8, "I8", 1},
    {StoredType::kF8E4M3, "F8_E4M3", 1},
    {StoredType::kF8E5M2, "F8_E5M2", 1},
    {StoredType::kF8E8M0, "F8_E8M0", 1},
    {StoredType::kI16, "I16", 2},
    {StoredType::kU16, "U16", 2},
    {StoredType::kF16, "F16", 2},
    {StoredType::kBf16, "BF16", 2},
    {StoredType::kI32, "I32", 4},
    {StoredType::kU32, "U32", 4},
    {StoredType::kF32, "F32", 4},
    {StoredType::kI64, "I64", 8},
    {StoredType::kU64, "U64", 8},
    {StoredType::kF64, "F64", 8},
}};

absl::Status Bad(std::string_view file, std::string_view tensor, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(file), tensor.empty() ? "" : ": tensor ", ToAbsl(tensor), ": ",
                   ToAbsl(what), "; the file is damaged or not safetensors, fetch it again"));
}

absl::StatusOr<StoredTensor> ParseTensor(std::string_view name,
                                         const boost::json::value& value,
                                         int64_t data_offset,
                                         int64_t file_bytes,
                                         std::string_view file) {
  StoredTensor tensor;
  tensor.name = std::string(name);
  const boost::json::object* object = value.if_object();
  if (object == nullptr) return Bad(file, name, "entry is not an object");
  const boost::json::value* dtype = object->if_contains("dtype");
  const boost::json::value* shape = object->if_contains("shape");
  const boost::json::value* offsets = object->if_contains("data_offsets");
  if (dtype == nullptr || !dtype->is_string()) return Bad(file, name, "no dtype");
  if (shape == nullptr || !shape->is_array()) return Bad(file, name, "no shape");
  if (offsets == nullptr || !offsets->is_array() || offsets->get_array().size() != 2)
    return Bad(file, name, "data_offsets is not a pair");

  const auto& dtype_name = dtype->get_string();
  const auto* type = std::find_if(kTypes.begin(), kTypes.end(),
                                  [&](const TypeInfo& info) { return dtype_name == info.name; });
  if (type == kTypes.end())
    return Bad(file, name, absl::StrCat("unknown dtype ", std::string(dtype_name)));
  tensor.type = type->type;

  if (shape->get_array().size() > kMaxDims) return Bad(file, name, "more than 8 dimensions");
  int64_t bytes = static_cast<int64_t>(type->bytes);
  for (const boost::json::value& dim : shape->get_array()) {
    boost::system::error_code error;
    const int64_t size = dim.to_number<int64_t>(error);
    if (error || size < 0) return Bad(file, name, "a dimension is not a count");
    tensor.shape.push_back(size);
    if (__builtin_mul_overflow(bytes, size, &bytes)) return Bad(file, name, "shape overflows");
  }
  std::array<int64_t, 2> range{};
  for (size_t i = 0; i < 2; ++i) {
    boost::system::error_code error;
    range[i] = offsets->get_array()[i].to_number<int64_t>(error);
    if (error || range[i] < 0) return Bad(file, name, "data_offsets are not counts");
  }
  const int64_t data_bytes = file_bytes - data_offset;
  if (range[0] > range[1] || range[1] > data_bytes)
    return Bad(file, name,
               absl::StrCat("data_offsets ", range[0], "..", range[1], " of ", data_bytes,
                            " data bytes in the file"));
  if (range[1] - range[0] != bytes)
    return Bad(file, name,
               absl::StrCat("shape ", tensor.ShapeText(), " of ", type->name, " needs ", bytes,
                            " bytes, data_offsets give ", range[1] - range[0]));
  tensor.offset = data_offset + range[0];
  tensor.bytes = bytes;
  return tensor;
}

std::string ErrnoText(int error) {
  return std::string(std::strerror(error));
}

absl::Status PreadAll(int fd, int64_t offset, std::span<std::byte> out, const std::string& path) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = ::pread(fd, out.data() + done, std::min<size_t>(out.size() - done, 1u << 30),
                              static_cast<off_t>(offset + static_cast<int64_t>(done)));
    if (n < 0) {
      if (errno == EINTR) continue;
      return absl::DataLossError(absl::StrCat(path, ": read of ", out.size(), " bytes at ", offset,
                                              " failed: ", ErrnoText(errno)));
    }
    if (n == 0)
      return absl::DataLossError(absl::StrCat(path, ": ends ", out.size() - done,
                                              " bytes short of the read of ", out.size(), " at ",
                                              offset));
    done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::StatusOr<int> OpenForReading(const std::string& path, int64_t* file_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::NotFoundError(absl::StrCat(path, ": cannot open: ", ErrnoText(errno)));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": is not a regular file"));
  }
  *file_bytes = static_cast<int64_t>(info.st_size);
  return fd;
}

// The weight_map of an index file: tensor name > file name.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseIndex(
    std::string_view text, const std::string& path) {
  boost::system::error_code error;
  const boost::json::value root = boost::json::parse({text.data(), text.size()}, error);
  if (error) return Bad(path, "", absl::StrCat("not JSON: ", error.message()));
  RETURN_IF_ERROR(CheckUniqueKeys(text, path));
  const boost::json::object* object = root.if_object();
  const boost::json::value* map = object == nullptr ? nullptr : object->if_contains("weight_map");
  if (map == nullptr || !map->is_object()) return Bad(path, "", "no weight_map");
  std::vector<std::pair<std::string, std::string>> entries;
  for (const auto& [name, file] : map->get_object()) {
    if (!file.is_string()) return Bad(path, std::string(name), "its file is not a string");
    entries.emplace_back(std::string(name), std::string(file.get_string()));
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

}  // namespace

const char* StoredTypeName(StoredType type) {
  return kTypes[static_cast<size_t>(type)].name;
}

size_t StoredTypeBytes(StoredType type) {
  return kTypes[static_cast<size_t>(type)].bytes;
}

int64_t StoredTensor::num_elements() const {
  return bytes / static_cast<int64_t>(StoredTypeBytes(type));
}

std::string StoredTensor::ShapeText() const {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(std::string_view header,
                                                                 int64_t data_offset,
                                                                 int64_t file_bytes,
                                                                 std::string_view file_name) {
  boost::system::error_code error;
  boost::json::parse_options options;
  options.max_depth = 8;
  const boost::json::value root =
      boost::json::parse({header.data(), header.size()}, error, {}, options);
  if (error) return Bad(file_name, "", absl::StrCat("header is not JSON: ", error.message()));
  RETURN_IF_ERROR(CheckUniqueKeys(header, file_name));
  const boost::json::object* object = root.if_object();
  if (object == nullptr) return Bad(file_name, "", "header is not an object");

  std::vector<StoredTensor> tensors;
  tensors.reserve(object->size());
  for (const auto& [name, value] : *object) {
    if (name == "__metadata__") continue;
    ASSIGN_OR_RETURN(StoredTensor tensor, ParseTensor({name.data(), name.size()}, value,
                                                      data_offset, file_bytes, file_name));
    tensors.push_back(std::move(tensor));
  }
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  for (size_t i = 1; i < tensors.size(); ++i) {
    const StoredTensor& before = tensors[i - 1];
    if (before.offset + before.bytes > tensors[i].offset)
      return Bad(file_name, tensors[i].name, absl::StrCat("overlaps tensor ", before.name));
  }
  return tensors;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  ASSIGN_OR_RETURN(file->fd_, OpenForReading(path, &file->file_bytes_));
  uint64_t header_bytes = 0;
  if (file->file_bytes_ < 8) return Bad(path, "", "shorter than the 8 byte header length");
  RETURN_IF_ERROR(
      PreadAll(file->fd_, 0, std::as_writable_bytes(std::span(&header_bytes, 1)), path));
  if (header_bytes > static_cast<uint64_t>(file->file_bytes_ - 8) ||
      header_bytes > limits::kMaxSafetensorsHeaderBytes)
    return Bad(path, "",
               absl::StrCat("header length ", header_bytes, " in a file of ", file->file_bytes_,
                            " bytes"));
  file->header_.resize(header_bytes);
  RETURN_IF_ERROR(PreadAll(
      file->fd_, 8, std::as_writable_bytes(std::span(file->header_.data(), header_bytes)), path));
  ASSIGN_OR_RETURN(file->tensors_,
                   ParseSafetensorsHeader(file->header_, 8 + static_cast<int64_t>(header_bytes),
                                          file->file_bytes_, path));
  for (size_t i = 0; i < file->tensors_.size(); ++i)
    file->by_name_.emplace(file->tensors_[i].name, i);
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (fd_ >= 0) ::close(fd_);
}

const StoredTensor* SafetensorsFile::Find(std::string_view name) const {
  const auto it = by_name_.find(ToAbsl(name));
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

absl::Status SafetensorsFile::Read(const StoredTensor& tensor,
                                   int64_t begin,
                                   std::span<std::byte> out) const {
  const int64_t size = static_cast<int64_t>(out.size());
  if (begin < 0 || begin > tensor.bytes || size > tensor.bytes - begin)
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", tensor.name, ": bytes ",
                                                   begin, "+", size, " of ", tensor.bytes));
  return PreadAll(fd_, tensor.offset + begin, out, path_);
}

absl::StatusOr<std::vector<std::byte>> SafetensorsFile::ReadAll(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
  RETURN_IF_ERROR(Read(tensor, 0, bytes));
  return bytes;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& dir) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->dir_ = dir;
  const std::string index_path = dir + "/model.safetensors.index.json";
  std::vector<std::pair<std::string, std::string>> entries;
  XXH64_state_t* hash = XXH64_createState();
  XXH64_reset(hash, 0);
  const std::unique_ptr<XXH64_state_t, decltype(&XXH64_freeState)> owner(hash, XXH64_freeState);

  if (::access(index_path.c_str(), F_OK) == 0) {
    ASSIGN_OR_RETURN(const std::string text,
                     ReadFile(index_path, limits::kMaxSafetensorsHeaderBytes));
    XXH64_update(hash, text.data(), text.size());
    ASSIGN_OR_RETURN(entries, ParseIndex(text, index_path));
  } else {
    ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                     SafetensorsFile::Open(dir + "/model.safetensors"));
    for (const StoredTensor& tensor : file->tensors())
      entries.emplace_back(tensor.name, "model.safetensors");
    std::sort(entries.begin(), entries.end());
  }

  absl::flat_hash_map<std::string, int> file_ids;
  for (const auto& [name, file_name] : entries) {
    auto [it, is_new] = file_ids.emplace(file_name, checkpoint->num_files());
    if (is_new) {
      ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                       SafetensorsFile::Open(absl::StrCat(dir, "/", file_name)));
      checkpoint->files_.push_back(std::move(file));
    }
    const StoredTensor* tensor = checkpoint->file(it->second).Find(name);
    if (tensor == nullptr)
      return absl::InvalidArgumentError(
          absl::StrCat(index_path, ": tensor ", name, " is not in ", file_name,
                       "; index and shards do not belong together, fetch them again"));
    StoredTensor copy = *tensor;
    copy.file_idx = it->second;
    checkpoint->names_.push_back(name);
    checkpoint->tensors_.emplace(name, std::move(copy));
  }
  for (const auto& file : checkpoint->files_) {
    const int64_t bytes = file->file_bytes();
    XXH64_update(hash, &bytes, sizeof(bytes));
    XXH64_update(hash, file->header().data(), file->header().size());
  }
  checkpoint->digest_ = XXH64_digest(hash);
  return checkpoint;
}

const StoredTensor* Checkpoint::Find(std::string_view name) const {
  const auto it = tensors_.find(ToAbsl(name));
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace twinspark
