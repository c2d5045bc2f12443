// What a path to a trained model may name, and model.weights, which is one.
#include "cohort/train/weights.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::SmallRun;
using test::write_file;

TEST(WeightsTest, ARunFolderIsItsBestCheckpointOrItsLast) {
  const SmallRun run;
  // val_accuracy is given for each epoch: the first one is the best of those that are equal.
  run.start({"optim.lr=0"});
  const fs::path checkpoints = run.path() / "checkpoints";
  const fs::path best = fs::canonical(checkpoints / "best"), last = fs::canonical(checkpoints / "last");
  ASSERT_NE(best, last);
  EXPECT_EQ(fs::canonical(find_weights(run.path())), best);
  EXPECT_EQ(fs::canonical(find_weights(checkpoints / "last")), last);
  EXPECT_EQ(find_weights(last / "model.safetensors"), last / "model.safetensors");

  const SmallRun never_evaluated;
  never_evaluated.start({"train.eval_every=0"});
  EXPECT_EQ(fs::canonical(find_weights(never_evaluated.path())),
            fs::canonical(never_evaluated.path() / "checkpoints" / "last"));
}

TEST(WeightsTest, ALinkMayBeAFileWithAName) {
  const test::TempDir dir;
  write_file(dir / "checkpoints/step_1/state.json", "{}");
  write_file(dir / "checkpoints/best", "step_1\n");
  EXPECT_EQ(find_weights(dir / "checkpoints/best"), dir / "checkpoints/step_1");
  EXPECT_EQ(find_weights(dir.path()), dir / "checkpoints/step_1");
}

TEST(WeightsTest, WhatIsNoTrainedModelIsRejectedSayingWhatIsOne) {
  const test::TempDir dir;
  const std::string hint = ". Try: a run folder (runs/NAME), a checkpoint (runs/NAME/checkpoints/last) or ";
  COHORT_EXPECT_THROW_WITH(find_weights(dir / "none"), DataError, "/none" + hint);
  COHORT_EXPECT_THROW_WITH(find_weights(dir.path()), DataError, "holds no checkpoint" + hint);
  fs::create_symlink("loop", dir / "loop");  // what a file system that fails for a moment says
  COHORT_EXPECT_THROW_WITH(find_weights(dir / "loop"), DataError, "/loop" + hint);
  const SmallRun run;
  COHORT_EXPECT_THROW_WITH(run.start({"model.weights=" + dir.path().string()}), DataError,
                           "holds no checkpoint" + hint);
}

TEST(WeightsTest, ARunStartsFromTheWeightsOfARun) {
  const SmallRun first, same;
  first.start();
  // Nothing is learned, so that it ends with what it began with.
  same.start({"model.weights=" + first.path().string(), "run.seed=5", "optim.lr=0", "train.max_steps=1"});
  EXPECT_EQ(same.model(), test::read_file(first.path() / "checkpoints" / "best" / "model.safetensors"));
}

}  // namespace
}  // namespace cohort::train
