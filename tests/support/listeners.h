#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace cohort::test {

/// The address of 127.0.0.1 as listeners() writes it.
inline constexpr const char* kLoopback = "0100007F";

/// The addresses at which somebody on this host listens on a TCP port, as /proc/net/tcp and tcp6 write them.
inline std::vector<std::string> listeners(std::uint16_t port) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), ":%04X", port);
  const std::string end = text.data();
  std::vector<std::string> found;
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    for (std::string number, local, remote, state, line; file >> number >> local >> remote >> state;) {
      std::getline(file, line);
      if (local.ends_with(end) && state == "0A") found.push_back(local.substr(0, local.size() - end.size()));
    }
  }
  return found;
}

}  // namespace cohort::test
