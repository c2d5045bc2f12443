// Where `cohort run` listens, and what it does when the host of node 0 is silent.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/net/listeners.h"

namespace cohort::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Stands before a store: passes on all that a client says, and of the store's answers on each connection the
// first, by which LibTorch's client knows that it is one.
class SilentProxy {
 public:
  explicit SilentProxy(std::uint16_t store)
      : store_(store), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof(address);
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::listen(listener_.get(), 8) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no free port");
    }
    port_ = std::to_string(ntohs(address.sin_port));
    thread_ = std::thread([this] { run(); });
  }
  ~SilentProxy() {
    stop_ = true;
    thread_.join();
  }
  const std::string& port() const { return port_; }
  /// Whether a client has asked something that is not answered.
  bool is_asked() const { return asked_; }

 private:
  struct Connection {
    base::Fd client, store;
    bool has_answered = false;
  };

  void run() {
    std::vector<Connection> connections;
    std::array<char, 4096> buffer{};
    while (!stop_) {
      std::vector<pollfd> files{{listener_.get(), POLLIN, 0}};
      for (const Connection& connection : connections) {
        files.push_back({connection.client.get(), POLLIN, 0});
        files.push_back({connection.store.get(), POLLIN, 0});
      }
      base::wait_for_files(files, base::Deadline(milliseconds(20)));
      for (std::size_t i = 0; i < connections.size(); ++i) {
        Connection& connection = connections[i];
        if (files[2 * i + 1].revents != 0) {
          const ssize_t count = ::recv(connection.client.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
          if (count <= 0) connection.client.close();
          if (count > 0) asked_ = asked_ || connection.has_answered;
          if (count > 0) {
            ::send(connection.store.get(), buffer.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL);
          }
        }
        if (files[2 * i + 2].revents != 0) {
          const ssize_t count = ::recv(connection.store.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
          if (count <= 0) connection.store.close();
          if (count > 0 && !std::exchange(connection.has_answered, true)) {
            ::send(connection.client.get(), buffer.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL);
          }
        }
      }
      if (files[0].revents == 0) continue;
      Connection connection{base::Fd(::accept(listener_.get(), nullptr, nullptr)),
                            base::Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))};
      const sockaddr_in address = loopback(store_);
      ::connect(connection.store.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
      connections.push_back(std::move(connection));
    }
  }

  const std::uint16_t store_;
  base::Fd listener_;
  std::string port_;
  std::atomic<bool> stop_{false}, asked_{false};
  std::thread thread_;
};

class RunSocketsTest : public ::testing::Test {
 protected:
  Job run(std::vector<std::string> flags, const std::string& script) {
    for (const char* word : {"--bind-to=none", "--", "/bin/sh", "-c"}) flags.emplace_back(word);
    flags.push_back("cd \"$FOLDER\"; " + script);
    return Job(dir.path(), std::move(flags));
  }
  Job node(int rank, const std::string& port, const std::string& script,
           const std::string& conf = "timeout=60") {
    return run({"--nnodes=2", "--node-rank=" + std::to_string(rank), "--master-addr=127.0.0.1",
                "--master-port=" + port, "--rdzv-conf=" + conf},
               script);
  }
  // Waits for the first rank's port, and returns where the job listens on it.
  std::vector<std::string> listeners_of_job() {
    if (!comes(dir / "port")) throw std::runtime_error("no rank has come");
    return listeners(static_cast<std::uint16_t>(std::stoi(read_file(dir / "port"))));
  }
  static constexpr const char* kSaysPort =
      "[ $RANK != 0 ] || { echo $MASTER_PORT > port.part; mv port.part port; }; "
      "while [ ! -e go ]; do sleep 0.02; done";

  TempDir dir;
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

TEST_F(RunSocketsTest, OneNodeListensOnLoopbackOnly) {
  Job job = run({}, kSaysPort);
  EXPECT_EQ(listeners_of_job(), std::vector<std::string>{kLoopback});
  write_file(dir / "go", "");
  EXPECT_EQ(job.wait(), 0) << job.err();
}

TEST_F(RunSocketsTest, NodesThatMeetOnOneHostListenOnLoopbackOnly) {
  const std::string port = std::to_string(free_port());
  Job first = node(0, port, kSaysPort), second = node(1, port, kSaysPort);
  EXPECT_EQ(listeners_of_job(), std::vector<std::string>{kLoopback});
  write_file(dir / "go", "");
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
}

TEST_F(RunSocketsTest, ASilentHostOfNode0IsAnErrorAtTheDeadline) {
  const std::uint16_t port = free_port();
  Job first = node(0, std::to_string(port), "true");
  for (int i = 0; i < 1000 && listeners(port).empty(); ++i) ::poll(nullptr, 0, 10);
  const SilentProxy proxy(port);
  const base::Deadline waited(seconds(60));
  Job second = node(1, proxy.port(), "true", "timeout=2");
  EXPECT_EQ(second.wait(), 1);
  EXPECT_LT(waited.elapsed(), seconds(20));
  EXPECT_TRUE(proxy.is_asked());
  expect_in(second.err(), {"node 0 was there, but its store has not answered within "});
}

// Node 2 of 3 has not come when node 0 falls silent.
TEST_F(RunSocketsTest, ANode0ThatFallsSilentDuringTheRendezvousIsAnErrorAtTheDeadline) {
  const std::string port = std::to_string(free_port());
  const auto node_of_three = [&](int rank) {
    return run({"--nnodes=3", base::concat("--node-rank=", rank), "--master-addr=127.0.0.1",
                "--master-port=" + port, "--rdzv-conf=timeout=5"},
               "true");
  };
  Job first = node_of_three(0);
  for (int i = 0; i < 1000 && listeners(static_cast<std::uint16_t>(std::stoi(port))).empty(); ++i) {
    ::poll(nullptr, 0, 10);
  }
  const base::Deadline waited(seconds(60));
  Job second = node_of_three(1);
  ::poll(nullptr, 0, 2500);
  first.worker().signal(SIGSTOP);
  EXPECT_EQ(second.wait(), 1);
  EXPECT_LT(waited.elapsed(), seconds(14));  // 15 s without the deadline
  expect_in(second.err(), {"node 0 was there, but its store has not answered within "});
}

TEST_F(RunSocketsTest, ASignalEndsTheWaitForASilentHost) {
  const std::uint16_t port = free_port();
  Job first = node(0, std::to_string(port), "true");
  for (int i = 0; i < 1000 && listeners(port).empty(); ++i) ::poll(nullptr, 0, 10);
  const SilentProxy proxy(port);
  Job second = node(1, proxy.port(), "true");
  for (int i = 0; i < 1000 && !proxy.is_asked(); ++i) ::poll(nullptr, 0, 10);
  ASSERT_TRUE(proxy.is_asked());
  const base::Deadline waited(seconds(60));
  second.worker().signal(SIGTERM);
  EXPECT_EQ(second.wait(), 128 + SIGTERM);
  EXPECT_LT(waited.elapsed(), seconds(5));
}

}  // namespace
}  // namespace cohort::test
