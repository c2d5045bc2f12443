#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {

/// The addresses that a name has, which are tried in turn. Threads: one at a time.
class AddressList {
 public:
  AddressList() = default;
  explicit AddressList(std::vector<SocketAddress> addresses) : addresses_(std::move(addresses)) {}

  /// The address to try now.
  const SocketAddress& current() const { return addresses_[at_]; }
  /// A link came up at current(), which is tried first once the link breaks.
  void note_link() { num_rejected_ = 0; }
  /// The try at current() has failed, so the next address follows. `is_rejected`: nobody listens there.
  void note_failure(bool is_rejected) {
    num_rejected_ = is_rejected ? num_rejected_ + 1 : 0;
    skip();
  }
  /// No socket can be had for current(), as where the host has no IPv6: the next address follows.
  void skip() { at_ = (at_ + 1) % addresses_.size(); }
  /// Whether nobody listened at any of the addresses when each was tried last, all since the last link.
  bool all_rejected() const { return !addresses_.empty() && num_rejected_ >= addresses_.size(); }

 private:
  std::vector<SocketAddress> addresses_;
  std::size_t at_ = 0;
  std::size_t num_rejected_ = 0;  // in a row
};

}  // namespace cohort::net::node_detail
