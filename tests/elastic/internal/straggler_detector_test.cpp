// Slow processes in random sequences of step times: found where others wait, and never named where nobody
// does.
#include "cohort/elastic/internal/straggler_detector.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/base/timeline.h"
#include "cohort/elastic/internal/straggler_watch.h"
#include "tests/support/contains.h"

namespace cohort::elastic {
namespace {

std::vector<StragglerProcess> processes_of(const std::vector<int>& virtual_ranks) {
  std::vector<StragglerProcess> processes;
  for (const int count : virtual_ranks) {
    processes.push_back({.name = std::to_string(processes.size()), .num_virtual_ranks = count});
  }
  return processes;
}

// Times of processes that have one virtual rank, with noise of each step.
struct Steps {
  Steps(std::uint64_t seed, std::size_t num_processes, double noise)
      : random(seed), factors(num_processes, 1), normal(0, noise) {}

  std::vector<double> next() {
    std::vector<double> seconds;
    for (const double factor : factors) {
      const bool is_long = share(random) < long_steps;
      seconds.push_back(base_seconds * factor * std::exp(normal(random)) * (is_long ? 3 : 1));
    }
    return seconds;
  }

  std::mt19937_64 random;
  double base_seconds = 0.1;
  std::vector<double> factors;  // 1.3: 30 % slower
  double long_steps = 0;        // share of steps that take three times as long
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> share{0, 1};
};

std::vector<StragglerNews> feed(StragglerDetector& detector, Steps& steps, int count) {
  std::vector<StragglerNews> all;
  for (int i = 0; i < count; ++i) {
    const auto news = detector.add_step(steps.next());
    all.insert(all.end(), news.begin(), news.end());
  }
  return all;
}

TEST(StragglerDetectorTest, AProcessThatIsSlowerByThirtyPercentIsFoundAndSoIsItsRecovery) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const std::size_t count = 2 + random() % 7, slow = random() % count;
    Steps steps(seed, count, 0.01 * static_cast<double>(random() % 11));
    steps.base_seconds = std::pow(10, -static_cast<double>(random() % 4));
    steps.long_steps = 0.02;
    StragglerDetector detector;
    detector.set_processes(processes_of(std::vector<int>(count, 1)));
    EXPECT_TRUE(feed(detector, steps, static_cast<int>(random() % 200)).empty());
    steps.factors[slow] = 1.3;
    const auto found = feed(detector, steps, 120);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_TRUE(found[0].is_slow);
    EXPECT_EQ(found[0].process, static_cast<int>(slow));
    // The first look may see a window with steps of before.
    EXPECT_GT(found[0].slowdown, 0.1);
    EXPECT_LT(found[0].slowdown, 0.45);
    EXPECT_NEAR(found[0].extra_seconds, found[0].seconds * found[0].slowdown / (1 + found[0].slowdown),
                1e-12);
    EXPECT_TRUE(detector.is_slow(static_cast<int>(slow)));
    EXPECT_EQ(detector.num_slow(), 1U);
    steps.factors[slow] = 1;
    const auto recovered = feed(detector, steps, 120);
    ASSERT_EQ(recovered.size(), 1U);
    EXPECT_FALSE(recovered[0].is_slow);
    EXPECT_EQ(recovered[0].process, static_cast<int>(slow));
    EXPECT_EQ(detector.num_slow(), 0U);
  }
}

TEST(StragglerDetectorTest, ItsNumbersAreThoseOfTheWindow) {
  StragglerDetector detector;
  detector.set_processes(processes_of({1, 1, 1}));
  std::vector<StragglerNews> news;
  for (int i = 0; i < 50; ++i) news = detector.add_step(std::vector<double>{0.1, 0.13, 0.1});
  ASSERT_EQ(news.size(), 1U) << "at the first look";
  EXPECT_NEAR(news[0].seconds, 0.13, 1e-9);
  EXPECT_NEAR(news[0].extra_seconds, 0.03, 1e-9);
  EXPECT_NEAR(news[0].slowdown, 0.3, 1e-9);
}

// Two ranks of a slow host: neither comes last in each step.
TEST(StragglerDetectorTest, SeveralSlowProcessesAreAllFound) {
  Steps steps(1, 6, 0.05);
  steps.factors[2] = steps.factors[3] = 1.5;
  StragglerDetector detector;
  detector.set_processes(processes_of(std::vector<int>(6, 1)));
  const auto found = feed(detector, steps, 60);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].process, 2);
  EXPECT_EQ(found[1].process, 3);
}

int false_alarms(const StragglerOptions& options, int looks) {
  int alarms = 0, kind = 0;
  for (const double noise : {0.05, 0.15, 0.3, 0.15}) {
    const std::size_t count = std::size_t{2} << (kind % 3);
    Steps steps(static_cast<std::uint64_t>(++kind), count, noise);
    steps.long_steps = kind == 4 ? 0.1 : 0;
    StragglerDetector detector(options);
    detector.set_processes(processes_of(std::vector<int>(count, 1)));
    for (const StragglerNews& news : feed(detector, steps, looks / 4 * options.check_every)) {
      alarms += news.is_slow ? 1 : 0;
    }
  }
  return alarms;
}

TEST(StragglerDetectorTest, EqualProcessesGiveNoFalseAlarmInAHundredThousandLooks) {
  EXPECT_EQ(false_alarms({}, 100'000), 0);
  EXPECT_GT(false_alarms({.least_share = 0.5, .least_errors = 0}, 4'000), 10) << "noise that is a trap";
}

TEST(StragglerDetectorTest, ASpellOfTenSlowStepsIsNotNamed) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Steps steps(seed, 2 + seed % 4, 0.05);
    StragglerDetector detector;
    detector.set_processes(processes_of(std::vector<int>(steps.factors.size(), 1)));
    feed(detector, steps, 60 + static_cast<int>(seed % 10));
    steps.factors[1] = 5;
    EXPECT_TRUE(feed(detector, steps, 10).empty()) << seed;
    steps.factors[1] = 1;
    EXPECT_TRUE(feed(detector, steps, 100).empty()) << seed;
  }
}

std::vector<double> uneven_step(const std::vector<int>& counts, double fixed, Steps& noise) {
  std::vector<double> seconds = noise.next();
  for (std::size_t i = 0; i < counts.size(); ++i) seconds[i] *= fixed + (1 - fixed) * counts[i];
  return seconds;
}

TEST(StragglerDetectorTest, AProcessWithMoreVirtualRanksIsNotSlow) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    membership::Generation generation;
    const int count = 2 + static_cast<int>(random() % 6);
    generation.members = {{1, "a", "a:1", count}};
    generation.virtual_ranks = count + static_cast<int>(random() % 20);
    std::vector<int> counts;
    for (int i = 0; i < count; ++i) counts.push_back(generation.block(i).end - generation.block(i).first);
    StragglerDetector detector;
    detector.set_processes(processes_of(counts));
    Steps noise(seed, counts.size(), 0.05);
    const double fixed = 0.1 * static_cast<double>(random() % 8);  // of the time of one virtual rank
    for (int i = 0; i < 200; ++i) EXPECT_TRUE(detector.add_step(uneven_step(counts, fixed, noise)).empty());
  }
}

TEST(StragglerDetectorTest, AProcessWithFewerVirtualRanksIsSlowWhereOthersWaitForIt) {
  for (const double factor : {1.4, 2.2}) {
    StragglerDetector detector;
    detector.set_processes(processes_of({3, 3, 2}));
    Steps noise(1, 3, 0.02);
    noise.factors[2] = factor;
    std::vector<StragglerNews> all;
    for (int i = 0; i < 60; ++i) {
      const auto news = detector.add_step(uneven_step({3, 3, 2}, 0, noise));
      all.insert(all.end(), news.begin(), news.end());
    }
    EXPECT_EQ(all.size(), factor > 2 ? 1U : 0U) << "1.4 times 2 is less than 3";
  }
}

TEST(StragglerDetectorTest, StepsWithATimeThatIsNotKnownAreLeftOut) {
  StragglerDetector detector;
  detector.set_processes(processes_of({1, 1}));
  for (int i = 0; i < 100; ++i) {
    for (const double bad : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_TRUE(detector.add_step(std::vector<double>{0.1, bad}).empty());
    }
    EXPECT_TRUE(detector.add_step(std::vector<double>{0.1}).empty());
  }
  int news = 0;
  for (int i = 0; i < 50; ++i)
    news += static_cast<int>(detector.add_step(std::vector<double>{0.1, 0.2}).size());
  EXPECT_EQ(news, 1);
  detector.set_processes(processes_of({4}));
  EXPECT_TRUE(detector.add_step(std::vector<double>{0.1}).empty()) << "alone";
}

TEST(StragglerDetectorTest, AProcessThatStaysInTheRunIsNotNamedTwice) {
  Steps steps(3, 3, 0.02);
  steps.factors[2] = 1.5;
  StragglerDetector detector;
  detector.set_processes(processes_of({1, 1, 1}));
  EXPECT_EQ(feed(detector, steps, 100).size(), 1U);
  // Process 0 has gone: the slow one has another number now.
  detector.set_processes({{"1", 1}, {"2", 2}});
  EXPECT_TRUE(detector.is_slow(1));
  EXPECT_FALSE(detector.is_slow(0));
  Steps fewer(4, 2, 0.02);
  fewer.factors[1] = 3;
  EXPECT_TRUE(feed(detector, fewer, 100).empty());
  fewer.factors[1] = 1;
  const auto news = feed(detector, fewer, 100);
  ASSERT_EQ(news.size(), 1U);
  EXPECT_FALSE(news[0].is_slow);
}

membership::Generation two_nodes() {
  membership::Generation generation;
  generation.number = 3;
  generation.members = {{1, "a", "n1:41", 1}, {4, "b", "n2:42", 2}};
  generation.virtual_ranks = 3;
  return generation;
}

TEST(StragglerWatchTest, ProcessZeroAloneNamesASlowProcessAndAllMarkIt) {
  for (const int process : {0, 2}) {
    base::Timeline::start();
    StragglerWatch watch;
    watch.enter(two_nodes(), process);
    std::string log;
    base::set_log_sink([&](base::LogLevel, std::string_view line) { log += std::string(line) + "\n"; });
    for (int i = 0; i < 100; ++i) watch.add_step(std::vector<double>{0.1, 0.1, 0.15});
    const std::string slow = log;
    for (int i = 0; i < 100; ++i) watch.add_step(std::vector<double>{0.1, 0.1, 0.1});
    base::Timeline::stop();
    base::set_log_sink(nullptr);
    EXPECT_TRUE(test::contains(base::Timeline::json(), "slow: process 2 (local rank 1 of agent 4 at n2:42)"));
    if (process != 0) {
      EXPECT_EQ(log, "");
      continue;
    }
    EXPECT_TRUE(test::contains(slow,
                               "process 2 (local rank 1 of agent 4 at n2:42) is slow: its median step "
                               "takes 150 ms, 50 ms (50 %) longer than that of the other processes"))
        << slow;
    EXPECT_EQ(slow.find("is slow"), slow.rfind("is slow")) << "once";
    EXPECT_TRUE(test::contains(log, "is not slow any more: its median step takes 100 ms"));
  }
}

// On each process, for a step.
TEST(StragglerChild, DISABLED_MeasuresTheCostOfAStep) {
  for (const std::size_t count : {2U, 4U, 16U, 64U, 256U}) {
    Steps steps(1, count, 0.1);
    std::vector<std::vector<double>> times;
    for (int i = 0; i < 1'000; ++i) times.push_back(steps.next());
    StragglerDetector detector;
    detector.set_processes(processes_of(std::vector<int>(count, 1)));
    const auto begin = std::chrono::steady_clock::now();
    for (int round = 0; round < 20; ++round) {
      for (const auto& step : times) detector.add_step(step);
    }
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    std::cout << count << " processes: " << time.count() / 20'000 << " us a step\n";
  }
}

}  // namespace
}  // namespace cohort::elastic
