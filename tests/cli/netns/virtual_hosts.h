#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/files/fd.h"

namespace cohort::test {

/// Hosts of a test's own, with one network between them that does what the test says. A host is a network
/// namespace. It has one interface, a TUN device, and a thread of this process carries packets from one to
/// another: so it can drop, repeat and delay them. Nothing is left of them when this goes and the processes
/// in them have ended. Needs root, and /dev/net/tun.
///
///     VirtualHosts hosts(3);
///     hosts.enter(0, [&] { start_a_program(); });     // its sockets are those of host 0
///     hosts.cut_one_way(0, 1);
///
/// Threads: any.
class VirtualHosts {
 public:
  /// What happens to a packet from one host to another.
  struct Link {
    bool is_cut = false;
    double lost = 0, repeated = 0;  ///< shares, 0 to 1
    std::chrono::microseconds delay{0};
  };
  struct Counts {
    std::uint64_t carried = 0, cut = 0, lost = 0, repeated = 0, delayed = 0;
  };

  /// `seed`: of which packets are lost and repeated. Throws: std::runtime_error where this process may not
  /// make them.
  explicit VirtualHosts(int num_hosts, std::uint64_t seed = 1);
  ~VirtualHosts();
  VirtualHosts(const VirtualHosts&) = delete;
  VirtualHosts& operator=(const VirtualHosts&) = delete;

  int size() const { return static_cast<int>(namespaces_.size()); }
  /// "10.213.7.1" for host 0.
  static std::string address(int host);
  /// Calls the function in the network of this host: sockets and processes that it makes belong there.
  /// Afterwards this thread is where it was.
  void enter(int host, const std::function<void()>& function) const;

  // From now on.

  void set_link(int from, int to, const Link& link);
  /// Nothing passes between the two.
  void cut(int a, int b);
  void cut_one_way(int from, int to);
  /// Nothing passes between this host and any other one.
  void isolate(int host);
  /// All links to and from this host are such.
  void set_links_of(int host, const Link& link);
  /// Links to and from this host are as at the start; links of all hosts.
  void heal(int host) { set_links_of(host, {}); }
  void heal();

  Counts counts() const;

 private:
  class Switch;

  std::vector<base::Fd> namespaces_;
  std::unique_ptr<Switch> switch_;
};

}  // namespace cohort::test
