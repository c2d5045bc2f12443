#include "cohort/train/internal/fit/run_saver.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "cohort/base/error.h"
#include "cohort/train/internal/fit/group_coordinator.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

struct SavedTask : Task {
  SavedTask() { add_module("", net.ptr()); }
  StepMetrics train_step(data::Batch&) override { return {}; }
  torch::nn::Linear net{2, 1};
};

class RunSaverTest : public testing::Test {
 protected:
  TrainerOptions in_folder() const { return TrainerOptions().run_dir(dir.path()).keep(0); }
  void save(RunSaver& saver, std::int64_t epoch, std::int64_t step, std::int64_t samples) const {
    RunState state;
    state.epoch = epoch;
    state.step = step;
    state.loader = {.epoch = epoch, .samples_consumed = samples};
    saver.write(task, state, false);
  }
  std::string last_link() const {
    return std::filesystem::read_symlink(dir / "checkpoints" / "last").filename().string();
  }

  const test::TempDir dir;
  const SavedTask task;
  const GroupCoordinator ranks{nullptr};
};

TEST_F(RunSaverTest, WithoutARunFolderNothingIsSavedAndNothingIsThereToResumeFrom) {
  TrainerOptions options;
  RunSaver saver(options, ranks);
  EXPECT_FALSE(saver.saves());
  EXPECT_FALSE(saver.writes());
  EXPECT_FALSE(saver.find({}));
  options.resume("auto");
  COHORT_EXPECT_THROW_WITH(saver.find({}), UsageError, "asked to resume from \"auto\" without a run folder");
}

TEST_F(RunSaverTest, AFormatThatDoesNotExistIsRejectedBeforeAStep) {
  const TrainerOptions options = in_folder().checkpoint_format("pt");
  COHORT_EXPECT_THROW_WITH(RunSaver(options, ranks), UsageError, "there is no tensor format 'pt'");
}

TEST_F(RunSaverTest, ACheckpointBetweenEpochsHasTheNumberOfTheEpochAndAnyOtherThatOfTheStep) {
  const TrainerOptions options = in_folder();
  RunSaver saver(options, ranks);
  EXPECT_TRUE(saver.saves() && saver.writes());
  EXPECT_TRUE(saver.last().empty());
  save(saver, 2, 10, 0);
  EXPECT_EQ(saver.last().filename(), "epoch_0002");
  save(saver, 2, 12, 4);
  EXPECT_EQ(saver.last().filename(), "step_00000012");
  EXPECT_EQ(last_link(), "step_00000012");
}

TEST_F(RunSaverTest, ARunResumesFromWhatItsOptionsSayAndGoesBackThereWhenItsStartCounts) {
  const TrainerOptions options = in_folder();
  RunSaver before(options, ranks);
  save(before, 1, 5, 0);
  const std::filesystem::path first = before.last();
  save(before, 2, 10, 0);
  const TrainerOptions newest = in_folder().resume("auto"), named = in_folder().resume(first.string());
  EXPECT_EQ(RunSaver(newest, ranks).find({}).value().folder.filename(), "epoch_0002");
  RunSaver saver(named, ranks);
  EXPECT_EQ(saver.find({}).value().folder.filename(), "epoch_0001");
  EXPECT_EQ(saver.last().filename(), "epoch_0001");
  EXPECT_EQ(last_link(), "epoch_0002") << "the start may still fail";
  saver.start_counts(saver.last());
  EXPECT_EQ(last_link(), "epoch_0001");
}

TEST_F(RunSaverTest, TheRunFolderIsThereOnceTheStartCountsAndNotBefore) {
  const std::filesystem::path folder = dir / "runs" / "first";
  const TrainerOptions options = in_folder().run_dir(folder), none;
  RunSaver saver(options, ranks), without(none, ranks);
  EXPECT_FALSE(saver.find({}));
  EXPECT_FALSE(std::filesystem::exists(folder)) << "the start may still fail";
  saver.start_counts(saver.last());
  EXPECT_TRUE(std::filesystem::is_directory(folder));
  EXPECT_NO_THROW(without.start_counts(""));

  test::write_file(dir / "taken", "a file");
  const TrainerOptions below_a_file = in_folder().run_dir(dir / "taken" / "run");
  COHORT_EXPECT_THROW_WITH(RunSaver(below_a_file, ranks).start_counts(""), SystemError, "cannot make ");
}

TEST_F(RunSaverTest, ACheckpointThatRank0CannotReadEndsTheResumeOfAllRanks) {
  const TrainerOptions options = in_folder(), newest = in_folder().resume("last");
  RunSaver before(options, ranks);
  save(before, 1, 5, 0);
  std::filesystem::resize_file(before.last() / "model.safetensors", 10);
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    const GroupCoordinator both(&group);
    RunSaver saver(newest, both);
    COHORT_EXPECT_THROW_WITH(saver.find({}), Error,
                             group.rank() == 0 ? "model.safetensors" : "rank 0 failed: ");
  });
}

TEST_F(RunSaverTest, AutoStartsAfreshWhereThereIsNothingAndANameIsRejected) {
  const TrainerOptions newest = in_folder().resume("auto"), best = in_folder().resume("best");
  EXPECT_FALSE(RunSaver(newest, ranks).find({}));
  COHORT_EXPECT_THROW_WITH(RunSaver(best, ranks).find({}), DataError, "no checkpoint \"best\" in ");
}

}  // namespace
}  // namespace cohort::train
