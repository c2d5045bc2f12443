#pragma once

#include <openssl/types.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/net/internal/role.h"
#include "cohort/net/internal/tls/context.h"

namespace cohort::net {

enum class TlsStatus : std::uint8_t {
  kReady,  ///< the TLS handshake is done
  kWaits,  ///< until the socket is readable, or writable where wants_to_write()
  kLost,   ///< the connection is gone: error() says why
};

/// TLS over a socket that does not block. read() and write() take the places of readv(2) and sendmsg(2), also
/// with `errno`.
///
/// Between calls it holds no byte that read() could give: what came is given, or is still in the socket. So
/// whoever waits until the socket is readable misses nothing. Threads: one at a time.
class TlsStream {
 public:
  /// `context` and `socket` outlive it. Throws: SystemError.
  TlsStream(const TlsContext& context, int socket, Role role);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  /// Does what can be done of the TLS handshake now. The other side's certificate is checked in it. Whether
  /// that side takes ours, a caller learns after it: read() fails. Throws: CommError where another connection
  /// would end in the same way.
  TlsStatus handshake();
  bool is_ready() const { return is_ready_; }
  bool wants_to_write() const { return wants_to_write_; }
  /// After the handshake: 32 bytes that both ends of this connection have, and nobody else (RFC 9266,
  /// tls-exporter).
  std::string channel_binding() const;

  /// Returns how many bytes it has put into `parts`, which have room for kMinReadBytes or more; 0 where the
  /// other side has closed; or -1 with an errno, EPROTO where the other side breaks TLS or does not take our
  /// certificate: error() has words.
  ssize_t read(std::span<const iovec> parts);
  /// Returns how many bytes were written; 0: the rest once something has been read; or -1 with an errno.
  /// After EAGAIN the same bytes come again, or those and more.
  ssize_t write(std::span<const iovec> parts);

  /// Why handshake() is kLost, or read() or write() failed.
  const std::string& error() const { return error_; }
  CommError failure() const { return {"net.tls", error_, hint_}; }

  /// The room of read() in which each record fits.
  static constexpr std::size_t kMinReadBytes = 34 * 1024;
  /// After so many records the key of what is written is a new one: below 2^24.5, the limit of AES-GCM (RFC
  /// 8446, 5.5).
  static constexpr std::uint64_t kRecordsOfAKey = std::uint64_t{1} << 22;
  /// For tests.
  void set_records_of_a_key(std::uint64_t count) { records_of_a_key_ = count; }

 private:
  friend struct TlsCallbacks;

  int receive(char* to, int size);
  bool receive_greeting();
  int send(const char* from, int size);
  ssize_t fail(int result);
  void reject(std::string problem, std::string hint = "");
  std::string words_of_failure() const;
  const char* other_side() const;

  const TlsContext& context_;
  const int socket_;
  const Role role_;
  std::unique_ptr<SSL, void (*)(SSL*)> ssl_;
  bool is_ready_ = false, wants_to_write_ = false, has_pending_write_ = false, more_follows_ = false;
  std::uint64_t num_records_ = 0, records_of_a_key_ = kRecordsOfAKey;
  std::vector<char> record_;  // bytes of several parts that go as one
  // Of the socket: what may be read in this turn, and what has become of it.
  std::size_t left_to_read_ = 0;
  bool is_drained_ = false, is_closed_ = false;
  int errno_ = 0, send_errno_ = 0;
  std::array<char, 9> greeting_{};  // the first bytes of the other side
  std::size_t greeting_size_ = 0, greeting_taken_ = 0;
  bool has_greeting_ = false;
  std::string problem_, hint_;  // of the other side, in our words
  std::string error_;
};

}  // namespace cohort::net
