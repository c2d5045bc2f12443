// `cohort run` on two hosts: network namespaces of this one, joined by a cable of their own.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "cohort/base/threads/deadline.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

using launch::Worker;

constexpr const char* kAddress = "10.213.7.1";
constexpr const char* kAddress6 = "fd00:c0:7::1";

// Runs a command; returns what it said when it failed.
std::string run_quietly(const std::string& command, const std::filesystem::path& folder) {
  const std::filesystem::path log = folder / "command.log";
  if (std::system((command + " > '" + log.string() + "' 2>&1").c_str()) == 0) return "";
  return command + ": " + read_file(log);
}

// Two hosts, a and b: the first has kAddress and kAddress6, the second .2 and ::2.
class RunNetnsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string a = host('a'), b = host('b');
    std::string failure;
    for (const std::string& command :
         {"ip netns add " + a, "ip netns add " + b,
          "ip link add wire netns " + a + " type veth peer name wire netns " + b,
          "ip -n " + a + " address add " + kAddress + "/24 dev wire",
          "ip -n " + b + " address add 10.213.7.2/24 dev wire",
          "ip -n " + a + " address add " + kAddress6 + "/64 dev wire nodad",
          "ip -n " + b + " address add fd00:c0:7::2/64 dev wire nodad", "ip -n " + a + " link set lo up",
          "ip -n " + b + " link set lo up", "ip -n " + a + " link set wire up",
          "ip -n " + b + " link set wire up"}) {
      if (failure.empty()) failure = run_quietly(command, dir.path());
    }
    if (failure.empty()) return;
    if (::geteuid() == 0 && std::getenv("CI") != nullptr)
      FAIL() << "netns tests must not skip in CI: " << failure;
    GTEST_SKIP() << "netns: no network namespaces here: " << failure;
  }
  void TearDown() override {
    for (const char side : {'a', 'b'}) {
      run_quietly("ip netns delete " + host(side), dir.path());
      std::error_code ignored;
      std::filesystem::remove_all("/etc/netns/" + host(side), ignored);
    }
  }

  static std::string host(char side) { return "cohort-" + std::to_string(::getpid()) + side; }

  // The second host finds the first one by the name "first", which leads the first one to itself only.
  static void name_first_host() {
    write_file("/etc/netns/" + host('a') + "/hosts", "127.0.0.1 localhost\n127.0.1.1 first\n");
    write_file("/etc/netns/" + host('b') + "/hosts",
               std::string("127.0.0.1 localhost\n") + kAddress + " first\n");
  }

  std::string secret_file() const {
    const std::filesystem::path secret = dir / "secret";
    if (!std::filesystem::exists(secret)) write_file(secret, "a secret of the tests");
    std::filesystem::permissions(secret, std::filesystem::perms::owner_read);
    return secret.string();
  }

  Job node(int rank, const std::string& address, std::vector<std::string> program,
           std::vector<std::string> more = {}) {
    std::vector<std::string> flags{"--nnodes=2",
                                   "--secret-file=" + secret_file(),
                                   "--node-rank=" + std::to_string(rank),
                                   "--master-addr=" + address,
                                   "--master-port=29500",
                                   "--bind-to=none",
                                   "--rdzv-conf=timeout=60"};
    flags.insert(flags.end(), more.begin(), more.end());
    flags.emplace_back("--");
    flags.insert(flags.end(), program.begin(), program.end());
    return Job(dir.path(), flags, {"ip", "netns", "exec", host(rank == 0 ? 'a' : 'b')});
  }

  // All ranks of both hosts sum their numbers over Gloo.
  void expect_a_sum(const std::string& address) {
    Job second = node(1, address, {COHORT_RANK_PROGRAM}), first = node(0, address, {COHORT_RANK_PROGRAM});
    EXPECT_EQ(first.wait(), 0) << first.err();
    EXPECT_EQ(second.wait(), 0) << second.err();
    expect_in(first.out(), {"[rank 0] rank 0 of 2: sum 3\n"});
    expect_in(second.out(), {"[rank 1] rank 1 of 2: sum 3\n"});
  }

  TempDir dir;
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

TEST_F(RunNetnsTest, TwoHostsMeetOverIpv4) {
  expect_a_sum(kAddress);
}

// LibTorch's store would ask it for the name of each address that connects, four times an opening.
TEST_F(RunNetnsTest, ANameServerThatIsSilentHoldsNobodyUp) {
  for (const char side : {'a', 'b'}) {
    write_file("/etc/netns/" + host(side) + "/resolv.conf",
               "nameserver 10.213.7.77\noptions timeout:10 attempts:1\n");
    // A neighbour that nobody is: what is sent there is lost, and no error comes back.
    ASSERT_EQ(run_quietly("ip -n " + host(side) +
                              " neighbour add 10.213.7.77 lladdr 02:00:00:00:00:77 dev wire nud permanent",
                          dir.path()),
              "");
  }
  const base::Deadline since(std::chrono::seconds(60));
  expect_a_sum(kAddress);
  EXPECT_LT(since.elapsed(), std::chrono::seconds(10));
}

TEST_F(RunNetnsTest, TwoHostsMeetOverIpv6) {
  expect_a_sum(std::string("[") + kAddress6 + "]");
}

TEST_F(RunNetnsTest, ANameThatLeadsTheHostToItselfOnlyDoesNoHarm) {
  name_first_host();
  expect_a_sum("first");
}

// The endpoint is on the first host, whichever begins.
TEST_F(RunNetnsTest, NodesThatComeAndGoMeetByAddressAndByName) {
  name_first_host();
  for (const std::string& address :
       {std::string(kAddress), std::string("[") + kAddress6 + "]", std::string("first")}) {
    const auto start = [&](char side) {
      return Job(dir.path(),
                 {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=" + address, "--bind-to=none",
                  "--secret-file=" + secret_file(), "--rdzv-conf=join_timeout=60", "--", COHORT_RANK_PROGRAM},
                 {"ip", "netns", "exec", host(side)});
    };
    Job second = start('b'), first = start('a');
    EXPECT_EQ(first.wait(), 0) << address << first.err();
    EXPECT_EQ(second.wait(), 0) << address << second.err();
    expect_in(first.out() + second.out(), {"[rank 0] rank 0 of 2: sum 3\n", "[rank 1] rank 1 of 2: sum 3\n"});
    expect_in(first.err(), {"has the only record of run none: the run ends if this host dies"});
  }
}

// Ranks of both hosts exchange bytes, and read the store of their generation.
TEST_F(RunNetnsTest, RanksOfAnElasticRunReachEachOtherByAddressAndByName) {
  name_first_host();
  for (const std::string& address :
       {std::string(kAddress), std::string("[") + kAddress6 + "]", std::string("first")}) {
    const std::filesystem::path folder = dir / ("run at " + address);
    write_file(folder / "fast", "");
    const auto start = [&](char side) {
      return Job(folder,
                 {"--elastic", "--nnodes=2:2", "--virtual-ranks=4", "--rdzv-endpoint=" + address,
                  "--bind-to=none", "--secret-file=" + secret_file(), "--rdzv-conf=join_timeout=60", "--",
                  COHORT_MLP_PROGRAM, "30", "4", std::string(1, side)},
                 {"ip", "netns", "exec", host(side)});
    };
    Job second = start('b'), first = start('a');
    EXPECT_EQ(first.wait(), 0) << address << first.err();
    EXPECT_EQ(second.wait(), 0) << address << second.err();
    EXPECT_FALSE(read_file(folder / "steps").empty());
  }
}

// By hand, with the least that an environment can say, and the default backend.
TEST_F(RunNetnsTest, TwoHostsMeetWithoutALauncher) {
  name_first_host();
  const launch::Fd out = open_for_writing(dir / "out"), err = open_for_writing(dir / "err");
  const auto rank = [&](int number, const char* interfaces) {
    return Worker({.program = launch::find_program("ip"),
                   .arguments = {"ip", "netns", "exec", host(number == 0 ? 'a' : 'b'), COHORT_RANK_PROGRAM},
                   .environment = launch::environment_with({{"RANK", std::to_string(number)},
                                                            {"WORLD_SIZE", "2"},
                                                            {"MASTER_ADDR", "first"},
                                                            {"MASTER_PORT", "29500"},
                                                            {"GLOO_SOCKET_IFNAME", interfaces}}),
                   .output = out.get(),
                   .error = err.get(),
                   .own_group = true});
  };
  for (const char* interfaces : {"", "wire,wire"}) {
    Worker first = rank(0, interfaces), second = rank(1, interfaces);
    for (int i = 0; i < 6000 && !(first.reap() && second.reap()); ++i) ::usleep(10'000);
    EXPECT_EQ(launch::exit_status(first.wait_status()), 0) << read_file(dir / "err");
    EXPECT_EQ(launch::exit_status(second.wait_status()), 0) << read_file(dir / "err");
  }
  expect_in(read_file(dir / "out"), {"rank 0 of 2: sum 3\n", "rank 1 of 2: sum 3\n"});
}

// The first process of a container, as `cohort run` is there.
class RunPidnsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string failure = run_quietly("unshare -fp --mount-proc true", dir.path());
    // A container that may make networks need not be one that may mount /proc.
    if (failure.empty()) return;
    GTEST_SKIP() << "netns: no process namespaces here: " << failure;
  }

  TempDir dir;
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

TEST_F(RunPidnsTest, AsTheFirstProcessItReapsWhatRanksLeaveBehind) {
  // The shell that has started it ends at once, and nobody else is there to be its parent.
  const std::string script =
      "cd \"$FOLDER\"; sh -c 'sleep 0.2 & echo $! > orphan'; i=0; "
      "while [ -e /proc/$(cat orphan) ] && [ $i -lt 200 ]; do sleep 0.1; i=$((i+1)); done; "
      "! [ -e /proc/$(cat orphan) ]";
  const std::string kill_watchdog =
      "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" != cohort-watchdog ] || kill -9 ${p#/proc/}; done; ";
  for (const std::string& before : {std::string(), kill_watchdog}) {
    Job job(dir.path(), {"--bind-to=none", "--", "sh", "-c", before + script},
            {"unshare", "-fp", "--mount-proc", "--kill-child"});
    EXPECT_EQ(job.wait(), 0) << "it is gone, and no zombie: " << job.err();
  }
}

TEST_F(RunPidnsTest, RanksShareMemoryWhereMemoryMustHoldNoProgram) {
  const std::string script = "f=/proc/sys/vm/memfd_noexec; [ ! -e $f ] || echo 2 > $f; exec \"$@\"";
  Job job(dir.path(), {"--nproc-per-node=2", "--", COHORT_RANK_PROGRAM},
          {"unshare", "-fp", "--mount-proc", "--kill-child", "sh", "-c", script, "sh"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_in(job.err(), {"process group of 2 ranks over shm"});
  expect_in(job.out(), {"[rank 0] rank 0 of 2: sum 3\n"});
}

TEST_F(RunNetnsTest, APortThatIsTakenOnTheFirstHostIsNamed) {
  Job waiting = node(0, kAddress, {"true"});
  const std::string listens = "ip netns exec " + host('a') + " grep -qi ':733C' /proc/net/tcp6";  // 29500
  std::string not_yet = "never asked";
  for (int i = 0; i < 500 && !not_yet.empty(); ++i) {
    ::usleep(20'000);
    not_yet = run_quietly(listens, dir.path());
  }
  ASSERT_EQ(not_yet, "");
  Job late = node(0, kAddress, {"true"});
  EXPECT_EQ(late.wait(), 1);
  expect_in(late.err(), {"cannot listen on port 29500", "another --master-port, the same on all nodes"});
}

TEST_F(RunNetnsTest, ACableThatIsCutIsNoticedOnBothSides) {
  const std::vector<std::string> quick{
      "--rdzv-conf=timeout=60,keep_alive_interval=0.2,keep_alive_max_attempt=10"};
  const auto program = [&](const char* file) {
    return std::vector<std::string>{"sh", "-c", "touch '" + (dir / file).string() + "'; exec sleep 100"};
  };
  Job first = node(0, kAddress, program("first"), quick),
      second = node(1, kAddress, program("second"), quick);
  ASSERT_TRUE(comes(dir / "first") && comes(dir / "second"));
  ASSERT_EQ(run_quietly("ip -n " + host('a') + " link set wire down", dir.path()), "");
  EXPECT_EQ(first.wait(), 1);
  EXPECT_EQ(second.wait(), 1);
  expect_in(first.err(), {"node 1 has given no sign for"});
  expect_in(second.err(), {"the store that node 0 keeps has not answered for"});
}

}  // namespace
}  // namespace cohort::test
