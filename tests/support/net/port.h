#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <random>
#include <stdexcept>
#include <string>

#include "cohort/base/files/fd.h"

namespace cohort::test {

/// A TCP port of the system's choice, or of the caller's, held on every IPv4 address of this host for as long
/// as this lives.
class Port {
 public:
  enum class Use {
    kListens,  ///< takes connections, and never says a word
    kRejects,  ///< nobody listens, and nobody else can meanwhile
  };

  explicit Port(Use use, std::uint16_t number = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(number);
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
  base::Fd fd_;
  std::uint16_t number_ = 0;
};

/// Returns a port that was free a moment ago, for those who must be told one to listen on. It lies below
/// those that the system gives (ip_local_port_range), so nobody who takes one of the system's choice gets it
/// meanwhile.
inline std::uint16_t free_port() {
  std::random_device random;
  for (int tries = 0; tries < 200; ++tries) {
    try {
      return Port(Port::Use::kRejects, static_cast<std::uint16_t>(20'000 + random() % 12'000)).number();
    } catch (const std::runtime_error&) {  // somebody has it
    }
  }
  throw std::runtime_error("no free port");
}

}  // namespace cohort::test
