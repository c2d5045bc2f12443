#include "cohort/bench/compare.h"

#include <gtest/gtest.h>

#include <string>

#include "cohort/base/error.h"
#include "tests/bench/fake_clock.h"
#include "tests/support/throws.h"

namespace cohort::bench {
namespace {

using namespace std::chrono_literals;
using test::FakeClock;

struct CompareTest : ::testing::Test {
  /// A variant that takes `each` per element of the shape; its calls are written to `order`.
  Variant variant(const std::string& name, std::chrono::nanoseconds each) {
    return {name, [this, name, each](const Shape& shape) {
              std::int64_t numel = 1;
              for (const std::int64_t size : shape) numel *= size;
              return [this, name, each, numel] {
                order += name;
                fake.now += slow * numel * each;
              };
            }};
  }
  CompareOptions options() {
    return CompareOptions().threads({1}).timeit(TimeitOptions().calls(1).rounds(3).clock(fake.clock()));
  }

  FakeClock fake;
  std::string order;
  int slow = 1;
};

TEST_F(CompareTest, TakesTurnsInAnOrderThatReverses) {
  compare({variant("a", 1us), variant("b", 1us)}, options());
  EXPECT_EQ(order,
            "ab"
            "ab"
            "ba"
            "ab");  // warm-up, then three turns
}

TEST_F(CompareTest, SaysHowManyTimesAsFastAsTheFirst) {
  const Comparison figures =
      compare({variant("plain", 3us), variant("fused", 2us)}, options().shapes({{4, 8}, {100}}));
  ASSERT_EQ(figures.rows.size(), 4u);
  EXPECT_EQ(figures.rows[0].ratio, 1);
  EXPECT_NEAR(figures.rows[1].ratio, 1.5, 1e-9);
  EXPECT_EQ(figures.markdown(),
            "| shape | threads | plain | fused |\n| --- | --- | --- | --- |\n"
            "| 4 x 8 | 1 | 96.00 us ± 0 % | 64.00 us ± 0 %, **1.50x** |\n"
            "| 100 | 1 | 300.0 us ± 0 % | 200.0 us ± 0 %, **1.50x** |\n");
  EXPECT_EQ(figures.csv(),
            "shape,threads,variant,best_ns,median_ns,p99_ns,spread,rounds,calls,ratio\n"
            "4 x 8,1,plain,96000.000,96000.000,96000.000,0.0000,3,1,1.0000\n"
            "4 x 8,1,fused,64000.000,64000.000,64000.000,0.0000,3,1,1.5000\n"
            "100,1,plain,300000.000,300000.000,300000.000,0.0000,3,1,1.0000\n"
            "100,1,fused,200000.000,200000.000,200000.000,0.0000,3,1,1.5000\n");
}

TEST_F(CompareTest, AMachineThatIsSlowForATurnChangesNoRatio) {
  int calls = 0;
  Variant disturbs{"plain", [&](const Shape&) {
                     return [&] {
                       if (++calls > 1) slow = calls - 1;  // each turn is slower than the one before
                       fake.now += slow * 3us;
                     };
                   }};
  // Turn by turn; in the second the other goes first, at the speed of the first turn.
  const Comparison figures = compare({disturbs, variant("fused", 1us)}, options());
  EXPECT_NEAR(figures.rows[1].ratio, 3, 1e-9);
}

TEST_F(CompareTest, TakesWorkThatIsReadyALoopOrTimedElsewhere) {
  int samples = 0;
  const Comparison figures =
      compare({{"ready", [this] { order += "r", fake.now += 6us; }},
               {"loop", [this](std::int64_t calls) { order += "l", fake.now += calls * 3us; }},
               Variant::sampled("elsewhere", [&] { return order += "e", ++samples, 2e-6; })},
              CompareOptions().threads({1}).timeit(
                  TimeitOptions().calls(2).rounds(2).warm_up(1).clock(fake.clock())));
  EXPECT_EQ(order, std::string("rle") + "rrle" + "elrr");
  ASSERT_EQ(figures.rows.size(), 3u);
  EXPECT_NEAR(figures.rows[1].ratio, 2, 1e-9);
  EXPECT_NEAR(figures.rows[2].ratio, 3, 1e-9);
  EXPECT_EQ(figures.text(),
            "1 thread                        best      median         p99       ratio\n"
            "ready                       6.000 us    6.000 us    6.000 us       1.00x\n"
            "loop                        3.000 us    3.000 us    3.000 us       2.00x\n"
            "elsewhere                   2.000 us    2.000 us    2.000 us       3.00x\n");
}

TEST_F(CompareTest, TheTextHasAHeadForEachShapeAndRoomForLongNames) {
  const std::string name = "a name of more than twenty-four letters";
  const std::string text = compare({variant(name, 1us)}, options().shapes({{4, 8}, {2}})).text();
  EXPECT_NE(text.find("4 x 8, 1 thread "), std::string::npos) << text;
  EXPECT_NE(text.find("2, 1 thread "), std::string::npos) << text;
  EXPECT_NE(text.find(name + "    32.00 us"), std::string::npos) << text;
}

TEST_F(CompareTest, QuotesNamesInCsv) {
  EXPECT_NE(compare({variant("a, \"b\"", 1us)}, options()).csv().find(",\"a, \"\"b\"\"\","),
            std::string::npos);
}

TEST_F(CompareTest, RejectsWhatCannotBeCompared) {
  COHORT_EXPECT_THROW_WITH(compare({}), UsageError, "[bench.compare] got 0 variants");
  COHORT_EXPECT_THROW_WITH(compare({variant("a", 1us)}, options().shapes({})), UsageError, "0 shapes");
  COHORT_EXPECT_THROW_WITH((compare({variant("a", 1us), variant("a", 2us)}, options())), UsageError,
                           "two variants are called 'a'");
  COHORT_EXPECT_THROW_WITH((compare({{"a", [](const Shape&) { return nullptr; }}}, options())), UsageError,
                           "'a' made nothing to measure");
  COHORT_EXPECT_THROW_WITH(compare({Variant::sampled("a", nullptr)}), UsageError,
                           "'a' made nothing to measure");
}

}  // namespace
}  // namespace cohort::bench
