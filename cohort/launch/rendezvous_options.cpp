// Names are resolved by the system. Which of this host's addresses leads to another host is the kernel's to
// say: a datagram socket is connected to it, which sends nothing.
#include "cohort/launch/rendezvous_options.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/host.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait_for_listener.h"

namespace cohort::launch {
namespace {

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Null where the name is not known; `why` then says why.
Addresses resolve_host(const std::string& host, std::string* why = nullptr) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), "9", &hints, &found);
  if (status != 0 && why != nullptr)
    *why = status == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(status);
  return {status == 0 ? found : nullptr, ::freeaddrinfo};
}

std::string numeric_text(const addrinfo& address) {
  std::array<char, NI_MAXHOST> text{};
  const int status = ::getnameinfo(address.ai_addr, address.ai_addrlen, text.data(), text.size(), nullptr, 0,
                                   NI_NUMERICHOST);
  return status == 0 ? text.data() : "an address of another kind";
}

// Why the kernel sends nothing to this address: "Network is unreachable", for instance. Empty: it would.
std::string why_no_route(const addrinfo& address) {
  const base::Fd fd(::socket(address.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (fd.is_open() && ::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return "";
  return std::strerror(errno);
}

bool is_same_address(const sockaddr* a, const sockaddr* b) {
  if (a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

HostPort split_endpoint(std::string_view endpoint) {
  const std::size_t colon = std::min(endpoint.rfind(':'), endpoint.size());
  HostPort place{std::string(endpoint.substr(0, colon))};
  if (place.host.size() > 2 && place.host.front() == '[') {
    place.host = place.host.substr(1, place.host.size() - 2);
  }
  const std::string_view digits = endpoint.substr(std::min(colon + 1, endpoint.size()));
  std::from_chars(digits.data(), digits.data() + digits.size(), place.port);
  return place;
}

std::string endpoint_text(const HostPort& place) {
  const bool is_ipv6 = place.host.find(':') != std::string::npos;
  return base::concat(is_ipv6 ? "[" : "", place.host, is_ipv6 ? "]:" : ":", place.port);
}

std::string RendezvousOptions::endpoint_host() const {
  return split_endpoint(endpoint).host;
}

std::optional<std::string> read_endpoint_text(std::string_view text, std::uint16_t default_port) {
  std::size_t end = text.find(':');  // of the host
  if (text.starts_with('[')) {
    end = text.find(']');
    if (end == std::string_view::npos || end == 1) return std::nullopt;
    ++end;
  }
  end = std::min(end, text.size());
  std::uint16_t port = default_port;
  if (end < text.size()) {
    const std::string_view digits = text.substr(end + 1);
    const auto [next, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (text[end] != ':' || error != std::errc() || next != digits.data() + digits.size())
      return std::nullopt;
  }
  if (end == 0 || text.substr(0, end).find_first_of(" \t/") != std::string_view::npos) return std::nullopt;
  return base::concat(text.substr(0, end), ":", port);
}

bool names_this_host(const std::string& host) {
  if (base::is_this_host(host) || host == base::host_name()) return true;
  const Addresses found = resolve_host(host);
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    // 127.0.1.1 is what many hosts call themselves, and an address of no interface.
    if (address->ai_family == AF_INET &&
        (ntohl(reinterpret_cast<const sockaddr_in*>(address->ai_addr)->sin_addr.s_addr) >> 24) == 127) {
      return true;
    }
    for (const ifaddrs* own = list; own != nullptr; own = own->ifa_next) {
      if (own->ifa_addr != nullptr && is_same_address(own->ifa_addr, address->ai_addr)) return true;
    }
  }
  return false;
}

std::string address_towards(const std::string& host) {
  std::string own = base::address_towards(host);
  if (!own.empty()) return own;
  // What is asked for once more may be there by now.
  std::string why;
  const Addresses found = resolve_host(host, &why);
  if (found == nullptr) {
    throw RendezvousError(
        "launch.run", base::concat("the name of the rendezvous endpoint ", host, " is not known here: ", why),
        base::concat("`getent hosts ", host,
                     "` on this host; --rdzv-endpoint HOST:PORT with a name that "
                     "finds, or with an address"));
  }
  std::vector<std::string> reasons;
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    why = why_no_route(*address);
    if (!why.empty()) reasons.push_back(base::concat(numeric_text(*address), ": ", why));
  }
  own = reasons.empty() ? base::address_towards(host) : "";
  if (!own.empty()) return own;
  throw RendezvousError(
      "launch.run",
      base::concat("no way leads from here to the rendezvous endpoint ", host, " (",
                   reasons.empty() ? "no interface has an address" : base::join(reasons, "; "), ")"),
      base::concat("`ip route get ", numeric_text(*found),
                   "` on this host; --rdzv-endpoint HOST:PORT with an "
                   "address that this host reaches"));
}

}  // namespace cohort::launch
