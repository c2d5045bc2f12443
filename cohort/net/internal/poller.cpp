#include "cohort/net/internal/poller.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"

namespace cohort::net {
namespace {

[[noreturn]] void throw_system_error(const char* what) {
  throw SystemError("net.poller", base::concat(what, ": ", std::strerror(errno)));
}

epoll_event event_of(std::uint64_t key, Poller::Interest interest) {
  epoll_event event{};
  if (interest.reads) event.events |= EPOLLIN;
  if (interest.writes) event.events |= EPOLLOUT;
  event.data.u64 = key;
  return event;
}

}  // namespace

Poller::Poller() : process_(::getpid()), fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!fd_.is_open()) throw_system_error("no set of sockets can be made");
}

void Poller::add(int fd, std::uint64_t key, Interest interest) {
  epoll_event event = event_of(key, interest);
  if (::epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_system_error("a socket cannot be added");
}

void Poller::change(int fd, std::uint64_t key, Interest interest) {
  if (process_ != ::getpid()) return;
  epoll_event event = event_of(key, interest);
  if (::epoll_ctl(fd_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
    throw_system_error("a socket cannot be changed");
}

void Poller::remove(int fd) {
  if (process_ == ::getpid()) static_cast<void>(::epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr));
}

std::optional<Poller::Ready> Poller::next_ready() {
  epoll_event event{};
  if (::epoll_wait(fd_.get(), &event, 1, 0) != 1) return std::nullopt;
  const bool has_error = (event.events & (EPOLLERR | EPOLLHUP)) != 0;
  return Ready{event.data.u64, has_error || (event.events & EPOLLIN) != 0,
               has_error || (event.events & EPOLLOUT) != 0};
}

base::Fd Poller::duplicate() const {
  base::Fd fd(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!fd.is_open()) throw_system_error("no descriptor is left");
  return fd;
}

}  // namespace cohort::net
