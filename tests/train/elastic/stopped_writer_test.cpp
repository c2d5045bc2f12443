// A process 0 that is stopped in the middle of a write holds the lock of the run's folder. Others make steps
// meanwhile, and the run leaves what an undisturbed one leaves, but for reports and checkpoints of the time
// when nobody could write.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "cohort/base/files/fd.h"
#include "cohort/base/log.h"
#include "cohort/train/internal/elastic/run_writer.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"
#include "tests/train/elastic/elastic_job.h"
#include "tests/train/elastic/wrapped_session.h"

namespace cohort::train {
namespace {

/// Takes the place of process 0 that is stopped while it writes: it holds the lock from step `from` on, until
/// the run's log says `until`. Process 0 dies when the lock is taken, unless it is to live.
class StoppedWriter {
 public:
  StoppedWriter(std::filesystem::path folder, std::int64_t from, std::string until, bool dies = true)
      : folder_(std::move(folder)), from_(from), until_(std::move(until)), dies_(dies) {
    base::set_log_sink([this](base::LogLevel, std::string_view line) {
      if (line.find(" is not reported: ") != std::string_view::npos) ++num_lost_;
      if (is_held_ && line.find(until_) != std::string_view::npos) {
        is_held_ = false;
        lock_.close();
      }
    });
  }
  ~StoppedWriter() {
    base::set_log_sink({});
    if (thread_.joinable()) thread_.join();
  }

  /// Called by process 0 while it writes.
  void on_step(const StepReport& report) {
    if (report.step != from_ || thread_.joinable()) return;
    lock_ = base::Fd(::open((folder_ / ".writer").c_str(), O_RDWR | O_CLOEXEC));
    thread_ = std::thread([this] {
      EXPECT_EQ(::flock(lock_.get(), LOCK_EX), 0);  // when this write of process 0 ends
      is_held_ = was_held_ = true;
    });
    has_begun_ = true;
  }
  test::FakeFault fault(int id) {
    if (id != 0 || !has_begun_ || has_died_) return test::FakeFault::kNone;
    has_died_ = true;
    test::wait_until([this] { return was_held_.load(); });
    return dies_ ? test::FakeFault::kDie : test::FakeFault::kNone;
  }
  /// Warnings of steps and epochs that are not reported.
  int num_lost() const { return num_lost_; }
  bool was_freed() const { return was_held_ && !is_held_; }

 private:
  const std::filesystem::path folder_;
  const std::int64_t from_;
  const std::string until_;
  const bool dies_;
  std::thread thread_;
  base::Fd lock_;
  std::atomic<int> num_lost_ = 0;
  std::atomic<bool> has_begun_ = false, has_died_ = false, is_held_ = false, was_held_ = false;
};

ElasticEnd run_beside(StoppedWriter& stopped, const std::filesystem::path& folder) {
  const ElasticSetting setting{.on_step = [&](const StepReport& report) { stopped.on_step(report); }};
  return run_elastic(setting, [&](int id, int) { return stopped.fault(id); }, folder);
}

TEST(ElasticRunStoppedWriterTest, FilesThatCouldNotBeOpenedAreOpenedByTheNextWrite) {
  const test::TempDir dir;
  StoppedWriter stopped(dir.path(), 4, "the files of the run are not opened");
  const ElasticEnd end = run_beside(stopped, dir.path());
  EXPECT_TRUE(stopped.was_freed());
  EXPECT_EQ(end.deaths, 1);
  expect_same_files(end, undisturbed(), "the lock was free again before the step was reported");
}

/// Files that do not depend on when the folder could be written to.
void expect_whole_end(const ElasticEnd& end) {
  EXPECT_EQ(test::ledger_fault(end.files.at("ledger.csv"), 8, kElasticSamples), "");
  for (const char* file :
       {"ledger.csv", "checkpoints/epoch_0002/model.safetensors",
        "checkpoints/epoch_0002/optimizer.safetensors", "checkpoints/epoch_0002/state.json"}) {
    ASSERT_TRUE(end.files.contains(file)) << file;
    EXPECT_TRUE(end.files.at(file) == undisturbed().files.at(file)) << file;
  }
  EXPECT_EQ(end.files.at("checkpoints/last"), "epoch_0002");
}

TEST(ElasticRunStoppedWriterTest, FilesThatNoProcessCouldOpenAreOpenedAsOfTheStart) {
  const test::TempDir dir;
  base::Fd stopped(::open((dir / ".writer").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_EQ(::flock(stopped.get(), LOCK_EX), 0);
  std::vector<FitInfo> starts;
  const ElasticSetting setting{.on_start = [&](const FitInfo& info) { starts.push_back(info); }};
  std::atomic<bool> must_die = false;
  const auto faults = [&](int id, int) {
    if (id != 0 || !must_die.exchange(false)) return test::FakeFault::kNone;
    stopped.close();
    return test::FakeFault::kDie;
  };
  test::FakeRun run(kElasticRanks, faults, [&](int id, std::shared_ptr<elastic::Session> session) {
    const auto note = [&, id](std::uint64_t step, const elastic::StateSnapshot&) {
      if (id == 0 && step == 3) must_die = true;
    };
    train_elastic(
        setting, dir.path(),
        std::make_shared<test::WrappedSession>(session, test::WrappedSession::Listener{.on_commit = note}));
  });
  run.run(2);
  ASSERT_EQ(starts.size(), 1U);
  EXPECT_FALSE(starts.front().continues);
  EXPECT_EQ(starts.front().first_step, 0);
  expect_whole_end({test::run_files(dir.path())});
}

TEST(ElasticRunStoppedWriterTest, StepsThatCouldNotBeListedAreListedOnceTheFolderIsFree) {
  for (const bool dies : {true, false}) {
    SCOPED_TRACE(dies);
    const test::TempDir dir;
    StoppedWriter stopped(dir.path(), 2, "no checkpoint is saved", dies);
    const ElasticEnd end = run_beside(stopped, dir.path());
    EXPECT_TRUE(stopped.was_freed());
    expect_whole_end(end);
  }
}

// One process after the other is the first one while nobody can write. The last of them has copied its state.
TEST(ElasticRunStoppedWriterTest, LinesThatADeadProcessCouldNotWriteAreNotLost) {
  const test::TempDir dir;
  StoppedWriter stopped(dir.path(), 1, "an epoch is not reported");
  const ElasticSetting setting{.on_step = [&](const StepReport& report) { stopped.on_step(report); }};
  std::atomic<int> num_killed = 0;
  const ElasticEnd end = run_elastic(
      setting,
      [&](int id, int) {
        const bool is_next = id == num_killed + 1 && id <= 2;
        if (!is_next || stopped.num_lost() < id) return stopped.fault(id);
        ++num_killed;
        return test::FakeFault::kDie;
      },
      dir.path());
  EXPECT_EQ(end.deaths, 3);
  EXPECT_TRUE(stopped.was_freed());
  expect_whole_end(end);
}

TEST(ElasticRunStoppedWriterTest, TheTraceIsWrittenOnlyByWhoeverMayWrite) {
  const test::TempDir dir;
  StoppedWriter stopped(dir.path(), 2, "the trace is not written", false);
  const ElasticSetting setting{.processes = 1,
                               .change = [](TrainerOptions& options) { options.trace_steps(3); },
                               .on_step = [&](const StepReport& report) { stopped.on_step(report); }};
  const ElasticEnd end = run_elastic(setting, [&](int id, int) { return stopped.fault(id); }, dir.path());
  EXPECT_TRUE(stopped.was_freed());
  EXPECT_TRUE(std::filesystem::exists(dir / "trace.json")) << "of three steps or more";
  expect_whole_end(end);
}

TEST(ElasticRunStoppedWriterTest, TheEndOfARunWaitsForItsLastCheckpoint) {
  const test::TempDir dir;
  StoppedWriter stopped(dir.path(), 7, "the end of the run waits for it");
  const ElasticEnd end = run_beside(stopped, dir.path());
  EXPECT_TRUE(stopped.was_freed());
  expect_whole_end(end);
}

// It comes as process 0, as a successor on its node does, when all is written.
TEST(ElasticRunStoppedWriterTest, AProcessThatMayNotWriteAnyMoreTellsTheWholeResult) {
  const test::TempDir dir;
  base::Fd stopped;
  std::atomic<bool> must_die = false;
  const auto faults = [&](int id, int) {
    return id == 1 && must_die.exchange(false) ? test::FakeFault::kDie : test::FakeFault::kNone;
  };
  std::mutex mutex;
  std::map<int, FitResult> results;
  test::FakeRun run(kElasticRanks, faults, [&](int id, std::shared_ptr<elastic::Session> session) {
    test::WrappedSession::Listener listener;
    if (id == 1) {
      listener.on_commit = [&](std::uint64_t steps, const elastic::StateSnapshot&) {
        if (steps <= 8) return;  // the end counts as one step more
        stopped = base::Fd(::open((dir / ".writer").c_str(), O_RDWR | O_CLOEXEC));
        ASSERT_EQ(::flock(stopped.get(), LOCK_EX), 0);
        must_die = true;
      };
    }
    if (id == 2) listener.on_enter = [](elastic::GenerationInfo& info) { info.process = 0; };
    const FitResult result =
        train_elastic({}, dir.path(), std::make_shared<test::WrappedSession>(session, listener));
    const std::lock_guard lock(mutex);
    results[id] = result;
  });
  run.run(2);
  ASSERT_TRUE(results.contains(0) && results.contains(2));
  EXPECT_FALSE(results[0].metrics.empty());
  EXPECT_EQ(results[2].metrics, results[0].metrics);
  EXPECT_EQ(results[2].steps, results[0].steps);
}

TEST(ElasticRunStoppedWriterTest, ARunWhoseLastCheckpointCannotBeWrittenFails) {
  const test::TempDir dir;
  ElasticCoordinator ranks(nullptr);
  RunWriter writer(dir.path(), ranks, std::chrono::milliseconds(1));
  const base::Fd stopped(::open((dir / ".writer").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(stopped.get(), LOCK_EX), 0);
  COHORT_EXPECT_THROW_WITH(
      writer.write_last(8, [] { FAIL(); }), SystemError,
      "the end of the run, after step 8, cannot be written: a process that is stopped holds");
  ASSERT_EQ(::flock(stopped.get(), LOCK_UN), 0);
  bool is_written = false;
  writer.write_last(8, [&] { is_written = true; });
  EXPECT_TRUE(is_written);
}

}  // namespace
}  // namespace cohort::train
