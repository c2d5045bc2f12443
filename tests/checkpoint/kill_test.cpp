// A process that saves is killed at each of its system calls in turn. Whatever the moment, the
// folder holds the checkpoint before or the one after, with `best` as that checkpoint says, and a run that
// resumes from it keeps what it should and nothing else.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "cohort/base/log.h"
#include "cohort/checkpoint/link.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/support/temp_dir.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::FileCallLimits;
using test::read_file;
using test::write_file;

const RunCheckpointsOptions kKeepOne{.keep = 1};
const RunCheckpointsOptions kKeepAll{.keep = 0};

CheckpointContent content_of(int64_t value, int64_t best) {
  return {{{"w", at::full({300}, value, at::kLong)}},
          {{"m", at::full({20}, value, at::kLong)}},
          {{"value", value}, {"best", best}}};
}

int64_t checked_value_of(const CheckpointContent& content) {
  const auto value = content.state.at("value").get<int64_t>();
  for (const TensorMap* tensors : {&content.model, &content.optimizer}) {
    EXPECT_TRUE(tensors->at(0).second.eq(value).all().item<bool>());
  }
  return value;
}

/// What is killed, on a folder that `prepare` made. A checkpoint's state says which value is the best so far.
struct Scenario {
  const char* name;
  std::function<void(const fs::path&)> prepare;
  std::function<void(const fs::path&)> act;
  std::vector<int64_t> values;  // that the folder may hold afterwards; 0: none
  bool replaces = false;        // a checkpoint of the same name
  bool replaces_best = false;   // which is the new one a moment before `last` moves

  bool is_best(int64_t value, const CheckpointContent& last) const {
    return value == last.state.at("best") || (replaces_best && value == values.back());
  }
};

void save_value(const fs::path& folder, const std::string& name, int64_t value, int64_t best,
                RunCheckpointsOptions options = kKeepOne) {
  RunCheckpoints(folder, options).save(name, content_of(value, best), {.is_best = value == best});
}

void prepare_two(const fs::path& folder) {
  save_value(folder, "epoch_1", 1, 1);
  save_value(folder, "epoch_2", 2, 1);
}

std::vector<Scenario> scenarios() {
  return {
      {"the first save",
       [](const fs::path&) {},
       [](const fs::path& f) { save_value(f, "epoch_1", 1, 1); },
       {0, 1}},
      {"a new best", prepare_two, [](const fs::path& f) { save_value(f, "epoch_3", 3, 3); }, {2, 3}},
      {"not the best", prepare_two, [](const fs::path& f) { save_value(f, "epoch_3", 3, 1); }, {2, 3}},
      {"a name again", prepare_two, [](const fs::path& f) { save_value(f, "epoch_2", 3, 3); }, {2, 3}, true},
      {"the only name again",
       [](const fs::path& f) { save_value(f, "epoch_1", 1, 1); },
       [](const fs::path& f) { save_value(f, "epoch_1", 3, 3); },
       {1, 3},
       true},
      {"the best's name again",
       [](const fs::path& f) {
         save_value(f, "best_model", 1, 1);
         save_value(f, "latest", 2, 1);
       },
       [](const fs::path& f) { save_value(f, "best_model", 3, 3); },
       {2, 3},
       true,
       true},
      {"going back",
       [](const fs::path& f) {
         save_value(f, "epoch_1", 1, 1, kKeepAll);
         save_value(f, "epoch_2", 2, 2, kKeepAll);
         save_value(f, "epoch_3", 3, 2, kKeepAll);
       },
       [](const fs::path& f) { RunCheckpoints(f).go_back_to(f / "epoch_1"); },
       {3, 1}},
      {"leftovers of another host",
       [](const fs::path& f) {
         prepare_two(f);
         fs::rename(f / "epoch_1", f / ".epoch_1~old.cohort-elsewhere-4-1-1");
         write_file(f / ".epoch_3.cohort-elsewhere-4-1-1" / "model.safetensors", "half");
       },
       [](const fs::path& f) { save_value(f, "epoch_3", 3, 1); },
       {2, 3}},
  };
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(folder)) names.push_back(item.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// Runs `act` in a child that is killed at that moment; false if the child came to its end.
bool kill_during(const Scenario& scenario, const fs::path& folder, const FileCallLimits& limits, int moment) {
  const pid_t child = ::fork();
  if (child == 0) {
    test::set_file_call_limits(limits);
    test::kill_at_file_call(moment);
    scenario.act(folder);
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : status == 0) << status;
  return WIFSIGNALED(status);
}

/// What somebody finds who only reads.
void expect_whole(const Scenario& scenario, const fs::path& folder, bool killed) {
  const RunCheckpoints checkpoints(folder);
  const auto usable = checkpoints.load_usable();
  const int64_t value = usable ? checked_value_of(usable->content) : 0;
  EXPECT_EQ(std::count(scenario.values.begin(), scenario.values.end(), value), 1) << value;
  EXPECT_TRUE(killed || value == scenario.values.back()) << value;
  if (usable) {
    const auto best = checkpoints.find("best");
    if (follow_link(folder / "last")) {
      ASSERT_TRUE(best.has_value());
      EXPECT_TRUE(scenario.is_best(checked_value_of(RunCheckpoints::load(*best)), usable->content)) << *best;
    }
  }
}

/// A run that resumes from what was found, saves once more, and keeps that checkpoint and the best.
void expect_continues(const Scenario& scenario, const fs::path& folder) {
  RunCheckpoints run(folder, kKeepOne);
  int64_t best = 9;
  std::vector<std::string> names{".epoch_9.cohort-x-1-1", ".lock", "best", "epoch_9", "last", "notes.txt"};
  if (const auto usable = run.load_usable()) {
    run.go_back_to(usable->folder);
    const auto link = follow_link(folder / "best");
    ASSERT_TRUE(link.has_value());
    best = checked_value_of(RunCheckpoints::load(*link));
    EXPECT_TRUE(scenario.is_best(best, usable->content)) << best;
    names.push_back(link->filename());
  }
  run.save("epoch_9", content_of(9, best), {.is_best = best == 9});
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names_in(folder), names);
  EXPECT_EQ(checked_value_of(RunCheckpoints::load(*follow_link(folder / "best"))), best);
  EXPECT_EQ(read_file(folder / "notes.txt"), "mine");
}

void kill_at_each_moment(const FileCallLimits& limits) {
  for (const Scenario& scenario : scenarios()) {
    if (!limits.can_exchange && !scenario.replaces) continue;
    test::TempDir made;
    test::set_file_call_limits(limits);
    write_file(made / "notes.txt", "mine");
    write_file(made / ".epoch_9.cohort-x-1-1" / "notes.txt", "mine");
    scenario.prepare(made.path());
    int moment = 0;
    for (bool killed = true; killed && !::testing::Test::HasFailure(); ++moment) {
      SCOPED_TRACE(std::string(scenario.name) + ", moment " + std::to_string(moment));
      test::TempDir dir;
      fs::copy(made.path(), dir.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
      killed = kill_during(scenario, dir.path(), limits, moment);
      expect_whole(scenario, dir.path(), killed);
      expect_continues(scenario, dir.path());
    }
    std::cout << scenario.name << ": " << moment - 1 << " moments\n";
  }
}

class KillTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base::set_log_sink([](base::LogLevel, std::string_view) {});
  }
  void TearDown() override {
    test::set_file_call_limits({});
    base::set_log_sink({});
  }
};

TEST_F(KillTest, AtEachSystemCallTheFolderHoldsTheCheckpointBeforeOrAfter) {
  kill_at_each_moment({});
}

TEST_F(KillTest, AtEachSystemCallWhereNamesCannotBeExchanged) {
  kill_at_each_moment({.can_exchange = false});
}

TEST_F(KillTest, AtEachSystemCallWhereThereAreNoLinks) {
  kill_at_each_moment({.can_link = false});
}

TEST_F(KillTest, AtEachSystemCallANameOfAnOlderVersionIsReplaced) {
  const Scenario scenario{"", {}, [](const fs::path& f) { save_value(f, "latest", 3, 1); }, {2, 3}, true};
  for (const FileCallLimits& limits : {FileCallLimits(), FileCallLimits{.can_exchange = false}}) {
    bool killed = true;
    for (int moment = 0; killed && !HasFailure(); ++moment) {
      SCOPED_TRACE(moment);
      test::TempDir dir;
      save_value(dir.path(), "best_model", 1, 1);
      save_value(dir.path(), "latest", 2, 1);
      for (const char* name : {"best_model", "latest"}) {
        Manifest manifest = read_manifest(dir / name);
        manifest.name = manifest.best = "";
        write_file(dir / name / "state.json", manifest_text(manifest));
      }
      killed = kill_during(scenario, dir.path(), limits, moment);
      expect_whole(scenario, dir.path(), killed);
      EXPECT_TRUE(RunCheckpoints(dir.path()).find("last"));
      EXPECT_FALSE(fs::exists(dir / "latest.replaced-1"));
    }
  }
}

TEST_F(KillTest, AtEachSystemCallWhatReplacesTheBestAndIsNotIsNotTheBest) {
  const Scenario scenario{"", {}, [](const fs::path& f) { save_value(f, "best_model", 3, 0); }, {}, true};
  for (const FileCallLimits& limits : {FileCallLimits(), FileCallLimits{.can_exchange = false}}) {
    bool killed = true;
    for (int moment = 0; killed; ++moment) {
      test::TempDir dir;
      save_value(dir.path(), "best_model", 1, 1);
      save_value(dir.path(), "latest", 2, 1);
      killed = kill_during(scenario, dir.path(), limits, moment);
      for (const bool is_repaired : {false, true}) {
        if (is_repaired) RunCheckpoints(dir.path()).go_back_to(*RunCheckpoints(dir.path()).find("last"));
        const auto best = RunCheckpoints(dir.path()).find_and_load("best");
        EXPECT_TRUE(!best || checked_value_of(best->content) == 1) << "moment " << moment;
      }
    }
  }
}

}  // namespace
}  // namespace cohort::checkpoint
