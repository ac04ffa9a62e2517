// Slicing reads of every storage form (tensor_reader.h).
#include "shard_worker/model/tensor_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <xxhash.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr int64_t kExl3Tile = 16;
constexpr int64_t kExl3Block = 128;  // Hadamard block: every cut of an EXL3 matrix is a multiple
constexpr int64_t kScaleBlock = 32;  // FP8 and FP4 scales

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Slice Resolve(Slice slice, int64_t size) {
  return slice.whole() ? Slice{0, size} : slice;
}

int64_t Length(Slice slice) {
  return slice.end - slice.begin;
}

absl::Status CheckCut(const std::string& name, Slice slice, int64_t size, int64_t multiple) {
  if ((slice.begin % multiple == 0 && slice.end % multiple == 0) ||
      (slice.begin == 0 && slice.end == size))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": cut ", slice.begin, "..", slice.end,
                                                 " of ", size, " is not a multiple of ", multiple,
                                                 "; this model cannot be split that way"));
}

// W = diag(suh) B Wq B diag(svh) in f64, rounded to f32 and then to bf16 (EXL3 specification 3.1).
absl::StatusOr<LinearWeights> DenseBf16(const Exl3Weights& weights, int64_t out, int64_t in) {
  const int64_t k = weights.k();
  const int64_t n = weights.n();
  std::vector<F16> decoded(static_cast<size_t>(k * n));
  Exl3Decode(weights, decoded);
  std::vector<double> w(decoded.size());
  for (size_t i = 0; i < w.size(); ++i)
    w[i] = static_cast<double>(ToF32(decoded[i]));
  const auto hadamard = [&](double* first, int64_t stride) {  // 128 values, unscaled
    for (int64_t h = 1; h < kExl3Block; h *= 2)
      for (int64_t i = 0; i < kExl3Block; i += 2 * h)
        for (int64_t j = i; j < i + h; ++j) {
          const double a = first[j * stride];
          const double b = first[(j + h) * stride];
          first[j * stride] = a + b;
          first[(j + h) * stride] = a - b;
        }
  };
  for (int64_t row = 0; row < k; ++row)
    for (int64_t col = 0; col < n; col += kExl3Block)
      hadamard(w.data() + row * n + col, 1);
  for (int64_t col = 0; col < n; ++col)
    for (int64_t row = 0; row < k; row += kExl3Block)
      hadamard(w.data() + row * n + col, n);
  std::vector<Bf16> dense(static_cast<size_t>(out * in));
  for (int64_t o = 0; o < out; ++o)
    for (int64_t i = 0; i < in; ++i) {
      const double scale = static_cast<double>(weights.suh()[static_cast<size_t>(i)]) *
                           static_cast<double>(weights.svh()[static_cast<size_t>(o)]);
      dense[static_cast<size_t>(o * in + i)] = ToBf16(static_cast<float>(
          w[static_cast<size_t>(i * n + o)] * scale / static_cast<double>(kExl3Block)));
    }
  DenseSource source;
  source.out = out;
  source.in = in;
  source.data = dense.data();
  ASSIGN_OR_RETURN(DenseWeights prepared, DenseWeights::Prepare(source));
  return LinearWeights(std::move(prepared));
}

template <class T>
const T* As(const std::vector<std::byte>& bytes) {
  return reinterpret_cast<const T*>(bytes.data());
}

}  // namespace

struct TensorReader::Hashes {
  XXH64_state_t* replicated = XXH64_createState();
  XXH64_state_t* slices = XXH64_createState();
  Hashes() {
    XXH64_reset(replicated, 0);
    XXH64_reset(slices, 0);
  }
  ~Hashes() {
    XXH64_freeState(replicated);
    XXH64_freeState(slices);
  }
};

TensorReader::TensorReader(const Checkpoint& checkpoint,
                           Exl3Load exl3_load,
                           const LoadProgressCallback& progress)
    : checkpoint_(checkpoint),
      exl3_load_(exl3_load),
      progress_(progress),
      hashes_(std::make_unique<Hashes>()) {
  state_.tensors_total = static_cast<int>(checkpoint.names().size());
  for (const std::string& name : checkpoint.names())
    state_.bytes_total += checkpoint.Find(name)->bytes;
}

TensorReader::~TensorReader() = default;

uint64_t TensorReader::replicated_digest() const {
  return XXH64_digest(hashes_->replicated);
}
uint64_t TensorReader::slices_digest() const {
  return XXH64_digest(hashes_->slices);
}

std::string TensorReader::FirstUnused() const {
  for (const std::string& name : checkpoint_.names())
    if (!used_.contains(name)) return name;
  return "";
}

bool TensorReader::HasMatrix(const std::string& name) const {
  return Has(name + ".trellis") || Has(name + ".weight");
}

absl::StatusOr<const StoredTensor*> TensorReader::Find(const std::string& name) {
  const StoredTensor* tensor = checkpoint_.Find(name);
  if (tensor == nullptr)
    return absl::NotFoundError(
        absl::StrCat(checkpoint_.dir(), ": tensor ", name,
                     " is missing; the checkpoint is incomplete or config.json "
                     "belongs to another model"));
  if (used_.insert(name).second) {
    state_.bytes_done += tensor->bytes;
    state_.tensors_done += 1;
    const std::string& path = checkpoint_.file(tensor->file_idx).path();
    if (state_.file != path) state_.file = path;
    if (progress_) progress_(state_);
  }
  return tensor;
}

absl::Status TensorReader::Annotate(const absl::Status& status, const StoredTensor& tensor) const {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(checkpoint_.file(tensor.file_idx).path(), ": tensor ",
                                   tensor.name, ": ", status.message()));
}

absl::Status TensorReader::CheckShape(const StoredTensor& tensor,
                                      const std::vector<int64_t>& shape) const {
  if (tensor.shape == shape) return absl::OkStatus();
  return Annotate(absl::InvalidArgumentError(absl::StrCat("shape is ", tensor.ShapeText(),
                                                          ", config.json asks for [",
                                                          absl::StrJoin(shape, ", "), "]")),
                  tensor);
}

absl::StatusOr<std::vector<std::byte>> TensorReader::ReadRect(const StoredTensor& tensor,
                                                              int64_t row_bytes,
                                                              Slice rows,
                                                              Slice bytes) {
  const int64_t num_rows = Length(rows);
  const int64_t width = Length(bytes);
  std::vector<std::byte> out(static_cast<size_t>(num_rows * width));
  if (width == row_bytes) {
    RETURN_IF_ERROR(checkpoint_.Read(tensor, rows.begin * row_bytes, out));
  } else {
    for (int64_t r = 0; r < num_rows; ++r)
      RETURN_IF_ERROR(checkpoint_.Read(
          tensor, (rows.begin + r) * row_bytes + bytes.begin,
          std::span(out).subspan(static_cast<size_t>(r * width), static_cast<size_t>(width))));
  }
  // A group of wo_a that is a tensor of its own is read whole, but only by the rank that has it.
  const bool is_whole = static_cast<int64_t>(out.size()) == tensor.bytes &&
                        !absl::StrContains(tensor.name, ".wo_a.slice.");
  XXH64_state_t* hash = is_whole ? hashes_->replicated : hashes_->slices;
  XXH64_update(hash, tensor.name.data(), tensor.name.size());
  XXH64_update(hash, out.data(), out.size());
  return out;
}

absl::StatusOr<FloatTensor> TensorReader::Floats(
    const std::string& name, int64_t rows, int64_t cols, Slice col_slice, Native native) {
  ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  std::vector<int64_t> shape = {cols};
  if (tensor->shape.size() == 2 || rows > 1) shape = {rows, cols};
  RETURN_IF_ERROR(CheckShape(*tensor, shape));
  const Slice part = Resolve(col_slice, cols);
  const int64_t element = static_cast<int64_t>(StoredTypeBytes(tensor->type));
  ASSIGN_OR_RETURN(
      const std::vector<std::byte> bytes,
      ReadRect(*tensor, cols * element, {0, rows}, {part.begin * element, part.end * element}));
  FloatTensor out;
  out.rows = rows;
  out.cols = Length(part);
  const size_t count = static_cast<size_t>(rows * out.cols);
  out.values.resize(count);
  switch (tensor->type) {
    case StoredType::kF32:
      std::memcpy(out.values.data(), bytes.data(), bytes.size());
      break;
    case StoredType::kBf16:
      for (size_t i = 0; i < count; ++i)
        out.values[i] = ToF32(As<Bf16>(bytes)[i]);
      break;
    case StoredType::kF16:
      for (size_t i = 0; i < count; ++i)
        out.values[i] = ToF32(As<F16>(bytes)[i]);
      break;
    default:
      return Annotate(absl::InvalidArgumentError(absl::StrCat(
                          "type is ", StoredTypeName(tensor->type), ", expected BF16, F16 or F32")),
                      *tensor);
  }
  for (size_t i = 0; i < count; ++i)
    if (!(std::abs(out.values[i]) <= 3.4e38f))
      return Annotate(
          absl::InvalidArgumentError(absl::StrCat("element ", i, " is not a finite number")),
          *tensor);
  if (native == Native::kBf16 && exl3_load_ == Exl3Load::kBf16)
    for (float& value : out.values)
      value = RoundBf16(value);
  resident_bytes_ += static_cast<int64_t>(count * sizeof(float));
  return out;
}

absl::StatusOr<EmbeddingTable> TensorReader::Embedding(const std::string& name,
                                                       int64_t rows,
                                                       int64_t cols) {
  ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  EmbeddingTable table;
  if (tensor->type != StoredType::kBf16) {
    ASSIGN_OR_RETURN(FloatTensor floats, Floats(name, rows, cols));
    table.f32 = std::move(floats.values);
  } else {
    RETURN_IF_ERROR(CheckShape(*tensor, {rows, cols}));
    ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                     ReadRect(*tensor, cols * 2, {0, rows}, {0, cols * 2}));
    table.bf16.resize(static_cast<size_t>(rows * cols));
    std::memcpy(table.bf16.data(), bytes.data(), bytes.size());
    resident_bytes_ += static_cast<int64_t>(bytes.size());
  }
  table.rows = rows;
  table.cols = cols;
  return table;
}

absl::StatusOr<LinearWeights> TensorReader::Matrix(
    const std::string& name, int64_t out, int64_t in, Slice out_slice, Slice in_slice) {
  const Slice out_part = Resolve(out_slice, out);
  const Slice in_part = Resolve(in_slice, in);
  if (Has(name + ".trellis") && Has(name + ".weight"))
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint_.dir(), ": ", name, " is there both as .trellis and as .weight"));
  absl::StatusOr<LinearWeights> weights = Has(name + ".trellis")
                                              ? Exl3Matrix(name, out, in, out_part, in_part)
                                              : DenseMatrix(name, out, in, out_part, in_part);
  if (weights.ok()) resident_bytes_ += static_cast<int64_t>(weights->bytes());
  return weights;
}

absl::Status TensorReader::CheckTrellis(const StoredTensor& trellis, int64_t k, int64_t n) const {
  if (trellis.type == StoredType::kI16 && trellis.shape.size() == 3 &&
      trellis.shape[0] == k / kExl3Tile && trellis.shape[1] == n / kExl3Tile &&
      trellis.shape[2] % kExl3Tile == 0 && trellis.shape[2] >= kExl3Tile &&
      trellis.shape[2] <= 8 * kExl3Tile)
    return absl::OkStatus();
  return Annotate(
      absl::InvalidArgumentError(absl::StrCat(
          "is ", StoredTypeName(trellis.type), " ", trellis.ShapeText(), ", expected I16 [",
          k / kExl3Tile, ", ", n / kExl3Tile, ", 16 * bits] with bits 1..8")),
      trellis);
}

absl::StatusOr<TensorReader::Exl3Vector> TensorReader::ReadExl3Vector(const std::string& f16_name,
                                                                      const std::string& sign_name,
                                                                      int64_t size,
                                                                      Slice part) {
  Exl3Vector vector;
  vector.is_signs = Has(sign_name) && !Has(f16_name);
  const int64_t per = vector.is_signs ? 16 : 1;  // channels per stored element
  const StoredType type = vector.is_signs ? StoredType::kI16 : StoredType::kF16;
  ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(vector.is_signs ? sign_name : f16_name));
  RETURN_IF_ERROR(CheckShape(*tensor, {size / per}));
  if (tensor->type != type)
    return Annotate(
        absl::InvalidArgumentError(absl::StrCat("type is ", StoredTypeName(tensor->type),
                                                ", expected ", StoredTypeName(type))),
        *tensor);
  ASSIGN_OR_RETURN(vector.bytes, ReadRect(*tensor, size / per * 2, {0, 1},
                                          {part.begin / per * 2, part.end / per * 2}));
  return vector;
}

absl::StatusOr<Exl3Codebook> TensorReader::ReadExl3Codebook(const std::string& name) {
  const bool has_mul1 = Has(name + ".mul1");
  const bool has_mcg = Has(name + ".mcg");
  if (has_mul1 && has_mcg)
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint_.dir(), ": ", name, " has both codebook markers, mul1 and mcg"));
  if (!has_mul1 && !has_mcg) return Exl3Codebook::k3Inst;
  ASSIGN_OR_RETURN(const StoredTensor* marker, Find(name + (has_mul1 ? ".mul1" : ".mcg")));
  const int32_t expected = has_mul1 ? kExl3Mul1Marker : kExl3McgMarker;
  int32_t value = 0;
  if (marker->bytes != 4) return Annotate(absl::InvalidArgumentError("is not one I32"), *marker);
  RETURN_IF_ERROR(checkpoint_.Read(*marker, 0, std::as_writable_bytes(std::span(&value, 1))));
  if (value != expected)
    return Annotate(absl::InvalidArgumentError(
                        absl::StrCat("codebook multiplier is ", value, ", expected ", expected)),
                    *marker);
  return has_mul1 ? Exl3Codebook::kMul1 : Exl3Codebook::kMcg;
}

absl::StatusOr<LinearWeights> TensorReader::Exl3Matrix(
    const std::string& name, int64_t out, int64_t in, Slice out_slice, Slice in_slice) {
  ASSIGN_OR_RETURN(const StoredTensor* trellis, Find(name + ".trellis"));
  const int64_t k = RoundUp(in, kExl3Block);
  const int64_t n = RoundUp(out, kExl3Block);
  RETURN_IF_ERROR(CheckTrellis(*trellis, k, n));
  RETURN_IF_ERROR(CheckCut(name, in_slice, in, kExl3Block));
  RETURN_IF_ERROR(CheckCut(name, out_slice, out, kExl3Block));
  // A whole dimension keeps its padding; a cut one has none (checked by CheckTensorParallel).
  const Slice ks = Length(in_slice) == in ? Slice{0, k} : in_slice;
  const Slice ns = Length(out_slice) == out ? Slice{0, n} : out_slice;

  Exl3Source source;
  source.k = Length(ks);
  source.n = Length(ns);
  source.bits = static_cast<int>(trellis->shape[2] / kExl3Tile);
  const int64_t tile_bytes = trellis->shape[2] * 2;
  ASSIGN_OR_RETURN(
      const std::vector<std::byte> tiles,
      ReadRect(*trellis, n / kExl3Tile * tile_bytes, {ks.begin / kExl3Tile, ks.end / kExl3Tile},
               {ns.begin / kExl3Tile * tile_bytes, ns.end / kExl3Tile * tile_bytes}));
  source.trellis = As<uint16_t>(tiles);
  ASSIGN_OR_RETURN(const Exl3Vector in_scale, ReadExl3Vector(name + ".suh", name + ".su", k, ks));
  ASSIGN_OR_RETURN(const Exl3Vector out_scale, ReadExl3Vector(name + ".svh", name + ".sv", n, ns));
  if (in_scale.is_signs) source.su = As<uint16_t>(in_scale.bytes);
  if (!in_scale.is_signs) source.suh = As<F16>(in_scale.bytes);
  if (out_scale.is_signs) source.sv = As<uint16_t>(out_scale.bytes);
  if (!out_scale.is_signs) source.svh = As<F16>(out_scale.bytes);
  if (Has(name + ".bias"))
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint_.dir(), ": ", name, ".bias: the text model has no bias anywhere"));
  ASSIGN_OR_RETURN(source.codebook, ReadExl3Codebook(name));

  absl::StatusOr<Exl3Weights> weights =
      Exl3Weights::Prepare(source, exl3_load_ == Exl3Load::kF16 ? Exl3Weights::Form::kDecodedF16
                                                                : Exl3Weights::Form::kTrellis);
  if (!weights.ok()) return Annotate(weights.status(), *trellis);
  if (exl3_load_ == Exl3Load::kBf16)
    return DenseBf16(*weights, Length(out_slice), Length(in_slice));
  return LinearWeights(*std::move(weights));
}

absl::StatusOr<DenseFormat> TensorReader::DenseFormatOf(const StoredTensor& tensor) const {
  switch (tensor.type) {
    case StoredType::kBf16:
      return DenseFormat::kBf16;
    case StoredType::kF16:
      return DenseFormat::kF16;
    case StoredType::kF32:
      return DenseFormat::kF32;
    case StoredType::kF8E4M3:
      return DenseFormat::kFp8Block32;
    case StoredType::kI8:
      return DenseFormat::kFp4Group32;
    default:
      return Annotate(
          absl::InvalidArgumentError(absl::StrCat("type is ", StoredTypeName(tensor.type),
                                                  ", expected BF16, F16, F32, F8_E4M3 or I8")),
          tensor);
  }
}

absl::StatusOr<std::vector<std::byte>> TensorReader::ReadScales(const std::string& name,
                                                                const MatrixShape& shape,
                                                                int64_t rows_per_scale,
                                                                Slice out_slice,
                                                                Slice in_slice) {
  ASSIGN_OR_RETURN(const StoredTensor* scale, Find(name));
  const int64_t cols = (shape.in + kScaleBlock - 1) / kScaleBlock;
  RETURN_IF_ERROR(CheckShape(*scale, {(shape.out + rows_per_scale - 1) / rows_per_scale, cols}));
  if (scale->type != StoredType::kF8E8M0 && scale->type != StoredType::kU8)
    return Annotate(absl::InvalidArgumentError(absl::StrCat("type is ", StoredTypeName(scale->type),
                                                            ", expected F8_E8M0")),
                    *scale);
  RETURN_IF_ERROR(CheckCut(name, in_slice, shape.in, kScaleBlock));
  RETURN_IF_ERROR(CheckCut(name, out_slice, shape.out, rows_per_scale));
  return ReadRect(
      *scale, cols,
      {out_slice.begin / rows_per_scale, (out_slice.end + rows_per_scale - 1) / rows_per_scale},
      {in_slice.begin / kScaleBlock, (in_slice.end + kScaleBlock - 1) / kScaleBlock});
}

absl::StatusOr<LinearWeights> TensorReader::DenseMatrix(
    const std::string& name, int64_t out, int64_t in, Slice out_slice, Slice in_slice) {
  ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name + ".weight"));
  DenseSource source;
  source.out = Length(out_slice);
  source.in = Length(in_slice);
  ASSIGN_OR_RETURN(source.format, DenseFormatOf(*tensor));
  const bool is_fp4 = source.format == DenseFormat::kFp4Group32;
  RETURN_IF_ERROR(CheckShape(*tensor, {out, is_fp4 ? in / 2 : in}));
  const int64_t element_bytes = static_cast<int64_t>(StoredTypeBytes(tensor->type));
  const int64_t per_byte = is_fp4 ? 2 : 1;
  ASSIGN_OR_RETURN(const std::vector<std::byte> data,
                   ReadRect(*tensor, in * element_bytes / per_byte, out_slice,
                            {in_slice.begin * element_bytes / per_byte,
                             in_slice.end * element_bytes / per_byte}));
  source.data = data.data();
  std::vector<std::byte> scales;
  std::vector<Bf16> widened;
  const auto use_widened = [&] {
    source.format = DenseFormat::kBf16;
    source.data = widened.data();
    source.scales = nullptr;
  };
  if (source.format == DenseFormat::kFp8Block32 || is_fp4) {
    const bool is_mxfp8 = !is_fp4 && Has(name + ".weight_scale");
    ASSIGN_OR_RETURN(scales, ReadScales(name + (is_mxfp8 ? ".weight_scale" : ".scale"), {out, in},
                                        is_fp4 || is_mxfp8 ? 1 : kScaleBlock, out_slice, in_slice));
    source.scales = As<uint8_t>(scales);
    if (is_mxfp8) {
      ASSIGN_OR_RETURN(widened, WidenMxFp8(*tensor, source));
      use_widened();
    }
  }
  if (source.format == DenseFormat::kF16 && exl3_load_ == Exl3Load::kBf16) {
    widened.resize(static_cast<size_t>(source.out * source.in));
    for (size_t i = 0; i < widened.size(); ++i)
      widened[i] = ToBf16(ToF32(As<F16>(data)[i]));
    use_widened();
  }
  absl::StatusOr<DenseWeights> weights = DenseWeights::Prepare(source);
  if (!weights.ok()) return Annotate(weights.status(), *tensor);
  return LinearWeights(*std::move(weights));
}

// A scale per row and 32 inputs: exact in bf16.
absl::StatusOr<std::vector<Bf16>> TensorReader::WidenMxFp8(const StoredTensor& tensor,
                                                           const DenseSource& source) const {
  std::vector<Bf16> widened(static_cast<size_t>(source.out * source.in));
  const auto* codes = static_cast<const uint8_t*>(source.data);
  const int64_t scale_cols = (source.in + kScaleBlock - 1) / kScaleBlock;
  for (int64_t o = 0; o < source.out; ++o)
    for (int64_t i = 0; i < source.in; ++i) {
      const float value = E4M3ToF32(codes[o * source.in + i]) *
                          E8M0ToF32(source.scales[o * scale_cols + i / kScaleBlock]);
      if (!std::isfinite(value))
        return Annotate(absl::InvalidArgumentError(
                            absl::StrCat("element [", o, ", ", i, "] is not a finite number")),
                        tensor);
      widened[static_cast<size_t>(o * source.in + i)] = ToBf16(value);
    }
  return widened;
}

}  // namespace twinspark
