#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/net/internal/inbox.h"
#include "cohort/net/internal/outbox.h"
#include "cohort/net/internal/role.h"
#include "cohort/net/peer.h"

namespace cohort::net {

/// Time on a clock that whoever drives a session reads.
using Time = std::chrono::steady_clock::time_point;

struct SessionOptions {
  std::size_t window = std::size_t{64} << 20;      ///< bytes that a peer may have on their way here
  std::chrono::milliseconds heartbeat{250};        ///< after so long without a frame one is sent
  std::chrono::milliseconds silence{2000};         ///< after so long without a byte a peer is given up
  std::chrono::milliseconds acknowledge_after{5};  ///< at the latest, where no frame goes that could say it
  std::chrono::milliseconds first_pause{1}, most_pause{1000};  ///< before connecting again
};

/// How a session ended.
struct End {
  DownKind kind;
  std::string text;  ///< "died (process 4711)", "has been silent for 2000 ms", "has left"
};

/// A peer, over one link after another: each message once. Who connected first connects again.
///
/// Reads no clock and does no input or output: bytes and the time go in, bytes and the next time come out.
/// Threads: one at a time; credits of messages are given back by any.
class Session {
 public:
  /// `wake` is called when a message's credit is given back, by any thread.
  Session(Role role, SessionOptions options, Allocate allocate, std::function<void()> wake, Time now);

  /// After the end messages are dropped. Returns the message's ticket for replace().
  std::uint64_t send(Message message);
  /// As Outbox::replace(); false after the end.
  bool replace(std::uint64_t ticket, Message& other) { return !end_ && outbox_.replace(ticket, other); }
  /// Says goodbye after what has been sent so far.
  void leave() { wants_to_leave_ = true; }

  /// What the peer takes, before the first link: less than this side may send.
  void limit_window(std::uint64_t of_peer);
  /// There is a link, and the peer has our messages up to this number. `handles`: payloads may go by handle
  /// over it.
  void link_up(std::uint64_t received_by_peer, Time now, std::shared_ptr<const Handles> handles = nullptr);
  /// The link is broken, which is no death.
  void link_down(Time now);
  /// A caller connects: until link_up() or connect_failed() it does not want to.
  void start_link();
  /// A caller could not connect. `is_rejected`: nobody listens there any more.
  void connect_failed(bool is_rejected, Time now);
  /// Whether a caller is to connect now.
  bool wants_link(Time now) const {
    return role_ == Role::kCaller && !end_ && !has_left_ && !is_up_ && now >= next_try_;
  }
  /// What else is known of the end, such as the death of the process.
  void end(DownKind kind, std::string text);

  void consume(std::span<const std::byte> bytes, Time now, std::vector<Message>& messages);
  std::span<std::byte> target() { return end_ ? std::span<std::byte>() : inbox_.target(); }
  void filled(std::size_t num_bytes, Time now, std::vector<Message>& messages);

  bool wants_to_write() const { return is_up_ && outbox_.has_bytes(); }
  void gather(std::vector<iovec>& parts);
  void written(std::size_t num_bytes, Time now);

  /// To be called at next_time(), and after a credit was given back.
  void tick(Time now);
  Time next_time() const;

  bool is_up() const { return is_up_; }
  bool has_left() const { return has_left_; }  ///< our goodbye is written
  const std::optional<End>& ended() const { return end_; }
  std::uint64_t received() const { return inbox_.acknowledged(); }
  const Outbox& outbox() const { return outbox_; }
  /// By which payloads go now; null: none does.
  std::shared_ptr<const Handles> handles() const { return outbox_.uses_handles() ? handles_ : nullptr; }
  int num_links() const { return num_links_; }
  /// The messages that the peer may not have got, once: after the end.
  std::vector<Message> take_unacknowledged() { return outbox_.take_all(); }

 private:
  void on_header(const FrameHeader& header);
  template <typename Take>
  void receive(Time now, const Take& take);
  bool owes_news() const {
    return inbox_.acknowledged() != told_message_ || released_->bytes.load() != released_->told.load();
  }
  Time news_due() const;
  // A caller tries to connect for the first time until nobody waits for it any more.
  bool may_be_given_up() const { return num_links_ > 0 || role_ == Role::kListener; }
  bool wants_to_say_goodbye() const {
    return is_up_ && wants_to_leave_ && !is_goodbye_queued_ && outbox_.num_queued() == 0 &&
           outbox_.num_kept() == 0;
  }

  const Role role_;
  const SessionOptions options_;
  std::uint64_t window_of_peer_;  // at most that of options_
  const std::shared_ptr<Released> released_;
  Outbox outbox_;
  Inbox inbox_;
  std::shared_ptr<const Handles> handles_;  // of the last link that had them
  std::optional<End> end_;
  bool is_up_ = false, has_handles_ = false, wants_to_leave_ = false, is_goodbye_queued_ = false,
       has_left_ = false;
  int num_links_ = 0;
  // Of the link: when it was heard, when something was written, what the peer was told, and since when there
  // is news.
  Time heard_, sent_, news_since_, last_tick_;
  std::uint64_t told_message_ = 0;
  bool has_news_ = false;
  // Between links.
  Time lost_, next_try_;
  std::chrono::milliseconds pause_;
};

}  // namespace cohort::net
