// What a worker of a dynamic group waits for as it leaves: messages that wait for the owners of their references.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/fake_member.h"
#include "tests/support/comes_true.h"
#include "tests/support/map_store.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::FakeMember;
using test::MapStore;
using test::patience;

at::Tensor twice_for_leaver(const at::Tensor& x) {
  return x * 2;
}
int takes_reference(const RRef<at::Tensor>&) {
  return 1;
}
RRef<at::Tensor> waiting_object;
std::atomic<int> num_objects_given{0};
RRef<at::Tensor> give_waiting_object() {
  ++num_objects_given;
  return std::exchange(waiting_object, {});
}
COHORT_REMOTE(twice_for_leaver);
COHORT_REMOTE(takes_reference);
COHORT_REMOTE(give_waiting_object);

class AgentLeavingTest : public testing::Test {
 protected:
  std::unique_ptr<Agent> join(const std::string& name) {
    AgentOptions options;
    options.num_threads = 2;
    return std::make_unique<Agent>(name, store, options);
  }
  MapStore store;
};

// `owner` answers nothing but that it has heard that the worker leaves.
void expect_to_wait_for_references(Agent& leaver, FakeMember& owner) {
  std::thread answers([&] {
    owner.wait_for_message();
    owner.answer(owner.message_of(MemberMessageType::kLeavingSeen));
  });
  COHORT_EXPECT_THROW_WITH(leaver.shutdown(base::Deadline(milliseconds(300))), TimeoutError,
                           "a message that is sent once the owners of its references know of them");
  answers.join();
}

// The owner of a reference confirms nothing, so what holds the reference waits.
TEST_F(AgentLeavingTest, ALeaverWaitsForARemoteCallThatWaitsForTheOwnerOfItsReference) {
  const auto leaver = join("w0"), other = join("w1");
  FakeMember owner("w2", store);
  owner.join();
  leaver->remote<takes_reference>("w1", leaver->remote<twice_for_leaver>("w2", at::ones({2})));
  expect_to_wait_for_references(*leaver, owner);
}

TEST_F(AgentLeavingTest, ALeaverWaitsForAnAnswerThatWaitsForTheOwnerOfItsReference) {
  const auto leaver = join("w0"), other = join("w1");
  FakeMember owner("w2", store);
  owner.join();
  waiting_object = leaver->remote<twice_for_leaver>("w2", at::ones({2}));
  num_objects_given = 0;
  const Future<RRef<at::Tensor>> answer = other->rpc_async<give_waiting_object>("w0");
  EXPECT_TRUE(
      test::comes_true([&] { return num_objects_given == 1 && leaver->metrics().calls_unanswered == 0; }));
  expect_to_wait_for_references(*leaver, owner);
  EXPECT_FALSE(answer.ready());
}

}  // namespace
}  // namespace cohort::rpc
