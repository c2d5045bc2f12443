#include "tests/cli/program.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <random>
#include <regex>
#include <sstream>

#include "cohort/base/files/fd.h"
#include "cohort/data/codecs/codec.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class ProgramTest : public TrainProgramTest {};

TEST_F(ProgramTest, TrainsEvaluatesAndLeavesEverythingInTheRunFolder) {
  const Outcome outcome = run(train("first"));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  for (const char* file :
       {"config.yaml", "run.json", "metrics.jsonl", "metrics.csv", "curves.svg", "tensorboard",
        "checkpoints/last/model.safetensors", "checkpoints/best/state.json"}) {
    EXPECT_TRUE(fs::exists(dir / "first" / file)) << file;
  }
  EXPECT_EQ(lines_of(read_file(dir / "first" / "metrics.csv")).size(), 6u);  // a header and five epochs
  EXPECT_NE(outcome.out.find("val_accuracy"), std::string::npos);

  const Outcome eval = run({"eval", "--run", "first", "--checkpoint", "last"});
  EXPECT_EQ(eval.status, 0) << eval.err;
  EXPECT_NE(eval.out.find("accuracy "), std::string::npos);
}

TEST_F(ProgramTest, FastDevRunDoesTwoStepsOfEverything) {
  const Outcome outcome = run(train("dev", {"--fast-dev-run"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(fs::exists(dir / "dev" / "checkpoints" / "last" / "model.safetensors"));
  EXPECT_NE(read_file(dir / "dev" / "metrics.csv").find("val_loss"), std::string::npos);
}

TEST_F(ProgramTest, ProfileShowsWhereTheTimeGoesAndChangesNoNumber) {
  ASSERT_EQ(run(train("plain", {"train.epochs=1"})).status, 0);
  const Outcome outcome = run(train("seen", {"train.epochs=1", "--profile", "4"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  expect_in(outcome.out, {"seen/profile.json", "operator, times per step", "aten::convolution", "4 steps, "});
  expect_in(read_file(dir / "seen" / "profile.json"),
            {"\"traceEvents\"", "\"cat\":\"operator\"", "data wait", "aten::convolution_backward"});
  EXPECT_FALSE(fs::exists(dir / "seen" / "trace.json"));  // the timeline is the profile's
  EXPECT_EQ(model("seen"), model("plain"));
}

TEST_F(ProgramTest, ProfileOfARunThatEndsEarlySaysSo) {
  const Outcome short_run = run(train("short", {"train.max_steps=5", "--profile", "100"}));
  ASSERT_EQ(short_run.status, 0) << short_run.err;
  expect_in(short_run.out, {"2 steps, "});
  const Outcome none = run(train("none", {"train.max_steps=3", "--profile", "1"}));
  ASSERT_EQ(none.status, 0) << none.err;
  expect_in(none.err, {"nothing was profiled: the run ended after 3 steps, and the first 3 are left out"});
  EXPECT_EQ(run(train("rejected", {"--profile", "0"})).status, 2);
}

TEST_F(ProgramTest, KilledAtAnyMomentAndResumedItEndsWithTheSameParameters) {
  ASSERT_EQ(run(train("straight")).status, 0);
  const std::string expected = model("straight");

  const char* text = std::getenv("COHORT_KILLS");  // the slow script asks for twenty
  const int kills = text == nullptr ? 3 : std::atoi(text);
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  // How long a run takes here tells until when a kill makes sense.
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(run(train("timed")).status, 0);
  const auto whole =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);

  int killed = 0;
  for (int i = 0; i < kills; ++i) {
    const std::string folder = "killed" + std::to_string(i);
    for (int round = 0; round < 2; ++round) {  // killed twice, then left to end
      Program program(dir.path(),
                      train(folder, {"--resume", "auto", "data.workers=" + std::to_string(random() % 4)}));
      const auto delay = std::chrono::milliseconds(random() % whole.count());
      if (!program.wait_for(delay)) ++killed;
      program.signal(SIGKILL);
      program.wait_for(10s);
    }
    const Outcome last =
        run(train(folder, {"--resume", "auto", "data.workers=" + std::to_string(random() % 4)}));
    ASSERT_EQ(last.status, 0) << last.err;
    EXPECT_TRUE(model(folder) == expected) << "kill " << i;
    EXPECT_EQ(columns_without_times(dir / folder / "metrics.csv"),
              columns_without_times(dir / "straight" / "metrics.csv"));
  }
  EXPECT_GT(killed, 0) << "no run was caught alive";
}

TEST_F(ProgramTest, SigtermFinishesTheStepSavesAndSaysHowToContinue) {
  Program program(dir.path(), train("stopped", {"train.epochs=2000"}));
  wait_for_checkpoint(program, "stopped");
  program.signal(SIGTERM);
  const Outcome outcome = program.outcome();
  EXPECT_EQ(outcome.status, 128 + SIGTERM);
  EXPECT_NE(outcome.err.find("--resume auto run.dir=stopped"), std::string::npos) << outcome.err;
  EXPECT_EQ(run(train("stopped", {"--resume", "auto", "train.epochs=1"})).status, 0);
}

/// The number in the name of the checkpoint that the run in `folder` saved last.
long last_number(const fs::path& folder) {
  const std::string name = fs::read_symlink(folder / "checkpoints" / "last").string();
  return std::stol(name.substr(name.find('_') + 1));
}

TEST_F(ProgramTest, BehindAPipeThatNobodyReadsItContinuesAndStopsBySignalsAsUsual) {
  // As with `cohort train ... 2>&1 | tee log`, where Ctrl-C or a lost connection ends tee too.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    for (const char* ranks : {"1", "2"}) {
      SCOPED_TRACE(std::string("signal ") + std::to_string(signal) + ", ranks " + ranks);
      const std::string folder = std::string("piped") + std::to_string(signal) + "x" + ranks;
      std::array<int, 2> pipe{};
      ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
      base::Fd reader(pipe[0]), writer(pipe[1]);
      Program program(dir.path(),
                      train(folder, {"train.epochs=2000", "run.log_every=1", "--nproc-per-node", ranks}), {},
                      writer.get());
      writer.close();
      wait_for_checkpoint(program, folder);
      reader.close();
      const std::string before = fs::read_symlink(dir / folder / "checkpoints" / "last").string();
      const auto has_saved_again = [&] {
        return fs::read_symlink(dir / folder / "checkpoints" / "last").string() != before;
      };
      while (!has_saved_again() && !program.wait_for(10ms)) {
      }
      EXPECT_TRUE(has_saved_again()) << "it ended with the pipe";
      program.signal(signal);
      EXPECT_EQ(program.outcome().status, 128 + signal);
      // It saved when it was stopped, whatever the step.
      const std::string log = read_file(dir / folder / "metrics.jsonl");
      const std::size_t at = log.rfind("\"step\":");
      ASSERT_NE(at, std::string::npos) << log;
      const std::string name = fs::read_symlink(dir / folder / "checkpoints" / "last").string();
      if (name.starts_with("step_")) {
        EXPECT_GE(last_number(dir / folder), std::stol(log.substr(at + 7)));
      }
    }
  }
}

TEST_F(ProgramTest, AFolderThatIsInUseIsRejectedNamingTheProcess) {
  Program first(dir.path(), train("shared", {"train.epochs=2000"}));
  wait_for_checkpoint(first, "shared");
  const Outcome second = run(train("shared", {"--resume", "auto"}));
  EXPECT_EQ(second.status, 1);
  EXPECT_NE(second.err.find("shared is in use by process"), std::string::npos) << second.err;
}

TEST_F(ProgramTest, AFolderThatHoldsARunIsNotOverwritten) {
  ASSERT_EQ(run(train("first", {"--fast-dev-run"})).status, 0);
  const Outcome outcome = run(train("first"));
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("first already holds a run. Try: --resume auto"), std::string::npos)
      << outcome.err;
}

TEST_F(ProgramTest, MistakesInTheConfigurationExitWithTwo) {
  struct Case {
    std::vector<std::string> arguments;
    const char* message;
  };
  write_file(dir / "broken.yaml", "model: {name: vgg16\noptim: [");
  for (const Case& c : {Case{train("x", {"optim.lrr=0.1"}), "optim.lr"},
                        Case{train("x", {"train.epochs=many"}), "train.epochs"},
                        Case{train("x", {"model.name=vgg17"}), "vgg"},
                        Case{train("x", {"data.type=image_folder", "data.path=nowhere"}), "nowhere"},
                        Case{train("x", {"train.device=tpu"}), "train.device"},
                        Case{{"train", "--config", "broken.yaml"}, "broken.yaml"},
                        Case{{"train", "--config", "absent.yaml"}, "absent.yaml"}}) {
    const Outcome outcome = run(c.arguments);
    EXPECT_EQ(outcome.status, 2) << c.message;
    EXPECT_NE(outcome.err.find(c.message), std::string::npos) << outcome.err;
  }
}

TEST_F(ProgramTest, TwoFilesOfConfigurationAreRejectedSayingWhatToDo) {
  for (const char* command : {"train", "eval", "predict", "export", "plan"}) {
    const Outcome outcome = run({command, "--config", "job.yaml", "-c", "other.yaml"});
    EXPECT_EQ(outcome.status, 2) << command;
    expect_in(outcome.err, {"--config is given 2 times: job.yaml, other.yaml. Try: one file, and key=value"});
  }
}

TEST_F(ProgramTest, ABrokenPluginIsRejectedSayingWhy) {
  write_file(dir / "broken.so", "this is no library");
  const Outcome outcome = run(train("x", {"--load", "./broken.so"}));
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("cannot load ./broken.so"), std::string::npos) << outcome.err;
}

// Steps of the rows that are written per step.
std::vector<int> logged_steps(const fs::path& jsonl) {
  std::vector<int> steps;
  for (const std::string& line : lines_of(read_file(jsonl))) {
    const std::size_t at = line.find("\"step\":");
    if (line.find("\"type\":\"step\"") == std::string::npos || at == std::string::npos) continue;
    steps.push_back(std::atoi(line.c_str() + at + 7));
  }
  return steps;
}

TEST_F(ProgramTest, KilledAfterGoingBackItContinuesFromThere) {
  ASSERT_EQ(run(train("straight", {"run.log_every=1"})).status, 0);
  ASSERT_EQ(run(train("back", {"run.log_every=1", "run.keep=0"})).status, 0);
  const fs::path checkpoints = dir / "back" / "checkpoints";
  ASSERT_TRUE(fs::exists(checkpoints / "step_00000003"));
  {
    // It goes back, and is killed before it has saved anything of the new history, which only its end would.
    Program program(dir.path(),
                    train("back", {"run.log_every=1", "--resume", "back/checkpoints/step_00000003",
                                   "run.save_every_steps=0", "run.save_every=0", "train.eval_every=0",
                                   "train.epochs=2000"}));
    while (fs::read_symlink(checkpoints / "last") != "step_00000003" && !program.wait_for(5ms)) {
    }
    program.signal(SIGKILL);
    program.wait_for(10s);
  }
  EXPECT_EQ(fs::read_symlink(checkpoints / "last"), "step_00000003");
  const Outcome outcome = run(train("back", {"run.log_every=1", "--resume", "auto"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  expect_in(outcome.err, {"resumed from back/checkpoints/step_00000003"});
  EXPECT_EQ(logged_steps(dir / "back" / "metrics.jsonl"), logged_steps(dir / "straight" / "metrics.jsonl"));
  EXPECT_EQ(read_file(checkpoints / "last" / "model.safetensors"), model("straight"));
}

TEST_F(ProgramTest, AFastDevRunIsNeverGoneOnWith) {
  std::vector<std::string> dev{"train", "--config", "job.yaml", "--fast-dev-run"};
  ASSERT_EQ(run(dev).status, 0);
  std::vector<std::string> whole{"train", "--config", "job.yaml", "--resume", "auto", "train.epochs=1"};
  const Outcome outcome = run(whole);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  expect_in(outcome.err, {"nothing to resume: starting from the beginning"});
  dev.insert(dev.end(), {"--resume", "auto"});
  const Outcome again = run(dev);
  EXPECT_EQ(again.status, 0) << again.err;
  expect_in(again.err, {"run.resume is left out: --fast-dev-run starts afresh"});
}

TEST_F(ProgramTest, AFolderInWhichARunOnlyFailedToBeginMayBeUsed) {
  EXPECT_EQ(run(train("b", {"--resume", "last"})).status, 2);
  const Outcome outcome = run(train("b", {"train.epochs=1"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  ASSERT_EQ(run(train("b", {"--resume", "auto", "train.epochs=2"})).status, 0);
  // The configuration that it wrote does not resume by itself.
  const Outcome rejected = run({"train", "--config", "b/config.yaml", "run.dir=b"});
  EXPECT_EQ(rejected.status, 2);
  expect_in(rejected.err, {"b already holds a run"});
}

TEST_F(ProgramTest, ResumeAutoWithTheConfigurationOfARunContinuesWithThatRun) {
  const std::vector<std::string> first{"train", "--config", "job.yaml", "train.epochs=1", "run.name=nn"};
  ASSERT_EQ(run(first).status, 0);
  const fs::path older = fs::directory_iterator(dir / "runs")->path();
  ASSERT_EQ(run(first).status, 0);
  const auto resume = [&](const fs::path& config, const std::string& which, const std::string& more) {
    return run({"train", "--config", config, "--resume", which, "train.epochs=2", more}).err;
  };
  expect_in(resume(older / "config.yaml", "auto", "run.name=b"), {"nothing to resume", "run folder runs/b-"});
  for (const fs::path& config : {older / "config.yaml", older / "starts" / "0001" / "config.yaml"}) {
    for (const char* which : {"auto", "last", "best"})
      expect_in(resume(config, which, "run.keep=2"), {(older.string() + ",").c_str(), "resumed from "});
  }
  // Its file names its folder now. A copy is a run of its own.
  fs::copy(older, dir / "copy", fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  for (const std::string which : {"auto", "copy/checkpoints/last"})
    for (const char* more : {"run.keep=2", "run.name=b"})
      expect_in(resume("copy/config.yaml", which, more),
                {"copy, whose file it is", ("run folder " + (dir / "copy,").string()).c_str()});
}

TEST_F(ProgramTest, TheCommandToContinueCanBePasted) {
  const std::string folder = "my run #1";
  Program program(dir.path(), train(folder, {"train.epochs=2000", "--load", COHORT_TEST_PLUGIN}));
  wait_for_checkpoint(program, folder);
  program.signal(SIGTERM);
  const Outcome outcome = program.outcome();
  ASSERT_EQ(outcome.status, 128 + SIGTERM) << outcome.err;
  const std::string words = "to resume:\n  ";
  const std::size_t at = outcome.err.find(words);
  ASSERT_NE(at, std::string::npos) << outcome.err;
  const std::string command = lines_of(outcome.err.substr(at + words.size())).at(0);
  expect_in(command, {"'run.dir=my run #1'", " --load "});
  const std::string shell =
      "cd '" + dir.path().string() + "' && " + command + " train.epochs=1 >/dev/null 2>&1";
  EXPECT_EQ(std::system(shell.c_str()), 0) << command;
}

TEST_F(ProgramTest, ASignalToSaveBeforeTrainingBeginsDoesNotEndTheRun) {
  Program program(dir.path(),
                  train("early", {"data.synthetic_train=20000", "train.epochs=1", "train.max_steps=3"}));
  while (!fs::exists(dir / "early" / ".lock") && !program.wait_for(5ms)) {
  }
  program.signal(SIGUSR1);  // data and model are being made
  const Outcome outcome = program.outcome();
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_F(ProgramTest, ANameThatTwoPluginsTakeIsAnErrorThatNamesBoth) {
  const std::vector<std::string> both{"--load", COHORT_TEST_PLUGIN, "--load", COHORT_TEST_PLUGIN_TWIN};
  for (const char* use : {"data.type=plugin_data", "model.name=plugin_net"}) {
    std::vector<std::string> more = both;
    more.push_back(use);
    const Outcome outcome = run(train("x", more));
    EXPECT_EQ(outcome.status, 2);
    expect_in(outcome.err, {"was registered twice: by ", " and by ", "plugin.cpp:", "plugin_twin.cpp:"});
  }
  EXPECT_FALSE(fs::exists(dir / "x")) << "a run that never began left its folder";
}

TEST_F(ProgramTest, APluginThatThrowsWhileItIsLoadedIsNamed) {
  // LibTorch lets a namespace of operators be defined once, so a second copy cannot be loaded.
  for (const char* name : {"one.so", "two.so"}) fs::copy_file(COHORT_TEST_PLUGIN, dir / name);
  const Outcome outcome = run(train("x", {"--load", "./one.so", "--load", "./two.so"}));
  EXPECT_EQ(outcome.status, 2);
  expect_in(outcome.err, {"./two.so threw while it was loaded: ", "TORCH_LIBRARY"});
}

// Folders a and b of four images each, for training and validation.
void write_images(const fs::path& root) {
  data::Image image;
  image.reshape(16, 16, 1);
  for (std::size_t i = 0; i < image.pixels.size(); ++i) image.pixels[i] = static_cast<std::uint8_t>(i);
  const std::vector<std::byte> bytes = data::encode_jpeg(image, 95);
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const char* split : {"train", "val"}) {
    for (const char* name : {"a", "b"}) {
      for (int i = 0; i < 4; ++i) write_file(root / split / name / (std::to_string(i) + ".jpg"), text);
    }
  }
}

std::vector<std::string> images(const std::string& folder, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"data.type=image_folder", "data.path=" + folder, "train.epochs=1"});
  return more;
}

TEST_F(ProgramTest, NamesThatAreNotUtf8GoThroughEveryCommand) {
  write_images(dir / "d\xe9");
  for (const char* split : {"train", "val"})
    fs::rename(dir / "d\xe9" / split / "a", dir / "d\xe9" / split / "caf\xe9");
  const std::string folder = "r\xe9", image = "d\xe9/val/caf\xe9/0.jpg", program = "p\xe9.cohort";
  std::vector<std::string> more = images("d\xe9");
  more.insert(more.end(),
              {"--nproc-per-node", "2", "--resume", folder + "/checkpoints/last", "train.epochs=2"});
  const std::vector<std::vector<std::string>> commands{
      train(folder, images("d\xe9")),
      train(folder, more),
      {"eval", "--run", folder},
      {"predict", "--run", folder, image},
      {"export", "--run", folder, program},
      {"predict", "--program", program, image},
      {"data", "verify", "d\xe9/train"},
  };
  for (const std::vector<std::string>& arguments : commands) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 0) << arguments[0] << ": " << outcome.err;
    if (arguments[0] == "predict") {
      EXPECT_NE(outcome.out.find("caf\xe9"), std::string::npos) << outcome.out;
    }
  }
}

TEST_F(ProgramTest, ImagesThatAreLeftOutAreNamedAndCountedForTrainingAndValidation) {
  write_images(dir / "data");
  for (const char* broken : {"train/a/0.jpg", "val/a/1.jpg", "val/b/2.jpg"}) {
    write_file(dir / "data" / broken, "not an image");
  }
  const Outcome rejected = run(train("rejected", images("data")));
  EXPECT_EQ(rejected.status, 2);
  // A batch of validation is tried before the first epoch.
  EXPECT_NE(rejected.err.find("val/a/1.jpg"), std::string::npos) << rejected.err;
  const Outcome skipped = run(train("skipped", images("data", {"data.on_error=skip"})));
  EXPECT_EQ(skipped.status, 0) << skipped.err;
  expect_in(skipped.err,
            {"data/train/a/0.jpg", "data/val/a/1.jpg", "data/val/b/2.jpg",
             "1 times a training sample could not be read", "4 times a validation sample could not"});
  const Outcome evaluated = run({"eval", "--run", "skipped"});
  EXPECT_EQ(evaluated.status, 0) << evaluated.err;
  expect_in(evaluated.err, {"2 times a validation sample could not be read"});
}

TEST_F(ProgramTest, DataThatDoesNotFitTheModelOrItselfIsRejected) {
  write_images(dir / "data");
  const Outcome fewer = run(train("x", images("data", {"model.num_classes=1"})));
  EXPECT_EQ(fewer.status, 2);
  expect_in(fewer.err, {"model.num_classes is 1", "but the data has 2"});
  fs::rename(dir / "data" / "val" / "b", dir / "data" / "val" / "c");
  const Outcome other = run(train("x", images("data")));
  EXPECT_EQ(other.status, 2);
  expect_in(other.err, {"have different classes; in one only: b c"});
  EXPECT_FALSE(fs::exists(dir / "x"));
}

TEST_F(ProgramTest, NeedsNoFileOfConfigurationWhereItIsSaidWhereTheDataIs) {
  for (const char* setting : {"train.epochs=1", "data.val=data/val"}) {
    const Outcome outcome = run({"train", setting});
    EXPECT_EQ(outcome.status, 2);
    expect_in(outcome.err,
              {"neither a configuration nor data was given. Try: --config FILE", "data.path=FOLDER"});
  }
  write_images(dir / "data");
  const auto train_on = [&](const std::string& data, const std::string& folder) {
    return run({"train", "model.name=lenet5", "data.image_size=28", "train.device=cpu", "train.threads=1",
                "train.epochs=1", data, "run.dir=" + folder});
  };
  for (const char* data : {"data.path=data", "DATA_PATH=data"}) {
    const Outcome outcome = train_on(data, data);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    expect_in(read_file(dir / data / "config.yaml"), {"momentum: 0.9", "path: data"});
  }
  const Outcome missing = train_on("data.path=photos", "missing");
  EXPECT_EQ(missing.status, 2);
  expect_in(missing.err, {"there is no training data: the folder photos/train does not exist"});
}

TEST_F(ProgramTest, EvalSaysWhatItNeeds) {
  const Outcome nothing = run({"eval"});
  EXPECT_EQ(nothing.status, 2);
  expect_in(nothing.err, {"neither --run nor --config"});
  const Outcome nowhere = run({"eval", "--run", "nowhere"});
  EXPECT_EQ(nowhere.status, 2);
  expect_in(nowhere.err, {"nowhere"});
}

TEST_F(ProgramTest, ModelsDataAndOperatorsOfAPluginAreUsedByName) {
  const Outcome outcome = run(train(
      "plugged", {"--load", COHORT_TEST_PLUGIN, "model.name=plugin_net", "model.width=1", "model.pools=5",
                  "model.head=default", "data.type=plugin_data", "model.num_classes=4", "train.epochs=1"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  expect_in(outcome.err,
            {"cohort_test::scale_shift was called", "backward of cohort_test::scale_shift was called"});

  const std::vector<std::string> model = {"--run", "plugged", "--load", COHORT_TEST_PLUGIN};
  std::vector<std::string> words = model;
  words.insert(words.begin(), "predict");
  words.insert(words.end(), {"--samples", "3,0", "--top", "1"});
  const Outcome samples = run(words);
  EXPECT_EQ(samples.status, 0) << samples.err;
  EXPECT_TRUE(
      std::regex_match(samples.out, std::regex("sample 3\t[0-3] 0\\.\\d+\nsample 0\t[0-3] 0\\.\\d+\n")))
      << samples.out;
  words = model;
  words.insert(words.begin(), "predict");
  words.push_back("0.jpg");
  const Outcome image = run(words);
  EXPECT_EQ(image.status, 2);
  expect_in(image.err, {"data.type is plugin_data, which a library registered", "--samples"});
  words = model;
  words.insert(words.begin(), "export");
  words.push_back("plugged.program");
  const Outcome exported = run(words);
  EXPECT_EQ(exported.status, 0) << exported.err;
  expect_in(exported.out, {"for 1 samples at a time; it takes inputs as the data set makes them"});
}

TEST_F(ProgramTest, ALossThatIsNotFiniteStopsWithStepAndModule) {
  const Outcome outcome =
      run(train("nan", {"optim.lr=1e5", "schedule.warmup_steps=0", "schedule.name=constant"}));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.err.find("is not finite; the first output that is not finite is that of"),
            std::string::npos)
      << outcome.err;
}

TEST_F(ProgramTest, DumpConfigReadsBackTheSame) {
  const Outcome first = run({"train", "--config", "job.yaml", "--dump-config"});
  ASSERT_EQ(first.status, 0) << first.err;
  write_file(dir / "dumped.yaml", first.out);
  EXPECT_EQ(run({"train", "--config", "dumped.yaml", "--dump-config"}).out, first.out);
}

}  // namespace
}  // namespace cohort::test
