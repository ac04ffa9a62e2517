// SHA-256 through OpenSSL's libcrypto, which uses the processor's own instructions on x86 and Arm:
// packing hashes every byte it writes. Callers: everything in engram_service that names content by
// digest. Thread-compatible.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace twinspark::engram {

using Sha256Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(std::span<const uint8_t> bytes);
  // Little-endian integers, as the file formats write them.
  void UpdateU32(uint32_t value);
  void UpdateU64(uint64_t value);
  // The digest of everything so far; the object starts again.
  Sha256Digest Finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

Sha256Digest Sha256Of(std::span<const uint8_t> bytes);
Sha256Digest Sha256Of(std::string_view text);

// Lower-case hexadecimal.
std::string Hex(std::span<const uint8_t> bytes);

}  // namespace twinspark::engram
