// A code is an HMAC of the text, made by OpenSSL, and compared in constant time. Ranks inherit the secret as
// sealed memory that has a descriptor, and not as a variable: the environment holds only the number of the
// descriptor. Always: a descriptor counts only where it has all seals, which tells it from a file that got
// its number since.
#include "cohort/base/secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/files/memory_file.h"
#include "cohort/base/files/private_file.h"
#include "cohort/base/files/read_at.h"

namespace cohort::base {
namespace {

constexpr std::size_t kFewestBytes = 16, kMaxBytes = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t have = 0; have < count;) {
    const ssize_t got = ::getrandom(bytes.data() + have, count - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw SystemError("base.secret", concat("no random bytes: ", std::strerror(errno)));
    have += static_cast<std::size_t>(got);
  }
  return bytes;
}

std::string to_hex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

std::string hmac(const EVP_MD* hash, const std::string& key, std::string_view text) {
  // Else OpenSSL's memory goes as the process ends, also while a thread of a node is in OpenSSL.
  static const int is_ready = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  if (is_ready != 1) throw SystemError("base.secret", "OpenSSL cannot be used");
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned size = 0;
  if (::HMAC(hash, key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(), bytes.data(),
             &size) == nullptr) {
    throw SystemError("base.secret", "OpenSSL cannot make a code: HMAC failed");
  }
  return {reinterpret_cast<const char*>(bytes.data()), size};
}

}  // namespace

Secret Secret::make() {
  return Secret(random_bytes(32));
}

Secret Secret::from_file(const std::filesystem::path& path) {
  std::string bytes = read_private_file(path, "base.secret", "the file of the secret", kMaxBytes);
  if (bytes.size() < kFewestBytes || bytes.size() > kMaxBytes) {
    throw UsageError("base.secret",
                     concat("the file of the secret, ", path.string(), ", has ",
                            bytes.size() > kMaxBytes ? "more than 4096" : std::to_string(bytes.size()),
                            " bytes, expected 16 to 4096"),
                     concat("(umask 077; head -c 32 /dev/urandom | base64 > ", path.string(), ")"));
  }
  return Secret(std::move(bytes));
}

std::optional<Secret> Secret::of_process() {
  if (const auto fd = env_int("COHORT_SECRET_FD", 3, 1 << 20)) {
    // Seals tell it from a file that has the number by now.
    const int seals = ::fcntl(static_cast<int>(*fd), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) {
      throw UsageError("base.secret", concat("COHORT_SECRET_FD is ", *fd, ", which is no secret of an agent"),
                       "keep the descriptors that cohort run hands over, or take the variable away too");
    }
    std::string bytes = read_at(static_cast<int>(*fd), 0, kMaxBytes + 1);
    if (bytes.size() < kFewestBytes || bytes.size() > kMaxBytes) {
      throw UsageError("base.secret",
                       concat("COHORT_SECRET_FD is ", *fd, ", which holds no secret of 16 to 4096 bytes"),
                       "what Secret::to_fd() makes");
    }
    return Secret(std::move(bytes));
  }
  if (const auto path = env_string("COHORT_SECRET_FILE")) return from_file(*path).for_ranks();
  return std::nullopt;
}

Secret Secret::derive(std::string_view purpose) const {
  // SHA-512 here and SHA-256 in code(), so that no code that was sent can be a secret.
  return Secret(hmac(::EVP_sha512(), bytes_, purpose).substr(0, 32));
}

std::string Secret::code(std::string_view text) const {
  return to_hex(hmac(::EVP_sha256(), bytes_, text));
}

bool Secret::matches(std::string_view code, std::string_view text) const {
  const std::string right = this->code(text);
  return code.size() == right.size() && ::CRYPTO_memcmp(code.data(), right.data(), right.size()) == 0;
}

Fd Secret::to_fd() const {
  const Fd fd = make_memory_file("cohort-secret");
  if (!fd.is_open() ||
      ::write(fd.get(), bytes_.data(), bytes_.size()) != static_cast<ssize_t>(bytes_.size()) ||
      ::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    throw SystemError("base.secret", concat("cannot make memory for the secret: ", std::strerror(errno)));
  }
  Fd high(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));  // never in the place of a stream
  if (!high.is_open()) throw SystemError("base.secret", concat("no file descriptor: ", std::strerror(errno)));
  return high;
}

std::string random_word() {
  return to_hex(random_bytes(16));
}

}  // namespace cohort::base
