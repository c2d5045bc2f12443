#include "tests/cli/program.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <sstream>

namespace cohort::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

// A job of 5 epochs x 8 steps on made-up images: dropout, momentum, batch norm, a schedule by step, two
// workers.
constexpr const char* kJob = R"(
model: {name: vgg11_bn, width: 0.05, pools: 4, head: linear}
data: {kind: synthetic, synthetic_train: 60, synthetic_val: 20, image_size: 16, color: grey, workers: 2}
optim: {lr: 0.05, momentum: 0.9}
schedule: {name: cosine, warmup_steps: 4}
train: {epochs: 5, batch_size: 8, threads: 1, device: cpu}
run: {save_every_steps: 3, log_every: 2, keep: 2}
)";

class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override { write_file(dir / "job.yaml", kJob); }

  Outcome run(const std::vector<std::string>& arguments) { return run_program(dir.path(), arguments); }

  std::vector<std::string> train(const std::string& folder, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments{"train", "--config", "job.yaml", "run.dir=" + folder};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  TempDir dir;
};

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The columns that do not hold times.
std::vector<std::string> epochs_and_metrics(const fs::path& csv) {
  std::vector<std::string> rows;
  std::vector<std::string> header;
  for (const std::string& line : lines_of(read_file(csv))) {
    std::istringstream cells(line);
    std::string row;
    std::size_t column = 0;
    for (std::string cell; std::getline(cells, cell, ','); ++column) {
      if (rows.empty() && header.size() == column) header.push_back(cell);
      const std::string& name = header.at(column);
      if (name == "seconds" || name == "images_per_second" || name == "data_wait") continue;
      row += cell + ",";
    }
    rows.push_back(row);
  }
  return rows;
}

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

TEST_F(ProgramTest, KilledAtAnyMomentAndResumedItEndsWithTheSameParameters) {
  ASSERT_EQ(run(train("straight")).status, 0);
  const std::string expected = read_file(dir / "straight" / "checkpoints" / "last" / "model.safetensors");

  const char* text = std::getenv("COHORT_KILLS");  // the slow script asks for twenty
  const int kills = text == nullptr ? 3 : std::atoi(text);
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  // How long a run takes here tells from when to when a kill makes sense.
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
      const auto delay = std::chrono::milliseconds(whole.count() / 4 + random() % (whole.count() * 3 / 4));
      if (!program.wait_for(delay)) ++killed;
      program.signal(SIGKILL);
      program.wait_for(10s);
    }
    const Outcome last =
        run(train(folder, {"--resume", "auto", "data.workers=" + std::to_string(random() % 4)}));
    ASSERT_EQ(last.status, 0) << last.err;
    EXPECT_TRUE(read_file(dir / folder / "checkpoints" / "last" / "model.safetensors") == expected)
        << "kill " << i;
    EXPECT_EQ(epochs_and_metrics(dir / folder / "metrics.csv"),
              epochs_and_metrics(dir / "straight" / "metrics.csv"));
  }
  EXPECT_GT(killed, 0) << "no run was caught alive";
}

TEST_F(ProgramTest, SigtermFinishesTheStepSavesAndSaysHowToGoOn) {
  Program program(dir.path(), train("stopped", {"train.epochs=2000"}));
  while (!fs::exists(dir / "stopped" / "checkpoints" / "last") && !program.wait_for(10ms)) {
  }
  program.signal(SIGTERM);
  const Outcome outcome = program.outcome();
  EXPECT_EQ(outcome.status, 128 + SIGTERM);
  EXPECT_NE(outcome.err.find("--resume auto run.dir=stopped"), std::string::npos) << outcome.err;
  EXPECT_EQ(run(train("stopped", {"--resume", "auto", "train.epochs=1"})).status, 0);
}

TEST_F(ProgramTest, AFolderThatIsInUseIsRefusedNamingTheProcess) {
  Program first(dir.path(), train("shared", {"train.epochs=2000"}));
  while (!fs::exists(dir / "shared" / "checkpoints" / "last") && !first.wait_for(10ms)) {
  }
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
                        Case{train("x", {"data.kind=image_folder", "data.path=nowhere"}), "nowhere"},
                        Case{train("x", {"train.device=tpu"}), "train.device"},
                        Case{{"train", "--config", "broken.yaml"}, "broken.yaml"},
                        Case{{"train", "--config", "absent.yaml"}, "absent.yaml"}}) {
    const Outcome outcome = run(c.arguments);
    EXPECT_EQ(outcome.status, 2) << c.message;
    EXPECT_NE(outcome.err.find(c.message), std::string::npos) << outcome.err;
  }
}

TEST_F(ProgramTest, ABrokenPluginIsRefusedSayingWhy) {
  write_file(dir / "broken.so", "this is no library");
  const Outcome outcome = run(train("x", {"--load", "./broken.so"}));
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("cannot load ./broken.so"), std::string::npos) << outcome.err;
}

TEST_F(ProgramTest, ModelsAndDataOfAPluginAreUsedByName) {
  const Outcome outcome = run(train(
      "plugged", {"--load", COHORT_TEST_PLUGIN, "model.name=plugin_net", "model.width=1", "model.pools=5",
                  "model.head=default", "data.kind=plugin_data", "model.num_classes=4", "train.epochs=1"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
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

TEST_F(ProgramTest, DoctorAndSummaryAnswer) {
  const Outcome doctor = run({"doctor"});
  EXPECT_EQ(doctor.status, 0);
  for (const char* word : {"LibTorch", "cores", "memory", "cuda"})
    EXPECT_NE(doctor.out.find(word), std::string::npos);
  const Outcome summary = run({"summary", "vgg16"});
  EXPECT_EQ(summary.status, 0) << summary.err;
  EXPECT_NE(summary.out.find("138,357,544"), std::string::npos) << summary.out;
}

}  // namespace
}  // namespace cohort::test
