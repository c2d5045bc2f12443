#include "cohort/train/internal/fit/fit_reports.h"

#include <gtest/gtest.h>

#include <array>

#include "cohort/data/loader.h"
#include "cohort/train/internal/fit/group_coordinator.h"

namespace cohort::train {
namespace {

/// Writes down what it hears.
struct Listener : Callback {
  void on_fit_begin(const FitInfo& info) override { fit = info; }
  void on_start_counts(const FitInfo& info) override { counted_from = info.first_step; }
  void on_first_batch(data::Batch& batch) override { batches.push_back(batch.number); }
  void on_step_end(const StepReport& report) override { steps.push_back(report); }
  void on_epoch_end(const EpochReport& report) override { epochs.push_back(report); }
  void on_save(std::int64_t step) override { saves.push_back(step); }
  void on_fit_end(const FitResult& told) override {
    result = told;
    ++num_ends;
  }

  FitInfo fit;
  std::int64_t counted_from = -1;
  std::vector<std::int64_t> batches, saves;
  std::vector<StepReport> steps;
  std::vector<EpochReport> epochs;
  FitResult result;
  int num_ends = 0;
};

class FitReportsTest : public testing::Test {
 protected:
  FitReportsTest() { reports.fit_begins({.epochs = 3, .steps_per_epoch = 5, .first_step = 5}); }

  void end_step(std::int64_t step, std::int64_t samples, double seconds) {
    progress.state.step = step;
    reports.throughput.add_samples(samples);
    reports.throughput.add_step(2);
    reports.step_ended(progress, 0.1, seconds);
  }

  const TrainerOptions options = TrainerOptions().epochs(3).log_every(2);
  const std::shared_ptr<Listener> listener = std::make_shared<Listener>();
  const std::vector<std::shared_ptr<Callback>> callbacks{listener};
  const GroupCoordinator ranks{nullptr};
  FitProgress progress{options, ranks};
  FitReports reports{options, callbacks, ranks};
};

TEST_F(FitReportsTest, TheStartAndTheFirstBatchAreHeardOnce) {
  EXPECT_EQ(listener->fit.steps_per_epoch, 5);
  EXPECT_FALSE(reports.counts());
  for (std::int64_t number = 0; number < 3; ++number) {
    data::Batch batch;
    batch.number = number;
    reports.batch_loaded(batch);
  }
  EXPECT_EQ(listener->batches, std::vector<std::int64_t>{0});
  reports.start_counts();
  EXPECT_TRUE(reports.counts());
  EXPECT_EQ(listener->counted_from, 5);
  reports.saving(6);
  EXPECT_EQ(listener->saves, std::vector<std::int64_t>{6});
}

/// Process 0 of an elastic run, or another one.
struct ElasticRank : GroupCoordinator {
  ElasticRank() : GroupCoordinator(nullptr) {}
  bool reports() const override { return is_first_now; }
  bool is_first_now = false;
};

TEST_F(FitReportsTest, AProcessThatBecomesTheFirstOneLaterHearsTheBeginAndItsFirstBatch) {
  const auto late = std::make_shared<Listener>();
  const std::vector<std::shared_ptr<Callback>> heard{late};
  ElasticRank rank;
  FitReports elastic(options, heard, rank);
  const auto load_batch = [&](std::int64_t number) {
    data::Batch batch;
    batch.number = number;
    elastic.batch_loaded(batch);
  };
  elastic.fit_begins({.epochs = 3});
  load_batch(0);
  EXPECT_EQ(late->fit.epochs, 0) << "another process reports";
  rank.is_first_now = true;
  elastic.start_anew({.epochs = 3, .first_step = 7});
  elastic.start_counts();
  load_batch(8);
  load_batch(9);
  EXPECT_EQ(late->fit.first_step, 7);
  EXPECT_EQ(late->counted_from, 7);
  EXPECT_EQ(late->batches, std::vector<std::int64_t>{8});
  elastic.start_anew({.epochs = 3, .first_step = 9});
  EXPECT_EQ(late->fit.first_step, 7) << "the begin is heard once";
}

TEST_F(FitReportsTest, AStepThatIsLoggedHasAveragesAndRatesBeginAnewAfterIt) {
  progress.state.epoch = 1;
  progress.add({{"loss", 3.0, 8}});
  end_step(7, 8, 1.5);
  end_step(8, 16, 0.5);
  end_step(9, 4, 0.5);
  ASSERT_EQ(listener->steps.size(), 3U);
  const StepReport& first = listener->steps[0];
  EXPECT_EQ(first.epoch, 2);
  EXPECT_EQ(first.step_in_epoch, 2);
  EXPECT_EQ(first.seconds, 1.5) << "the step's own, of the two seconds that it adds to the epoch";
  EXPECT_EQ(first.samples_per_second, 4);
  EXPECT_EQ(first.seconds_left, 16);
  EXPECT_FALSE(first.logged);
  EXPECT_TRUE(first.averages.empty());
  const StepReport& second = listener->steps[1];
  EXPECT_TRUE(second.logged);
  EXPECT_EQ(second.averages, (std::map<std::string, double>{{"loss", 3}}));
  EXPECT_EQ(second.samples_per_second, 6) << "of two steps";
  EXPECT_EQ(listener->steps[2].samples_per_second, 2) << "of one step";
}

TEST_F(FitReportsTest, TheReportOfAnEpochHasItsRatesAndTheResultItsMetrics) {
  progress.add({{"loss", 3.0, 8}});
  progress.state.step = 5;
  progress.state.epoch_seconds = 10;
  progress.state.wait_seconds = 2;
  progress.state.loader.samples_consumed = 40;
  const EpochReport report = reports.epoch_report(progress, 0.1);
  EXPECT_EQ(report.epoch, 1);
  EXPECT_EQ(report.samples_per_second, 4);
  EXPECT_EQ(report.data_wait_share, 0.2);
  EXPECT_EQ(report.metrics, (std::map<std::string, double>{{"train_loss", 3}}));
  reports.set_last_metrics(report.metrics);
  reports.epoch_ended(report);
  EXPECT_EQ(listener->epochs.size(), 1U);
  FitResult result;
  result.steps = 5;
  EXPECT_EQ(reports.fit_ends(result).metrics, report.metrics);
  EXPECT_EQ(listener->result.metrics, report.metrics);
  EXPECT_EQ(listener->result.steps, 5);
}

TEST_F(FitReportsTest, TheEndIsHeardOnceUnlessStepsFollow) {
  FitResult result;
  result.steps = 5;
  reports.set_last_metrics({{"val_loss", 0.5}});
  EXPECT_EQ(reports.fit_ends(result).metrics.at("val_loss"), 0.5);
  EXPECT_EQ(reports.fit_ends(result).metrics.at("val_loss"), 0.5);
  EXPECT_EQ(listener->num_ends, 1);
  result.steps = 8;
  reports.fit_ends(result);
  EXPECT_EQ(listener->num_ends, 2);
}

TEST_F(FitReportsTest, AfterAStartAnewAllIsHeardAgain) {
  FitResult result;
  result.steps = 5;
  EpochReport epoch;
  epoch.step = 5;
  const auto tell_all = [&] {
    end_step(5, 8, 1);
    reports.epoch_ended(epoch);
    reports.fit_ends(result);
  };
  const auto heard = [&] {
    return std::array<std::size_t, 3>{listener->steps.size(), listener->epochs.size(),
                                      static_cast<std::size_t>(listener->num_ends)};
  };
  tell_all();
  tell_all();
  EXPECT_EQ(heard(), (std::array<std::size_t, 3>{1, 1, 1}));
  // Another process has written to the run's files meanwhile.
  reports.start_anew({.epochs = 3, .steps_per_epoch = 5, .first_step = 4});
  tell_all();
  EXPECT_EQ(heard(), (std::array<std::size_t, 3>{2, 2, 2}));
}

}  // namespace
}  // namespace cohort::train
