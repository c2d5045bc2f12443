// `cohort run` as a user calls it: on one node, on two that are processes of this host, and beside torchrun.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/job.h"
#include "tests/cli/program.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/processes/process_state.h"

namespace cohort::test {
namespace {

using launch::Fd;
using launch::Worker;

std::string python() {
  const char* path = std::getenv("COHORT_PYTHON");
  if (path == nullptr) throw std::runtime_error("COHORT_PYTHON is not set: Python with torch");
  return path;
}

// Its bytes.
std::string hex_of(const base::Secret& secret) {
  const base::Fd fd = secret.to_fd();
  std::array<unsigned char, 64> bytes{};
  const ssize_t count = ::pread(fd.get(), bytes.data(), bytes.size(), 0);
  std::string text;
  for (ssize_t i = 0; i < count; ++i) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", bytes[static_cast<std::size_t>(i)]);
    text += digits.data();
  }
  return text;
}

class RunTest : public ::testing::Test {
 protected:
  // One that runs `script` in a shell, in the test's folder.
  Job shell(std::vector<std::string> flags, const std::string& script) {
    for (const char* word : {"--", "/bin/sh", "-c"}) flags.emplace_back(word);
    flags.push_back("cd \"$FOLDER\"; " + script);
    return Job(dir.path(), std::move(flags));
  }
  Job node(int rank, const std::string& port, const std::string& script, std::vector<std::string> more = {}) {
    std::vector<std::string> flags{"--nnodes=2", "--node-rank=" + std::to_string(rank),
                                   "--master-addr=127.0.0.1", "--master-port=" + port, "--bind-to=none"};
    flags.insert(flags.end(), more.begin(), more.end());
    return shell(std::move(flags), script);
  }

  TempDir dir;
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

TEST_F(RunTest, TheStatusIsThatOfTheFirstFailure) {
  Job job = shell({"--nproc-per-node", "2"}, "echo hi; [ $RANK = 0 ] && sleep 100; exit 3");
  EXPECT_EQ(job.wait(), 3);
  EXPECT_NE(job.out().find("[rank 1] hi\n"), std::string::npos);
  expect_in(job.err(), {"rank 1 of 2 failed first: it ended with status 3"});
}

TEST_F(RunTest, WhoStartsItMayIgnoreTheEndsOfChildren) {
  Job job(dir.path(), {"--bind-to=none", "--", "sh", "-c", "exit 3"},
          {"/bin/sh", "-c", "trap '' CHLD; exec \"$@\"", "sh"});
  EXPECT_EQ(job.wait(), 3);
  expect_in(job.err(), {"it ended with status 3"});
}

TEST_F(RunTest, OptionsEndWhereTheProgramBegins) {
  EXPECT_EQ(run_program(dir.path(), {"run", "--nproc_per_node=1", "echo", "--nnodes", "-t", "--"}).out,
            "--nnodes -t --\n");
  EXPECT_EQ(run_program(dir.path(), {"run", "--", "echo", "--", "x"}).out, "-- x\n");
  const ScopedEnv nproc("PET_NPROC_PER_NODE", "2");
  EXPECT_EQ(run_program(dir.path(), {"run", "--prefix", "off", "echo", "x"}).out, "x\nx\n");
}

TEST_F(RunTest, WhatCannotBeIsOneMessageAndStatus2) {
  const auto rejected = [&](std::vector<std::string> arguments, const char* part) {
    arguments.insert(arguments.begin(), "run");
    const Outcome outcome = run_program(dir.path(), arguments);
    EXPECT_EQ(outcome.status, 2);
    expect_in(outcome.err, {part});
  };
  rejected({"--nproc-per-nodes", "2", "ls"},
           "there is no option --nproc-per-nodes; did you mean --nproc-per-node?");
  rejected({"-x", "ls"}, "there is no option -x");
  rejected({"--rdzv-backend=redis", "ls"},
           "--rdzv-backend is 'redis', expected static, c10d (embedded) or etcd");
  rejected({"--no_python", "ls"}, "--no-python is not available. Try: leave it out");
  rejected({"-m", "module"}, "--module is not available. Try: the program itself");
  rejected({"--nnodes"}, "nnodes");
  rejected({"--nproc-per-node", "2"}, "no program was given");
  rejected({"no-such-program"}, "no program 'no-such-program' is in PATH");
}

TEST_F(RunTest, TheHelpShowsEveryOption) {
  const Outcome outcome = run_program(dir.path(), {"run", "--help"});
  EXPECT_EQ(outcome.status, 0);
  expect_in(outcome.out,
            {"--nproc-per-node,--nproc_per_node", "--max-restarts", "-t,--tee", "Examples:", "-- python"});
}

TEST_F(RunTest, CtrlCReachesEachRankOnce) {
  Job job = shell({"--nproc-per-node", "2"},
                  "trap 'echo got >> $RANK' INT; touch ready$RANK; "
                  "while [ ! -e $RANK ]; do sleep 0.02; done; sleep 0.5; exit 130");
  ASSERT_TRUE(comes(dir / "ready0") && comes(dir / "ready1"));
  job.worker().signal_group(SIGINT);  // the terminal sends it to all of the launcher's group
  EXPECT_EQ(job.wait(), 130);
  EXPECT_EQ(read_file(dir / "0"), "got\n");
  EXPECT_EQ(read_file(dir / "1"), "got\n");
  expect_in(job.err(), {"signal 2 (Interrupt) is passed on to 2 ranks",
                        "ended by signal 2 (Interrupt), with status 130"});
}

TEST_F(RunTest, RanksAndWhatTheyStartedDieWithALauncherThatIsKilled) {
  const std::filesystem::path temporary = dir / "tmp";
  std::filesystem::create_directories(temporary);
  const ScopedEnv folder("TMPDIR", temporary.string());
  Job job =
      shell({"--nproc-per-node", "2"},
            "sleep 100 & echo $! > child$RANK.tmp; echo $$ > rank$RANK.tmp; mv child$RANK.tmp child$RANK; "
            "mv rank$RANK.tmp rank$RANK; wait");
  std::vector<pid_t> pids;
  for (const char* name : {"rank0", "rank1", "child0", "child1"}) {
    ASSERT_TRUE(comes(dir / name));
    pids.push_back(std::stoi(read_file(dir / name)));
    EXPECT_FALSE(has_ended(pids.back())) << name;
  }
  job.worker().signal(SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  for (const pid_t pid : pids) EXPECT_TRUE(ends_within(pid, std::chrono::seconds(10)));
  for (int i = 0; i < 1000 && !std::filesystem::is_empty(temporary); ++i) ::poll(nullptr, 0, 10);
  EXPECT_TRUE(std::filesystem::is_empty(temporary)) << "the folder of error files is left";
}

TEST_F(RunTest, APortThatIsTakenIsNamed) {
  const Port taken(Port::Use::kListens);
  const std::string port = taken.text();
  Job job = shell({"--master-port", port}, "true");
  EXPECT_EQ(job.wait(), 1);
  expect_in(job.err(),
            {("cannot listen on port " + port).c_str(), "the system then chooses one that is free"});
  Job joining = node(1, port, "true", {"--rdzv-conf=timeout=3"});
  EXPECT_EQ(joining.wait(), 1);
  expect_in(joining.err(), {"somebody listens at 127.0.0.1:", "but is no agent of node 0"});
}

TEST_F(RunTest, TheCohortProgramRecordsItsError) {
  Job job(dir.path(), {"--nproc-per-node", "1", "--", COHORT_PROGRAM, "train", "--config", "none.yaml"});
  EXPECT_EQ(job.wait(), 2);
  expect_in(job.err(),
            {"rank 0 of 1 failed first: it ended with status 2", "its error:\n    [", "none.yaml"});
}

TEST_F(RunTest, TwoNodesMeetAndShareRanks) {
  const std::string port = std::to_string(free_port());
  Job second = node(1, port, "echo $RANK $LOCAL_RANK $GROUP_RANK $GROUP_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR",
                    {"--nproc-per-node=1"});
  Job first =
      node(0, port, "echo $RANK $LOCAL_RANK $GROUP_RANK $GROUP_WORLD_SIZE $WORLD_SIZE $TORCHELASTIC_RUN_ID",
           {"--nproc-per-node=2"});
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  expect_in(first.out(), {"[rank 0] 0 0 0 2 3 none\n", "[rank 1] 1 1 0 2 3 none\n"});
  expect_in(second.out(), {"[rank 2] 2 0 1 2 3 127.0.0.1\n"});
}

// Later than a node may be silent for; under label slow by 25 s, with the times that agents have by default.
TEST_F(RunTest, ANodeThatComesLateIsWelcome) {
  const char* late = std::getenv("COHORT_LATE_SECONDS");
  std::vector<std::string> flags;
  if (late == nullptr) flags = {"--rdzv-conf=keep_alive_interval=0.2,keep_alive_max_attempt=8"};
  const std::string port = std::to_string(free_port());
  Job first = node(0, port, "true", flags);
  ::poll(nullptr, 0, 1000 * (late == nullptr ? 4 : std::atoi(late)));
  Job second = node(1, port, "true", flags);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
}

TEST_F(RunTest, AFailureOnOneNodeEndsTheOther) {
  const std::string port = std::to_string(free_port());
  Job first = node(0, port, "sleep 100");
  Job second = node(1, port, "sleep 0.3; echo no luck; exit 6");
  EXPECT_EQ(second.wait(), 6);
  EXPECT_EQ(first.wait(), 6);
  for (const Job* job : {&first, &second}) {
    expect_in(job->err(), {"rank 1 of 2 failed first: it ended with status 6 (node 1", "no luck"});
  }
}

TEST_F(RunTest, NodesStartAgainTogether) {
  const std::string port = std::to_string(free_port());
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $RANK$TORCHELASTIC_RESTART_COUNT != 00 ]";
  Job first = node(0, port, script, {"--max-restarts=1"}),
      second = node(1, port, script, {"--max-restarts=1"});
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  expect_in(second.out(), {"[rank 1] attempt 1\n"});
}

TEST_F(RunTest, ASignalToOneNodeReachesAll) {
  const std::string port = std::to_string(free_port());
  const std::string script =
      "trap 'echo got >> $RANK; exit 143' TERM; touch ready$RANK; while :; do sleep 0.02; done";
  Job first = node(0, port, script), second = node(1, port, script);
  ASSERT_TRUE(comes(dir / "ready0") && comes(dir / "ready1"));
  second.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143);
  EXPECT_EQ(second.wait(), 143);
  EXPECT_EQ(read_file(dir / "0"), "got\n");
  EXPECT_EQ(read_file(dir / "1"), "got\n");
}

TEST_F(RunTest, ASignalThatEachNodeGetsLetsRanksEnd) {
  const std::string port = std::to_string(free_port());
  const std::string script =
      "trap 'touch heard$RANK; while [ ! -e go ]; do sleep 0.02; done; echo saved >> $RANK; exit 143' TERM; "
      "touch ready$RANK; while :; do sleep 0.02; done";
  Job first = node(0, port, script), second = node(1, port, script);
  ASSERT_TRUE(comes(dir / "ready0") && comes(dir / "ready1"));
  second.worker().signal(SIGTERM);
  ASSERT_TRUE(comes(dir / "heard0")) << "of the other node";
  first.worker().signal(SIGTERM);
  base::sleep(std::chrono::milliseconds(300), base::Deadline::never());  // long enough to kill ranks in
  write_file(dir / "go", "");
  EXPECT_EQ(first.wait(), 143);
  EXPECT_EQ(second.wait(), 143);
  EXPECT_EQ(read_file(dir / "0"), "saved\n");
  EXPECT_EQ(read_file(dir / "1"), "saved\n");
}

TEST_F(RunTest, ASignalThatOneNodeAloneHandlesReachesAll) {
  const std::string port = std::to_string(free_port());
  const std::string script =
      "trap 'echo term >> $RANK; exit 143' TERM; trap 'echo int >> $RANK; exit 130' INT; touch ready$RANK; "
      "while :; do sleep 0.02; done";
  Job first = node(0, port, script, {"--signals-to-handle=SIGTERM"}), second = node(1, port, script);
  ASSERT_TRUE(comes(dir / "ready0") && comes(dir / "ready1"));
  second.worker().signal(SIGINT);
  EXPECT_EQ(first.wait(), 143) << "the first status of a rank that is not 0";
  EXPECT_EQ(second.wait(), 143);
  EXPECT_EQ(read_file(dir / "0"), "term\n");
  EXPECT_EQ(read_file(dir / "1"), "int\n");
}

TEST_F(RunTest, NodesThatDoNotComeAreNamed) {
  const std::string port = std::to_string(free_port());
  Job first = node(0, port, "true", {"--rdzv-conf=timeout=1.5"});
  EXPECT_EQ(first.wait(), 1);
  expect_in(first.err(), {"node 1 of 2 did not come within"});
  Job second = node(1, port, "true", {"--rdzv-conf=timeout=0.5"});
  EXPECT_EQ(second.wait(), 1);
  expect_in(second.err(), {"cannot reach node 0 at 127.0.0.1:", "Connection refused"});
}

TEST_F(RunTest, NodesThatDisagreeBothSayOnWhat) {
  for (int i = 0; i < 3; ++i) {
    const std::string port = std::to_string(free_port());
    Job first = node(0, port, "true", {"--max-restarts=0"}),
        second = node(1, port, "true", {"--max-restarts=1"});
    for (Job* job : {&first, &second}) {
      EXPECT_EQ(job->wait(), 1);
      expect_in(job->err(), {"nodes disagree: node 0 has", "--max-restarts 0", "--max-restarts 1"});
    }
  }
}

TEST_F(RunTest, NodesThatVanishAreNamed) {
  const std::vector<std::string> quick{"--rdzv-conf=keep_alive_interval=0.1,keep_alive_max_attempt=13"};
  for (const int signal : {SIGKILL, SIGSTOP}) {
    for (const int gone : {0, 1}) {
      const std::string port = std::to_string(free_port());
      const std::string ready = base::concat("ready", signal, "_", gone, "_");
      const std::string script = "touch " + ready + "$RANK; sleep 100";
      Job first = node(0, port, script, quick), second = node(1, port, script, quick);
      ASSERT_TRUE(comes(dir / (ready + "0")));
      ASSERT_TRUE(comes(dir / (ready + "1")));
      (gone == 0 ? first : second).worker().signal(signal);
      Job& other = gone == 0 ? second : first;
      EXPECT_EQ(other.wait(), 1);
      const char* const store = signal == SIGKILL ? "the store that node 0 keeps is gone"
                                                  : "the store that node 0 keeps has not answered for";
      expect_in(other.err(), {gone == 0 ? store : "node 1 has given no sign for"});
    }
  }
}

// Longer than what a node may be silent for.
TEST_F(RunTest, ALongMonitorIntervalEndsNoJob) {
  const std::string port = std::to_string(free_port());
  const std::vector<std::string> flags{"--monitor-interval=4",
                                       "--rdzv-conf=keep_alive_interval=0.2,keep_alive_max_attempt=15"};
  Job first = node(0, port, "sleep 3", flags), second = node(1, port, "sleep 3", flags);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
}

// As `scontrol suspend`, a frozen cgroup, or Ctrl-Z on all nodes. Each time longer than what a node may be
// silent for, and then long enough for each to see the other's signs again.
TEST_F(RunTest, AJobThatIsSuspendedAndContinuesEndsWell) {
  const std::string port = std::to_string(free_port());
  const std::vector<std::string> flags{"--rdzv-conf=keep_alive_interval=0.2,keep_alive_max_attempt=8"};
  const std::string script = "touch up$RANK; while [ ! -e go ]; do sleep 0.05; done";
  Job first = node(0, port, script, flags), second = node(1, port, script, flags);
  ASSERT_TRUE(comes(dir / "up0") && comes(dir / "up1"));
  for (int i = 0; i < 2; ++i) {
    for (Job* job : {&first, &second}) job->worker().signal(SIGSTOP);
    ::poll(nullptr, 0, 2000);
    for (Job* job : {&first, &second}) job->worker().signal(SIGCONT);
    ::poll(nullptr, 0, 2000);
  }
  write_file(dir / "go", "");
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
}

// Somebody who reaches the port writes what would end the job, before agents have left their own words.
TEST_F(RunTest, WhoDoesNotKnowTheSecretCannotEndAJob) {
  write_file(dir / "secret", "a secret of the tests\n");
  std::filesystem::permissions(dir / "secret", std::filesystem::perms::owner_read);
  write_file(dir / "attack.py", R"(
import datetime, sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=10))
report = '{"failures": [], "restart": false, "signal": 15, "status": 7}'
words = {"signal": "15", "abort": "node 1: on purpose", "fail/0": "1", "result/0": report, "end/0/1": report,
         "result_seen/0/1": "1", "alive/0": "9", "alive/1": "9"}
for key, word in words.items():
    store.set("/cohort/agents/" + key, word)
)");
  const std::string secret = "--secret-file=" + (dir / "secret").string();
  const std::string port = std::to_string(free_port());
  const std::string script =
      "echo has $(od -An -v -tx1 /proc/self/fd/$COHORT_SECRET_FD | tr -d ' \\n'); touch up$RANK; "
      "while [ ! -e go ]; do sleep 0.05; done; echo ended well";
  Job first = node(0, port, script, {secret}), second = node(1, port, script, {secret});
  ASSERT_TRUE(comes(dir / "up0") && comes(dir / "up1"));
  Worker attack({.program = python(),
                 .arguments = {python(), (dir / "attack.py").string(), port},
                 .environment = launch::environment_with({}),
                 .own_group = true});
  for (int i = 0; i < 6000 && !attack.reap(); ++i) ::poll(nullptr, 0, 10);
  ASSERT_EQ(launch::exit_status(attack.wait_status()), 0);
  ::poll(nullptr, 0, 1000);  // ten looks of the agents at what stands there now
  EXPECT_TRUE(!first.worker().reap() && !second.worker().reap()) << "the job continues";
  write_file(dir / "go", "");
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  const std::string has = "has " + hex_of(base::Secret::from_file(dir / "secret").for_ranks()) + "\n";
  expect_in(first.out(), {("[rank 0] " + has).c_str(), "[rank 0] ended well\n"});
  expect_in(second.out(), {("[rank 1] " + has).c_str(), "[rank 1] ended well\n"});
  for (const Job* job : {&first, &second}) {
    expect_in(job->err(), {"a word under 'signal' was not left by an agent of this job",
                           "a word under 'abort' was not left by an agent of this job",
                           "a word under 'fail/0' was not left by an agent of this job"});
  }
}

TEST_F(RunTest, OneNodeMakesASecretUpForEachJob) {
  const std::string script =
      "sha256sum /proc/self/fd/$COHORT_SECRET_FD | cut -c1-64 | tr -d '\\n' > is$RANK.$1";
  for (const char* job : {"1", "2"}) {
    EXPECT_EQ(
        shell({"--nproc-per-node=2", "--bind-to=none"}, "set " + std::string(job) + "; " + script).wait(), 0);
  }
  EXPECT_EQ(read_file(dir / "is0.1"), read_file(dir / "is1.1"));
  EXPECT_EQ(read_file(dir / "is0.1").size(), 64u);
  EXPECT_NE(read_file(dir / "is0.1"), read_file(dir / "is0.2"));
  EXPECT_EQ(shell({"--no-secret"}, "[ -z \"$COHORT_SECRET_FD$COHORT_SECRET_FILE\" ]").wait(), 0);
}

TEST_F(RunTest, RunsATorchProgramThatReduces) {
  write_file(dir / "reduce.py", R"(
import os
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    t = torch.full((2,), float(dist.get_rank() + 1))
    dist.all_reduce(t)
    print("sum", t[0].item())
    # First: a process that ends with threads of Gloo alive sometimes aborts in LibTorch's destructors.
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 1:
        raise ValueError("on purpose")

main()
)");
  Job job(dir.path(), {"--nproc-per-node=2", "--", python(), (dir / "reduce.py").string()});
  EXPECT_EQ(job.wait(), 1);
  expect_in(job.out(), {"[rank 0] sum 3.0\n", "[rank 1] sum 3.0\n"});
  expect_in(job.err(),
            {"rank 1 of 2 failed first", "its error:\n    ValueError: on purpose", "where:\n    Traceback"});
}

TEST_F(RunTest, TorchrunStartsOurProgram) {
  const Fd out = open_for_writing(dir / "out"), err = open_for_writing(dir / "err");
  Worker torchrun({.program = python(),
                   .arguments = {python(), "-m", "torch.distributed.run", "--standalone",
                                 "--nproc-per-node=2", "--no-python", COHORT_RANK_PROGRAM},
                   .environment = launch::environment_with({}),
                   .output = out.get(),
                   .error = err.get(),
                   .own_group = true});
  for (int i = 0; i < 12000 && !torchrun.reap(); ++i) ::poll(nullptr, 0, 10);
  ASSERT_FALSE(torchrun.running());
  EXPECT_EQ(launch::exit_status(torchrun.wait_status()), 0) << read_file(dir / "err");
  expect_in(read_file(dir / "out"), {"rank 0 of 2: sum 3\n", "rank 1 of 2: sum 3\n"});
}

TEST_F(RunTest, OurOwnProgramReducesUnderTheLauncher) {
  Job job(dir.path(), {"--nproc-per-node=2", "--", COHORT_RANK_PROGRAM});
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_in(job.out(), {"[rank 0] rank 0 of 2: sum 3\n", "[rank 1] rank 1 of 2: sum 3\n"});
}

// As srun would start two ranks on this host.
TEST_F(RunTest, SlurmsVariablesAreEnough) {
  std::vector<std::unique_ptr<Worker>> ranks;
  const std::string port = std::to_string(free_port());
  for (const char* rank : {"0", "1"}) {
    const Fd out = open_for_writing(dir / rank);
    ranks.push_back(std::make_unique<Worker>(
        launch::WorkerOptions{.program = COHORT_RANK_PROGRAM,
                              .arguments = {"rank"},
                              .environment = launch::environment_with({{"SLURM_PROCID", rank},
                                                                       {"SLURM_LOCALID", rank},
                                                                       {"SLURM_NTASKS", "2"},
                                                                       {"SLURM_STEP_ID", "0"},
                                                                       {"SLURM_JOB_ID", "77"},
                                                                       {"SLURM_NODEID", "0"},
                                                                       {"SLURM_STEP_NODELIST", "localhost"},
                                                                       {"SLURM_STEP_TASKS_PER_NODE", "2"},
                                                                       {"MASTER_PORT", port}}),
                              .output = out.get()}));
  }
  for (int i = 0; i < 6000 && !(ranks[0]->reap() && ranks[1]->reap()); ++i) ::poll(nullptr, 0, 10);
  EXPECT_EQ(read_file(dir / "0"), "rank 0 of 2: sum 3\n");
  EXPECT_EQ(read_file(dir / "1"), "rank 1 of 2: sum 3\n");
}

TEST_F(RunTest, CtrlZStopsANodeThatWaitsForNode0) {
  Job job = node(1, std::to_string(free_port()), "true");
  const auto holds = [](const auto& condition) {
    return base::poll_until(condition, base::Deadline(std::chrono::seconds(20)));
  };
  // Before it does, the system would stop it.
  ASSERT_TRUE(holds([&] { return catches(job.worker().pid(), SIGTSTP); }));
  job.worker().signal(SIGTSTP);
  EXPECT_TRUE(holds([&] { return is_stopped(job.worker().pid()); }));
  job.worker().signal(SIGCONT);
  job.worker().signal(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT);
}

TEST_F(RunTest, CtrlZStopsTheRanksTooAndTheyContinue) {
  // The rank starts no program meanwhile: a shell whose vfork() is cut in two by the signal is not stopped,
  // but waits.
  Job job = shell({"--nproc-per-node", "1"}, "mkfifo end; echo $$ > pid.tmp; mv pid.tmp pid; read x < end");
  ASSERT_TRUE(comes(dir / "pid"));
  const pid_t rank = std::stoi(read_file(dir / "pid"));
  const auto wait_until_stopped = [](pid_t pid, bool stopped) {
    EXPECT_TRUE(base::poll_until([&] { return is_stopped(pid) == stopped; },
                                 base::Deadline(std::chrono::seconds(10))))
        << pid << (stopped ? " is not stopped" : " is stopped");
  };
  job.worker().signal(SIGTSTP);
  wait_until_stopped(rank, true);
  wait_until_stopped(job.worker().pid(), true);  // last, and what a shell waits for
  job.worker().signal(SIGCONT);
  wait_until_stopped(rank, false);
  write_file(dir / "end", "x\n");
  EXPECT_EQ(job.wait(), 0);
}

}  // namespace
}  // namespace cohort::test
