// Layout of native and packed files: shards, splits, pages, a whole small file.
#include <algorithm>
#include <cstdio>

#include "engram_service/store/crc32c.h"
#include "engram_service/store/synthetic.h"
#include "tests/golden/engram/engram_checker.h"

namespace twinspark::golden {

void EngramChecker::CheckShards(const json::object& want) {
  if (!shape_) return report_.Error("shards.json without constants.json");
  for (const LayerHash& layer : layers_) {
    const std::string id = std::to_string(layer.layer_id);
    if (want.at("native").as_object().contains(id)) {
      const json::value& native = want.at("native").at(id);
      Equal("shards.native rows layer " + id, layer.num_rows,
            native.at("rows").to_number<uint64_t>());
      Equal("shards.native scale_offset layer " + id,
            native.at("weight_offset").to_number<uint64_t>() +
                layer.num_rows * static_cast<uint64_t>(shape_->row_weight_bytes()),
            native.at("scale_offset").to_number<uint64_t>());
    }
    if (want.at("ranges").as_object().contains(id)) {
      CheckRanges(layer, want.at("ranges").at(id).as_object());
    }
  }
  CheckCompat(want);
}

void EngramChecker::CheckRanges(const LayerHash& layer, const json::object& ranges) {
  const auto bounds = [&](const std::vector<int>& columns) {
    const auto first = static_cast<size_t>(columns.front());
    const auto last = static_cast<size_t>(columns.back());
    return std::pair(layer.offsets[first], layer.offsets[last] + layer.primes[last]);
  };
  for (const auto& split : ranges) {
    const std::string kind(split.key());
    const int of = std::stoi(kind.substr(kind.rfind('_') + 1));
    for (const auto& item : split.value().as_array()) {
      const std::string name =
          "shards.ranges layer " + std::to_string(layer.layer_id) + " " + kind + " ";
      if (kind.starts_with("balanced")) {
        const auto node = item.at("node").to_number<int>();
        const auto columns = engram::BalancedColumns(*shape_, node, of);
        Record(name + std::to_string(node),
               columns.ok() && *columns == Numbers<int>(item.at("columns")));
        continue;
      }
      const auto rank = item.at("rank").to_number<int>();
      const auto lo = item.at("row_lo").to_number<uint64_t>();
      const auto hi = item.at("row_hi").to_number<uint64_t>();
      if (kind.starts_with("contiguous")) {
        const auto columns = engram::ContiguousColumns(*shape_, rank, of);
        const auto range = Numbers<int>(item.at("columns"));
        Record(name + std::to_string(rank),
               columns.ok() && !columns->empty() && columns->front() == range.at(0) &&
                   columns->back() + 1 == range.at(1) && bounds(*columns) == std::pair(lo, hi));
      } else {
        const uint64_t n = static_cast<uint64_t>(of);
        const uint64_t r = static_cast<uint64_t>(rank);
        Record(name + std::to_string(rank),
               lo == layer.num_rows * r / n && hi == layer.num_rows * (r + 1) / n);
      }
    }
  }
}

// Offsets in files of the other packed layout: 4096 + (row - row_lo) * row bytes, split by columns.
void EngramChecker::CheckCompat(const json::object& want) {
  const uint64_t row_bytes =
      static_cast<uint64_t>(shape_->row_weight_bytes() + shape_->row_scale_bytes());
  if (want.contains("compat_DSV41EN1_examples")) {
    for (const auto& item : want.at("compat_DSV41EN1_examples").as_array()) {
      const json::object& example = item.as_object();
      const auto rank = example.at("rank").to_number<int>();
      const auto columns =
          engram::ContiguousColumns(*shape_, rank, example.at("of").to_number<int>());
      bool ok = false;
      for (const LayerHash& layer : layers_) {
        if (!columns.ok() || layer.layer_id != example.at("layer").to_number<int>()) continue;
        const auto last = static_cast<size_t>(columns->back());
        const uint64_t lo = layer.offsets[static_cast<size_t>(columns->front())];
        const uint64_t hi = layer.offsets[last] + layer.primes[last];
        ok = true;
        if (example.contains("file_bytes")) {
          ok = 4096 + (hi - lo) * row_bytes == example.at("file_bytes").to_number<uint64_t>();
        } else {
          const uint64_t row = example.at("row").to_number<uint64_t>();
          const uint64_t offset = 4096 + (row - lo) * row_bytes;
          const bool straddles = offset / 4096 != (offset + row_bytes - 1) / 4096;
          ok = offset == example.at("file_offset").to_number<uint64_t>() &&
               (!example.contains("straddles_4k") ||
                straddles == example.at("straddles_4k").as_bool());
        }
      }
      Record("shards.compat " + json::serialize(item), ok);
    }
  }
  for (const auto& field : want) {
    if (!std::string(field.key()).starts_with("compat_published")) continue;
    for (const auto& file : field.value().as_object()) {
      report_.Plan(1);
      report_.Skip("shards." + std::string(file.key()), "the native files are not here", true);
    }
  }
}

void EngramChecker::CheckPackedPage(const json::object& want) {
  const std::string check = "123456789";
  char hex[16];
  snprintf(hex, sizeof(hex), "%08x",
           engram::Crc32c({reinterpret_cast<const uint8_t*>(check.data()), check.size()}));
  Equal("packed_page.crc32c_check", std::string(hex), Text(want.at("crc32c_check_123456789")));

  // The shape behind the example: one layer whose columns are the segments.
  const json::array& segments = want.at("segments").as_array();
  LayerHash layer;
  layer.layer_id = want.at("layer").to_number<int>();
  EngramShape shape;
  shape.head_dim = 256;
  engram::PackTarget target;
  for (const auto& segment : segments) {
    layer.primes.push_back(segment.at("prime").to_number<uint32_t>());
    layer.offsets.push_back(layer.num_rows);
    layer.num_rows += layer.primes.back();
    shape.num_heads = std::max(shape.num_heads, segment.at("head").to_number<int>() + 1);
    shape.max_ngram_size = std::max(shape.max_ngram_size, segment.at("order").to_number<int>());
    target.columns.push_back(segment.at("column").to_number<int>());
  }
  auto planned = engram::PlanPackedFile(shape, layer, target);
  if (!planned.ok()) return report_.Error(std::string(planned.status().message()));
  engram::PackedLayout layout = *std::move(planned);
  const std::string generation = Text(want.at("generation_hex"));
  layout.header.generation = std::stoull(generation, nullptr, 16);
  for (size_t i = 0; i < segments.size(); ++i) {
    const engram::PackedSegment& got = layout.segments.at(i);
    const json::value& s = segments[i];
    Record("packed_page.segment " + std::to_string(i),
           got.global_row_lo == s.at("global_row_lo").to_number<uint64_t>() &&
               got.rows == s.at("rows").to_number<uint64_t>() &&
               got.first_page == s.at("first_page").to_number<uint64_t>() &&
               got.page_count == s.at("page_count").to_number<uint64_t>());
    Equal("packed_page.segment_entry " + std::to_string(i), HexOfStruct(got, sizeof(got)),
          Text(want.at("segment_entries_hex").at(i)));
  }
  std::vector<uint8_t> data(layout.header.pages * engram::kPageBytes);
  for (uint64_t page = 0; page < layout.header.pages; ++page) {
    const engram::PageRows rows = engram::RowsOfPage(layout, page);
    std::vector<uint8_t> weights(rows.count * 256);
    std::vector<uint8_t> scales(rows.count * 8);
    for (uint32_t i = 0; i < rows.count; ++i) {
      engram::SyntheticRow(rows.first_row + i, std::span(weights).subspan(i * 256, 256),
                           std::span(scales).subspan(i * 8, 8));
    }
    engram::BuildPage(layout, page, weights, scales,
                      std::span(data).subspan(page * engram::kPageBytes, engram::kPageBytes));
  }
  CheckPages(want, layout, data);
  Equal("packed_page.data_region_sha256", Hex(engram::Sha256Of(data)),
        Text(want.at("data_region_sha256")));
  snprintf(hex, sizeof(hex), "%08x", engram::Crc32c(data));
  Equal("packed_page.data_region_crc32c", std::string(hex), Text(want.at("data_region_crc32c")));
  if (want.contains("tiny_file")) CheckTinyFile(want.at("tiny_file").as_object(), layout, data);
  if (want.contains("compat_header_example")) {
    const std::string compat = Text(want.at("compat_header_example").at("hex"));
    Record("packed_page.compat_header",
           BytesOfHex(compat).size() == 48 && compat.starts_with("44535631454e3431"));
  }
}

void EngramChecker::CheckPages(const json::object& want,
                               const engram::PackedLayout& layout,
                               const std::vector<uint8_t>& data) {
  for (const auto& item : want.at("pages").as_array()) {
    const auto index = item.at("index").to_number<uint64_t>();
    const std::string name = "packed_page.page " + std::to_string(index) + " ";
    if (index >= layout.header.pages) {
      Record(name, false, "there is no such page");
      continue;
    }
    const auto page = std::span(data).subspan(index * engram::kPageBytes, engram::kPageBytes);
    Equal(name + "sha256", Hex(engram::Sha256Of(page)), Text(item.at("sha256")));
    Equal(name + "crc32c", HexOfBytes(page.subspan(4092)), Text(item.at("crc32c_hex")));
    Equal(name + "trailer", HexOfBytes(page.subspan(engram::kPageTrailerOffset)),
          Text(item.at("trailer_hex")));
    Record(name + "is accepted", engram::CheckPage(layout, index, page).ok());
  }
  for (const auto& item : want.at("lookups").as_array()) {
    const auto bucket = item.at("bucket").to_number<uint64_t>();
    bool ok = false;
    for (const engram::PackedSegment& segment : layout.segments) {
      if (segment.column != item.at("column").to_number<uint32_t>()) continue;
      ok = segment.first_page + bucket / engram::kRowsPerPage ==
               item.at("page").to_number<uint64_t>() &&
           bucket % engram::kRowsPerPage == item.at("slot").to_number<uint64_t>();
    }
    Record("packed_page.lookup " + json::serialize(item), ok);
  }
}

void EngramChecker::CheckTinyFile(const json::object& want,
                                  const engram::PackedLayout& planned,
                                  const std::vector<uint8_t>& data) {
  engram::PackedLayout layout = planned;
  std::vector<engram::ExtentEntry> extents;
  for (uint64_t i = 0; i < layout.num_extents(); ++i) {
    const auto bytes = std::span(data).subspan(i * engram::kPagesPerExtent * engram::kPageBytes,
                                               size_t{layout.ExtentPages(i)} * engram::kPageBytes);
    extents.push_back({engram::Crc32c(bytes), layout.ExtentPages(i), engram::Sha256Of(bytes)});
  }
  const std::vector<uint8_t> footer = engram::FooterBytes(layout, extents);
  layout.header.footer_digest = engram::Sha256Of(footer);
  layout.header.state = engram::kStateSealed;
  engram::SealHeader(layout.header);
  std::vector<uint8_t> file = engram::HeaderRegion(layout);
  file.insert(file.end(), data.begin(), data.end());
  file.insert(file.end(), footer.begin(), footer.end());
  Equal("packed_page.file bytes", static_cast<int64_t>(file.size()), Int(want.at("bytes")));
  Equal("packed_page.file header", HexOfBytes(std::span(file).first(332)),
        Text(want.at("header_first_332_bytes_hex")));
  Equal("packed_page.file header crc", HexOfBytes(std::span(file).subspan(4092, 4)),
        Text(want.at("header_crc32c_hex_le")));
  Equal("packed_page.file footer", HexOfBytes(std::span(footer).first(104)),
        Text(want.at("footer_first_104_bytes_hex")));
  Equal("packed_page.file footer sha256", Hex(layout.header.footer_digest),
        Text(want.at("footer_sha256")));
  Equal("packed_page.file sha256", Hex(engram::Sha256Of(file)), Text(want.at("sha256")));
  const auto parsed = engram::ParseHeaderRegion(file, file.size());
  Record("packed_page.file is accepted", parsed.ok() && engram::ParseFooter(*parsed, footer).ok(),
         std::string(parsed.status().message()));
}

}  // namespace twinspark::golden
