// Every bound in the system, with the relations between them checked here. Source: protocol
// specification 9, chat specification 4.13. Bounds that an operator may move are settings
// (settings_table.cc); their extremes are here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinspark::limits {

// Work of one step
inline constexpr int kMaxSlots = 64;
inline constexpr int kMaxDrafts = 5;  // rows 1..k of a sequence in a Round
inline constexpr int kMaxRowsPerSequence = 1 + kMaxDrafts;
inline constexpr int kMaxRoundRows = 48;
inline constexpr int kMaxShortPrefillRows = 512;
inline constexpr int kMaxChunkRows = 8192;
inline constexpr int kMaxOpsInFlight = 2;
inline constexpr int kMaxPausedChunks = 4;
inline constexpr int kMaxCachedMasks = 4096;
inline constexpr int kMaxRanks = 64;
static_assert(kMaxRoundRows % kMaxRowsPerSequence == 0, "a full Round holds whole sequences");
static_assert(kMaxRoundRows <= kMaxShortPrefillRows, "buffers for a short prefill serve a Round");
static_assert(kMaxShortPrefillRows <= kMaxChunkRows);

// Sequences
inline constexpr int64_t kMaxContext = 1048576;
inline constexpr int64_t kMaxPromptIds = kMaxContext;
inline constexpr int kMaxPromptIdsPerPart = 65536;  // OpenSequence may come in parts of this size
inline constexpr int kPageTokens = 64;  // a page covers 64 tokens in each of the shared caches
inline constexpr int kWindowSlack =
    2 *
    kMaxRowsPerSequence;  // ring slots beyond the window: this round's drafts and the next one's
static_assert(kMaxChunkRows % kPageTokens == 0);
static_assert(kMaxContext % kPageTokens == 0);

// Sampling
inline constexpr int kMaxLogitBias = 1024;
inline constexpr int kMaxTopLogprobs = 20;
inline constexpr int kMaxStopIds = 64;
inline constexpr int kMaxBadWords = 256;
inline constexpr int kMaxBadWordIds = 16;  // tokens of one bad word
inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopStringBytes = 256;
inline constexpr int kMaxChoices = 16;  // n

// Messages between the processes
inline constexpr size_t kMaxMessageBytes = size_t{8} << 20;
static_assert(kMaxPromptIdsPerPart * 5 + (1 << 16) < kMaxMessageBytes,
              "a part of a prompt fits into a message as varints");
static_assert(size_t{kMaxShortPrefillRows} * 5 * 64 < kMaxMessageBytes);

// Times between the processes, milliseconds. Sanitizer builds multiply them (kTimeScale).
#ifdef TWINSPARK_SANITIZER
inline constexpr int64_t kTimeScale = 10;
#else
inline constexpr int64_t kTimeScale = 1;
#endif
inline constexpr int64_t kHeartbeatPeriodMs = 250;
inline constexpr int64_t kRowWaitMsMax =
    1000 * kTimeScale;  // rows not there: end of the epoch, row service blamed
inline constexpr int64_t kCommunicatorWaitMsMax =
    1500 * kTimeScale;  // peer silent: end of the epoch, peer blamed
inline constexpr int64_t kWorkerSilenceMsMax = 1000 * kTimeScale;   // gateway ends the epoch
inline constexpr int64_t kGatewaySilenceMsMax = 2000 * kTimeScale;  // worker ends the epoch
inline constexpr int64_t kOpDeadlineMsMin = 2000 * kTimeScale;
inline constexpr int64_t kOpDeadlineMsMax = 120000 * kTimeScale;
inline constexpr int64_t kStatusPollMs = 500;
inline constexpr int64_t kReconnectBackoffMsMin = 250;
inline constexpr int64_t kReconnectBackoffMsMax = 8000;
inline constexpr int64_t kChunkTargetMs = 250;  // a chunk is cut so that nobody waits longer
static_assert(kRowWaitMsMax < kCommunicatorWaitMsMax && kCommunicatorWaitMsMax < kOpDeadlineMsMin,
              "waits are nested so that the right one is blamed");
static_assert(3 * kHeartbeatPeriodMs < kWorkerSilenceMsMax, "one lost heartbeat is not silence");

// HTTP
inline constexpr size_t kMaxBodyBytes = size_t{64} << 20;
inline constexpr size_t kMaxHeaderBytes = size_t{32} << 10;
inline constexpr int64_t kHeaderReadMsMax = 10000;
inline constexpr int64_t kBodyReadMsMax = 60000;
inline constexpr int kMaxConnections = 1024;
inline constexpr int kMaxQueuedRequests = 256;
inline constexpr int kMaxImagesPerRequest = 64;
inline constexpr int kMaxTools = 1024;
inline constexpr size_t kMaxToolSchemaBytes = size_t{1} << 20;
inline constexpr int kMaxJsonDepth = 128;
inline constexpr size_t kMaxUnsentBytes = size_t{1}
                                          << 20;  // of one stream whose client reads too slowly
inline constexpr int64_t kSseKeepaliveMs = 5000;

// Files
inline constexpr size_t kMaxSafetensorsHeaderBytes =
    size_t{256} << 20;  // 192,452 tensors of the released pack need 24 MB
inline constexpr size_t kMaxSettingsFileBytes = size_t{1} << 20;

}  // namespace twinspark::limits
