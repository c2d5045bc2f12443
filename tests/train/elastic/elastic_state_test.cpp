// What processes of an elastic run tell each other with their states.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/support/comes_true.h"
#include "tests/train/elastic/elastic_job.h"
#include "tests/train/elastic/wrapped_session.h"

namespace cohort::train {
namespace {

using nlohmann::json;

/// The results of one process, and of a second one that comes after step `join_step`. `change`: changes the
/// text of the state that the second one copies.
std::vector<FitResult> results_beside_newcomer(const ElasticSetting& setting,
                                               const std::filesystem::path& folder,
                                               const std::function<void(json&)>& change,
                                               std::int64_t join_step = 2) {
  std::mutex mutex;
  std::vector<FitResult> results;
  std::atomic<bool> is_wanted = false;
  const auto faults = [&](int, int) {
    return is_wanted.exchange(false) ? test::FakeFault::kJoin : test::FakeFault::kNone;
  };
  test::FakeRun run(kElasticRanks, faults, [&](int id, std::shared_ptr<elastic::Session> session) {
    ElasticSetting own = setting;
    if (id == 0) {
      own.on_step = [&is_wanted, session, join_step](const StepReport& report) {
        if (report.step != join_step) return;
        is_wanted = true;
        test::wait_until([&] { return session->must_enter(); });
      };
    } else {
      session = std::make_shared<test::WrappedSession>(
          session, test::WrappedSession::Listener{.on_load = [&](elastic::StateSnapshot& state) {
            json text = json::parse(state.text);
            change(text);
            state.text = text.dump();
          }});
    }
    const FitResult result = train_elastic(own, folder, std::move(session));
    const std::lock_guard lock(mutex);
    results.push_back(result);
  });
  run.run(1);
  return results;
}

// As where one process has committed a step, and all others have lost it and made it again.
TEST(ElasticStateTest, ARequestThatOneProcessAloneHasHeardIsMadeAgain) {
  const test::TempDir dir;
  const std::vector<FitResult> results = results_beside_newcomer({}, dir.path(), [&](json& text) {
    json words = json::parse(text.at("step").at("words").get<std::string>());
    words.at("requests").at(0) = SIGTERM;
    text.at("step").at("words") = words.dump();
  });
  ASSERT_EQ(results.size(), 2U);
  for (const FitResult& result : results) {
    EXPECT_EQ(result.signal, SIGTERM);
    EXPECT_EQ(result.steps, 3);
  }
}

TEST(ElasticStateTest, AProcessThatComesInTheMiddleOfAnEpochHasTheMetricsOfTheLastOne) {
  const test::TempDir dir;
  constexpr std::int64_t kJoinStep = 6;  // of the second epoch
  const std::vector<FitResult> results = results_beside_newcomer(
      {}, dir.path(),
      [&](json& text) {
        json words = json::parse(text.at("step").at("words").get<std::string>());
        words.at("requests").at(0) = SIGTERM;
        text.at("step").at("words") = words.dump();
      },
      kJoinStep);
  ASSERT_EQ(results.size(), 2U);
  for (const FitResult& result : results) {
    EXPECT_EQ(result.steps, kJoinStep + 1);
    EXPECT_TRUE(result.metrics.contains("val_loss"));
    EXPECT_EQ(result.metrics, results.front().metrics);
  }
}

TEST(ElasticStateTest, ASaveByTheClockFallsDueAsIfTheProcessesHadNotChanged) {
  const test::TempDir dir;
  const ElasticSetting setting{.change = [](TrainerOptions& options) {
    options.save_every_steps(0).save_every(0).save_every_minutes(60).eval_every(0);
  }};
  // The newcomer is not the first process.
  results_beside_newcomer(setting, dir.path(), [](json& text) {
    const double seconds = text.at("step").at("seconds_since_save");
    EXPECT_GE(seconds, 0);
    EXPECT_LT(seconds, 3600);
    text.at("step").at("seconds_since_save") = seconds + 3600;
  });
  EXPECT_TRUE(std::filesystem::exists(dir / "checkpoints" / "step_00000003"));
}

TEST(ElasticStateTest, AProcessThatCopiesTheEndOfARunHasItsMetrics) {
  const auto results_of = [](int victim_point, int& points) {
    const auto setting_of = [](int) {
      return ElasticSetting{.change = [](TrainerOptions& options) { options.epochs(1); }};
    };
    return results_beside_successor(setting_of, victim_point, points);
  };
  int points = 0, ignored = 0;
  const std::map<std::string, double> metrics = results_of(-1, points).at(0).metrics;
  EXPECT_TRUE(metrics.contains("val_loss"));
  int num_copied = 0;
  for (int point = points - 8; point < points; point += 3) {
    const std::vector<FitResult> results = results_of(point, ignored);
    num_copied += results.size() == 2 ? 1 : 0;
    for (const FitResult& result : results) {
      if (result.rank >= 0) EXPECT_EQ(result.metrics, metrics) << "dies at point " << point;
    }
  }
  EXPECT_GT(num_copied, 0);
}

TEST(ElasticStateTest, WithoutAFolderTheStateDoesNotGrowWithTheSteps) {
  const test::TempDir dir;
  std::map<std::uint64_t, std::size_t> lengths;
  const ElasticSetting setting{
      .change = [](TrainerOptions& options) { options.run_dir("").resume("").epochs(8).eval_every(0); }};
  test::FakeRun run(kElasticRanks, {}, [&](int, std::shared_ptr<elastic::Session> session) {
    const auto note = [&](std::uint64_t step, const elastic::StateSnapshot& state) {
      lengths[step] = state.text.size();
    };
    train_elastic(
        setting, dir.path(),
        std::make_shared<test::WrappedSession>(session, test::WrappedSession::Listener{.on_commit = note}));
  });
  run.run(1);
  EXPECT_LT(lengths.at(30), lengths.at(2) + 300) << "lines of 28 steps have 1000 bytes and more";
}

}  // namespace
}  // namespace cohort::train
