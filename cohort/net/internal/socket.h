#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/future.h"

/// Sockets by address: "host:port", "[::1]:port", "unix:/path", "unix:@name" (Linux's abstract names).
namespace cohort::net {

/// Of who has no deadline of its own. glibc asks a second name server after 5 s.
inline constexpr std::chrono::seconds kPatienceWithNames(15);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  std::string text;         ///< as it was written
  bool takes_ipv4 = false;  ///< a socket of IPv6 that is bound here may have connections of IPv4

  bool is_unix() const { return storage.ss_family == AF_UNIX; }
  bool is_loopback() const;
  std::uint16_t port() const;  ///< of TCP; else 0
  void set_port(std::uint16_t port);
  /// Whether who listens here listens at `host` too, which is of TCP.
  bool covers(const SocketAddress& host) const;
};

/// Throws: UsageError for a text that is no address; UnknownHost; another RendezvousError where the name
/// server fails, or this process has no means to ask it; LookupTimeout.
SocketAddress resolve(const std::string& text, base::Deadline deadline = base::Deadline(kPatienceWithNames));
/// All that the name has, the one that the system prefers first. Blocking: as long as name servers are
/// silent. Throws: as resolve().
std::vector<SocketAddress> resolve_all(const std::string& text);
/// The same on a thread of its own, as name servers may be silent. It is there at once where nobody has to be
/// asked. Throws: RendezvousError where no thread can be had.
base::Future<std::vector<SocketAddress>> begin_to_resolve(const std::string& text);

/// The name or address of "name", "10.0.0.2", "fd00::2" or "[fd00::2]", by which others reach a host: without
/// brackets. Throws: UsageError.
std::string parse_host(const std::string& text);
/// Whether only IPv6 leads to this host. None: no name server knows the name, or says so soon.
std::optional<bool> has_ipv6_alone(const std::string& host);

/// A socket that listens and does not block; `bound` gets its address, with the port that it was given. Where
/// that is all addresses of this host, `bound` has `host` in its place; empty: the host's name. At all of
/// IPv6 it listens at all of IPv4 too, where the host has both. Throws: RendezvousError.
base::Fd listen_at(const SocketAddress& address, std::string& bound, const std::string& host = "");

/// The next connection, which does not block. Empty, with an errno, where there is none now, or it is of a
/// process of another user (EACCES).
base::Fd accept_from(int listener);

/// A socket that connects and does not block. Writable: it has, or connect_error() says why not. Empty, with
/// an errno, where it cannot.
base::Fd start_connect(const SocketAddress& address);
/// 0, or an errno.
int connect_error(int socket);

/// "10.0.0.2:41234": the other side of a connection. "" where it is gone.
std::string peer_address(int socket);
/// Both ends of a connection, with the same text, also where one side has an IPv6 socket for IPv4. Of one
/// that is gone: empty.
SocketAddress own_end(int socket);
SocketAddress peer_end(int socket);

/// Whether it is one between processes of this host (AF_UNIX).
bool is_local(int socket);
/// The process that connected, or that listens: the kernel knows it of a local socket. 0 where it does not.
pid_t peer_process(int socket);
/// Whether the other side is of this user, or root's: of a local socket. Of another one: true, nobody knows.
/// Abstract names have no permissions: any user of the host can connect, or listen at the name of a process
/// that has ended.
bool is_of_own_user(int socket);
/// Whether both ends are this socket. A connection to a free port of this host can meet itself.
bool is_connected_to_itself(int socket);
/// The most descriptors that go together.
inline constexpr std::size_t kMaxDescriptors = 2;
/// send(2) and recv(2) without waiting, of a local socket, with descriptors beside the first byte. What comes
/// is appended to `fds`, which has kMaxDescriptors at most: further ones are closed.
ssize_t send_with_descriptors(int socket, std::string_view bytes, std::span<const int> fds);
ssize_t receive_with_descriptors(int socket, std::span<std::byte> bytes, std::vector<base::Fd>& fds);

}  // namespace cohort::net
