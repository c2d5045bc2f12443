// Handlers that answer with results of calls of their own, while no thread waits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/job.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using test::agent_of;
using test::Job;

at::Tensor add_numbers(const at::Tensor& x, double y) {
  if (y < 0) throw DataError("test.add", "a negative number");
  return x + y;
}
COHORT_REMOTE(add_numbers);

// The future of its own call.
Future<at::Tensor> add_there(const std::string& here, const std::string& there, const at::Tensor& x,
                             double y) {
  return agent_of(here).rpc_async<add_numbers>(there, x, y);
}
COHORT_REMOTE(add_there);

Future<at::Tensor> add_there_and_here(const std::string& here, const std::string& there, const at::Tensor& x,
                                      double y, double z) {
  return agent_of(here).rpc_async<add_numbers>(there, x, y).then([z](Future<at::Tensor> sum) {
    return sum.get() + z;
  });
}
COHORT_REMOTE(add_there_and_here);

Future<at::Tensor> add_several_times(const std::string& here, const std::string& there, const at::Tensor& x,
                                     int times, double step) {
  Future<at::Tensor> sum = agent_of(here).rpc_async<add_numbers>(there, x, 0);
  for (int i = 0; i < times; ++i) {
    sum = sum.then([step](Future<at::Tensor> before) { return before.get() + step; });
  }
  return sum;
}
COHORT_REMOTE(add_several_times);

// By a handler of another worker that answers later too.
Future<at::Tensor> add_by_another(const std::string& here, const std::string& there, const at::Tensor& x,
                                  double y, double z) {
  return agent_of(here).rpc_async<add_there>(there, there, here, x, y).then([z](Future<at::Tensor> sum) {
    return sum.get() + z;
  });
}
COHORT_REMOTE(add_by_another);

Future<at::Tensor> sum_of_calls(const std::string& here, const std::string& there, const at::Tensor& x,
                                int num_calls, double step) {
  std::vector<Future<at::Tensor>> parts;
  for (int i = 0; i < num_calls; ++i) {
    parts.push_back(agent_of(here).rpc_async<add_numbers>(there, i == 0 ? x : at::zeros_like(x), step));
  }
  return collect_all(parts).then(
      [](Future<std::vector<at::Tensor>> all) { return at::stack(all.get()).sum(0); });
}
COHORT_REMOTE(sum_of_calls);

// The same by hand, without then().
Future<at::Tensor> sum_by_promise(const std::string& here, const std::string& there, const at::Tensor& x,
                                  int num_calls, double step) {
  struct State {
    std::mutex mutex;
    at::Tensor sum;
    int num_missing = 0;
    Promise<at::Tensor> promise;
  };
  const auto state = std::make_shared<State>();
  state->sum = at::zeros_like(x);
  state->num_missing = num_calls;
  for (int i = 0; i < num_calls; ++i) {
    Future<at::Tensor> part =
        agent_of(here).rpc_async<add_numbers>(there, i == 0 ? x : at::zeros_like(x), step);
    part.on_ready([state, part]() mutable {
      const std::lock_guard lock(state->mutex);
      state->sum += part.get();
      if (--state->num_missing == 0) state->promise.set_value(state->sum);
    });
  }
  return state->promise.future();
}
COHORT_REMOTE(sum_by_promise);

class Adder {
 public:
  explicit Adder(double own) : own_(own) {}
  static Future<at::Tensor> add_static(const std::string& here, const std::string& there,
                                       const at::Tensor& x) {
    return agent_of(here).rpc_async<add_numbers>(there, x, 1);
  }
  Future<at::Tensor> add(const std::string& here, const std::string& there, const at::Tensor& x) const {
    return agent_of(here).rpc_async<add_numbers>(there, x, own_);
  }

 private:
  const double own_;
};
COHORT_REMOTE(make<Adder, double>);
COHORT_REMOTE(Adder::add);
COHORT_REMOTE(Adder::add_static);

// By rpc_sync, rpc_async and remote.
template <auto function, typename... Args>
std::vector<at::Tensor> answers(Agent& agent, const std::string& worker, const Args&... args) {
  return {agent.rpc_sync<function>(worker, args...), agent.rpc_async<function>(worker, args...).get(),
          agent.template remote<function>(worker, args...).to_here()};
}

class AsyncHandlerTest : public testing::Test {
 protected:
  void expect_all(const std::vector<at::Tensor>& results, double value) {
    for (const at::Tensor& result : results)
      EXPECT_TRUE(at::equal(result, at::full({2, 2}, value))) << result;
  }
  Job job{3};
  const at::Tensor x = at::ones({2, 2});
};

TEST_F(AsyncHandlerTest, AHandlerAnswersWithTheResultOfItsCall) {
  expect_all(answers<add_there>(job[0], "w1", "w1", "w2", x, 2), 3);
  expect_all(answers<add_there>(job[0], "w0", "w0", "w1", x, 2), 3);
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<add_there>("w1", "w1", "w2", x, -1), DataError,
                           "add_numbers on w2, call ");
  const RRef<at::Tensor> failed = job[0].remote<add_there>("w1", "w1", "w2", x, -1);
  COHORT_EXPECT_THROW_WITH(failed.to_here(), DataError, "a negative number");
  job.shutdown();
}

TEST_F(AsyncHandlerTest, AHandlerAnswersWithWhatFollows) {
  expect_all(answers<add_there_and_here>(job[0], "w1", "w1", "w2", x, 2, 4), 7);
  expect_all(answers<add_several_times>(job[0], "w1", "w1", "w2", x, 20, 3), 61);
  expect_all(answers<add_by_another>(job[0], "w1", "w1", "w2", x, 2, 4), 7);
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<add_by_another>("w1", "w1", "w2", x, -1, 4), DataError,
                           "a negative number");
  job.shutdown();
}

TEST_F(AsyncHandlerTest, AHandlerAnswersWithTheSumOfSeveralCalls) {
  expect_all(answers<sum_of_calls>(job[0], "w1", "w1", "w2", x, 20, 3), 61);
  expect_all(answers<sum_by_promise>(job[0], "w1", "w1", "w2", x, 20, 3), 61);
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<sum_of_calls>("w1", "w1", "w2", x, 20, -1), DataError,
                           "a negative number");
  job.shutdown();
}

// One thread is enough, as none waits.
// The first of two answers, an error or not. Both may come at the same time.
Future<at::Tensor> first_answer_of_two(const std::string& here, const std::string& there, const at::Tensor& x,
                                       double y) {
  const auto promise = std::make_shared<Promise<at::Tensor>>();
  const Future<at::Tensor> sum = agent_of(here).rpc_async<add_numbers>(there, x, y);
  Future<at::Tensor> failed = agent_of(here).rpc_async<add_numbers>(there, x, -1);
  sum.on_ready([promise, sum] { promise->try_set_from(sum); });
  failed.on_ready([promise, failed]() mutable {
    try {
      promise->try_set_value(failed.get());
    } catch (...) {
      promise->try_set_error(std::current_exception());
    }
  });
  return promise->future();
}
COHORT_REMOTE(first_answer_of_two);

TEST(AsyncHandlersTest, ManyHandlersThatAnswerLaterNeedOneThread) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(3, options);
  std::vector<Future<at::Tensor>> sums;
  for (int i = 0; i < 50; ++i) {
    sums.push_back(job[0].rpc_async<add_by_another>("w1", "w1", "w2", at::full({1}, i), 1, 1));
  }
  const std::vector<at::Tensor> all = wait_all(sums);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)].item<int>(), i + 2);
  job.shutdown();
}

TEST_F(AsyncHandlerTest, MemberFunctionsAnswerLater) {
  {
    const RRef<Adder> adder = job[0].remote<&make<Adder, double>>("w1", 3.0);
    expect_all({adder.rpc_sync<&Adder::add>("w1", "w2", x), adder.rpc_async<&Adder::add>("w1", "w2", x).get(),
                adder.remote<&Adder::add>("w1", "w2", x).to_here()},
               4);
  }
  expect_all(answers<&Adder::add_static>(job[0], "w1", "w1", "w2", x), 2);
  job.shutdown();
}

// The second one to set the promise finds it set, within a function of on_ready(), which must not throw.
TEST_F(AsyncHandlerTest, AnErrorAndAnAnswerMaySetOnePromise) {
  for (int i = 0; i < 50; ++i) {
    try {
      EXPECT_TRUE(at::equal(job[0].rpc_sync<first_answer_of_two>("w1", "w1", "w0", x, 1), x + 1));
    } catch (const DataError& error) {
      EXPECT_NE(std::string(error.what()).find("a negative number"), std::string::npos);
    }
  }
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc
