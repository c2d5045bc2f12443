// Starts that are rejected, and runs that resume.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/train/internal/fit/run_state.h"
#include "tests/support/source_dir.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::Logged;
using test::message_contains;
using test::read_file;
using test::SmallRun;
using test::write_file;

fs::path last(const SmallRun& run) {
  return fs::canonical(run.path() / "checkpoints" / "last");
}

RunState state_of(const fs::path& checkpoint) {
  return run_of(checkpoint::read_manifest(checkpoint).state);
}

/// Changes the state of a checkpoint.
template <typename Change>
void change(const fs::path& folder, const Change& how) {
  checkpoint::Manifest manifest = checkpoint::read_manifest(folder);
  how(manifest.state["run"]);
  fs::remove(folder / "state.json");
  checkpoint::write_manifest(folder, manifest);
}

/// The initial learning rate in the last checkpoint.
double initial_rate(const SmallRun& run) {
  const auto state = checkpoint::read_manifest(last(run)).state;
  return state.at("optimizers").at("").at("group.0.initial_lr").get<double>();
}

/// Rows of metrics.csv as maps from column to cell.
std::vector<std::map<std::string, std::string>> epochs_of(const SmallRun& run) {
  std::istringstream lines(read_file(run.path() / "metrics.csv"));
  std::vector<std::string> header;
  std::vector<std::map<std::string, std::string>> rows;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream cells(line);
    std::map<std::string, std::string> row;
    std::size_t column = 0;
    for (std::string cell; std::getline(cells, cell, ','); ++column) {
      if (header.size() == column) {
        header.push_back(cell);
      } else {
        row[header.at(column)] = cell;
      }
    }
    if (!row.empty()) rows.push_back(row);
  }
  return rows;
}

/// Images of two classes, on which a perceptron trains.
struct ImageRun : SmallRun {
  ImageRun() {
    data::Image image;
    image.reshape(4, 4, 1);
    for (const char* folder : {"train/a", "train/b", "val/a", "val/b", "other/a", "other/b"}) {
      for (int i = 0; i < 4; ++i) {
        for (std::size_t k = 0; k < image.pixels.size(); ++k) {
          image.pixels[k] = static_cast<std::uint8_t>((k * static_cast<std::size_t>(i + 3) + folder[0]) * 7);
        }
        const std::vector<std::byte> bytes = data::encode_png(image);
        write_file(root() / "data" / folder / (std::to_string(i) + ".png"),
                   {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      }
    }
  }
  std::vector<std::string> words(std::vector<std::string> more = {}) const {
    more.insert(more.begin(),
                {"data.type=image_folder", "data.path=" + (root() / "data").string(), "model.num_classes=0",
                 "data.train_transforms=none", "data.shuffle=false", "data.val_transforms=none"});
    return more;
  }
};

TEST(ResumeTest, AStartThatIsRejectedChangesNothingOnDisk) {
  const SmallRun run;
  run.start({"train.max_steps=7", "run.save_every_steps=2"});
  const auto before = run.files();
  const std::vector<std::vector<std::string>> rejected = {
      {"run.resume=auto", "run.seed=7"},
      {"run.resume=auto", "model.name=lenet5", "data.image_size=28"},
      {"run.resume=auto", "model.options.hidden=9"},
      {"run.resume=auto", "train.batch_size=5"},
      {"run.resume=auto", "data.drop_last=true", "train.batch_size=100"},
      {"run.resume=auto", "data.type=image_folder", "data.path=nowhere"},
      {"run.resume=auto", "run.best_metric=val_f1"},
      {"run.resume=auto", "optim.name=adam"},
      {"run.resume=step_00000002", "run.seed=7"},
      {"run.resume=step_00000099"},
      {"optim.lr=0.1"},  // without --resume
  };
  for (const std::vector<std::string>& overrides : rejected) {
    EXPECT_THROW(run.start(overrides), Error) << overrides.back();
    EXPECT_EQ(run.files(), before) << overrides.back();
  }
  EXPECT_TRUE(run.resume().fit.finished);
}

TEST(ResumeTest, AStartThatFailsAtItsFirstBatchChangesNothingOnDisk) {
  const ImageRun run;
  run.start(run.words({"train.epochs=4"}));
  const fs::path image = run.root() / "data" / "train" / "a" / "0.png";
  const std::string bytes = read_file(image);
  const auto before = run.files();
  const std::string from = "run.resume=" + (run.path() / "checkpoints" / "epoch_0001").string();
  const auto fails = [&](const std::vector<std::string>& more) {
    EXPECT_ANY_THROW(run.start(run.words(more))) << more.back();
    EXPECT_EQ(run.files(), before) << more.back();
  };
  fails({from, "data.train_transforms=[{Resize: [6, 6]}]"});
  fails({from, "data.train_transforms=[{Resize: [6, 6]}]", "train.eval_every=0"});
  fails({"run.resume=auto", "train.epochs=5", "data.train_transforms=[{Resize: [6, 6]}]"});
  fails({from, "data.std=[1e-45]"});  // a loss that is not finite
  write_file(image, bytes.substr(0, bytes.size() / 2));
  fails({from});
  write_file(image, bytes);
  EXPECT_TRUE(run.start(run.words({from})).fit.finished);
  const ImageRun fresh;
  EXPECT_ANY_THROW(fresh.start(fresh.words({"data.train_transforms=[{Resize: [6, 6]}]"})));
  EXPECT_FALSE(fs::exists(fresh.path()));
}

TEST(ResumeTest, WhereNothingIsLeftToDoItIsSaidAndNothingIsWritten) {
  const SmallRun run;
  run.start();
  const auto before = run.files();
  const Logged log;
  EXPECT_TRUE(run.resume({"optim.lr=7", "run.tensorboard=true"}).fit.finished);
  EXPECT_TRUE(message_contains(log.text(), "nothing is left to do: 3 of 3 epochs are complete"));
  EXPECT_EQ(run.files(), before);
  EXPECT_TRUE(run.resume({"train.epochs=5", "train.max_steps=15"}).fit.finished);
  EXPECT_TRUE(message_contains(log.text(), "15 of 15 steps are done"));
}

TEST(ResumeTest, AnEpochWithoutAStepLeftIsReportedWithTheRateThatRan) {
  const SmallRun run;
  run.start({"schedule.name=cosine", "train.max_steps=10", "train.epochs=4", "run.save_every_steps=9"});
  const std::string rate = epochs_of(run).at(1).at("lr");
  // As a signal after the epoch's last step leaves it, before evaluation.
  const fs::path before = run.path() / "checkpoints" / "step_00000009";
  const nlohmann::json meters = checkpoint::read_manifest(before).state.at("run").at("meters");
  change(last(run), [&](nlohmann::json& state) {
    state["meters"] = meters;
    state["epoch"] = state["loader"]["epoch"] = 1;
    state["loader"]["samples_consumed"] = 20;
    state["reported_step"] = 5;
  });
  run.resume({"schedule.name=cosine", "train.epochs=5"});
  ASSERT_EQ(epochs_of(run).size(), 5u);
  EXPECT_EQ(epochs_of(run).at(1).at("lr"), rate);
  EXPECT_NE(epochs_of(run).at(2).at("lr"), rate);
}

TEST(ResumeTest, TheRatesOfTheLastAndTheNextStepAreSaid) {
  const SmallRun run;
  run.start({"schedule.name=step", "schedule.step_size=1", "schedule.gamma=0.5"});
  const Logged log;
  run.resume({"train.epochs=5"});
  EXPECT_TRUE(message_contains(log.text(), "learning rate: 0.0125 at the last step, 0.05 at the next"));
}

TEST(ResumeTest, AnotherRateThanAnOldCheckpointsIsSaid) {
  const SmallRun run;
  run.start({"optim.lr=0.05"});
  change(last(run), [](nlohmann::json& state) { state.erase("description"); });
  const Logged log;
  run.resume({"train.epochs=4", "optim.lr=0.0001"});
  EXPECT_TRUE(message_contains(log.text(), "learning rates before schedules are 0.0001, not the 0.05 of"));
}

TEST(ResumeTest, AScaledRateStaysWhileAStepKeepsItsSamples) {
  for (const auto& [scaling, rate] :
       std::map<std::string, double>{{"none", 0.05}, {"linear", 0.1}, {"sqrt", 0.05 * std::sqrt(2.0)}}) {
    const SmallRun run;
    const auto words = [&](const std::vector<std::string>& more) {
      std::vector<std::string> all = {"optim.lr_scaling=" + scaling};
      all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    run.start(
        words({"train.batch_size=2", "train.accumulate=2", "train.global_batch_size=8", "train.epochs=1"}));
    EXPECT_DOUBLE_EQ(initial_rate(run), rate) << scaling;
    run.resume(words({"train.batch_size=8", "train.epochs=2"}));
    EXPECT_DOUBLE_EQ(initial_rate(run), rate) << scaling;
    run.resume(words({"train.batch_size=4", "train.accumulate=2", "train.epochs=3"}));
    EXPECT_DOUBLE_EQ(initial_rate(run), rate) << scaling << ", resumed twice";
    run.resume(words({"train.batch_size=4", "train.accumulate=2", "train.epochs=4", "optim.lr=0.01"}));
    EXPECT_DOUBLE_EQ(initial_rate(run), rate / 5) << scaling << ", with another rate";
  }
}

TEST(ResumeTest, AfterAFallbackTheCheckpointThatIsTakenIsCompared) {
  const SmallRun run;
  run.start({"train.epochs=2"});
  run.resume({"train.epochs=3", "optim.lr=0.01"});
  const fs::path damaged = last(run) / "model.safetensors";
  std::string bytes = read_file(damaged);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(damaged, bytes);
  const Logged log;
  run.resume({"train.epochs=3", "optim.lr=0.01"});
  EXPECT_TRUE(message_contains(log.text(), "falling back to the checkpoint "));
  EXPECT_TRUE(message_contains(log.text(), "optim.lr 0.05 -> 0.01"));
  EXPECT_TRUE(message_contains(log.text(), "epoch 2, step 10"));
}

TEST(ResumeTest, AStepOfAnOldCheckpointIsNotTakenForTheOneThatIsAskedFor) {
  const SmallRun run;
  run.start({"train.epochs=1"});
  change(last(run), [](nlohmann::json& state) {
    state.erase("description");
    state["world_size"] = 2;
  });
  COHORT_EXPECT_THROW_WITH(run.resume({"train.global_batch_size=16"}), UsageError,
                           "made with 4 samples a step, this run has 16");
  EXPECT_TRUE(run.resume({"train.batch_size=8"}).fit.finished);  // a step keeps its 4
}

TEST(ResumeTest, WeightsThatARunBeganWithAreNotNeededToContinue) {
  const SmallRun first, run;
  first.start();
  const fs::path weights = run.root() / "w.safetensors";
  fs::copy_file(last(first) / "model.safetensors", weights);
  run.start({"train.max_steps=7", "model.weights=" + weights.string()});
  fs::remove(weights);
  const SmallRun moved;
  fs::copy(run.path(), moved.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  const Logged log;
  run.resume({"model.weights=" + weights.string()});
  EXPECT_TRUE(message_contains(log.text(), "model.weights is not read"));
  moved.resume({"model.weights=elsewhere.safetensors"});
  EXPECT_TRUE(run.model() == moved.model());
  EXPECT_TRUE(moved.resume({"model.weights=", "train.epochs=4"}).fit.finished);
  EXPECT_FALSE(run_evaluation(run.config({"model.weights=" + weights.string()}), last(run)).empty());
  COHORT_EXPECT_THROW_WITH(SmallRun().start({"model.weights=" + weights.string()}), DataError,
                           "w.safetensors");
}

TEST(ResumeTest, TheBestThatIsPrintedIsTheCheckpointBest) {
  const SmallRun run;
  const auto check = [&](const FitResult& result) {
    const auto best = checkpoint::RunCheckpoints(run.path() / "checkpoints").find("best");
    const auto rows = epochs_of(run);
    ASSERT_TRUE(best.has_value());
    const RunState state = state_of(*best);
    EXPECT_EQ(state.epoch, result.best_epoch);
    EXPECT_EQ(fs::canonical(run.path() / "checkpoints" / "best"), fs::canonical(*best));
    for (const auto& row : rows) {  // without those that going back has cut
      if (std::stoll(row.at("epoch")) != state.epoch) continue;
      EXPECT_NEAR(std::stod(row.at("val_loss")), result.best, 1e-5 * result.best);
    }
  };
  const std::vector<std::string> options = {"run.best_metric=val_loss", "run.keep=2", "optim.momentum=0"};
  const auto words = [&](std::vector<std::string> more) {
    more.insert(more.end(), options.begin(), options.end());
    return more;
  };
  // A rate that is too high makes later epochs worse than the first.
  check(run.start(words({"train.epochs=2", "optim.lr=0.01"})).fit);
  unsigned seed = 1;
  for (int i = 0; i < 12; ++i) {
    seed = seed * 1103515245 + 12345;
    const auto there = checkpoint::RunCheckpoints(run.path() / "checkpoints").list();
    const fs::path from = there.at(seed / 65536 % there.size());
    const std::int64_t until = state_of(from).epoch + 1 + (seed / 1024) % 2;
    const char* rate = (seed / 4096) % 2 == 0 ? "optim.lr=1" : "optim.lr=0.01";
    SCOPED_TRACE(from.string() + " " + rate);
    check(
        run.start(words({"train.epochs=" + std::to_string(until), rate, "run.resume=" + from.string()})).fit);
  }
}

TEST(ResumeTest, InAnotherFolderTheBestIsChosenAnew) {
  const SmallRun run, other;
  run.start({"run.best_metric=val_loss", "optim.lr=0.001"});
  const FitResult result = other
                               .start({"run.best_metric=val_loss", "train.epochs=4", "optim.lr=0.5",
                                       "run.resume=" + (run.path() / "checkpoints" / "last").string()})
                               .fit;
  EXPECT_EQ(result.best_epoch, 4);
  EXPECT_TRUE(fs::exists(other.path() / "checkpoints" / "best" / "state.json"));
}

TEST(ResumeTest, ABestOnOtherValidationDataIsNotCompared) {
  const std::vector<std::vector<std::string>> changes = {{"data.val=other"},
                                                         {"data.mean=[0.6]"},
                                                         {"data.std=[0.4]"},
                                                         {"train.max_eval_steps=1"},
                                                         {"data.val_transforms=resize"}};
  for (const std::vector<std::string>& change : changes) {
    ImageRun run;
    run.start(run.words({"train.epochs=2"}));
    std::vector<std::string> more = change;
    if (more.at(0) == "data.val=other") {
      more = {"data.val=" + (run.root() / "data" / "other").string()};
      fs::rename(run.root() / "data" / "other" / "a" / "0.png",
                 run.root() / "data" / "other" / "a" / "x.png");
    }
    more.insert(more.end(), {"train.epochs=3", "run.resume=auto"});
    const Logged log;
    EXPECT_EQ(run.start(run.words(more)).fit.best_epoch, 3) << change[0];
    EXPECT_TRUE(message_contains(log.text(), "best is chosen anew")) << change[0];
  }
  // Data that was only moved is the same data.
  ImageRun run;
  const FitResult before = run.start(run.words({"train.epochs=2"})).fit;
  fs::rename(run.root() / "data", run.root() / "moved");
  const Logged log;
  run.start(run.words({"train.epochs=3", "run.resume=auto", "data.path=" + (run.root() / "moved").string()}));
  EXPECT_EQ(log.text().find("best is chosen anew"), std::string::npos);
  EXPECT_GE(before.best_epoch, 1);
}

TEST(ResumeTest, ABestOnOtherSamplesOfTheValidationDataIsNotCompared) {
  const auto is_chosen_anew = [](const char* max_eval_steps, const std::vector<std::string>& change) {
    const SmallRun run;
    run.start({max_eval_steps, "train.epochs=2"});
    std::vector<std::string> more = {max_eval_steps, "train.epochs=3"};
    more.insert(more.end(), change.begin(), change.end());
    const Logged log;
    run.resume(more);
    return log.text().find("best is chosen anew") != std::string::npos;
  };
  EXPECT_TRUE(is_chosen_anew("train.max_eval_steps=1", {"train.eval_batch_size=2"}));
  EXPECT_TRUE(is_chosen_anew("train.max_eval_steps=1", {"train.batch_size=2", "train.accumulate=2"}));
  EXPECT_FALSE(is_chosen_anew("train.max_eval_steps=0", {"train.eval_batch_size=2"}));
  EXPECT_FALSE(is_chosen_anew("train.max_eval_steps=1",
                              {"train.batch_size=2", "train.accumulate=2", "train.eval_batch_size=4"}));
}

TEST(ResumeTest, AStartWithoutEvaluationKeepsWhichDataBestWasChosenOn) {
  const ImageRun run;
  const fs::path other = run.root() / "data" / "other";
  fs::rename(other / "a" / "0.png", other / "a" / "x.png");
  for (const char* val : {"val", "other"}) {
    const FitResult first =
        run.start(run.words({"train.epochs=2", "run.dir=" + (run.root() / val).string()})).fit;
    ASSERT_GE(first.best_epoch, 1);
    const auto resume = [&](std::vector<std::string> more) {
      more.insert(more.end(), {"run.dir=" + (run.root() / val).string(), "run.resume=auto"});
      return run.start(run.words(more)).fit;
    };
    EXPECT_EQ(resume({"train.epochs=3", "train.eval_every=0"}).best_epoch, first.best_epoch);
    const Logged log;
    const std::int64_t best =
        resume({"train.epochs=4", "data.val=" + (run.root() / "data" / val).string()}).best_epoch;
    const bool is_other = std::string(val) == "other";
    EXPECT_EQ(log.text().find("best is chosen anew") != std::string::npos, is_other);
    if (is_other) {
      EXPECT_EQ(best, 4);
    }
  }
}

TEST(ResumeTest, OtherImagesChangeTheModel) {
  for (const char* other : {"data.mean=[0.6]", "data.std=[0.4]", "data.train_transforms=flip"}) {
    const ImageRun run;
    run.start(run.words({"train.epochs=1"}));
    fs::copy(run.path(), run.root() / "other", fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    run.start(run.words({"train.epochs=2", "run.resume=auto"}));
    const std::string plain = run.model();
    run.start(run.words(
        {"run.dir=" + (run.root() / "other").string(), "train.epochs=2", "run.resume=auto", other}));
    EXPECT_FALSE(read_file(run.root() / "other" / "checkpoints" / "last" / "model.safetensors") == plain)
        << other;
  }
}

// golden/old_run: small_run.h's configuration with run.keep=2 and train.max_steps=7, by Cohort at 7e968f4,
// before checkpoints held a configuration and classes.
TEST(ResumeTest, ARunOfAnOlderVersionIsEvaluatedAndContinues) {
  const SmallRun run;
  fs::copy(test::source_dir() / "tests/train/golden/old_run", run.path(),
           fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  const std::string config = read_file(run.path() / "config.yaml");
  EXPECT_GT(run_evaluation(run.config(), run.path() / "checkpoints" / "best").at("loss"), 0);
  const Logged log;
  const FitResult result = run.resume({"optim.lr=0.01"}).fit;
  EXPECT_EQ(result.steps, 15);
  EXPECT_GE(result.best_epoch, 1);
  EXPECT_TRUE(message_contains(log.text(), "is not compared: the checkpoint does not hold it"));
  EXPECT_TRUE(message_contains(log.text(), "learning rates before schedules are 0.01, not the 0.05 of"));
  EXPECT_EQ(epochs_of(run).size(), 3u);
  EXPECT_EQ(read_file(run.path() / "starts" / "0001" / "config.yaml"), config);
}

TEST(ResumeTest, BytesThatAreNoUtf8AreKept) {
  const std::string latin = "k\xe4se";
  ImageRun run;
  fs::rename(run.root() / "data", run.root() / latin);
  const auto words = [&](std::vector<std::string> more) {
    more.insert(more.begin(), "data.path=" + (run.root() / latin).string());
    return run.words(more);
  };
  run_training(run.config(words({"train.epochs=1"})), "cohort train data.path=" + latin);
  EXPECT_TRUE(run_training(run.config(words({"train.epochs=2", "run.resume=auto"})), "cohort train " + latin)
                  .fit.finished);
}

TEST(ResumeTest, ARunThatIsRejectedBeforeItBeganLeavesNoFolder) {
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
