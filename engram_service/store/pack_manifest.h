// The manifest beside a packed file (X.egp.manifest.json): how it was made, for people, and samples
// of the whole table it was made from (row_samples.h), which the format of the file has no place
// for. It speaks for one content only: it names the footer's digest. Callers: row_table_writer,
// row_samples.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"

#include "engram_service/store/row_format.h"
#include "engram_service/store/row_samples.h"

namespace twinspark::engram {

struct PackFacts {
  std::string source;  // path
  uint64_t rows_compared = 0;
  uint32_t largest_scale = 0;  // exponent byte, over the rows of the last run
};

std::string ManifestPath(const std::string& packed_path);

// Replaces the manifest of the file.
absl::Status WriteManifest(const std::string& packed_path,
                           const PackedHeader& header,
                           const PackFacts& facts,
                           const RowSamples& samples);

// The samples that a manifest states for a file with this footer; all empty when there is no
// manifest, or it belongs to another content or was written without them.
RowSamples SamplesInManifest(const std::string& packed_path,
                             const Sha256Digest& footer_digest,
                             size_t num_columns);

}  // namespace twinspark::engram
