// Agents with ranks that are shell scripts; several nodes are threads that share a store.
#include "cohort/launch/internal/agent.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/store_agent_group.h"
#include "tests/support/comes_true.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Outcome {
  int status = -1;
  std::string out, err, log;
};

class AgentTest : public testing::Test {
 protected:
  RunOptions options(const std::string& script, int ranks) {
    RunOptions result;
    result.command = {"/bin/sh", "-c", "cd \"$FOLDER\"; " + script};
    result.nproc_per_node = ranks;
    result.shutdown_timeout = seconds(20);
    result.monitor_interval = milliseconds(20);
    result.environment = {{"FOLDER", dir.path().string()}};
    return result;
  }

  WorkerGroupSpec spec(int world_size) const {
    WorkerGroupSpec result;
    result.world_size = world_size;
    result.master_addr = "127.0.0.1";
    result.master_port = 29501;
    result.run_id = "test";
    return result;
  }

  // Runs an agent on this node; `meanwhile` gets to act once the file "ready" is in the folder.
  Outcome run(const RunOptions& options, const std::function<void()>& meanwhile = {}) {
    Outcome outcome;
    base::set_log_sink(
        [&](base::LogLevel, std::string_view line) { outcome.log += std::string(line) + "\n"; });
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    std::thread actor;
    {
      SignalQueue signals(options.signals_to_handle, {SIGUSR1, SIGUSR2, SIGTSTP});
      LogFolder folder(options);
      OrphanWatchdog watchdog;
      if (meanwhile) {
        actor = std::thread([&] {
          if (!wait_for_file("ready")) return;
          meanwhile();
        });
      }
      SingleAgent agents(options);
      outcome.status = Agent(options, spec(options.nproc_per_node), agents,
                             {.folder = folder, .watchdog = watchdog, .signals = signals})
                           .run();
    }
    if (actor.joinable()) actor.join();
    outcome.out = testing::internal::GetCapturedStdout();
    outcome.err = testing::internal::GetCapturedStderr();
    base::set_log_sink({});
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
    return outcome;
  }

  bool wait_for_file(const char* name) const {
    for (int i = 0; i < 2000 && !std::filesystem::exists(dir / name); ++i) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    return std::filesystem::exists(dir / name);
  }

  test::TempDir dir;
};

TEST_F(AgentTest, ARankThatHadFailedWhenOthersEndedItIsTheCauseAndTheSignalIsNotTheStatus) {
  // Rank 1 says first that it failed, and is still ending when rank 0 has ended.
  const Outcome outcome =
      run(options("if [ $RANK = 1 ]; then echo '{\"message\": \"the cause\"}' > $TORCHELASTIC_ERROR_FILE; "
                  "touch said; sleep 60; "
                  "else while [ ! -e said ]; do sleep 0.05; done; exit 2; fi",
                  2));
  EXPECT_EQ(outcome.status, 2);
  test::expect_in(outcome.log, {"rank 1 of 2 failed first: it had failed, and was ended with the others",
                                "the cause", "then rank 0 ended with status 2"});
}

TEST_F(AgentTest, RanksFindTorchrunsEnvironment) {
  const test::ScopedEnv threads("OMP_NUM_THREADS", std::nullopt), cores("COHORT_CORES", "6");
  RunOptions with = options(
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_NAME "
      "$ROLE_RANK "
      "$ROLE_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS "
      "$TORCHELASTIC_RUN_ID $TORCHELASTIC_USE_AGENT_STORE $OMP_NUM_THREADS; "
      "[ -d \"${TORCHELASTIC_ERROR_FILE%/*}\" ] || echo no folder",
      2);
  with.max_restarts = 4;
  with.role = "trainer";
  const Outcome outcome = run(with);
  EXPECT_EQ(outcome.status, 0);
  for (const char* rank : {"0", "1"}) {
    const std::string expected = std::string("[rank ") + rank + "] " + rank + " " + rank +
                                 " 2 2 0 1 trainer " + rank + " 2 127.0.0.1 29501 0 4 test True 3\n";
    EXPECT_NE(outcome.out.find(expected), std::string::npos) << outcome.out;
  }
  const test::ScopedEnv set("OMP_NUM_THREADS", "5");
  EXPECT_EQ(run(options("echo $OMP_NUM_THREADS", 1)).out, "5\n");
}

TEST_F(AgentTest, TheFirstFailureIsTheCauseWithItsLastLines) {
  const Outcome outcome =
      run(options("if [ $RANK = 1 ]; then for i in $(seq 30); do echo line $i; done; echo '{\"message\": "
                  "\"bad luck\"}' > "
                  "$TORCHELASTIC_ERROR_FILE; exit 9; fi; sleep 100",
                  2));
  EXPECT_EQ(outcome.status, 9);
  test::expect_in(outcome.log,
                  {"rank 1 of 2 failed first: it ended with status 9", "its error:\n    bad luck",
                   "the last it printed:\n    line 11\n", "line 30"});
}

TEST_F(AgentTest, WhoRecordedAnErrorFirstIsTheCauseThoughItEndedLater) {
  const Outcome outcome =
      run(options("if [ $RANK = 1 ]; then trap 'exit 5' TERM; "
                  "echo '{\"message\": \"cause\"}' > $TORCHELASTIC_ERROR_FILE; touch go; "
                  "while :; do sleep 0.05; done; fi; "
                  "while [ ! -e go ]; do sleep 0.02; done; sleep 0.2; exit 4",
                  2));
  EXPECT_EQ(outcome.status, 5);
  test::expect_in(outcome.log, {"rank 1 of 2 failed first", "cause", "then rank 0 ended with status 4"});
}

TEST_F(AgentTest, AKilledRankGives128PlusTheSignal) {
  EXPECT_EQ(run(options("kill -SEGV $$", 1)).status, 128 + SIGSEGV);
}

TEST_F(AgentTest, ARankThatIgnoresSigtermIsKilled) {
  RunOptions with = options(
      "trap '' TERM; touch up$RANK; "
      "if [ $RANK = 0 ]; then while [ ! -e up1 ]; do sleep 0.02; done; exit 2; fi; "
      "while :; do sleep 1; done",
      2);
  with.shutdown_timeout = milliseconds(300);
  const Outcome outcome = run(with);
  EXPECT_EQ(outcome.status, 2);
  test::expect_in(outcome.log, {"local rank 1 did not end within 300 ms, and is killed"});
}

TEST_F(AgentTest, AllRanksAreStartedAgain) {
  RunOptions with =
      options("echo attempt $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ]", 1);
  with.max_restarts = 3;
  const Outcome outcome = run(with);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, "attempt 0\nattempt 1\nattempt 2\n");
  test::expect_in(outcome.log, {"all ranks are started again: restart 2 of 3"});
  with.max_restarts = 1;
  EXPECT_EQ(run(with).status, 1);
}

TEST_F(AgentTest, ASignalIsPassedOnOnceAndTheStatusIsTheRanks) {
  const RunOptions with = options(
      "trap 'echo got >> $RANK' INT; trap 'echo saved; touch saved$RANK' USR1; "
      "touch is$RANK; [ -e is0 -a -e is1 ] && touch ready; "
      "while [ ! -e $RANK ]; do sleep 0.02; done; sleep 0.2; exit 42",
      2);
  const Outcome outcome = run(with, [&] {
    ::kill(::getpid(), SIGUSR1);
    EXPECT_TRUE(wait_for_file("saved0") && wait_for_file("saved1"));
    ::kill(::getpid(), SIGINT);
  });
  EXPECT_EQ(outcome.status, 42);
  EXPECT_EQ(test::read_file(dir / "0"), "got\n");
  EXPECT_EQ(test::read_file(dir / "1"), "got\n");
  test::expect_in(outcome.out, {"[rank 0] saved\n", "[rank 1] saved\n"});
  test::expect_in(outcome.log, {"signal 2 (Interrupt) is passed on to 2 ranks"});
}

TEST_F(AgentTest, ASignalThatSomeRanksDoNotKnowEndsNobody) {
  ASSERT_EQ(::mkfifo((dir / "end").c_str(), 0600), 0);
  // Rank 1 starts no program: a shell that does has every signal blocked for a moment, as if it took them.
  const RunOptions with = options(
      "[ $RANK = 0 ] && trap 'heard=1' USR1; : > is$RANK; [ -e is0 -a -e is1 ] && : > ready; "
      "if [ $RANK = 1 ]; then read word < end || exit 0; fi; "
      "while [ -z \"$heard\" ]; do sleep 0.02; done; : > end",
      2);
  const Outcome outcome = run(with, [] { ::kill(::getpid(), SIGUSR1); });
  EXPECT_EQ(outcome.status, 0);
  test::expect_in(outcome.log, {"signal 10 (User defined signal 1) is not passed on to rank 1"});
}

TEST_F(AgentTest, NothingIsStartedAgainAfterASignal) {
  RunOptions with = options("touch ready; while :; do sleep 0.05; done", 1);
  with.max_restarts = 3;
  const Outcome outcome = run(with, [] { ::kill(::getpid(), SIGTERM); });
  EXPECT_EQ(outcome.status, 128 + SIGTERM);
  EXPECT_EQ(outcome.log.find("again"), std::string::npos) << outcome.log;
}

TEST_F(AgentTest, ASecondSignalKills) {
  const RunOptions with = options(
      "trap 'touch heard$RANK' INT; touch is$RANK; [ -e is0 -a -e is1 ] && touch ready; "
      "while :; do sleep 0.05; done",
      2);
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome = run(with, [&] {
    ::kill(::getpid(), SIGINT);
    // Two that wait at the same time are one.
    EXPECT_TRUE(wait_for_file("heard0") && wait_for_file("heard1"));
    ::kill(::getpid(), SIGTERM);  // another, as the same one could come too soon to be a second
  });
  EXPECT_EQ(outcome.status, 128 + SIGINT);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(15)) << "it waited for the whole grace";
}

TEST_F(AgentTest, ASignalThatComesTwiceAtOnceLetsRanksEnd) {
  const RunOptions with =
      options("trap 'sleep 0.3; touch saved; exit 143' TERM; touch ready; while :; do sleep 0.05; done", 1);
  // Where this thread stands still between the two, they are two.
  for (int round = 0; round < 10 && !std::filesystem::exists(dir / "saved"); ++round) {
    std::filesystem::remove(dir / "ready");
    run(with, [] {
      ::raise(SIGTERM);
      ::raise(SIGTERM);
    });
  }
  EXPECT_TRUE(std::filesystem::exists(dir / "saved"));
}

TEST_F(AgentTest, OutputGoesWhereItIsAsked) {
  RunOptions with = options("echo out $RANK; echo err $RANK >&2", 3);
  with.log_dir = dir / "logs";
  with.run_id = "a/b";
  with.redirects = StreamChoice::parse("0:1", "--redirects");
  with.tee = StreamChoice::parse("1:3", "--tee");
  with.local_ranks_filter = {0, 1};
  const Outcome outcome = run(with);
  EXPECT_EQ(outcome.out, "[rank 1] out 1\n") << "rank 0 is redirected, rank 2 filtered";
  test::expect_in(outcome.err, {"[rank 0] err 0\n", "[rank 1] err 1\n"});
  EXPECT_EQ(outcome.err.find("err 2"), std::string::npos);
  const auto folder = std::filesystem::directory_iterator(dir / "logs")->path() / "attempt_0";
  EXPECT_EQ(test::read_file(folder / "0" / "stdout.log"), "out 0\n");
  EXPECT_EQ(test::read_file(folder / "1" / "stdout.log"), "out 1\n");
  EXPECT_EQ(test::read_file(folder / "1" / "stderr.log"), "err 1\n");
  EXPECT_FALSE(std::filesystem::exists(folder / "0" / "stderr.log"));
  EXPECT_FALSE(std::filesystem::exists(folder / "2" / "stdout.log"));
}

TEST_F(AgentTest, OneRankPrintsAsItIsAndPrefixesCanBeChosen) {
  EXPECT_EQ(run(options("printf 'a\\rb'", 1)).out, "a\rb");
  RunOptions with = options("echo x", 1);
  with.prefix = Prefix::kOn;
  EXPECT_EQ(run(with).out, "[rank 0] x\n");
  with.prefix = Prefix::kOff;
  with.nproc_per_node = 2;
  EXPECT_EQ(run(with).out, "x\nx\n");
}

TEST_F(AgentTest, AWarningOfAllRanksIsShownOnce) {
  const Outcome outcome = run(options("echo '12:00:00 warning the disk is slow' >&2; echo own $RANK >&2", 3));
  const std::size_t first = outcome.err.find("the disk is slow");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(outcome.err.find("the disk is slow", first + 1), std::string::npos) << outcome.err;
  test::expect_in(outcome.err, {"own 0", "own 1", "own 2"});
}

// The report of a failure is longer than what the pipe takes besides what the rank has printed.
TEST_F(AgentTest, AStderrThatNobodyReadsDoesNotHoldUpTheEnd) {
  const RunOptions with = options(
      "[ $RANK = 0 ] && trap 'touch ended; exit 0' TERM && touch trapped; "
      "for i in $(seq 30); do printf '%01900d\\n' 0 >&2; done; "
      "[ $RANK = 1 ] && { while ! [ -e trapped ]; do sleep 0.02; done; exit 7; }; "
      "while :; do sleep 0.05; done",
      2);
  Pipe pipe = make_pipe();
  const pid_t agent = ::fork();
  ASSERT_GE(agent, 0);
  if (agent == 0) {
    ::dup2(pipe.write.get(), STDERR_FILENO);
    SignalQueue signals(with.signals_to_handle, {});
    LogFolder folder(with);
    OrphanWatchdog watchdog;
    SingleAgent agents(with);
    const int status =
        Agent(with, spec(2), agents, {.folder = folder, .watchdog = watchdog, .signals = signals}).run();
    ::_exit(status);
  }
  EXPECT_TRUE(wait_for_file("ended")) << "the other rank is ended";
  // It waits for a reader still, until a signal comes. Two that come while a rank runs would end that at
  // once.
  int status = 0;
  base::Deadline waited(seconds(30));
  while (!base::wait_for_process(agent, status, base::Deadline(seconds(1))) && !waited.expired()) {
    ::kill(agent, SIGTERM);
  }
  EXPECT_FALSE(waited.expired());
  ::kill(agent, SIGKILL);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST_F(AgentTest, NoTemporaryFolderIsLeft) {
  const test::ScopedEnv temporary("TMPDIR", (dir / "tmp").string());
  std::filesystem::create_directories(dir / "tmp");
  run(options("echo '{}' > $TORCHELASTIC_ERROR_FILE; exit 1", 1));
  EXPECT_TRUE(std::filesystem::is_empty(dir / "tmp"));
}

// An agent per node, in a process of its own: signals belong to a process.
class NodesTest : public AgentTest {
 protected:
  // What `nnodes` agents on one store came to, in threads: without signal handlers of their own.
  std::vector<int> run_nodes(const std::string& script, int nnodes, int restarts = 0) {
    std::vector<int> statuses(static_cast<std::size_t>(nnodes), -1);
    std::vector<RunOptions> all;
    for (int node = 0; node < nnodes; ++node) {
      RunOptions with = options(script, 1);
      with.nnodes = nnodes;
      with.node_rank = node;
      with.max_restarts = restarts;
      if (!log_folder.empty()) {
        with.log_dir = log_folder;
        with.run_id = base::concat("node", node);
        with.redirects = StreamChoice::parse("3", "--redirects");
      }
      if (node == nnodes - 1 && !handled_by_last.empty()) with.signals_to_handle = handled_by_last;
      all.push_back(with);
    }
    base::set_log_sink([&](base::LogLevel, std::string_view line) { log += std::string(line) + "\n"; });
    testing::internal::CaptureStdout();
    const auto kv_store = std::make_shared<test::MapStore>();
    for (const auto& [key, value] : written) kv_store->set(key, value);
    SignalQueue signals({}, {});
    {
      OrphanWatchdog watchdog;
      std::vector<std::thread> threads;
      for (int node = 0; node < nnodes; ++node) {
        threads.emplace_back([&, node] {
          AgentStoreClient store_client(kv_store, {.node = node,
                                                   .nnodes = nnodes,
                                                   .interval = milliseconds(10),
                                                   .keep_alive_interval = keep_alive_interval,
                                                   .keep_alive_max_attempt = 10});
          if (expects_signs) {
            store_client.begin_session("this");
            for (int other = 0; other < nnodes; ++other) {
              if (other != node && (node == 0 || other == 0)) store_client.expect_signs(other);
            }
          }
          LogFolder folder(all[static_cast<std::size_t>(node)]);
          WorkerGroupSpec here = spec(nnodes);
          here.node_rank = here.first_rank = node;
          here.num_nodes = nnodes;
          StoreAgentGroup agents(all[static_cast<std::size_t>(node)], store_client);
          try {
            statuses[static_cast<std::size_t>(node)] =
                Agent(all[static_cast<std::size_t>(node)], here, agents,
                      {.folder = folder, .watchdog = watchdog, .signals = signals})
                    .run();
          } catch (const PeerError& error) {
            errors.at(static_cast<std::size_t>(node)) = error.what();
            if (after_error) after_error(node);
          }
        });
      }
      if (while_they_run) while_they_run(*kv_store);
      for (std::thread& thread : threads) thread.join();
    }
    out = testing::internal::GetCapturedStdout();
    base::set_log_sink({});
    return statuses;
  }

  std::map<std::string, std::string> written;  // by somebody else, before they come
  std::function<void(base::KeyValueStore&)> while_they_run;
  std::vector<int> handled_by_last;  // the signals of the last node; empty: as the others
  milliseconds keep_alive_interval = seconds(1);
  bool expects_signs = false;
  std::filesystem::path log_folder;           // of all that ranks print; empty: none
  std::array<std::string, 3> errors;          // of each node's agent
  std::function<void(int node)> after_error;  // on the thread of that node
  std::string log, out;
};

// What it hangs in is the file that its rank's output goes to: in the second attempt a pipe that nobody
// reads.
TEST_F(NodesTest, AnAgentThatHangsIsNamedByTheOthers) {
  ::signal(SIGPIPE, SIG_IGN);
  const std::string pipe = dir / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  Fd reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  log_folder = dir / "logs";
  expects_signs = true;
  keep_alive_interval = milliseconds(200);
  std::atomic<bool> has_seen{false};
  after_error = [&](int node) { has_seen = has_seen || node == 0; };
  std::thread lets_go([&] {
    EXPECT_TRUE(test::comes_true([&] { return has_seen.load(); }));
    reader.close();
  });
  run_nodes(
      "if [ $RANK = 0 ]; then exec sleep 30; fi; "
      "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then seq 100000; exit 0; fi; "
      "next=\"${TORCHELASTIC_ERROR_FILE%/attempt_0/*}/attempt_1/0\"; mkdir -p \"$next\"; "
      "ln -s \"$FOLDER/pipe\" \"$next/stdout.log\"; exit 3",
      2, 1);
  lets_go.join();
  EXPECT_NE(errors[0].find("node 1 has given no sign for"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("another agent gave up: node 0: "), std::string::npos) << errors[1];
}

TEST_F(NodesTest, AWordThatNamesNoSignalOfTheirsEndsNothing) {
  for (const char* word : {"9", "rubbish", "", "15x", "99999999999999999999", "-2", "19", "0", "10", "34"}) {
    written = {{"signal", word}};
    EXPECT_EQ(run_nodes("sleep 0.2; exit 0", 2), (std::vector<int>{0, 0})) << word;
  }
}

TEST_F(NodesTest, ASignalThatANodeDoesNotHandleItselfEndsItBySigterm) {
  while_they_run = [&](base::KeyValueStore& kv_store) {
    EXPECT_TRUE(wait_for_file("up0") && wait_for_file("up1"));
    kv_store.set("signal", std::to_string(SIGINT));
  };
  handled_by_last = {SIGTERM};
  EXPECT_EQ(run_nodes("trap 'echo $RANK int; exit 3' INT; trap 'echo $RANK term; exit 4' TERM; "
                      "touch up$RANK; while :; do sleep 0.02; done",
                      2),
            (std::vector<int>{3, 3}));
  test::expect_in(out, {"0 int\n", "1 term\n"});
}

TEST_F(NodesTest, EndTogetherWithTheStatusOfTheFirstFailure) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(run_nodes("[ $RANK = 1 ] && exit 6; sleep 100", 3), (std::vector<int>{6, 6, 6}));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(30));
  test::expect_in(log, {"rank 1 of 3 failed first: it ended with status 6 (node 1"});
}

TEST_F(NodesTest, WaitForEachOther) {
  EXPECT_EQ(run_nodes("[ $RANK = 1 ] && sleep 1; exit 0", 2), (std::vector<int>{0, 0}));
}

TEST_F(NodesTest, StartAgainTogether) {
  EXPECT_EQ(
      run_nodes(
          "echo $RANK/$TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT = 1 ]", 2,
          1),
      (std::vector<int>{0, 0}));
  test::expect_in(out, {"0/1", "1/1"});
}

}  // namespace
}  // namespace cohort::launch
