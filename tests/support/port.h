#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <stdexcept>
#include <string>

#include "cohort/core/fd.h"

namespace cohort::test {

/// A TCP port of the system's choice, held on every IPv4 address of this host for as long as this lives.
class Port {
 public:
  enum class Use {
    kListens,  ///< takes connections, and never says a word
    kRefuses,  ///< nobody listens, and nobody else can meanwhile
  };

  explicit Port(Use use) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t size = sizeof address;
    if (::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        (use == Use::kListens && ::listen(fd_.get(), 8) != 0) ||
        ::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no free port");
    }
    number_ = ntohs(address.sin_port);
  }
  std::uint16_t number() const { return number_; }
  std::string text() const { return std::to_string(number_); }

 private:
  core::Fd fd_;
  std::uint16_t number_ = 0;
};

/// Returns a port that was free a moment ago, for those who must be told one to listen on.
inline std::uint16_t free_port() {
  return Port(Port::Use::kRefuses).number();
}

}  // namespace cohort::test
