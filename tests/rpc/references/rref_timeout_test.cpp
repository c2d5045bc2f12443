// Objects that are not made, or not in time.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::comes_true;
using test::Job;

test::Gate* object_gate = nullptr;
std::atomic<int> num_at_gate{0}, num_past_gate{0};
void wait_at_object_gate() {
  ++num_at_gate;
  object_gate->wait();
  ++num_past_gate;
}
at::Tensor ones_after_gate() {
  wait_at_object_gate();
  return at::ones({2});
}
at::Tensor negated(const at::Tensor& x) {
  return -x;
}
at::Tensor double_of(const RRef<at::Tensor>& x) {
  return x.to_here() * 2;
}
bool is_confirmed_here(const RRef<at::Tensor>& x) {
  return x.confirmed_by_owner();
}
class SlowBox {
 public:
  int number() const { return 7; }
  int number_after_gate() const {
    wait_at_object_gate();
    return 8;
  }
};
std::shared_ptr<SlowBox> make_box() {
  return std::make_shared<SlowBox>();
}
std::shared_ptr<SlowBox> make_box_after_gate() {
  wait_at_object_gate();
  return std::make_shared<SlowBox>();
}

// Answers once the test has set it, and holds no thread meanwhile.
std::unique_ptr<Promise<at::Tensor>> promised_tensor;
Future<at::Tensor> tensor_of_promise() {
  return promised_tensor->future();
}
std::atomic<int> num_in_value{0};
at::Tensor value_on_owner(const RRef<at::Tensor>& x) {
  ++num_in_value;
  return *x.local_value();
}

COHORT_REMOTE(tensor_of_promise);
COHORT_REMOTE(value_on_owner);
COHORT_REMOTE(ones_after_gate);
COHORT_REMOTE(negated);
COHORT_REMOTE(double_of);
COHORT_REMOTE(is_confirmed_here);
COHORT_REMOTE(make_box);
COHORT_REMOTE(make_box_after_gate);
COHORT_REMOTE(SlowBox::number);
COHORT_REMOTE(SlowBox::number_after_gate);

class RRefTimeoutTest : public testing::Test {
 protected:
  RRefTimeoutTest() {
    object_gate = &gate;
    num_at_gate = num_past_gate = 0;
  }
  // Opens the gate, and ends the agents while the gate is there.
  void finish() {
    gate.open();
    EXPECT_TRUE(comes_true([this] {
      std::size_t left = 0;
      for (std::size_t id = 0; id < 3; ++id) {
        const AgentMetrics metrics = job[id].metrics();
        left += metrics.calls_unanswered + metrics.references + metrics.objects.size();
      }
      return left == 0;
    }));
    job.shutdown();
  }
  test::Gate gate;
  Job job{3};
};

// Also on the caller's own worker, where nothing is sent.
TEST_F(RRefTimeoutTest, AnObjectThatTakesLongerThanItsTimeIsAnError) {
  for (const char* worker : {"w1", "w0"}) {
    num_at_gate = 0;
    const auto begin = std::chrono::steady_clock::now();
    const RRef<at::Tensor> late = job[0].remote<ones_after_gate>(to(worker).within(milliseconds(200)));
    EXPECT_TRUE(comes_true([] { return num_at_gate == 1; }));
    COHORT_EXPECT_THROW_WITH(late.to_here(), TimeoutError, "ones_after_gate was not done in time");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(200) + test::deadline_slack());
    COHORT_EXPECT_THROW_WITH(late.when_made().get(), TimeoutError, "was not done in time");
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<double_of>("w2", late), TimeoutError, "was not done in time");
    if (late.is_owner()) {
      COHORT_EXPECT_THROW_WITH(late.local_value(), TimeoutError, "was not done in time");
    }
  }
  finish();
}

TEST_F(RRefTimeoutTest, WhatComesAfterTheTimeIsDropped) {
  {
    const RRef<at::Tensor> late = job[0].remote<ones_after_gate>(to("w1").within(milliseconds(100)));
    EXPECT_THROW(late.to_here(), TimeoutError);
    gate.open();
    EXPECT_TRUE(comes_true([] { return num_past_gate == 1; }));
    for (int i = 0; i < 50; ++i) {
      EXPECT_THROW(late.to_here(), TimeoutError);
      EXPECT_THROW(late.when_made().get(), TimeoutError);
    }
  }
  finish();
}

TEST_F(RRefTimeoutTest, AReferenceToAnObjectThatCannotBeMadeGivesItsError) {
  {
    const at::Tensor no_memory = at::empty({2}, at::TensorOptions(at::kMeta));
    for (const char* worker : {"w1", "w0"}) {
      const RRef<at::Tensor> none = job[0].remote<negated>(worker, no_memory);
      COHORT_EXPECT_THROW_WITH(none.to_here(), UsageError, "cannot travel");
      COHORT_EXPECT_THROW_WITH(none.when_made().get(), UsageError, "cannot travel");
      for (const char* other : {"w0", "w1", "w2"}) {
        COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<double_of>(other, none), UsageError, "cannot travel");
        COHORT_EXPECT_THROW_WITH(job[0].rpc_async<double_of>(other, none).get(), UsageError, "cannot travel");
        COHORT_EXPECT_THROW_WITH(job[0].remote<double_of>(other, none).to_here(), UsageError,
                                 "cannot travel");
      }
    }
  }
  finish();
}

TEST_F(RRefTimeoutTest, AFunctionOfAnObjectHasATimeOfItsOwn) {
  {
    const RRef<SlowBox> box = job[0].remote<make_box>("w1"), soon = box.within(milliseconds(100));
    EXPECT_EQ(box.rpc_sync<&SlowBox::number>(), 7);
    COHORT_EXPECT_THROW_WITH(soon.rpc_sync<&SlowBox::number_after_gate>(), TimeoutError,
                             "no answer within 100 ms");
    COHORT_EXPECT_THROW_WITH(soon.rpc_async<&SlowBox::number_after_gate>().get(), TimeoutError,
                             "no answer within 100 ms");
    COHORT_EXPECT_THROW_WITH(soon.remote<&SlowBox::number_after_gate>().to_here(), TimeoutError,
                             "was not done in time");
  }
  finish();
}

TEST_F(RRefTimeoutTest, AFunctionOfAnObjectThatIsNotMadeYetHasATimeToo) {
  {
    const RRef<SlowBox> box = job[0].remote<make_box_after_gate>("w1"), soon = box.within(milliseconds(100));
    EXPECT_THROW(soon.rpc_sync<&SlowBox::number>(), TimeoutError);
    EXPECT_THROW(soon.rpc_async<&SlowBox::number>().get(), TimeoutError);
    EXPECT_THROW(soon.remote<&SlowBox::number>().to_here(), TimeoutError);
    gate.open();
    EXPECT_EQ(box.rpc_sync<&SlowBox::number>(), 7);
  }
  finish();
}

TEST_F(RRefTimeoutTest, AFutureTellsWhenAnObjectIsMade) {
  {
    const RRef<SlowBox> box = job[0].remote<make_box_after_gate>("w1");
    const Future<void> made = box.when_made();
    EXPECT_TRUE(comes_true([] { return num_at_gate == 1; }));
    EXPECT_FALSE(made.ready());
    COHORT_EXPECT_THROW_WITH(box.within(milliseconds(50)).when_made().get(), TimeoutError,
                             "no answer within 50 ms");
    gate.open();
    Future<void>(made).get();
    job[0].make_rref(at::ones({2})).when_made().get();
    COHORT_EXPECT_THROW_WITH(RRef<SlowBox>().when_made(), UsageError, "an empty RRef");
    EXPECT_EQ(box.describe().find("object 0."), 0U) << box.describe();
    EXPECT_NE(box.describe().find(" of w1"), std::string::npos) << box.describe();
  }
  finish();
}

TEST_F(RRefTimeoutTest, AReferenceThatArrivesIsConfirmed) {
  {
    const RRef<at::Tensor> here = job[0].make_rref(at::ones({2}));
    EXPECT_TRUE(here.confirmed_by_owner());
    for (const char* owner : {"w0", "w1"}) {
      for (const char* worker : {"w0", "w1", "w2"}) {
        EXPECT_TRUE(job[0].rpc_sync<is_confirmed_here>(worker, job[0].remote<negated>(owner, at::ones({2}))));
        EXPECT_TRUE(
            job[0].remote<is_confirmed_here>(worker, job[0].remote<negated>(owner, at::ones({2}))).to_here());
      }
      EXPECT_TRUE(job[0].rpc_sync<is_confirmed_here>(owner, here));
    }
  }
  finish();
}

// The call that the handler answers has no deadline, so the handler has the agent's.
TEST_F(RRefTimeoutTest, AHandlerWithoutADeadlineWaitsForAnObjectForTheAgentsTimeout) {
  promised_tensor = std::make_unique<Promise<at::Tensor>>();
  {
    const RRef<at::Tensor> never = job[0].remote<tensor_of_promise>(to("w1").within(milliseconds(0)));
    job[1].set_timeout(milliseconds(200));
    const auto begin = std::chrono::steady_clock::now();
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<value_on_owner>(to("w1").within(milliseconds(0)), never),
                             TimeoutError, "the value of a remote object");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(200) + test::deadline_slack());
    promised_tensor->set_value(at::ones({2}));
  }
  finish();
}

// Its pool gives threads that run on five seconds.
TEST(RRefTimeoutStopTest, AnAgentThatStopsLeavesNoHandlerThatWaitsForAnObject) {
  promised_tensor = std::make_unique<Promise<at::Tensor>>();
  num_in_value = 0;
  Job job(2);
  const RRef<at::Tensor> never = job[0].remote<tensor_of_promise>(to("w1").within(milliseconds(0)));
  const Future<at::Tensor> value = job[0].rpc_async<value_on_owner>(to("w1").within(milliseconds(0)), never);
  EXPECT_TRUE(comes_true([] { return num_in_value == 1; }));
  const auto begin = std::chrono::steady_clock::now();
  job.drop(1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1000) + test::deadline_slack());
  EXPECT_THROW(Future<at::Tensor>(value).get(), PeerError);
  promised_tensor.reset();
}

}  // namespace
}  // namespace cohort::rpc
