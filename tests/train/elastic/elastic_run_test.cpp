// Elastic runs whose processes are threads, over a fake session: whatever processes end, die or come, and
// wherever, the run leaves the bytes of an undisturbed one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/run.h"
#include "cohort/train/run_folder.h"
#include "cohort/train/trainer.h"
#include "tests/support/seeds.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"
#include "tests/train/elastic/elastic_job.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

TEST(ElasticRunTest, AnUndisturbedRunHasTheSameFilesOnAnyNumberOfProcesses) {
  const ElasticEnd& expected = undisturbed();
  EXPECT_EQ(expected.generations, 1U);
  EXPECT_EQ(test::ledger_fault(expected.files.at("ledger.csv"), 8, kElasticSamples), "");
  EXPECT_EQ(expected.files.at("checkpoints/last"), "epoch_0002");
  for (const int processes : {1, 2, 4}) {
    expect_same_files(run_elastic({.processes = processes}, {}), expected,
                      base::concat(processes, " processes"));
  }
}

TEST(ElasticRunTest, ItTrainsWhatVirtualRanksTrainWithoutIt) {
  const test::TempDir dir;
  const ElasticSetting setting{.change = [](TrainerOptions& options) { options.session(nullptr); }};
  train_elastic(setting, dir.path(), nullptr);
  std::map<std::string, std::string> files = test::run_files(dir.path());
  files["ledger.csv"] = undisturbed().files.at("ledger.csv");  // of elastic runs alone
  ElasticEnd end;
  end.files = std::move(files);
  expect_same_files(end, undisturbed(), "without a session");
}

using RunWithFaults = std::function<ElasticEnd(test::FakeFaults)>;

/// Each process of `run` has the fault once, at each of its points; `stride`: at each stride-th.
void expect_same_at_each_point(test::FakeFault fault, int stride, const RunWithFaults& run,
                               const ElasticEnd& expected) {
  int runs = 0;
  for (int victim = 0; victim < 3; ++victim) {
    for (int at = runs % stride; at < expected.points.at(static_cast<std::size_t>(victim)); at += stride) {
      const ElasticEnd end = run(
          [&](int id, int point) { return id == victim && point == at ? fault : test::FakeFault::kNone; });
      ++runs;
      expect_same_files(end, expected, base::concat("process ", victim, " at point ", at));
      if (testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(runs, 3);
}

void expect_same_at_each_point(test::FakeFault fault, int stride) {
  expect_same_at_each_point(
      fault, stride, [](test::FakeFaults faults) { return run_elastic({}, std::move(faults)); },
      undisturbed());
}

/// All points, or each n-th.
int elastic_stride() {
  return static_cast<int>(base::env_int("COHORT_STRIDE", 1).value_or(31));
}

TEST(ElasticRunTest, AGenerationThatEndsAtAnyTransferLeavesTheSameFiles) {
  expect_same_at_each_point(test::FakeFault::kEnd, elastic_stride());
}

TEST(ElasticRunTest, AProcessThatDiesAnywhereLeavesTheSameFiles) {
  expect_same_at_each_point(test::FakeFault::kDie, elastic_stride());
}

TEST(ElasticRunTest, AProcessThatComesAtAnyTimeLeavesTheSameFiles) {
  expect_same_at_each_point(test::FakeFault::kJoin, 2 * elastic_stride());
}

// The start of a run that resumes: all read the checkpoint, and have a state that counts when they have
// committed it.
TEST(ElasticRunTest, AResumedStartThatIsDisturbedAnywhereLeavesTheSameFiles) {
  const auto setting_of = [](std::int64_t steps) {
    return ElasticSetting{.change = [steps](auto& options) { options.max_steps(steps).eval_every(0); }};
  };
  const test::TempDir earlier;
  run_elastic(setting_of(3), {}, earlier.path());
  const auto resumed = [&](test::FakeFaults faults) {
    using std::filesystem::copy_options;
    const test::TempDir dir;
    std::filesystem::copy(earlier.path(), dir.path(), copy_options::recursive | copy_options::copy_symlinks);
    return run_elastic(setting_of(4), std::move(faults), dir.path());
  };
  const ElasticEnd expected = resumed({});
  for (const test::FakeFault fault : {test::FakeFault::kEnd, test::FakeFault::kDie}) {
    expect_same_at_each_point(fault, std::max(1, elastic_stride() / 4), resumed, expected);
  }
}

test::FakeFaults random_faults(unsigned seed) {
  return [random = std::minstd_rand(seed + 1)](int, int) mutable {
    if (random() % 120 != 0) return test::FakeFault::kNone;
    constexpr test::FakeFault kFaults[] = {test::FakeFault::kDie, test::FakeFault::kVanish,
                                           test::FakeFault::kEnd, test::FakeFault::kJoin,
                                           test::FakeFault::kJoin};
    return kFaults[random() % 5];
  };
}

TEST(ElasticRunTest, RandomChangesLeaveTheSameFiles) {
  const test::Seeds seeds = test::Seeds::usual(5);
  int deaths = 0;
  std::uint64_t generations = 0;
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    const std::string optimizer = seed % 2 == 0 ? "sgd" : "adam";
    const ElasticSetting setting{.optimizer = optimizer,
                                 .processes = 1 + static_cast<int>(seed % kElasticRanks)};
    const ElasticEnd end = run_elastic(setting, random_faults(seed));
    deaths += end.deaths;
    generations += end.generations;
    expect_same_files(end, undisturbed(optimizer), base::concat("COHORT_RANDOM_FIRST=", seed));
    if (HasFailure()) return;
  }
  EXPECT_GT(deaths, 0);
  EXPECT_GT(generations, 2 * seeds.count());
}

// docs/reference/composition.md. A feature that is silently off would leave the numbers as they are.
TEST(ElasticRunTest, FeaturesOfAStepLeaveTheSameFilesUnderRandomChanges) {
  struct Feature {
    const char* name;
    std::function<void(ClassificationOptions&)> set;
  };
  const Feature features[] = {
      {"accumulation", [](auto& step) { step.accumulate(2); }},
      {"bf16", [](auto& step) { step.bf16(true); }},
      {"label smoothing", [](auto& step) { step.label_smoothing(0.2); }},
      {"no clipping", [](auto& step) { step.clip_norm(0); }},
      {"all", [](auto& step) { step.accumulate(2).bf16(true).label_smoothing(0.2).script(true); }}};
  const std::string model = "checkpoints/epoch_0002/model.safetensors";
  const test::Seeds seeds = test::Seeds::usual(2);
  for (const Feature& feature : features) {
    const ElasticSetting setting{.step = feature.set};
    const ElasticEnd straight = run_elastic(setting, {});
    EXPECT_NE(straight.files.at(model), undisturbed().files.at(model)) << feature.name;
    std::uint64_t generations = 0;
    for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
      const ElasticEnd end = run_elastic(setting, random_faults(seed));
      generations += end.generations;
      expect_same_files(end, straight, base::concat(feature.name, ", COHORT_RANDOM_FIRST=", seed));
    }
    EXPECT_GT(generations, seeds.count());
    if (HasFailure()) return;
  }
}

TEST(ElasticRunTest, ScriptModeContinuesAfterAStepThatWasGivenUp) {
  const ElasticEnd end = run_elastic({.script = true}, [](int id, int point) {
    return point > 0 && (point + 13 * id) % 67 == 0 ? test::FakeFault::kEnd : test::FakeFault::kNone;
  });
  EXPECT_GT(end.generations, 3U);
  expect_same_files(end, undisturbed(), "script mode");
}

TEST(ElasticRunTest, ARunThatResumesHasTheSameFilesAndALedgerOfAllSteps) {
  const test::TempDir dir;
  const auto until = [&](std::int64_t steps, test::FakeFaults faults) {
    return run_elastic(
        {.change = [steps](TrainerOptions& options) { options.max_steps(steps).eval_every(0); }},
        std::move(faults), dir.path());
  };
  until(3, {});
  until(6, [](int id, int point) {
    return id == 0 && point == 30 ? test::FakeFault::kDie : test::FakeFault::kNone;
  });
  const ElasticEnd end = until(0, {});
  const ElasticEnd straight =
      run_elastic({.change = [](TrainerOptions& options) { options.eval_every(0); }}, {});
  EXPECT_EQ(test::ledger_fault(end.files.at("ledger.csv"), 8, kElasticSamples), "");
  for (const char* file : {"ledger.csv", "checkpoints/epoch_0002/model.safetensors",
                           "checkpoints/epoch_0002/optimizer.safetensors"}) {
    EXPECT_TRUE(end.files.at(file) == straight.files.at(file)) << file;
  }
  EXPECT_EQ(until(0, {}).files, end.files) << "nothing is left to do";
}

TEST(ElasticRunTest, ACheckpointThatIsNamedIsGoneBackToByTheFirstStartAlone) {
  const test::TempDir dir;
  const auto first_step = [&](const std::string& resume, std::int64_t max_steps) {
    std::int64_t first = 0;
    run_elastic({.processes = 2,
                 .change = [&](TrainerOptions& options) { options.resume(resume).max_steps(max_steps); },
                 .on_step =
                     [&](const StepReport& report) {
                       if (first == 0) first = report.step;
                     }},
                {}, dir.path());
    return first;
  };
  EXPECT_EQ(first_step("auto", 6), 1);
  const std::string epoch = (dir / "checkpoints" / "epoch_0001").string();
  EXPECT_EQ(first_step(epoch, 7), 5);
  EXPECT_EQ(first_step(epoch, 0), 8) << "after a failure of all processes: the same command again";
  EXPECT_EQ(first_step("step_00000003", 0), 4) << "another checkpoint";
  EXPECT_EQ(first_step(epoch, 0), 5);
}

TEST(ElasticRunTest, ASignalAtOneProcessStopsTheRunAfterTheNextStep) {
  const test::TempDir dir;
  FitResult result;
  test::FakeRun run(kElasticRanks, {}, [&](int, std::shared_ptr<elastic::Session> session) {
    const ElasticSetting setting{.change = [&](TrainerOptions& options) { options.handle_signals(true); },
                                 .on_step =
                                     [](const StepReport& report) {
                                       if (report.step == 2) ::raise(SIGTERM);
                                     }};
    result = train_elastic(setting, dir.path(), std::move(session));
  });
  run.run(1);
  EXPECT_FALSE(result.finished);
  EXPECT_EQ(result.signal, SIGTERM);
  EXPECT_EQ(result.steps, 3) << "the request travels with a step";
  EXPECT_EQ(std::filesystem::read_symlink(dir / "checkpoints" / "last"), "step_00000003");
  const ElasticEnd rest = run_elastic({}, {}, dir.path());
  EXPECT_EQ(test::ledger_fault(rest.files.at("ledger.csv"), 8, kElasticSamples), "");
  EXPECT_TRUE(rest.files.at("checkpoints/epoch_0002/model.safetensors") ==
              undisturbed().files.at("checkpoints/epoch_0002/model.safetensors"));
}

TEST(ElasticRunTest, EachProcessOfARunThatWasStoppedTellsTheSignal) {
  const auto results_of = [](int victim_point, int& points) {
    const auto setting_of = [](int id) {
      return ElasticSetting{.change = [id](TrainerOptions& options) { options.handle_signals(id == 0); },
                            .on_step =
                                [](const StepReport& report) {
                                  if (report.step == 2) ::raise(SIGTERM);
                                }};
    };
    return results_beside_successor(setting_of, victim_point, points);
  };
  int points = 0;
  results_of(-1, points);
  int num_copied = 0;
  // The second process dies at one of its last points: its successor copies the state of the end, or makes
  // it.
  for (int point = points - 12; point < points; ++point) {
    SCOPED_TRACE(base::concat("dies at point ", point, " of ", points));
    int ignored = 0;
    const std::vector<FitResult> results = results_of(point, ignored);
    num_copied += results.size() == 2 ? 1 : 0;
    for (const FitResult& result : results) {
      EXPECT_FALSE(result.finished) << "rank " << result.rank;
      EXPECT_EQ(result.signal, SIGTERM) << "rank " << result.rank;
      if (result.rank >= 0) EXPECT_EQ(result.steps, 3);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(num_copied, 0);
}

TEST(ElasticRunTest, CheckpointsDoNotTellWhoHasWrittenThem) {
  std::atomic<int> num_processes = 0;
  const ElasticSetting setting{.change = [&](TrainerOptions& options) {
    options.description(base::concat("of process ", ++num_processes));
  }};
  const ElasticEnd end = run_elastic(setting, [](int id, int point) {
    return id <= 2 && point == 40 + 30 * id ? test::FakeFault::kDie : test::FakeFault::kNone;
  });
  EXPECT_EQ(end.deaths, 3) << "all processes of the start";
  std::set<std::string> descriptions, world_sizes;
  for (const auto& [name, content] : end.files) {
    if (!name.ends_with("state.json")) continue;
    const nlohmann::json run = nlohmann::json::parse(content);
    descriptions.insert(run.at("description").dump());
    world_sizes.insert(run.at("world_size").dump());
  }
  EXPECT_EQ(descriptions.size(), 1U) << *descriptions.begin() << ", " << *descriptions.rbegin();
  EXPECT_EQ(world_sizes, (std::set<std::string>{"1"}));
}

TEST(ElasticRunTest, ProcessesOfAStartTellOneOrigin) {
  std::set<std::string> origins;
  for (const int victim_point : {20, 28, 36, 90}) {
    std::vector<FitInfo> starts;
    const ElasticSetting setting{.on_start = [&](const FitInfo& info) { starts.push_back(info); }};
    run_elastic(setting, [&](int id, int point) {
      return id == 0 && point == victim_point ? test::FakeFault::kDie : test::FakeFault::kNone;
    });
    for (const FitInfo& start : starts) EXPECT_EQ(start.origin, starts.front().origin);
    EXPECT_EQ(starts.back().continues, victim_point == 90);
    origins.insert(starts.front().origin);
  }
  EXPECT_EQ(origins.size(), 4U);
  EXPECT_FALSE(origins.contains(""));
}

TEST(ElasticRunTest, TwoRunsAtOnceInOneFolderAreRejected) {
  const test::TempDir dir;
  const auto join = [&] {
    COHORT_EXPECT_THROW_WITH(run_elastic({.processes = 2}, {}, dir.path()), SystemError,
                             "is in use by another elastic run");
  };
  const ElasticSetting setting{.on_step = [&](const StepReport& report) {
    if (report.step == 3) join();
  }};
  const ElasticEnd end = run_elastic(setting, {}, dir.path());
  expect_same_files(end, undisturbed(), "the first run");
  EXPECT_EQ(run_elastic({}, {}, dir.path()).files, end.files) << "nothing is left to do for the next run";
}

TEST(ElasticRunTest, ProcessesWithOtherOptionsAreRejected) {
  const test::TempDir dir;
  test::FakeRun run(kElasticRanks, {}, [&](int id, std::shared_ptr<elastic::Session> session) {
    const ElasticSetting setting{
        .change = [id](TrainerOptions& options) { options.epochs(2 + id).common("data.type idx\n"); }};
    train_elastic(setting, dir.path(), std::move(session));
  });
  COHORT_EXPECT_THROW_WITH(run.run(2), UsageError,
                           "this process has another run than process 0: epochs 3, process 0 has epochs 2");
}

/// A step of one linear layer that reports as the test says.
struct OwnTask : Task {
  OwnTask() {
    add_module("", net.ptr());
    add_optimizer("", optimizer);
  }
  StepMetrics train_step(data::Batch& batch) override {
    StepMetrics metrics;
    optimizer->zero_grad();
    do {
      if (batch.size == 0) break;  // this process has no sample of a short last batch
      const at::Tensor loss = net->forward(batch.input().flatten(1)).square().mean();
      const bool is_bad_share = batch.number == bad_batch && batch.share == 3;
      metrics.emplace_back("loss", is_bad || is_bad_share ? loss * std::nan("") : loss.detach(),
                           static_cast<double>(batch.size));
      loss.backward();
    } while (batch.advance());
    if (reports) report_metrics(metrics);
    for (int i = 0; i < averages; ++i)
      is_made = average_gradients(*optimizer, static_cast<double>(batch.whole_size));
    if (is_made) step_if_finite(*optimizer);
    return metrics;
  }
  void add_second() {
    add_optimizer("second", std::make_shared<optim::SGD>(other->parameters(), optim::SGDOptions(1)));
  }
  torch::nn::Linear net{12, 1}, other{1, 1};
  std::shared_ptr<optim::SGD> optimizer =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
  bool reports = true, is_bad = false, is_made = false;
  int averages = 1;
  std::int64_t bad_batch = -1;  // whose last virtual rank has no finite loss
};

void train_own(OwnTask& task, std::int64_t virtual_ranks = kElasticRanks) {
  test::FakeRun run(kElasticRanks, {}, [&](int, std::shared_ptr<elastic::Session> session) {
    data::Loader loader(elastic_data(kElasticSamples), elastic_loader(true));
    const auto sync = std::make_shared<parallel::VirtualRankSync>(
        comm::Group(), parallel::VirtualRankOptions{.num_virtual_ranks = virtual_ranks});
    Trainer(TrainerOptions().stop_on_non_finite(false).gradient_sync(sync).session(std::move(session)))
        .fit(task, loader);
  });
  run.run(1);
}

TEST(ElasticRunTest, TasksWhoseStepIsNoTransactionAreRejected) {
  OwnTask reports_late, averages_twice, two_optimizers, other_ranks, elsewhere;
  reports_late.reports = false;
  COHORT_EXPECT_THROW_WITH(train_own(reports_late), UsageError,
                           "returned metrics that it had not reported before average_gradients()");
  averages_twice.averages = 2;
  COHORT_EXPECT_THROW_WITH(train_own(averages_twice), UsageError,
                           "gradients are averaged twice in a step that is a transaction");
  two_optimizers.add_second();
  COHORT_EXPECT_THROW_WITH(train_own(two_optimizers), UsageError, "the task has 2 optimizers");
  elsewhere.net->register_parameter("far", at::empty({2}, at::kMeta));
  COHORT_EXPECT_THROW_WITH(train_own(elsewhere), UsageError,
                           "parameter far is on meta, and an elastic run computes on the CPU");
  COHORT_EXPECT_THROW_WITH(train_own(other_ranks, 3), UsageError,
                           "expected 4 virtual ranks without a group, as the session has");
}

TEST(ElasticRunTest, CohortTrainSaysWhatAnElasticRunNeeds) {
  const test::SmallRun small;
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"distributed.elastic=true"};
    all.insert(all.end(), more.begin(), more.end());
    test::FakeRun run(kElasticRanks, {}, [&](int, std::shared_ptr<elastic::Session> session) {
      run_training(small.config(all), "cohort train --config a.yaml", std::move(session));
    });
    run.run(1);
  };
  COHORT_EXPECT_THROW_WITH(
      run_training(small.config({"distributed.elastic=true"}), "cohort train --config a.yaml"), ConfigError,
      "distributed.elastic is true, and no agent has started this process. Try: cohort run --elastic "
      "--nnodes 1:4 "
      "--nproc-per-node 2 -- cohort train --config a.yaml");
  COHORT_EXPECT_THROW_WITH(train({"run.dir="}), ConfigError,
                           "distributed.elastic is true and run.dir is empty");
  COHORT_EXPECT_THROW_WITH(
      train({"distributed.virtual_ranks=3"}), ConfigError,
      "distributed.virtual_ranks is 3, and the agent has started this process for 4. Try: cohort "
      "run --elastic --virtual-ranks 3");
  train({"train.epochs=1", "train.threads=1", "run.trace=5"});
  EXPECT_TRUE(std::filesystem::exists(small.path() / "trace.json"));
  EXPECT_TRUE(std::filesystem::exists(small.path() / "ledger.csv"));
  EXPECT_TRUE(std::filesystem::exists(small.path() / "curves.svg"));
  // Processes of an elastic run share the folder, and no other run gets it.
  const RunFolder first = RunFolder::join(small.config().run), second = RunFolder::join(small.config().run);
  COHORT_EXPECT_THROW_WITH(small.resume({"distributed.virtual_ranks=4"}), SystemError,
                           "is in use by process");
}

TEST(ElasticRunTest, AReportedLossThatIsNotFiniteLeavesTheStepOut) {
  OwnTask task;
  task.is_bad = true;
  const at::Tensor before = task.net->weight.detach().clone();
  train_own(task);
  EXPECT_FALSE(task.is_made);
  EXPECT_TRUE(at::equal(task.net->weight, before));
}

TEST(ElasticRunTest, AStepWhoseLossIsNotFiniteOnOneProcessIsLeftOutByAll) {
  const auto files_of = [](int processes) {
    const test::TempDir dir;
    test::FakeRun run(kElasticRanks, {}, [&](int, std::shared_ptr<elastic::Session> session) {
      OwnTask task;
      torch::nn::init::constant_(task.net->weight, 0.1);
      torch::nn::init::constant_(task.net->bias, 0.2);
      task.bad_batch = 1;
      data::Loader loader(elastic_data(kElasticSamples), elastic_loader(true));
      const auto sync = std::make_shared<parallel::VirtualRankSync>(
          comm::Group(), parallel::VirtualRankOptions{.num_virtual_ranks = kElasticRanks});
      Trainer(TrainerOptions()
                  .stop_on_non_finite(false)
                  .save_every_steps(1)
                  .keep(0)
                  .run_dir(dir.path())
                  .gradient_sync(sync)
                  .session(std::move(session)))
          .fit(task, loader);
    });
    run.run(processes);
    ElasticEnd end;
    test::write_file(dir / "metrics.jsonl", "");
    end.files = test::run_files(dir.path());
    return end;
  };
  const ElasticEnd expected = files_of(1);
  EXPECT_NE(expected.files.at("checkpoints/step_00000002/state.json").find(R"("non_finite_steps":1)"),
            std::string::npos);
  // The writer has computed finite losses alone.
  for (const int processes : {2, 4}) expect_same_files(files_of(processes), expected, "several processes");
}

}  // namespace
}  // namespace cohort::train
