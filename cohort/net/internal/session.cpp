// What ends a session: a goodbye; silence, of a link or of nobody who connects; a rejected connection, for
// then the process that listened is gone; and what the peer must not send. A broken link ends nothing.
//
// Acknowledgements and released bytes travel in the header of each frame. Where no frame goes they are sent
// alone: after 5 ms, at once where the peer may wait for them.
//
// Each side says once over a link that it maps the other's heap (kMapped): before that, payloads are copied.
//
// Who was not running itself (a debugger, a suspended machine) does not blame its peers: time in which tick()
// did not come is no silence.
#include "cohort/net/internal/session.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"

namespace cohort::net {
namespace {

// Messages, or a part of the window, after which the peer is told at once.
constexpr std::uint64_t kMaxUntoldMessages = 64;
constexpr std::size_t kWindowPart = 4;

}  // namespace

Session::Session(Role role, SessionOptions options, Allocate allocate, std::function<void()> wake, Time now)
    : role_(role),
      options_(options),
      window_of_peer_(options.window),
      released_(std::make_shared<Released>()),
      outbox_(options.window),
      inbox_(options.window, std::move(allocate), released_),
      heard_(now),
      sent_(now),
      news_since_(now),
      last_tick_(now),
      lost_(now),
      next_try_(now),
      pause_(options.first_pause) {
  released_->wake = std::move(wake);
}

std::uint64_t Session::send(Message message) {
  return end_ ? 0 : outbox_.push(std::move(message));
}

void Session::limit_window(std::uint64_t of_peer) {
  window_of_peer_ = std::min<std::uint64_t>(options_.window, of_peer);
  outbox_.set_window(window_of_peer_);
}

void Session::link_up(std::uint64_t received_by_peer, Time now, std::shared_ptr<const Handles> handles) {
  if (end_) return;
  try {
    outbox_.restart(received_by_peer);
  } catch (const CommError& error) {
    return end(DownKind::kFailed, base::message_of(error));
  }
  inbox_.restart(handles);
  has_handles_ = handles != nullptr;
  if (handles) handles_ = std::move(handles);
  is_up_ = true;
  ++num_links_;
  heard_ = sent_ = last_tick_ = now;
  pause_ = options_.first_pause;
  told_message_ = 0;
  released_->told = 0;
  has_news_ = is_goodbye_queued_ = has_left_ = false;  // a goodbye that got lost is said again
  if (has_handles_ && handles_->maps_theirs()) outbox_.push_control(FrameKind::kMapped);
  if (owes_news()) outbox_.push_control(FrameKind::kAck);
}

void Session::link_down(Time now) {
  if (!is_up_) return;
  is_up_ = false;
  lost_ = last_tick_ = now;
  next_try_ = now + options_.first_pause;
}

void Session::start_link() {
  next_try_ = Time::max();
}

void Session::connect_failed(bool is_rejected, Time now) {
  if (end_ || is_up_) return;
  if (is_rejected && num_links_ > 0)
    return end(DownKind::kDied, "died: nobody listens at its address any more");
  next_try_ = now + pause_;
  pause_ = std::min(2 * pause_, options_.most_pause);
}

void Session::end(DownKind kind, std::string text) {
  if (end_) return;
  end_ = End{kind, std::move(text)};
  is_up_ = false;
  if (handles_) handles_->lose_peer();
}

void Session::on_header(const FrameHeader& header) {
  outbox_.on_peer_state(header.acknowledged, header.released);
  if (header.kind == FrameKind::kMapped) {
    if (!has_handles_) throw CommError("net.handle", "the peer maps a heap that was not shown to it");
    outbox_.use_handles(handles_);
  }
  if (header.kind == FrameKind::kGoodbye) end(DownKind::kLeft, "has left");
}

template <typename Take>
void Session::receive(Time now, const Take& take) {
  if (end_ || !is_up_) return;
  heard_ = now;
  try {
    take();
  } catch (const CommError& error) {
    end(DownKind::kFailed, base::message_of(error));
  }
  if (!has_news_ && owes_news()) {
    has_news_ = true;
    news_since_ = now;
  }
}

void Session::consume(std::span<const std::byte> bytes, Time now, std::vector<Message>& messages) {
  receive(now,
          [&] { inbox_.consume(bytes, [this](const FrameHeader& header) { on_header(header); }, messages); });
}

void Session::filled(std::size_t num_bytes, Time now, std::vector<Message>& messages) {
  receive(now, [&] { inbox_.filled(num_bytes, messages); });
}

void Session::gather(std::vector<iovec>& parts) {
  if (!is_up_) return;
  const std::uint64_t message = inbox_.acknowledged(), released = released_->bytes.load();
  if (outbox_.gather(parts, message, released)) {
    told_message_ = message;
    released_->told = released;
    has_news_ = false;
  }
}

void Session::written(std::size_t num_bytes, Time now) {
  outbox_.written(num_bytes);
  sent_ = now;
  if (wants_to_leave_ && is_goodbye_queued_ && !outbox_.has_bytes()) has_left_ = true;
}

Time Session::news_due() const {
  const std::uint64_t messages = inbox_.acknowledged() - told_message_;
  const std::uint64_t bytes = released_->bytes.load() - released_->told.load();
  if (messages >= kMaxUntoldMessages || bytes >= window_of_peer_ / kWindowPart) return Time::min();
  return news_since_ + options_.acknowledge_after;
}

void Session::tick(Time now) {
  const Time::duration missed = now - last_tick_ - 2 * options_.heartbeat;
  last_tick_ = now;
  if (missed > Time::duration::zero()) {
    heard_ = std::min(heard_ + missed, now);
    lost_ = std::min(lost_ + missed, now);
  }
  if (end_) return;
  if (!is_up_) {
    if (may_be_given_up() && now - lost_ >= options_.silence) {
      end(DownKind::kSilent, base::concat("could not be reached for ", options_.silence.count(), " ms"));
    }
    return;
  }
  if (now - heard_ >= options_.silence) {
    return end(DownKind::kSilent, base::concat("has been silent for ", options_.silence.count(), " ms"));
  }
  if (!has_news_ && owes_news()) {
    has_news_ = true;
    news_since_ = now;
  }
  if (has_left_) return;  // nothing follows a goodbye
  if (wants_to_say_goodbye()) {
    is_goodbye_queued_ = true;
    outbox_.push_control(FrameKind::kGoodbye);
  } else if (!outbox_.has_bytes() &&
             (now - sent_ >= options_.heartbeat || (has_news_ && now >= news_due()))) {
    outbox_.push_control(FrameKind::kAck);
  }
}

Time Session::next_time() const {
  if (end_) return Time::max();
  const Time again = last_tick_ + options_.heartbeat;  // so that a tick that does not come is seen
  if (!is_up_) {
    const Time given_up = may_be_given_up() ? lost_ + options_.silence : again;
    return std::min({again, given_up, role_ == Role::kCaller && !has_left_ ? next_try_ : again});
  }
  if (wants_to_say_goodbye()) return Time::min();
  Time next = std::min(again, heard_ + options_.silence);
  if (has_left_ || outbox_.has_bytes()) return next;  // bytes that the socket takes none of now will say all
  next = std::min(next, sent_ + options_.heartbeat);
  return has_news_ ? std::min(next, news_due()) : next;
}

}  // namespace cohort::net
