// Runs of random configurations are killed at random moments and resumed. They end with the bits of the run
// that was not killed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "tests/cli/program.h"

namespace cohort::test {
namespace {

using namespace std::chrono_literals;

using Words = std::vector<std::string>;

/// Draws settings that a resume can forget: options and state of optimizers, schedules, order, parts of a
/// step, script mode, where checkpoints fall, data that is cut unevenly, two ranks.
class RandomConfiguration {
 public:
  explicit RandomConfiguration(unsigned seed) : random_(seed) {}

  Words settings() {
    Words words = one_of({{"optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.05"},
                          {"optim.name=sgd", "optim.momentum=0.9", "optim.nesterov=true", "optim.lr=0.02"},
                          {"optim.name=adam", "optim.lr=0.003"},
                          {"optim.name=adamw", "optim.lr=0.003", "optim.weight_decay=0.1",
                           "optim.no_decay_on_norm_and_bias=true"}});
    add(words, one_of({{"model.name=vgg11_bn", "model.width=0.05", "model.pools=4", "model.head=linear"},
                       {"model.name=mlp", "model.options={hidden: \"24,16\"}", "model.width=1",
                        "model.pools=5", "model.head=default"},
                       {"model.name=vgg11", "model.width=0.05", "model.pools=4", "model.head=default",
                        "model.dropout=0.3"}}));
    add(words, one_of({{"schedule.name=constant"},
                       {"schedule.name=cosine", "schedule.unit=step"},
                       {"schedule.name=linear", "schedule.unit=step", "schedule.warmup_steps=3"},
                       {"schedule.name=step", "schedule.step_size=1", "schedule.gamma=0.5"},
                       {"schedule.name=multistep", "schedule.milestones=[1,2]"},
                       {"schedule.name=one_cycle", "schedule.warmup_steps=0"}}));
    add(words, one_of({{}, {"train.accumulate=2", "train.batch_size=4"}, {"train.accumulate=3"}}));
    add(words, one_of({{}, {"optim.clip_norm=0.5"}, {"train.label_smoothing=0.1"}, {"train.script=true"}}));
    add(words, one_of({{},
                       {"data.shuffle=false"},
                       {"data.drop_last=true"},
                       // Cut by the task: three parts of a short batch would leave batch norm one sample.
                       {"data.on_error=skip", "train.accumulate=2"}}));
    add(words,
        one_of({{"data.synthetic_train=48"}, {"data.synthetic_train=53"}, {"data.synthetic_train=61"}}));
    add(words, one_of({{"run.save_every_steps=1"}, {"run.save_every_steps=3"}, {"run.save_every=1"}}));
    add(words, one_of({{"run.keep=0"}, {"run.keep=1"}, {"run.keep=3"}}));
    add(words, one_of({{"train.eval_every=1"}, {"train.eval_every=2"}, {"train.eval_every=0"}}));
    add(words, one_of({{}, {}, {"train.precision=bf16"}, {"train.memory_format=channels_last"}}));
    add(words, one_of({{}, {}, {"--nproc-per-node", "2"}}));
    words.push_back("run.seed=" + std::to_string(random_() % 1000));
    return words;
  }

  /// What may be another one at each start.
  Words harmless() {
    return {"data.workers=" + std::to_string(random_() % 4),
            "data.prefetch=" + std::to_string(1 + random_() % 3)};
  }

  std::chrono::milliseconds moment(std::chrono::milliseconds whole) {
    return std::chrono::milliseconds(random_() % static_cast<unsigned long>(whole.count()));
  }

 private:
  static void add(Words& words, const Words& more) { words.insert(words.end(), more.begin(), more.end()); }
  Words one_of(const std::vector<Words>& choices) { return choices[random_() % choices.size()]; }

  std::mt19937 random_;
};

class KillResumeTest : public TrainProgramTest {
 protected:
  static void SetUpTestSuite() { adopt_orphans(); }
  std::string text_of(const Words& words) {
    std::string text;
    for (const std::string& word : words) text += word + " ";
    return text;
  }
  Words start(const std::string& folder, Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return train(folder, words);
  }
  std::string part(const std::string& folder, const char* name) {
    return read_file(dir / folder / "checkpoints" / "last" / name);
  }
};

TEST_F(KillResumeTest, RandomConfigurationsEndWithTheSameBits) {
  const char* text = std::getenv("COHORT_KILL_RUNS");  // scripts/test_slow asks for two hundred
  const int runs = text == nullptr ? 10 : std::atoi(text);
  const char* given = std::getenv("COHORT_KILL_SEED");
  const unsigned seed = given == nullptr ? std::random_device{}() : static_cast<unsigned>(std::atoi(given));
  RandomConfiguration draw(seed);
  int killed = 0;
  for (int i = 0; i < runs; ++i) {
    Words words = draw.settings();
    words.insert(words.end(),
                 {"train.epochs=3", "train.batch_size=8", "train.threads=1", "run.tensorboard=false"});
    SCOPED_TRACE(testing::Message() << "COHORT_KILL_SEED=" << seed << ", run " << i << ": "
                                    << text_of(words));
    const std::string straight = "straight" + std::to_string(i), folder = "killed" + std::to_string(i);
    const auto begin = std::chrono::steady_clock::now();
    const Outcome left_alone = run(start(straight, words, draw.harmless()));
    ASSERT_EQ(left_alone.status, 0) << left_alone.err;
    const auto whole =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    words.insert(words.end(), {"--resume", "auto"});
    for (int kill = 0; kill < 2; ++kill) {
      Program program(dir.path(), start(folder, words, draw.harmless()));
      if (!program.wait_for(draw.moment(whole))) ++killed;
      program.signal(SIGKILL);
      program.wait_for(10s);
      ASSERT_TRUE(nothing_is_left()) << "ranks die after their launcher, and hold the folder until then";
    }
    const Outcome last = run(start(folder, words, draw.harmless()));
    ASSERT_EQ(last.status, 0) << last.err;
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_TRUE(part(folder, name) == part(straight, name)) << name << " differs";
    }
    EXPECT_EQ(columns_without_times(dir / folder / "metrics.csv"),
              columns_without_times(dir / straight / "metrics.csv"));
    std::filesystem::remove_all(dir / folder);
    std::filesystem::remove_all(dir / straight);
    if (HasFailure()) return;
  }
  EXPECT_GT(killed, 0) << "no run was caught alive";
}

}  // namespace
}  // namespace cohort::test
