#include "cohort/base/host.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>

#include "cohort/base/files/fd.h"
#include "cohort/base/secret.h"

namespace cohort::base {

std::string host_name() {
  std::array<char, 256> name{};
  const bool known = ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0';
  return known ? name.data() : "localhost";
}

// Containers of one host have its boot_id. With networks of their own they do not reach each other by
// 127.0.0.1, so the network's namespace is part of the id.
std::string machine_id() {
  static const std::string id = [] {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::array<char, 64> network{};
    const auto length = ::readlink("/proc/self/ns/net", network.data(), network.size());
    // Unknown: then no other process counts as being on this machine.
    if (boot.empty() || length <= 0) return "process/" + random_word();
    return boot + "/" + std::string(network.data(), static_cast<std::size_t>(length));
  }();
  return id;
}

std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    const Fd fd(::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    std::array<char, NI_MAXHOST> text{};
    // Of a datagram socket it chooses the way, and sends nothing.
    if (fd.is_open() && ::connect(fd.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        ::getnameinfo(reinterpret_cast<const sockaddr*>(&own), size, text.data(), text.size(), nullptr, 0,
                      NI_NUMERICHOST) == 0) {
      return text.data();
    }
  }
  return "";
}

}  // namespace cohort::base
