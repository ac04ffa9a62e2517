// Reads logical tensors of a checkpoint, whole or a slice, in whatever storage they have. One
// object per load: it remembers which names were used, so that leftovers can be refused, and hashes
// what it reads. Errors name tensor, expected and found. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/safetensors.h"
#include "shard_worker/model/model.h"
#include "shard_worker/model/weights.h"

namespace twinspark {

// Part [begin, end) of a dimension; `whole` for all of it.
struct Slice {
  int64_t begin = 0;
  int64_t end = -1;
  bool whole() const { return end < 0; }
  static Slice All() { return {}; }
  // Share `index` of `count` equal shares of `size`.
  static Slice Share(int64_t size, int index, int count) {
    return {size * index / count, size * (index + 1) / count};
  }
};

// What the published code keeps in bf16 and what in f32; matters only with Exl3Load::kBf16.
enum class Native : uint8_t { kF32, kBf16 };

// What EXL3 matrices become: compressed as they are, exact f16, or rounded to dense bf16.
enum class Exl3Load : uint8_t { kTrellis, kF16, kBf16 };

class TensorReader {
 public:
  TensorReader(const Checkpoint& checkpoint,
               Exl3Load exl3_load,
               const LoadProgressCallback& progress);
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  bool HasMatrix(const std::string& name) const;
  bool Has(const std::string& name) const { return checkpoint_.Find(name) != nullptr; }

  // BF16, F16 or F32 of exactly this shape (a vector: rows = 1), columns may be sliced.
  absl::StatusOr<FloatTensor> Floats(const std::string& name,
                                     int64_t rows,
                                     int64_t cols,
                                     Slice col_slice = Slice::All(),
                                     Native native = Native::kF32);
  absl::StatusOr<EmbeddingTable> Embedding(const std::string& name, int64_t rows, int64_t cols);

  // The matrix `name` (no suffix) of in -> out, of any storage.
  absl::StatusOr<LinearWeights> Matrix(const std::string& name,
                                       int64_t out,
                                       int64_t in,
                                       Slice out_slice = Slice::All(),
                                       Slice in_slice = Slice::All());

  // Marks a name as known without reading it.
  void Ignore(const std::string& name) { used_.insert(name); }
  // The first name of the checkpoint that nobody asked for, or empty.
  std::string FirstUnused() const;

  int64_t resident_bytes() const { return resident_bytes_; }
  uint64_t replicated_digest() const;
  uint64_t slices_digest() const;

 private:
  struct Hashes;
  struct MatrixShape {
    int64_t out = 0;
    int64_t in = 0;
  };
  // suh or svh, or the legacy sign words su or sv.
  struct Exl3Vector {
    bool is_signs = false;
    std::vector<std::byte> bytes;
  };

  absl::StatusOr<const StoredTensor*> Find(const std::string& name);
  absl::Status CheckShape(const StoredTensor& tensor, const std::vector<int64_t>& shape) const;
  // Rectangle of a tensor seen as rows of row_bytes: rows [r0, r1), bytes [b0, b1) of each.
  absl::StatusOr<std::vector<std::byte>> ReadRect(const StoredTensor& tensor,
                                                  int64_t row_bytes,
                                                  Slice rows,
                                                  Slice bytes);
  absl::Status CheckTrellis(const StoredTensor& trellis, int64_t k, int64_t n) const;
  absl::StatusOr<Exl3Vector> ReadExl3Vector(const std::string& f16_name,
                                            const std::string& sign_name,
                                            int64_t size,
                                            Slice part);
  absl::StatusOr<Exl3Codebook> ReadExl3Codebook(const std::string& name);
  absl::StatusOr<DenseFormat> DenseFormatOf(const StoredTensor& tensor) const;
  absl::StatusOr<std::vector<std::byte>> ReadScales(const std::string& name,
                                                    const MatrixShape& shape,
                                                    int64_t rows_per_scale,
                                                    Slice out_slice,
                                                    Slice in_slice);
  absl::StatusOr<std::vector<Bf16>> WidenMxFp8(const StoredTensor& tensor,
                                               const DenseSource& source) const;
  absl::StatusOr<LinearWeights> Exl3Matrix(
      const std::string& name, int64_t out, int64_t in, Slice out_slice, Slice in_slice);
  absl::StatusOr<LinearWeights> DenseMatrix(
      const std::string& name, int64_t out, int64_t in, Slice out_slice, Slice in_slice);
  absl::Status Annotate(const absl::Status& status, const StoredTensor& tensor) const;

  const Checkpoint& checkpoint_;
  const Exl3Load exl3_load_;
  const LoadProgressCallback& progress_;
  LoadProgress state_;
  absl::flat_hash_set<std::string> used_;
  int64_t resident_bytes_ = 0;
  std::unique_ptr<Hashes> hashes_;
};

}  // namespace twinspark
