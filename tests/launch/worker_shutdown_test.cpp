// Ranks that are shell scripts, and no agent above them.
#include "cohort/launch/internal/worker_shutdown.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <optional>

#include "cohort/launch/internal/worker_group.h"
#include "tests/support/comes_true.h"
#include "tests/support/messages.h"
#include "tests/support/temp_dir.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class WorkerShutdownTest : public testing::Test {
 protected:
  WorkerShutdownTest() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) { log_ += std::string(line) + "\n"; });
    testing::internal::CaptureStderr();
  }
  ~WorkerShutdownTest() override {
    testing::internal::GetCapturedStderr();
    base::set_log_sink({});
  }

  // Starts one rank, and waits until it has run `script` up to "touch up".
  WorkerGroup& start(const std::string& script) {
    options_.command = {"/bin/sh", "-c", "cd \"$FOLDER\"; " + script};
    options_.environment = {{"FOLDER", dir_.path().string()}};
    WorkerGroupSpec spec;
    spec.master_addr = "127.0.0.1";
    spec.run_id = "test";
    spec.log_folder = dir_ / "logs";
    workers_.emplace(options_, spec, output_.display(), watchdog_);
    EXPECT_TRUE(test::comes_true([&] { return std::filesystem::exists(dir_ / "up"); }));
    return *workers_;
  }

  // Whether the rank has ended, in 20 s at most.
  bool ends(WorkerShutdown& shutdown) {
    const base::Deadline deadline(seconds(20));
    while (workers_->running() && !deadline.expired()) {
      workers_->step(milliseconds(10), {});
      shutdown.kill_when_due(false);
    }
    return !workers_->running();
  }

  test::TempDir dir_;
  RunOptions options_;
  OrphanWatchdog watchdog_;
  AgentOutput output_;
  std::string log_;
  std::optional<WorkerGroup> workers_;
};

TEST_F(WorkerShutdownTest, RanksAreToldOnceAndTheFirstWordCounts) {
  WorkerGroup& workers = start(
      "trap 'echo int >> heard' INT; trap 'echo term >> heard' TERM; touch up; "
      "until [ -e end ]; do sleep 0.02; done; exit 7");
  WorkerShutdown shutdown(workers, output_, seconds(20));
  EXPECT_FALSE(shutdown.has_begun());
  EXPECT_EQ(shutdown.grace_left(), base::Deadline::Clock::duration::max());
  shutdown.pass_on(SIGINT);
  EXPECT_TRUE(shutdown.has_begun());
  EXPECT_LE(shutdown.grace_left(), seconds(20));
  shutdown.stop();
  shutdown.pass_on(SIGTERM);
  EXPECT_TRUE(test::comes_true([&] { return std::filesystem::exists(dir_ / "heard"); }));
  test::write_file(dir_ / "end", "");
  EXPECT_TRUE(ends(shutdown));
  EXPECT_EQ(test::read_file(dir_ / "heard"), "int\n");
  EXPECT_EQ(workers.status(), 7);
  test::expect_in(log_,
                  {"signal 2 (Interrupt) is passed on to 1 rank; it has 20 s, and a second signal kills it"});
  EXPECT_EQ(log_.find("signal 15"), std::string::npos) << log_;
}

TEST_F(WorkerShutdownTest, ARankThatOutlivesItsGraceIsKilledAndNamed) {
  WorkerGroup& workers = start("trap '' TERM; touch up; while :; do sleep 0.02; done");
  WorkerShutdown shutdown(workers, output_, milliseconds(100));
  shutdown.stop();
  EXPECT_TRUE(ends(shutdown));
  EXPECT_EQ(workers.status(), 128 + SIGKILL);
  test::expect_in(log_, {"local rank 0 did not end within 100 ms, and is killed"});
  EXPECT_EQ(shutdown.grace_left(), base::Deadline::Clock::duration::max()) << "it is killed once";
}

TEST_F(WorkerShutdownTest, ASecondSignalKillsAtOnceAndIsNoNews) {
  WorkerGroup& workers = start("trap '' TERM; touch up; while :; do sleep 0.02; done");
  WorkerShutdown shutdown(workers, output_, std::chrono::hours(1));
  shutdown.stop();
  shutdown.kill_when_due(true);
  EXPECT_TRUE(ends(shutdown));
  EXPECT_EQ(workers.status(), 128 + SIGKILL);
  EXPECT_EQ(log_, "");
}

}  // namespace
}  // namespace cohort::launch
