#include "cohort/parallel/comm_hook.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "tests/parallel/training.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using test::expect_near;
using test::kSteps;
using test::loss_of;
using test::make_stack;
using test::same_bits;
using test::Stack;
using test::train;
using test::train_alone;
using test::wave;

TEST(CommHookTest, HooksAreMadeByName) {
  EXPECT_FALSE(make_comm_hook("none"));
  EXPECT_TRUE(make_comm_hook("fp16"));
  COHORT_EXPECT_THROW_WITH(make_comm_hook("bf17"), UsageError,
                           "there is no communication hook 'bf17'. Try: bf16; the communication hooks are "
                           "bf16, fp16, none");
  int made = 0;
  register_comm_hook("counted", [&made] {
    ++made;
    return all_reduce_hook();
  });
  EXPECT_TRUE(make_comm_hook("counted"));
  EXPECT_EQ(made, 1);
  COHORT_EXPECT_THROW_WITH(register_comm_hook("fp16", fp16_compress_hook), UsageError, "by Cohort");
}

TEST(CommHookTest, CompressedSumsAreWhatRoundingLeaves) {
  const Stack whole = train_alone(1);
  for (const bool is_half : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      const CommHook hook = is_half ? fp16_compress_hook() : bf16_compress_hook();
      const Stack net = train(group, {.hook = hook}, 1);
      expect_near(net, whole, is_half ? 1e-3 : 1e-2);
      EXPECT_FALSE(same_bits(net, train(group, {}, 1))) << "nothing was rounded";
      EXPECT_TRUE(same_bits(net, train(group, {.gradient_as_bucket_view = false, .hook = hook}, 1)));
    });
  }
}

TEST(CommHookTest, AHookWrittenForC10dGetsThisRanksGradientAndReturnsTheMean) {
  const Stack whole = train_alone();
  for (const char* backend : {"gloo", "shm"}) {
    test::run_ranks(2, backend, [&](comm::Group& group) {
      std::size_t last = 0;
      const CommHook hook = future_hook([&](c10d::GradBucket& bucket) {
        EXPECT_EQ(bucket.getGradients().size(), bucket.getParameters().size());
        last += bucket.isLast() ? 1U : 0U;
        at::Tensor mean = bucket.getBuffer() / 2;
        std::vector<at::Tensor> tensors{mean};
        return group.process_group()->allreduce(tensors)->getFuture();
      });
      expect_near(train(group, {.first_bucket_bytes = 300, .bucket_cap_bytes = 300, .hook = hook}), whole,
                  1e-12);
      EXPECT_EQ(last, static_cast<std::size_t>(kSteps));
    });
  }
}

TEST(CommHookTest, AFutureThatNobodyCompletesEndsAtTheDeadline) {
  constexpr std::chrono::milliseconds kTime(1000);  // of the reducer's other calls too
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    Stack net = make_stack();
    const CommHook hook = future_hook(
        [](c10d::GradBucket&) { return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get()); });
    Reducer reducer(group, parameters_to_reduce(*net), {.hook = hook, .timeout = kTime});
    group.barrier();
    reducer.prepare();
    const at::Tensor loss = loss_of(net, wave(2));
    const base::Deadline waited(kTime);
    COHORT_EXPECT_THROW_WITH(loss.backward(), TimeoutError, "did not complete the future of a bucket");
    EXPECT_LT(waited.elapsed(), kTime + test::deadline_slack());
  });
}

}  // namespace
}  // namespace cohort::parallel
