// Whatever the limit of steps, the interval of saves and the length of an epoch: the last checkpoint has what
// the result of fit() says, and a run that resumes from it has nothing left to do.
#include <gtest/gtest.h>

#include <random>

#include "cohort/base/error.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/train/internal/fit/run_state.h"
#include "tests/support/seeds.h"
#include "tests/support/temp_dir.h"
#include "tests/train/classifier_job.h"

namespace cohort::train {
namespace {

struct LastEpochs : Callback {
  void on_epoch_end(const EpochReport& report) override { reports.push_back(report); }
  std::vector<EpochReport> reports;
};

FitResult fit_limited(const TrainerOptions& options, data::Loader& loader, data::Loader& eval,
                      LastEpochs* heard = nullptr) {
  test::ClassifierJob job;
  Trainer trainer(options);
  const auto epochs = std::make_shared<LastEpochs>();
  trainer.add_callback(epochs);
  const FitResult result = trainer.fit(*job.task, loader, &eval);
  if (heard != nullptr) *heard = *epochs;
  return result;
}

void expect_last_is_result(const TrainerOptions& options, data::Loader& loader, data::Loader& eval) {
  LastEpochs heard, again;
  const FitResult result = fit_limited(options, loader, eval, &heard);
  const checkpoint::RunCheckpoints checkpoints(options.run_dir() / "checkpoints");
  const auto last = checkpoints.find("last");
  ASSERT_TRUE(last);
  EXPECT_EQ(result.last_checkpoint, *last);
  const RunState state = run_of(checkpoint::read_manifest(*last).state);
  EXPECT_EQ(state.step, result.steps);
  EXPECT_EQ(state.epoch, result.epochs);
  EXPECT_EQ(state.reported_step, result.steps);
  EXPECT_EQ(state.best_epoch, result.best_epoch);
  EXPECT_EQ(state.best, result.best);
  if (result.best_epoch > 0) {
    const auto best = checkpoints.find("best");
    ASSERT_TRUE(best);
    EXPECT_EQ(run_of(checkpoint::read_manifest(*best).state).best_epoch, result.best_epoch);
    EXPECT_EQ(*best == *last, heard.reports.back().best);
  }
  const FitResult nothing = fit_limited(TrainerOptions(options).resume("auto"), loader, eval, &again);
  EXPECT_TRUE(again.reports.empty()) << "an epoch is reported again";
  EXPECT_EQ(nothing.best, result.best);
  EXPECT_EQ(nothing.best_epoch, result.best_epoch);
}

TEST(LastCheckpointTest, ASaveOfTheLastStepDoesNotKeepOutTheOneOfItsEvaluation) {
  const test::TempDir folder;
  data::Loader loader = test::make_loader(), eval = test::make_loader(0, false);
  // The limit cuts the first epoch short, and the last step is saved by itself.
  expect_last_is_result(
      TrainerOptions().epochs(9).seed(11).max_steps(4).save_every_steps(2).run_dir(folder.path()), loader,
      eval);
}

TEST(LastCheckpointTest, ItHasWhatTheResultSaysForAnyLimitAndInterval) {
  const test::Seeds seeds = test::Seeds::usual(25);
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    SCOPED_TRACE(base::concat("COHORT_RANDOM_FIRST=", seed));
    std::minstd_rand random(seed + 1);
    const test::TempDir folder;
    const auto pick = [&](unsigned below) { return static_cast<std::int64_t>((random() >> 8) % below); };
    data::Loader loader(test::make_data(), {.batch_size = 4 + 4 * pick(6), .shuffle = true, .seed = 5});
    data::Loader eval = test::make_loader(0, false);
    const TrainerOptions options = TrainerOptions()
                                       .epochs(1 + pick(3))
                                       .seed(11)
                                       .max_steps(pick(3) == 0 ? 0 : 1 + pick(12))
                                       .save_every(pick(3))
                                       .save_every_steps(pick(4))
                                       .eval_every(pick(3))
                                       .keep(pick(3))
                                       .run_dir(folder.path());
    expect_last_is_result(options, loader, eval);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace cohort::train
