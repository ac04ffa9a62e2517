// Identifiers that cross process borders, and the hashes that name things between them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace twinspark {

// xxHash64 with seed 0: digests of ops, settings, weights, and the request-id hash that workers
// log.
uint64_t Hash64(std::string_view bytes);
uint64_t Hash64(std::span<const std::byte> bytes);

// 16 lower-case hex digits: how every hash and digest is written in logs, /status and error texts.
std::string Hex16(uint64_t value);

// `prefix` + 24 random lower-case hex digits, e.g. NewId("chatcmpl-"). Thread-safe.
std::string NewId(std::string_view prefix);

// A random number from the system's generator: seeds, secrets.
uint64_t RandomU64();

}  // namespace twinspark
