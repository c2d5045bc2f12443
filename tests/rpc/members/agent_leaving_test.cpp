// What a worker of a dynamic group waits for as it leaves: messages that wait for the owners of their
// references.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
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
std::size_t num_of_tensors(const RRef<at::Tensor>&, const std::vector<at::Tensor>& tensors) {
  return tensors.size();
}
std::size_t num_of_letters(const RRef<at::Tensor>&, const std::string& text) {
  return text.size();
}
std::pair<RRef<at::Tensor>, std::vector<at::Tensor>> reference_beside_tensors(const RRef<at::Tensor>& x,
                                                                              std::size_t num_tensors) {
  return {x, std::vector<at::Tensor>(num_tensors, at::ones({1}))};
}
COHORT_REMOTE(num_of_tensors);
COHORT_REMOTE(num_of_letters);
COHORT_REMOTE(reference_beside_tensors);
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

// No reference is passed on with it, so nobody waits for the one who would have it.
TEST_F(AgentLeavingTest, AMessageThatIsTooLargeIsAnErrorAndPassesNoReferenceOn) {
  const auto caller = join("w0"), callee = join("w1");
  {
    const RRef<at::Tensor> object = caller->make_rref(at::ones({2}));
    const std::vector<at::Tensor> tensors(16'001, at::ones({1}));
    const std::string text(std::size_t{64} << 20, 'x');
    COHORT_EXPECT_THROW_WITH(caller->rpc_sync<num_of_tensors>("w1", object, tensors), UsageError,
                             " to w1 has 16001 tensors, expected at most 16000");
    COHORT_EXPECT_THROW_WITH(caller->remote<num_of_tensors>("w1", object, tensors).to_here(), UsageError,
                             " to w1 has 16001 tensors");
    COHORT_EXPECT_THROW_WITH(caller->rpc_sync<num_of_letters>("w1", object, text), UsageError,
                             " bytes beside its tensors, expected at most 67108864");
    COHORT_EXPECT_THROW_WITH(caller->rpc_sync<reference_beside_tensors>("w1", object, std::size_t{16'001}),
                             UsageError, " of w0 has 16001 tensors");
  }
  caller->shutdown(patience());
  callee->shutdown(patience());
}

}  // namespace
}  // namespace cohort::rpc
