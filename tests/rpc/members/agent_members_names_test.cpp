// A worker that joins a dynamic group, where the address of the one that is there has a name: what name
// servers say, or do not say, of its host.
#include <gtest/gtest.h>
#include <netdb.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/net/internal/socket.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/members/fake_member.h"
#include "tests/support/gate.h"
#include "tests/support/net/name_lookup.h"
#include "tests/support/slowdown.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace {

constexpr std::string_view kNameOfHost = "worker.test";
enum class NameAnswer : std::uint8_t { kLoopback, kUnknown, kFails, kSilent };

// What is said of the name. The threads that ask may outlive a test.
class NameServer {
 public:
  // Each time the next of the answers, and then the last for ever.
  void set(std::vector<NameAnswer> answers) {
    end_silence();
    const std::lock_guard lock(mutex_);
    answers_ = std::move(answers);
    num_given_ = 0;
    silence_ = std::make_shared<cohort::test::Gate>();
  }
  void end_silence() {
    const std::lock_guard lock(mutex_);
    if (silence_) silence_->open();
  }
  NameAnswer next() {
    std::shared_ptr<cohort::test::Gate> silence;
    NameAnswer answer{};
    {
      const std::lock_guard lock(mutex_);
      answer = answers_.at(num_given_);
      if (num_given_ + 1 < answers_.size()) ++num_given_;
      silence = silence_;
    }
    if (answer == NameAnswer::kSilent) silence->wait();
    return answer;
  }

 private:
  std::mutex mutex_;
  std::vector<NameAnswer> answers_;
  std::size_t num_given_ = 0;
  std::shared_ptr<cohort::test::Gate> silence_;
};
NameServer& name_server() {
  static auto* const server = new NameServer;
  return *server;
}

}  // namespace

// Stands before that of the C library.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(const char* name, const char* service,
                                                                  const addrinfo* hints, addrinfo** found) {
  if (!cohort::test::asks_name_server(name, hints) || name != kNameOfHost)
    return cohort::test::real_getaddrinfo(name, service, hints, found);
  const NameAnswer answer = name_server().next();
  if (answer == NameAnswer::kLoopback) {
    return cohort::test::real_getaddrinfo("127.0.0.1", service, hints, found);
  }
  return answer == NameAnswer::kUnknown ? EAI_NONAME : EAI_AGAIN;
}

namespace cohort::rpc {
namespace {

class AgentMembersNamesTest : public testing::Test {
 protected:
  AgentMembersNamesTest() {
    options.num_threads = 2;
    options.silence = std::chrono::milliseconds(200 * test::kSlowdown);
  }
  ~AgentMembersNamesTest() override { name_server().end_silence(); }

  // Worker 0 is said to listen there.
  void expect_to_be_kept_out(const std::string& address, std::vector<NameAnswer> answers,
                             const std::string& why) {
    SCOPED_TRACE(why);
    MapStore store;
    test::FakeMember first("w0", store);
    first.publish(address);
    name_server().set(std::move(answers));
    COHORT_EXPECT_THROW_WITH(Agent("w1", store, options), RendezvousError, why);
    EXPECT_FALSE(store.has("rpc/dynamic/0/gone"));
  }
  void expect_to_be_alone(const std::string& address, std::vector<NameAnswer> answers) {
    MapStore store;
    test::FakeMember first("w0", store);
    first.publish(address);
    name_server().set(std::move(answers));
    EXPECT_EQ(Agent("w1", store, options).workers().size(), 1U);
    EXPECT_TRUE(store.has("rpc/dynamic/0/gone"));
  }
  static std::string at_port_of(const std::string& address) {
    return std::string(kNameOfHost) + address.substr(address.rfind(':'));
  }

  AgentOptions options;
  // Its connections are never answered, as those to a host that is off.
  std::string unanswered;
  base::Fd listener = net::listen_at(net::resolve("127.0.0.1:0"), unanswered);
};

TEST_F(AgentMembersNamesTest, WhoseNameServerFailsOrIsSilentTakesNobodyForDead) {
  expect_to_be_kept_out("worker.test:1", {NameAnswer::kFails}, "cannot be looked up: Temporary failure");
  expect_to_be_kept_out("worker.test:1", {NameAnswer::kSilent}, "no name server has said where its host is");
}

// That of a container which has ended. Neither the silence nor the last try is as long as a lookup.
TEST_F(AgentMembersNamesTest, AHostThatWasUnknownKeepsNobodyOutWhereLaterLookupsAreLate) {
  expect_to_be_alone("worker.test:1", {NameAnswer::kUnknown, NameAnswer::kSilent});
}

TEST_F(AgentMembersNamesTest, TheLastTryOfASilentHostGivesNameServersTheSilence) {
  expect_to_be_alone(at_port_of(unanswered),
                     {NameAnswer::kLoopback, NameAnswer::kSilent, NameAnswer::kLoopback});
}

}  // namespace
}  // namespace cohort::rpc
