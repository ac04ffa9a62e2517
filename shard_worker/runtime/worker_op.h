// One op of the log and its outcome, as plain structs: what shard_worker/service makes of the bytes
// on the stream and what the compute thread executes. Bounds that need no state were checked when
// it was read (service/op_reader); what depends on slots and pages is checked by the model. Source:
// protocol specification 3 and 4.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"

#include "shard_worker/model/step.h"

namespace twinspark {

// A part of OpenSequence: the first (ids_offset 0) has everything, later ones only ids.
struct OpenSequencePart {
  OpenSequence open;  // ids of this part only
  uint64_t request_id_hash = 0;
  int64_t ids_offset = 0;
  int64_t total_ids = 0;
};

struct SetSamplingControl {
  int slot = 0;
  SamplingParams sampling;
};

struct MapPagesControl {
  int slot = 0;
  std::vector<PageMapping> pages;
};

struct TruncateControl {
  int slot = 0;
  int64_t length = 0;
};

struct CloseSequenceControl {
  int slot = 0;
};

struct SetMaskControl {
  int32_t mask_id = 0;
  // Packed bits, or, when `runs` is not empty, alternating run lengths beginning with forbidden
  // tokens.
  std::vector<uint8_t> bits;
  std::vector<uint32_t> runs;
};

// Ping and Fence: on a CPU every earlier op is done when this one runs.
struct NothingControl {};

using Control = std::variant<OpenSequencePart,
                             SetSamplingControl,
                             MapPagesControl,
                             TruncateControl,
                             CloseSequenceControl,
                             SetMaskControl,
                             NothingControl>;

struct ChunkSliceWork {
  uint64_t chunk_id = 0;
  int first_layer = 0;
  int end_layer = 0;
  PrefillRange range;
};

struct WorkerOp {
  uint64_t op_id = 0;
  int64_t deadline_ms = 0;
  std::string bytes;  // as the gateway serialised them: hashed into the digest
  // Not OK: the op was refused when it was read. UNIMPLEMENTED is answered and leaves the epoch
  // alive; anything else ends it. The rest of the struct is empty then.
  absl::Status refused;
  std::vector<Control> controls;
  std::vector<RoundSequence> round;
  std::vector<PrefillRange> short_prefill;
  std::optional<ChunkSliceWork> chunk_slice;
  int64_t received_us = 0;  // steady clock
};

struct SequenceOutcome {
  SequenceResult result;
  int64_t committed_length = 0;
};

struct OpTimings {
  int64_t queue_us = 0;
  int64_t engram_wait_us = 0;
  int64_t compute_us = 0;
  int64_t collectives_us = 0;
  int64_t sample_us = 0;
  int64_t draft_us = 0;
  int64_t total_us = 0;
  int rows = 0;
};

struct OpOutcome {
  uint64_t op_id = 0;
  absl::Status status;
  uint64_t digest = 0;
  OpTimings timings;
  std::vector<SequenceOutcome> round;
  std::vector<SequenceOutcome> short_prefill;
  std::optional<SequenceOutcome> chunk_slice;
};

}  // namespace twinspark
