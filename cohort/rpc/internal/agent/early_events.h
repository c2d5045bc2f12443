#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/net/peer.h"

namespace cohort::rpc {

/// Messages of workers, and their ends, that came before the join was over. Threads: one at a time.
class EarlyEvents {
 public:
  using Peer = std::shared_ptr<net::Peer>;
  struct Events {
    std::vector<std::pair<Peer, net::Message>> messages;
    std::vector<std::pair<Peer, std::string>> down;  // handled after the messages
  };

  /// Keeps a message, and takes it out of `message`. False once the join is over: it is to be handled now.
  bool keep(const Peer& peer, net::Message& message) {
    if (has_joined_) return false;
    events_.messages.emplace_back(peer, std::move(message));
    return true;
  }
  /// The same for the end of a process, also of a known worker: connect() may have its peer, and not have
  /// noted it yet.
  bool keep_down(const Peer& peer, const std::string& why) {
    if (has_joined_) return false;
    events_.down.emplace_back(peer, why);
    return true;
  }
  /// What has come since the last call, to be handled now. None: the join is over. Until then later events
  /// are kept too, as the node's thread would overtake the one that handles these.
  std::optional<Events> take() {
    has_joined_ = events_.messages.empty() && events_.down.empty();
    if (has_joined_) return std::nullopt;
    return std::exchange(events_, {});
  }

 private:
  Events events_;
  bool has_joined_ = false;
};

}  // namespace cohort::rpc
