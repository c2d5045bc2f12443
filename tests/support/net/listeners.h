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

/// A TCP socket of this host, as /proc/net/tcp and tcp6 write it.
struct TcpSocket {
  std::string local, remote;  // address:port
  std::string state;          // 0A: listens
  std::string queues;         // bytes that the other side has not acknowledged:bytes that nobody has read
};

inline std::vector<TcpSocket> tcp_sockets() {
  std::vector<TcpSocket> found;
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);  // names of columns
    TcpSocket socket;
    for (std::string number;
         file >> number >> socket.local >> socket.remote >> socket.state >> socket.queues;) {
      std::getline(file, line);
      found.push_back(socket);
    }
  }
  return found;
}

/// How they end for a port.
inline std::string end_of(std::uint16_t port) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), ":%04X", port);
  return text.data();
}

/// The addresses at which somebody on this host listens on a TCP port.
inline std::vector<std::string> listeners(std::uint16_t port) {
  const std::string end = end_of(port);
  std::vector<std::string> found;
  for (const TcpSocket& socket : tcp_sockets()) {
    const std::string& local = socket.local;
    if (local.ends_with(end) && socket.state == "0A")
      found.push_back(local.substr(0, local.size() - end.size()));
  }
  return found;
}

/// Whether what was written to TCP sockets that are connected to this port has come to the other side's
/// kernel. 0: of a local socket, true.
inline bool has_all_arrived(std::uint16_t port) {
  const std::string end = end_of(port), none = "00000000:";
  for (const TcpSocket& socket : tcp_sockets()) {
    if (socket.remote.ends_with(end) && !socket.queues.starts_with(none)) return false;
  }
  return true;
}

}  // namespace cohort::test
