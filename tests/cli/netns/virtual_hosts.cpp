// Why no nftables: their rules drop a random share of packets, but do not delay one, and what they drop is
// another set each time. Here all faults are one function of a packet's source and destination, and a seed.
//
// TUN devices carry IP packets without Ethernet, so there are neither addresses of hardware nor ARP. All
// hosts are in one /24, and the last byte of an address is the host's number + 1. Namespaces belong to
// nobody: they have no name, and end with the last descriptor and process.
#include "tests/cli/netns/virtual_hosts.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <queue>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

namespace cohort::test {
namespace {

using base::Fd;
using Clock = std::chrono::steady_clock;

constexpr const char* kDevice = "eth0";
constexpr std::size_t kMaxPacketBytes = 2048;
constexpr int kPacketsInTurn = 64;  // of one host, before others have theirs

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("netns: " + what + ": " + std::strerror(errno));
}

int check(int result, const char* what) {
  if (result < 0) fail(what);
  return result;
}

Fd open_file(const char* path, int flags) {
  Fd file(::open(path, flags | O_CLOEXEC));
  if (!file.is_open()) fail(path);
  return file;
}

ifreq request_for(const char* device) {
  ifreq request{};
  std::strncpy(request.ifr_name, device, IFNAMSIZ - 1);
  return request;
}

void set_address(int socket, unsigned long what, const std::string& text) {
  ifreq request = request_for(kDevice);
  auto& address = reinterpret_cast<sockaddr_in&>(request.ifr_addr);
  address.sin_family = AF_INET;
  ::inet_pton(AF_INET, text.c_str(), &address.sin_addr);
  check(::ioctl(socket, what, &request), text.c_str());
}

void bring_up(int socket, const char* device) {
  ifreq request = request_for(device);
  check(::ioctl(socket, SIOCGIFFLAGS, &request), device);
  request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP | IFF_RUNNING);
  check(::ioctl(socket, SIOCSIFFLAGS, &request), device);
}

struct Host {
  Fd network, device;
};

// On a thread that is in a new network namespace.
Host make_host_here(int number) {
  Host host;
  host.network = open_file("/proc/thread-self/ns/net", O_RDONLY);
  host.device = open_file("/dev/net/tun", O_RDWR | O_NONBLOCK);
  ifreq request = request_for(kDevice);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  check(::ioctl(host.device.get(), TUNSETIFF, &request), "TUNSETIFF");
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  set_address(socket.get(), SIOCSIFADDR, VirtualHosts::address(number));
  set_address(socket.get(), SIOCSIFNETMASK, "255.255.255.0");
  bring_up(socket.get(), "lo");
  bring_up(socket.get(), kDevice);
  return host;
}

Host make_host(int number) {
  Host host;
  std::string failure;
  // A thread of its own: unshare() changes the thread that calls it, for good.
  std::thread([&] {
    try {
      check(::unshare(CLONE_NEWNET), "unshare(CLONE_NEWNET)");
      host = make_host_here(number);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }).join();
  if (!failure.empty()) throw std::runtime_error(failure);
  return host;
}

}  // namespace

/// Carries packets, on a thread of its own.
class VirtualHosts::Switch {
 public:
  Switch(std::vector<Fd> devices, std::uint64_t seed)
      : devices_(std::move(devices)),
        links_(devices_.size() * devices_.size()),
        random_(seed),
        stop_(::eventfd(0, EFD_CLOEXEC)),
        thread_([this] { run(); }) {}
  ~Switch() {
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
  }

  std::size_t size() const { return devices_.size(); }
  void set_link(std::size_t from, std::size_t to, const Link& link) {
    const std::lock_guard lock(mutex_);
    links_.at(from * size() + to) = link;
  }
  Counts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  struct Packet {
    Clock::time_point due;
    std::uint64_t number;  // of two that are due at once the first is first
    std::size_t to;
    std::string bytes;
    bool operator<(const Packet& other) const {
      return std::tie(due, number) > std::tie(other.due, other.number);
    }
  };

  void run() {
    std::vector<pollfd> files{{stop_.get(), POLLIN, 0}};
    for (const Fd& device : devices_) files.push_back({device.get(), POLLIN, 0});
    while ((files.front().revents & POLLIN) == 0) {
      deliver_due();
      wait(files);
      for (std::size_t from = 0; from < size(); ++from) {
        if ((files[from + 1].revents & POLLIN) != 0) read(from);
      }
    }
  }

  void wait(std::vector<pollfd>& files) const {
    if (delayed_.empty()) {
      ::poll(files.data(), files.size(), -1);
      return;
    }
    const auto left =
        std::max(std::chrono::nanoseconds(0), std::chrono::nanoseconds(delayed_.top().due - Clock::now()));
    const timespec time{static_cast<time_t>(left.count() / 1'000'000'000),
                        static_cast<long>(left.count() % 1'000'000'000)};
    ::ppoll(files.data(), files.size(), &time, nullptr);
  }

  void deliver_due() {
    const Clock::time_point now = Clock::now();
    while (!delayed_.empty() && delayed_.top().due <= now) {
      deliver(delayed_.top().to, delayed_.top().bytes);
      delayed_.pop();
    }
  }

  void read(std::size_t from) {
    std::array<char, kMaxPacketBytes> buffer;
    for (int i = 0; i < kPacketsInTurn; ++i) {
      const ssize_t got = ::read(devices_[from].get(), buffer.data(), buffer.size());
      if (got <= 0) return;
      carry(from, std::string(buffer.data(), static_cast<std::size_t>(got)));
    }
  }

  // IPv4 alone, and of hosts that exist.
  void carry(std::size_t from, std::string bytes) {
    if (bytes.size() < 20 || (static_cast<unsigned char>(bytes[0]) >> 4) != 4) return;
    const std::size_t to = static_cast<unsigned char>(bytes[19]) - std::size_t{1};
    if (to >= size() || to == from) return;
    const std::lock_guard lock(mutex_);
    const Link& link = links_[from * size() + to];
    if (link.is_cut) {
      ++counts_.cut;
      return;
    }
    std::uniform_real_distribution<double> draw(0, 1);
    const bool is_lost = draw(random_) < link.lost, is_repeated = draw(random_) < link.repeated;
    if (is_lost) {
      ++counts_.lost;
      return;
    }
    ++counts_.carried;
    if (is_repeated) {
      ++counts_.repeated;
      send(to, bytes, link.delay + std::chrono::milliseconds(1));  // so it also comes after later ones
    }
    send(to, std::move(bytes), link.delay);
  }

  void send(std::size_t to, std::string bytes, std::chrono::microseconds delay) {
    if (delay.count() == 0) return deliver(to, bytes);
    ++counts_.delayed;
    delayed_.push({Clock::now() + delay, num_packets_++, to, std::move(bytes)});
  }

  // A host that takes none now loses it, as a full queue does.
  void deliver(std::size_t to, const std::string& bytes) {
    [[maybe_unused]] const ssize_t count = ::write(devices_[to].get(), bytes.data(), bytes.size());
  }

  const std::vector<Fd> devices_;
  mutable std::mutex mutex_;  // of links_, random_ and counts_
  std::vector<Link> links_;   // from * size() + to
  std::mt19937_64 random_;
  Counts counts_;
  std::priority_queue<Packet> delayed_;
  std::uint64_t num_packets_ = 0;
  const Fd stop_;
  std::thread thread_;
};

VirtualHosts::VirtualHosts(int num_hosts, std::uint64_t seed) {
  std::vector<Fd> devices;
  for (int i = 0; i < num_hosts; ++i) {
    Host host = make_host(i);
    namespaces_.push_back(std::move(host.network));
    devices.push_back(std::move(host.device));
  }
  switch_ = std::make_unique<Switch>(std::move(devices), seed);
}

VirtualHosts::~VirtualHosts() = default;

std::string VirtualHosts::address(int host) {
  return "10.213.7." + std::to_string(host + 1);
}

void VirtualHosts::enter(int host, const std::function<void()>& function) const {
  const Fd own = open_file("/proc/thread-self/ns/net", O_RDONLY);
  check(::setns(namespaces_.at(static_cast<std::size_t>(host)).get(), CLONE_NEWNET), "setns");
  const auto leave = [](const Fd* before) {
    if (::setns(before->get(), CLONE_NEWNET) != 0) std::abort();  // each later test would be on this host
  };
  const std::unique_ptr<const Fd, decltype(leave)> guard(&own, leave);
  function();
}

void VirtualHosts::set_link(int from, int to, const Link& link) {
  switch_->set_link(static_cast<std::size_t>(from), static_cast<std::size_t>(to), link);
}

void VirtualHosts::cut_one_way(int from, int to) {
  set_link(from, to, {.is_cut = true});
}

void VirtualHosts::cut(int a, int b) {
  cut_one_way(a, b);
  cut_one_way(b, a);
}

void VirtualHosts::isolate(int host) {
  set_links_of(host, {.is_cut = true});
}

void VirtualHosts::set_links_of(int host, const Link& link) {
  for (int other = 0; other < size(); ++other) {
    set_link(host, other, link);
    set_link(other, host, link);
  }
}

void VirtualHosts::heal() {
  for (int host = 0; host < size(); ++host) heal(host);
}

VirtualHosts::Counts VirtualHosts::counts() const {
  return switch_->counts();
}

}  // namespace cohort::test
