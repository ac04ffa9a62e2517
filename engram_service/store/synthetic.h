// Tables whose every byte follows from its row number (the formula of the golden vectors, NaN codes
// replaced), so that tests and benchmarks of any size can check what they read without a second
// copy. Callers: tests, tools/synth_table, engram_bench.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"

#include "engram_service/store/hash_params.h"

namespace twinspark::engram {

// Weight and scale bytes of global row `row`: byte j of the record has h = row * 2654435761 +
// j * 40503 mod 2^32; weights (h >> 7) & 255 with NaN codes made 0x7e, scales (j = 256 + index)
// 100 + (h >> 9) mod 40.
void SyntheticRow(uint64_t row, std::span<uint8_t> weights, std::span<uint8_t> scales);

// Writes a directory as a checkpoint has it: one safetensors file per layer, the index, config.json
// (`config_template` with the Engram keys of `shape`) and a token map (id modulo classes). The
// files hold table tensors only.
absl::Status WriteSyntheticModel(const std::string& dir,
                                 const EngramShape& shape,
                                 const std::string& config_template);

}  // namespace twinspark::engram
