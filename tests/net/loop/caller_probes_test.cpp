// The side that has listened finds out that a caller of another host is dead.
#include "cohort/net/internal/loop/caller_probes.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/base/process.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/socket.h"
#include "tests/net/few_descriptors.h"
#include "tests/net/raw_caller.h"
#include "tests/net/recorder.h"
#include "tests/net/relay.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"

namespace cohort::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::message_of;
using test::patience;
using test::Worker;

// From now on this process and its threads get no descriptor of a process, as where the kernel is older, or a
// sandbox forbids it.
bool forbid_pidfds() {
  std::array<sock_filter, 4> code{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 &&
         !base::open_process(::getpid()).is_open();
}

// Rank 0 listens, and sees the end of rank 1, which calls.
TEST(CallerProbesChild, DISABLED_Process) {
  const std::filesystem::path address = std::filesystem::path(std::getenv("TEST_FOLDER")) / "address";
  NodeOptions options;
  options.silence = seconds(60);
  if (std::string(std::getenv("RANK")) == "1") {
    Worker b("b", options, true);
    b.node->listen("127.0.0.1:0");
    ASSERT_TRUE(test::comes_true([&] { return std::filesystem::exists(address); }));
    const auto peer = b.node->connect(test::read_file(address.string()), patience());
    test::comes_true([&] { return b.heard->is_down(); });  // until it is killed
    return;
  }
  ASSERT_TRUE(forbid_pidfds());
  Worker a("a", options);
  std::ofstream(address.string() + ".new") << a.node->listen("127.0.0.1:0");
  std::filesystem::rename(address.string() + ".new", address);
  const auto peer = a.heard->peer();
  for (std::size_t i = 1; i <= 3; ++i) {
    peer->send(message_of(0, "echo"));
    ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == i; }));
  }
  std::cout << "connected" << std::endl;
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().kind, DownKind::kDied);
  EXPECT_EQ(a.heard->down().text, "b died: nobody listens at its address any more");
}

TEST(CallerProbesTest, AKilledProcessIsSeenWhereItCannotBeWatched) {
  test::RankProcesses ranks("CallerProbesChild", 2);
  ranks.wait_for(0, "connected");
  ranks.send(1, SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(ranks.wait(), (std::vector<int>{0, -1})) << ranks.output(0);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20)) << "the silence is 60 s";
}

// Nodes of one process do not watch each other's process, as those of two hosts cannot.
TEST(CallerProbesTest, APeerThatIsGoneIsSeenWithoutTheSilenceWhicheverSideHasConnected) {
  NodeOptions options;
  options.silence = seconds(60);
  options.secret = base::Secret::make();
  struct Case {
    std::string a, b;  // where they listen
  };
  // A socket of IPv6 has the other side's IPv4 address in another form.
  for (const Case& where : std::vector<Case>{{"", "127.0.0.1:0"},
                                             {"127.0.0.1:0", "127.0.0.1:0"},
                                             {"127.0.0.1:0", "0.0.0.0:0"},
                                             {"127.0.0.1:0", "[::]:0"},
                                             {"[::]:0", "127.0.0.1:0"}}) {
    SCOPED_TRACE(where.a.empty() ? "a connects" : where.a + ", " + where.b);
    Worker a("a", options);
    auto b = std::make_unique<Worker>("b", options, true);
    std::shared_ptr<Peer> peer;
    if (where.a.empty()) {
      peer = a.node->connect(b->node->listen(where.b), patience());
    } else {
      b->node->listen(where.b, "no-host-has-this-name");
      b->node->connect(a.node->listen(where.a, "127.0.0.1"), patience());
      peer = a.heard->peer();
    }
    for (std::size_t i = 1; i <= 3; ++i) {  // the probe of the new link comes before the second answer
      peer->send(message_of(0, "echo"));
      ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == i; }));
    }
    const auto begin = std::chrono::steady_clock::now();
    b.reset();
    ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
    EXPECT_EQ(a.heard->down().kind, DownKind::kDied);
    EXPECT_EQ(a.heard->down().text, "b died: nobody listens at its address any more");
    EXPECT_LT(a.heard->down_at() - begin, seconds(10));
  }
}

bool stays_up(Worker& worker) {
  return !base::poll_until([&] { return worker.heard->is_down(); }, base::Deadline(milliseconds(50)));
}

void expect_probe(const base::Fd& listener) {
  pollfd came{listener.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&came, 1, 20'000), 1) << "no probe has come";
  const base::Fd probe = accept_from(listener.get());
  pollfd ended{probe.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&ended, 1, 20'000), 1) << "the other side knows that it was accepted";
}

// Of a caller that listens there.
Hello hello_with(const base::Fd& listener) {
  Hello hello = test::hello_of("who");
  hello.port = own_end(listener.get()).port();
  return hello;
}

// A process that dies may close its listener after its link.
TEST(CallerProbesTest, AProbeThatIsAcceptedWithoutALinkIsRepeated) {
  NodeOptions options;
  options.silence = seconds(60);
  Worker a("a", options);
  std::string listened;
  base::Fd listener = listen_at(resolve("127.0.0.1:0"), listened);
  Hello hello = hello_with(listener);
  test::RawCaller caller(resolve(a.node->listen("127.0.0.1:0")), hello);
  ASSERT_TRUE(caller.is_done());
  expect_probe(listener);
  caller.cut();
  expect_probe(listener);
  listener.close();
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().text, "who died: nobody listens at its address any more");
}

// The next link may come through a proxy, or say no port.
TEST(CallerProbesTest, AProbeOfAnEarlierLinkSaysNothingOfTheNextOne) {
  NodeOptions options;
  options.silence = seconds(60);
  Worker a("a", options);
  const SocketAddress address = resolve(a.node->listen("127.0.0.1:0"));
  std::string listened;
  base::Fd listener = listen_at(resolve("127.0.0.1:0"), listened);
  Hello hello = hello_with(listener);
  test::RawCaller first(address, hello);
  ASSERT_TRUE(first.is_done());
  expect_probe(listener);
  first.cut();
  hello.port = 0;
  test::RawCaller second(address, hello);
  ASSERT_TRUE(second.is_done());
  second.cut();
  listener.close();
  EXPECT_TRUE(stays_up(a));
}

// While the link is up, the caller may close its listener.
TEST(CallerProbesTest, TheFirstProbeIsRepeatedUntilItIsAnsweredAndThenTheLinkAloneCounts) {
#ifdef COHORT_IS_SANITIZED
  return;  // the sanitizers need descriptors themselves
#endif
  NodeOptions options;
  options.silence = seconds(60);
  Worker a("a", options);
  const SocketAddress address = resolve(a.node->listen("127.0.0.1:0"));
  std::string listened;
  base::Fd listener = listen_at(resolve("127.0.0.1:0"), listened);
  Hello hello = hello_with(listener);
  std::optional<test::FewDescriptors> few(2);  // the two ends of the link
  test::RawCaller caller(address, hello);
  ASSERT_TRUE(caller.is_done());
  a.heard->peer();
  few.reset();
  expect_probe(listener);
  listener.close();
  EXPECT_TRUE(stays_up(a));
  caller.cut();
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().text, "who died: nobody listens at its address any more");
}

// Somebody between may reject in the caller's place.
TEST(CallerProbesTest, ARejectionIsNoDeathWhereNoProbeGotThrough) {
  for (const bool is_after_the_link : {false, true}) {
    SCOPED_TRACE(is_after_the_link);
#ifdef COHORT_IS_SANITIZED
    if (is_after_the_link) continue;  // the sanitizers need descriptors themselves
#endif
    NodeOptions options;
    options.heartbeat = milliseconds(50);
    options.silence = milliseconds(300);
    Worker a("a", options);
    const SocketAddress address = resolve(a.node->listen("127.0.0.1:0"));
    Hello hello = test::hello_of("who");
    {
      std::string listened;
      hello.port = own_end(listen_at(resolve("127.0.0.1:0"), listened).get()).port();
    }
    std::optional<test::FewDescriptors> few;
    if (is_after_the_link) few.emplace(2);  // the end of the link gives a probe its descriptor
    test::RawCaller caller(address, hello);
    ASSERT_TRUE(caller.is_done());
    a.heard->peer();
    EXPECT_TRUE(is_after_the_link || stays_up(a));
    caller.cut();
    ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
    EXPECT_EQ(a.heard->down().kind, DownKind::kSilent) << a.heard->down().text;
  }
}

// The port of a proxy's host may be another one's.
TEST(CallerProbesTest, ACallerThatComesThroughAProxyIsNotTakenForDead) {
  NodeOptions options;
  options.heartbeat = milliseconds(50);
  options.silence = milliseconds(300);
  Worker a("a", options);
  auto b = std::make_unique<Worker>("b", options, true);
  b->node->listen("127.0.0.1:0");
  test::Relay relay(a.node->listen("127.0.0.1:0"));
  b->node->connect(relay.address(), patience());
  a.heard->peer()->send(message_of(0, "echo"));
  ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == 1; }));
  b.reset();
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().text, "b could not be reached for 300 ms");
}

}  // namespace
}  // namespace cohort::net
