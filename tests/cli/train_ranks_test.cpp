// `cohort train` on several ranks: real processes, started in every way that a user has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "tests/cli/program.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::test {
namespace {

using namespace std::chrono_literals;

class TrainRanksTest : public TrainProgramTest {
 protected:
  static std::vector<std::string> train_on(int ranks, const std::string& folder,
                                           std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--nproc-per-node", std::to_string(ranks)});
    return train(folder, more);
  }
  // What two ranks end with; made once.
  const std::string& straight() {
    if (straight_.empty()) {
      const Outcome outcome = run(train_on(2, "straight"));
      EXPECT_EQ(outcome.status, 0) << outcome.err;
      EXPECT_TRUE(message_contains(outcome.err, "2 ranks (ddp), each device cpu, 1 threads"));
      straight_ = model("straight");
    }
    return straight_;
  }
  // Starts `cohort train` with each set of variables at once, and expects all to end well.
  void run_with(const std::string& folder, const std::vector<Program::Variables>& ranks) {
    std::vector<std::unique_ptr<Program>> programs;
    for (const auto& variables : ranks) {
      programs.push_back(std::make_unique<Program>(dir.path(), train(folder), variables));
    }
    for (auto& program : programs) {
      const Outcome outcome = program->outcome();
      EXPECT_EQ(outcome.status, 0) << outcome.err;
    }
  }
  /// Between the parameters that two runs saved last, which end with floats.
  double largest_difference(const std::string& a, const std::string& b) {
    const std::string left = model(a), right = model(b);
    std::uint64_t head = 0;
    std::memcpy(&head, left.data(), sizeof head);
    EXPECT_EQ(left.substr(0, head + 8), right.substr(0, head + 8));
    double largest = left.size() == right.size() ? 0 : 1e9;
    for (std::size_t at = head + 8; at + 4 <= std::min(left.size(), right.size()); at += 4) {
      float x = 0, y = 0;
      std::memcpy(&x, left.data() + at, sizeof x);
      std::memcpy(&y, right.data() + at, sizeof y);
      largest = std::max(largest, std::abs(static_cast<double>(x) - static_cast<double>(y)));
    }
    return largest;
  }
  // `command`, and after it the arguments of `cohort`.
  void expect_same_started_by(const std::string& folder, std::string command) {
    command = "cd '" + dir.path().string() + "' && OMP_NUM_THREADS=1 timeout 100 " + command;
    for (const std::string& word : train(folder)) command += " '" + word + "'";
    const std::string log = folder + ".log";
    ASSERT_EQ(std::system((command + " > " + log + " 2>&1").c_str()), 0) << read_file(dir / log);
    EXPECT_TRUE(model(folder) == straight());
  }

 private:
  std::string straight_;
};

TEST_F(TrainRanksTest, StartedInAnyWayTheRunIsBitwiseTheSame) {
  ASSERT_FALSE(straight().empty());
  EXPECT_EQ(run(train_on(2, "again")).status, 0);
  EXPECT_TRUE(model("again") == straight());

  EXPECT_EQ(run({"train", "--config", "job.yaml", "run.dir=key", "distributed.nproc_per_node=2"}).status, 0);
  EXPECT_TRUE(model("key") == straight());

  std::vector<std::string> by_run{"run", "--nproc-per-node", "2", "--", COHORT_PROGRAM};
  for (const std::string& word : train("by_run")) by_run.push_back(word);
  EXPECT_EQ(run(by_run).status, 0);
  EXPECT_TRUE(model("by_run") == straight());

  const std::string port = std::to_string(free_port());
  const auto with_master = [&](Program::Variables variables) {
    variables.insert(variables.end(),
                     {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}, {"OMP_NUM_THREADS", "1"}});
    return variables;
  };
  std::vector<Program::Variables> slurm, open_mpi;
  for (const std::string rank : {"0", "1"}) {
    slurm.push_back(with_master({{"SLURM_PROCID", rank},
                                 {"SLURM_NTASKS", "2"},
                                 {"SLURM_LOCALID", rank},
                                 {"SLURM_TASKS_PER_NODE", "2"},
                                 {"SLURM_STEP_NODELIST", "localhost"},
                                 {"SLURM_JOB_ID", "7"},
                                 {"SLURM_STEP_ID", "0"}}));
    open_mpi.push_back(with_master({{"OMPI_COMM_WORLD_RANK", rank},
                                    {"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  }
  run_with("slurm", slurm);
  EXPECT_TRUE(model("slurm") == straight());
  run_with("open_mpi", open_mpi);
  EXPECT_TRUE(model("open_mpi") == straight());
}

TEST_F(TrainRanksTest, TorchrunStartsItAndTheRunIsBitwiseTheSame) {
  ASSERT_NE(std::getenv("COHORT_PYTHON"), nullptr) << "a Python with torch (./test sets it)";
  expect_same_started_by("torchrun", std::string("'") + std::getenv("COHORT_PYTHON") +
                                         "' -m torch.distributed.run --standalone --nproc-per-node 2 "
                                         "--no-python '" +
                                         COHORT_PROGRAM + "'");
}

TEST_F(TrainRanksTest, AProgramThatSpawnsItTrainsBitwiseTheSame) {
  expect_same_started_by("spawn", std::string("'") + COHORT_SPAWNED_PROGRAM + "'");
}

TEST_F(TrainRanksTest, RanksMaySpanPlacements) {
  const std::vector<std::string> parts = {"distributed.model=model_parallel",
                                          "distributed.device_map={features: cpu:0/a, classifier: cpu:0/b}"};
  EXPECT_EQ(run(train("alone")).status, 0);
  EXPECT_EQ(run(train("parts", parts)).status, 0);
  EXPECT_TRUE(model("parts") == model("alone"));
  EXPECT_EQ(run(train_on(2, "parts of ranks", parts)).status, 0);
  EXPECT_TRUE(model("parts of ranks") == straight());

  const Outcome pipeline =
      run(train_on(2, "pipeline",
                   {"distributed.model=pipeline", "distributed.device_map.features=cpu:0/a",
                    "distributed.device_map.classifier=cpu:0/b", "distributed.micro_batches=2"}));
  EXPECT_EQ(pipeline.status, 0) << pipeline.err;
  EXPECT_TRUE(message_contains(pipeline.err, "2 ranks (average), each pipeline, device cpu, 1 threads"));
}

TEST_F(TrainRanksTest, TheLearningRateIsScaledByTheSamplesOfAStepWhereThatIsAsked) {
  const Outcome outcome =
      run(train_on(2, "linear", {"optim.lr_scaling=linear", "optim.lr=0.02", "train.epochs=1"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "learning rate 0.04: 0.02 for steps of "));
  EXPECT_EQ(run(train_on(2, "plain", {"optim.lr=0.04", "train.epochs=1"})).status, 0);
  EXPECT_TRUE(model("plain") == model("linear"));
  EXPECT_EQ(run(train_on(2, "sqrt", {"optim.lr_scaling=sqrt", "optim.lr=0.02", "train.epochs=1"})).status, 0);
  EXPECT_FALSE(model("plain") == model("sqrt"));
}

TEST_F(TrainRanksTest, AveragedAfterBackwardOrWhileItRunsTheBitsAreTheSame) {
  const Outcome outcome =
      run(train_on(2, "average", {"distributed.gradients=average", "distributed.comm_hook=fp16"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "2 ranks (average), each device cpu"));
  EXPECT_TRUE(message_contains(outcome.err,
                               "distributed.comm_hook has no effect with distributed.gradients average"));
  EXPECT_TRUE(model("average") == straight());
  EXPECT_EQ(run(train_on(2, "fp16", {"distributed.comm_hook=fp16"})).status, 0);
  EXPECT_FALSE(model("fp16") == straight()) << "nothing was rounded";
  EXPECT_EQ(run(train_on(2, "small", {"distributed.bucket_cap_mb=0.001"})).status, 0);
  EXPECT_TRUE(model("small") == straight());
}

TEST_F(TrainRanksTest, OneOfEachPartFromAPlugInTrainsWithTheBitsOfCohortsOwn) {
  const std::vector<std::string> parts = {"--load",
                                          COHORT_TEST_PLUGIN_PARTS,
                                          "distributed.model=plugin_runner",
                                          "distributed.gradients=plugin_sync",
                                          "distributed.backend=over_store",
                                          "optim.name=plugin_sgd",
                                          "optim.options.momentum=0.9",
                                          "optim.no_decay_on_norm_and_bias=true",  // two groups
                                          "schedule.name=plugin_schedule",
                                          "schedule.options.as=cosine",
                                          "data.sampler=plugin_sampler",
                                          "run.checkpoint_format=plugin_format"};
  const Outcome outcome = run(train_on(2, "parts of a plug-in", parts));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* part :
       {"plug-in: runner", "plug-in: sync", "plug-in: optimizer", "plug-in: schedule", "plug-in: sampler",
        "plug-in: format", "plug-in: update", "2 ranks (plugin_sync), each plugin_runner, device cpu"}) {
    EXPECT_TRUE(message_contains(outcome.err, part)) << part;
  }
  EXPECT_TRUE(read_file(dir / "parts of a plug-in/checkpoints/last/model.plugin") == straight());

  std::vector<std::string> resumed = parts;
  resumed.insert(resumed.end(), {"--resume", "auto", "train.epochs=6"});
  EXPECT_EQ(run(train_on(2, "parts of a plug-in", resumed)).status, 0);
  const Outcome unloaded = run({"eval", "--run", "parts of a plug-in"});
  EXPECT_EQ(unloaded.status, 2);
  EXPECT_TRUE(message_contains(unloaded.err, "no tensor format has the extension plugin")) << unloaded.err;
}

TEST_F(TrainRanksTest, ARunnerAndASyncFromAPlugInHaveVirtualRanksWhereTheySayThatTheySupportThem) {
  std::vector<std::string> words = {"distributed.virtual_ranks=2", "train.max_steps=3"};
  EXPECT_EQ(run(train("virtual ranks", words)).status, 0);
  words.insert(words.end(), {"--load", COHORT_TEST_PLUGIN_PARTS, "distributed.model=plugin_runner"});
  std::vector<std::string> summed = words, alone = words;
  summed.push_back("distributed.gradients=plugin_sync");
  const Outcome outcome = run(train("virtual ranks of a plug-in", summed));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* part : {"runner", "sync of virtual ranks", "update"}) {
    EXPECT_TRUE(message_contains(outcome.err, std::string("plug-in: ") + part)) << part;
  }
  EXPECT_TRUE(model("virtual ranks of a plug-in") == model("virtual ranks"));

  alone.push_back("distributed.gradients=plugin_alone");
  const Outcome rejected = run(train("rejected", alone));
  EXPECT_NE(rejected.status, 0);
  EXPECT_TRUE(message_contains(rejected.err,
                               "distributed.virtual_ranks is 2 and distributed.gradients is plugin_alone, "
                               "which does not add gradients over virtual ranks"))
      << rejected.err;
}

TEST_F(TrainRanksTest, ACommunicationHookFromAPlugInReducesTheBuckets) {
  const Outcome outcome = run(train_on(
      2, "hook of a plug-in", {"--load", COHORT_TEST_PLUGIN_PARTS, "distributed.comm_hook=plugin_hook"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "plug-in: hook")) << outcome.err;
  EXPECT_TRUE(model("hook of a plug-in") == straight());
  const Outcome scaled =
      run(train_on(2, "scaled", {"--load", COHORT_TEST_PLUGIN_PARTS, "distributed.comm_hook=scaled_fp16"}));
  EXPECT_EQ(scaled.status, 0) << scaled.err;
  EXPECT_FALSE(model("scaled") == straight()) << "nothing was rounded";
}

TEST_F(TrainRanksTest, AnOptimizerFromAPlugInKeepsItsTensorOfStateInCheckpoints) {
  const auto lion = [](const std::string& folder, std::vector<std::string> more) {
    more.insert(more.end(), {"--load", COHORT_TEST_PLUGIN_PARTS, "optim.name=lion", "optim.lr=0.001",
                             "optim.options.beta2=0.9", "schedule.name=constant"});
    return train(folder, more);
  };
  EXPECT_EQ(run(lion("whole", {"train.max_steps=9"})).status, 0);
  EXPECT_EQ(run(lion("in two", {"train.max_steps=5"})).status, 0);
  const std::string saved = read_file(dir / "in two" / "checkpoints" / "last" / "optimizer.safetensors");
  EXPECT_NE(saved.find("state.0.exp_avg"), std::string::npos);
  const Outcome rest = run(lion("in two", {"train.max_steps=9", "--resume", "auto"}));
  EXPECT_EQ(rest.status, 0) << rest.err;
  EXPECT_TRUE(model("in two") == model("whole"));
}

TEST_F(TrainRanksTest, ThePlanCountsTheStateOfAnOptimizerFromAPlugIn) {
  // The line of the optimizer's bytes.
  const auto planned = [&](const std::vector<std::string>& optimizer) -> std::string {
    std::vector<std::string> words = {"plan", "--memory"};
    words.insert(words.end(), optimizer.begin(), optimizer.end());
    words.insert(words.end(), {"model.name=lenet5", "data.type=synthetic"});
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const std::string& line : lines_of(outcome.out)) {
      if (line.starts_with("  optimizer ")) return line;
    }
    return "no line of the optimizer";
  };
  const std::string lion = planned({"--load", COHORT_TEST_PLUGIN_PARTS, "optim.name=lion"});
  EXPECT_EQ(lion, planned({"optim.name=sgd", "optim.momentum=0.9"}));  // a tensor for each parameter too
  EXPECT_NE(lion, planned({"optim.name=sgd", "optim.momentum=0"}));
}

TEST_F(TrainRanksTest, AScheduleOfPipelinesFromAPlugInTrainsWithTheBitsOfCohortsOwn) {
  std::vector<std::string> words = {"distributed.model=pipeline", "distributed.device_map.features=cpu:0/a",
                                    "distributed.device_map.classifier=cpu:0/b",
                                    "distributed.micro_batches=2"};  // batch norm takes no single sample
  EXPECT_EQ(run(train("schedule of Cohort", words)).status, 0);
  words.insert(words.end(), {"--load", COHORT_TEST_PLUGIN_PARTS, "distributed.schedule=plugin_1f1b"});
  const Outcome outcome = run(train("schedule of a plug-in", words));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "plug-in: order of a pipeline")) << outcome.err;
  EXPECT_TRUE(model("schedule of a plug-in") == model("schedule of Cohort"));
}

TEST_F(TrainRanksTest, ARunnerFromAPlugInSaysWhatItTakesInMemory) {
  const Outcome outcome = run({"plan", "--memory", "--load", COHORT_TEST_PLUGIN_PARTS, "model.name=lenet5",
                               "data.type=synthetic", "distributed.model=plugin_runner"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.out, "the plug-in's place")) << outcome.out;
}

TEST_F(TrainRanksTest, KilledAtAnyMomentAndResumedItEndsWithTheSameParameters) {
  adopt_orphans();
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_FALSE(straight().empty());
  const auto whole =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  const char* text = std::getenv("COHORT_KILLS");  // the slow script asks for twenty
  const int kills = text == nullptr ? 2 : std::atoi(text);
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  int killed = 0;
  // A run may take less than the first one. Where all had ended before, the next ones are killed early.
  for (int i = 0; i < kills || (killed == 0 && i < kills + 3); ++i) {
    const std::string folder = "killed" + std::to_string(i);
    Program program(dir.path(), train_on(2, folder));
    const auto moment =
        random() % static_cast<std::mt19937::result_type>(whole.count() / (i < kills ? 1 : 4));
    if (!program.wait_for(std::chrono::milliseconds(moment))) ++killed;
    program.signal(SIGKILL);  // the launcher: its ranks die with it
    program.wait_for(10s);
    ASSERT_TRUE(nothing_is_left()) << "ranks outlived their launcher";
    const Outcome rest = run(train_on(2, folder, {"--resume", "auto"}));
    ASSERT_EQ(rest.status, 0) << rest.err;
    EXPECT_TRUE(model(folder) == straight()) << "kill " << i;
  }
  EXPECT_GT(killed, 0) << "no run was caught alive";
}

TEST_F(TrainRanksTest, SigtermStopsAllRanksAfterTheSameStepAndTheCommandContinuesBitwise) {
  const std::string longer = "train.epochs=60";
  const Outcome begun = run(train_on(2, "longer", {longer, "--resume", "auto"}));
  ASSERT_EQ(begun.status, 0) << begun.err;
  const std::size_t place = begun.err.find("nothing to resume");
  ASSERT_NE(place, std::string::npos) << begun.err;
  EXPECT_EQ(begun.err.find("nothing to resume", place + 1), std::string::npos) << "each rank says it";
  Program program(dir.path(), train_on(2, "stopped", {longer}));
  wait_for_checkpoint(program, "stopped");
  program.signal(SIGTERM);
  const Outcome outcome = program.outcome();
  EXPECT_EQ(outcome.status, 128 + SIGTERM) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "stopped by signal 15 after step "));
  EXPECT_TRUE(message_contains(outcome.err, "--nproc-per-node 2"));
  const Outcome rest = run(train_on(2, "stopped", {longer, "--resume", "auto"}));
  EXPECT_EQ(rest.status, 0) << rest.err;
  EXPECT_TRUE(model("stopped") == model("longer"));
}

TEST_F(TrainRanksTest, ARankThatIsKilledEndsTheJobNamingIt) {
  Program program(dir.path(), train_on(2, "job", {"train.epochs=5000"}));
  wait_for_checkpoint(program, "job");
  const pid_t victim = program.child_with("RANK=1");
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGKILL);
  ASSERT_TRUE(program.wait_for(25s)) << "survivors did not end";
  const Outcome outcome = program.outcome();
  EXPECT_EQ(outcome.status, 128 + SIGKILL);
  EXPECT_TRUE(message_contains(outcome.err, "rank 1"));
  EXPECT_TRUE(message_contains(outcome.err, "signal 9"));
}

TEST_F(TrainRanksTest, ARunContinuesWithAnotherNumberOfRanksAndKeepsItsGlobalBatches) {
  const auto continue_run = [&](const std::string& folder, std::vector<std::string> model) {
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), model.begin(), model.end());
      return more;
    };
    EXPECT_EQ(run(train_on(2, folder + " straight", with({}))).status, 0);
    EXPECT_EQ(run(train_on(2, folder, with({"train.max_steps=7"}))).status, 0);
    const Outcome alone = run(train(folder, with({"--resume", "auto", "train.max_steps=11"})));
    EXPECT_EQ(alone.status, 0) << alone.err;
    EXPECT_TRUE(message_contains(alone.err,
                                 "was made by 2 ranks, and continues with 1: a step keeps its 16 samples"));
    const Outcome again = run(train(folder, with({"--resume", "auto", "train.max_steps=12"})));
    EXPECT_EQ(again.status, 0) << again.err;  // the same command once more
    const Outcome three = run(train_on(3, folder, with({"--resume", "auto"})));
    EXPECT_EQ(three.status, 0) << three.err;
    EXPECT_TRUE(message_contains(three.err, "was made by 1 rank, and continues with 3"));
    EXPECT_TRUE(message_contains(read_file(dir / folder / "metrics.csv"), "\n5,20,"));
    return alone.err;
  };
  // A schedule whose length the limits of steps do not change.
  const std::string plain = continue_run("plain", {"model.name=vgg11", "schedule.name=constant"});
  EXPECT_TRUE(message_contains(plain, "results continue within rounding"));
  EXPECT_LT(largest_difference("plain", "plain straight"), 1e-4);
  const std::string norm = continue_run("norm", {"schedule.name=constant"});
  EXPECT_TRUE(message_contains(norm, "batch norm, which is of each rank's share of a step"));
  EXPECT_EQ(norm.find("within rounding"), std::string::npos) << norm;
}

TEST_F(TrainRanksTest, WhatStartedTheRanksIsInTheRunFolder) {
  ASSERT_EQ(run(train_on(2, "option", {"train.max_steps=1"})).status, 0);
  EXPECT_TRUE(message_contains(read_file(dir / "option" / "config.yaml"), "nproc_per_node: 2"));
  EXPECT_TRUE(message_contains(read_file(dir / "option" / "run.json"), "\"world_size\": 2"));
  ASSERT_EQ(run(train("alone", {"train.max_steps=1"})).status, 0);
  EXPECT_TRUE(message_contains(read_file(dir / "alone" / "run.json"), "\"world_size\": 1"));

  std::vector<std::string> by_run{"run", "--nproc-per-node", "2", "--", COHORT_PROGRAM};
  for (const std::string& word : train("by_run", {"train.epochs=500"})) by_run.push_back(word);
  Program program(dir.path(), by_run);
  wait_for_checkpoint(program, "by_run");
  program.signal(SIGTERM);
  const Outcome outcome = program.outcome();
  EXPECT_TRUE(message_contains(outcome.err, "run.dir=by_run --nproc-per-node 2"));
  EXPECT_TRUE(message_contains(read_file(dir / "by_run" / "run.json"), "\"world_size\": 2"));
}

TEST_F(TrainRanksTest, WithoutABatchEachRankSaysSoAndNoneDiesOfIt) {
  const Outcome outcome = run(train_on(2, "none", {"data.drop_last=true", "train.batch_size=1000"}));
  EXPECT_NE(outcome.status, 0);
  EXPECT_TRUE(
      message_contains(outcome.err, "has 61 samples, a step takes 2000, and drop_last leaves out less"));
  EXPECT_EQ(outcome.err.find("signal"), std::string::npos) << outcome.err;
}

TEST_F(TrainRanksTest, SeveralRanksEvaluateAsOneDoesAndSayItOnce) {
  ASSERT_EQ(run(train("run", {"train.max_steps=3"})).status, 0);
  const std::vector<std::string> eval{"eval", "--run", "run", "--checkpoint", "last"};
  const Outcome alone = run(eval);
  ASSERT_EQ(alone.status, 0) << alone.err;
  std::vector<std::string> words{"run", "--nproc-per-node", "2", "--prefix", "off", "--", COHORT_PROGRAM};
  words.insert(words.end(), eval.begin(), eval.end());
  const Outcome together = run(words);
  ASSERT_EQ(together.status, 0) << together.err;
  EXPECT_EQ(together.out, alone.out);
}

// A run that saves may have removed what rank 0 has read before rank 1 looks for it.
TEST_F(TrainRanksTest, RanksThatHaveReadOtherCheckpointsDoNotEvaluateThem) {
  ASSERT_EQ(run(train("run", {"train.epochs=2", "run.keep=0"})).status, 0);
  const auto evaluate = [&](const std::string& of_rank_0, const std::string& of_rank_1) {
    const std::string script = "if [ $RANK = 0 ]; then name=" + of_rank_0 + "; else name=" + of_rank_1 +
                               "; fi; exec '" + COHORT_PROGRAM +
                               "' eval --run run --checkpoint run/checkpoints/$name";
    return run({"run", "--nproc-per-node", "2", "--prefix", "off", "--", "sh", "-c", script});
  };
  const Outcome same = evaluate("last", "epoch_0002");
  EXPECT_EQ(same.status, 0) << same.err;
  const Outcome other = evaluate("epoch_0001", "epoch_0002");
  EXPECT_NE(other.status, 0);
  EXPECT_TRUE(message_contains(other.err, "the checkpoint is not the same on all ranks: rank 0 has "));
  EXPECT_EQ(other.out, "");
}

TEST_F(TrainRanksTest, TheTraceHoldsTheStagesOfAllRanks) {
  const Outcome outcome = run(train_on(2, "traced", {"run.trace=3", "train.max_steps=4"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const std::string trace = read_file(dir / "traced" / "trace.json");
  for (const char* part : {"rank 0", "rank 1", "all_reduce", "average", "backward"}) {
    EXPECT_TRUE(message_contains(trace, part));
  }
}

TEST_F(TrainRanksTest, OnSigusr2TheRanksSayWhatTheyDoAndContinue) {
  Program program(dir.path(), train_on(2, "asked", {"train.epochs=100"}));
  wait_for_checkpoint(program, "asked");
  program.signal(SIGUSR2);
  const Outcome outcome = program.outcome();
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "all_reduce"));
}

TEST_F(TrainRanksTest, UnevenBatchesAreWeightedOrPadded) {
  for (const std::string uneven : {"weighted", "pad"}) {
    const Outcome outcome = run(train_on(3, uneven, {"data.last_batch=" + uneven, "train.epochs=1"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  }
  EXPECT_FALSE(model("weighted") == model("pad"));
}

TEST_F(TrainRanksTest, WhatIsWrongWithARunIsSaidOnceWithTheStatusOfTheUsersFault) {
  ASSERT_EQ(run(train_on(2, "taken", {"train.max_steps=3"})).status, 0);
  const Outcome taken = run(train_on(2, "taken"));
  EXPECT_EQ(taken.status, 2) << taken.err;
  EXPECT_TRUE(message_contains(taken.err, "taken already holds a run"));

  const Outcome single = run(train_on(2, "single", {"distributed.gradients=none"}));
  EXPECT_EQ(single.status, 2) << single.err;
  EXPECT_TRUE(message_contains(single.err, "gradients are kept by \"none\", and there are 2 ranks"));

  const Outcome words = run(train("words", {"--nproc-per-node", "many"}));
  EXPECT_EQ(words.status, 2);
  EXPECT_TRUE(message_contains(words.err, "nproc-per-node"));

  const Outcome backend = run(train_on(2, "backend", {"distributed.backend=glue"}));
  EXPECT_EQ(backend.status, 2) << backend.err;
  EXPECT_TRUE(message_contains(backend.err, "'glue'"));
}

TEST_F(TrainRanksTest, VariablesOfALauncherMeanNothingWhereNoRanksAreStarted) {
  Program::Variables variables = {{"PET_NNODES", "1:4"}};  // as torchrun takes it, for an elastic job
  const auto ends_well = [&](const std::string& folder, const std::vector<std::string>& more) {
    const Outcome outcome = Program(dir.path(), train(folder, more), variables).outcome();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  };
  ends_well("alone", {"train.max_steps=1"});
  variables.insert(variables.end(), {{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ends_well("rank", {"train.max_steps=1"});
  ends_well("asked", {"train.max_steps=1", "--nproc-per-node", "1"});
}

TEST_F(TrainRanksTest, RanksWithAnotherConfigurationAreToldWhichLineDiffers) {
  const std::string port = std::to_string(free_port());
  std::vector<std::unique_ptr<Program>> programs;
  for (const std::string rank : {"0", "1"}) {
    const Program::Variables environment = {{"RANK", rank},
                                            {"WORLD_SIZE", "2"},
                                            {"LOCAL_RANK", rank},
                                            {"LOCAL_WORLD_SIZE", "2"},
                                            {"MASTER_ADDR", "127.0.0.1"},
                                            {"MASTER_PORT", port}};
    programs.push_back(std::make_unique<Program>(
        dir.path(), train("differs", {rank == "0" ? "optim.lr=0.1" : "optim.lr=0.2"}), environment));
  }
  for (auto& program : programs) {
    const Outcome outcome = program->outcome();
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(message_contains(outcome.err,
                                 "the configuration is not the same on all ranks: rank 0 has '  lr: 0.1', "
                                 "rank 1 has '  lr: 0.2'"));
  }
}

}  // namespace
}  // namespace cohort::test
