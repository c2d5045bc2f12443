// OpenSSL reads and writes through functions of this class, not through the socket's descriptor: they send
// without SIGPIPE, look at the first bytes, and limit what is read in a turn. A turn may read as many bytes
// as the caller has room for, less a record. Encrypted bytes are more than plain ones, so read() can always
// give all that OpenSSL has: it stops where OpenSSL waits for the rest of a record.
//
// The first bytes tell TLS from a peer without it, which is told in its own words at once. They also have the
// length of the first message, for which OpenSSL would take up to 128 KiB of memory for anybody.
#include "cohort/net/internal/tls/stream.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::net {
namespace {

constexpr std::size_t kRecordBytes = 16 * 1024, kMaxEncryptedRecordBytes = 17 * 1024;
static_assert(TlsStream::kMinReadBytes >= 2 * kMaxEncryptedRecordBytes);
constexpr std::size_t kMaxFirstMessageBytes = 12 * 1024;
constexpr std::size_t kMaxSubject = 200;
constexpr char kHandshakeRecord = 0x16, kAlertRecord = 0x15, kTlsMajor = 0x03, kClientHello = 0x01;
// The alert protocol_version, for a caller without TLS, which knows it (handshake.cpp).
constexpr char kNeedsTls[] = {kAlertRecord, kTlsMajor, 0x03, 0x00, 0x02, 0x02, 0x46};
constexpr std::string_view kBindingLabel = "EXPORTER-Channel-Binding";
constexpr const char* kFilesHint =
    "certificates for all processes of the job, or for none: COHORT_TLS_CERTIFICATE";

std::string subject_of(const X509* certificate) {
  const std::unique_ptr<BIO, Releaser<&::BIO_free_all>> bio(::BIO_new(::BIO_s_mem()));
  ::X509_NAME_print_ex(bio.get(), ::X509_get_subject_name(certificate), 0, XN_FLAG_ONELINE);
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &text);
  return {text, std::min(static_cast<std::size_t>(size), kMaxSubject)};
}

bool is_about_certificate(int alert) {
  return (alert >= SSL_AD_BAD_CERTIFICATE && alert <= SSL_AD_CERTIFICATE_UNKNOWN) ||
         alert == SSL_AD_UNKNOWN_CA || alert == SSL_AD_ACCESS_DENIED || alert == SSL_AD_CERTIFICATE_REQUIRED;
}

}  // namespace

// What OpenSSL calls. A result below 0 with a retry flag: the socket is not ready.
struct TlsCallbacks {
  static TlsStream& stream_of(BIO* bio) { return *static_cast<TlsStream*>(::BIO_get_data(bio)); }

  static int read(BIO* bio, char* to, int size) {
    ::BIO_clear_retry_flags(bio);
    const int result = stream_of(bio).receive(to, size);
    if (result < 0 && errno == EAGAIN) ::BIO_set_retry_read(bio);
    return result;
  }
  static int write(BIO* bio, const char* from, int size) {
    ::BIO_clear_retry_flags(bio);
    const int result = stream_of(bio).send(from, size);
    if (result < 0 && errno == EAGAIN) ::BIO_set_retry_write(bio);
    return result;
  }
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  // Of each certificate that is not accepted.
  static int verify(int is_good, X509_STORE_CTX* store) {
    if (is_good == 1) return 1;
    auto* const ssl =
        static_cast<SSL*>(::X509_STORE_CTX_get_ex_data(store, ::SSL_get_ex_data_X509_STORE_CTX_idx()));
    TlsStream& stream = stream_of(::SSL_get_rbio(ssl));
    const int error = ::X509_STORE_CTX_get_error(store);
    const X509* const certificate = ::X509_STORE_CTX_get_current_cert(store);
    std::string problem = base::concat("the certificate of ", stream.other_side(),
                                       " is not accepted: ", ::X509_verify_cert_error_string(error));
    if (certificate != nullptr) {
      problem += base::concat(" (", subject_of(certificate));
      if (error == X509_V_ERR_CERT_HAS_EXPIRED)
        problem += base::concat(", valid until ", date_of(::X509_get0_notAfter(certificate)));
      problem += ")";
    }
    problem += base::concat("; authorities: ", stream.context_.options().authorities.string());
    stream.reject(std::move(problem), error == X509_V_ERR_CERT_HAS_EXPIRED
                                          ? "a new certificate for that process"
                                          : "certificates of the job's authority for all processes");
    return 0;
  }

  static BIO_METHOD* method() {
    static BIO_METHOD* const made = [] {
      BIO_METHOD* const method =
          ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket of a node");
      ::BIO_meth_set_read(method, read);
      ::BIO_meth_set_write(method, write);
      ::BIO_meth_set_ctrl(method, control);
      return method;
    }();
    return made;
  }
};

TlsStream::TlsStream(const TlsContext& context, int socket, Role role)
    : context_(context), socket_(socket), role_(role), ssl_(context.make_connection(), ::SSL_free) {
  BIO* const bio = ::BIO_new(TlsCallbacks::method());
  if (bio == nullptr) {
    throw SystemError("net.tls", base::concat("no TLS connection can be made: ", take_tls_error()));
  }
  ::BIO_set_data(bio, this);
  ::BIO_set_init(bio, 1);
  ::SSL_set_bio(ssl_.get(), bio, bio);
  ::SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, TlsCallbacks::verify);
  role == Role::kCaller ? ::SSL_set_connect_state(ssl_.get()) : ::SSL_set_accept_state(ssl_.get());
}

TlsStream::~TlsStream() = default;

const char* TlsStream::other_side() const {
  return role_ == Role::kCaller ? "who listens there" : "who connected";
}

void TlsStream::reject(std::string problem, std::string hint) {
  problem_ = std::move(problem);
  hint_ = std::move(hint);
}

int TlsStream::receive(char* to, int size) {
  if (is_closed_) return 0;
  if (!has_greeting_) has_greeting_ = receive_greeting();
  if (!has_greeting_) return is_closed_ ? 0 : -1;
  if (greeting_taken_ < greeting_size_) {
    const std::size_t taken = std::min(static_cast<std::size_t>(size), greeting_size_ - greeting_taken_);
    std::memcpy(to, greeting_.data() + greeting_taken_, taken);
    greeting_taken_ += taken;
    return static_cast<int>(taken);
  }
  const std::size_t most = std::min(static_cast<std::size_t>(size), left_to_read_);
  if (is_drained_ || most == 0) {
    errno = EAGAIN;
    return -1;
  }
  ssize_t got = -1;
  do {
    got = ::recv(socket_, to, most, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  is_closed_ = got == 0;
  if (got < 0 && errno != EAGAIN) errno_ = errno;
  // A short read took all that there was: another one would be a system call for nothing.
  is_drained_ = got < static_cast<ssize_t>(most);
  if (got > 0) left_to_read_ -= static_cast<std::size_t>(got);
  return static_cast<int>(got);
}

// False with an errno, or where the other side has closed, or has begun with what is no TLS (errno EPROTO).
bool TlsStream::receive_greeting() {
  ssize_t got = -1;
  do {
    got = ::recv(socket_, greeting_.data() + greeting_size_, greeting_.size() - greeting_size_, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  is_closed_ = got == 0;
  if (got < 0 && errno != EAGAIN) errno_ = errno;
  if (got <= 0) return false;
  greeting_size_ += static_cast<std::size_t>(got);
  const bool is_listener = role_ == Role::kListener;
  const bool is_tls = (greeting_[0] == kHandshakeRecord || (!is_listener && greeting_[0] == kAlertRecord)) &&
                      (greeting_size_ < 2 || greeting_[1] == kTlsMajor);
  if (!is_tls) {
    reject(base::concat(other_side(), " does not use TLS, and this process does"), kFilesHint);
    if (is_listener) static_cast<void>(send(kNeedsTls, sizeof kNeedsTls));
    errno = EPROTO;
    return false;
  }
  // An alert has 7 bytes.
  const bool is_alert = greeting_[0] == kAlertRecord;
  if (greeting_size_ < greeting_.size() && !is_alert) {
    errno = EAGAIN;
    return false;
  }
  const auto byte = [this](std::size_t i) { return static_cast<unsigned char>(greeting_[i]); };
  const std::size_t length = std::size_t{byte(6)} << 16 | std::size_t{byte(7)} << 8 | byte(8);
  if (is_listener && (greeting_[5] != kClientHello || length > kMaxFirstMessageBytes)) {
    reject("the first message of who connected is none that begins a TLS handshake");
    errno = EPROTO;
    return false;
  }
  return true;
}

int TlsStream::send(const char* from, int size) {
  ssize_t sent = -1;
  do {
    // Records of a call share segments: each alone would end with a short one.
    sent = ::send(socket_, from, static_cast<std::size_t>(size),
                  MSG_NOSIGNAL | MSG_DONTWAIT | (more_follows_ ? MSG_MORE : 0));
  } while (sent < 0 && errno == EINTR);
  if (sent < 0 && errno != EAGAIN) {
    // OpenSSL would read no more after an error, and the other side may have sent before it went.
    send_errno_ = errno;
    errno = EAGAIN;
  }
  return static_cast<int>(sent);
}

std::string TlsStream::words_of_failure() const {
  const int reason = ERR_GET_REASON(::ERR_peek_last_error());
  if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
    return base::concat(other_side(), " has no certificate");
  }
  if (reason <= SSL_AD_REASON_OFFSET) {
    return base::concat("TLS with ", other_side(), " failed: ", take_tls_error());
  }
  const int alert = reason - SSL_AD_REASON_OFFSET;
  const char* const words = ::SSL_alert_desc_string_long(alert);
  if (is_about_certificate(alert)) {
    return base::concat(other_side(), " does not accept this process's certificate, ",
                        context_.options().certificate.string(), ": ", words);
  }
  return base::concat(other_side(), " ended TLS: ", words);
}

// What read() and write() return after a call of OpenSSL that gave `result`.
ssize_t TlsStream::fail(int result) {
  const int status = ::SSL_get_error(ssl_.get(), result);
  wants_to_write_ = status == SSL_ERROR_WANT_WRITE;
  if (!is_ready_ && send_errno_ != 0) errno_ = send_errno_;
  const bool waits = status == SSL_ERROR_WANT_READ || status == SSL_ERROR_WANT_WRITE;
  if (problem_.empty() && waits && errno_ == 0) {
    errno = EAGAIN;
    return -1;
  }
  if (problem_.empty() && (is_closed_ || status == SSL_ERROR_ZERO_RETURN)) {
    ::ERR_clear_error();
    is_closed_ = true;
    error_ = is_ready_ ? "the connection was closed" : "the connection was closed during the TLS handshake";
    return 0;
  }
  if (problem_.empty() && errno_ != 0) {
    ::ERR_clear_error();
    error_ = std::strerror(errno_);
    errno = errno_;
    return -1;
  }
  if (problem_.empty()) reject(words_of_failure(), kFilesHint);
  ::ERR_clear_error();
  error_ = problem_;
  // Whoever waits for the socket comes back, and reads this failure.
  if (is_ready_) ::shutdown(socket_, SHUT_RDWR);
  errno = EPROTO;
  return -1;
}

TlsStatus TlsStream::handshake() {
  if (is_ready_) return TlsStatus::kReady;
  ::ERR_clear_error();
  left_to_read_ = kMinReadBytes;
  is_drained_ = false;
  const int result = ::SSL_do_handshake(ssl_.get());
  if (result == 1) {
    is_ready_ = true;
    wants_to_write_ = false;
    return TlsStatus::kReady;
  }
  if (fail(result) == 0) return TlsStatus::kLost;
  if (errno == EAGAIN) return TlsStatus::kWaits;
  if (errno == EPROTO) throw failure();
  return TlsStatus::kLost;
}

std::string TlsStream::channel_binding() const {
  std::string binding(32, '\0');
  if (::SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(binding.data()),
                                   binding.size(), kBindingLabel.data(), kBindingLabel.size(), nullptr, 0,
                                   0) != 1) {
    throw CommError("net.tls", base::concat("TLS gives no channel binding: ", take_tls_error()));
  }
  return binding;
}

ssize_t TlsStream::read(std::span<const iovec> parts) {
  ::ERR_clear_error();
  std::size_t room = 0, size = 0;
  for (const iovec& part : parts) room += part.iov_len;
  left_to_read_ = room - std::min(room, kMaxEncryptedRecordBytes);
  is_drained_ = false;
  for (const iovec& part : parts) {
    std::size_t got = 0;
    for (std::size_t at = 0; at < part.iov_len; at += got, size += got) {
      const int result =
          ::SSL_read_ex(ssl_.get(), static_cast<char*>(part.iov_base) + at, part.iov_len - at, &got);
      if (result == 1) continue;
      const ssize_t failed = fail(result);
      return size > 0 ? static_cast<ssize_t>(size) : failed;
    }
  }
  return static_cast<ssize_t>(size);
}

ssize_t TlsStream::write(std::span<const iovec> parts) {
  ::ERR_clear_error();
  std::size_t left = 0;
  for (const iovec& each : parts) left += each.iov_len;
  std::size_t size = 0, part = 0, at = 0;  // written; where the next byte is
  while (part < parts.size()) {
    const char* from = static_cast<const char*>(parts[part].iov_base) + at;
    std::size_t length = std::min(parts[part].iov_len - at, kRecordBytes);
    if (length < kRecordBytes && part + 1 < parts.size()) {
      record_.resize(kRecordBytes);
      length = 0;
      std::size_t skip = at;
      for (std::size_t i = part; i < parts.size() && length < kRecordBytes; ++i, skip = 0) {
        const std::size_t taken = std::min(parts[i].iov_len - skip, kRecordBytes - length);
        std::memcpy(record_.data() + length, static_cast<const char*>(parts[i].iov_base) + skip, taken);
        length += taken;
      }
      from = record_.data();
    }
    if (length == 0) break;
    // While a new key waits to be written OpenSSL reads nothing, and two sides would wait for each other.
    if (num_records_ >= records_of_a_key_ && !has_pending_write_ &&
        (base::ready_events(socket_, POLLOUT) & POLLOUT) != 0) {
      static_cast<void>(::SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED));
      num_records_ = 0;
    }
    more_follows_ = left - size > length;
    std::size_t written = 0;
    const int result = ::SSL_write_ex(ssl_.get(), from, length, &written);
    more_follows_ = false;
    has_pending_write_ = result != 1;
    if (result != 1) {
      const ssize_t failed = fail(result);
      if (size > 0) break;
      if (send_errno_ != 0) errno = send_errno_;
      return failed < 0 && errno == EAGAIN && !wants_to_write_ ? 0 : failed;
    }
    ++num_records_;
    size += written;
    for (at += written; part < parts.size() && at >= parts[part].iov_len; ++part) at -= parts[part].iov_len;
  }
  return static_cast<ssize_t>(size);
}

}  // namespace cohort::net
