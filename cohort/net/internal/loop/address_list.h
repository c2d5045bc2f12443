#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/net/internal/socket.h"

namespace cohort::net::node_detail {

/// How a try to connect ended.
enum class Outcome : std::uint8_t {
  kNone,      ///< there was no try, or it is under way
  kRejected,  ///< nobody listens there
  kNoWay,     ///< this host has no IPv6, as it seems
  kNoAnswer,  ///< the host is off, or the process stopped, as it seems
  kOther,     ///< somebody is there and has ended the connection, or this process has no means to connect
};

/// `error`: an errno.
inline Outcome outcome_of(int error, const SocketAddress& address) {
  // A local socket that is gone may be that of a process which has not ended: its pidfd says.
  if (error == ECONNREFUSED || error == ENOENT) return Outcome::kRejected;
  const bool has_no_way = error == EAFNOSUPPORT || error == EADDRNOTAVAIL || error == ENETUNREACH;
  if (has_no_way && address.storage.ss_family == AF_INET6) return Outcome::kNoWay;
  // The kernel connects a local socket only where it listens, so a process has it. ENETUNREACH and ENETDOWN
  // are of this host's own network, as a rule: then nobody was asked.
  const bool is_silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == EHOSTDOWN;
  return is_silent && !address.is_unix() ? Outcome::kNoAnswer : Outcome::kOther;
}

/// The addresses that a name has, which are tried in turn. Threads: one at a time.
class AddressList {
 public:
  AddressList() = default;
  explicit AddressList(std::vector<SocketAddress> addresses)
      : addresses_(std::move(addresses)), outcomes_(addresses_.size()) {}

  /// The address to try now.
  const SocketAddress& current() const { return addresses_[at_]; }
  /// A link came up at current(), which is tried first once the link breaks.
  void note_link() {
    linked_ = at_;
    outcomes_.assign(addresses_.size(), Outcome::kNone);
  }
  /// The try at current() has failed, so the next address follows.
  void note_failure(Outcome outcome) {
    outcomes_[at_] = outcome;
    at_ = (at_ + 1) % addresses_.size();
  }
  /// Whether nobody listens: where the last link was, or, before there was one, at each address to which this
  /// host has a way.
  bool is_rejected() const {
    if (linked_) return outcomes_[*linked_] == Outcome::kRejected;
    bool is_any = false;
    for (const Outcome outcome : outcomes_) {
      if (outcome != Outcome::kRejected && outcome != Outcome::kNoWay) return false;
      is_any = is_any || outcome == Outcome::kRejected;
    }
    return is_any;
  }
  /// Whether somebody was asked, and the last try of no address says that a process may be there.
  bool has_no_answer() const {
    const auto num_of = [this](Outcome outcome) { return std::ranges::count(outcomes_, outcome); };
    return num_of(Outcome::kOther) == 0 && num_of(Outcome::kNoWay) < std::ssize(outcomes_);
  }

 private:
  std::vector<SocketAddress> addresses_;
  std::vector<Outcome> outcomes_;  // of the last try of each
  std::size_t at_ = 0;
  std::optional<std::size_t> linked_;
};

}  // namespace cohort::net::node_detail
