// One thread reads orders and writes statuses, so that neither the training thread nor net's ever waits for
// an agent. It sleeps in poll(2) on the link and on an eventfd, which update() writes. A step takes a status,
// and steps may take less than a millisecond: what is not urgent is sent every 20 ms at most. The first such
// change wakes the thread, which then sleeps for the rest of the time; those after it wake nobody.
#include "cohort/elastic/internal/agent_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/threads/wait.h"

namespace cohort::elastic {
namespace {

constexpr std::chrono::milliseconds kStatusPause(20);
constexpr std::chrono::seconds kLinkStopTime(2);

base::Fd make_event_fd() {
  base::Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.is_open()) {
    throw SystemError("elastic.agent_link", base::concat("no file descriptor: ", std::strerror(errno)));
  }
  return fd;
}

base::Deadline at_once() {
  return base::Deadline(std::chrono::milliseconds(0));
}

}  // namespace

AgentLink::AgentLink(membership::RankLink link, Listener listener)
    : link_(std::move(link)),
      listener_(std::move(listener)),
      wake_(make_event_fd()),
      thread_({.name = "agent link", .spin = std::chrono::microseconds(0), .in_timeline = false}) {
  thread_.submit("agent link", [this] { run(); });
}

AgentLink::~AgentLink() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  static_cast<void>(::eventfd_write(wake_.get(), 1));
  thread_.stop(std::chrono::milliseconds(kLinkStopTime));
}

void AgentLink::update(const std::function<void(membership::RankStatus&)>& change, When when) {
  {
    const std::lock_guard lock(mutex_);
    change(status_);
    const bool was_dirty = std::exchange(is_dirty_, true);
    if (when == When::kSoon && was_dirty) return;
    is_urgent_ = is_urgent_ || when == When::kNow;
  }
  static_cast<void>(::eventfd_write(wake_.get(), 1));
}

base::Deadline AgentLink::next_status() {
  const std::lock_guard lock(mutex_);
  if (!is_dirty_) return base::Deadline::never();  // an agent may have nothing to say
  return base::Deadline(last_sent_ + kStatusPause - base::Deadline::Clock::now());
}

void AgentLink::send_status() {
  std::unique_lock lock(mutex_);
  const auto now = base::Deadline::Clock::now();
  if (is_dirty_ && (is_urgent_ || is_stopping_ || now - last_sent_ >= kStatusPause)) {
    is_dirty_ = is_urgent_ = false;
    last_sent_ = now;
    const std::string text = to_text(status_);
    lock.unlock();
    link_.send(text, at_once());
  } else if (link_.has_unsent()) {
    lock.unlock();
    link_.flush(at_once());
  }
}

void AgentLink::run() {
  try {
    for (;;) {
      const short events = link_.has_unsent() ? POLLIN | POLLOUT : POLLIN;
      std::array<pollfd, 2> files{pollfd{link_.fd(), events, 0}, pollfd{wake_.get(), POLLIN, 0}};
      base::wait_for_files(files, next_status());
      eventfd_t count = 0;
      static_cast<void>(::eventfd_read(wake_.get(), &count));
      send_status();
      {
        const std::lock_guard lock(mutex_);
        if (is_stopping_) return;
      }
      while (const auto text = link_.receive(at_once())) {
        if (base::Fd file = link_.take_file(); file.is_open()) listener_.on_region(std::move(file));
        membership::RankOrder order = membership::parse_rank_order(*text);
        update([&](membership::RankStatus& status) { status.heard = order.number; });
        listener_.on_order(std::move(order));
      }
    }
  } catch (const std::exception& error) {
    listener_.on_end(base::message_of(error));
  } catch (...) {
    listener_.on_end("an unknown error");
  }
}

}  // namespace cohort::elastic
