// A step of the other side has a fixed size until its code is checked, so nothing that a stranger says
// decides how much is read. step() takes one step when all its bytes are there, and feed() repeats it until
// one is not. `transcript_` holds version and random word of both sides, and each code covers it. The role is
// a part of what a code covers, so a code that is sent back to its sender does not match.
//
// Without a secret a code is a row of dashes: the same bytes on the wire, and no second form of the protocol.
#include "cohort/net/internal/handshake.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"

namespace cohort::net {
namespace {

constexpr std::string_view kMagic = "COHORTNT";
constexpr std::uint16_t kVersion = 5;
constexpr std::string_view kTlsHandshake = "\x16\x03", kTlsAlert = "\x15\x03";
// How a client of LibTorch's TCPStore begins: QueryType::VALIDATE, and the number 0x3C85F7CE.
constexpr std::string_view kStoreClient("\0\xCE\xF7\x85\x3C", 5);
constexpr const char* kTlsHint =
    "certificates for all processes of the job, or for none: COHORT_TLS_CERTIFICATE";
constexpr std::size_t kRandomBytes = 32, kCodeBytes = 64;
constexpr std::size_t kFirstBytes = 8 + 2 + kRandomBytes, kSecondBytes = 2 + kRandomBytes + kCodeBytes;

[[noreturn]] void reject_handshake(const std::string& what, const char* hint = "") {
  throw CommError("net.handshake", what, hint);
}

std::string bytes_of(const Hello& hello) {
  std::string bytes;
  put_text(bytes, hello.name);
  put_text(bytes, hello.incarnation);
  put(bytes, hello.session);
  put(bytes, hello.links);
  put(bytes, hello.received);
  put_text(bytes, hello.place);
  put(bytes, hello.process);
  put_text(bytes, hello.began);
  put(bytes, hello.window);
  put(bytes, hello.has_shared_link);
  put_text(bytes, hello.address);
  put(bytes, hello.port);
  return bytes;
}

Hello hello_of(std::string_view bytes) {
  ByteReader reader(bytes);
  Hello hello;
  hello.name = reader.text();
  hello.incarnation = reader.text();
  hello.session = reader.number<std::uint64_t>();
  hello.links = reader.number<std::uint64_t>();
  hello.received = reader.number<std::uint64_t>();
  hello.place = reader.text();
  hello.process = reader.number<std::int64_t>();
  hello.began = reader.text();
  hello.window = reader.number<std::uint64_t>();
  hello.has_shared_link = reader.number<std::uint8_t>() != 0;
  hello.address = reader.text();
  hello.port = reader.number<std::uint16_t>();
  return hello;
}

}  // namespace

Handshake::Handshake(Role role, const std::optional<base::Secret>& secret, std::string random)
    : role_(role),
      key_(secret ? std::optional(secret->derive("net")) : std::nullopt),
      random_(std::move(random)) {
  if (random_.size() != kRandomBytes) reject_handshake("a random word has 32 bytes");
  if (role_ == Role::kListener) return;
  output_ = kMagic;
  put(output_, kVersion);
  output_ += random_;
  transcript_ = output_;
}

std::string Handshake::take_output() {
  return std::exchange(output_, std::string());
}

std::string Handshake::code(std::string_view role) const {
  if (!key_) return std::string(kCodeBytes, '-');
  return key_->code(std::string(role) + transcript_);
}

std::string_view Handshake::take(std::size_t size) {
  taken_ = input_.substr(0, size);
  input_.erase(0, size);
  return taken_;
}

void Handshake::check_version(std::string_view bytes) {
  const auto version = ByteReader(bytes).number<std::uint16_t>();
  if (version != kVersion) {
    if (role_ == Role::kListener) put(output_, kVersion);  // so the caller rejects it too, and knows why
    reject_handshake(base::concat("the other side speaks version ", version,
                                  " of the protocol, this one version ", kVersion),
                     "the same version of Cohort on all hosts");
  }
}

void Handshake::feed(std::string_view bytes) {
  input_ += bytes;
  while (step()) {
  }
  // What is left is a step that is not whole, unless the handshake is done and frames follow.
  if (!is_done() && input_.size() > kMaxHelloBytes + 2 + kCodeBytes)
    reject_handshake("more bytes than a handshake has");
}

// One step of the other side; false where its bytes are not all there.
bool Handshake::step() {
  const bool is_caller = role_ == Role::kCaller;
  if (!is_caller && num_steps_ == 0) {
    // A stranger is seen at its first byte.
    if (input_.starts_with(kTlsHandshake)) {
      put(output_, kVersion);  // is no TLS, which a caller with TLS sees
      reject_handshake("who connected uses TLS, and this process does not", kTlsHint);
    }
    if (input_.starts_with(kStoreClient)) {
      reject_handshake("who connected is a client of LibTorch's TCPStore, as agents of torchrun are",
                       "`cohort run` on all nodes, or torchrun on all");
    }
    if (input_ == kTlsHandshake.substr(0, 1) || (!input_.empty() && kStoreClient.starts_with(input_)))
      return false;
    const std::size_t seen = std::min(input_.size(), kMagic.size());
    if (input_.compare(0, seen, kMagic, 0, seen) != 0)
      reject_handshake("a stranger's first bytes are no handshake");
    if (input_.size() < kFirstBytes) {
      if (input_.size() >= kMagic.size() + sizeof kVersion)
        check_version(std::string_view(input_).substr(kMagic.size()));
      return false;
    }
    const std::string_view first = take(kFirstBytes);
    check_version(first.substr(kMagic.size()));
    transcript_ += first;
    std::string answer;
    put(answer, kVersion);
    answer += random_;
    transcript_ += answer;
    output_ += answer + code("listener");
  } else if (is_caller && num_steps_ == 0) {
    if (input_.starts_with(kTlsAlert)) {
      reject_handshake("who listens there uses TLS, and this process does not", kTlsHint);
    }
    if (input_.size() < kSecondBytes) {
      // Another version's step may be shorter, so it would be waited for in vain.
      if (input_.size() >= 2) check_version(input_);
      return false;
    }
    const std::string_view second = take(kSecondBytes);
    check_version(second);
    transcript_ += second.substr(0, kSecondBytes - kCodeBytes);
    if (!is_code(second.substr(kSecondBytes - kCodeBytes), "listener")) {
      reject_handshake("who listens there does not know the job's secret");
    }
    is_trusted_ = true;
    output_ += code("caller");
  } else if (!is_trusted_) {
    if (input_.size() < kCodeBytes) return false;
    if (!is_code(take(kCodeBytes), "caller"))
      reject_handshake("who connected does not know the job's secret");
    is_trusted_ = true;
  } else if (!peer_) {
    if (input_.size() < 2) return false;
    const std::size_t size = ByteReader(input_).number<std::uint16_t>();
    if (size > kMaxHelloBytes) reject_handshake("a hello is too long");
    if (input_.size() < 2 + size) return false;
    peer_ = hello_of(take(2 + size).substr(2));
  } else {
    return false;
  }
  ++num_steps_;
  return true;
}

bool Handshake::is_code(std::string_view given, std::string_view role) const {
  if (!key_) return given == std::string(kCodeBytes, '-');
  return key_->matches(given, std::string(role) + transcript_);
}

void Handshake::set_hello(const Hello& hello) {
  put_text(output_, bytes_of(hello));
  has_sent_hello_ = true;
}

}  // namespace cohort::net
