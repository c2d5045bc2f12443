// Calls of a channel run one after the other, in the order in which they were made.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/patience.h"
#include "tests/support/seeds.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::agent_of;
using test::comes_true;
using test::Job;

// Which handlers began, and whether two of them ran at a time: by a name of the caller and channel.
class HandlerLog {
 public:
  void clear() {
    const std::lock_guard lock(mutex_);
    channels_.clear();
  }
  void begin(const std::string& channel, int number) {
    const std::lock_guard lock(mutex_);
    Channel& of = channels_[channel];
    of.overlaps = of.overlaps || of.num_running > 0;
    ++of.num_running;
    of.begun.push_back(number);
  }
  void end(const std::string& channel) {
    const std::lock_guard lock(mutex_);
    --channels_[channel].num_running;
  }
  std::vector<int> begun(const std::string& channel) {
    const std::lock_guard lock(mutex_);
    return channels_[channel].begun;
  }
  bool overlaps(const std::string& channel) {
    const std::lock_guard lock(mutex_);
    return channels_[channel].overlaps;
  }

 private:
  struct Channel {
    int num_running = 0;
    bool overlaps = false;
    std::vector<int> begun;
  };
  std::mutex mutex_;
  std::map<std::string, Channel> channels_;
};
HandlerLog& handler_log() {
  static HandlerLog log;
  return log;
}

// A handler's place in the log.
struct Step {
  std::string channel;
  int number = 0;
  int ms = 0;          // that it takes
  bool fails = false;  // and throws
};
COHORT_NESTED(Step, channel, number, ms, fails)

class StepScope {
 public:
  explicit StepScope(const Step& step) : channel_(step.channel) {
    handler_log().begin(channel_, step.number);
  }
  ~StepScope() { handler_log().end(channel_); }
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

 private:
  const std::string channel_;
};

int run_step(const Step& step) {
  const StepScope scope(step);
  if (step.ms > 0) base::sleep(milliseconds(step.ms), test::patience());
  if (step.fails) throw std::invalid_argument("step " + std::to_string(step.number));
  return step.number;
}
int run_step_with_tensor(const Step& step, const at::Tensor&) {
  return run_step(step);
}
int run_step_with_reference(const Step& step, const RRef<int>&) {
  return run_step(step);
}
int pause(int ms) {
  if (ms > 0) base::sleep(milliseconds(ms), test::patience());
  return ms;
}
// No thread waits meanwhile.
Future<int> run_step_later(const Step& step, const std::string& here, const std::string& there) {
  handler_log().begin(step.channel, step.number);
  return agent_of(here).rpc_async<pause>(there, step.ms).then([step](const Future<int>&) {
    handler_log().end(step.channel);
    if (step.fails) throw std::invalid_argument("step " + std::to_string(step.number));
    return step.number;
  });
}
test::Gate* gate_of_order = nullptr;
int run_step_to_gate(const Step& step) {
  const StepScope scope(step);
  gate_of_order->wait();
  return step.number;
}
Promise<int>* promise_of_order = nullptr;
Future<int> promise_step(const Step& step) {
  const StepScope scope(step);
  return promise_of_order->future();
}
int number_of_order() {
  return 5;
}
class StepRunner {
 public:
  int run(const Step& step) { return run_step(step); }
};
COHORT_REMOTE(run_step);
COHORT_REMOTE(run_step_with_tensor);
COHORT_REMOTE(run_step_with_reference);
COHORT_REMOTE(pause);
COHORT_REMOTE(run_step_later);
COHORT_REMOTE(run_step_to_gate);
COHORT_REMOTE(promise_step);
COHORT_REMOTE(number_of_order);
COHORT_REMOTE(make<StepRunner>);
COHORT_REMOTE(StepRunner::run);

std::vector<int> numbers_to(int end) {
  std::vector<int> numbers;
  for (int i = 0; i < end; ++i) numbers.push_back(i);
  return numbers;
}
void expect_in_order(const std::string& channel, const std::vector<int>& numbers) {
  EXPECT_EQ(handler_log().begun(channel), numbers);
  EXPECT_FALSE(handler_log().overlaps(channel)) << channel;
}

class OrderedCallsTest : public testing::Test {
 protected:
  OrderedCallsTest() {
    handler_log().clear();
    gate_of_order = &gate;
    promise_of_order = &promise;
  }
  bool waits_on_w1(std::size_t num_calls) {
    return comes_true([&] { return job[1].metrics().calls_unanswered == num_calls; });
  }
  static bool has_begun(const std::string& channel) {
    return comes_true([&] { return !handler_log().begun(channel).empty(); });
  }
  Job job{3};
  test::Gate gate;
  Promise<int> promise;
  const Target updates = to("w1").in_order("updates");
};

TEST_F(OrderedCallsTest, EachBeginsAfterTheAnswerOfTheOneBefore) {
  std::vector<Future<int>> calls;
  for (int i = 0; i < 40; ++i) {
    calls.push_back(job[0].rpc_async<run_step>(updates, Step{"updates", i, i < 3 ? 20 : 0}));
  }
  EXPECT_EQ(wait_all(calls), numbers_to(40));
  expect_in_order("updates", numbers_to(40));
  job.shutdown();
}

TEST_F(OrderedCallsTest, OtherCallsDoNotWait) {
  auto first = job[0].rpc_async<run_step_to_gate>(updates, Step{"updates", 0});
  auto second = job[0].rpc_async<run_step>(updates, Step{"updates", 1});
  EXPECT_TRUE(waits_on_w1(2));
  EXPECT_TRUE(has_begun("updates"));
  EXPECT_EQ(job[0].rpc_sync<run_step>("w1", Step{"none", 0}), 0);
  EXPECT_EQ(job[0].rpc_sync<run_step>(to("w1").in_order("reads"), Step{"reads", 1}), 1);
  EXPECT_EQ(job[0].rpc_sync<run_step>(to("w2").in_order("updates"), Step{"on w2", 2}), 2);
  EXPECT_EQ(job[2].rpc_sync<run_step>(updates, Step{"of w2", 3}), 3);
  EXPECT_EQ(job[1].rpc_sync<run_step>(updates, Step{"of w1", 4}), 4);
  EXPECT_EQ(handler_log().begun("updates"), numbers_to(1));
  gate.open();
  EXPECT_EQ(first.get(), 0);
  EXPECT_EQ(second.get(), 1);
  job.shutdown();
}

TEST_F(OrderedCallsTest, AnAnswerThatComesLaterIsWaitedFor) {
  auto first = job[0].rpc_async<promise_step>(updates, Step{"updates", 0});
  auto second = job[0].rpc_async<run_step>(updates, Step{"updates", 1});
  EXPECT_TRUE(waits_on_w1(2));
  EXPECT_TRUE(has_begun("updates"));
  EXPECT_EQ(job[0].rpc_sync<run_step>("w1", Step{"none", 0}), 0);
  EXPECT_EQ(handler_log().begun("updates"), numbers_to(1));
  promise.set_value(7);
  EXPECT_EQ(first.get(), 7);
  EXPECT_EQ(second.get(), 1);
  job.shutdown();
}

TEST_F(OrderedCallsTest, AFailureLeavesItsPlace) {
  auto thrown = job[0].rpc_async<run_step>(updates, Step{"updates", 0, 5, true});
  auto later = job[0].rpc_async<run_step_later>(updates, Step{"updates", 1, 5, true}, "w1", "w2");
  // It cannot travel, so it is never sent.
  const at::Tensor meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
  auto unsent = job[0].rpc_async<run_step_with_tensor>(updates, Step{"updates", 2}, meta);
  auto last = job[0].rpc_async<run_step>(updates, Step{"updates", 3});
  EXPECT_EQ(last.get(), 3);
  COHORT_EXPECT_THROW_WITH(thrown.get(), std::invalid_argument, "step 0");
  COHORT_EXPECT_THROW_WITH(later.get(), std::invalid_argument, "step 1");
  COHORT_EXPECT_THROW_WITH(unsent.get(), UsageError, "cannot travel");
  expect_in_order("updates", {0, 1, 3});
  job.shutdown();
}

// The handler of a call that was given up still has its turn. One that has not begun never begins.
TEST_F(OrderedCallsTest, ACallThatExpiresBeforeItsTurnDoesNotBegin) {
  auto runs = job[0].rpc_async<run_step_to_gate>(updates.within(milliseconds(500)), Step{"updates", 0});
  EXPECT_TRUE(has_begun("updates"));
  auto waits = job[0].rpc_async<run_step>(updates.within(milliseconds(50)), Step{"updates", 1});
  auto last = job[0].rpc_async<run_step>(updates, Step{"updates", 2});
  EXPECT_THROW(waits.get(), TimeoutError);
  EXPECT_THROW(runs.get(), TimeoutError);
  const RRef<int> object = job[0].remote<run_step>(updates.within(milliseconds(50)), Step{"updates", 3});
  COHORT_EXPECT_THROW_WITH(object.to_here(), TimeoutError, "in time");
  EXPECT_EQ(handler_log().begun("updates"), numbers_to(1));
  // A call's time on w1 begins when it has come there. Then only `last` is left.
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics metrics = job[1].metrics();
    return metrics.calls_handled >= 4 && metrics.calls_unanswered == 1;
  }));
  gate.open();
  EXPECT_EQ(last.get(), 2);
  EXPECT_EQ(job[0].rpc_sync<run_step>(updates, Step{"updates", 4}), 4);
  expect_in_order("updates", {0, 2, 4});
  job.shutdown();
}

TEST_F(OrderedCallsTest, LongMessagesAndReferencesKeepTheirPlaces) {
  const at::Tensor large = at::zeros({4 << 20}, at::kByte);
  std::vector<Future<int>> calls;
  for (int i = 0; i < 40; ++i) {
    const Step step{"updates", i};
    if (i % 4 == 0) {
      calls.push_back(
          job[0].rpc_async<run_step_with_tensor>(updates, step, i % 8 == 0 ? large : at::ones({1})));
    } else if (i % 4 == 1) {
      // w2 does not know of this reference yet.
      const RRef<int> number = job[0].remote<number_of_order>("w2");
      calls.push_back(job[0].rpc_async<run_step_with_reference>(updates, step, number));
    } else {
      calls.push_back(job[0].rpc_async<run_step>(updates, step));
    }
  }
  EXPECT_EQ(wait_all(calls), numbers_to(40));
  expect_in_order("updates", numbers_to(40));
  job.shutdown();
}

// Beyond the window (64 MiB) calls wait at their caller.
TEST_F(OrderedCallsTest, CallsThatWaitFillTheWindowAndStillBegin) {
  const at::Tensor large = at::zeros({1 << 20}, at::kByte);
  std::vector<Future<int>> calls{job[0].rpc_async<run_step_to_gate>(updates, Step{"updates", 0})};
  for (int i = 1; i < 80; ++i) {
    calls.push_back(job[0].rpc_async<run_step_with_tensor>(updates, Step{"updates", i}, large));
  }
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics sent = job[0].metrics();
    return sent.bytes_sent + sent.bytes_by_handle > (60U << 20);
  }));
  EXPECT_GT(job[0].metrics().messages_queued, 0U);
  gate.open();
  EXPECT_EQ(wait_all(calls), numbers_to(80));
  expect_in_order("updates", numbers_to(80));
  job.shutdown();
}

TEST_F(OrderedCallsTest, FunctionsOfObjectsAndNewObjectsHaveAnOrder) {
  {
    const RRef<StepRunner> runner = job[0].remote<&make<StepRunner>>("w1").in_order("updates");
    std::vector<Future<int>> calls;
    std::vector<RRef<int>> objects;
    for (int i = 0; i < 40; i += 4) {
      const int ms = i == 0 ? 20 : 0;
      calls.push_back(runner.rpc_async<&StepRunner::run>(Step{"updates", i, ms}));
      objects.push_back(job[0].remote<run_step>(updates, Step{"updates", i + 1, ms}));
      objects.push_back(runner.remote<&StepRunner::run>(Step{"updates", i + 2, ms}));
      objects.push_back(job[0].remote<run_step_later>(updates, Step{"updates", i + 3, ms}, "w1", "w2"));
    }
    EXPECT_EQ(wait_all(calls).back(), 36);
    for (int i = 0; i < 30; ++i) {
      EXPECT_EQ(objects[static_cast<std::size_t>(i)].to_here(), i / 3 * 4 + i % 3 + 1);
    }
  }
  expect_in_order("updates", numbers_to(40));
  job.shutdown();
}

// The death of a caller ends what it has in the queue, and nobody else's.
TEST_F(OrderedCallsTest, ADeadCallersCallsDoNotBegin) {
  auto first = job[0].rpc_async<run_step_to_gate>(updates, Step{"of w0", 0});
  auto lost = job[0].rpc_async<run_step>(updates, Step{"of w0", 1});
  EXPECT_TRUE(waits_on_w1(2));
  EXPECT_TRUE(has_begun("of w0"));
  job.drop(0);
  EXPECT_TRUE(waits_on_w1(0));
  gate.open();
  EXPECT_EQ(job[2].rpc_sync<run_step>(updates, Step{"of w2", 0}), 0);
  EXPECT_TRUE(comes_true([&] { return job[1].metrics().handlers_queued == 0; }));
  EXPECT_EQ(handler_log().begun("of w0"), numbers_to(1));
  EXPECT_THROW(first.get(), UsageError);
  EXPECT_THROW(lost.get(), UsageError);
}

// A program of one caller: calls of two channels in any mix.
class RandomCaller {
 public:
  RandomCaller(Job& job, std::size_t self, unsigned seed)
      : job_(job), self_(self), seed_(seed), random_(3 * seed + static_cast<unsigned>(self)) {}
  void run() {
    for (int i = 0; i < 60; ++i) {
      const std::string name =
          "w" + std::to_string(self_) + (pick(2) == 0 ? " a" : " b") + std::to_string(seed_);
      begin_call(name, {name, i, pick(5) == 0 ? pick(4) : 0, pick(8) == 0});
    }
    for (BegunCall& call : calls_) end_call(call);
    for (const auto& [channel, needed] : needed_) check(channel, needed);
  }

 private:
  struct BegunCall {
    Step step;
    std::optional<Future<int>> future;
    RRef<int> object;
  };
  int pick(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }
  void begin_call(const std::string& channel, const Step& step) {
    Target target = to("w1").in_order(channel);
    if (pick(6) == 0) target = target.within(milliseconds(1 + pick(6)));
    Agent& agent = job_[self_];
    const int kind = pick(6);
    if (kind == 0) {
      calls_.push_back({step, std::nullopt, agent.remote<run_step>(target, step)});
    } else if (kind == 1) {
      add(step, agent.rpc_async<run_step_later>(target, step, "w1", "w2"));
    } else if (kind == 2) {
      const at::Tensor tensor = at::zeros({pick(2) == 0 ? 1 : 300'000}, at::kByte);
      add(step, agent.rpc_async<run_step_with_tensor>(target, step, tensor));
    } else if (kind == 3) {
      const RRef<int> number = agent.remote<number_of_order>("w" + std::to_string(pick(3)));
      add(step, agent.rpc_async<run_step_with_reference>(target, step, number));
    } else {
      add(step, agent.rpc_async<run_step>(target, step));
    }
  }
  void add(const Step& step, Future<int> future) { calls_.push_back({step, std::move(future), {}}); }
  // A call that was given up may have begun or not.
  void end_call(BegunCall& call) {
    try {
      const int number = call.future ? call.future->get() : call.object.to_here();
      EXPECT_EQ(number, call.step.number);
      EXPECT_FALSE(call.step.fails);
    } catch (const std::invalid_argument&) {
      EXPECT_TRUE(call.step.fails);
    } catch (const TimeoutError&) {
      return;
    }
    needed_[call.step.channel].push_back(call.step.number);
  }
  static void check(const std::string& channel, const std::vector<int>& needed) {
    const std::vector<int> begun = handler_log().begun(channel);
    EXPECT_FALSE(handler_log().overlaps(channel)) << channel;
    EXPECT_TRUE(std::is_sorted(begun.begin(), begun.end())) << channel << testing::PrintToString(begun);
    EXPECT_EQ(std::adjacent_find(begun.begin(), begun.end()), begun.end()) << "a call ran twice";
    EXPECT_TRUE(std::includes(begun.begin(), begun.end(), needed.begin(), needed.end()))
        << channel << " began " << testing::PrintToString(begun) << ", answered "
        << testing::PrintToString(needed);
  }

  Job& job_;
  const std::size_t self_;
  const unsigned seed_;
  std::mt19937 random_;
  std::vector<BegunCall> calls_;
  std::map<std::string, std::vector<int>> needed_;  // by channel: what was answered
};

TEST(OrderedCallsProgramsTest, AnyMixOfCallsKeepsItsOrder) {
  Job job(3);
  const test::Seeds seeds = test::Seeds::usual(5);
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::vector<std::thread> threads;
    for (std::size_t self = 0; self < 3; ++self) {  // w1 calls itself
      threads.emplace_back([&job, self, seed] { RandomCaller(job, self, seed).run(); });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_FALSE(testing::Test::HasFailure());
  }
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc
