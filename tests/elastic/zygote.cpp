#include "zygote.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "cohort/base/env.h"
#include "cohort/base/internal/fault_points.h"

namespace cohort::test {
namespace {

constexpr std::size_t kMaxFds = 4;

bool send_request(int socket, const std::string& text, const std::vector<int>& fds) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(head), fds.data(), fds.size() * sizeof(int));
  return ::sendmsg(socket, &message, 0) == static_cast<ssize_t>(text.size());
}

}  // namespace

Zygote::Zygote(std::function<int()> body) : parent_(::getpid()) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::array<int, 2> pair{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()) != 0)
    throw std::runtime_error("socketpair");
  socket_ = base::Fd(pair[0]);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork");
  if (pid_ == 0) {
    ::close(socket_.release());
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    serve(pair[1], body);
    ::_exit(0);
  }
  ::close(pair[1]);
}

Zygote::~Zygote() {
  socket_.close();
  ::waitpid(pid_, nullptr, 0);
}

void Zygote::serve(int fd, const std::function<int()>& body) {
  std::string text(1 << 16, '\0');
  for (;;) {
    iovec part{text.data(), text.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t size = ::recvmsg(fd, &message, 0);
    if (size <= 0) return;
    const cmsghdr* const head = CMSG_FIRSTHDR(&message);
    std::vector<int> fds((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(fds.data(), CMSG_DATA(head), fds.size() * sizeof(int));
    const pid_t middle = ::fork();
    if (middle == 0) {
      const pid_t child = ::fork();
      if (child != 0) {
        static_cast<void>(::send(fd, &child, sizeof child, 0));
        ::_exit(0);
      }
      ::close(fd);
      while (::getppid() != parent_) ::sched_yield();
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::istringstream lines(text.substr(0, static_cast<std::size_t>(size)));
      std::string line;
      ::dup2(fds.front(), 1);
      ::dup2(fds.front(), 2);
      for (std::size_t next = 1; std::getline(lines, line);) {
        const std::size_t at = line.find('=');
        const std::string value =
            at + 1 == line.size() && next < fds.size() ? std::to_string(fds[next++]) : line.substr(at + 1);
        ::setenv(line.substr(0, at).c_str(), value.c_str(), 1);
      }
      ::_exit(body());
    }
    for (const int other : fds) ::close(other);
    ::waitpid(middle, nullptr, 0);
  }
}

pid_t Zygote::start(const std::map<std::string, std::string>& variables,
                    const std::map<std::string, int>& fds, const std::string& output) {
  const base::Fd file(::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  std::string text;
  std::vector<int> list{file.get()};
  // Without a value: that of a descriptor.
  for (const auto& [name, fd] : fds) {
    text += name + "=\n";
    list.push_back(fd);
  }
  for (const auto& [name, value] : variables) text += name + "=" + value + "\n";
  pid_t pid = -1;
  if (!send_request(socket_.get(), text, list) || ::recv(socket_.get(), &pid, sizeof pid, 0) != sizeof pid) {
    throw std::runtime_error("the zygote is gone");
  }
  return pid;
}

void stop_at_test_point() {
  const std::string point = base::env_string("TEST_POINT").value_or("");
  const std::size_t colon = point.find(':');
  if (colon == std::string::npos) return;
  const int control = static_cast<int>(*base::env_int("TEST_CONTROL_FD"));
  base::set_fault_hook([control, name = point.substr(0, colon),
                        left = std::stoi(point.substr(colon + 1))](const char* reached) mutable {
    if (name != reached || --left != 0) return;
    char answer = 0;
    // It is killed, or continues.
    if (::send(control, "?", 1, MSG_NOSIGNAL) != 1 || ::recv(control, &answer, 1, 0) != 1) ::_exit(3);
  });
}

}  // namespace cohort::test
