// Which thread reads what comes: the node's own, or one in poll_until(); over TCP, TLS and shared memory.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <optional>
#include <random>
#include <semaphore>
#include <thread>

#include "cohort/base/secret.h"
#include "cohort/net/node.h"
#include "tests/net/recorder.h"
#include "tests/support/comes_true.h"
#include "tests/support/net/certificates.h"
#include "tests/support/patience.h"

namespace cohort::net {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::message_of;
using test::patience;
using test::Worker;

enum class LinkKind { kTcp, kTls, kSharedMemory };

class PolledLinkTest : public testing::TestWithParam<LinkKind> {
 protected:
  static std::string address() {
    return GetParam() == LinkKind::kSharedMemory ? "unix:@cohort-" + base::random_word() : "127.0.0.1:0";
  }
  NodeOptions with_spin(microseconds spin) {
    NodeOptions options;
    options.spin = spin;
    if (GetParam() == LinkKind::kTls) {
      if (!authority_) authority_.emplace();
      options.tls = authority_->make_node("node");
    }
    return options;
  }

 private:
  std::optional<test::Authority> authority_;
};

TEST_P(PolledLinkTest, MessagesOfAllSizesGoThereAndBackWithAndWithoutLooking) {
  for (const microseconds spin : {microseconds(0), microseconds(200)}) {
    Worker a("a", with_spin(spin)), b("b", with_spin(spin), true);
    const auto peer = a.node->connect(b.node->listen(address()), patience());
    std::mt19937 random(3);
    constexpr std::size_t kMessages = 400;
    for (std::size_t i = 0; i < kMessages; ++i) {
      const std::size_t size = i % 40 == 0 ? random() % 2'000'000 : random() % 3'000;
      peer->send(message_of(0, std::to_string(i), size));
      if (random() % 8 == 0) base::sleep(microseconds(random() % 400), patience());
      if (random() % 8 == 0) {
        peer->poll_until([&, count = a.heard->count()] { return a.heard->count() > count; });
      }
    }
    ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == kMessages; })) << a.heard->count();
    test::expect_whole(a.heard->take(), kMessages);
    EXPECT_TRUE(a.node->close(patience()).empty());
    EXPECT_TRUE(test::comes_true([&] { return b.heard->is_down(); }));
    EXPECT_EQ(b.heard->down().text, "a has left");
  }
}

TEST_P(PolledLinkTest, ABrokenSocketMakesANewLinkAndLosesNothing) {
  Worker a("a", with_spin(microseconds(50))), b("b", with_spin(microseconds(50)), true);
  const auto peer = a.node->connect(b.node->listen(address()), patience());
  std::mt19937 random(1);
  constexpr std::size_t kMessages = 1'500;
  for (std::size_t i = 0; i < kMessages; ++i) {
    peer->send(message_of(0, std::to_string(i), i % 50 == 0 ? random() % 600'000 : random() % 2'000));
    if (i % 10 == 0) peer->poll_until([&, count = a.heard->count()] { return a.heard->count() > count; });
    if (i % 150 != 149) continue;
    for (const int fd : test::connected_sockets()) ::shutdown(fd, SHUT_RDWR);
    base::sleep(milliseconds(random() % 20), patience());
  }
  ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == kMessages; })) << a.heard->count();
  test::expect_whole(a.heard->take(), kMessages);
  EXPECT_GT(peer->metrics().links, 1);
  EXPECT_FALSE(a.heard->is_down() || b.heard->is_down());
}

// Counts the messages that came on each kind of thread.
struct Threads : Handler {
  void on_message(const std::shared_ptr<Peer>&, Message) override {
    (std::this_thread::get_id() == waiting ? num_here : num_elsewhere)++;
  }
  std::thread::id waiting = std::this_thread::get_id();
  std::atomic<int> num_here{0}, num_elsewhere{0};
};

TEST_P(PolledLinkTest, WhoWaitsForAnAnswerReadsItItself) {
  const auto heard = std::make_shared<Threads>();
  NodeOptions options = with_spin(seconds(10));  // it is there sooner, however slow the machine is
  options.name = "a";
  Node a(options, heard);
  Worker b("b", with_spin(microseconds(50)), true);
  const auto peer = a.connect(b.node->listen(address()), patience());
  test::wait_until([&] {  // until the node's own thread has begun to look, it may come first
    const int count = heard->num_here + heard->num_elsewhere;
    peer->send(message_of(0, "first"));
    peer->poll_until([&] { return heard->num_here + heard->num_elsewhere > count; });
    return heard->num_here > 0;
  });
  EXPECT_GT(heard->num_here, 0);
}

// Each function of the handler waits for the next message, which another thread has to read.
struct Nested : Handler {
  void on_message(const std::shared_ptr<Peer>&, Message message) override {
    order.push_back(message.header);
    if (message.header == "2") return done.release();
    node->replace_thread();
    was_done = done.try_acquire_for(seconds(20));
    done.release();
    ++num_ended;
  }
  Node* node = nullptr;
  std::vector<std::string> order;
  std::counting_semaphore<> done{0};
  std::atomic<bool> was_done{false};
  std::atomic<int> num_ended{0};
};

TEST_P(PolledLinkTest, AFunctionThatWaitsGivesItsThreadsPlaceToAnother) {
  const auto heard = std::make_shared<Nested>();
  NodeOptions options = with_spin(microseconds(50));
  options.name = "b";
  Node b(options, heard);
  heard->node = &b;
  Worker a("a", with_spin(microseconds(0)));
  const auto peer = a.node->connect(b.listen(address()), patience());
  for (int i = 0; i < 3; ++i) peer->send(message_of(0, std::to_string(i)));
  EXPECT_TRUE(test::comes_true([&] { return heard->num_ended == 2; }));
  EXPECT_TRUE(heard->was_done);
  EXPECT_EQ(heard->order, (std::vector<std::string>{"0", "1", "2"}));
  b.stop();
}

// Asks for the second message of a pair in the function of the first one, and waits for it.
struct WaitsForTheNext : Handler {
  void on_message(const std::shared_ptr<Peer>& peer, Message message) override {
    if (message.header == "second") return second.release();
    if (std::this_thread::get_id() == waiting) ++num_here;
    node->will_wait();
    peer->send(message_of(0, "second"));
    has_come = has_come && second.try_acquire_for(seconds(2));
    ++num_pairs;
  }
  Node* node = nullptr;
  std::thread::id waiting = std::this_thread::get_id();
  std::counting_semaphore<> second{0};
  std::atomic<bool> has_come{true};
  std::atomic<int> num_pairs{0}, num_here{0};
};

TEST_P(PolledLinkTest, AFunctionMayWaitOnAThreadThatReadsForItself) {
  const auto heard = std::make_shared<WaitsForTheNext>();
  // Without heartbeats nothing but the message itself has a thread read it.
  NodeOptions options = with_spin(seconds(10)), options_of_b = with_spin(microseconds(50));
  options.name = "a";
  options.heartbeat = options_of_b.heartbeat = seconds(20);
  options.silence = options_of_b.silence = seconds(60);
  Node a(options, heard);
  heard->node = &a;
  Worker b("b", options_of_b, true);
  const auto peer = a.connect(b.node->listen(address()), patience());
  test::wait_until([&] {  // the node's own thread may come first
    const int count = heard->num_pairs;
    peer->send(message_of(0, "first"));
    peer->poll_until([&] { return heard->num_pairs > count; });
    return heard->num_here > 0 || !heard->has_come;
  });
  EXPECT_TRUE(heard->has_come);
  a.stop();
}

// Is in the function of a message for longer than a peer may be silent, once, on the thread that waits.
struct LongOnce : Handler {
  void on_message(const std::shared_ptr<Peer>&, Message) override {
    ++count;
    if (std::this_thread::get_id() != waiting || was_long.exchange(true)) return;
    base::sleep(seconds(2), patience());
  }
  std::thread::id waiting = std::this_thread::get_id();
  std::atomic<bool> was_long{false};
  std::atomic<int> count{0};
};

TEST_P(PolledLinkTest, APeerIsNotSilentWhileTheThreadThatReadsItIsInAFunction) {
  const auto heard = std::make_shared<LongOnce>();
  NodeOptions options = with_spin(seconds(10)), options_of_b = with_spin(microseconds(50));
  options.name = "a";
  options.heartbeat = options_of_b.heartbeat = milliseconds(100);
  options.silence = seconds(1);
  Node a(options, heard);
  Worker b("b", options_of_b, true);
  const auto peer = a.connect(b.node->listen(address()), patience());
  test::wait_until([&] {  // the node's own thread may come first
    const int count = heard->count;
    peer->send(message_of(0, "message"));
    peer->poll_until([&] { return heard->count > count; });
    return heard->was_long.load();
  });
  EXPECT_FALSE(peer->is_down());
}

TEST_P(PolledLinkTest, AnEndThatAThreadReadsItselfIsHandedOverAtOnce) {
  NodeOptions options = with_spin(seconds(10));
  options.heartbeat = seconds(20);  // nothing but the end itself has it handed over
  options.silence = seconds(60);
  Worker a("a", options), b("b", options, true);
  const auto peer = a.node->connect(b.node->listen(address()), patience());
  std::thread closes([&] { b.node->close(patience()); });
  const base::Deadline begin(seconds(10));
  peer->poll_until([&] { return a.heard->is_down(); });
  EXPECT_TRUE(test::comes_true([&] { return a.heard->is_down(); }));
  EXPECT_LT(begin.elapsed(), seconds(5));
  closes.join();
}

// Whoever looks while the condition is asked may hold what the condition needs.
TEST_P(PolledLinkTest, TheConditionOfAThreadThatWaitsMayUseTheNode) {
  Worker a("a", with_spin(microseconds(200))), b("b", with_spin(microseconds(50)), true);
  const auto peer = a.node->connect(b.node->listen(address()), patience());
  for (std::uint64_t i = 1; i <= 20; ++i) {
    peer->send(message_of(0, "message"));
    peer->poll_until([&] { return peer->metrics().messages_received >= i; });
  }
  EXPECT_TRUE(test::comes_true([&] { return a.heard->count() == 20; }));
}

std::string name_of(const testing::TestParamInfo<LinkKind>& info) {
  return info.param == LinkKind::kTcp ? "Tcp" : info.param == LinkKind::kTls ? "Tls" : "SharedMemory";
}
INSTANTIATE_TEST_SUITE_P(Links, PolledLinkTest,
                         testing::Values(LinkKind::kTcp, LinkKind::kTls, LinkKind::kSharedMemory), name_of);

}  // namespace
}  // namespace cohort::net
