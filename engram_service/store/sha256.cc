// SHA-256 over EVP_MD_CTX; libcrypto's one-shot functions are not used because packing streams.
#include "engram_service/store/sha256.h"

#include <openssl/evp.h>

#include "common/check.h"

namespace twinspark::engram {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  CHECK(context_->evp != nullptr);
  CHECK_EQ(EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr), 1);
}

Sha256::~Sha256() = default;

void Sha256::Update(std::span<const uint8_t> bytes) {
  CHECK_EQ(EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size()), 1);
}

void Sha256::UpdateU32(uint32_t value) {
  uint8_t bytes[4];
  for (int i = 0; i < 4; ++i)
    bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  Update(bytes);
}

void Sha256::UpdateU64(uint64_t value) {
  UpdateU32(static_cast<uint32_t>(value));
  UpdateU32(static_cast<uint32_t>(value >> 32));
}

Sha256Digest Sha256::Finish() {
  Sha256Digest digest;
  unsigned int size = 0;
  CHECK_EQ(EVP_DigestFinal_ex(context_->evp, digest.data(), &size), 1);
  CHECK_EQ(size, digest.size());
  CHECK_EQ(EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr), 1);
  return digest;
}

Sha256Digest Sha256Of(std::span<const uint8_t> bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Finish();
}

Sha256Digest Sha256Of(std::string_view text) {
  return Sha256Of(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

std::string Hex(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace twinspark::engram
