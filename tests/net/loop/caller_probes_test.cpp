// The side that has listened finds out that a caller of another host is dead.
#include "cohort/net/internal/loop/caller_probes.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/secret.h"
#include "tests/net/recorder.h"
#include "tests/net/relay.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"

namespace cohort::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::message_of;
using test::patience;
using test::Worker;

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
