#include "cohort/base/host.h"

#include <unistd.h>

#include <array>
#include <fstream>

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

}  // namespace cohort::base
