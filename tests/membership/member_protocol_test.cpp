// Agents without threads or sockets: messages come at once, and the clock is the test's.
#include "cohort/membership/internal/member_protocol.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "agent_network.h"
#include "cohort/base/error.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using test::AgentNetwork;
using test::run_of;
using Agent = AgentNetwork::Agent;

TEST(MemberProtocolTest, AgentsAgree) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(2, 2), "n1:1");
  Agent& b = network.add("b", "n2:1", run_of(2, 2), "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
  EXPECT_EQ(a.record(), b.record());
}

// A busy host is late now and then, and counts none of it as the silence of others. What is waited for comes
// to its end all the same.
TEST(MemberProtocolTest, AHostThatIsLateNowAndThenKeepsTheJoinTimeout) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(2, 2), "n1:1");
  for (int i = 0; i < 40 && !(a.protocol.record() && a.record().has_ended()); ++i) {
    network.run(seconds(1));
    network.stop(milliseconds(400));
  }
  EXPECT_EQ(a.record().state, RunState::kFailed) << "after 56 s of 20";
}

TEST(MemberProtocolTest, AHostThatIsLateNowAndThenSeesThatTheEndpointIsSilent) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(2, 2), "n1:1");
  Agent& b = network.add("b", "n2:1", run_of(2, 2), "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return b.is_member(); }));
  a.is_stopped = true;
  for (int i = 0; i < 30 && b.failure().empty(); ++i) {
    network.run(seconds(1));
    network.stop(milliseconds(400));
  }
  EXPECT_TRUE(test::contains(b.failure(), "was silent for 10000 ms"));
}

TEST(MemberProtocolTest, AStopOfAMinuteIsNotTheEndpointsSilence) {
  AgentNetwork network;
  network.add("a", "n1:1", run_of(2, 2), "n1:1");
  Agent& b = network.add("b", "n2:1", run_of(2, 2), "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return b.is_member(); }));
  network.stop(std::chrono::minutes(1));
  network.run(seconds(1));
  EXPECT_EQ(b.failure(), "");
  EXPECT_TRUE(b.is_member());
}

TEST(MemberProtocolTest, TheEndpointMayHaveAnotherName) {
  AgentNetwork network;
  network.aliases["localhost:1"] = "127.0.0.1:1";
  Agent& a = network.add("a", "127.0.0.1:1", run_of(2, 2), "127.0.0.1:1");
  Agent& b = network.add("b", "127.0.0.1:2", run_of(2, 2), "localhost:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
  network.run(seconds(12));
  EXPECT_EQ(b.failure(), "");
  network.kill("127.0.0.1:1");
  EXPECT_TRUE(test::contains(b.failure(), "died, and it had the run's only record"));
}

// Its ranks have ended, so it is in no later generation. It has the record all the same.
TEST(MemberProtocolTest, TheEndpointNeedNotBeAMember) {
  AgentNetwork network;
  RunSettings settings = run_of(1, 2);
  settings.virtual_ranks = 0;
  settings.max_restarts = 3;
  settings.last_call_timeout = milliseconds(200);
  Agent& a = network.add("a", "n1:1", settings, "n1:1");
  Agent& b = network.add("b", "n2:1", settings, "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
  network.run(seconds(1));
  a.report.is_finished = true;
  network.report(a);
  b.report.failure = "rank 1 ended with status 3";
  network.report(b);
  ASSERT_TRUE(
      network.run_until(seconds(2), [&] { return !a.is_member() && b.record().generation.number == 2; }));
  network.run(seconds(12));
  EXPECT_EQ(b.failure(), "");
  EXPECT_TRUE(b.is_member());
  network.kill("n1:1");
  EXPECT_TRUE(test::contains(b.failure(), "died, and it had the run's only record"));
}

// The agent at the endpoint is started again before the others have ended: theirs is another run.
TEST(MemberProtocolTest, AgentsOfARunThatIsOverAreNoneOfTheNextOne) {
  AgentNetwork network;
  network.add("a", "n1:1", run_of(1, 2), "n1:1");
  Agent& b = network.add("b", "n2:1", run_of(1, 2), "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return b.is_member(); }));
  b.report.committed_steps = 500;
  network.report(b);
  const std::string text = to_text(b.record());
  Agent& next = network.add("next", "n1:1", run_of(1, 2), "n1:1");  // nobody was told of the death of "a"
  Agent& c = network.add("c", "n3:1", run_of(1, 2), "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return next.is_member() && c.is_member(); }));
  network.run(seconds(12));
  EXPECT_EQ(next.record().generation.committed_steps, 0U);
  EXPECT_EQ(next.record().find("b"), nullptr);
  EXPECT_EQ(next.record().state, RunState::kRunning);
  EXPECT_EQ(to_text(b.record()), text) << "it has taken the record of another run";
  EXPECT_TRUE(test::contains(b.failure(), "another run")) << b.failure();
}

TEST(MemberProtocolTest, OtherSettingsAreRejectedBeforeTheFirstRecordToo) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(2, 2), "n1:1");
  AgentMessage message;
  message.type = AgentMessage::Type::kReport;
  message.incarnation = "b";
  message.address = "n2:1";
  message.settings = run_of(1, 2);
  network.deliver(a, message);
  network.run(milliseconds(250));
  EXPECT_EQ(a.record().state, RunState::kForming);
  EXPECT_EQ(a.record().find("b"), nullptr);
}

TEST(MemberProtocolTest, AnAgentThatWaitsKnowsItsPlace) {
  AgentNetwork network;
  RunSettings settings = run_of(1, 1);
  settings.num_spares = 1;
  Agent& a = network.add("a", "n1:1", settings, "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  Agent& b = network.add("b", "n2:1", settings, "n1:1");
  Agent& c = network.add("c", "n3:1", settings, "n1:1");
  network.run(seconds(2));
  ASSERT_EQ(a.record().spares.size(), 1U);
  ASSERT_EQ(a.record().waiting.size(), 1U);
  EXPECT_EQ(b.record().spares, a.record().spares);
  EXPECT_NE(b.record().find("b"), nullptr);
  EXPECT_NE(c.record().find("c"), nullptr);
  const std::uint64_t before = a.num_messages;
  network.run(seconds(1));
  EXPECT_LE(a.num_messages - before, 25U) << "one answer for each report, and pings";
}

// The record of a run that has ended stays in the store for a while.
TEST(MemberProtocolTest, AnAgentThatWaitsNoLongerKnowsIt) {
  AgentNetwork network;
  RunSettings settings = run_of(3, 3);
  auto& first = network.add("a", "a:1", settings, "a:1");
  auto& second = network.add("b", "b:1", settings, "a:1");
  network.add("c", "c:1", settings, "a:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return first.is_member() && second.is_member(); }));
  network.kill("c:1");
  const auto forms = [&] {
    return second.record().state == RunState::kForming && first.record().holders.size() == 2;
  };
  ASSERT_TRUE(network.run_until(seconds(5), forms));
  second.report.is_leaving = true;
  network.report(second);
  EXPECT_TRUE(network.run_until(seconds(1), [&] { return second.record().find("b") == nullptr; }));
}

// A node that leaves stays while it may be the only one that has the state.
TEST(MemberProtocolTest, WhileTheRunFormsWhoHasTheStateKnowsIt) {
  AgentNetwork network;
  const RunSettings settings = run_of(3, 4);
  Agent& a = network.add("a", "a:1", settings, "a:1");
  network.add("b", "b:1", settings, "a:1");
  network.add("d", "d:1", settings, "a:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  Agent& c = network.add("c", "c:1", settings, "a:1");
  c.report.is_finished = true;  // it does not enter by itself
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return c.is_member(); }));
  network.kill("b:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return c.record().generation.number == 3; }));
  network.kill("d:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return c.record().state == RunState::kForming; }));
  const auto has_state = [&] { return std::ranges::count(c.record().holders, c.record().find("c")->id) > 0; };
  ASSERT_FALSE(has_state());
  // Its ranks had begun a step.
  c.report.is_finished = false;
  c.report.entered = c.report.recovered = 3;
  network.report(c);
  EXPECT_TRUE(network.run_until(seconds(1), has_state));
}

TEST(MemberProtocolTest, AfterARunThatHasFailedANewAgentBeginsAnotherOne) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(1, 2), "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  a.report.committed_steps = 500;
  a.report.is_leaving = true;
  network.report(a);
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.record().has_ended(); })) << a.record().end_cause;
  Agent& b = network.add("b", "n2:1", run_of(1, 2), "");
  Agent& c = network.add("c", "n3:1", run_of(1, 2), "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return b.is_member() && c.is_member(); })) << b.failure();
  EXPECT_NE(b.record().origin, a.record().origin);
  EXPECT_EQ(b.record(), c.record());
  EXPECT_EQ(b.record().generation.committed_steps, 0U);
  EXPECT_TRUE(a.record().has_ended());
}

TEST(MemberProtocolTest, AfterARunThatHasSucceededANewAgentNamesTheRun) {
  AgentNetwork network;
  RunSettings settings = run_of(1, 2);
  settings.run_id = "vgg-17";
  Agent& a = network.add("a", "n1:1", settings, "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  network.run(milliseconds(100));
  a.report.is_finished = true;
  network.report(a);
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.record().has_ended(); }));
  Agent& b = network.add("b", "n2:1", settings, "");
  network.run(seconds(1));
  EXPECT_TRUE(test::contains(b.failure(), "run vgg-17 has succeeded already")) << b.failure();
}

// The same command resumes it.
TEST(MemberProtocolTest, AfterARunThatASignalHasStoppedANewAgentBeginsAnotherOne) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(1, 2), "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  network.run(milliseconds(100));
  a.report.is_finished = true;
  a.report.stop_signal = 15;
  network.report(a);
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.record().has_ended(); }));
  EXPECT_EQ(a.record().exit_status, 143);
  Agent& b = network.add("b", "n2:1", run_of(1, 2), "");
  EXPECT_TRUE(network.run_until(seconds(2), [&] { return b.is_member(); })) << b.failure();
}

// All were killed at once. Their hosts say that nobody listens there any more.
TEST(MemberProtocolTest, ANewAgentEndsARunWhoseAgentsAreAllGone) {
  for (const bool is_told : {true, false}) {
    AgentNetwork network;
    network.tells_closed_ports = is_told;
    RunSettings settings = run_of(1, 3);
    settings.join_timeout = std::chrono::minutes(10);
    Agent& a = network.add("a", "n1:1", settings, "");
    Agent& b = network.add("b", "n2:1", settings, "");
    ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
    network.lose("n1:1");
    network.lose("n2:1");
    Agent& c = network.add("c", "n3:1", settings, "");
    network.run(seconds(9));
    EXPECT_FALSE(c.record().has_ended()) << "a host may be late";
    network.run(seconds(5));
    EXPECT_EQ(c.record().has_ended(), is_told)
        << "a host that is silent may be on the other side of a cut network";
    if (!is_told) continue;
    EXPECT_TRUE(test::contains(c.record().end_cause, "no agent is left that had the state"))
        << c.record().end_cause;
    Agent& d = network.add("d", "n4:1", settings, "");
    EXPECT_TRUE(network.run_until(seconds(2), [&] { return d.is_member(); }));
  }
}

// An agent that decides reports to nobody, so the others have its steps from the record alone. In the first
// generation, and while the run forms, the record does not say them either.
TEST(MemberProtocolTest, TheOneThatDecidedIsWaitedForWhereTheStateIsLost) {
  for (const int min_nodes : {1, 2}) {
    for (const bool is_third_early : {true, false}) {
      SCOPED_TRACE(base::concat(min_nodes, " nodes, ", is_third_early));
      AgentNetwork network;
      Agent& a = network.add("a", "n1:1", run_of(min_nodes, 3), "");
      Agent& b = network.add("b", "n2:1", run_of(min_nodes, 3), "");
      ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
      b.report.committed_steps = 500;
      network.report(b);
      network.run(seconds(1));
      Agent* c = nullptr;
      if (is_third_early) {
        c = &network.add("c", "n3:1", run_of(min_nodes, 3), "");
        ASSERT_TRUE(network.run_until(seconds(40), [&] { return c->is_member(); }));
        ASSERT_EQ(b.record().generation.committed_steps, 500U);
        network.run(milliseconds(500));
      }
      a.is_stopped = true;
      ASSERT_TRUE(network.run_until(seconds(9), [&] { return b.record().find("a") == nullptr; }));
      if (min_nodes == 2 && !is_third_early) {
        ASSERT_EQ(b.record().state, RunState::kForming);
        c = &network.add("c", "n3:1", run_of(min_nodes, 3), "");
      }
      ASSERT_TRUE(network.run_until(seconds(40), [&] { return b.is_member() && (!c || c->is_member()); }));
      network.run(milliseconds(500));
      const std::uint64_t number = b.record().generation.number;
      for (Agent* const agent : {&b, c}) {
        if (agent == nullptr) continue;
        agent->report.recovered = 0;
        agent->report.is_state_lost = true;
        network.report(*agent);
      }
      network.run(seconds(3));
      EXPECT_EQ(b.record().state, RunState::kForming) << b.record().end_cause;
      a.is_stopped = false;
      EXPECT_TRUE(network.run_until(
          seconds(9), [&] { return a.is_member() && a.record().generation.number == number + 1; }));
    }
  }
}

TEST(MemberProtocolTest, WhoMayHaveTheStateIsWaitedForUntilTheJoinTimeout) {
  for (const bool comes_back : {true, false}) {
    AgentNetwork network;
    RunSettings settings = run_of(1, 2);
    settings.silence = milliseconds(50);
    Agent& a = network.add("a", "n1:1", settings, "");
    Agent& b = network.add("b", "n2:1", settings, "");
    ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
    b.report.committed_steps = 500;
    network.report(b);
    network.run(milliseconds(100));
    a.is_stopped = true;
    ASSERT_TRUE(network.run_until(seconds(2), [&] { return b.record().find("a") == nullptr; }));
    network.run(milliseconds(100));
    b.report.recovered = 0;
    b.report.is_state_lost = true;
    network.report(b);
    network.run(seconds(18));
    EXPECT_EQ(b.record().state, RunState::kForming) << b.record().end_cause;
    a.is_stopped = !comes_back;
    const auto is_over = [&] { return b.record().state != RunState::kForming; };
    ASSERT_TRUE(network.run_until(seconds(5), is_over));
    EXPECT_EQ(b.record().state, comes_back ? RunState::kRunning : RunState::kFailed);
    EXPECT_EQ(b.record().generation.find(3) != nullptr, comes_back) << "its next id";
  }
}

// A member is gone, and the store that all reach is away: nobody can make a generation without it. What was
// written last, and not answered, may have been no need.
TEST(MemberProtocolTest, AGenerationThatCannotBeWrittenEndsTheAgentAfterTheJoinTimeout) {
  for (const int variant : {0, 1, 2, 3}) {
    const bool comes_back = variant % 2 == 0, is_unknown = variant >= 2;
    AgentNetwork network;
    Agent& a = network.add("a", "n1:1", run_of(1, 2), "");
    Agent& b = network.add("b", "n2:1", run_of(1, 2), "");
    ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
    network.add("c", "n3:1", run_of(1, 2), "");
    ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.record().find("c") != nullptr; }));
    network.is_store_away = true;
    network.lose("n3:1");
    network.run(seconds(60));
    if (is_unknown) network.tell(a, {StoreAnswer::Type::kUnknown, 0, ""});
    EXPECT_EQ(a.failure() + b.failure(), "") << "the run needs no other generation";
    b.is_stopped = true;
    network.run(seconds(15));
    EXPECT_EQ(a.failure(), "");
    b.is_stopped = !comes_back;
    network.run(seconds(60));
    if (comes_back) {
      EXPECT_EQ(a.failure(), "");
    } else {
      EXPECT_TRUE(test::contains(a.failure(), "has taken no other generation for 20000 ms")) << a.failure();
    }
  }
}

TEST(MemberProtocolTest, AnAnswerThatDoesNotComeChangesNobodysPart) {
  AgentNetwork network;
  Agent& a = network.add("a", "n1:1", run_of(1, 2), "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  network.tell(a, {StoreAnswer::Type::kUnknown, 0, ""});
  network.run(milliseconds(500));
  EXPECT_TRUE(a.protocol.is_deciding());
}

TEST(MemberProtocolTest, WhoHasFailedSaysNothingMore) {
  AgentNetwork network;
  network.add("a", "n1:1", run_of(1, 2), "n1:1");
  Agent& b = network.add("b", "n2:1", run_of(1, 2), "n1:1");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return b.is_member(); }));
  b.protocol.fail("there is no memory");
  const std::uint64_t before = b.num_messages;
  b.report.failure = "rank 1 ended with status 3";
  network.report(b);
  network.run(seconds(1));
  EXPECT_EQ(b.num_messages, before);
  EXPECT_EQ(b.failure(), "there is no memory");
}

}  // namespace
}  // namespace cohort::membership
