#include "cohort/launch/worker.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/launch/internal/cpu_affinity.h"
#include "cohort/launch/internal/orphan_watchdog.h"
#include "cohort/launch/internal/survival.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/processes/process_state.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

WorkerOptions shell(const std::string& script) {
  return {.program = "/bin/sh", .arguments = {"sh", "-c", script}, .environment = environment_with({})};
}

bool survives(const Worker& worker, int signal) {
  return launch::survives({worker.pid()}, signal).front();
}

// What a script prints and how it ends.
std::string run(WorkerOptions options, int* status = nullptr) {
  Pipe pipe = make_pipe();
  options.output = pipe.write.get();
  Worker worker(options);
  pipe.write.close();
  std::string text;
  std::array<char, 4096> buffer{};
  for (int i = 0; i < 2000 && !worker.reap(); ++i) ::poll(nullptr, 0, 10);
  EXPECT_FALSE(worker.running()) << "it did not end";
  for (ssize_t count = 0; (count = ::read(pipe.read.get(), buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  if (status != nullptr) *status = exit_status(worker.wait_status());
  return text;
}

bool is_gone_soon(pid_t pid) {
  return test::ends_within(pid, std::chrono::seconds(10));
}

pid_t pid_in(const std::filesystem::path& file) {
  for (int i = 0; i < 1000; ++i) {
    std::ifstream stream(file);
    if (pid_t pid = 0; stream >> pid && stream.get() == '\n') return pid;
    std::this_thread::sleep_for(milliseconds(10));
  }
  throw std::runtime_error("no process number in " + file.string());
}

TEST(WorkerTest, StatusAndOutputComeBack) {
  int status = -1;
  EXPECT_EQ(run(shell("echo out; exit 3"), &status), "out\n");
  EXPECT_EQ(status, 3);
  run(shell("kill -9 $$"), &status);
  EXPECT_EQ(status, 137);
  EXPECT_EQ(describe_exit(3 << 8), "ended with status 3");
  EXPECT_EQ(describe_exit(SIGKILL), "was killed by signal 9 (Killed)");
}

TEST(WorkerTest, AProgramThatCannotBeExecutedIsAnError) {
  const test::TempDir dir;
  test::write_file(dir / "text", "no program");
  std::filesystem::permissions(dir / "text", std::filesystem::perms::owner_all);
  COHORT_EXPECT_THROW_WITH(Worker({.program = (dir / "text").string(), .arguments = {"text"}}), SystemError,
                           "Exec format error");
  COHORT_EXPECT_THROW_WITH(Worker({.program = (dir / "none").string(), .arguments = {"none"}}), SystemError,
                           "No such file");
}

TEST(WorkerTest, RunsOnItsCores) {
  const int last = base::CpuSet::of_current_thread().ids().back();
  WorkerOptions options = shell("grep Cpus_allowed_list /proc/self/status");
  options.cpus = base::CpuSet({last});
  EXPECT_EQ(run(options), "Cpus_allowed_list:\t" + std::to_string(last) + "\n");
}

TEST(WorkerTest, InheritsOnlyWhatItIsGiven) {
  const int open_here = ::open("/dev/null", O_RDONLY);  // without the mark that closes it
  ASSERT_GE(open_here, 0);
  EXPECT_EQ(run(shell("[ -e /proc/self/fd/" + std::to_string(open_here) + " ] && echo leaked")), "");
  WorkerOptions options = shell("[ -e /proc/self/fd/" + std::to_string(open_here) + " ] && echo there");
  options.keep = {open_here};
  EXPECT_EQ(run(options), "there\n");
  ::close(open_here);
}

TEST(WorkerTest, BlocksNoSignal) {
  sigset_t mask, before;
  ::sigemptyset(&mask);
  ::sigaddset(&mask, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &mask, &before);
  EXPECT_EQ(run(shell("grep SigBlk /proc/self/status")), "SigBlk:\t0000000000000000\n");
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(WorkerTest, SaysWhichSignalsAProgramSurvives) {
  const test::TempDir dir;
  const Worker worker(shell("trap 'true' USR1; trap '' USR2; echo $$ > '" + (dir / "ready").string() +
                            "'; while :; do sleep 0.05; done"));
  pid_in(dir / "ready");
  EXPECT_TRUE(survives(worker, SIGUSR1)) << "it handles it";
  EXPECT_TRUE(survives(worker, SIGUSR2)) << "it ignores it";
  // Not SIGHUP, which nohup before the tests has ignored. A shell that forks has all blocked for a moment.
  EXPECT_TRUE(test::comes_true([&] { return !survives(worker, SIGTERM); }));
}

// As programs do that take it by sigwait() or signalfd(). Another thread that has not blocked it dies of it.
TEST(WorkerTest, ASignalThatEveryThreadHasBlockedIsSurvived) {
  const test::TempDir dir;
  const std::string block =
      "import os, signal, threading, time\nblock = lambda: signal.pthread_sigmask("
      "signal.SIG_BLOCK, {signal.SIGUSR1})\n";
  const std::string ready = "os.rename('part', 'ready')\n";
  const auto start = [&](const std::string& body) {
    std::filesystem::remove(dir / "ready");
    test::write_file(dir / "part", "1\n");
    test::write_file(dir / "program.py", block + body);
    return Worker(shell("cd '" + dir.path().string() + "'; exec python3 program.py"));
  };
  {
    Worker worker = start("block()\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n" +
                          ready + "raise SystemExit(signal.sigwait({signal.SIGUSR1}))\n");
    pid_in(dir / "ready");
    EXPECT_TRUE(survives(worker, SIGUSR1));
    EXPECT_FALSE(survives(worker, SIGUSR2));
    worker.signal(SIGUSR1);
    for (int i = 0; i < 1000 && !worker.reap(); ++i) ::poll(nullptr, 0, 10);
    EXPECT_EQ(exit_status(worker.wait_status()), SIGUSR1) << "what sigwait() returns";
  }
  const Worker worker =
      start("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nblock()\n" + ready +
            "signal.sigwait({signal.SIGUSR1})\n");
  pid_in(dir / "ready");
  EXPECT_FALSE(survives(worker, SIGUSR1)) << "its other thread has not";
}

// As a shell does that forks, where cores are busy.
TEST(WorkerTest, ASignalThatIsBlockedForAMomentIsNotSurvived) {
  const test::TempDir dir;
  test::write_file(dir / "program.py",
                   "import os, signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
                   "os.rename('part', 'ready')\ntime.sleep(0.03)\n"
                   "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})\ntime.sleep(60)\n");
  bool lives = true;
  for (int tries = 0; lives && tries < 5; ++tries) {  // one that finds no core takes longer than a moment
    std::filesystem::remove(dir / "ready");
    test::write_file(dir / "part", "1\n");
    const Worker worker(shell("cd '" + dir.path().string() + "'; exec python3 program.py"));
    pid_in(dir / "ready");
    lives = survives(worker, SIGUSR1);
  }
  EXPECT_FALSE(lives);
}

TEST(WorkerTest, AStatusThatSomebodyElseTookIsAFailure) {
  std::string log;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { log += line; });
  const auto before = ::signal(SIGCHLD, SIG_IGN);  // the kernel takes it
  Worker worker(shell("sleep 0.1; exit 0"));
  for (int i = 0; i < 1000 && !worker.reap(); ++i) ::poll(nullptr, 0, 10);
  ::signal(SIGCHLD, before);
  base::set_log_sink(nullptr);
  EXPECT_FALSE(worker.running());
  EXPECT_EQ(exit_status(worker.wait_status()), 1);
  test::expect_in(log, {"its status went elsewhere: SIGCHLD is ignored"});
}

TEST(WorkerTest, WhatItHasStartedGoesWithIt) {
  const test::TempDir dir;
  WorkerOptions options = shell("sleep 100 & echo $! > child; exit 0");
  options.own_group = true;
  options.arguments.back() = "cd '" + dir.path().string() + "'; " + options.arguments.back();
  run(options);
  EXPECT_TRUE(is_gone_soon(pid_in(dir / "child")));
}

TEST(WorkerTest, TheGuardKillsWhatRanksHaveStartedWhenTheLauncherIsKilled) {
  const test::TempDir dir;
  const pid_t launcher = ::fork();
  ASSERT_GE(launcher, 0);
  if (launcher == 0) {
    OrphanWatchdog watchdog;
    WorkerOptions options =
        shell("cd '" + dir.path().string() + "'; sleep 100 & echo $! > child; echo $$ > rank; wait");
    options.own_group = true;
    options.watchdog = &watchdog;
    const Worker worker(options);
    for (;;) ::pause();
  }
  const pid_t rank = pid_in(dir / "rank"), child = pid_in(dir / "child");
  EXPECT_FALSE(test::has_ended(rank) || test::has_ended(child));
  ::kill(launcher, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(is_gone_soon(rank));
  EXPECT_TRUE(is_gone_soon(child));
}

TEST(WorkerTest, TheGuardEndsWithItsObject) {
  { OrphanWatchdog watchdog; }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

TEST(WorkerTest, AGuardThatIsStoppedEndsWithItsObject) {
  const base::Deadline waited(milliseconds(0));
  {
    const OrphanWatchdog watchdog;
    ::kill(watchdog.pid(), SIGSTOP);
  }
  EXPECT_LT(waited.elapsed(), milliseconds(300) + test::deadline_slack());
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

// 20,000 words are more than its pipe takes.
TEST(WorkerTest, AGuardThatIsStoppedHoldsNobodyUp) {
  OrphanWatchdog watchdog;
  ::kill(watchdog.pid(), SIGSTOP);
  for (int i = 0; i < 10'000; ++i) {
    watchdog.watch(1'000'000'000);
    watchdog.forget(1'000'000'000);
  }
}

TEST(WorkerTest, AProgramThatDoesNotBeginInTimeIsAnError) {
  WorkerOptions options = shell("true");
  options.start_by = base::Deadline(milliseconds(0));
  std::string message;
  // It may have begun before its starter looks.
  for (int tries = 0; message.empty() && tries < 1000; ++tries) {
    try {
      Worker worker(options);
      EXPECT_TRUE(test::comes_true([&] { return worker.reap(); }));
    } catch (const SystemError& error) {
      message = error.what();
    }
  }
  EXPECT_NE(message.find("cannot start /bin/sh"), std::string::npos) << message;
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

TEST(WorkerTest, ProgramsAreFoundInThePath) {
  const test::TempDir dir;
  test::write_file(dir / "tool", "#!/bin/sh\n");
  std::filesystem::permissions(dir / "tool", std::filesystem::perms::owner_all);
  test::write_file(dir / "data", "");
  const test::ScopedEnv path("PATH", "/nonexistent:" + dir.path().string());
  EXPECT_EQ(find_program("tool"), (dir / "tool").string());
  EXPECT_EQ(find_program((dir / "tool").string()), (dir / "tool").string());
  COHORT_EXPECT_THROW_WITH(find_program("data"), UsageError, "no program 'data' is in PATH");
  COHORT_EXPECT_THROW_WITH(find_program("./tool"), UsageError, "'./tool' is no program that can be executed");
  COHORT_EXPECT_THROW_WITH(find_program(dir.path().string()), UsageError,
                           "is no program that can be executed");
}

TEST(CpuAffinityTest, RanksGetSharesThatLieTogether) {
  const test::TempDir root;
  // Two sockets of two cores with two threads each, numbered as Linux does: the second threads come last.
  for (int cpu = 0; cpu < 8; ++cpu) {
    const auto folder = root.path() / ("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology");
    test::write_file(folder / "physical_package_id", std::to_string(cpu % 4 / 2) + "\n");
    test::write_file(folder / "core_id", std::to_string(cpu % 2) + "\n");
  }
  const auto shares = [&](const char* allowed, int ranks) {
    std::string text;
    for (const base::CpuSet& share : split_cores(base::CpuSet::parse(allowed), ranks, root.path())) {
      text += (text.empty() ? "" : " | ") + share.to_string();
    }
    return text;
  };
  EXPECT_EQ(shares("0-7", 2), "0-1,4-5 | 2-3,6-7");
  EXPECT_EQ(shares("0-7", 4), "0,4 | 1,5 | 2,6 | 3,7");
  EXPECT_EQ(shares("0-7", 3), "0,4 | 1-2,5 | 3,6-7");
  EXPECT_EQ(shares("0-2", 2), "0 | 1-2");
  EXPECT_EQ(shares("1,3", 5), "1 | 3 | 1 | 3 | 1");
}

}  // namespace
}  // namespace cohort::launch
