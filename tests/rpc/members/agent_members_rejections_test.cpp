// A worker that joins a dynamic group, and cannot reach the one that is there: it says so, or is kept out.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/secret.h"
#include "cohort/net/internal/socket.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/members/fake_member.h"
#include "tests/support/comes_true.h"
#include "tests/support/net/certificates.h"
#include "tests/support/processes/log_lines.h"
#include "tests/support/root_test.h"
#include "tests/support/slowdown.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::FakeMember;
using test::MapStore;

// Of a join that lasts as long.
constexpr milliseconds kShortSilence(200 * test::kSlowdown);
constexpr milliseconds kNoPatience(50);  // with a name that is not known

// Answers what each caller says first with the same bytes, and closes.
class RejectingListener {
 public:
  RejectingListener(const std::string& at, std::string answer)
      : answer_(std::move(answer)), listener_(net::listen_at(net::resolve(at), address_)) {
    thread_ = std::thread([this] {
      while (!stops_) reject_next();
    });
  }
  ~RejectingListener() {
    stops_ = true;
    thread_.join();
  }
  const std::string& address() const { return address_; }

 private:
  void reject_next() {
    if (!is_readable(listener_.get(), 10)) return;
    const base::Fd caller = net::accept_from(listener_.get());
    std::array<char, 4096> bytes{};
    if (!caller.is_open() || !is_readable(caller.get(), 1'000)) return;
    static_cast<void>(::recv(caller.get(), bytes.data(), bytes.size(), 0));
    static_cast<void>(::send(caller.get(), answer_.data(), answer_.size(), MSG_NOSIGNAL));
  }
  static bool is_readable(int fd, int timeout_ms) {
    pollfd ready{fd, POLLIN, 0};
    return ::poll(&ready, 1, timeout_ms) == 1;
  }

  const std::string answer_;
  std::string address_;
  base::Fd listener_;
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

class AgentMembersRejectionsTest : public testing::Test {
 protected:
  AgentMembersRejectionsTest() {
    options.num_threads = 2;
    options.silence = milliseconds(10'000);
  }
  // Worker 0 is said to listen there.
  void expect_to_be_kept_out(const std::string& address, const std::string& why) {
    SCOPED_TRACE(why);
    MapStore store;
    FakeMember first("w0", store);
    first.publish(address);
    COHORT_EXPECT_THROW_WITH(Agent("w1", store, options), RendezvousError, why);
    EXPECT_FALSE(store.has("rpc/dynamic/0/gone"));
  }
  static void expect_to_be_kept_out_by(const AgentOptions& first, const AgentOptions& second,
                                       const std::string& why) {
    SCOPED_TRACE(why);
    MapStore store;
    const Agent w0("w0", store, first);
    COHORT_EXPECT_THROW_WITH(Agent("w1", store, second), RendezvousError, why);
    EXPECT_FALSE(store.has("rpc/dynamic/0/gone"));
    EXPECT_EQ(Agent("w1", store, first).workers().size(), 2U);
  }
  AgentOptions options;
};

TEST_F(AgentMembersRejectionsTest, ByAnotherSecretOrCertificateOrTlsOnOneSideAlone) {
  const test::Authority authority, other;
  options.listen = "127.0.0.1:0";
  options.secret = base::Secret::make();
  AgentOptions other_secret = options, tls = options, other_tls = options;
  other_secret.secret = base::Secret::make();
  tls.tls = authority.make_node("w0");
  other_tls.tls = other.make_node("w1");
  expect_to_be_kept_out_by(options, other_secret, "does not know the job's secret");
  expect_to_be_kept_out_by(tls, options, "who listens there uses TLS");
  expect_to_be_kept_out_by(options, tls, "who listens there does not use TLS");
  expect_to_be_kept_out_by(tls, other_tls, "is not accepted");
}

TEST_F(AgentMembersRejectionsTest, ByAnotherVersion) {
  const RejectingListener version_4("127.0.0.1:0", std::string("\4\0", 2));
  expect_to_be_kept_out(version_4.address(), "the other side speaks version 4");
}

// As version 4 does, and a process that has no descriptors, or to which many strangers come.
TEST_F(AgentMembersRejectionsTest, WithoutAReason) {
  options.silence = kShortSilence;
  for (const std::string at : {"127.0.0.1:0", "unix:@cohort-"}) {
    const bool is_local = at.starts_with("unix:");
    const RejectingListener closes(is_local ? at + base::random_word() : at, "");
    expect_to_be_kept_out(closes.address(), "the connection was closed during the handshake");
  }
}

// It may run again. The kernel knows that it is there.
TEST_F(AgentMembersRejectionsTest, ByAProcessOfThisHostThatIsStopped) {
  options.silence = kShortSilence;
  std::string address;
  const base::Fd listener = net::listen_at(net::resolve("unix:@cohort-" + base::random_word()), address);
  expect_to_be_kept_out(address, "cannot connect to " + address);
}

// As a pod whose host's name no name server of this host knows: a second group begins, and the log says why.
TEST_F(AgentMembersRejectionsTest, AWorkerThatIsTakenForDeadIsNamedInTheLog) {
  options.silence = kNoPatience;
  MapStore store;
  FakeMember unknown("ps/0", store);
  unknown.publish("no..host:1");
  const test::LogLines log;
  EXPECT_EQ(Agent("trainer/0", store, options).workers().size(), 1U);
  EXPECT_EQ(Agent("trainer/1", store, options).workers().size(), 1U) << "which need not say it again";
  EXPECT_EQ(log.count(" is taken for dead: "), 1U) << log.text();
  EXPECT_EQ(log.count("trainer/0: ps/0 (worker 0) is taken for dead: "), 1U) << log.text();
  EXPECT_EQ(log.count("no..host:1"), 1U) << log.text();
  EXPECT_EQ(log.count(". If it runs, set AgentOptions::host on that worker, or open its port"), 1U)
      << log.text();
}

TEST_F(AgentMembersRejectionsTest, WhereFewerThanMinWorkersComeTheErrorNamesWhoWasTakenForDead) {
  options.silence = kNoPatience;
  options.min_workers = 2;
  options.join_timeout = kShortSilence;
  MapStore store;
  FakeMember unknown("ps/0", store);
  unknown.publish("no..host:1");
  COHORT_EXPECT_THROW_WITH(Agent("trainer/0", store, options), RendezvousError,
                           "1 of 2 workers came within " + std::to_string(options.join_timeout.count()) +
                               " ms: trainer/0; ps/0 (worker 0) is taken for dead: ");
}

TEST_F(AgentMembersRejectionsTest, AJoinWaitsForMinWorkers) {
  options.min_workers = 2;
  MapStore store;
  std::future<std::unique_ptr<Agent>> joins =
      std::async(std::launch::async, [&] { return std::make_unique<Agent>("w0", store, options); });
  test::wait_until([&] { return store.has("rpc/dynamic/0/entry"); });
  const Agent second("w1", store, options);
  const std::unique_ptr<Agent> first = joins.get();
  EXPECT_EQ(first->workers().size(), 2U);
  EXPECT_EQ(second.workers().size(), 2U);
}

// The system call changes this thread alone.
COHORT_ROOT_TEST_F(AgentMembersRejectionsTest, ByAProcessOfAnotherUser) {
  std::string address;
  base::Fd listener;
  std::thread([&] {
    constexpr uid_t kNobody = 65534;
    ASSERT_EQ(::syscall(SYS_setresuid, kNobody, kNobody, kNobody), 0);
    listener = net::listen_at(net::resolve("unix:@cohort-" + base::random_word()), address);
  }).join();
  expect_to_be_kept_out(address, "a process of another user listens there");
}

TEST_F(AgentMembersRejectionsTest, AWorkerOfAnotherVersionIsNamedInTheLogOfBothSides) {
  MapStore store;
  const Agent first("w0", store, options);
  std::map<std::string, std::string> functions = all_signatures();
  functions.begin()->second = "() -> other";
  FakeMember second("w1", store, functions);
  const test::LogLines log;
  second.join();
  EXPECT_TRUE(log.come_to_have("w0: w1 runs another version of the program")) << log.text();
  std::future<std::size_t> third =
      std::async(std::launch::async, [&] { return Agent("w2", store, options).workers().size(); });
  second.wait_for_message();
  MemberMessage accepted = second.message_of(MemberMessageType::kAccepted);
  accepted.is_ready = true;
  second.answer(accepted);
  second.wait_for_message();
  second.answer(second.message_of(MemberMessageType::kKnown));
  EXPECT_EQ(third.get(), 3U);
  EXPECT_EQ(log.count("w2: w1 runs another version of the program"), 1U) << log.text();
  EXPECT_EQ(log.count("runs another version of the program"), 2U) << log.text();
}

}  // namespace
}  // namespace cohort::rpc
