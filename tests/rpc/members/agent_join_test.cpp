// Who is heard, and when: agents among processes that speak as a test says.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/net/node.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/remote_exception.h"
#include "tests/rpc/fake_worker.h"
#include "tests/rpc/job.h"
#include "tests/rpc/members/fake_member.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using test::call_message;
using test::FakeWorker;
using test::Job;
using test::JobOfFakes;
using test::patience;
using test::result_message;

std::string same_word(const std::string& word) {
  return word;
}
Promise<std::string>* awaited_word = nullptr;
Future<std::string> word_later() {
  return awaited_word->future();
}
std::mutex numbers_mutex;
std::vector<int> numbers_that_came;
void note_number(int number) {
  const std::lock_guard lock(numbers_mutex);
  numbers_that_came.push_back(number);
}
void wait_for_stop() {
  const std::stop_token stop = stop_token();
  test::wait_until([&] { return stop.stop_requested(); });
}
COHORT_REMOTE(wait_for_stop);
COHORT_REMOTE(note_number);
COHORT_REMOTE(same_word);
COHORT_REMOTE(word_later);

TEST(AgentJoinTest, OnlyTheProcessThatJoinedUnderANameIsHeardUnderIt) {
  Job job(2);
  Promise<std::string> promise;
  awaited_word = &promise;
  Future<std::string> call = job[1].rpc_async<word_later>("w0");
  const std::string address =
      test::words_of_workers(job.store(), 1, 2, "").at(1).at("address").get<std::string>();
  for (const char* name : {"w0", "w1", "w7"}) {
    FakeWorker stranger(name);
    stranger.connect(address);
    stranger.send(call_message("same_word", 9, encode_arguments<same_word>("word")));
    stranger.send(result_message(1, std::string("forged")));
    stranger.send(begin_message(MessageKind::kLeaving).take());
    EXPECT_TRUE(stranger.leave());
  }
  EXPECT_EQ(job[0].rpc_sync<same_word>("w1", "word"), "word") << "w1 has read all of that before";
  EXPECT_EQ(job[1].metrics().calls_handled, 1U);
  EXPECT_FALSE(call.ready());
  promise.set_value("true");
  EXPECT_EQ(call.get(), "true");
  job.shutdown();
}

// Neither has a secret, so its handshake says as much as that of w1.
TEST(AgentJoinTest, AStrangerThatConnectsFirstUnderAWorkersNameIsNotHeard) {
  JobOfFakes job(2, 0);
  FakeWorker stranger("w1");
  stranger.connect(job.fake(1).address(0));
  stranger.send(call_message("same_word", 1, encode_arguments<same_word>("word")));
  job.fake(1).connect(0);
  const std::unique_ptr<Agent> agent = job.agent();
  Future<std::string> call = agent->rpc_async<same_word>("w1", "word");
  stranger.send(result_message(1, std::string("forged")));
  EXPECT_TRUE(stranger.leave());
  job.fake(1).send(result_message(1, std::string("true")));
  EXPECT_EQ(call.get(patience()), "true");
  EXPECT_EQ(agent->metrics().calls_handled, 0U);
}

TEST(AgentJoinTest, ACallIsAnsweredByTheWorkerThatWasCalled) {
  JobOfFakes job(3, 0);
  job.fake(1).connect(0);
  job.fake(2).connect(0);
  const std::unique_ptr<Agent> agent = job.agent();
  Future<std::string> call = agent->rpc_async<same_word>("w1", "word");
  job.fake(2).send(result_message(1, std::string("forged")));
  Writer forged = begin_message(MessageKind::kError, 1);
  encode(forged, describe_exception(std::make_exception_ptr(DataError("test", "forged"))));
  job.fake(2).send(forged.take());
  EXPECT_TRUE(job.fake(2).leave());
  job.fake(1).send(result_message(1, std::string("true")));
  EXPECT_EQ(call.get(patience()), "true");
}

// The agent joins while messages come: those of before are being handled when the next ones arrive.
TEST(AgentJoinTest, MessagesAreHandledInOrderAcrossTheEndOfTheJoin) {
  AgentOptions options;
  options.num_threads = 1;  // handlers run in the order in which their calls were taken
  JobOfFakes job(3, 0, options);
  job.fake(1).connect(0);
  constexpr int kNumbers = 6000;
  const auto send = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      job.fake(1).send(
          call_message("note_number", static_cast<std::uint64_t>(i), encode_arguments<note_number>(i)));
    }
  };
  numbers_that_came.clear();
  send(0, kNumbers / 2);
  std::thread sender(send, kNumbers / 2, kNumbers);
  job.fake(2).connect(0);
  const std::unique_ptr<Agent> agent = job.agent();
  sender.join();
  EXPECT_TRUE(test::comes_true([&] {
    const std::lock_guard lock(numbers_mutex);
    return numbers_that_came.size() == kNumbers;
  }));
  const std::lock_guard lock(numbers_mutex);
  EXPECT_TRUE(std::is_sorted(numbers_that_came.begin(), numbers_that_came.end()));
}

struct DeafHandler : net::Handler {
  void on_message(const std::shared_ptr<net::Peer>&, net::Message) override {}
};

// A process of another job listens at the TCP address of a worker of a dynamic group.
class AgentJoinStrangerTest : public testing::Test {
 protected:
  AgentJoinStrangerTest() {
    net::NodeOptions stranger;
    stranger.name = "stranger";
    stranger.secret = base::Secret::make();
    stranger_ = std::make_unique<net::Node>(std::move(stranger), std::make_shared<DeafHandler>());
    address_ = stranger_->listen("127.0.0.1:0");
  }
  std::unique_ptr<Agent> join(const std::string& name) { return std::make_unique<Agent>(name, store_); }
  void expect_rejection_of(const std::string& name) {
    COHORT_EXPECT_THROW_WITH(join(name), RendezvousError, "the job's secret");
    EXPECT_FALSE(store_.has("rpc/dynamic/1/gone"));
  }

  test::MapStore store_;
  std::unique_ptr<net::Node> stranger_;
  std::string address_;
};

TEST_F(AgentJoinStrangerTest, KeepsNobodyOutWhereItsWorkerIsGoneAndAnotherAcceptsTheNewOne) {
  const auto first = join("w0");
  test::FakeMember dead("w1", store_);
  dead.publish(address_);
  const auto next = join("w2");
  EXPECT_TRUE(store_.has("rpc/dynamic/1/gone"));
  EXPECT_EQ(next->rpc_sync<same_word>("w0", "word"), "word");
}

TEST_F(AgentJoinStrangerTest, IsTheWorkerWhereOthersHearIt) {
  const auto first = join("w0");
  test::FakeMember running("w1", store_);
  running.join();
  running.publish(address_);
  expect_rejection_of("w2");
}

TEST_F(AgentJoinStrangerTest, IsTheWorkerWhereNobodyAcceptsTheNewOne) {
  test::FakeMember earlier("w0", store_), other("w1", store_);
  earlier.publish(address_);
  other.publish(address_);
  expect_rejection_of("w2");
}

// Its name may be one that other hosts do not know.
TEST(AgentJoinTest, AWorkerSaysByWhichAddressOtherHostsReachIt) {
  for (const std::string host : {"192.0.2.7", "2001:db8::7", "[2001:db8::7]"}) {
    test::MapStore store;
    AgentOptions options;
    options.secret = base::Secret::make();
    options.host = host;
    const Agent agent("w0", store, options);
    const std::string entry = store.get("rpc/dynamic/0/entry");
    const std::string shown = host == "192.0.2.7" ? "\"192.0.2.7:" : "\"[2001:db8::7]:";
    EXPECT_NE(entry.find(shown), std::string::npos) << entry;
  }
  test::MapStore store;
  AgentOptions options;
  options.secret = base::Secret::make();
  options.host = "node-1:29500";
  COHORT_EXPECT_THROW_WITH(Agent("w0", store, options), UsageError, "Try: one without a port");
}

TEST(AgentJoinTest, AWorkerThatLeavesDuringTheJoinIsKnownToBeGone) {
  JobOfFakes job(3, 1);
  job.fake(0).accept();  // the agent knows all workers
  job.fake(0).send(call_message("wait_for_stop", 1, encode_arguments<wait_for_stop>()));
  EXPECT_TRUE(job.fake(0).leave());
  job.fake(2).connect(1);
  const std::unique_ptr<Agent> agent = job.agent();
  EXPECT_EQ(agent->metrics().calls_handled, 1U);
  EXPECT_EQ(agent->metrics().calls_unanswered, 0U) << "its end stops its call";
  COHORT_EXPECT_THROW_WITH(agent->rpc_sync<same_word>("w0", "word"), PeerError, "w0 has left");
}

}  // namespace
}  // namespace cohort::rpc
