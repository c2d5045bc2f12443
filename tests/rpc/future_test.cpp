#include "cohort/rpc/future.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/internal/caller_state.h"
#include "tests/rpc/job.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::agent_of;
using test::Job;

base::Deadline soon() {
  return base::Deadline(seconds(20));
}

at::Tensor sum_of_two(const at::Tensor& a, const at::Tensor& b) {
  return a + b;
}
int throws_data_error() {
  throw DataError("test.future", "there is no number");
}
test::Gate* gate_of_future = nullptr;
int number_at_gate() {
  gate_of_future->wait();
  return 1;
}
int same_number(int number) {
  return number;
}
// Waits for a function of then().
at::Tensor waits_for_what_follows(const std::string& here, const std::string& there, const at::Tensor& x) {
  return agent_of(here)
      .rpc_async<sum_of_two>(there, x, x)
      .then([](Future<at::Tensor> sum) { return sum.get() + 2; })
      .get();
}

COHORT_REMOTE(sum_of_two);
COHORT_REMOTE(throws_data_error);
COHORT_REMOTE(number_at_gate);
COHORT_REMOTE(same_number);
COHORT_REMOTE(waits_for_what_follows);

TEST(RpcFutureTest, AResultFollowsFromAResult) {
  Promise<int> promise;
  Future<int> number = promise.future();
  Future<std::string> text = number.then([](Future<int> x) { return std::to_string(x.get()) + "!"; });
  std::atomic<int> seen{0};
  Future<void> nothing = number.then([&](Future<int> x) { seen = x.get(); });
  EXPECT_FALSE(text.ready());
  promise.set_value(7);
  EXPECT_EQ(text.get(soon()), "7!");
  nothing.get(soon());
  EXPECT_EQ(seen, 7);
  Future<int> copy = number;
  EXPECT_EQ(number.get(soon()), 7) << "what functions of then() got is their own";
  EXPECT_EQ(copy.get(soon()), 7);
  COHORT_EXPECT_THROW_WITH(copy.get(soon()), UsageError, "it was taken before");
  EXPECT_EQ(promise.future().then([](Future<int> x) { return x.get() + 1; }).get(soon()), 8)
      << "it is there already";
}

TEST(RpcFutureTest, FunctionsMayStandInARow) {
  Promise<at::Tensor> promise;
  Future<at::Tensor> sum = promise.future();
  for (int i = 0; i < 20; ++i) {
    sum = sum.then([](Future<at::Tensor> x) { return x.get() + 1; });
  }
  promise.set_value(at::ones({2}));
  EXPECT_TRUE(at::equal(sum.get(soon()), at::full({2}, 21.0)));
}

TEST(RpcFutureTest, AFunctionGetsTheErrorAndMayThrowAnother) {
  Promise<int> promise;
  const Future<int> number = promise.future();
  Future<int> same = number.then([](Future<int> x) { return x.get() + 1; }),
              cured = number.then([](Future<int> x) {
                EXPECT_THROW(x.get(), std::out_of_range);
                return 3;
              }),
              other = number.then([](Future<int> x) -> int {
                EXPECT_THROW(x.get(), std::out_of_range);
                throw DataError("test.future", "another error");
              });
  promise.set_error(std::make_exception_ptr(std::out_of_range("far")));
  COHORT_EXPECT_THROW_WITH(same.get(soon()), std::out_of_range, "far");
  EXPECT_EQ(cured.get(soon()), 3);
  COHORT_EXPECT_THROW_WITH(other.get(soon()), DataError, "another error");
}

TEST(RpcFutureTest, AFunctionThatReturnsAFutureGivesItsResult) {
  Promise<int> first, second, third;
  const Future<int> second_future = second.future();
  Future<int> result = first.future().then([second_future](Future<int> x) {
    return second_future.then([number = x.get()](Future<int> y) { return 10 * number + y.get(); });
  });
  Future<int> failed = first.future().then([future = third.future()](Future<int>) { return future; });
  first.set_value(4);
  EXPECT_FALSE(result.ready());
  second.set_value(2);
  EXPECT_EQ(result.get(soon()), 42);
  third.set_error(std::make_exception_ptr(std::out_of_range("far")));
  EXPECT_THROW(failed.get(soon()), std::out_of_range);
}

// A result that is there already has the function called by this thread; one that is not, by another.
TEST(RpcFutureTest, AFunctionHasNothingOfTheThreadThatCallsThen) {
  Promise<int> promise;
  promise.set_value(1);
  const at::NoGradGuard no_grad;
  const SeedScope seeds(5);
  CallContext handler;
  handler.caller = "w7";
  const CallScope call(handler);
  bool has_gradients = false, has_seed = true, has_call = true;
  promise.future()
      .then([&](Future<int>) {
        has_gradients = at::GradMode::is_enabled();
        has_seed = SeedScope::next().has_value();
        has_call = current_call() != nullptr;
      })
      .get(soon());
  EXPECT_TRUE(has_gradients);
  EXPECT_FALSE(has_seed);
  EXPECT_FALSE(has_call);
  EXPECT_FALSE(at::GradMode::is_enabled()) << "the thread has its own state again";
  EXPECT_TRUE(SeedScope::next().has_value());
  EXPECT_EQ(current_call(), &handler);
}

// The thread that sets the value calls functions while others take it.
TEST(RpcFutureTest, ManyReadOneResultAtTheSameTime) {
  for (int round = 0; round < 200; ++round) {
    auto promise = std::make_unique<Promise<std::string>>();
    Future<std::string> text = promise->future(), copy = text;
    Future<std::size_t> length = text.then([](Future<std::string> x) { return x.get().size(); });
    std::thread setter([&] { promise->set_value(std::string(1'000, 'x')); });
    std::thread reader([&] { EXPECT_EQ(copy.get(soon()).size(), 1'000U); });
    EXPECT_EQ(text.get(soon()).size(), 1'000U);
    EXPECT_EQ(length.get(soon()), 1'000U);
    setter.join();
    reader.join();
  }
}

TEST(RpcFutureTest, AResultIsSetOnce) {
  Promise<int> promise;
  promise.set_value(1);
  COHORT_EXPECT_THROW_WITH(promise.set_value(2), UsageError, "is set a second time");
  COHORT_EXPECT_THROW_WITH(promise.set_from(promise.future()), UsageError, "is set a second time");
  COHORT_EXPECT_THROW_WITH(promise.set_error(std::make_exception_ptr(DataError("test.future", "late"))),
                           UsageError, "is set a second time");
  EXPECT_FALSE(promise.try_set_value(2));
  EXPECT_FALSE(promise.try_set_from(promise.future()));
  EXPECT_FALSE(promise.try_set_error(nullptr));
  EXPECT_EQ(promise.future().get(), 1);
  Promise<void> end;
  EXPECT_TRUE(end.try_set_value());
  EXPECT_FALSE(end.try_set_value());
}

TEST(RpcFutureTest, SeveralResultsBecomeOne) {
  std::vector<Promise<int>> promises(3);
  std::vector<Future<int>> futures;
  for (const Promise<int>& promise : promises) futures.push_back(promise.future());
  Future<std::vector<int>> all = collect_all(futures);
  promises[2].set_value(30);
  promises[0].set_value(10);
  EXPECT_FALSE(all.ready());
  promises[1].set_value(20);
  EXPECT_EQ(all.get(soon()), (std::vector<int>{10, 20, 30}));
  EXPECT_EQ(wait_all(futures), (std::vector<int>{10, 20, 30})) << "they have their values still";
  EXPECT_TRUE(wait_all(std::vector<Future<int>>()).empty());

  Promise<void> done;
  Future<void> all_done = collect_all(std::vector<Future<void>>{done.future(), done.future()});
  EXPECT_FALSE(all_done.ready());
  done.set_value();
  all_done.get(soon());
  wait_all(std::vector<Future<void>>{done.future()});
}

TEST(RpcFutureTest, ManyCallsAreWaitedForTogether) {
  Job job(2);
  std::vector<Future<int>> numbers;
  for (int i = 0; i < 20; ++i) numbers.push_back(job[0].rpc_async<same_number>("w1", i));
  const std::vector<int> all = wait_all(numbers);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)], i);
  job.shutdown();
}

TEST(RpcFutureTest, TheFirstErrorIsThrownAtOnce) {
  Job job(2);
  test::Gate gate;
  gate_of_future = &gate;
  std::vector<Future<int>> numbers;
  numbers.push_back(job[0].rpc_async<number_at_gate>("w1"));  // not answered before the end
  numbers.push_back(job[0].rpc_async<same_number>("w1", 2));
  numbers.push_back(job[0].rpc_async<throws_data_error>("w1"));
  numbers.push_back(job[0].rpc_async<throws_data_error>("w1"));
  COHORT_EXPECT_THROW_WITH(wait_all(numbers), DataError, "throws_data_error on w1, call ");
  EXPECT_FALSE(numbers[0].ready());
  numbers.resize(2);
  numbers.push_back(job[0].rpc_async<number_at_gate>(to("w1").within(milliseconds(100))));
  COHORT_EXPECT_THROW_WITH(wait_all(numbers), TimeoutError, "no answer within 100 ms");
  gate.open();
  EXPECT_EQ(numbers[0].get(), 1);
  job.shutdown();
}

// A function of then() runs where answers are read: it may call on, and handlers may wait for it.
TEST(RpcFutureTest, CallsFollowFromAnswers) {
  Job job(3);
  const at::Tensor x = at::ones({2, 2});
  Future<at::Tensor> sum = job[0].rpc_async<sum_of_two>("w1", x, x).then([&](Future<at::Tensor> first) {
    return job[0].rpc_async<sum_of_two>("w2", first.get(), x).then([](Future<at::Tensor> second) {
      return second.get() + 1;
    });
  });
  EXPECT_TRUE(at::equal(sum.get(), at::full({2, 2}, 4.0)));
  EXPECT_TRUE(at::equal(job[0].rpc_sync<waits_for_what_follows>("w1", "w1", "w2", x), at::full({2, 2}, 4.0)));
  Future<int> cured = job[0].rpc_async<throws_data_error>("w1").then([](Future<int> number) {
    EXPECT_THROW(number.get(), DataError);
    return 5;
  });
  EXPECT_EQ(cured.get(), 5);
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc
