// Shared memory between a shard worker and the row service of its node: the structs that both
// map, and the messages of the Attach handshake. Plain C structs, no generated code, so that a
// CUDA build can include it too.
//
// Life: the worker connects to the service's Unix socket (SOCK_SEQPACKET) and sends
// RowAttachRequest; the service answers RowAttachReply with three descriptors (SCM_RIGHTS): a
// sealed memfd with the control area (RowRingHeader, completion lines, request ring), one with the
// row slabs, and the doorbell, an eventfd that the client rings when the service sleeps. Nothing
// has a name in a file system, so nothing is left behind when either side dies; closing the socket
// ends the attachment. All numbers little endian. Spec: engram.md 4.1, protocol.md 7.
//
// Trust: the service treats everything a client can write as hostile (it copies a request out of
// the ring before checking it); the client checks sizes and the epoch of what it is given.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TWINSPARK_ROW_RING_MAGIC 0x31474E5252535754ull /* "TWSRRNG1" */
#define TWINSPARK_ROW_RING_VERSION 2u
#define TWINSPARK_ROW_RING_MAX_LAYERS 4
#define TWINSPARK_ROW_RING_MAX_COLUMNS 64
#define TWINSPARK_ROW_RING_UNIT 64u       /* records and payloads start on multiples of this */
#define TWINSPARK_ROW_RING_LINES 1024u    /* completion lines = most requests in flight */
#define TWINSPARK_ROW_RING_BYTES 1048576u /* request ring, a power of two */

/* Operations of a record. A skip record fills the end of the ring: the next one is at its start. */
enum { kRowOpSkip = 0, kRowOpGather = 1, kRowOpPrefetch = 2 };

/* Classes, most urgent first: decode and short prompts; bulk prefill; hint. */
enum { kRowClassDecode = 0, kRowClassPrefill = 1, kRowClassHint = 2 };

/* States of one layer of a request: the word a waiter sleeps on. Anything above kRowReady is an
   error; no byte of that layer's rows may be used then. */
enum {
  kRowPending = 0,
  kRowReady = 1,
  kRowBadRequest = 2, /* malformed, or names what does not exist: a bug of the client */
  kRowDataError = 3,  /* unreadable, truncated or damaged table */
  kRowTimeout = 4,    /* deadline passed before the rows were there */
  kRowStaleEpoch = 5, /* request of an earlier attachment */
  kRowBusy = 6,       /* over the bound of its class */
  kRowUnavailable = 7 /* the service is draining or failed */
};

/* States of the service, in RowRingHeader.service_state. */
enum {
  kRowServiceStarting = 0,
  kRowServiceReady = 1,
  kRowServiceDegraded = 2,
  kRowServiceDraining = 3,
  kRowServiceFailed = 4
};

/* First page of the control area. Three owners, each on cache lines of its own. */
struct RowRingHeader {
  /* Written once by the service before the memfd is passed on. */
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;
  uint64_t attach_epoch; /* unique per attachment; every request repeats it */
  uint64_t
      table_digest; /* first 8 bytes of the digest of all tables; every completion repeats it */
  uint32_t num_layers;
  uint32_t num_columns; /* columns this service owns, per layer */
  uint32_t row_weight_bytes;
  uint32_t row_scale_bytes;
  uint32_t num_lines;
  uint32_t num_small_slabs;
  uint32_t small_slab_tokens; /* capacity of one slab in tokens */
  uint32_t num_large_slabs;
  uint32_t large_slab_tokens;
  uint32_t ring_bytes;
  uint64_t lines_offset; /* in the control area */
  uint64_t ring_offset;
  uint64_t control_bytes;
  uint64_t small_slab_bytes; /* all layers of one slab */
  uint64_t large_slab_bytes;
  uint64_t slabs_bytes; /* size of the second memfd */
  uint32_t wants_hints; /* 0: prefetch records would be read for nothing */
  uint8_t pad0[68];

  /* Service's words. */
  uint64_t heartbeat; /* + 1 every 10 ms */
  uint64_t tail;      /* bytes of the ring consumed so far */
  uint32_t service_state;
  uint32_t service_sleeping; /* 1: write the doorbell after moving head */
  uint32_t overloaded;       /* 1: bulk requests wait too long; ask for less at a time */
  uint8_t pad1[36];

  /* Client's words. */
  uint64_t head; /* bytes of the ring produced so far */
  uint8_t pad2[56];

  uint8_t pad3[4096 - 192 - 64 - 64];
};

/* One request; its payload follows it in the ring, in whole units, never wrapping:
     sequences x RowSequence
     num_ids x int32: per sequence its history ids (oldest first), then its ids
     ceil(num_ids / 8) bytes: live mask over those ids, least significant bit first
   `num_ids` counts history too; rows come back for the others only. */
struct RowRequest {
  uint64_t id;          /* chosen by the client, never repeated in an attachment */
  uint64_t deadline_ns; /* CLOCK_MONOTONIC */
  uint64_t attach_epoch;
  uint8_t op;
  uint8_t priority; /* kRowClass... */
  uint8_t layers;   /* bit i = i-th Engram layer */
  uint8_t reserved;
  uint32_t line; /* completion line */
  uint32_t num_sequences;
  uint32_t num_ids;
  uint32_t num_tokens;    /* rows wanted: ids without history */
  uint32_t slab;          /* small slabs first, then the large ones; unused by prefetch */
  uint32_t payload_bytes; /* exact; the ring advances by whole units */
  uint64_t submit_ns;     /* CLOCK_MONOTONIC, for the service's timings */
};

struct RowSequence {
  uint32_t position;    /* absolute position of the first id after the history */
  uint32_t num_history; /* 0..3, all there are: min(position, max n-gram - 1) */
  uint32_t num_tokens;
};

/* One completion: 64 bytes, so that a waiter's line is its own. The client zeroes it before it
   submits; the service fills the rest and stores each layer_state last, with release order, then
   wakes the futex. A CUDA stream can wait on layer_state >= 1. */
struct RowCompletion {
  uint64_t id;
  uint32_t layer_state[TWINSPARK_ROW_RING_MAX_LAYERS];
  uint32_t error_position; /* token index the error names, if it names one */
  uint32_t reserved;
  uint64_t table_digest;
  uint64_t queue_ns; /* from submission to pick-up */
  uint64_t hash_ns;
  uint64_t read_ns; /* from pick-up to the last layer */
};

/* Handshake. A slab holds, per requested layer i (its own fixed area of slab_tokens * num_columns *
   (weight + scale) bytes at i times that size): weights [token][column][row_weight_bytes], then
   scales [token][column][row_scale_bytes], both dense over the request's num_tokens. Columns are
   the owned ones, ascending. A dead token has weight bytes 0 and scale bytes 127. */
struct RowAttachRequest {
  uint64_t magic;
  uint32_t version;
  uint32_t max_round_rows; /* granted limit: rows of one decode step, sizes the small slabs */
  uint32_t max_chunk_rows; /* granted limit: rows of one prefill chunk, sizes the large slabs */
  uint32_t rank;
  uint32_t world;
  uint32_t num_layers;
  uint32_t row_weight_bytes;
  uint32_t num_columns;     /* owned columns per layer that the client expects */
  uint8_t model_digest[32]; /* as Hello gave it: tables, token map and hash parameters */
  uint8_t pad[56];
};

struct RowAttachReply {
  uint64_t magic;
  uint32_t version;
  uint32_t refused; /* 0 accepted; otherwise text says why and no descriptors come along */
  uint64_t attach_epoch;
  uint64_t control_bytes;
  uint64_t slabs_bytes;
  char text[216]; /* NUL terminated */
};

static_assert(sizeof(struct RowRingHeader) == 4096, "one page");
static_assert(offsetof(struct RowRingHeader, lines_offset) == 72, "no hidden padding");
static_assert(offsetof(struct RowRingHeader, heartbeat) == 192, "service words own a cache line");
static_assert(offsetof(struct RowRingHeader, head) == 256, "client words own a cache line");
static_assert(sizeof(struct RowRequest) == 64, "one unit of the ring");
static_assert(sizeof(struct RowSequence) == 12, "dense in the payload");
static_assert(sizeof(struct RowCompletion) == 64, "one cache line");
static_assert(offsetof(struct RowCompletion, layer_state) == 8, "futex words are aligned");
static_assert(sizeof(struct RowAttachRequest) == 128, "fixed on the wire");
static_assert(sizeof(struct RowAttachReply) == 256, "fixed on the wire");
static_assert((TWINSPARK_ROW_RING_BYTES & (TWINSPARK_ROW_RING_BYTES - 1)) == 0, "power of two");
