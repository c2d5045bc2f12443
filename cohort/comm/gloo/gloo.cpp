// LibTorch's Gloo backend. The only file that sees gloo/declarations.
#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "cohort/comm/backend.h"
#include "cohort/core/env.h"
#include "cohort/core/error.h"
#include "cohort/core/torch_compat.h"

namespace cohort::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

// The address of this host from which `host` is reached, as numbers; empty if there is no way. Connecting a
// UDP socket sends nothing: it asks the routing table.
std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::string result;
  for (const addrinfo* at = found; at != nullptr && result.empty(); at = at->ai_next) {
    const int fd = ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    if (fd < 0) continue;
    sockaddr_storage local{};
    socklen_t size = sizeof(local);
    std::array<char, NI_MAXHOST> text{};
    if (::connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&local), size, text.data(), text.size(), nullptr, 0,
                      NI_NUMERICHOST) == 0) {
      result = text.data();
    }
    ::close(fd);
  }
  ::freeaddrinfo(found);
  return result;
}

std::shared_ptr<gloo::transport::Device> make_device(const std::string& reach) {
  auto interface = core::env_string("COHORT_INTERFACE");
  if (!interface) interface = core::env_string("GLOO_SOCKET_IFNAME");
  try {
    if (interface) return Gloo::createDeviceForInterface(*interface);
    if (!reach.empty()) {
      const std::string address = address_towards(reach);
      if (!address.empty()) return Gloo::createDeviceForHostname(address);
    }
    return Gloo::createDefaultDevice();
  } catch (const std::exception& error) {
    throw CommError("comm.gloo",
                    core::concat("cannot listen on ", interface ? "interface " + *interface : "any address",
                                 ": ", error.what()),
                    "COHORT_INTERFACE=NAME, one of those that `ip address` lists");
  }
}

}  // namespace

MadeBackend make_gloo(const BackendOptions& options) {
  auto gloo_options = Gloo::Options::create(options.timeout);
  gloo_options->devices.push_back(make_device(options.reach));
  auto backend = c10::make_intrusive<Gloo>(options.store, options.rank, options.size, gloo_options);
  // The declarations would have to be wrong for this to differ; then nothing after it can be trusted.
  const auto base = backend->getBackendOptions();
  if (backend->getRank() != options.rank || backend->getSize() != options.size ||
      backend->getBackendName() != c10d::GLOO_BACKEND_NAME || base->timeout != options.timeout) {
    throw CommError("comm.gloo", "LibTorch's Gloo backend is laid out otherwise than Cohort was compiled for",
                    "build Cohort with the headers of the LibTorch that it runs with");
  }
  return {.backend = backend, .type = c10d::ProcessGroup::BackendType::GLOO};
}

}  // namespace cohort::comm
