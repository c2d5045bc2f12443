#include "tests/cli/netns/virtual_hosts.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <map>

#include "tests/cli/netns/netns.h"

namespace cohort::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A datagram socket on a virtual host.
class Socket {
 public:
  Socket(const VirtualHosts& hosts, int host) {
    hosts.enter(host, [&] {
      fd_ = base::Fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      const sockaddr_in own = address_of(host);
      EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own), 0);
    });
  }
  void send(int to, int number) const {
    const sockaddr_in address = address_of(to);
    ::sendto(fd_.get(), &number, sizeof number, 0, reinterpret_cast<const sockaddr*>(&address),
             sizeof address);
  }
  // The next number; -1 where none comes in time.
  int receive(milliseconds timeout) const {
    pollfd file{fd_.get(), POLLIN, 0};
    int number = -1;
    if (::poll(&file, 1, static_cast<int>(timeout.count())) == 1)
      ::recv(fd_.get(), &number, sizeof number, 0);
    return number;
  }

 private:
  static sockaddr_in address_of(int host) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(7'000);
    ::inet_pton(AF_INET, VirtualHosts::address(host).c_str(), &address.sin_addr);
    return address;
  }
  base::Fd fd_;
};

constexpr milliseconds kComes(5'000), kDoesNotCome(30);

class NetnsVirtualHostsTest : public NetnsTest {};

TEST_F(NetnsVirtualHostsTest, HostsReachEachOtherAndNobodyElse) {
  VirtualHosts hosts(3), apart(2);
  const Socket a(hosts, 0), b(hosts, 1), other(apart, 1);
  a.send(1, 7);
  EXPECT_EQ(b.receive(kComes), 7);
  EXPECT_EQ(other.receive(kDoesNotCome), -1);
}

TEST_F(NetnsVirtualHostsTest, ACutHoldsInItsDirectionUntilItIsHealed) {
  VirtualHosts hosts(3);
  const Socket a(hosts, 0), b(hosts, 1), c(hosts, 2);
  hosts.cut_one_way(0, 1);
  a.send(1, 1);
  b.send(0, 2);
  a.send(2, 3);
  EXPECT_EQ(a.receive(kComes), 2);
  EXPECT_EQ(c.receive(kComes), 3);
  EXPECT_EQ(b.receive(kDoesNotCome), -1);
  hosts.heal();
  hosts.isolate(2);
  a.send(1, 4);
  c.send(1, 5);
  b.send(2, 6);
  EXPECT_EQ(b.receive(kComes), 4);
  EXPECT_EQ(b.receive(kDoesNotCome), -1);
  EXPECT_EQ(c.receive(kDoesNotCome), -1);
  EXPECT_EQ(hosts.counts().cut, 3U);
}

TEST_F(NetnsVirtualHostsTest, AShareIsLostAndAShareComesTwice) {
  VirtualHosts hosts(2);
  const Socket a(hosts, 0), b(hosts, 1);
  hosts.set_link(0, 1, {.lost = 0.25, .repeated = 0.5});
  std::map<int, int> times;
  for (int i = 0; i < 400; ++i) {
    a.send(1, i);
    if (i % 20 != 19) continue;
    // Before queues are full.
    for (int number = 0; (number = b.receive(kDoesNotCome)) >= 0;) ++times[number];
  }
  const VirtualHosts::Counts counts = hosts.counts();
  EXPECT_GT(counts.lost, 60U);
  EXPECT_LT(counts.lost, 140U);
  EXPECT_GT(counts.repeated, 100U);
  EXPECT_EQ(times.size(), 400 - counts.lost);
  std::uint64_t sum = 0;
  for (const auto& [number, count] : times) sum += static_cast<std::uint64_t>(count);
  EXPECT_EQ(sum, counts.carried + counts.repeated);
}

TEST_F(NetnsVirtualHostsTest, ADelayIsOfEachPacketInOrder) {
  VirtualHosts hosts(2);
  const Socket a(hosts, 0), b(hosts, 1);
  hosts.set_link(0, 1, {.delay = milliseconds(50)});
  const Clock::time_point begin = Clock::now();
  a.send(1, 1);
  a.send(1, 2);
  b.send(0, 3);
  EXPECT_EQ(a.receive(kComes), 3);
  EXPECT_EQ(b.receive(kComes), 1);
  EXPECT_EQ(b.receive(kComes), 2);
  EXPECT_GE(Clock::now() - begin, milliseconds(50));
}

}  // namespace
}  // namespace cohort::test
