#include "cohort/net/node.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/socket.h"
#include "tests/net/recorder.h"
#include "tests/net/relay.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/net/listeners.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using test::message_of;
using test::patience;
using test::Worker;

// What child processes do: NODE_DOES at NODE_ADDRESS.
TEST(NodeChild, DISABLED_Process) {
  const std::string does = std::getenv("NODE_DOES");
  Worker worker("child", {}, does == "echo");
  const auto peer = worker.node->connect(std::getenv("NODE_ADDRESS"), patience());
  if (does == "leave") {
    for (int i = 0; i < 1000; ++i) peer->send(message_of(0, std::to_string(i), 1000));
    EXPECT_TRUE(worker.node->close(patience()).empty());
    return;
  }
  if (does == "die") {
    for (int i = 0; i < 1000; ++i) peer->send(message_of(0, std::to_string(i), 1000));
    test::wait_until([&] { return peer->metrics().queued == 0; });
    // A TCP socket that is closed with acknowledgements unread drops what has not left its host.
    test::wait_until(
        [port = resolve(std::getenv("NODE_ADDRESS")).port()] { return test::has_all_arrived(port); });
    ::kill(::getpid(), SIGKILL);
  }
  base::sleep(seconds(60), patience());
}

test::RankProcesses child(const std::string& does, const std::string& address) {
  return test::RankProcesses("NodeChild", 1, {{"NODE_DOES", does}, {"NODE_ADDRESS", address}});
}

TEST(NodeTest, MessagesGoBothWaysOverEachKindOfSocket) {
  const test::TempDir folder;
  for (const std::string& where :
       {std::string("127.0.0.1:0"), std::string("[::1]:0"), "unix:" + (folder.path() / "socket").string(),
        "unix:@cohort-" + base::random_word()}) {
    Worker a("a"), b("b", {}, true);
    std::string address;
    try {
      address = b.node->listen(where);
    } catch (const RendezvousError& error) {
      if (where[0] == '[') continue;  // a machine without IPv6
      throw;
    }
    const auto peer = a.node->connect(address, patience());
    EXPECT_EQ(peer->name(), "b");
    EXPECT_EQ(b.heard->peer()->name(), "a");
    peer->send(message_of(3, "hello"));
    peer->send(message_of(3, "", 5'000'000));
    Message parts = message_of(3, "parts", 100);
    for (const std::size_t size : {0, 1, 300'000})
      parts.payloads.push_back(message_of(0, "", size + 1).payloads[0]);
    parts.payloads.push_back({});
    peer->send(parts);
    ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == 3; })) << where;
    const std::vector<Message> messages = a.heard->take();
    EXPECT_EQ(messages[0].header, "hello");
    EXPECT_EQ(messages[0].channel, 3U);
    ASSERT_EQ(messages[1].payloads.size(), 1U);
    const auto bytes = messages[1].payloads[0].bytes;
    const Message sent = message_of(3, "", 5'000'000);
    EXPECT_TRUE(
        std::equal(bytes.begin(), bytes.end(), sent.payloads[0].bytes.begin(), sent.payloads[0].bytes.end()));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64, 0U);
    ASSERT_EQ(messages[2].payloads.size(), 5U);
    EXPECT_EQ(messages[2].payloads[3].bytes.size(), 300'001U);
    EXPECT_EQ(messages[2].payloads[4].bytes.size(), 0U);
    EXPECT_TRUE(a.node->close(patience()).empty());
    EXPECT_TRUE(test::comes_true([&] { return b.heard->is_down(); }));
    EXPECT_EQ(b.heard->down().text, "a has left");
  }
}

TEST(NodeTest, BrokenConnectionsLoseAndRepeatNothing) {
  Worker a("a"), b("b", {}, true);
  test::Relay relay(b.node->listen("127.0.0.1:0"));
  const auto peer = a.node->connect(relay.address(), patience());
  std::mt19937 random(1);
  constexpr std::size_t kMessages = 3'000;
  for (std::size_t i = 0; i < kMessages; ++i) {
    peer->send(
        message_of(i % 3, std::to_string(i), random() % 30 == 0 ? random() % 600'000 : random() % 2'000));
    if (i % 150 == 149) {
      relay.cut();
      base::sleep(milliseconds(random() % 30), patience());
    }
  }
  ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == kMessages; })) << a.heard->count();
  std::size_t last[3] = {0, 0, 0};
  for (const Message& message : a.heard->take()) {
    const std::size_t number = std::stoul(message.header);
    EXPECT_EQ(number % 3, message.channel);
    if (last[message.channel] != 0) {
      EXPECT_EQ(number, last[message.channel] + 3);
    }
    last[message.channel] = number;
    for (const Payload& payload : message.payloads) {
      const Message sent = message_of(0, "", payload.bytes.size());
      EXPECT_EQ(std::memcmp(payload.bytes.data(), sent.payloads[0].bytes.data(), payload.bytes.size()), 0);
    }
  }
  EXPECT_GT(relay.num_connections(), 3);
  EXPECT_GT(peer->metrics().links, 3);
  EXPECT_FALSE(a.heard->is_down() || b.heard->is_down());
}

TEST(NodeTest, AKilledProcessIsSeenAtOnceAndItsLastMessagesCome) {
  milliseconds least(1'000'000);
  for (int round = 0; round < 3; ++round) {
    Worker a("a");
    auto processes =
        child("die", a.node->listen(round % 2 == 0 ? "127.0.0.1:0" : "unix:@cohort-" + base::random_word()));
    ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); })) << processes.output(0);
    EXPECT_EQ(a.heard->down().kind, DownKind::kDied);
    EXPECT_NE(a.heard->down().text.find("child died (process "), std::string::npos) << a.heard->down().text;
    EXPECT_EQ(a.heard->count(), 1000U);

    Worker b("b");
    auto waiting = child("wait", b.node->listen("127.0.0.1:0"));
    b.heard->peer()->send(message_of(0, "last"));
    const auto begin = Clock::now();
    waiting.send(0, SIGKILL);
    ASSERT_TRUE(test::comes_true([&] { return b.heard->is_down(); }));
    least = std::min(least, std::chrono::duration_cast<milliseconds>(b.heard->down_at() - begin));
  }
  EXPECT_LE(least, milliseconds(50));  // 10 on a machine that does nothing else
}

TEST(NodeTest, WhoLeavesIsNotDeadAndItsMessagesHaveCome) {
  Worker a("a");
  auto processes = child("leave", a.node->listen("127.0.0.1:0"));
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().kind, DownKind::kLeft);
  EXPECT_EQ(a.heard->down().text, "child has left");
  EXPECT_EQ(a.heard->count(), 1000U);
  EXPECT_EQ(processes.wait(), std::vector<int>{0}) << processes.output(0);
}

TEST(NodeTest, AStoppedProcessIsSilentAndOneThatContinuesSoonIsNot) {
  NodeOptions options;
  options.silence = milliseconds(1500);
  Worker a("a", options);
  auto processes = child("echo", a.node->listen("127.0.0.1:0"));
  const auto peer = a.heard->peer();
  processes.send(0, SIGSTOP);
  peer->send(message_of(0, "first"));
  base::sleep(milliseconds(300), patience());
  processes.send(0, SIGCONT);
  EXPECT_TRUE(test::comes_true([&] { return a.heard->count() == 1; }));
  processes.send(0, SIGSTOP);
  test::wait_until([&] { return processes.is_stopped(0); });
  const auto begin = Clock::now();
  peer->send(message_of(0, "second"));
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().kind, DownKind::kSilent);
  EXPECT_EQ(a.heard->down().text, "child has been silent for 1500 ms");
  ASSERT_EQ(a.heard->down().unacknowledged.size(), 1U) << "it is handed back";
  EXPECT_EQ(a.heard->down().unacknowledged[0].header, "second");
  EXPECT_LT(a.heard->down_at() - begin, options.silence + test::deadline_slack());
}

// The listener takes one descriptor and the connection the other: none is left for another connection, or to
// watch the process with.
TEST(NodeTest, TheLastDescriptorMakesAConnection) {
#ifdef COHORT_IS_SANITIZED
  return;  // the sanitizers need descriptors themselves
#endif
  const std::string address = "unix:@cohort-" + base::random_word();
  Worker a("a");
  auto processes = child("echo", address);  // it tries until somebody listens
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int first = ::dup(0), second = ::dup(0);
  ::close(first);
  ::close(second);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(std::max(first, second)) + 1;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  a.node->listen(address);
  const auto peer = a.heard->peer();
  peer->send(message_of(0, "hello"));
  const bool was_answered = test::comes_true([&] { return a.heard->count() == 1; });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(was_answered) << processes.output(0);
  EXPECT_FALSE(a.heard->is_down());
}

TEST(NodeTest, AWireThatPassesNothingIsSilence) {
  NodeOptions options;
  options.silence = milliseconds(700);
  options.heartbeat = milliseconds(100);
  Worker a("a", options), b("b", options);
  test::Relay relay(b.node->listen("127.0.0.1:0"));
  const auto peer = a.node->connect(relay.address(), patience());
  relay.fall_silent();
  EXPECT_TRUE(test::comes_true([&] { return a.heard->is_down() && b.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().kind, DownKind::kSilent) << a.heard->down().text;
  EXPECT_EQ(b.heard->down().kind, DownKind::kSilent) << b.heard->down().text;
  EXPECT_TRUE(peer->is_down());
  peer->send(message_of(0, "dropped"));
}

TEST(NodeTest, AnIdleConnectionHoldsByItsHeartbeats) {
  NodeOptions options;
  options.silence = milliseconds(1000);
  options.heartbeat = milliseconds(100);
  Worker a("a", options), b("b", options);
  a.node->connect(b.node->listen("127.0.0.1:0"), patience());
  base::sleep(milliseconds(2500), patience());
  EXPECT_FALSE(a.heard->is_down() || b.heard->is_down());
}

TEST(NodeTest, ASilenceBelowTwoHeartbeatsIsAnError) {
  NodeOptions options;
  options.silence = milliseconds(499);
  COHORT_EXPECT_THROW_WITH(Worker("a", options), UsageError,
                           "got a silence of 499 ms and a heartbeat of 250 ms, expected a silence of two "
                           "heartbeats of 1 ms or more");
  options.heartbeat = milliseconds(0);
  COHORT_EXPECT_THROW_WITH(Worker("a", options), UsageError, "a heartbeat of 0 ms");
}

TEST(NodeTest, APeerWhoseNodeIsGoneHasDied) {
  Worker a("a");
  auto b = std::make_unique<Worker>("b");
  a.node->connect(b->node->listen("127.0.0.1:0"), patience());
  b.reset();  // without a goodbye, in this process, which lives on
  ASSERT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_EQ(a.heard->down().text, "b died: nobody listens at its address any more");
}

TEST(NodeTest, ASlowReaderHoldsItsSenderBack) {
  NodeOptions options;
  options.window = 4 << 20;
  Worker a("a", options), b("b", options);
  const auto peer = a.node->connect(b.node->listen("127.0.0.1:0"), patience());
  for (int i = 0; i < 40; ++i) peer->send(message_of(0, std::to_string(i), 1'000'000));
  ASSERT_TRUE(test::comes_true([&] { return b.heard->count() == 4; }));
  base::sleep(milliseconds(100), patience());
  EXPECT_EQ(b.heard->count(), 4U) << "which nobody has used";
  EXPECT_EQ(peer->metrics().queued, 36U);
  EXPECT_GE(peer->metrics().bytes_queued, 36'000'000U);
  EXPECT_LT(peer->metrics().bytes_queued, 36'010'000U);
  EXPECT_LE(peer->metrics().bytes_on_the_way, options.window);
  std::size_t came = 0;
  EXPECT_TRUE(test::comes_true([&] {
    came += b.heard->take().size();
    return came == 40;
  }));
  EXPECT_TRUE(test::comes_true([&] { return peer->metrics().bytes_queued == 0; }));
}

TEST(NodeTest, StrangersAreSentAwayAndKeepNobodyOut) {
  NodeOptions options;
  options.secret = base::Secret::make();
  Worker a("a", options), b("b", options);
  const std::string address = b.node->listen("127.0.0.1:0");
  const auto connect = [&] {
    base::Fd fd = start_connect(resolve(address));
    pollfd ready{fd.get(), POLLOUT, 0};
    ::poll(&ready, 1, 5'000);
    return fd;
  };
  const auto is_closed_within = [](const base::Fd& fd, milliseconds time) {
    pollfd ready{fd.get(), POLLIN, 0};
    char byte = 0;
    return ::poll(&ready, 1, static_cast<int>(time.count())) == 1 && ::read(fd.get(), &byte, 1) <= 0;
  };
  const base::Fd web = connect();
  ASSERT_EQ(::send(web.get(), "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL), 16);
  EXPECT_TRUE(is_closed_within(web, milliseconds(1000)));

  std::vector<base::Fd> idle;
  for (int i = 0; i < 200; ++i) idle.push_back(connect());
  const auto peer = a.node->connect(address, patience());
  peer->send(message_of(0, "hello"));
  EXPECT_TRUE(test::comes_true([&] { return b.heard->count() == 1; }));
  EXPECT_TRUE(is_closed_within(idle.front(), milliseconds(1000))) << "there may be 64";
  EXPECT_TRUE(is_closed_within(idle.back(), milliseconds(1000) + test::deadline_slack()))
      << "a handshake has a second";
}

TEST(NodeTest, WhoDoesNotKnowTheSecretIsTold) {
  NodeOptions right, wrong;
  right.secret = base::Secret::make();
  wrong.secret = base::Secret::make();
  Worker a("a", wrong), b("b", right), c("c");
  const std::string address = b.node->listen("127.0.0.1:0");
  for (Worker* stranger : {&a, &c}) {
    COHORT_EXPECT_THROW_WITH(stranger->node->connect(address, patience()), RendezvousError,
                             "who listens there does not know the job's secret");
  }
  COHORT_EXPECT_THROW_WITH(c.node->listen("0.0.0.0:0"), UsageError, "strangers can reach 0.0.0.0:0");
  EXPECT_EQ(b.heard->count(), 0U);
}

TEST(NodeTest, ErrorsNameTheAddress) {
  Worker a("a");
  std::string address;
  { base::Fd taken = listen_at(resolve("127.0.0.1:0"), address); }
  const auto begin = Clock::now();
  COHORT_EXPECT_THROW_WITH(a.node->connect(address, base::Deadline(milliseconds(200))), RendezvousError,
                           "cannot connect to " + address + " within 2");
  EXPECT_LT(Clock::now() - begin, milliseconds(200) + test::deadline_slack());
  COHORT_EXPECT_THROW_WITH(a.node->connect(address, base::Deadline(milliseconds(50))), RendezvousError,
                           "Connection refused");
  COHORT_EXPECT_THROW_WITH(a.node->connect("nonsense", patience()), UsageError, "'nonsense' is no address");
  COHORT_EXPECT_THROW_WITH(a.node->connect("unix:", patience()), UsageError, "0 bytes");
  const base::Fd taken = listen_at(resolve("127.0.0.1:0"), address);
  COHORT_EXPECT_THROW_WITH(a.node->listen(address), RendezvousError, "cannot listen at " + address);
}

TEST(NodeTest, AnAddressWhereNobodyListensIsGivenUpAtOnceIfAsked) {
  for (const std::string& where :
       {"127.0.0.1:" + std::to_string(test::free_port()), "unix:@cohort-" + base::random_word()}) {
    Worker a("a");
    const Clock::time_point begin = Clock::now();
    EXPECT_EQ(a.node->connect(where, patience(), WhenRejected::kGiveUp), nullptr) << where;
    EXPECT_LT(Clock::now() - begin, seconds(5)) << where;
  }
}

TEST(NodeTest, WhoRejectsTheHandshakeIsNotTakenForGone) {
  NodeOptions with_secret;
  with_secret.secret = base::Secret::make();
  Worker listener("listener", with_secret);
  with_secret.secret = base::Secret::make();
  Worker caller("caller", with_secret);
  const std::string address = listener.node->listen("unix:@cohort-" + base::random_word());
  COHORT_EXPECT_THROW_WITH(caller.node->connect(address, patience(), WhenRejected::kGiveUp), RendezvousError,
                           "does not know the job's secret");
}

TEST(NodeTest, AClosedNodeListensNoLonger) {
  Worker a("a"), b("b");
  const std::string address = b.node->listen("unix:@cohort-" + base::random_word());
  EXPECT_TRUE(b.node->close(patience()).empty());
  EXPECT_EQ(a.node->connect(address, patience(), WhenRejected::kGiveUp), nullptr);
  COHORT_EXPECT_THROW_WITH(b.node->listen(address), UsageError, "this node has been closed");
  EXPECT_EQ(a.node->connect(address, patience(), WhenRejected::kGiveUp), nullptr);
}

TEST(NodeTest, AStoppedNodeConnectsNoLonger) {
  Worker a("a");
  a.node->stop();
  COHORT_EXPECT_THROW_WITH(a.node->connect("127.0.0.1:1", patience()), UsageError,
                           "this node has been closed");
}

TEST(NodeTest, CloseEndsAConnectThatWaits) {
  Worker a("a");
  std::string address, error;
  const base::Fd taken =
      listen_at(resolve("127.0.0.1:0"), address);  // takes the connection, and says nothing
  std::thread caller([&] {
    try {
      a.node->connect(address, patience());
    } catch (const RendezvousError& failure) {
      error = failure.what();
    }
  });
  pollfd arrival{taken.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&arrival, 1, 60'000), 1) << "it waits for an answer";
  const Clock::time_point begin = Clock::now();
  EXPECT_TRUE(a.node->close(patience()).empty());
  caller.join();
  EXPECT_LT(Clock::now() - begin, seconds(20));
  EXPECT_NE(error.find("this node has been closed"), std::string::npos) << error;
}

TEST(NodeTest, AConnectionIsWaitedForUntilSomebodyListens) {
  Worker a("a"), b("b");
  std::string address;
  { base::Fd taken = listen_at(resolve("127.0.0.1:0"), address); }
  std::shared_ptr<Peer> peer;
  std::thread caller([&] { peer = a.node->connect(address, patience()); });
  base::sleep(milliseconds(100), patience());
  b.node->listen(address);
  caller.join();
  EXPECT_EQ(peer->name(), "b");
}

// A handler that ends its own node.
TEST(NodeTest, ANodeMayBeDestroyedByItsHandler) {
  struct EndsItsNode : Handler {
    void on_message(const std::shared_ptr<Peer>&, Message) override {
      node.reset();
      is_over = true;
    }
    std::unique_ptr<Node> node;
    std::atomic<bool> is_over{false};
  };
  NodeOptions options;
  options.name = "b";
  const auto handler = std::make_shared<EndsItsNode>();
  handler->node = std::make_unique<Node>(options, handler);
  Worker a("a");
  const auto peer = a.node->connect(handler->node->listen("127.0.0.1:0"), patience());
  for (int i = 0; i < 3; ++i) peer->send(message_of(0, "end"));
  EXPECT_TRUE(test::comes_true([&] { return handler->is_over.load(); }));
  EXPECT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
}

TEST(NodeTest, ManyNodesAndThreadsAllToAll) {
  constexpr int kNodes = 8, kEach = 50;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::string> addresses;
  for (int i = 0; i < kNodes; ++i) {
    workers.push_back(std::make_unique<Worker>(std::to_string(i)));
    addresses.push_back(
        workers.back()->node->listen(i % 2 == 0 ? "127.0.0.1:0" : "unix:@cohort-" + base::random_word()));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < kNodes; ++i) {
    threads.emplace_back([&, i] {
      for (int j = 0; j < kNodes; ++j) {
        if (i == j) continue;
        const auto peer = workers[i]->node->connect(addresses[j], patience());
        for (int k = 0; k < kEach; ++k)
          peer->send(message_of(0, std::to_string(k), static_cast<std::size_t>(k) * 100 + 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& worker : workers) {
    EXPECT_TRUE(test::comes_true([&] { return worker->heard->count() == (kNodes - 1) * kEach; }));
  }
  for (const auto& worker : workers) EXPECT_TRUE(worker->node->close(patience()).empty());
}

}  // namespace
}  // namespace cohort::net
