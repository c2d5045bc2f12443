#include "cohort/net/internal/socket.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/net/lookup_timeout.h"
#include "cohort/net/unknown_host.h"
#include "tests/net/recorder.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/net/name_lookup.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

// Names whose server does not answer until it is told to, or fails, or says that they have no address, and
// names that have an IPv6 address alone.
namespace {
constexpr std::string_view kSilentName = "silent.test", kIpv6Name = "ipv6.test", kFailingName = "fails.test",
                           kEmptyName = "empty.test";
// Before the name is that of the loopback interface.
std::atomic<int> num_failures_left{0};
std::atomic<bool> host_has_ipv6{true};
cohort::test::Gate& gate_of_names() {
  static auto* const gate = new cohort::test::Gate;  // the thread that waits at it may outlive the test
  return *gate;
}
}  // namespace

// Stands before that of the C library.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(const char* name, const char* service,
                                                                  const addrinfo* hints, addrinfo** found) {
  const bool asks = cohort::test::asks_name_server(name, hints);
  if (!host_has_ipv6 && name != nullptr && std::string_view(name) == "::") return EAI_FAMILY;
  if (asks && name == kSilentName) gate_of_names().wait();
  if (asks && name == kEmptyName) return EAI_NODATA;
  if (asks && name == kFailingName) {
    if (num_failures_left-- > 0) return EAI_AGAIN;
    name = "127.0.0.1";
  }
  return cohort::test::real_getaddrinfo(asks && name == kIpv6Name ? "::1" : name, service, hints, found);
}

namespace cohort::net {
namespace {

int num_open_files() {
  int count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// A node that took another error for its own shortage of descriptors would drop a handshake.
TEST(SocketTest, AConnectionOfAnotherUserIsRejectedWithItsOwnError) {
  std::string bound;
  const base::Fd listener = listen_at(resolve("unix:@cohort-" + base::random_word()), bound);
  const SocketAddress address = resolve(bound);
  if (::geteuid() == 0) {  // only root can be another user
    const pid_t stranger = ::fork();
    if (stranger == 0) ::_exit(::setuid(65534) == 0 && start_connect(address).is_open() ? 0 : 1);
    int status = -1;
    ASSERT_EQ(::waitpid(stranger, &status, 0), stranger);
    ASSERT_EQ(status, 0);
    errno = EMFILE;  // left by an earlier call
    const base::Fd rejected = accept_from(listener.get());
    const int error = errno;
    EXPECT_FALSE(rejected.is_open());
    EXPECT_EQ(error, EACCES);
  }
  const base::Fd own = start_connect(address);
  EXPECT_TRUE(accept_from(listener.get()).is_open());
  const base::Fd none = accept_from(listener.get());
  const int error = errno;
  EXPECT_FALSE(none.is_open());
  EXPECT_EQ(error, EAGAIN);
}

// A stranger may send any number of them, together or one after the other.
TEST(SocketTest, AListenerAtAllAddressesOfIpv6CoversThoseOfIpv4UnlessItIsToldNotTo) {
  std::string bound;
  const base::Fd all = listen_at(resolve("[::]:0"), bound, "127.0.0.1");
  const SocketAddress ipv4 = resolve("127.0.0.1:1"), ipv6 = resolve("[::1]:1");
  EXPECT_TRUE(own_end(all.get()).covers(ipv4));
  EXPECT_TRUE(own_end(all.get()).covers(ipv6));
  const base::Fd caller = start_connect(resolve(bound));
  pollfd came{all.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&came, 1, 20'000), 1);
  const base::Fd accepted = accept_from(all.get());
  EXPECT_EQ(peer_end(accepted.get()).text, own_end(caller.get()).text);
  EXPECT_EQ(own_end(accepted.get()).text, bound);
  const base::Fd loopback = listen_at(resolve("[::1]:0"), bound);
  EXPECT_FALSE(own_end(loopback.get()).covers(ipv4));
  const base::Fd ipv6_alone(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ASSERT_EQ(::setsockopt(ipv6_alone.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on), 0);
  EXPECT_FALSE(own_end(ipv6_alone.get()).covers(ipv4));
  EXPECT_TRUE(own_end(ipv6_alone.get()).covers(ipv6));
}

TEST(SocketTest, OfManyDescriptorsThatComeTwoAreKept) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const base::Fd from(ends[0]), to(ends[1]);
  const std::array<int, 3> sent{from.get(), to.get(), from.get()};
  char byte = 'x';
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof sent)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof sent);
  std::memcpy(CMSG_DATA(header), sent.data(), sizeof sent);
  ASSERT_EQ(::sendmsg(from.get(), &message, MSG_NOSIGNAL), 1);

  const int before = num_open_files();
  std::array<std::byte, 8> bytes{};
  std::vector<base::Fd> came;
  EXPECT_EQ(receive_with_descriptors(to.get(), bytes, came), 1);
  EXPECT_EQ(came.size(), 2U);
  EXPECT_EQ(num_open_files(), before + 2);
  ASSERT_EQ(send_with_descriptors(from.get(), "y", std::span(sent).first(2)), 1);
  EXPECT_EQ(receive_with_descriptors(to.get(), bytes, came), 1);
  EXPECT_EQ(came.size(), 2U);
  EXPECT_EQ(num_open_files(), before + 2);
  came.clear();
  EXPECT_EQ(num_open_files(), before);
}

TEST(SocketTest, AHostMayStandInBrackets) {
  for (const char* host : {"node-1", "10.0.0.2", "fd00::2", "fe80::1%eth0", ""})
    EXPECT_EQ(parse_host(host), host);
  EXPECT_EQ(parse_host("[fd00::2]"), "fd00::2");
  EXPECT_EQ(parse_host("[node-1]"), "node-1");
  for (const char* host : {"node-1:29500", "[fd00::2]:29500", "[fd00::2", "fd00::2]", "[]", "10.0.0.2:1"}) {
    COHORT_EXPECT_THROW_WITH(parse_host(host), UsageError, "Try: one without a port: node-1");
  }
}

// The others come to the address of its name. A listener at all IPv4 addresses would not hear them.
TEST(SocketTest, WhoHasAnIpv6AddressAloneIsReached) {
  NodeOptions options;
  options.secret = base::Secret::make();
  for (const std::string_view host : {std::string_view("[::1]"), std::string_view("::1"), kIpv6Name}) {
    SCOPED_TRACE(host);
    test::Worker a("a", options), b("b", options, true);
    const std::string address = b.node->listen("0.0.0.0:0", std::string(host));
    EXPECT_TRUE(address.starts_with(host == kIpv6Name ? "ipv6.test:" : "[::1]:")) << address;
    a.node->connect(address, test::patience())->send(test::message_of(0, "echo"));
    EXPECT_TRUE(test::comes_true([&] { return a.heard->count() == 1; }));
  }
}

// Its name server may fail while it begins, and know it once others come.
TEST(SocketTest, WhoseAddressesNoNameServerSaysIsReachedByBothFamilies) {
  NodeOptions options;
  options.secret = base::Secret::make();
  const auto reach = [&](const test::Worker& b, const char* host) {
    num_failures_left = 1;
    const std::string address = b.node->listen("0.0.0.0:0", std::string(kFailingName));
    EXPECT_EQ(num_failures_left, 0);
    EXPECT_TRUE(address.starts_with("fails.test:")) << address;
    const test::Worker a("a", options);
    const std::string port = address.substr(address.rfind(':'));
    EXPECT_EQ(a.node->connect(host + port, test::patience())->name(), "b");
  };
  const test::Worker b("b", options);
  reach(b, "[::1]");
  reach(b, "127.0.0.1");
  host_has_ipv6 = false;
  reach(b, "127.0.0.1");
  host_has_ipv6 = true;
}

bool is_unknown(const std::string& address) {
  try {
    resolve(address);
  } catch (const UnknownHost&) {
    return true;
  } catch (const RendezvousError&) {
  }
  return false;
}

// A worker whose name server failed would take all others for dead.
TEST(SocketTest, ANameIsUnknownOnlyWhereANameServerHasSaidSo) {
  EXPECT_TRUE(is_unknown("empty.test:80"));
  num_failures_left = 1;
  EXPECT_FALSE(is_unknown("fails.test:80"));
  EXPECT_EQ(num_failures_left, 0);
}

TEST(SocketTest, ANameServerThatFailsIsAskedAgain) {
  test::Worker a("a"), b("b");
  const std::string address = b.node->listen("127.0.0.1:0");
  const std::string named = std::string(kFailingName) + address.substr(address.rfind(':'));
  num_failures_left = 1;
  EXPECT_EQ(a.node->connect(named, test::patience(), WhenRejected::kGiveUp)->name(), "b");
  num_failures_left = 1'000;
  COHORT_EXPECT_THROW_WITH(
      a.node->connect(named, base::Deadline(std::chrono::milliseconds(50)), WhenRejected::kGiveUp),
      RendezvousError, named + " cannot be looked up: Temporary failure in name resolution");
}

// In a process that may have no further thread. Returns what it is to end with.
int resolve_without_threads() {
  const rlimit none{0, 0};
  if (::geteuid() == 0 && ::setuid(65534) != 0) return 1;
  if (::setrlimit(RLIMIT_NPROC, &none) != 0) return 2;
  try {
    begin_to_resolve("silent.test:80");
  } catch (const RendezvousError& error) {
    return std::string_view(error.what()).find("silent.test:80") == std::string_view::npos ? 5 : 0;
  } catch (const std::exception&) {
    return 3;
  }
  return 4;
}

TEST(SocketTest, WhereNoThreadCanBeHadTheErrorNamesTheAddress) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(resolve_without_threads());
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(SocketTest, AWaitForANameEndsAtTheDeadline) {
  constexpr std::chrono::milliseconds kTime(50);
  test::Worker a("a");
  const base::Deadline deadline(kTime);
  COHORT_EXPECT_THROW_WITH(a.node->connect("silent.test:29500", deadline), LookupTimeout,
                           "no name server has said where its host is");
  EXPECT_LT(deadline.elapsed(), kTime + test::deadline_slack());
  COHORT_EXPECT_THROW_WITH(resolve("silent.test:29500", base::Deadline(std::chrono::milliseconds(10))),
                           LookupTimeout, "no name server has said where the host of silent.test:29500 is");
  std::thread waits([&] {
    COHORT_EXPECT_THROW_WITH(a.node->connect("silent.test:29500", test::patience()), UsageError,
                             "this node has been closed");
  });
  a.node->close(test::patience());
  waits.join();
  gate_of_names().open();
}

}  // namespace
}  // namespace cohort::net
