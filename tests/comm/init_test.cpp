#include "cohort/comm/init.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/group.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/net/listeners.h"
#include "tests/support/net/port.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using test::Port;

std::string method_of(std::uint16_t port) {
  return base::concat("tcp://127.0.0.1:", port);
}

// Without a launcher's variables.
class InitTest : public testing::Test {
 private:
  test::ScopedEnv rank_{"RANK", std::nullopt}, world_{"WORLD_SIZE", std::nullopt},
      slurm_{"SLURM_PROCID", std::nullopt}, mpi_{"OMPI_COMM_WORLD_RANK", std::nullopt};
};

std::vector<std::string> join_job(const std::string& method, int size, milliseconds timeout,
                                  const std::function<void(InitOptions&)>& change = {}) {
  std::vector<std::string> outcome(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      InitOptions options{
          .init_method = method, .backend = "gloo", .rank = rank, .world_size = size, .timeout = timeout};
      if (change) change(options);
      try {
        Group group = init_process_group(options);
        at::Tensor t = at::full({1}, rank, at::kInt);
        group.all_reduce(t).wait();
        outcome[static_cast<std::size_t>(rank)] = std::to_string(t.item<int>());
        group.barrier();
      } catch (const std::exception& error) {
        outcome[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

TEST_F(InitTest, AloneWithoutALauncher) {
  Group group = init_process_group();
  EXPECT_EQ(group.size(), 1);
  at::Tensor t = at::ones({3});
  group.all_reduce(t).wait();
  EXPECT_EQ(t.sum().item<float>(), 3);
}

TEST_F(InitTest, JoinsOverTcp) {
  EXPECT_EQ(join_job(method_of(test::free_port()), 3, milliseconds(20000)), std::vector<std::string>(3, "3"));
}

TEST_F(InitTest, WhatMeetsOnThisHostListensOnLoopbackOnly) {
  for (const char* host : {"127.0.0.1"}) {
    const std::uint16_t port = test::free_port();
    InitOptions options{.init_method = base::concat("tcp://", host, ":", port),
                        .backend = "gloo",
                        .rank = 0,
                        .world_size = 2,
                        .timeout = milliseconds(20000)};
    std::thread other([options]() mutable {
      options.rank = 1;
      init_process_group(options).barrier();
    });
    Group group = init_process_group(options);
    EXPECT_EQ(test::listeners(port), std::vector<std::string>{test::kLoopback}) << host;
    group.barrier();
    other.join();
  }
}

// Where the machine has no IPv6 the error says which address.
// As Kubeflow's: rank 0 gets localhost, the others its name.
TEST_F(InitTest, Rank0MayCallItselfLocalhost) {
  const std::uint16_t port = test::free_port();
  const auto outcome = join_job("", 2, milliseconds(20000), [&](InitOptions& options) {
    options.init_method = base::concat("tcp://", *options.rank == 0 ? "localhost" : "127.0.0.2", ":", port);
  });
  EXPECT_EQ(outcome, std::vector<std::string>(2, "1"));
}

TEST_F(InitTest, JoinsOverTcpAtAnAddressOfIpv6) {
  const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;  // and of IPv4: LibTorch takes what it gets
  socklen_t size = sizeof(address);
  const bool here = ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                    ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (here) {
    ASSERT_EQ(::listen(fd, 1), 0);
  }
  const int port = here ? ntohs(address.sin6_port) : 1;
  const std::string method = base::concat("tcp://[::1]:", port);
  COHORT_EXPECT_THROW_WITH(
      init_process_group({.init_method = method, .rank = 0, .world_size = 2, .timeout = milliseconds(500)}),
      RendezvousError, base::concat("rank 0 cannot listen on [::1]:", port, " (rank 0/2, "));
  ::close(fd);
  const auto outcome = join_job(method, 3, here ? milliseconds(20000) : milliseconds(500));
  for (const std::string& text : outcome) {
    if (here) {
      EXPECT_EQ(text, "3");
    } else {
      EXPECT_NE(text.find("[::1]:1"), std::string::npos) << text;
    }
  }
}

TEST_F(InitTest, ATimeoutMayBeAnyTime) {
  constexpr std::chrono::hours kYear(24 * 365);
  for (const char* backend : {"gloo", "shm"}) {
    for (const milliseconds timeout : {milliseconds(std::chrono::hours(24 * 25)), milliseconds(100 * kYear),
                                       milliseconds(300 * kYear), milliseconds::max()}) {
      SCOPED_TRACE(base::concat(backend, ", ", timeout.count(), " ms"));
      const auto change = [&](InitOptions& options) { options.backend = backend; };
      EXPECT_EQ(join_job(method_of(test::free_port()), 2, timeout, change), std::vector<std::string>(2, "1"));
      const test::TempDir dir;
      EXPECT_EQ(join_job("file://" + (dir / "here").string(), 2, timeout, change),
                std::vector<std::string>(2, "1"));
    }
  }
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1)}) {
    COHORT_EXPECT_THROW_WITH(init_process_group({.timeout = timeout}), UsageError, "expected more than 0");
  }
}

TEST_F(InitTest, AutoSaysOnceWhatItPicked) {
  std::vector<std::string> lines;
  base::set_log_sink([&](base::LogLevel level, std::string_view line) {
    if (level == base::LogLevel::kInfo) lines.emplace_back(line);
  });
  for (int round = 0; round < 2; ++round) {
    test::TempDir dir;
    const auto outcome = join_job("file://" + (dir / "m").string(), 2, milliseconds(20000),
                                  [](InitOptions& options) { options.backend = "auto"; });
    EXPECT_EQ(outcome, std::vector<std::string>(2, "1"));
  }
  base::set_log_sink({});
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("process group of 2 ranks over "), std::string::npos) << lines[0];
}

TEST_F(InitTest, MeetsInAFile) {
  test::TempDir dir;
  EXPECT_EQ(join_job("file://" + (dir / "rendezvous").string(), 3, milliseconds(20000)),
            std::vector<std::string>(3, "3"));
}

// Another rank that was stopped in a request, or its host on a shared file system.
TEST_F(InitTest, AFileWhoseLockSomebodyHasIsAnErrorAtTheDeadline) {
  const test::TempDir dir;
  const std::string path = (dir / "rendezvous").string();
  const base::Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::flock(file.get(), LOCK_EX), 0);
  const base::Deadline waited(std::chrono::seconds(60));
  const auto outcome = join_job("file://" + path, 1, milliseconds(500));
  EXPECT_LT(waited.elapsed(), milliseconds(2500));
  test::expect_in(outcome[0],
                  {"rank 0 cannot join the rendezvous in /", "somebody has locked it for 500 ms"});
  ::flock(file.get(), LOCK_UN);
}

TEST_F(InitTest, TheRanksThatDidNotComeAreNamed) {
  const test::TempDir dir;
  for (int attempt = 0;; ++attempt) {
    const InitOptions options{.init_method = base::concat("file://", (dir / "m").string(), attempt),
                              .rank = 1,
                              .world_size = 4,
                              .timeout = milliseconds(500)};
    try {
      init_process_group(options);
      FAIL() << "threw nothing";
    } catch (const RendezvousError& error) {
      EXPECT_TRUE(test::message_contains(error.what(), "ranks 0, 2 and 3 of 4 did not come to "));
      return;
    } catch (const TimeoutError& error) {  // a loaded machine: the file has not answered a request
      ASSERT_LT(attempt, 4) << error.what();
    }
  }
}

TEST_F(InitTest, RanksThatDisagreeAreTold) {
  test::TempDir dir;
  const auto outcome =
      join_job("file://" + (dir / "m").string(), 2, milliseconds(5000), [](InitOptions& options) {
        if (options.rank == 1) options.backend = "fake";
      });
  EXPECT_NE(outcome[0].find("ranks disagree: rank 0 has world size 2, backend gloo"), std::string::npos)
      << outcome[0];
  EXPECT_NE(outcome[0].find("rank 1 has world size 2, backend fake"), std::string::npos) << outcome[0];
}

TEST_F(InitTest, APortThatIsTakenIsNamed) {
  const Port port(Port::Use::kListens);
  InitOptions options{
      .init_method = method_of(port.number()), .rank = 0, .world_size = 2, .timeout = milliseconds(500)};
  COHORT_EXPECT_THROW_WITH(init_process_group(options), RendezvousError,
                           "rank 0 cannot listen on 127.0.0.1:");
}

TEST_F(InitTest, APortOnWhichSomethingElseListensIsNoWaitForEver) {
  const Port port(Port::Use::kListens);  // accepts, and says nothing
  InitOptions options{
      .init_method = method_of(port.number()), .rank = 1, .world_size = 2, .timeout = milliseconds(100)};
  COHORT_EXPECT_THROW_WITH(init_process_group(options), RendezvousError, "something listens on 127.0.0.1:");
}

TEST_F(InitTest, ARendezvousThatNobodyKeepsIsNamed) {
  const Port port(Port::Use::kRejects);
  InitOptions options{
      .init_method = method_of(port.number()), .rank = 1, .world_size = 2, .timeout = milliseconds(500)};
  COHORT_EXPECT_THROW_WITH(init_process_group(options), RendezvousError, "cannot reach rank 0 at 127.0.0.1:");
}

TEST_F(InitTest, WhatCannotBeIsRejected) {
  const auto with = [](const std::string& method) {
    return [method] { init_process_group({.init_method = method, .rank = 0, .world_size = 1}); };
  };
  COHORT_EXPECT_THROW_WITH(with("tcp://nowhere")(), UsageError, "is no address");
  COHORT_EXPECT_THROW_WITH(with("tcp://[::1]:99999")(), UsageError, "is no address");
  COHORT_EXPECT_THROW_WITH(with("file://relative")(), UsageError, "names no absolute path");
  COHORT_EXPECT_THROW_WITH(with("udp://x:1")(), UsageError, "env://, tcp://HOST:PORT or file:///PATH");
  COHORT_EXPECT_THROW_WITH(init_process_group({.rank = 1}), UsageError, "rank and world_size go together");
  COHORT_EXPECT_THROW_WITH(init_process_group({.rank = 2, .world_size = 2}), UsageError,
                           "rank is 2 and world_size 2");
  test::ScopedEnv rank("RANK", "0"), world("WORLD_SIZE", "2"), host("MASTER_ADDR", std::nullopt);
  COHORT_EXPECT_THROW_WITH(init_process_group(), RendezvousError, "MASTER_ADDR is not set");
}

}  // namespace
}  // namespace cohort::comm
