// golden_exl3 --dir DIR: EXL3 matrices against stored states, decoded weights, rotated inputs and
// outputs. DIR holds manifest.json and one file per case. Exact: states_tile0, Wq, xh (f16_upstream
// rounding). y: max abs error at most 1e-3 of the case's rms_y. Cases that name a safetensors file
// are a packed layer with its dequantised and its original matrix: the layer is applied to the
// identity, compared like y, and its error against the original must be the manifest's nmse.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "common/file_util.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "common/string_view.h"
#include "kernels/exl3/exl3_linear.h"
#include "tests/golden/golden_report.h"

namespace twinspark::golden {
namespace {

namespace json = boost::json;

constexpr size_t kMaxManifestBytes = 64 << 20;
constexpr size_t kMaxCaseBytes = size_t{1} << 31;
constexpr double kOutputBound = 1e-3;  // of rms, as the format's vectors document it
constexpr double kNmseBound = 1e-4;    // relative: the manifest prints six digits

// One case: its manifest entry and the bytes of its file.
class Case {
 public:
  static absl::StatusOr<Case> Read(const std::string& dir, const json::object& entry) {
    Case c;
    c.entry_ = &entry;
    ASSIGN_OR_RETURN(c.name_, c.Text("file"));
    ASSIGN_OR_RETURN(c.data_, ReadFile(absl::StrCat(dir, "/", c.name_), kMaxCaseBytes));
    return c;
  }

  const std::string& name() const { return name_; }
  bool Has(std::string_view key) const { return entry_->contains(Key(key)); }

  absl::StatusOr<std::string> Text(std::string_view key) const {
    const json::value* v = entry_->if_contains(Key(key));
    if (v == nullptr || !v->is_string()) return Missing(key, "a string");
    return std::string(v->as_string().data(), v->as_string().size());
  }
  absl::StatusOr<double> Number(std::string_view key) const {
    const json::value* v = entry_->if_contains(Key(key));
    if (v == nullptr || !v->is_number()) return Missing(key, "a number");
    return v->to_number<double>();
  }
  absl::StatusOr<int64_t> Size(std::string_view key) const {
    ASSIGN_OR_RETURN(const double value, Number(key));
    if (!(value >= 1 && value <= 1 << 24) || value != std::floor(value))
      return Missing(key, "a size");
    return static_cast<int64_t>(value);
  }
  std::vector<std::string> ArrayNames() const {
    std::vector<std::string> names;
    if (const json::value* v = entry_->if_contains("arrays"); v != nullptr && v->is_object()) {
      for (const auto& item : v->as_object())
        names.emplace_back(item.key().data(), item.key().size());
    }
    return names;
  }

  // A copy of array `array` with exactly `count` elements of T.
  template <class T>
  absl::StatusOr<std::vector<T>> Array(std::string_view array, int64_t count) const {
    const json::value* arrays = entry_->if_contains("arrays");
    const json::value* a = arrays != nullptr && arrays->is_object()
                               ? arrays->as_object().if_contains(Key(array))
                               : nullptr;
    if (a == nullptr || !a->is_object()) return Missing(array, "an array");
    const json::value* offset = a->as_object().if_contains("offset");
    const json::value* bytes = a->as_object().if_contains("bytes");
    if (offset == nullptr || bytes == nullptr || !offset->is_int64() || !bytes->is_int64())
      return Missing(array, "an array with offset and bytes");
    const int64_t begin = offset->as_int64();
    const int64_t size = bytes->as_int64();
    const int64_t want = count * static_cast<int64_t>(sizeof(T));
    if (size != want || begin < 0 || begin > static_cast<int64_t>(data_.size()) - size)
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: array %s has %d bytes at %d, expected %d inside %d", name_,
                          std::string(array), size, begin, want, data_.size()));
    std::vector<T> values(static_cast<size_t>(count));
    std::memcpy(values.data(), data_.data() + begin, static_cast<size_t>(size));
    return values;
  }

 private:
  static json::string_view Key(std::string_view key) { return {key.data(), key.size()}; }
  absl::Status Missing(std::string_view key, std::string_view kind) const {
    return absl::InvalidArgumentError(
        absl::StrCat(name_, ": manifest has no ", ToAbsl(key), " (", ToAbsl(kind), ")"));
  }

  const json::object* entry_ = nullptr;
  std::string name_;
  std::string data_;
};

// Threads and scratch for the op.
class Ops {
 public:
  Ops() : pool_(1) {}

  std::vector<float> Linear(const Exl3Weights& w, ConstTensorView x, Exl3Rounding rounding) {
    const Exl3ScratchShape shape = {x.rows, w.k()};
    Arena arena(Exl3LinearScratchBytes({&shape, 1}, 1));
    Launch launch;
    launch.pool = &pool_;
    launch.arena = &arena;
    std::vector<float> y(static_cast<size_t>(x.rows * w.n()));
    Exl3LinearCpu({&w, x, MakeView(y.data(), x.rows, w.n()), rounding}, launch);
    return y;
  }

 private:
  ThreadPool pool_;
};

absl::StatusOr<Exl3Codebook> CodebookNamed(const std::string& name) {
  for (Exl3Codebook codebook : {Exl3Codebook::k3Inst, Exl3Codebook::kMcg, Exl3Codebook::kMul1}) {
    if (name == Exl3CodebookName(codebook)) return codebook;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown codebook ", name));
}

template <class T>
int64_t CountDiffering(const std::vector<T>& got, const std::vector<T>& want) {
  int64_t differing = 0;
  for (size_t i = 0; i < want.size(); ++i)
    differing += std::memcmp(&got[i], &want[i], sizeof(T)) != 0;
  return differing;
}

void ComparedExactly(GoldenReport& report,
                     const std::string& name,
                     int64_t differing,
                     size_t total) {
  report.CompareExact(name, differing, static_cast<int64_t>(total));
}

absl::Status CompareMatrix(const Case& c, Ops& ops, GoldenReport& report) {
  Exl3Source source;
  ASSIGN_OR_RETURN(const std::string codebook, c.Text("codebook"));
  ASSIGN_OR_RETURN(source.codebook, CodebookNamed(codebook));
  ASSIGN_OR_RETURN(const int64_t bits, c.Size("K"));
  ASSIGN_OR_RETURN(source.k, c.Size("k"));
  ASSIGN_OR_RETURN(source.n, c.Size("n"));
  ASSIGN_OR_RETURN(const int64_t m, c.Size("m"));
  ASSIGN_OR_RETURN(const double rms_y, c.Number("rms_y"));
  source.bits = static_cast<int>(bits);
  const int64_t k = source.k;
  const int64_t n = source.n;
  ASSIGN_OR_RETURN(const auto trellis, c.Array<uint16_t>("trellis", k * n * bits / 16));
  ASSIGN_OR_RETURN(const auto suh, c.Array<F16>("suh", k));
  ASSIGN_OR_RETURN(const auto svh, c.Array<F16>("svh", n));
  ASSIGN_OR_RETURN(const auto x, c.Array<F16>("x", m * k));
  ASSIGN_OR_RETURN(const auto want_states, c.Array<uint16_t>("states_tile0", 256));
  ASSIGN_OR_RETURN(const auto want_wq, c.Array<F16>("Wq", k * n));
  ASSIGN_OR_RETURN(const auto want_xh, c.Array<F16>("xh", m * k));
  ASSIGN_OR_RETURN(const auto want_y, c.Array<float>("y", m * n));
  source.trellis = trellis.data();
  source.suh = suh.data();
  source.svh = svh.data();
  ASSIGN_OR_RETURN(const Exl3Weights w, Exl3Weights::Prepare(source));

  std::vector<uint16_t> states(256);
  Exl3TileStates(trellis.data(), source.bits, std::span<uint16_t, 256>(states));
  ComparedExactly(report, c.name() + " states_tile0", CountDiffering(states, want_states),
                  states.size());

  std::vector<F16> wq(want_wq.size());
  Exl3Decode(w, wq);
  ComparedExactly(report, c.name() + " Wq", CountDiffering(wq, want_wq), wq.size());

  const Exl3LinearParams params = {&w, MakeView(x.data(), m, k), TensorView(),
                                   Exl3Rounding::kF16Upstream};
  std::vector<float> xh(want_xh.size());
  Exl3RotateInput(params, xh);
  std::vector<F16> xh_f16;
  for (float v : xh)
    xh_f16.push_back(ToF16(v));
  ComparedExactly(report, c.name() + " xh", CountDiffering(xh_f16, want_xh), xh.size());

  const std::vector<float> y = ops.Linear(w, params.x, Exl3Rounding::kF16Upstream);
  const Distance distance = Distance::Of(std::span<const float>(y), std::span<const float>(want_y));
  report.Compare(c.name() + " y", distance, distance.max_abs, kOutputBound * rms_y);
  return absl::OkStatus();
}

// The matrix of a packed layer, from its safetensors file.
struct Layer {
  std::vector<std::byte> trellis, suh, svh;
  Exl3Weights weights;
};

absl::StatusOr<Layer> ReadLayer(const std::string& dir, const Case& c) {
  ASSIGN_OR_RETURN(const std::string file_name, c.Text("safetensors"));
  ASSIGN_OR_RETURN(const std::string key, c.Text("key"));
  ASSIGN_OR_RETURN(const auto file, SafetensorsFile::Open(absl::StrCat(dir, "/", file_name)));
  const StoredTensor* trellis = file->Find(key + ".trellis");
  const StoredTensor* suh = file->Find(key + ".suh");
  const StoredTensor* svh = file->Find(key + ".svh");
  if (trellis == nullptr || suh == nullptr || svh == nullptr || trellis->shape.size() != 3 ||
      trellis->type != StoredType::kI16 || suh->type != StoredType::kF16 ||
      svh->type != StoredType::kF16 || trellis->shape[2] % 16 != 0)
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": no complete EXL3 matrix ", key, " (trellis, suh, svh)"));
  Exl3Source source;
  source.k = 16 * trellis->shape[0];
  source.n = 16 * trellis->shape[1];
  source.bits = static_cast<int>(trellis->shape[2] / 16);
  if (suh->num_elements() != source.k || svh->num_elements() != source.n)
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": suh and svh of ", key, " do not fit its trellis"));
  const bool mul1 = file->Find(key + ".mul1") != nullptr;
  const bool mcg = file->Find(key + ".mcg") != nullptr;
  source.codebook = mul1 ? Exl3Codebook::kMul1 : (mcg ? Exl3Codebook::kMcg : Exl3Codebook::k3Inst);
  if (mul1 || mcg) {
    const StoredTensor& marker = *file->Find(key + (mul1 ? ".mul1" : ".mcg"));
    ASSIGN_OR_RETURN(const auto bytes, file->ReadAll(marker));
    int32_t value = 0;
    if (bytes.size() == sizeof(value)) std::memcpy(&value, bytes.data(), sizeof(value));
    if ((mul1 && mcg) || value != (mul1 ? kExl3Mul1Marker : kExl3McgMarker))
      return absl::InvalidArgumentError(
          absl::StrCat(file_name, ": unknown codebook marker ", value, " of ", key));
  }
  Layer layer;
  ASSIGN_OR_RETURN(layer.trellis, file->ReadAll(*trellis));
  ASSIGN_OR_RETURN(layer.suh, file->ReadAll(*suh));
  ASSIGN_OR_RETURN(layer.svh, file->ReadAll(*svh));
  source.trellis = reinterpret_cast<const uint16_t*>(layer.trellis.data());
  source.suh = reinterpret_cast<const F16*>(layer.suh.data());
  source.svh = reinterpret_cast<const F16*>(layer.svh.data());
  ASSIGN_OR_RETURN(layer.weights, Exl3Weights::Prepare(source));
  return layer;
}

absl::Status CompareLayer(const std::string& dir, const Case& c, Ops& ops, GoldenReport& report) {
  ASSIGN_OR_RETURN(const Layer layer, ReadLayer(dir, c));
  ASSIGN_OR_RETURN(const double nmse, c.Number("nmse"));
  const int64_t k = layer.weights.k();
  const int64_t n = layer.weights.n();
  ASSIGN_OR_RETURN(const auto want, c.Array<float>("W_dequant", k * n));
  ASSIGN_OR_RETURN(const auto original, c.Array<F16>("W_original", k * n));
  std::vector<float> identity(static_cast<size_t>(k * k), 0.0f);
  for (int64_t i = 0; i < k; ++i)
    identity[static_cast<size_t>(i * k + i)] = 1.0f;
  const std::vector<float> w =
      ops.Linear(layer.weights, MakeView(identity.data(), k, k), Exl3Rounding::kNone);

  double squares = 0.0;
  for (float v : want)
    squares += static_cast<double>(v) * static_cast<double>(v);
  const double rms = std::sqrt(squares / static_cast<double>(want.size()));
  const Distance distance = Distance::Of(std::span<const float>(w), std::span<const float>(want));
  report.Compare(c.name() + " W_dequant", distance, distance.max_abs, kOutputBound * rms);

  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < w.size(); ++i) {
    const double o = static_cast<double>(ToF32(original[i]));
    error += (static_cast<double>(w[i]) - o) * (static_cast<double>(w[i]) - o);
    norm += o * o;
  }
  const double difference = std::abs(error / norm - nmse);
  report.Compare(c.name() + " W_original nmse", {difference, difference / nmse}, difference,
                 kNmseBound * nmse);
  return absl::OkStatus();
}

// Compared arrays of a case; the others are inputs. An unknown name is an error: it would otherwise
// be left out in silence.
absl::StatusOr<int64_t> PlannedOf(const Case& c) {
  int64_t planned = 0;
  for (const std::string& name : c.ArrayNames()) {
    const bool compared = name == "states_tile0" || name == "Wq" || name == "xh" || name == "y" ||
                          name == "W_dequant" || name == "W_original";
    const bool input = name == "trellis" || name == "suh" || name == "svh" || name == "x";
    if (!compared && !input)
      return absl::InvalidArgumentError(absl::StrCat(c.name(), ": unknown array ", name));
    planned += compared;
  }
  return planned;
}

int Run(const std::string& dir) {
  GoldenReport report;
  const absl::StatusOr<std::string> text = ReadFile(dir + "/manifest.json", kMaxManifestBytes);
  json::error_code error;
  const json::value manifest = text.ok() ? json::parse(*text, error) : json::value();
  const json::value* cases =
      manifest.is_object() ? manifest.as_object().if_contains("cases") : nullptr;
  if (!text.ok() || error || cases == nullptr || !cases->is_array()) {
    report.Error(absl::StrCat(
        dir,
        "/manifest.json: ", text.ok() ? "not a JSON object with cases" : text.status().ToString()));
    return report.Finish();
  }
  Ops ops;
  for (const json::value& entry : cases->as_array()) {
    absl::Status status = absl::InvalidArgumentError("manifest.json: a case is not an object");
    if (entry.is_object()) {
      const absl::StatusOr<Case> c = Case::Read(dir, entry.as_object());
      status = c.status();
      if (status.ok()) {
        const absl::StatusOr<int64_t> planned = PlannedOf(*c);
        report.Plan(planned.value_or(0));
        status = planned.status();
        if (status.ok())
          status = c->Has("safetensors") ? CompareLayer(dir, *c, ops, report)
                                         : CompareMatrix(*c, ops, report);
      }
    }
    if (!status.ok()) report.Error(status.ToString());
  }
  return report.Finish();
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  constexpr char kUsage[] = "usage: golden_exl3 --dir DIR\n";
  if (twinspark::golden::HelpWasAsked(argc, argv, kUsage)) return 0;
  if (argc != 3 || std::string_view(argv[1]) != "--dir") {
    std::fputs(kUsage, stderr);
    return twinspark::golden::kExitFailed;
  }
  return twinspark::golden::Run(argv[2]);
}
