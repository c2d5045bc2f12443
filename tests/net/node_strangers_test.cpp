// Peers that are not what they say, or not what they were: raw handshakes, other users, other processes at an
// address, names that nobody knows yet.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/host.h"
#include "cohort/net/internal/socket.h"
#include "cohort/net/no_answer.h"
#include "cohort/net/node.h"
#include "cohort/net/unknown_host.h"
#include "tests/net/few_descriptors.h"
#include "tests/net/raw_caller.h"
#include "tests/net/recorder.h"
#include "tests/net/relay.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/patience.h"
#include "tests/support/slowdown.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using test::hello_of;
using test::message_of;
using test::patience;
using test::RawCaller;
using test::Worker;

std::string local_name() {
  return "unix:@cohort-" + base::random_word();
}

// The end of the process that it names is not its own.
TEST(NodeStrangersTest, TheKernelIsBelievedWhichProcessAPeerIs) {
  Worker a("a");
  Hello hello = hello_of("who");
  hello.place = place_of_process();
  hello.process = 1;
  hello.began = "before it";  // so process 1 would be taken for another one, and this peer for dead
  const RawCaller caller(resolve(a.node->listen(local_name())), hello);
  ASSERT_TRUE(caller.is_done());
  EXPECT_EQ(a.heard->peer()->name(), "who");
  EXPECT_FALSE(base::poll_until([&] { return a.heard->is_down(); }, base::Deadline(milliseconds(100))));
}

// Only root can be another user.
void expect_that_another_user_is_shown_nothing() {
  const std::string address = local_name();
  std::array<int, 2> is_ready{};
  ASSERT_EQ(::pipe2(is_ready.data(), O_CLOEXEC), 0);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    if (::setuid(65534) != 0) ::_exit(1);
    std::string bound;
    const base::Fd listener = listen_at(resolve(address), bound);
    static_cast<void>(::write(is_ready[1], "r", 1));
    pollfd caller{listener.get(), POLLIN, 0};
    if (::poll(&caller, 1, 20'000) != 1) ::_exit(2);
    const base::Fd connection(::accept(listener.get(), nullptr, nullptr));
    pollfd bytes{connection.get(), POLLIN, 0};
    if (::poll(&bytes, 1, 20'000) != 1) ::_exit(3);
    char byte = 0;
    ::_exit(::recv(connection.get(), &byte, 1, 0) <= 0 ? 0 : 4);
  }
  char byte = 0;
  ASSERT_EQ(::read(is_ready[0], &byte, 1), 1);
  Worker a("a");
  COHORT_EXPECT_THROW_WITH(a.node->connect(address, patience(), WhenRejected::kGiveUp), RendezvousError,
                           "a process of another user listens there");
  int status = -1;
  ASSERT_EQ(::waitpid(stranger, &status, 0), stranger);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ::close(is_ready[0]);
  ::close(is_ready[1]);
}

// Any user may listen at the name of a process that has ended.
TEST(NodeStrangersTest, AListenerOfAnotherUserIsShownNothing) {
  if (::geteuid() == 0) expect_that_another_user_is_shown_nothing();
  Worker a("a"), b("b");
  EXPECT_EQ(a.node->connect(b.node->listen(local_name()), patience(), WhenRejected::kGiveUp)->name(), "b");
}

TEST(NodeStrangersTest, ANameThatIsNotKnownIsAskedForAgain) {
  Worker a("a");
  const std::string unknown = "[fe80::1%no-such]:80";  // no name server is asked
  const Clock::time_point begin = Clock::now();
  COHORT_EXPECT_THROW_WITH(a.node->connect(unknown, base::Deadline(milliseconds(250))), RendezvousError,
                           unknown + " is not known");
  EXPECT_GE(Clock::now() - begin, milliseconds(240));
  const Clock::time_point again = Clock::now();
  EXPECT_THROW(a.node->connect(unknown, patience(), WhenRejected::kGiveUp), UnknownHost);
  EXPECT_LT(Clock::now() - again, seconds(5));
  std::thread closer([&] { a.node->close(patience()); });
  EXPECT_THROW(a.node->connect(unknown, patience()), UsageError);
  closer.join();
}

// Of a worker that has not come by the deadline, this alone may say that it is dead.
TEST(NodeStrangersTest, NoAnswerIsSilenceAlone) {
  Worker a("a");
  std::string tcp, local;
  const base::Fd silent = listen_at(resolve("127.0.0.1:0"), tcp),
                 stopped = listen_at(resolve(local_name()), local);
  const auto has_no_answer = [&](const std::string& address) {
    try {
      a.node->connect(address, base::Deadline(milliseconds(100 * test::kSlowdown)), WhenRejected::kGiveUp);
      ADD_FAILURE() << "it is connected";
    } catch (const NoAnswer&) {
      return true;
    } catch (const RendezvousError&) {
    }
    return false;
  };
  EXPECT_TRUE(has_no_answer(tcp));
  EXPECT_FALSE(has_no_answer(local)) << "the kernel has connected it, so a process is there";
#ifndef COHORT_IS_SANITIZED
  const test::FewDescriptors none(0);
  EXPECT_FALSE(has_no_answer(tcp)) << "nobody was asked";
#endif
}

// A name without a host has ::1 and 127.0.0.1. Where this host has IPv6 nobody listens at the first of them.
TEST(NodeStrangersTest, EachAddressOfANameIsTriedAndALostLinkIsMadeAgainWhereItWas) {
  Worker a("a"), b("b", {}, /*echoes=*/true);
  test::Relay relay(b.node->listen("127.0.0.1:0"));
  const std::string named = relay.address().substr(relay.address().rfind(':'));
  ASSERT_EQ(resolve_all(named).size(), 2U);
  const auto peer = a.node->connect(named, patience(), WhenRejected::kGiveUp);
  ASSERT_NE(peer, nullptr);
  EXPECT_EQ(peer->name(), "b");
  relay.cut();
  ASSERT_TRUE(test::comes_true([&] { return peer->metrics().links == 2 || peer->is_down(); }));
  peer->send(message_of(0, "after the cut"));
  EXPECT_TRUE(test::comes_true([&] { return a.heard->count() == 1 || a.heard->is_down(); }));
  EXPECT_FALSE(a.heard->is_down()) << a.heard->down().text;
}

TEST(NodeStrangersTest, TheNextProcessAtAnAddressIsWaitedForWhileOneLeaves) {
  Worker a("a");
  auto leaving = std::make_unique<Worker>("leaving");
  const std::string address = leaving->node->listen(local_name());
  const RawCaller keeps_it_waiting(resolve(address), hello_of("who"));
  leaving->heard->peer()->send(message_of(0, "which nobody acknowledges"));
  std::thread closer([&] {
    leaving->node->close(base::Deadline(milliseconds(300)));
    leaving.reset();
  });
  ASSERT_TRUE(test::comes_true(
      [&] { return a.node->connect(address, patience(), WhenRejected::kGiveUp) == nullptr; }));
  std::shared_ptr<Peer> peer;
  std::thread caller([&] { peer = a.node->connect(address, patience()); });
  closer.join();
  Worker next("next");
  next.node->listen(address);
  caller.join();
  EXPECT_EQ(peer->name(), "next");
}

TEST(NodeStrangersTest, TheLesserWindowOfTwoHolds) {
  NodeOptions narrow;
  narrow.window = 1 << 20;
  Worker a("a"), b("b", narrow);
  const auto peer = a.node->connect(b.node->listen("127.0.0.1:0"), patience());
  for (int i = 0; i < 8; ++i) peer->send(message_of(0, std::to_string(i), 512 * 1024 - 1000));
  ASSERT_TRUE(test::comes_true([&] { return b.heard->count() == 2; }));
  EXPECT_EQ(peer->metrics().queued, 6U);
  std::size_t came = 0;
  EXPECT_TRUE(test::comes_true([&] {
    came += b.heard->take().size();
    return came == 8;
  }));
  EXPECT_FALSE(a.heard->is_down() || b.heard->is_down());
}

}  // namespace
}  // namespace cohort::net
