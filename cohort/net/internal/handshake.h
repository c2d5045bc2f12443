#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cohort/base/secret.h"
#include "cohort/net/internal/role.h"

namespace cohort::net {

/// Who a process is, once it has proved that it knows the secret.
struct Hello {
  std::string name;         ///< of the worker
  std::string incarnation;  ///< of the process: no other one has had it
  /// Chosen by its first caller; 0 from a listener: it does not know the session (any more).
  std::uint64_t session = 0;
  std::uint64_t links = 0;     ///< that this session has had
  std::uint64_t received = 0;  ///< the other side's messages up to this number
  std::string place;           ///< place_of_process()
  std::int64_t process = 0;
  std::string began;         ///< base::process_start() of it
  std::uint64_t window = 0;  ///< bytes that the other side may have on their way here
  /// A caller: the memory of a SharedLink comes with this. A listener: it is used.
  bool has_shared_link = false;
  // A caller over TCP: its end of the connection, as it knows it, and the port where it listens at that host;
  // 0: none.
  std::string address;
  std::uint16_t port = 0;
};

/// Both sides prove that they know the secret of the job, and say who they are. Does no input or output.
///
///     caller:   "COHORTNT", version, a random word of 32 bytes
///     listener: version, a random word of 32 bytes, code of all so far
///     caller:   code of all so far; hello
///     listener: hello
///
/// The codes are HMACs with a key that is derived from the secret, over the sender's role and all bytes so
/// far. So each covers random bytes of the other side, and can neither be played again nor sent back. Until
/// the other side's code has been checked nothing is parsed but the version, and no name is told.
class Handshake {
 public:
  /// Without a secret both sides are trusted: for sockets that strangers cannot reach. `random`:
  /// base::random_word().
  Handshake(Role role, const std::optional<base::Secret>& secret, std::string random);

  /// Makes the codes cover what identifies the encrypted connection below (TlsStream::channel_binding()): who
  /// passes bytes on between two such connections cannot have codes of the same. Before the first bytes are
  /// fed.
  void bind_to(std::string_view channel) { transcript_.insert(0, channel); }
  /// Takes bytes. Throws: CommError for a stranger, another version, one with TLS where this node has none or
  /// the other way round, or what is no handshake. Then there may be output, which tells the other side.
  void feed(std::string_view bytes);
  /// Bytes to send now.
  std::string take_output();

  /// A caller's own hello is sent once the listener has proved itself; a listener's answers the caller's,
  /// which it may ask for first. To be set when is_time_for_hello().
  bool is_time_for_hello() const {
    return !has_sent_hello_ && (role_ == Role::kCaller ? is_trusted_ : peer_.has_value());
  }
  void set_hello(const Hello& hello);

  bool is_trusted() const { return is_trusted_; }  ///< the other side has proved that it knows the secret
  bool is_done() const { return has_sent_hello_ && peer_.has_value(); }
  const Hello& peer() const { return *peer_; }
  /// Bytes that came after the handshake.
  std::string take_rest() { return std::move(input_); }

 private:
  bool step();
  std::string_view take(std::size_t size);
  std::string code(std::string_view role) const;
  bool is_code(std::string_view given, std::string_view role) const;
  void check_version(std::string_view bytes);

  const Role role_;
  const std::optional<base::Secret> key_;
  const std::string random_;
  std::string transcript_, input_, output_, taken_;
  int num_steps_ = 0;
  bool is_trusted_ = false, has_sent_hello_ = false;
  std::optional<Hello> peer_;
};

/// The most bytes of a hello, and of what a stranger can send before it is sent away.
inline constexpr std::size_t kMaxHelloBytes = 4096;

}  // namespace cohort::net
