// A text goes in packets of 32 KiB, as a packet socket takes no message above its buffer. The first byte of a
// packet says whether another one follows. A text that has begun always ends; one that has not may be
// replaced, as texts are whole each time. So a rank that is stopped costs its agent no more than two texts. A
// descriptor goes in a packet of its own, which is not replaced.
#include "cohort/membership/rank_link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::membership {
namespace {

constexpr const char* kWhereLink = "membership.rank_link";
constexpr std::size_t kPacketBytes = std::size_t{32} << 10;
constexpr std::size_t kMaxTextBytes = std::size_t{32} << 20;  // as parse_json()
constexpr char kMore = 'm', kLast = 'l', kFile = 'f';

[[noreturn]] void throw_gone(const char* why) {
  throw CommError(kWhereLink, base::concat("the other side of the link is gone: ", why),
                  "the log of the agent, or of the rank");
}

union FileControl {
  cmsghdr head;  // aligns the bytes
  std::array<char, CMSG_SPACE(sizeof(int))> bytes;
};

ssize_t send_packet(int fd, const std::string& bytes, const base::Fd& file) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  FileControl control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (file.is_open()) {
    message.msg_control = control.bytes.data();
    message.msg_controllen = control.bytes.size();
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    const int number = file.get();
    std::memcpy(CMSG_DATA(head), &number, sizeof number);
  }
  return ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t receive_packet(int fd, std::string& bytes, base::Fd& file) {
  iovec part{bytes.data(), bytes.size()};
  FileControl control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  const ssize_t size = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (size <= 0) return size;
  const cmsghdr* const head = CMSG_FIRSTHDR(&message);
  if (head == nullptr || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) return size;
  int number = -1;
  std::memcpy(&number, CMSG_DATA(head), sizeof number);
  file = base::Fd(number);
  return size;
}

}  // namespace

std::pair<RankLink, RankLink> RankLink::make_pair() {
  std::array<int, 2> fds{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds.data()) != 0) {
    throw SystemError(kWhereLink, base::concat("no socket pair for a rank: ", std::strerror(errno)));
  }
  return {RankLink(base::Fd(fds[0])), RankLink(base::Fd(fds[1]))};
}

std::optional<RankLink> RankLink::of_process() {
  const auto fd = base::env_int("COHORT_AGENT_FD", 3, 1 << 20);
  if (!fd) return std::nullopt;
  int type = 0;
  socklen_t size = sizeof(type);
  if (::getsockopt(static_cast<int>(*fd), SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_SEQPACKET) {
    throw UsageError(kWhereLink, base::concat("COHORT_AGENT_FD is ", *fd, ", which is no link to an agent"),
                     "keep the descriptors that cohort run hands over, or take the variable away too");
  }
  // Programs that this one starts are no ranks.
  static_cast<void>(::fcntl(static_cast<int>(*fd), F_SETFD, FD_CLOEXEC));
  base::Fd own(::fcntl(static_cast<int>(*fd), F_DUPFD_CLOEXEC, 3));
  if (!own.is_open())
    throw SystemError(kWhereLink, base::concat("no file descriptor: ", std::strerror(errno)));
  return RankLink(std::move(own));
}

bool RankLink::wait_for(short events, base::Deadline deadline) const {
  pollfd file{fd_.get(), events, 0};
  return base::wait_for_files({&file, 1}, deadline) > 0;
}

bool RankLink::send(const std::string& text, base::Deadline deadline) {
  if (text.empty() || text.size() > kMaxTextBytes) {
    throw UsageError(kWhereLink,
                     base::concat("a text has ", text.size(), " bytes, expected 1 to ", kMaxTextBytes));
  }
  // What has begun ends, and no text that is older than this one follows.
  std::deque<Packet> kept;
  for (bool is_begun = is_first_begun_; Packet & packet : unsent_) {
    const char kind = packet.bytes[0];
    if (kind == kFile || is_begun) kept.push_back(std::move(packet));
    if (kind == kLast) is_begun = false;
  }
  unsent_ = std::move(kept);
  for (std::size_t begin = 0; begin < text.size(); begin += kPacketBytes) {
    const std::size_t size = std::min(kPacketBytes, text.size() - begin);
    unsent_.push_back({(begin + size < text.size() ? kMore : kLast) + text.substr(begin, size)});
  }
  return flush(deadline);
}

bool RankLink::send_file(const base::Fd& file, base::Deadline deadline) {
  base::Fd copy(::fcntl(file.get(), F_DUPFD_CLOEXEC, 3));
  if (!copy.is_open()) {
    throw SystemError(kWhereLink, base::concat("cannot give a rank a descriptor: ", std::strerror(errno)));
  }
  unsent_.push_back({std::string(1, kFile), std::move(copy)});
  return flush(deadline);
}

bool RankLink::flush(base::Deadline deadline) {
  while (!unsent_.empty()) {
    const auto& [bytes, file] = unsent_.front();
    if (send_packet(fd_.get(), bytes, file) >= 0) {
      is_first_begun_ = bytes[0] == kMore;
      unsent_.pop_front();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(POLLOUT, deadline) && deadline.expired()) return false;
    } else if (errno != EINTR) {
      throw_gone(std::strerror(errno));
    }
  }
  return true;
}

std::optional<std::string> RankLink::receive(base::Deadline deadline) {
  std::string packet(kPacketBytes + 1, '\0');
  for (;;) {
    base::Fd file;
    const ssize_t size = receive_packet(fd_.get(), packet, file);
    if (size == 0) throw_gone("it has closed its end");
    if (size < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!wait_for(POLLIN, deadline) && deadline.expired()) return std::nullopt;
      } else if (errno != EINTR) {
        throw_gone(std::strerror(errno));
      }
      continue;
    }
    if (packet[0] == kFile) {
      file_ = std::move(file);
      continue;
    }
    received_.append(packet, 1, static_cast<std::size_t>(size) - 1);
    if (received_.size() > kMaxTextBytes) {
      throw CommError(kWhereLink, base::concat("a text of more than ", kMaxTextBytes, " bytes came"));
    }
    if (packet[0] == kLast) return std::exchange(received_, {});
  }
}

void RankLink::shutdown() {
  static_cast<void>(::shutdown(fd_.get(), SHUT_RDWR));
}

}  // namespace cohort::membership
