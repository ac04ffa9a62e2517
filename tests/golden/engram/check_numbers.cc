// Dequantisation and the gate, through the model's own kernels.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>

#include "engram_service/store/synthetic.h"
#include "kernels/engram/engram.h"
#include "tests/golden/engram/engram_checker.h"

namespace twinspark::golden {
namespace {

// Rows of `cols` codes, one scale per 32, through the model's own kernel.
std::vector<uint16_t> Dequantize(ThreadPool& pool,
                                 const std::vector<uint8_t>& codes,
                                 const std::vector<uint8_t>& scales,
                                 int64_t cols) {
  std::vector<Bf16> out(codes.size());
  const auto rows = static_cast<int64_t>(codes.size()) / cols;
  EngramDequantizeParams params;
  params.codes = BasicTensorView<const void*>{codes.data(), DType::kF8E4M3, rows, cols, cols};
  params.scales =
      BasicTensorView<const void*>{scales.data(), DType::kF8E8M0, rows, cols / 32, cols / 32};
  params.out = TensorView{out.data(), DType::kBf16, rows, cols, cols};
  EngramDequantizeCpu(params, Launch{&pool, nullptr, nullptr});
  std::vector<uint16_t> bits;
  for (const Bf16 value : out)
    bits.push_back(value.bits);
  return bits;
}

bool IsNanBits(uint16_t bits) {
  return (bits & 0x7fff) > 0x7f80;
}

std::string DigestOf(const std::vector<uint16_t>& bits) {
  return Hex(
      engram::Sha256Of(std::span(reinterpret_cast<const uint8_t*>(bits.data()), bits.size() * 2)));
}

// The whole code x scale table under the three rules for edge codes.
std::vector<uint16_t> DequantTable(ThreadPool& pool, const std::string& rule) {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 256; ++code)
      codes.push_back(static_cast<uint8_t>(code));
    scales.insert(scales.end(), 8, static_cast<uint8_t>(scale));
  }
  std::vector<uint16_t> bits = Dequantize(pool, codes, scales, 256);
  for (size_t i = 0; i < bits.size(); ++i) {
    const size_t scale = i / 256;
    const bool nan_code = (codes[i] & 0x7f) == 0x7f;
    if (rule == "valid") {
      if (nan_code || scale == 255) bits[i] = 0;
    } else if (rule == "reference") {
      if (IsNanBits(bits[i])) bits[i] = 0x7fc0;
    } else {
      // The exponent shift: scale 0 reads as 0, scale 255 as infinity.
      const float shifted = std::bit_cast<float>(static_cast<uint32_t>(scale) << 23);
      if (scale == 0 || scale == 255) bits[i] = ToBf16(E4M3ToF32(codes[i]) * shifted).bits;
      if (nan_code || IsNanBits(bits[i])) bits[i] = 0xffff;
    }
  }
  return bits;
}

// Byte j of row r of the synthetic table, NaN codes included.
uint8_t SyntheticByte(uint64_t row, uint64_t j) {
  const auto h = static_cast<uint32_t>(row * 2654435761u + j * 40503u);
  return static_cast<uint8_t>(j < 256 ? (h >> 7) & 255 : 100 + (h >> 9) % 40);
}

// Numbers of any depth of nesting, in order.
void Flatten(const json::value& value, std::vector<double>& out) {
  if (const auto* list = value.if_array()) {
    for (const auto& item : *list)
      Flatten(item, out);
  } else {
    out.push_back(value.to_number<double>());
  }
}

std::vector<double> Flat(const json::value& value) {
  std::vector<double> out;
  Flatten(value, out);
  return out;
}

}  // namespace

void EngramChecker::CheckDequant(const json::object& want) {
  for (const auto& sample : want.at("e4m3fn_samples").as_array()) {
    const auto code = sample.at("code").to_number<uint8_t>();
    const float got = E4M3ToF32(code);
    const json::value& value = sample.at("value");
    const bool ok = value.is_null() ? std::isnan(got)
                                    : static_cast<double>(got) == value.to_number<double>() &&
                                          std::signbit(got) == (code >= 0x80);
    Record("dequant.e4m3fn " + std::to_string(code), ok);
  }
  for (const auto& pair : want.at("pairs").as_array()) {
    const auto scale = pair.at("scale").to_number<uint8_t>();
    const auto code = pair.at("code").to_number<uint8_t>();
    const std::vector<uint16_t> bits =
        Dequantize(pool_, std::vector<uint8_t>(32, code), {scale}, 32);
    char hex[8];
    snprintf(hex, sizeof(hex), "%04x", bits[0]);
    Equal("dequant.pair scale " + std::to_string(scale) + " code " + std::to_string(code),
          std::string(hex), Text(pair.at("bf16_hex")));
  }
  for (const auto& field : want) {
    if (!std::string(field.key()).starts_with("lut_")) continue;
    for (const auto& digest : field.value().as_object()) {
      const std::string rule(digest.key());
      const std::string kind = rule.starts_with("valid")       ? "valid"
                               : rule.starts_with("reference") ? "reference"
                                                               : "shift";
      Equal("dequant.table " + kind, DigestOf(DequantTable(pool_, kind)), Text(digest.value()));
    }
  }
  CheckDequantRows(want);
}

void EngramChecker::CheckDequantRows(const json::object& want) {
  if (want.contains("synthetic_rows_sha256")) {
    for (const auto& item : want.at("synthetic_rows_sha256").as_array()) {
      std::vector<uint8_t> codes;
      std::vector<uint8_t> scales;
      const auto rows = Numbers<uint64_t>(item.at("rows"));
      for (const uint64_t row : rows) {
        for (uint64_t j = 0; j < 256; ++j)
          codes.push_back(SyntheticByte(row, j));
        for (uint64_t j = 256; j < 264; ++j)
          scales.push_back(SyntheticByte(row, j));
      }
      std::vector<uint16_t> bits = Dequantize(pool_, codes, scales, 256);
      for (uint16_t& value : bits)
        value = IsNanBits(value) ? uint16_t{0xffff} : value;
      for (const auto& field : item.as_object()) {
        if (!std::string(field.key()).starts_with("sha256")) continue;
        Equal("dequant.rows " + std::to_string(rows.front()) + ".. (" +
                  std::to_string(rows.size()) + ")",
              DigestOf(bits), Text(field.value()));
      }
    }
  }
  if (!want.contains("clean_row_example")) return;
  const json::value& example = want.at("clean_row_example");
  std::vector<uint8_t> weights(256);
  std::vector<uint8_t> scales(8);
  engram::SyntheticRow(example.at("row").to_number<uint64_t>(), weights, scales);
  std::vector<uint8_t> record = weights;
  record.insert(record.end(), scales.begin(), scales.end());
  Record("dequant.clean_row record", Hex(record) == Text(example.at("record_hex")));
  const std::vector<uint16_t> bits = Dequantize(pool_, weights, scales, 256);
  Record("dequant.clean_row bf16",
         Hex(std::span(reinterpret_cast<const uint8_t*>(bits.data()), bits.size() * 2)) ==
             Text(example.at("bf16_hex_le")));
}

// The specification's bounds: f32 within 1e-6 relative, bf16 equal or one unit apart.
void EngramChecker::CheckGate(const json::object& want) {
  const auto streams = want.at("hc_mult").to_number<int64_t>();
  const auto dim = want.at("dim").to_number<int64_t>();
  const std::vector<double> x64 = Flat(want.at("x"));
  const std::vector<double> kv64 = Flat(want.at("kv"));
  const std::vector<double> q = Flat(want.at("q_weight"));
  const std::vector<double> k = Flat(want.at("k_weight"));
  const auto rows = static_cast<int64_t>(x64.size()) / (streams * dim);
  const std::vector<float> x(x64.begin(), x64.end());
  const std::vector<float> kv(kv64.begin(), kv64.end());
  std::vector<float> weight;
  for (size_t i = 0; i < q.size(); ++i)
    weight.push_back(static_cast<float>(q[i] * k[i]));
  std::vector<uint8_t> mask;
  for (const auto& live : want.at("live").as_array()) {
    mask.push_back(live.is_bool() ? !live.as_bool() : Int(live) == 0);
  }
  EngramGateParams params;
  params.streams = MakeView(x.data(), rows, streams * dim);
  params.kv = MakeView(kv.data(), rows, (streams + 1) * dim);
  params.weight = MakeView(weight.data(), streams, dim);
  params.eps = static_cast<float>(want.at("eps").to_number<double>());
  params.image_mask = mask.data();
  std::vector<float> out(x.size());
  std::vector<float> gate(static_cast<size_t>(rows * streams));
  params.out = MakeView(out.data(), rows, streams * dim);
  params.gate = MakeView(gate.data(), rows, streams);
  const Launch launch{&pool_, nullptr, nullptr};
  EngramGateCpu(params, launch);
  const auto compare = [this](const std::string& name, const std::vector<float>& got,
                              const std::vector<double>& expected) {
    const Distance distance =
        Distance::Of(std::span<const float>(got), std::span<const double>(expected));
    report_.Plan(1);
    report_.Compare(name, distance, distance.rel_l2, 1e-6);
  };
  compare("gate_small.gate", gate, Flat(want.at("gate")));
  compare("gate_small.out_f64", out, Flat(want.at("out_f64")));
  if (!want.contains("out_bf16_hex")) return;
  std::vector<Bf16> x16;
  std::vector<Bf16> kv16;
  for (const float value : x)
    x16.push_back(ToBf16(value));
  for (const float value : kv)
    kv16.push_back(ToBf16(value));
  std::vector<Bf16> out16(x.size());
  params.streams = MakeView(x16.data(), rows, streams * dim);
  params.streams.dtype = DType::kBf16;
  params.kv = MakeView(kv16.data(), rows, (streams + 1) * dim);
  params.out = MakeView(out16.data(), rows, streams * dim);
  EngramGateCpu(params, launch);
  std::vector<std::string> hex;
  const std::function<void(const json::value&)> collect = [&](const json::value& value) {
    if (value.is_string()) return hex.push_back(Text(value));
    for (const auto& item : value.as_array())
      collect(item);
  };
  collect(want.at("out_bf16_hex"));
  int worst = hex.size() == out16.size() ? 0 : INT32_MAX;
  for (size_t i = 0; worst != INT32_MAX && i < hex.size(); ++i) {
    worst = std::max(worst, std::abs(out16[i].bits - std::stoi(hex[i], nullptr, 16)));
  }
  Record("gate_small.out_bf16_hex", worst <= 1, std::to_string(worst) + " units apart");
}

}  // namespace twinspark::golden
