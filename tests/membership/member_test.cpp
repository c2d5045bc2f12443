#include "cohort/membership/member.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/membership/internal/agent_message.h"
#include "cohort/net/node.h"
#include "tests/support/comes_true.h"
#include "tests/support/contains.h"
#include "tests/support/net/port.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::patience;

MemberOptions options_for(int min_nodes, int max_nodes, const std::string& endpoint,
                          bool is_endpoint = false) {
  MemberOptions options;
  options.settings.min_nodes = min_nodes;
  options.settings.max_nodes = max_nodes;
  options.settings.virtual_ranks = 8;
  options.settings.silence = milliseconds(500);
  options.settings.max_restarts = 3;
  options.endpoint = endpoint;
  options.is_endpoint = is_endpoint;
  return options;
}

// An agent without ranks: it enters each generation at once.
class TestAgent {
 public:
  explicit TestAgent(MemberOptions options) : member(std::move(options)) {}

  // Enters what there is to enter.
  MemberView look() {
    const MemberView view = member.view();
    if (view.is_member() && view.record->generation.number != status.entered) {
      status.entered = status.recovered = view.record->generation.number;
      member.set_status(status);
    }
    return view;
  }
  // Waits for a view.
  bool sees(const std::function<bool(const MemberView&)>& condition) {
    return test::comes_true([&] { return condition(look()); });
  }
  bool has_members(std::size_t count) {
    const MemberView view = look();
    return view.is_member() && view.record->generation.members.size() == count;
  }
  bool sees_members(std::size_t count) {
    return test::comes_true([&] { return has_members(count); });
  }
  Generation generation() const { return member.view().record->generation; }

  Member member;
  MemberStatus status;
};

std::unique_ptr<TestAgent> endpoint_agent(int min_nodes, int max_nodes) {
  return std::make_unique<TestAgent>(options_for(min_nodes, max_nodes, "127.0.0.1:0", true));
}
std::unique_ptr<TestAgent> agent_for(const TestAgent& endpoint, int min_nodes, int max_nodes) {
  return std::make_unique<TestAgent>(options_for(min_nodes, max_nodes, endpoint.member.address()));
}

struct SilentHandler : net::Handler {
  void on_message(const std::shared_ptr<net::Peer>&, net::Message) override {}
};

struct AnswerCounter : net::Handler {
  void on_connect(const std::shared_ptr<net::Peer>&) override { ++num_connections; }
  void on_message(const std::shared_ptr<net::Peer>&, net::Message) override { ++num_answers; }
  std::atomic<int> num_connections{0}, num_answers{0};
};

net::Message net_message(const AgentMessage& message) {
  net::Message sent;
  sent.channel = 1;
  sent.header = to_text(message);
  return sent;
}

// What child processes do: an agent of a run of 1 to 4 nodes, until it is killed.
TEST(MemberChild, DISABLED_Process) {
  const std::string endpoint = std::getenv("MEMBER_ENDPOINT");
  MemberOptions options = options_for(1, 4, endpoint, std::getenv("MEMBER_IS_ENDPOINT") != nullptr);
  if (const char* const silence = std::getenv("MEMBER_SILENCE_MS"))
    options.settings.silence = milliseconds(std::atoi(silence));
  TestAgent agent(options);
  std::cout << "address=" << agent.member.address() << ";" << std::endl;
  const base::Deadline deadline(seconds(60));
  while (!deadline.expired())
    agent.sees([&](const MemberView& view) { return view.record && view.record->has_ended(); });
}

TEST(MemberTest, AgentsAgreeOnAGeneration) {
  const auto a = endpoint_agent(3, 3);
  const auto b = agent_for(*a, 3, 3), c = agent_for(*a, 3, 3);
  for (TestAgent* const agent : {&*a, &*b, &*c}) ASSERT_TRUE(agent->sees_members(3));
  EXPECT_EQ(a->generation(), b->generation());
  EXPECT_EQ(a->generation(), c->generation());
  EXPECT_EQ(a->generation().number, 1U);
  EXPECT_TRUE(a->member.view().is_deciding);
  EXPECT_FALSE(b->member.view().is_deciding);
}

TEST(MemberTest, ALaterAgentEntersAndOneThatLeavesIsOut) {
  const auto a = endpoint_agent(1, 3);
  ASSERT_TRUE(a->sees_members(1));
  const auto b = agent_for(*a, 1, 3);
  ASSERT_TRUE(a->sees_members(2));
  ASSERT_TRUE(b->sees_members(2));
  EXPECT_TRUE(b->generation().is_planned);
  const MemberId id = b->member.view().id;
  const auto c = agent_for(*a, 1, 3);
  for (TestAgent* const agent : {&*a, &*b, &*c}) ASSERT_TRUE(agent->sees_members(3));
  EXPECT_EQ(b->member.view().id, id);
  b->status.is_leaving = true;
  b->member.set_status(b->status);
  ASSERT_TRUE(b->sees([](const MemberView& view) { return !view.is_member(); }));
  ASSERT_TRUE(c->sees_members(2));
  EXPECT_TRUE(test::contains(c->generation().cause, "leaves"));
  b->member.close(patience());
}

// Its thread would give signs of life for ever.
TEST(MemberTest, AnAgentWhoseProgramHangsIsGivenUpAndComesBack) {
  const auto a = endpoint_agent(1, 2);
  MemberOptions options = options_for(1, 2, a->member.address());
  options.program_timeout = milliseconds(1'000);
  TestAgent b(options);
  const auto sees = [&](std::size_t count, bool runs) {
    return a->sees([&](const MemberView& view) {
      if (runs) b.member.note_alive();
      if (runs) b.sees([](const MemberView&) { return true; });
      return view.is_member() && view.record->generation.members.size() == count;
    });
  };
  ASSERT_TRUE(sees(2, true));
  const std::string before = b.member.incarnation();
  ASSERT_TRUE(sees(1, false));
  EXPECT_TRUE(test::contains(a->generation().cause, "is silent")) << a->generation().cause;
  ASSERT_TRUE(sees(2, true));
  EXPECT_EQ(a->generation().members.back().incarnation, before);
}

TEST(MemberTest, ARunEndsForAll) {
  const auto a = endpoint_agent(2, 2);
  const auto b = agent_for(*a, 2, 2);
  for (TestAgent* const agent : {&*a, &*b}) ASSERT_TRUE(agent->sees_members(2));
  for (TestAgent* const agent : {&*a, &*b}) {
    agent->status.is_finished = true;
    agent->member.set_status(agent->status);
  }
  // It waits until the other one knows.
  ASSERT_TRUE(a->sees([](const MemberView& view) { return view.record->has_ended(); }));
  a->member.close(patience());
  ASSERT_TRUE(b->sees([](const MemberView& view) { return view.record->has_ended(); }));
  EXPECT_EQ(b->member.view().record->state, RunState::kSucceeded);
  EXPECT_EQ(b->member.view().failure, "");
  b->member.close(patience());
}

TEST(MemberTest, AFailedRankIsARestart) {
  const auto a = endpoint_agent(2, 2);
  const auto b = agent_for(*a, 2, 2);
  for (TestAgent* const agent : {&*a, &*b}) ASSERT_TRUE(agent->sees_members(2));
  b->status.failure = "rank 1 ended with status 3";
  b->member.set_status(b->status);
  ASSERT_TRUE(a->sees([](const MemberView& view) { return view.record->generation.number == 2; }));
  EXPECT_EQ(a->member.view().record->restarts_used, 1);
  EXPECT_TRUE(test::contains(a->generation().cause, "rank 1 ended with status 3"));
}

TEST(MemberTest, OtherSettingsAreRejected) {
  const auto a = endpoint_agent(1, 2);
  ASSERT_TRUE(a->sees_members(1));
  const auto b = agent_for(*a, 1, 3);
  ASSERT_TRUE(b->sees([](const MemberView& view) { return !view.failure.empty(); }));
  EXPECT_EQ(b->member.view().failure, "the run has other settings: max_nodes is 3 here, and 2 in the run");
}

TEST(MemberTest, AnotherSecretIsNamedAfterTheJoinTimeout) {
  MemberOptions options = options_for(1, 2, "127.0.0.1:0", true);
  options.secret = base::Secret::make();
  TestAgent a(options);
  MemberOptions other = options_for(1, 2, a.member.address());
  other.settings.join_timeout = milliseconds(300);
  other.secret = base::Secret::make();
  TestAgent b(other);
  ASSERT_TRUE(b.sees([](const MemberView& view) { return !view.failure.empty(); }));
  EXPECT_TRUE(test::contains(b.member.view().failure, "no agent of the run answered within 300 ms: "));
  EXPECT_TRUE(test::contains(b.member.view().failure, "secret")) << b.member.view().failure;
}

TEST(MemberTest, SettingsThatCannotBeAreRejected) {
  const auto with = [](int min_nodes, int max_nodes) {
    Member member(options_for(min_nodes, max_nodes, "127.0.0.1:0", true));
  };
  COHORT_EXPECT_THROW_WITH(with(0, 1), UsageError, "got 0 to 1 nodes");
  COHORT_EXPECT_THROW_WITH(with(3, 2), UsageError, "got 3 to 2 nodes");
  const auto with_times = [](int silence, int join_timeout, int last_call) {
    MemberOptions options = options_for(1, 1, "127.0.0.1:0", true);
    options.settings.silence = milliseconds(silence);
    options.settings.join_timeout = milliseconds(join_timeout);
    options.settings.last_call_timeout = milliseconds(last_call);
    Member member(options);
  };
  COHORT_EXPECT_THROW_WITH(with_times(19, 1, 1), UsageError, "got a silence of 19 ms");
  COHORT_EXPECT_THROW_WITH(with_times(20, -1, 1), UsageError, "a join timeout of -1 ms");
  COHORT_EXPECT_THROW_WITH(with_times(20, 1, -1), UsageError, "a last call of -1 ms");
  MemberOptions many = options_for(1, 1, "127.0.0.1:0", true);
  many.settings.max_restarts = -1;
  COHORT_EXPECT_THROW_WITH(Member{many}, UsageError, "-1 restarts");
  many.settings.max_restarts = 0;
  many.status.num_processes = 0;
  COHORT_EXPECT_THROW_WITH(Member{many}, UsageError, "got 0 processes");
  many.status.num_processes = 1;
  Member first(many);
  many.endpoint = "127.0.0.1:" + std::to_string(test::free_port());
  many.is_endpoint = false;
  many.listen = many.endpoint;
  COHORT_EXPECT_THROW_WITH(Member{many}, UsageError, "is not told that it is there");
  COHORT_EXPECT_THROW_WITH(Member(options_for(1, 1, "")), UsageError,
                           "there must be an endpoint, or a store");
}

TEST(MemberTest, AKilledAgentIsReplacedInMilliseconds) {
  const auto a = endpoint_agent(1, 4);
  test::RankProcesses children("MemberChild", 2, {{"MEMBER_ENDPOINT", a->member.address()}});
  ASSERT_TRUE(a->sees_members(3)) << children.output(0);
  const auto begin = std::chrono::steady_clock::now();
  children.send(0, SIGKILL);
  ASSERT_TRUE(a->sees_members(2));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(450)) << "sooner than by silence";
  EXPECT_TRUE(test::contains(a->generation().cause, "died"));
}

TEST(MemberTest, AStoppedAgentIsGivenUpAndComesBackAsAnother) {
  const auto a = endpoint_agent(1, 4);
  test::RankProcesses children("MemberChild", 2, {{"MEMBER_ENDPOINT", a->member.address()}});
  ASSERT_TRUE(a->sees_members(3));
  const Generation before = a->generation();
  const auto begin = std::chrono::steady_clock::now();
  children.send(0, SIGSTOP);
  ASSERT_TRUE(a->sees_members(2));
  const auto time = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(time, milliseconds(400));
  EXPECT_TRUE(test::contains(a->generation().cause, "is silent"));
  children.send(0, SIGCONT);
  ASSERT_TRUE(a->sees_members(3));
  for (const MemberInfo& member : a->generation().members) {
    const MemberInfo* const earlier = before.find(member.id);
    EXPECT_TRUE(earlier == nullptr || earlier->incarnation == member.incarnation);
  }
  EXPECT_GT(a->generation().members.back().id, before.members.back().id);
}

// So long that the others' nodes have given up their connections to it. None of them has died.
TEST(MemberTest, AnAgentThatWasStoppedForLongComesBackToo) {
  MemberOptions options = options_for(1, 4, "127.0.0.1:0", true);
  options.settings.silence = milliseconds(200);
  TestAgent a(options);
  test::RankProcesses child("MemberChild", 1,
                            {{"MEMBER_ENDPOINT", a.member.address()}, {"MEMBER_SILENCE_MS", "200"}});
  ASSERT_TRUE(a.sees_members(2)) << child.output(0);
  for (int i = 0; i < 3; ++i) {
    const MemberId id = a.generation().members.back().id;
    child.send(0, SIGSTOP);
    ASSERT_TRUE(a.sees_members(1));
    const base::Deadline stopped(milliseconds(2'600));  // 2 s end a connection
    a.sees([&](const MemberView&) { return stopped.expired(); });
    child.send(0, SIGCONT);
    ASSERT_TRUE(a.sees_members(2)) << child.output(0);
    EXPECT_GT(a.generation().members.back().id, id);
  }
}

TEST(MemberTest, TheEndpointMayHaveAnotherName) {
  MemberOptions options = options_for(1, 2, "127.0.0.1:0", true);
  options.settings.silence = milliseconds(50);
  TestAgent a(options);
  ASSERT_TRUE(a.sees_members(1));  // one that does not say that it has the state lets nobody in
  options.is_endpoint = false;
  const std::string address = a.member.address();
  options.endpoint = "localhost" + address.substr(address.rfind(':'));
  TestAgent b(options);
  ASSERT_TRUE(b.sees_members(2));
  const base::Deadline watched(milliseconds(1'500));  // an endpoint that is silent is given up after 1 s
  b.sees([&](const MemberView&) { return watched.expired(); });
  EXPECT_EQ(b.member.view().failure, "");
}

TEST(MemberTest, WhatIsSaidBeforeTheGoodbyeIsHeard) {
  const auto a = endpoint_agent(1, 3);
  ASSERT_TRUE(a->sees_members(1));
  // The thread of the member is busy while the member is closed.
  std::atomic<bool> is_slow{false}, has_begun{false};
  MemberOptions options = options_for(1, 3, a->member.address());
  options.on_change = [&] {
    if (!is_slow || has_begun.exchange(true)) return;
    base::sleep(milliseconds(200), base::Deadline::never());
  };
  TestAgent b(options);
  ASSERT_TRUE(a->sees_members(2));
  ASSERT_TRUE(b.sees_members(2));
  is_slow = true;
  const auto c = agent_for(*a, 1, 3);
  ASSERT_TRUE(test::comes_true([&] { return has_begun.load(); }));
  b.status.entered = b.member.view().record->generation.number;
  b.status.failure = "rank 1 ended with status 3";
  b.member.set_status(b.status);
  b.member.close(patience());
  ASSERT_TRUE(a->sees([&](const MemberView& view) { return view.record->generation.find(2) == nullptr; }));
  EXPECT_EQ(a->member.view().record->restarts_used, 1) << a->generation().cause;
}

TEST(MemberTest, AnAgentSpeaksForItselfAlone) {
  const auto a = endpoint_agent(1, 4);
  ASSERT_TRUE(a->sees_members(1));
  net::NodeOptions node_options;
  node_options.name = "stranger";
  net::Node node(node_options, std::make_shared<SilentHandler>());
  const auto peer = node.connect(a->member.address(), patience());
  for (const std::string& incarnation : {std::string("another"), node.incarnation()}) {
    AgentMessage message;
    message.type = AgentMessage::Type::kReport;
    message.incarnation = incarnation;
    message.address = "127.0.0.1:1";
    peer->send(net_message(message));
  }
  ASSERT_TRUE(a->sees_members(2));
  EXPECT_EQ(a->generation().members.back().incarnation, node.incarnation());
  EXPECT_EQ(a->member.view().record->find("another"), nullptr);
}

TEST(MemberTest, AnswersGoOverTheConnectionThatIsThere) {
  const auto a = endpoint_agent(1, 4);
  const auto counter = std::make_shared<AnswerCounter>();
  net::NodeOptions node_options;
  node_options.name = "another agent";
  net::Node node(node_options, counter);
  AgentMessage message;
  message.type = AgentMessage::Type::kPing;
  message.incarnation = node.incarnation();
  message.address = node.listen("127.0.0.1:0");
  const auto peer = node.connect(a->member.address(), patience());
  for (int count = 1; count <= 20; ++count) {
    peer->send(net_message(message));
    ASSERT_TRUE(test::comes_true([&] { return counter->num_answers >= count; }));
  }
  EXPECT_EQ(counter->num_answers, 20);
  EXPECT_EQ(counter->num_connections, 0);
}

TEST(MemberTest, TheDeathOfTheEndpointsAgentEndsTheRunForAll) {
  test::RankProcesses child("MemberChild", 1,
                            {{"MEMBER_ENDPOINT", "127.0.0.1:0"}, {"MEMBER_IS_ENDPOINT", "1"}});
  child.wait_for(0, ";\n");
  const std::string output = child.output(0);
  const std::size_t begin = output.find("address=") + 8;
  TestAgent b(options_for(1, 4, output.substr(begin, output.find(";\n") - begin)));
  ASSERT_TRUE(b.sees_members(2));
  EXPECT_TRUE(test::contains(output, "the run ends if this host dies"));
  child.send(0, SIGKILL);
  ASSERT_TRUE(b.sees([](const MemberView& view) { return !view.failure.empty(); }));
  EXPECT_TRUE(test::contains(b.member.view().failure, "died, and it had the run's only record"));
}

// A store that all agents reach, as etcd is.
class CommonStore {
 public:
  std::shared_ptr<RecordStore> client() { return std::make_shared<Client>(*this); }

 private:
  class Client : public RecordStore {
   public:
    explicit Client(CommonStore& store) : store_(store) {}
    void watch(Listener listener) override {
      const std::lock_guard lock(store_.mutex_);
      listener_ = listener;
      store_.listeners_.push_back(std::move(listener));
    }
    void read() override {
      const std::lock_guard lock(store_.mutex_);
      listener_({StoreAnswer::Type::kRecord, store_.revision_, store_.text_});
    }
    void compare_and_swap(std::uint64_t expected, std::string text) override {
      const std::lock_guard lock(store_.mutex_);
      if (store_.revision_ != expected) {
        return listener_({StoreAnswer::Type::kConflict, store_.revision_, store_.text_});
      }
      store_.text_ = std::move(text);
      ++store_.revision_;
      listener_({StoreAnswer::Type::kSwapped, store_.revision_, store_.text_});
      for (const Listener& listener : store_.listeners_) {
        listener({StoreAnswer::Type::kRecord, store_.revision_, store_.text_});
      }
    }

   private:
    CommonStore& store_;
    Listener listener_;
  };
  std::mutex mutex_;
  std::uint64_t revision_ = 0;
  std::string text_;
  std::vector<RecordStore::Listener> listeners_;
};

TEST(MemberTest, WithAStoreThatAllReachAnyAgentMayGo) {
  CommonStore store;
  std::vector<std::unique_ptr<TestAgent>> agents;
  for (int i = 0; i < 3; ++i) {
    MemberOptions options = options_for(1, 3, "");
    options.store = store.client();
    agents.push_back(std::make_unique<TestAgent>(options));
  }
  // All look each time: a member that has not entered its generation lets nobody in.
  ASSERT_TRUE(test::comes_true([&] {
    return std::ranges::count_if(agents, [](const auto& agent) { return agent->has_members(3); }) == 3;
  }));
  // The one that decides goes, then the next one.
  for (std::size_t left = 2; left > 0; --left) {
    // Two may decide for a while.
    std::vector<std::unique_ptr<TestAgent>>::iterator decides;
    ASSERT_TRUE(test::comes_true([&] {
      decides =
          std::ranges::find_if(agents, [](const auto& agent) { return agent->member.view().is_deciding; });
      return decides != agents.end();
    }));
    agents.erase(decides);
    for (const auto& agent : agents) ASSERT_TRUE(agent->sees_members(left));
  }
}

}  // namespace
}  // namespace cohort::membership
