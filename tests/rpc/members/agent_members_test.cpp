// Dynamic groups: workers that join a running job, and leave it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/socket.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/members/fake_member.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::FakeMember;
using test::MapStore;
using test::patience;

std::string word_of_member(const std::string& word) {
  return word;
}
std::string caller_of_member() {
  return current_call()->caller;
}
std::atomic<bool> member_may_answer{false};
int answer_when_allowed() {
  test::wait_until([] { return member_may_answer.load(); });
  return 7;
}
at::Tensor member_table;
at::Tensor row_of_member_table(std::int64_t row) {
  return member_table[row];
}
at::Tensor double_of_tensor(const at::Tensor& x) {
  return x * 2;
}
at::Tensor value_through_member(const RRef<at::Tensor>& x) {
  return x.to_here();
}
COHORT_REMOTE(word_of_member);
COHORT_REMOTE(caller_of_member);
COHORT_REMOTE(answer_when_allowed);
COHORT_REMOTE(row_of_member_table);
COHORT_REMOTE(double_of_tensor);
COHORT_REMOTE(value_through_member);
RRef<at::Tensor> object_of_leaver;
RRef<at::Tensor> give_object_of_leaver() {
  return std::exchange(object_of_leaver, {});
}
COHORT_REMOTE(give_object_of_leaver);

std::vector<std::string> names_of_members(const Agent& agent, const std::string& pattern = "*") {
  std::vector<std::string> names;
  for (const WorkerInfo& worker : agent.workers(pattern)) names.push_back(worker.name);
  return names;
}
using MemberNames = std::vector<std::string>;

class AgentMembersTest : public testing::Test {
 protected:
  AgentMembersTest() {
    options.num_threads = 2;
    options.silence = milliseconds(1000);
    member_may_answer = false;
  }
  std::unique_ptr<Agent> join(const std::string& name) {
    return std::make_unique<Agent>(name, store, options);
  }
  // Worker 0 hears one whose address is of no use to a third one.
  void expect_not_to_be_skipped(const std::string& address) {
    const auto first = join("w0");
    FakeMember cut_off("w1", store);
    cut_off.join();
    cut_off.publish(address);
    options.silence = milliseconds(400);
    options.join_timeout = milliseconds(700);
    COHORT_EXPECT_THROW_WITH(join("w2"), RendezvousError, "w1 (worker 1)");
    EXPECT_FALSE(store.has("rpc/dynamic/1/gone"));
  }
  MapStore store;
  AgentOptions options;
};

TEST_F(AgentMembersTest, WorkersJoinAndLeaveWhileOthersRun) {
  const auto first = join("ps/0");
  EXPECT_EQ(first->self(), (WorkerInfo{"ps/0", 0}));
  EXPECT_EQ(first->rpc_sync<word_of_member>("ps/0", "alone"), "alone");
  for (int round = 0; round < 3; ++round) {
    const auto second = join("trainer/1");
    EXPECT_EQ(names_of_members(*first), (MemberNames{"ps/0", "trainer/1"})) << round;
    EXPECT_EQ(names_of_members(*second, "ps/*"), MemberNames{"ps/0"}) << round;
    second->shutdown(patience());
    EXPECT_TRUE(test::comes_true([&] { return names_of_members(*first) == MemberNames{"ps/0"}; })) << round;
  }
  EXPECT_TRUE(test::comes_true([&] { return first->metrics().traffic.empty(); }));
  first->shutdown(patience());
  join("ps/0")->shutdown(patience());  // nobody of the group is left
}

TEST_F(AgentMembersTest, ANewWorkerCallsAnEarlierOneAndIsCalled) {
  const auto first = join("w0"), second = join("w1");
  EXPECT_EQ(second->rpc_sync<word_of_member>("w0", "up"), "up");
  EXPECT_EQ(first->rpc_sync<word_of_member>("w1", "down"), "down");
  EXPECT_EQ(first->rpc_sync<word_of_member>(second->self().id, "by id"), "by id");
  EXPECT_EQ(first->rpc_sync<caller_of_member>("w1"), "w0");
  COHORT_EXPECT_THROW_WITH(first->rpc_sync<word_of_member>("w2", ""), UsageError,
                           "there is no worker 'w2'; the workers are w0, w1");
  const auto third = join("w2");
  for (const std::unique_ptr<Agent>& agent : {std::cref(first), std::cref(second), std::cref(third)}) {
    for (const char* worker : {"w0", "w1", "w2"}) {
      EXPECT_EQ(agent->rpc_sync<word_of_member>(worker, worker), worker);
    }
  }
}

TEST_F(AgentMembersTest, EightWorkersJoinAtTheSameTime) {
  constexpr int kWorkers = 8;
  std::vector<std::unique_ptr<Agent>> agents(kWorkers);
  std::vector<std::thread> threads;
  for (int i = 0; i < kWorkers; ++i) {
    threads.emplace_back([&, i] {
      agents[static_cast<std::size_t>(i)] = join("w" + std::to_string(i));
      Agent& agent = *agents[static_cast<std::size_t>(i)];
      for (const WorkerInfo& worker : agent.workers()) {
        EXPECT_EQ(agent.rpc_sync<word_of_member>(worker, worker.name), worker.name);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& agent : agents) {
    EXPECT_EQ(agent->workers().size(), std::size_t{kWorkers}) << agent->self().name;
    for (const WorkerInfo& worker : agent->workers()) {
      EXPECT_EQ(agent->rpc_sync<word_of_member>(worker, worker.name), worker.name);
    }
  }
  threads.clear();
  for (const auto& agent : agents) threads.emplace_back([&agent] { agent->shutdown(patience()); });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(AgentMembersTest, ANameIsTakenUntilItsWorkerIsGone) {
  const auto first = join("trainer/0");
  auto server = join("ps/0");
  COHORT_EXPECT_THROW_WITH(join("ps/0"), UsageError, "ps/0 cannot join: 'ps/0' is the name of worker 1");
  COHORT_EXPECT_THROW_WITH(join("trainer/0"), UsageError, "'trainer/0' is the name of worker 0");
  EXPECT_EQ(names_of_members(*first), (MemberNames{"trainer/0", "ps/0"}));
  const RRef<at::Tensor> object = first->remote<double_of_tensor>("ps/0", at::ones({2}));
  EXPECT_EQ(object.to_here().sum().item<float>(), 4);
  server.reset();  // a death
  server = join("ps/0");
  EXPECT_GT(server->self().id, 1);
  EXPECT_EQ(names_of_members(*first), (MemberNames{"trainer/0", "ps/0"}));
  EXPECT_EQ(first->rpc_sync<word_of_member>("ps/0", "again"), "again");
  EXPECT_EQ(server->metrics().calls_handled, 1U) << "the new worker has answered it";
  EXPECT_EQ(server->rpc_sync<word_of_member>("trainer/0", "back"), "back");
  EXPECT_THROW(object.to_here(), OwnerLostError) << "the object has not moved";
  const std::string name_of_first = server->rpc_sync<caller_of_member>("trainer/0");
  const auto late = join("trainer/1");  // which knows no earlier worker of that name
  EXPECT_EQ(name_of_first, "ps/0#" + std::to_string(server->self().id));
  EXPECT_EQ(late->rpc_sync<word_of_member>(name_of_first, "passed on"), "passed on");
  server->shutdown(patience());
  EXPECT_THROW(first->rpc_sync<word_of_member>("ps/0", ""), PeerError);
}

TEST_F(AgentMembersTest, OfTwoThatJoinUnderOneNameOneIsRejected) {
  const auto first = join("w0");
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> num_rejected{0};
    std::vector<std::unique_ptr<Agent>> agents(2);
    std::vector<std::thread> threads;
    for (auto& agent : agents) {
      threads.emplace_back([&] {
        try {
          agent = join("ps/0");
        } catch (const UsageError&) {
          ++num_rejected;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(num_rejected, 1) << round;
    EXPECT_EQ(first->rpc_sync<word_of_member>("ps/0", "word"), "word") << round;
    for (auto& agent : agents) {
      if (agent != nullptr) agent->shutdown(patience());
    }
  }
}

TEST_F(AgentMembersTest, ShutdownWaitsForTheCallsOfThisWorkerAndThoseToIt) {
  const auto first = join("w0"), second = join("w1"), third = join("w2");
  Future<int> of_leaver = second->rpc_async<answer_when_allowed>("w0"),
              to_leaver = first->rpc_async<answer_when_allowed>("w1");
  COHORT_EXPECT_THROW_WITH(second->shutdown(base::Deadline(milliseconds(100))), TimeoutError,
                           "answer_when_allowed on w0, call ");
  EXPECT_TRUE(test::comes_true([&] {  // it has taken that back
    try {
      return first->rpc_sync<word_of_member>("w1", "word") == "word";
    } catch (const PeerError&) {
      return false;
    }
  }));
  std::thread leaver([&] { second->shutdown(patience()); });
  EXPECT_TRUE(test::comes_true([&] { return names_of_members(*third) == (MemberNames{"w0", "w2"}); }));
  COHORT_EXPECT_THROW_WITH(third->rpc_sync<word_of_member>(1, "word"), PeerError, "w1 is leaving");
  COHORT_EXPECT_THROW_WITH(third->remote<word_of_member>(1, "word").to_here(), PeerError, "w1 is leaving");
  EXPECT_FALSE(to_leaver.ready());
  const auto fourth = join("w3");  // others join meanwhile
  EXPECT_EQ(fourth->rpc_sync<word_of_member>("w2", "word"), "word");
  member_may_answer = true;
  EXPECT_EQ(to_leaver.get(patience()), 7);
  EXPECT_EQ(of_leaver.get(patience()), 7);
  leaver.join();
}

// It is not sent, so the context must not count it: the end of the context would wait for it.
TEST_F(AgentMembersTest, ACallOfALeaverIsNotCountedInItsContext) {
  const auto caller = join("w0"), leaver = join("w1");
  const Future<int> unanswered = leaver->rpc_async<answer_when_allowed>("w0");
  const at::Tensor x = at::ones({3}).requires_grad_();
  std::thread leaves;
  {
    dist_autograd::Context context(*caller);
    EXPECT_TRUE(caller->rpc_sync<double_of_tensor>("w1", x).requires_grad());
    leaves = std::thread(
        [&] { EXPECT_THROW(leaver->shutdown(base::Deadline(milliseconds(1'000))), TimeoutError); });
    EXPECT_TRUE(test::comes_true([&] { return names_of_members(*caller) == MemberNames{"w0"}; }));
    COHORT_EXPECT_THROW_WITH(caller->rpc_sync<double_of_tensor>(1, x), PeerError, "w1 is leaving");
    const RRef<at::Tensor> object = caller->remote<double_of_tensor>(1, x);
    COHORT_EXPECT_THROW_WITH(object.to_here(), PeerError, "w1 is leaving");
    leaves.join();
    EXPECT_TRUE(test::comes_true([&] { return names_of_members(*caller).size() == 2; })) << "it has stayed";
    dist_autograd::backward(context, {caller->rpc_sync<double_of_tensor>("w1", x).sum()});
  }
  // The end of the context comes first.
  EXPECT_EQ(caller->rpc_sync<word_of_member>("w1", "word"), "word");
  EXPECT_EQ(leaver->metrics().contexts, 0U);
  member_may_answer = true;
  leaver->shutdown(patience());
}

TEST_F(AgentMembersTest, AReferenceThatALeaverPassesOnStays) {
  const auto owner = join("w0"), leaver = join("w1"), holder = join("w2");
  object_of_leaver = leaver->remote<double_of_tensor>("w0", at::ones({3}));
  {
    const RRef<at::Tensor> object = leaver->remote<double_of_tensor>("w0", at::ones({2}));
    EXPECT_EQ(leaver->rpc_sync<value_through_member>("w2", object).sum().item<float>(), 4);
  }
  const RRef<at::Tensor> kept = holder->rpc_sync<give_object_of_leaver>("w1");
  leaver->shutdown(patience());
  EXPECT_EQ(kept.to_here().sum().item<float>(), 6);
  EXPECT_TRUE(test::comes_true([&] { return owner->metrics().objects.size() == 1; })) << "its own are freed";
}

TEST_F(AgentMembersTest, ALeaverWaitsUntilOwnersKnowOfReferencesThatItHasPassedOn) {
  const auto leaver = join("w0"), owner = join("w1");
  FakeMember holder("w2", store);  // which tells the owner nothing
  holder.join();
  const RRef<at::Tensor> object = leaver->remote<double_of_tensor>("w1", at::ones({2}));
  EXPECT_EQ(object.to_here().sum().item<float>(), 4);
  EXPECT_THROW(leaver->rpc_sync<value_through_member>(to("w2").within(milliseconds(100)), object),
               TimeoutError);
  std::thread answers([&] {
    holder.wait_for_message();
    holder.answer(holder.message_of(MemberMessageType::kLeavingSeen));
  });
  COHORT_EXPECT_THROW_WITH(leaver->shutdown(base::Deadline(milliseconds(300))), TimeoutError,
                           "owners of references that this worker has passed on");
  answers.join();
}

TEST_F(AgentMembersTest, GradientsGoThroughAWorkerThatCameLater) {
  member_table = at::arange(6, at::kFloat).view({2, 3}).requires_grad_();
  const auto trainer = join("trainer");
  {
    dist_autograd::Context context(*trainer);
    const auto server = join("server");
    const at::Tensor row = trainer->rpc_sync<row_of_member_table>("server", std::int64_t{1});
    const at::Tensor x = at::ones({3}).requires_grad_();
    dist_autograd::backward(context, {(row * trainer->rpc_sync<double_of_tensor>("server", x)).sum()});
    const dist_autograd::Gradients gradients = dist_autograd::get_gradients(context);
    ASSERT_EQ(gradients.size(), 1U);
    EXPECT_TRUE(at::equal(gradients[0].second, at::tensor({6.F, 8.F, 10.F})));
    server->shutdown(patience());
  }
  EXPECT_TRUE(test::comes_true([&] { return trainer->metrics().contexts == 0; }));
  member_table.reset();
}

TEST_F(AgentMembersTest, TheSignaturesOfALateWorkerAreCompared) {
  const auto first = join("w0");
  std::map<std::string, std::string> functions = all_signatures();
  functions["word_of_member"] = "word_of_member(Tensor) -> Tensor";
  functions.erase("double_of_tensor");
  FakeMember late("w1", store, functions);
  late.join();
  COHORT_EXPECT_THROW_WITH(first->rpc_sync<word_of_member>("w1", ""), UsageError,
                           "w1 has another function word_of_member");
  COHORT_EXPECT_THROW_WITH(first->rpc_sync<double_of_tensor>("w1", at::ones({1})), UsageError,
                           "w1 has no function double_of_tensor");
}

TEST_F(AgentMembersTest, WhoHasNotReadTheStoreIsNotHeard) {
  const auto first = join("w0");
  FakeMember stranger("w1", store);
  stranger.connect_to(0);
  MemberMessage join_message = stranger.join_message(0);
  join_message.ticket = "guessed";
  stranger.send(0, join_message);
  EXPECT_EQ(stranger.wait_for_message().type, MemberMessageType::kRejected);
  stranger.send(0, stranger.message_of(MemberMessageType::kReady));
  stranger.send(0, join_message);
  EXPECT_EQ(stranger.wait_for_message().type, MemberMessageType::kRejected) << "it has come after kReady";
  EXPECT_EQ(names_of_members(*first), MemberNames{"w0"});
}

TEST_F(AgentMembersTest, AWorkerThatDiesInTheMiddleOfItsJoinIsSkipped) {
  const auto first = join("w0");
  EXPECT_EQ(claim_worker_id(store), 1);  // and dies
  {
    FakeMember dies("w2", store);
    dies.publish();  // and dies
  }
  {
    FakeMember dies("w3", store);
    dies.publish();
    dies.connect_to(0);
    dies.send(0, dies.join_message(0));
    EXPECT_EQ(dies.wait_for_message().type, MemberMessageType::kAccepted);
    EXPECT_EQ(names_of_members(*first), MemberNames{"w0"}) << "it is not ready";
  }
  const auto next = join("w3");
  EXPECT_EQ(names_of_members(*next), (MemberNames{"w0", "w3"}));
  EXPECT_EQ(first->rpc_sync<word_of_member>("w3", "word"), "word");
  const std::int64_t before = store.num_requests();
  const auto last = join("w4");
  EXPECT_LT(store.num_requests() - before, 25) << "nobody waits for the dead again";
  EXPECT_EQ(names_of_members(*last), (MemberNames{"w0", "w3", "w4"}));
}

TEST_F(AgentMembersTest, AWorkerWithAnotherSecretDoesNotJoinAndTakesNobodyForDead) {
  options.listen = "127.0.0.1:0";
  options.secret = base::Secret::make();
  const auto first = join("w0"), second = join("w1");
  const auto secret = std::exchange(options.secret, base::Secret::make());
  COHORT_EXPECT_THROW_WITH(join("w2"), RendezvousError, "does not know the job's secret");
  options.secret = secret;
  const auto next = join("w2");
  EXPECT_EQ(names_of_members(*next), (MemberNames{"w0", "w1", "w2"}));
}

// Where connections are never answered, as those to a host that is off.
struct UnansweredAddress {
  std::string address;
  base::Fd listener = net::listen_at(net::resolve("127.0.0.1:0"), address);
};
MemberMessage accepted_by_member(std::vector<std::int32_t> live, std::vector<std::int32_t> gone) {
  MemberMessage message;
  message.type = MemberMessageType::kAccepted;
  message.live = std::move(live);
  message.gone = std::move(gone);
  message.is_ready = true;
  return message;
}

TEST_F(AgentMembersTest, AWorkerThatOnlyTheNewOneCannotReachIsNotSkipped) {
  const auto first = join("w0");
  const UnansweredAddress unanswered;
  FakeMember cut_off("w1", store);
  cut_off.join();
  cut_off.publish(unanswered.address);
  options.silence = milliseconds(400);
  options.join_timeout = milliseconds(700);
  COHORT_EXPECT_THROW_WITH(join("w2"), RendezvousError, "w1 (worker 1)");
  EXPECT_FALSE(store.has("rpc/dynamic/1/gone"));
}

// At which nobody listens.
std::string rejected_address() {
  std::string address;
  net::listen_at(net::resolve("127.0.0.1:0"), address);
  return address;
}
constexpr const char* kUnresolved = "no..host:1";

TEST_F(AgentMembersTest, AWorkerWhoseTcpAddressRejectsIsNotSkippedWhileOthersHearIt) {
  expect_not_to_be_skipped(rejected_address());
}

TEST_F(AgentMembersTest, AWorkerWhoseHostHasNoAddressIsNotSkippedWhileOthersHearIt) {
  expect_not_to_be_skipped(kUnresolved);
}

TEST_F(AgentMembersTest, AWorkerWhoseAddressIsRejectedOrUnknownIsSkippedWhereNobodyHearsIt) {
  options.silence = milliseconds(400);
  for (const std::string& address : {rejected_address(), std::string(kUnresolved)}) {
    FakeMember dead("w0", store);
    dead.publish(address);
  }
  const auto first = join("w1"), second = join("w2");
  EXPECT_EQ(names_of_members(*second), (MemberNames{"w1", "w2"}));
  EXPECT_TRUE(store.has("rpc/dynamic/0/gone"));
  EXPECT_TRUE(store.has("rpc/dynamic/1/gone"));
}

TEST_F(AgentMembersTest, AJoinWaitsUntilOthersHaveSeenADeath) {
  const UnansweredAddress unanswered;
  FakeMember dead("w0", store), live("w1", store);
  dead.publish(unanswered.address);
  live.publish();
  std::future<std::unique_ptr<Agent>> joined = std::async(std::launch::async, [&] { return join("w2"); });
  for (const MemberMessage& answer : {accepted_by_member({0}, {}), accepted_by_member({}, {0})}) {
    EXPECT_EQ(live.wait_for_message().type, MemberMessageType::kJoin);
    live.answer(answer);
  }
  EXPECT_EQ(live.wait_for_message().type, MemberMessageType::kReady);
  live.answer(live.message_of(MemberMessageType::kKnown));
  const std::unique_ptr<Agent> agent = joined.get();
  EXPECT_EQ(agent->self().id, 3) << "it has joined again";
  EXPECT_EQ(names_of_members(*agent), (MemberNames{"w1", "w2"}));
}

TEST_F(AgentMembersTest, AWorkerThatWasStoppedAndRunsAgainIsNotTakenForDead) {
  const UnansweredAddress unanswered;
  FakeMember stopped("w0", store);
  stopped.publish(unanswered.address);
  std::future<std::unique_ptr<Agent>> joined = std::async(std::launch::async, [&] { return join("w1"); });
  test::wait_until([&] { return base::ready_events(unanswered.listener.get(), POLLIN) != 0; });
  stopped.publish();  // it answers the next attempt
  EXPECT_EQ(stopped.wait_for_message().type, MemberMessageType::kJoin);
  stopped.answer(accepted_by_member({}, {}));
  EXPECT_EQ(stopped.wait_for_message().type, MemberMessageType::kReady);
  stopped.answer(stopped.message_of(MemberMessageType::kKnown));
  const std::unique_ptr<Agent> agent = joined.get();
  EXPECT_EQ(agent->self().id, 2) << "it has joined again";
  EXPECT_EQ(names_of_members(*agent), (MemberNames{"w0", "w1"}));
  EXPECT_FALSE(store.has("rpc/dynamic/0/gone"));
}

TEST_F(AgentMembersTest, AWorkerThatOneHasGivenUpIsJoinedIfAnotherHearsIt) {
  const auto first = join("w0");
  FakeMember hears("w1", store), has_given_up("w2", store);
  hears.publish();
  has_given_up.publish();
  std::future<std::unique_ptr<Agent>> joined = std::async(std::launch::async, [&] { return join("w3"); });
  EXPECT_EQ(has_given_up.wait_for_message().type, MemberMessageType::kJoin);
  has_given_up.answer(accepted_by_member({}, {0}));
  EXPECT_EQ(hears.wait_for_message().type, MemberMessageType::kJoin);
  hears.answer(accepted_by_member({0}, {}));
  for (FakeMember* const member : {&hears, &has_given_up}) {
    EXPECT_EQ(member->wait_for_message().type, MemberMessageType::kReady);
    member->answer(member->message_of(MemberMessageType::kKnown));
  }
  const std::unique_ptr<Agent> agent = joined.get();
  EXPECT_EQ(names_of_members(*agent), (MemberNames{"w0", "w1", "w2", "w3"}));
  EXPECT_EQ(names_of_members(*first), (MemberNames{"w0", "w3"}));
}

TEST_F(AgentMembersTest, AWorkerWhoseIdOthersHaveGivenUpTakesAnotherOne) {
  store.add("rpc/dynamic/0/claims", 1);
  const auto agent = join("w0");
  EXPECT_EQ(agent->self().id, 1);
  EXPECT_EQ(agent->rpc_sync<word_of_member>("w0", "word"), "word");
}

TEST_F(AgentMembersTest, AWorkerThatOthersHaveJoinedWithoutTakesAnotherId) {
  store.set("rpc/dynamic/0/gone", "1");
  EXPECT_EQ(join("w0")->self().id, 1);
}

TEST_F(AgentMembersTest, AJoinEndsAtItsDeadlineAndNamesWhoDoesNotAnswer) {
  FakeMember silent("w0", store);
  silent.publish();
  options.join_timeout = milliseconds(300);
  COHORT_EXPECT_THROW_WITH(join("w1"), RendezvousError, "w0 (worker 0) did not answer within 300 ms");
}

TEST_F(AgentMembersTest, StaticAndDynamicGroupsDoNotMix) {
  options.join_timeout = milliseconds(300);
  const auto first = join("w0");
  COHORT_EXPECT_THROW_WITH(Agent("w1", 0, 1, store, options), UsageError,
                           "this store has a dynamic group, and static and dynamic groups do not mix");
  MapStore of_static;
  const Agent alone("w0", 0, 1, of_static, options);
  COHORT_EXPECT_THROW_WITH(Agent("w1", of_static, options), UsageError, "this store has a static group");
}

}  // namespace
}  // namespace cohort::rpc
