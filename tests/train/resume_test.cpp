// Starts that are refused, and runs that go on.
#include <gtest/gtest.h>

#include "cohort/core/error.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::message_contains;
using test::read_file;
using test::SmallRun;

TEST(ResumeTest, AStartThatIsRefusedChangesNothingOnDisk) {
  const SmallRun run;
  run.start({"train.max_steps=7", "run.save_every_steps=2"});
  const auto before = run.files();
  const std::vector<std::vector<std::string>> refused = {
      {"run.resume=auto", "run.seed=7"},
      {"run.resume=auto", "model.name=lenet5", "data.image_size=28"},
      {"run.resume=auto", "model.options.hidden=9"},
      {"run.resume=auto", "train.batch_size=5"},
      {"run.resume=auto", "data.drop_last=true", "train.batch_size=100"},
      {"run.resume=auto", "data.kind=image_folder", "data.path=nowhere"},
      {"run.resume=auto", "run.best_metric=val_f1"},
      {"run.resume=auto", "optim.name=adam"},
      {"run.resume=step_00000002", "run.seed=7"},
      {"run.resume=step_00000099"},
      {"optim.lr=0.1"},  // without --resume
  };
  for (const std::vector<std::string>& overrides : refused) {
    EXPECT_THROW(run.start(overrides), Error) << overrides.back();
    EXPECT_EQ(run.files(), before) << overrides.back();
  }
  EXPECT_TRUE(run.resume().fit.finished);
}

TEST(ResumeTest, ARunThatIsRefusedBeforeItBeganLeavesNoFolder) {
  const SmallRun run;
  EXPECT_THROW(run.start({"run.best_metric=val_f1"}), UsageError);
  EXPECT_THROW(run.start({"data.drop_last=true", "train.batch_size=100"}), UsageError);
  EXPECT_FALSE(fs::exists(run.path()));
}

TEST(ResumeTest, WithoutABatchEveryScheduleSaysSo) {
  for (const char* schedule : {"constant", "step", "multistep", "cosine", "linear", "one_cycle"}) {
    for (const char* unit : {"epoch", "step"}) {
      const SmallRun run;
      COHORT_EXPECT_THROW_WITH(
          run.start({"data.drop_last=true", "train.batch_size=100", std::string("schedule.name=") + schedule,
                     std::string("schedule.unit=") + unit}),
          UsageError,
          "the training loader has no batch: its data set has 20 samples, a step takes 100, and drop_last "
          "leaves out less. Try: a smaller batch size");
    }
  }
}

}  // namespace
}  // namespace cohort::train
