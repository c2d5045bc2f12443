#include "cohort/bench/timeit.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <sstream>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "tests/bench/fake_clock.h"
#include "tests/support/throws.h"

namespace cohort::bench {
namespace {

using namespace std::chrono_literals;
using test::FakeClock;

TEST(TimeitTest, ChoosesCallsSoThatARoundLastsLongEnough) {
  FakeClock fake;
  const auto seen = [&](std::chrono::nanoseconds each) {
    return timeit([&] { fake.now += each; }, TimeitOptions().min_time(20ms).clock(fake.clock()));
  };
  EXPECT_EQ(seen(1us).calls, 20000);
  EXPECT_EQ(seen(3us).calls, 10000);
  EXPECT_EQ(seen(7ms).calls, 5);
  EXPECT_EQ(seen(1s).calls, 1);
  const Measurement measurement = seen(3us);
  EXPECT_EQ(measurement.seconds.size(), 7u);
  EXPECT_NEAR(measurement.best(), 3e-6, 1e-15);
  EXPECT_NEAR(measurement.median(), 3e-6, 1e-15);
  EXPECT_NEAR(measurement.spread(), 0, 1e-9);
}

TEST(TimeitTest, TheFirstCallDoesNotCountAndBestIsTheFastestRound) {
  FakeClock fake;
  int call = 0;
  const Measurement measurement = timeit(
      [&] {
        ++call;
        fake.now += call == 1 ? 1s : std::chrono::nanoseconds(1000 * (8 - call));  // 6, 5, 4, 3, 2 us
      },
      TimeitOptions().calls(1).rounds(5).clock(fake.clock()));
  EXPECT_EQ(call, 6);
  EXPECT_NEAR(measurement.best(), 2e-6, 1e-15);
  EXPECT_NEAR(measurement.median(), 4e-6, 1e-15);
  EXPECT_NEAR(measurement.percentile(1), 6e-6, 1e-15);
  EXPECT_NEAR(measurement.spread(), 0.5, 1e-9);  // from 3 to 5 around 4
}

TEST(TimeitTest, AsManyCallsAsAskedForDoNotCount) {
  FakeClock fake;
  for (const int warm_up : {0, 1, 7}) {
    int calls = 0;
    const Measurement measurement =
        timeit([&] { ++calls, fake.now += calls <= warm_up ? 1s : 2us; },
               TimeitOptions().warm_up(warm_up).calls(3).rounds(2).clock(fake.clock()));
    EXPECT_EQ(calls, warm_up + 6);
    EXPECT_NEAR(measurement.percentile(1), 2e-6, 1e-15);
  }
}

TEST(TimeitTest, SamplesAreTimedWhereTheyRun) {
  int round = 0;
  const Measurement measurement =
      sample([&] { return ++round * 1e-3; },
             TimeitOptions().label("elsewhere").rounds(3).warm_up(2).calls(10).threads(1));
  EXPECT_EQ(measurement.seconds, (std::vector<double>{3e-3, 4e-3, 5e-3}));
  EXPECT_EQ(measurement.label, "elsewhere");
  EXPECT_EQ(measurement.calls, 10);
  EXPECT_EQ(measurement.threads, 1);
  EXPECT_EQ(sample([] { return 1.0; }, TimeitOptions()).calls, 1);
}

TEST(TimeitTest, SecondsOfWorkAreWallClock) {
  const double slept = seconds_of([] { std::this_thread::sleep_for(20ms); });
  EXPECT_GE(slept, 0.02);
  EXPECT_LT(slept, 20);
}

TEST(TimeitTest, PercentilesLieBetweenValuesByProportion) {
  EXPECT_EQ(percentile({}, 0.5), 0);
  EXPECT_EQ(percentile({7}, 0.99), 7);
  EXPECT_EQ(percentile({30, 10, 20}, 0.5), 20);
  EXPECT_NEAR(percentile({10, 30}, 0.25), 15, 1e-12);
}

TEST(TimeitTest, SaysFiguresSpreadAndThreadsInOneLine) {
  Measurement measurement{"mul", {2e-6, 2e-6, 2.5e-6}, 100, 1};
  EXPECT_EQ(
      measurement.to_text(),
      "mul: best 2.000 us, median 2.000 us, spread 13 % (the machine was not quiet), 3 rounds of 100 calls, "
      "1 thread");
  std::ostringstream out;
  out << Measurement{"", {1.5}, 1, 2};
  EXPECT_EQ(out.str(), "best 1.500 s, median 1.500 s, spread 0 %, 1 round of 1 call, 2 threads");
}

TEST(TimeitTest, ChoosesTheUnit) {
  EXPECT_EQ(to_text(0), "0.000 ns");
  EXPECT_EQ(to_text(1.234e-9), "1.234 ns");
  EXPECT_EQ(to_text(12.345e-6), "12.35 us");
  EXPECT_EQ(to_text(123.45e-3), "123.5 ms");
  EXPECT_EQ(to_text(0.99999), "1.000 s");
  EXPECT_EQ(to_text(4321), "4321 s");
}

TEST(TimeitTest, SetsThreadsForTheMeasurementOnly) {
  const int before = at::get_num_threads();
  int seen = 0;
  const Measurement measurement =
      timeit([&] { seen = at::get_num_threads(); }, TimeitOptions().threads(1).calls(1).rounds(1));
  EXPECT_EQ(seen, 1);
  EXPECT_EQ(measurement.threads, 1);
  EXPECT_EQ(at::get_num_threads(), before);
}

TEST(TimeitTest, TheCpuClockCountsComputingOnly) {
  const Clock clock = cpu_clock();
  const auto before = clock();
  std::this_thread::sleep_for(20ms);
  const auto slept = clock() - before;
  EXPECT_LT(slept, 20ms);
  while (clock() - before < slept + 1ms) {
  }  // computing moves it on
}

TEST(TimeitTest, AnExceptionComesThrough) {
  EXPECT_THROW(timeit([]() -> int { throw std::runtime_error("no"); }), std::runtime_error);
}

TEST(TimeitTest, RejectsWhatCannotBeMeasured) {
  COHORT_EXPECT_THROW_WITH(timeit([] {}, TimeitOptions().rounds(0)), UsageError,
                           "[bench.timeit] got rounds 0");
  COHORT_EXPECT_THROW_WITH(timeit([] {}, TimeitOptions().calls(-1)), UsageError, "calls -1");
  COHORT_EXPECT_THROW_WITH(timeit([] {}, TimeitOptions().warm_up(-1)), UsageError, "warm_up -1");
  COHORT_EXPECT_THROW_WITH(sample([] { return 1.0; }, TimeitOptions().rounds(0)), UsageError, "rounds 0");
  COHORT_EXPECT_THROW_WITH(timeit([] {}, TimeitOptions().min_time(0ns)), UsageError, "min_time 0 ns");
  COHORT_EXPECT_THROW_WITH(timeit([] {}, TimeitOptions().threads(-2)), UsageError, "got -2 threads");
  COHORT_EXPECT_THROW_WITH(timeit([] {}, TimeitOptions().threads(100000)), UsageError, "cores");
}

}  // namespace
}  // namespace cohort::bench
