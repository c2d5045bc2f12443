#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/temp_dir.h"
#include "tests/train/classifier_job.h"

namespace cohort::train {
namespace {

using test::kBatch;
using test::make_loader;
using test::same_parameters;
using test::TempDir;
using test::three_epochs;

TEST(TrainerSignalsTest, ASignalFinishesTheStepAndSaves) {
  struct RaiseAtThirdStep : Callback {
    void on_step_end(const StepReport& report) override {
      if (report.step == 3) raise(SIGTERM);
    }
  };
  TempDir folder;
  test::ClassifierJob job;
  data::Loader loader = make_loader();
  Trainer trainer(three_epochs().run_dir(folder.path()).handle_signals(true));
  trainer.add_callback(std::make_shared<RaiseAtThirdStep>());
  const FitResult result = trainer.fit(*job.task, loader);
  EXPECT_FALSE(result.finished);
  EXPECT_EQ(result.signal, SIGTERM);
  EXPECT_EQ(result.steps, 3);
  EXPECT_EQ(result.last_checkpoint.filename(), "step_00000003");

  test::ClassifierJob straight, resumed;
  Trainer(three_epochs()).fit(*straight.task, loader);
  Trainer(three_epochs().run_dir(folder.path()).resume("auto")).fit(*resumed.task, loader);
  EXPECT_TRUE(same_parameters(straight.net, resumed.net));
}

using Handler = void (*)(int);

Handler handler_of_sigterm() {
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  return now.sa_handler;
}

TEST(TrainerSignalsTest, ASignalWhileTheDataIsDescribedEndsTheProcess) {
  struct Described : data::TensorDataset {
    Described() : TensorDataset({at::ones({8, 6}), at::zeros({8}, at::kLong)}) {}
    std::string fingerprint() const override {
      handlers.push_back(handler_of_sigterm());
      return "x";
    }
    mutable std::vector<Handler> handlers;
  };
  struct InSteps : Callback {
    void on_step_end(const StepReport&) override { handler = handler_of_sigterm(); }
    Handler handler = nullptr;
  };
  TempDir folder;
  test::ClassifierJob job;
  const auto dataset = std::make_shared<Described>();
  data::Loader loader(dataset, {.batch_size = kBatch});
  data::Loader eval(dataset, {.batch_size = kBatch});
  const auto in_steps = std::make_shared<InSteps>();
  Trainer trainer(TrainerOptions().run_dir(folder.path()).handle_signals(true));
  trainer.add_callback(in_steps);
  const Handler before = handler_of_sigterm();
  trainer.fit(*job.task, loader, &eval);
  EXPECT_EQ(dataset->handlers, (std::vector<Handler>{before, before}));
  EXPECT_NE(in_steps->handler, before);
  EXPECT_EQ(handler_of_sigterm(), before);
}

TEST(TrainerSignalsTest, SigUsr1SavesAndContinues) {
  struct RaiseAtThirdStep : Callback {
    void on_step_end(const StepReport& report) override {
      if (report.step == 3) raise(SIGUSR1);
    }
  };
  TempDir folder;
  test::ClassifierJob job;
  data::Loader loader = make_loader();
  Trainer trainer(three_epochs().run_dir(folder.path()).handle_signals(true).keep(0));
  trainer.add_callback(std::make_shared<RaiseAtThirdStep>());
  EXPECT_TRUE(trainer.fit(*job.task, loader).finished);
  EXPECT_TRUE(std::filesystem::exists(folder / "checkpoints" / "step_00000003" / "state.json"));
}

}  // namespace
}  // namespace cohort::train
