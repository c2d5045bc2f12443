// Who comes to the sockets of a group, and who does not.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/host.h"
#include "cohort/comm/backends/shm/internal/peer_connections.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/comes_true.h"
#include "tests/support/root_test.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

struct Contact {
  std::string machine, host, address, token;
};

Contact contact_of(MapStore& kv_store, int rank) {
  const std::string key = base::concat("contact/", rank);
  const base::Deadline deadline(seconds(20));
  while (!kv_store.has(key)) {
    deadline.check("test", key);
    std::this_thread::sleep_for(milliseconds(1));
  }
  Contact contact;
  std::istringstream(kv_store.get(key)) >> contact.machine >> contact.host >> contact.address >>
      contact.token;
  return contact;
}

base::Fd connect_to(const std::string& address) {
  base::Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path + 1, address.data(), address.size());
  const auto size = static_cast<socklen_t>(sizeof(sa_family_t) + 1 + address.size());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) != 0) fd.close();
  return fd;
}

// Another user of the host who has read the token where it stands.
COHORT_ROOT_TEST(ShmStrangersTest, AProcessOfAnotherUserDoesNotTakeARanksPlace) {
  MapStore kv_store;
  std::vector<float> list(10, 1);
  std::thread first([&] {
    Rank rank(kv_store, 0, 2);
    rank.sum(list, Dtype::kFloat);
  });
  // The place of rank 1, told before it is there.
  const Contact contact = contact_of(kv_store, 0);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t thief = ::fork();
  if (thief == 0) {
    if (::setuid(65534) != 0) ::_exit(2);
    const base::Fd fd = connect_to(contact.address);
    const std::string words = contact.token + " 1";
    const bool is_sent = fd.is_open() && ::send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL) > 0;
    [[maybe_unused]] const ssize_t ignored = ::write(ready[1], "x", 1);
    char byte = 0;
    // Turned away: the other end is closed.
    ::_exit(is_sent && ::recv(fd.get(), &byte, 1, 0) <= 0 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  {
    Rank rank(kv_store, 1, 2);
    std::vector<float> ones(10, 1);
    rank.sum(ones, Dtype::kFloat);
  }
  first.join();
  EXPECT_EQ(list[9], 2);
  int status = 0;
  ASSERT_EQ(::waitpid(thief, &status, 0), thief);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(ShmStrangersTest, WhoDoesNotKnowTheTokenIsTurnedAway) {
  MapStore kv_store;
  std::thread first([&] {
    Rank rank(kv_store, 0, 2);
    rank.run([&] { return barrier(rank.ranks()); });
  });
  const base::Fd stranger = connect_to(contact_of(kv_store, 0).address);
  ASSERT_TRUE(stranger.is_open());
  ASSERT_GT(::send(stranger.get(), "let me in 1", 11, MSG_NOSIGNAL), 0);
  const base::Fd silent = connect_to(contact_of(kv_store, 0).address);
  Rank rank(kv_store, 1, 2);
  rank.run([&] { return barrier(rank.ranks()); });
  first.join();
}

TEST(ShmStrangersTest, ARankThatCouldNotMakeTheGroupIsNotWaitedFor) {
  for (const bool has_come : {false, true}) {
    MapStore kv_store;
    if (has_come) kv_store.set("contact/1", base::machine_id() + " here nobody-listens-here token");
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(100));
      kv_store.set("not made", "rank 1: no descriptors");
    });
    const base::Deadline waited(seconds(60));
    COHORT_EXPECT_THROW_WITH(Rank(kv_store, 0, 2), PeerError, "rank 1");
    EXPECT_LT(waited.elapsed(), seconds(10));
    other.join();
  }
}

// A rank whose listener takes no more connections for now: one stands in its queue already.
class BusyListener {
 public:
  explicit BusyListener(MapStore& kv_store, int rank)
      : listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    socklen_t size = sizeof(sa_family_t);
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&name), size) != 0 ||
        ::listen(listener_.get(), 0) != 0)
      throw std::runtime_error("cannot listen");
    size = sizeof(name);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&name), &size);
    const std::string address(name.sun_path + 1, size - sizeof(sa_family_t) - 1);
    first_ = connect_to(address);
    kv_store.set(base::concat("contact/", rank), base::machine_id() + " here " + address + " token");
  }
  base::Fd accept() { return base::Fd(::accept(listener_.get(), nullptr, nullptr)); }

 private:
  base::Fd listener_, first_;
};

TEST(ShmStrangersTest, ARankThatHasNoTimeForAConnectionIsWaitedFor) {
  MapStore kv_store;
  BusyListener busy(kv_store, 0);
  std::array<char, 64> words{};
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(200));
    const base::Fd other = busy.accept(), peer = busy.accept();
    ::recv(peer.get(), words.data(), words.size(), 0);
  });
  const PeerConnections peers(kv_store, 1, 2, base::Deadline(seconds(20)));
  later.join();
  EXPECT_STREQ(words.data(), "token 1");
}

TEST(ShmStrangersTest, ARankThatHasNoTimeForAConnectionIsNotWaitedForWhereAnotherOneHasFailed) {
  MapStore kv_store;
  const BusyListener busy(kv_store, 0);
  kv_store.set("contact/2", kv_store.get("contact/0"));
  kv_store.set("not made", "rank 2: no descriptors");
  const base::Deadline waited(seconds(10));
  COHORT_EXPECT_THROW_WITH(PeerConnections(kv_store, 1, 3, base::Deadline(seconds(20))), PeerError,
                           "rank 2: no descriptors");
  EXPECT_FALSE(waited.expired());
}

TEST(ShmStrangersTest, ARankThatHasNoTimeForAConnectionIsNotTakenForDead) {
  MapStore kv_store;
  const BusyListener busy(kv_store, 1);
  COHORT_EXPECT_THROW_WITH(PeerConnections(kv_store, 0, 2, base::Deadline(seconds(1))), RendezvousError,
                           "rank 1 of 2 did not connect");
}

// As a profiler's: a signal each 5 ms, which ends each call that waits.
class FrequentSignals {
 public:
  FrequentSignals() {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    ::sigaction(SIGALRM, &action, &before_);
    set(milliseconds(5));
  }
  ~FrequentSignals() {
    set(milliseconds(0));
    ::sigaction(SIGALRM, &before_, nullptr);
  }

 private:
  static void set(milliseconds time) {
    const timeval each{0, 1000 * time.count()};
    const itimerval timer{each, each};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
  struct sigaction before_ {};
};

TEST(ShmStrangersTest, SignalsDoNotCutShortTheLookWhetherAPeerHasDied) {
  MapStore kv_store;
  const BusyListener busy(kv_store, 1);
  std::unique_ptr<PeerConnections> peers;
  std::thread first([&] {
    EXPECT_NO_THROW(peers = std::make_unique<PeerConnections>(kv_store, 0, 2, base::Deadline(seconds(20))));
  });
  const Contact contact = contact_of(kv_store, 0);
  const std::string words = contact.token + " 1";
  const pid_t peer = ::fork();
  if (peer == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    {
      const base::Fd fd = connect_to(contact.address);
      if (::send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL) < 0) ::_exit(1);
    }
    for (;;) ::pause();  // its connection is closed, and it lives
  }
  const auto end_peer = [&] {
    ::kill(peer, SIGKILL);
    ::waitpid(peer, nullptr, 0);
  };
  first.join();
  if (peers == nullptr) return end_peer();
  const std::string closed = base::concat("closed its connection (process ", peer, ")");
  EXPECT_TRUE(test::comes_true([&] { return peers->why_gone(1) == closed; }));
  {
    const FrequentSignals signals;
    const base::Deadline waited(seconds(0));
    EXPECT_EQ(peers->why_gone(1), closed);
    EXPECT_GE(waited.elapsed(), milliseconds(100));
  }
  end_peer();
  EXPECT_EQ(peers->why_gone(1), base::concat("died (process ", peer, ")"));
}

TEST(ShmStrangersTest, AProcessWithoutDescriptorsSaysSoAtOnce) {
#ifdef __SANITIZE_ADDRESS__
  return;  // the sanitizers need descriptors themselves
#endif
  MapStore kv_store;
  const std::string machine = base::machine_id();
  const base::Fd stranger(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int free = ::dup(0);
  ::close(free);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(free) + 1;  // for the listener, and no more
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const base::Deadline waited(seconds(60));
  kv_store.set("contact/1", machine + " here nobody-listens-here token");
  std::thread first([&] {
    COHORT_EXPECT_THROW_WITH(PeerConnections(kv_store, 0, 2, base::Deadline(seconds(20))), SystemError,
                             "no more file descriptors");
  });
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string address = contact_of(kv_store, 0).address;
  std::memcpy(name.sun_path + 1, address.data(), address.size());
  const auto size = static_cast<socklen_t>(sizeof(sa_family_t) + 1 + address.size());
  EXPECT_EQ(::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&name), size), 0);
  first.join();
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LT(waited.elapsed(), seconds(5));
}

TEST(ShmStrangersTest, MemoryThatNoDescriptorIsLeftForIsNotMistakenForNone) {
#ifdef __SANITIZE_ADDRESS__
  return;  // the sanitizers need descriptors themselves
#endif
  MapStore kv_store;
  std::unique_ptr<PeerConnections> from, to;
  std::thread first(
      [&] { from = std::make_unique<PeerConnections>(kv_store, 0, 2, base::Deadline(seconds(20))); });
  to = std::make_unique<PeerConnections>(kv_store, 1, 2, base::Deadline(seconds(20)));
  first.join();
  const base::Fd memory(::memfd_create("memory", MFD_CLOEXEC));
  from->send(1, memory.get(), 7);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int free = ::dup(0);
  ::close(free);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(free);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  COHORT_EXPECT_THROW_WITH(to->receive(0), SystemError,
                           "cannot take memory of rank 0: no more file descriptors");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  from->send(1, memory.get(), 8);
  const auto taken = to->receive(0);
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->first, 8);
}

TEST(ShmStrangersTest, ARankThatDiedBeforeItConnectedIsNamed) {
  MapStore kv_store;
  kv_store.set("contact/1", base::machine_id() + " here nobody-listens-here token");
  const base::Deadline waited(seconds(60));
  COHORT_EXPECT_THROW_WITH(Rank(kv_store, 0, 2), PeerError, "rank 1 died while the group was made");
  EXPECT_LT(waited.elapsed(), seconds(10));
}

}  // namespace
}  // namespace cohort::comm::shm
