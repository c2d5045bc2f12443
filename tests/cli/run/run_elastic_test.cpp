// `cohort run --elastic`: agents are processes of this host, and ranks make steps without tensors
// (tests/launch/elastic_program.cpp).
#include "tests/cli/run/run_elastic.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/members/start_priority.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

using base::concat;

// The process, other than `not_this`, that has a file open; 0: none.
pid_t writer_of(const std::filesystem::path& file, pid_t not_this) {
  for (const auto& process : std::filesystem::directory_iterator("/proc")) {
    const std::string name = process.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos || name == std::to_string(not_this))
      continue;
    try {
      for (const auto& entry : std::filesystem::directory_iterator(process.path() / "fd")) {
        if (std::filesystem::read_symlink(entry.path()) == file) return std::stoi(name);
      }
    } catch (const std::filesystem::filesystem_error&) {  // it has ended, or is another user's
    }
  }
  return 0;
}

TEST_F(RunElasticTest, ARankThatDiesHasASuccessorAndTheOthersLiveOn) {
  Job job = agent({"--standalone", "--nproc-per-node=2", "--max-restarts=1"});
  const pid_t first = process_in(1, 0, 2), second = process_in(1, 1, 2);
  ASSERT_TRUE(first != 0 && second != 0);
  ASSERT_TRUE(logs(job, "generation 1: the run begins; rebuild ")) << job.err();
  ::kill(second, SIGKILL);
  EXPECT_EQ(process_in(2, 0, 2), first);
  const pid_t successor = process_in(2, 1, 2);
  EXPECT_NE(successor, second);
  // Of each place: nothing at first, and then what the rank before has left.
  EXPECT_EQ(region_of(first), "empty");
  EXPECT_EQ(region_of(second), "empty");
  EXPECT_EQ(region_of(successor), std::to_string(second));
  ASSERT_TRUE(logs(job, "generation 2: agent 1 at 127.0.0.1:")) << job.err();
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_in(job.err(), {"rank 1 of 2 failed first: it was killed by signal 9 (Killed)",
                        "; detect <= ", " ms, agree ", " ms, rebuild ", " ms, redo ", " ms, total <= "});
}

TEST_F(RunElasticTest, AWarmRankTakesThePlaceOfOneThatDies) {
  Job job = agent({"--standalone", "--nproc-per-node=1", "--max-restarts=1", "--warm-ranks=1"});
  const pid_t first = process_in(1, 0, 1);
  ASSERT_TRUE(comes(dir / "pid_1"));
  const pid_t warm = std::stoi(read_file(dir / "pid_1"));
  ASSERT_NE(first, 0);
  EXPECT_GE(std::filesystem::last_write_time(dir / "pid_1"),
            std::filesystem::last_write_time(dir / "in_1_0_of_1"))
      << "its start would have held up the generation";
  const int own = ::getpriority(PRIO_PROCESS, 0);
  const auto priority = [](pid_t process) { return ::getpriority(PRIO_PROCESS, static_cast<id_t>(process)); };
  EXPECT_EQ(priority(warm), launch::may_restore_priority() ? std::min(own + 10, 19) : own);
  std::filesystem::remove(dir / "pid_1");
  ::kill(first, SIGKILL);
  EXPECT_EQ(process_in(2, 0, 1), warm);
  EXPECT_EQ(priority(warm), own);
  EXPECT_EQ(region_of(warm), std::to_string(first)) << "it has no place, and no region, before";
  EXPECT_TRUE(comes(dir / "pid_1")) << "another one waits in its place";
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(std::filesystem::exists(dir / concat("end_", warm)));
  EXPECT_FALSE(std::filesystem::exists(dir / concat("end_", read_file(dir / "pid_1"))))
      << "what has not taken part must not act as if it had";
}

TEST_F(RunElasticTest, WhatAWarmRankPrintsGoesWhereThatOfItsPlaceGoes) {
  const auto logs_of_run = dir / "logs";
  Job job = agent({"--standalone", "--nproc-per-node=1", "--warm-ranks=1", "--local-ranks-filter=0",
                   "--tee=0:1", "--log-dir=" + logs_of_run.string()});
  const pid_t first = process_in(1, 0, 1);
  ASSERT_TRUE(comes(dir / "pid_1"));
  ASSERT_NE(first, 0);
  ::kill(first, SIGKILL);
  ASSERT_NE(process_in(2, 0, 1), 0) << job.err();
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_in(job.out(), {"[local rank 0] enters generation 2\n"});
  std::string kept;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(logs_of_run)) {
    if (entry.path().filename() == "stdout.log") kept += read_file(entry.path());
  }
  expect_in(kept, {"enters generation 1\n", "enters generation 2\n"});
}

TEST_F(RunElasticTest, AReserveThatCannotStartDoesNotEndItsNode) {
  const auto logs_of_run = dir / "logs";
  Job job =
      agent({"--standalone", "--nproc-per-node=1", "--warm-ranks=1", "--log-dir=" + logs_of_run.string()});
  const pid_t first = process_in(1, 0, 1);
  ASSERT_TRUE(comes(dir / "pid_1"));
  ASSERT_NE(first, 0);
  // Where the third process would have its files.
  write_file(std::filesystem::directory_iterator(logs_of_run)->path() / "attempt_2", "");
  ::kill(first, SIGKILL);
  ASSERT_NE(process_in(2, 0, 1), 0) << job.err();
  EXPECT_TRUE(logs(job, "no process is kept in reserve any more: [launch.log] cannot make ")) << job.err();
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
}

TEST_F(RunElasticTest, NodesJoinAndDieWhileOtherRanksLiveOn) {
  Job first = node("1:2");
  const pid_t survivor = process_in(1, 0, 1);
  ASSERT_NE(survivor, 0);
  Job second = node("1:2");
  EXPECT_EQ(process_in(2, 0, 2), survivor);
  ASSERT_NE(process_in(2, 1, 2), 0);
  ASSERT_TRUE(logs(second, "generation 2: agent 2 at 127.0.0.1:")) << second.err();
  ::kill(process_in(2, 1, 2), SIGKILL);
  ASSERT_NE(process_in(3, 1, 2), 0) << second.err();
  expect_in(second.err(), {"rank 1 of 2 failed first: it was killed by signal 9 (Killed) (node 1, host "});
  second.worker().signal(SIGKILL);
  EXPECT_EQ(process_in(4, 0, 1), survivor);
  ASSERT_TRUE(logs(first, " died; detect <= ")) << first.err();
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
}

TEST_F(RunElasticTest, ANodeThatLeavesByNoticeEndsItsRanksOnceTheyAreOut) {
  const std::string notice = (dir / "notice").string();
  Job first = node("1:2");
  const pid_t survivor = process_in(1, 0, 1);
  Job second = node("1:2", {"--notice-file=" + notice, "--monitor-interval=0.02"});
  const pid_t leaver = process_in(2, 1, 2);
  ASSERT_TRUE(survivor != 0 && leaver != 0);
  write_file(notice, "");
  EXPECT_EQ(second.wait(), 143);
  EXPECT_EQ(process_in(3, 0, 1), survivor);
  expect_in(second.err(), {": this node leaves the run", "signal 15 (Terminated) is passed on to 1 rank"});
  ASSERT_TRUE(logs(first, " leaves; rebuild ")) << first.err();
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
}

// The agent that decides is stopped, so no generation without this node comes. Its ranks need the time that
// is left.
TEST_F(RunElasticTest, ANodeThatNobodyLetsGoTellsItsRanksWithinHalfOfItsTime) {
  Job first = node("1:2");
  ASSERT_NE(process_in(1, 0, 1), 0);
  Job second(dir.path(), {"--elastic", "--bind-to=none", "--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:" + port,
                          "--shutdown-timeout=4", "--", COHORT_ELASTIC_PROGRAM});
  ASSERT_NE(process_in(2, 1, 2), 0);
  first.worker().signal(SIGSTOP);
  const base::Deadline asked(std::chrono::minutes(1));
  second.worker().signal(SIGTERM);
  EXPECT_TRUE(logs(second, "signal 15 (Terminated) is passed on to 1 rank")) << second.err();
  EXPECT_LT(asked.elapsed(), std::chrono::milliseconds(4'500)) << "2 s and what a busy host takes";
  first.worker().signal(SIGCONT);
  EXPECT_EQ(second.wait(), 143) << second.err();
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
}

// The only node with the state leaves while another one copies it, for longer than a node is waited for that
// cannot be heard.
TEST_F(RunElasticTest, ANodeThatLeavesStaysWhileItsStateIsCopied) {
  for (const bool is_copied : {true, false}) {
    SCOPED_TRACE(is_copied);
    const TempDir folder;
    const auto path = [&](const std::string& name) { return folder / name; };
    const std::string endpoint = concat("--rdzv-endpoint=127.0.0.1:", free_port());
    const auto start = [&](int local_ranks) {
      return Job(folder.path(), {"--nnodes=1:2", endpoint, "--elastic", "--virtual-ranks=4", "--bind-to=none",
                                 "--monitor-interval=0.02", "--silence=200", "--shutdown-timeout=10",
                                 concat("--nproc-per-node=", local_ranks), "--", COHORT_ELASTIC_PROGRAM});
    };
    // The agent at the endpoint must stay, and its second rank begins late: the other node has the state
    // alone.
    write_file(path("hang_1"), "");
    Job endpoint_agent = start(2);
    ASSERT_TRUE(comes(path("pid_1")));
    Job leaver = start(1);
    ASSERT_TRUE(comes(path("in_1_0_of_1"))) << leaver.err();
    ASSERT_TRUE(logs(leaver, "generation 1: the run begins; rebuild ")) << leaver.err();
    write_file(path(is_copied ? "slow_copy" : "no_copy"), "");
    std::filesystem::remove(path("hang_1"));
    ASSERT_TRUE(comes(path("in_2_0_of_3"))) << leaver.err();
    leaver.worker().signal(SIGTERM);
    EXPECT_EQ(leaver.wait(), 143);
    if (is_copied) {
      EXPECT_TRUE(logs(endpoint_agent, " leaves; rebuild ")) << endpoint_agent.err() << leaver.err();
      EXPECT_TRUE(comes(path("in_3_0_of_2")));
      write_file(path("go"), "");
      EXPECT_EQ(endpoint_agent.wait(), 0) << endpoint_agent.err();
    } else {
      // Without progress it leaves after ten times the silence, at least two seconds.
      EXPECT_NE(endpoint_agent.wait(), 0);
      expect_in(endpoint_agent.err(), {"no agent is left that had the state of generation"});
    }
  }
}

TEST_F(RunElasticTest, ARankThatDoesNotEnterIsNamedAndTheOthersDoWithoutItsNode) {
  Job first = node("1:2", {"--max-restarts=1"});
  const pid_t survivor = process_in(1, 0, 1);
  ASSERT_NE(survivor, 0);
  Job second = node("1:2", {"--max-restarts=1", "--rdzv-conf=enter_timeout=1", "--monitor-interval=0.02"});
  const pid_t victim = process_in(2, 1, 2);
  ASSERT_NE(victim, 0);
  write_file(dir / "hang_0", "");  // of what begins from now on
  ::kill(victim, SIGKILL);
  EXPECT_EQ(process_in(3, 0, 2), survivor);
  EXPECT_EQ(process_in(4, 0, 1), survivor) << "without the node";
  ASSERT_TRUE(logs(first, "is given up: local rank 0 (process 1 of generation 3, process id "))
      << first.err();
  ASSERT_TRUE(logs(second, ") has not entered it for ")) << second.err();
  expect_in(second.err(),
            {"it has not come to its first Session::enter(). This node is given up until it does"});
  std::filesystem::remove(dir / "hang_0");
  EXPECT_EQ(process_in(5, 0, 2), survivor) << "it is there again";
  ASSERT_NE(process_in(5, 1, 2), 0);
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
}

// It has heard of the generation, and left no address in it: nobody could see a lost link.
TEST_F(RunElasticTest, ARankThatStopsBeforeItEntersHasASuccessor) {
  Job job = agent({"--standalone", "--nproc-per-node=2", "--silence=200", "--monitor-interval=0.02"});
  const pid_t first = process_in(1, 0, 2), second = process_in(1, 1, 2);
  ASSERT_TRUE(first != 0 && second != 0);
  ASSERT_TRUE(logs(job, "generation 1: the run begins; rebuild ")) << job.err();
  write_file(dir / "stop_0", "");
  ::kill(second, SIGKILL);
  const pid_t successor = process_in(3, 0, 2);
  EXPECT_TRUE(successor != 0 && successor != first) << job.err();
  EXPECT_TRUE(
      logs(job, "local rank 0 is killed, and has a successor: it has not answered its agent for 2000 ms"))
      << job.err();
  EXPECT_EQ(region_of(successor), std::to_string(first));
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
}

// As one whose configuration or processor is another one.
TEST_F(RunElasticTest, ANodeThatCannotTakePartLeavesAndTheRunContinues) {
  Job first = node("1:2");
  const pid_t survivor = process_in(1, 0, 1);
  ASSERT_NE(survivor, 0);
  Job second = node("1:2", {}, {"fail in a generation"});
  EXPECT_EQ(second.wait(), 5) << second.err();
  expect_in(second.err(), {"local rank 0 has failed 4 times in a row, and no step was made between",
                           "this node leaves the run"});
  EXPECT_TRUE(logs(first, "agent 2 at 127.0.0.1:")) << first.err();
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_TRUE(std::filesystem::exists(dir / concat("end_", survivor)));
}

// The others wait neither for the place of the rank that fails, nor for another one that does not hear of a
// signal.
TEST_F(RunElasticTest, ANodeThatGivesUpHoldsNobodyWhileItsRanksEnd) {
  Job first = node("1:2", {"--virtual-ranks=4"});
  const pid_t survivor = process_in(1, 0, 1);
  ASSERT_NE(survivor, 0);
  Job second = node("1:2", {"--virtual-ranks=4", "--nproc-per-node=2"}, {"rank 0 fails in a generation"});
  ASSERT_TRUE(logs(second, "local rank 0 has failed 4 times in a row")) << second.err();
  const auto makes_steps_alone = [&] {
    for (int generation = 2; generation < 20; ++generation) {
      if (std::filesystem::exists(dir / concat("in_", generation, "_0_of_1")) &&
          std::filesystem::exists(dir / concat("stepped_", generation, "_0"))) {
        return true;
      }
    }
    return false;
  };
  EXPECT_TRUE(base::poll_until(makes_steps_alone, base::Deadline(std::chrono::seconds(15)))) << first.err();
  EXPECT_TRUE(second.worker().running()) << second.err();
  ASSERT_TRUE(comes(dir / "pid_1"));
  ::kill(std::stoi(read_file(dir / "pid_1")), SIGKILL);
  EXPECT_EQ(second.wait(), 5) << second.err();
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
}

TEST_F(RunElasticTest, ANodeThatFailsAgainAndAgainEndsTheRunWhereTooFewAreLeft) {
  Job first = node("2:2");
  ASSERT_TRUE(logs(first, "this node waits for nodes"));
  Job second = node("2:2", {}, {"fail in a generation"});
  EXPECT_EQ(second.wait(), 5) << second.err();
  EXPECT_EQ(first.wait(), 5) << first.err();
  expect_in(first.err(), {"a rank that cannot take part", "failed again and again"});
}

// The place of a process that cannot start is that of a rank which has failed.
TEST_F(RunElasticTest, ASuccessorThatCannotStartIsTriedAgain) {
  const auto logs_of_run = dir / "logs";
  Job job = agent({"--standalone", "--nproc-per-node=2", "--log-dir=" + logs_of_run.string()});
  const pid_t first = process_in(1, 0, 2), second = process_in(1, 1, 2);
  ASSERT_TRUE(first != 0 && second != 0);
  const auto run_folder = std::filesystem::directory_iterator(logs_of_run)->path();
  write_file(run_folder / "attempt_2", "");  // where the third process would have its files
  ::kill(second, SIGKILL);
  EXPECT_TRUE(logs(job, "local rank 1 cannot be started: [launch.log] cannot make ")) << job.err();
  EXPECT_EQ(process_in(2, 0, 2), first) << job.err();
  ASSERT_NE(process_in(2, 1, 2), 0) << job.err();
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
}

TEST_F(RunElasticTest, ARankThatMakesNoProgressIsNamed) {
  Job job = agent(
      {"--standalone", "--nproc-per-node=2", "--rdzv-conf=progress_timeout=0.4", "--monitor-interval=0.02"});
  const pid_t second = process_in(1, 1, 2);
  ASSERT_NE(second, 0);
  ASSERT_TRUE(logs(job, "generation 1: the run begins; rebuild ")) << job.err();
  ::kill(second, SIGSTOP);  // for less than the two seconds of net's silence
  const std::string line =
      concat("local rank 1 (process 1 of generation 1, process id ", second, ") has made no progress for ");
  EXPECT_TRUE(logs(job, line)) << job.err();
  EXPECT_EQ(job.err().find("local rank 0 (process 0 of"), std::string::npos) << "it waits: " << job.err();
  ::kill(second, SIGCONT);
  EXPECT_TRUE(logs(job, "local rank 1 makes progress again")) << job.err();
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
}

// Nobody else has the state: what was trained since the last checkpoint would be lost.
TEST_F(RunElasticTest, ASignalToTheOnlyNodeSavesWhatItsRanksHave) {
  const std::string folder = (dir / "run").string();
  Job job(dir.path(),
          {"--elastic", "--standalone", "--nproc-per-node=1", "--bind-to=none", "--", COHORT_PROGRAM, "train",
           "data.type=synthetic", "data.image_size=8", "data.synthetic_train=1000000", "data.workers=0",
           "model.name=mlp", "optim.lr=0.001", "train.batch_size=2", "train.epochs=1",
           "distributed.elastic=true", "run.dir=" + folder});
  const auto has_steps = [&] {
    const auto ledger = dir / "run" / "ledger.csv";
    return std::filesystem::exists(ledger) && std::filesystem::file_size(ledger) > 100;
  };
  ASSERT_TRUE(base::poll_until(has_steps, base::Deadline(std::chrono::seconds(60)))) << job.err();
  job.worker().signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
  EXPECT_TRUE(std::filesystem::exists(dir / "run" / "checkpoints" / "last")) << job.err();
  expect_in(job.err(), {"signal 15 (Terminated): the run ends, as it cannot continue without this node"});
}

// The only rank is killed anywhere, until two successors have continued with what it has left. Only where it
// died while it changed the state the run ends, and the same command resumes it.
TEST_F(RunElasticTest, ARankThatIsAloneLosesNothing) {
  const std::vector<std::string> config{
      "data.type=synthetic", "data.image_size=8", "data.synthetic_train=1600", "data.workers=0",
      "model.name=mlp",      "optim.name=adamw",  "train.batch_size=2",        "train.epochs=3",
      "train.threads=1",     "run.progress=off",  "run.log_every=50"};
  const auto run = [&](const std::string& folder, std::vector<std::string> flags,
                       const std::string& elastic) {
    flags.insert(flags.end(), {"--bind-to=none", "--", COHORT_PROGRAM, "train"});
    flags.insert(flags.end(), config.begin(), config.end());
    flags.insert(flags.end(), {"run.dir=" + (dir / folder).string(), elastic});
    return Job(dir.path(), std::move(flags));
  };
  Job undisturbed = run("expected", {"--nproc-per-node=1"}, "distributed.virtual_ranks=2");
  ASSERT_EQ(undisturbed.wait(), 0) << undisturbed.err();
  const auto size_of_ledger = [&] {
    const auto ledger = dir / "run" / "ledger.csv";
    return std::filesystem::exists(ledger) ? std::filesystem::file_size(ledger) : 0;
  };
  // Of ranks themselves: the report of one that was killed repeats its last lines.
  const auto count_lines = [](const std::string& log, const std::string& part) {
    std::istringstream lines(log);
    int count = 0;
    for (std::string line; std::getline(lines, line);) {
      count += line.starts_with("[local rank ") && line.find(part) != std::string::npos;
    }
    return count;
  };
  int num_taken_over = 0, num_lost = 0, num_kills = 0, status = -1;
  for (int start = 0; start < 12 && status != 0; ++start) {
    Job job = run("run",
                  {"--elastic", "--standalone", "--nproc-per-node=1", "--virtual-ranks=2",
                   "--max-restarts=12", "--warm-ranks=1"},
                  "distributed.elastic=true");
    const auto count_taken_over = [&] {
      return num_taken_over + count_lines(job.err(), " steps of the process before it");
    };
    for (pid_t killed = 0; num_kills < 12 && count_taken_over() < 2; ++num_kills) {
      const std::uintmax_t before = size_of_ledger();
      const bool is_under_way =
          base::poll_until([&] { return job.worker().reap() || size_of_ledger() > before + 2'000; },
                           base::Deadline(std::chrono::seconds(60)));
      ASSERT_TRUE(is_under_way) << job.err();
      if (!job.worker().running()) break;
      killed = writer_of(dir / "run" / "ledger.csv", killed);
      if (killed == 0) break;
      ::kill(killed, SIGKILL);
    }
    status = job.wait();
    const std::string log = job.err();
    num_taken_over = count_taken_over();
    num_lost += count_lines(log, "the process before this one died while it made step");
    if (status != 0) expect_in(log, {"no process has the state"});
  }
  ASSERT_EQ(status, 0);
  EXPECT_GE(num_taken_over, 2);
  EXPECT_EQ(num_taken_over + num_lost, num_kills) << "a state was lost that nobody was changing";
  for (const char* const file :
       {"checkpoints/last/model.safetensors", "checkpoints/last/optimizer.safetensors"}) {
    EXPECT_TRUE(read_file(dir / "run" / file) == read_file(dir / "expected" / file)) << file;
  }
  const std::string ledger = read_file(dir / "run" / "ledger.csv");
  EXPECT_EQ(std::ranges::count(ledger, '\n'), 1 + 3 * 400);
}

}  // namespace
}  // namespace cohort::test
