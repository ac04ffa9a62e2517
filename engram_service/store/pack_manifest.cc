// See pack_manifest.h.
#include "engram_service/store/pack_manifest.h"

#include <boost/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/log.h"

namespace twinspark::engram {
namespace {

constexpr size_t kMaxManifestBytes = size_t{1} << 20;
constexpr char kFooterKey[] = "footer_sha256";
constexpr char kSamplesKey[] = "row_samples";

}  // namespace

std::string ManifestPath(const std::string& packed_path) {
  return packed_path + ".manifest.json";
}

absl::Status WriteManifest(const std::string& packed_path,
                           const PackedHeader& header,
                           const PackFacts& facts,
                           const RowSamples& samples) {
  boost::json::object manifest;
  manifest["file"] = PackedFileName(header);
  manifest["layer"] = header.layer;
  manifest["node"] = header.node;
  manifest["nodes"] = header.nodes;
  manifest["rows"] = header.rows_here;
  manifest["pages"] = header.pages;
  manifest["bytes"] = header.file_bytes;
  manifest["source"] = facts.source;
  manifest["generation"] = absl::StrCat(absl::Hex(header.generation, absl::kZeroPad16));
  manifest[kFooterKey] = Hex(header.footer_digest);
  manifest["rows_compared"] = facts.rows_compared;
  manifest["invalid_codes"] = 0;
  manifest["largest_scale_of_last_run"] = facts.largest_scale;
  boost::json::array& list = manifest[kSamplesKey].emplace_array();
  for (const std::string& sample : samples)
    list.emplace_back(absl::BytesToHexString(sample));
  return WriteFileAtomically(ManifestPath(packed_path), boost::json::serialize(manifest) + "\n");
}

RowSamples SamplesInManifest(const std::string& packed_path,
                             const Sha256Digest& footer_digest,
                             size_t num_columns) {
  RowSamples none(num_columns);
  const auto text = ReadFile(ManifestPath(packed_path), kMaxManifestBytes);
  if (!text.ok()) return none;
  boost::system::error_code error;
  const boost::json::value manifest = boost::json::parse(*text, error);
  if (error || !manifest.is_object()) {
    LOG_WARNING << ManifestPath(packed_path) << " is no JSON object; its row samples are not used";
    return none;
  }
  const boost::json::value* footer = manifest.as_object().if_contains(kFooterKey);
  const boost::json::value* list = manifest.as_object().if_contains(kSamplesKey);
  if (footer == nullptr || !footer->is_string() || footer->as_string() != Hex(footer_digest) ||
      list == nullptr || !list->is_array() || list->as_array().size() != num_columns) {
    return none;
  }
  RowSamples samples;
  for (const boost::json::value& value : list->as_array()) {
    if (!value.is_string()) return none;
    const std::string bytes = absl::HexStringToBytes(std::string(value.as_string()));
    samples.push_back(bytes.size() == kRowSampleBytes ? bytes : "");
  }
  return samples;
}

}  // namespace twinspark::engram
