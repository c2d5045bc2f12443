#include "cohort/elastic/internal/connections.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/threads/wait.h"
#include "cohort/elastic/session.h"
#include "cohort/membership/net_store.h"
#include "tests/elastic/ring.h"
#include "tests/support/environment.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using test::patience;

/// A port of this host at which connections are made, and nobody says a word: as with a host that is silent.
class SilentPort {
 public:
  SilentPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(socket_.get(), any, size), 0);
    EXPECT_EQ(::getsockname(socket_.get(), any, &size), 0);
    port_ = ntohs(address.sin_port);
  }
  void listen() { EXPECT_EQ(::listen(socket_.get(), 64), 0); }
  /// Waits for connections, and keeps them.
  void accept(std::size_t count) {
    while (accepted_.size() < count) {
      pollfd file{socket_.get(), POLLIN, 0};
      ASSERT_GT(base::wait_for_files({&file, 1}, patience()), 0);
      accepted_.emplace_back(::accept(socket_.get(), nullptr, nullptr));
    }
  }
  std::string address() const { return base::concat("127.0.0.1:", port_); }

 private:
  base::Fd socket_;
  int port_ = 0;
  std::vector<base::Fd> accepted_;
};

// Two members: one with process 0, and one with all num_others.
membership::RankOrder order_of_two(std::uint64_t number, int process, int num_others,
                                   const std::string& store) {
  membership::RankOrder order = test::order_of(number, process, 2);
  order.generation.members.back().num_processes = num_others;
  order.generation.store = store;
  return order;
}

/// A process of some generations.
struct Connected {
  std::shared_ptr<ProcessInbox> inbox = std::make_shared<ProcessInbox>([](membership::MemberId) {});
  Connections connections{inbox};

  void enter(const membership::RankOrder& order) {
    inbox->on_order(order);
    inbox->enter([](const membership::Generation&) {});
  }
  void connect_all(int process) { connections.connect_all(inbox->generation(), process, patience()); }
};

/// Others of generation 1, that are all at one address of another host.
void leave_addresses(const membership::NetStoreServer& store, int num_others, const std::string& remote) {
  membership::NetStore client({.address = store.address()});
  for (int process = 1; process <= num_others; ++process) {
    client.set(base::concat("generation/1/address/", process),
               base::concat(R"({"incarnation":"other )", process,
                            R"(","machine":"elsewhere","local":"","remote":")", remote, R"("})"));
  }
}

void connect_two(Connected& first, const membership::NetStoreServer& store) {
  Connected second;
  second.enter(order_of_two(2, 1, 1, store.address()));
  first.enter(order_of_two(2, 0, 1, store.address()));
  std::thread thread([&] { second.connect_all(1); });
  first.connect_all(0);
  thread.join();
  EXPECT_NE(first.inbox->peer_of(1), nullptr);
}

// A host with many processes has gone silent. An attempt to connect takes five seconds, or 240 where agents
// may be silent for a minute.
TEST(ElasticConnectionsTest, AttemptsForAnEarlierGenerationHoldNobodyBack) {
  for (const char* const silence_ms : {"500", "60000"}) {
    SCOPED_TRACE(silence_ms);
    const test::ScopedEnv silence("COHORT_SILENCE_MS", silence_ms);
    const membership::NetStoreServer store({});
    SilentPort silent;
    silent.listen();
    leave_addresses(store, 24, silent.address());
    Connected first;
    first.enter(order_of_two(1, 0, 24, store.address()));
    std::thread news([&] {
      silent.accept(8);
      first.inbox->on_order(order_of_two(2, 0, 1, store.address()));
    });
    COHORT_EXPECT_THROW_WITH(first.connect_all(0), GenerationEnded, "generation 2 follows");
    news.join();
    const auto begin = std::chrono::steady_clock::now();
    connect_two(first, store);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  }
}

TEST(ElasticConnectionsTest, LinksMayBeSilentForFourTimesAsLongAsAgents) {
  using std::chrono::milliseconds;
  EXPECT_EQ(link_silence_of_process(), milliseconds(2'000));
  const auto with = [](const char* silence) {
    const test::ScopedEnv variable("COHORT_SILENCE_MS", silence);
    return link_silence_of_process();
  };
  EXPECT_EQ(with("100"), milliseconds(2'000));
  EXPECT_EQ(with("500"), milliseconds(2'000));
  EXPECT_EQ(with("10000"), milliseconds(40'000));
  COHORT_EXPECT_THROW_WITH(with("long"), ConfigError, "COHORT_SILENCE_MS");
}

TEST(ElasticConnectionsTest, AttemptsThatHaveEndedAreForgotten) {
  const membership::NetStoreServer store({});
  const SilentPort closed;
  leave_addresses(store, 5, closed.address());
  Connected first;
  first.enter(order_of_two(1, 0, 5, store.address()));
  COHORT_EXPECT_THROW_WITH(first.connect_all(0), GenerationEnded, "nobody listens at");
  EXPECT_EQ(first.connections.num_attempts(), 5U);
  connect_two(first, store);
  EXPECT_LE(first.connections.num_attempts(), 5U);
  test::wait_until([&] {
    membership::RankOrder alone = test::order_of(first.inbox->generation().number + 1, 0, 1);
    alone.generation.store = store.address();
    first.enter(alone);
    first.connect_all(0);
    return first.connections.num_attempts() == 0;
  });
}

}  // namespace
}  // namespace cohort::elastic
