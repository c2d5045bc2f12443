#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "cohort/base/files/fd.h"

namespace cohort::net {

/// Which sockets are ready, asked without waiting: a set of epoll(7). A process that was forked changes
/// nothing in it. Threads: any.
class Poller {
 public:
  /// Throws: SystemError where no descriptor is left.
  Poller();

  struct Ready {
    std::uint64_t key = 0;
    bool is_readable = false, is_writable = false;  ///< both of a socket with an error
  };
  /// Whether bytes that come to a socket count, and room for bytes.
  struct Interest {
    bool reads = false, writes = false;
    bool operator==(const Interest&) const = default;
  };

  /// `key` names the socket in ready(). Throws: SystemError.
  void add(int fd, std::uint64_t key, Interest interest);
  /// An error, and the end of a connection, count in any case.
  void change(int fd, std::uint64_t key, Interest interest);
  /// To be called before the socket is closed: a process that was forked may keep it open, and then it stays
  /// ready for ever.
  void remove(int fd);
  /// One that is ready now; the others have their turn at the next calls.
  std::optional<Ready> next_ready();

  /// Readable while a socket is ready. Another descriptor of the same set. Throws: SystemError.
  base::Fd duplicate() const;

 private:
  const pid_t process_;
  base::Fd fd_;
};

}  // namespace cohort::net
