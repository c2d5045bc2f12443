// What callers get where something beside their calls fails: docs/design/rpc.md, "What can go wrong". The
// workers are agents of this process, over TCP with and without TLS and over local sockets. Processes that
// die, stop or have no descriptors left: agent_faults_processes_test.cpp. COHORT_FAULTS: how often each fault
// is injected.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/init.h"
#include "tests/net/relay.h"
#include "tests/rpc/faults.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/net/certificates.h"
#include "tests/support/patience.h"
#include "tests/support/processes/log_lines.h"
#include "tests/support/ranks.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::has_nothing_left;
using test::Job;
using test::message_contains;
using test::patience;

std::atomic<int> num_echoes{0}, num_at_fault_gate{0};
at::Tensor echo_and_count(const at::Tensor& x) {
  ++num_echoes;
  return x;
}
test::Gate* fault_gate = nullptr;
int pass_fault_gate() {
  const int number = ++num_at_fault_gate;
  fault_gate->wait();
  return number;
}
void hold_at_fault_gate(const at::Tensor&) {
  ++num_at_fault_gate;
  fault_gate->wait();
}
int one_more(int number) {
  return number + 1;
}
at::Tensor scaled_by(const at::Tensor& x, double factor) {
  return x * factor;
}
void cannot_read_file() {
  throw DataError("test.read", "the file is cut off");
}
struct AlwaysFails : torch::autograd::Function<AlwaysFails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*, std::vector<at::Tensor>) {
    throw NumericError("test.backward", "it always fails");
  }
};
at::Tensor always_fails(const at::Tensor& x) {
  return AlwaysFails::apply(x);
}
// On w1: by a call of w2.
at::Tensor always_fails_below(const at::Tensor& x) {
  return test::agent_of("w1").rpc_sync<always_fails>("w2", x * 2);
}

COHORT_REMOTE(echo_and_count);
COHORT_REMOTE(pass_fault_gate);
COHORT_REMOTE(hold_at_fault_gate);
COHORT_REMOTE(one_more);
COHORT_REMOTE(scaled_by);
COHORT_REMOTE(cannot_read_file);
COHORT_REMOTE(always_fails);
COHORT_REMOTE(always_fails_below);

// Workers with higher ids reach w1 by a relay.
class RelayedStore : public test::MapStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    if (!key.ends_with("/join/1")) return MapStore::set(key, value);
    nlohmann::json word = nlohmann::json::parse(value);
    const auto address = word.at("address").get<std::string>();
    relay_ = std::make_unique<test::Relay>(
        address, address.starts_with("unix:") ? "unix:@cohort-" + base::random_word() : "127.0.0.1:0");
    word["address"] = relay_->address();
    MapStore::set(key, word.dump());
  }
  test::Relay& relay() { return *relay_; }

 private:
  std::unique_ptr<test::Relay> relay_;
};

// w1 runs another version of the program.
class OtherProgramStore : public test::MapStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    if (!key.ends_with("/join/1")) return MapStore::set(key, value);
    nlohmann::json word = nlohmann::json::parse(value);
    word.at("functions").erase("one_more");
    word.at("functions")["scaled_by"] = "(Tensor, int64) -> Tensor";
    MapStore::set(key, word.dump());
  }
};

class AgentFaultsTest : public testing::TestWithParam<const char*> {
 protected:
  static AgentOptions options() {
    static const test::Authority authority;
    static const net::TlsOptions files = authority.make_node("worker");
    AgentOptions options = test::options_over(GetParam());
    if (GetParam() == std::string_view("tls")) options.tls = files;
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, AgentFaultsTest, testing::Values("tcp", "tls", "local"),
                         test::name_of_transport);

TEST_P(AgentFaultsTest, ACutConnectionIsMadeAgainAndEachCallRunsOnce) {
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    auto store = std::make_unique<RelayedStore>();
    RelayedStore& relayed = *store;
    Job job(3, options(), std::move(store));
    test::Relay& relay = relayed.relay();
    num_echoes = num_at_fault_gate = 0;
    // In mid-frame: of the argument, and of the result.
    const at::Tensor large = at::arange(2 << 20, at::kFloat);  // 8 MB
    for (const std::int64_t num_bytes : {1'000'000, 9'500'000}) {
      relay.cut_after(num_bytes + fault * 10'007);
      EXPECT_TRUE(at::equal(job[2].rpc_sync<echo_and_count>(to("w1").within(seconds(10)), large), large))
          << num_bytes;
    }
    EXPECT_EQ(num_echoes, 2);
    // In mid-call.
    test::Gate gate;
    fault_gate = &gate;
    Future<int> call = job[2].rpc_async<pass_fault_gate>("w1");
    test::wait_until([] { return num_at_fault_gate == 1; });
    const int num_before = relay.num_connections();
    relay.cut();
    EXPECT_TRUE(test::comes_true([&] { return relay.num_connections() > num_before; }));
    gate.open();
    EXPECT_EQ(call.get(), 1);
    EXPECT_GE(relay.num_connections(), 4);
    for (std::size_t id = 0; id < 3; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
    job.shutdown();
  }
}

// Ends the local sockets of this process, and returns how many: the other end may be closed by then. The
// memory beside them stays as it is.
int cut_local_sockets() {
  int num_cut = 0;
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 || peer.ss_family != AF_UNIX)
      continue;
    if (::shutdown(fd, SHUT_RDWR) == 0) ++num_cut;
  }
  return num_cut;
}

// Through the relay no descriptor passes, so its workers share no memory. These do: some calls go through the
// ring, which is smaller than they are together, others by handle.
TEST(AgentRingFaultsTest, ALinkInSharedMemoryThatIsCutIsMadeAgainAndEachCallRunsOnce) {
  Job job(2);
  std::mt19937 random(1);
  constexpr int kCalls = 60;
  for (int round = 0; round < 20 * test::num_faults(); ++round) {
    num_echoes = 0;
    std::vector<at::Tensor> arguments;
    std::vector<Future<at::Tensor>> results;
    const auto cut_at = static_cast<std::size_t>(random() % kCalls);
    while (arguments.size() < kCalls) {
      const bool is_long = arguments.size() % 10 == 9;
      const auto size = static_cast<std::int64_t>(is_long ? 1 << 20 : 1 + random() % 8192);
      arguments.push_back(at::full({size}, static_cast<float>(arguments.size())));
      results.push_back(job[0].rpc_async<echo_and_count>(to("w1").within(seconds(20)), arguments.back()));
      if (arguments.size() == cut_at + 1) EXPECT_GE(cut_local_sockets(), 1) << "round " << round;
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(at::equal(results[i].get(), arguments[i])) << "round " << round << ", call " << i;
    }
    EXPECT_EQ(num_echoes, kCalls) << "round " << round;
  }
  EXPECT_EQ(job[0].metrics().traffic.at(0).transport, "shared memory");
  for (std::size_t id = 0; id < 2; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
  job.shutdown();
}

TEST_P(AgentFaultsTest, CallsToASlowReaderEndAtTheirDeadlines) {
  constexpr milliseconds kTime(700);
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    AgentOptions slow = options();
    slow.num_threads = 1;
    Job job(2, slow);
    test::Gate gate;
    fault_gate = &gate;
    num_at_fault_gate = 0;
    const at::Tensor megabyte = at::zeros({1 << 20}, at::kByte);
    const base::Deadline begin(kTime);
    std::vector<Future<void>> calls;
    for (int i = 0; i < 80; ++i) {
      calls.push_back(job[0].rpc_async<hold_at_fault_gate>(to("w1").within(kTime), megabyte));
    }
    // Before they end: a call that has not begun then gives its room back.
    const AgentMetrics full = job[0].metrics();
    EXPECT_GT(full.messages_queued, 0U);
    EXPECT_LE(full.bytes_on_the_way, std::uint64_t{64} << 20);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      COHORT_EXPECT_THROW_WITH(
          calls[i].get(), TimeoutError,
          base::concat("hold_at_fault_gate on w1, call ", i + 1, ": no answer within 700 ms"));
    }
    EXPECT_LT(begin.elapsed(), kTime + test::deadline_slack());
    EXPECT_EQ(job[1].rpc_sync<one_more>("w0", 1), 2) << "the other way is free";
    gate.open();
    EXPECT_EQ(job[0].rpc_sync<one_more>("w1", 1), 2);
    for (std::size_t id = 0; id < 2; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
    EXPECT_EQ(num_at_fault_gate, 1) << "nobody waited for the others any more";
    job.shutdown();
  }
}

TEST_P(AgentFaultsTest, AnExceptionInABackwardTwoCallsBelowNamesTheWayAndLeavesNothing) {
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    AgentOptions patient = options();
    patient.timeout = seconds(20);
    Job job(3, patient);
    {
      const at::Tensor x = at::ones({2}).requires_grad_();
      dist_autograd::Context context(job[0]);
      const at::Tensor good = job[0].rpc_sync<scaled_by>("w1", x, 2.0),
                       bad = job[0].rpc_sync<always_fails_below>("w1", x);
      const base::Deadline begin(patient.timeout);
      std::string text;
      try {
        dist_autograd::backward(context, {(good + bad).sum()});
      } catch (const NumericError& error) {
        text = error.what();
      }
      EXPECT_LT(begin.elapsed(), patient.timeout / 4) << "an error needs no deadline";
      for (const char* part :
           {"rpc::backward_part on w1, call ", ": [rpc.call] rpc::backward_part on w2, call ",
            ": [test.backward] it always fails"}) {
        EXPECT_TRUE(message_contains(text, part));
      }
    }
    for (std::size_t id = 0; id < 3; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
    job.shutdown();
  }
}

TEST_P(AgentFaultsTest, AnExceptionInAHandlerNamesWorkerAndCallAndLeavesNothing) {
  Job job(2, options());
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    const std::uint64_t next_call = job[0].metrics().calls_made + 1;
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<cannot_read_file>("w1"), DataError,
                             base::concat("cannot_read_file on w1, call ", next_call, ": "));
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<cannot_read_file>("w1"), DataError,
                             "[test.read] the file is cut off");
    EXPECT_EQ(job[0].rpc_sync<one_more>("w1", fault), fault + 1);
    for (std::size_t id = 0; id < 2; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
  }
  job.shutdown();
}

TEST_P(AgentFaultsTest, AnotherVersionOfTheProgramIsAnErrorAtTheCall) {
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    const test::LogLines log;
    Job job(2, options(), std::make_unique<OtherProgramStore>());
    // w1 has read the same words of itself. A function that it lacks may never be called.
    EXPECT_EQ(log.count("runs another version of the program"), 1U) << log.text();
    EXPECT_EQ(log.count("w0: w1 runs another version of the program, and calls of these functions will fail: "
                        "scaled_by: here (Tensor, float64) -> Tensor, there (Tensor, int64) -> Tensor"),
              1U)
        << log.text();
    COHORT_EXPECT_THROW_WITH(job[0].rpc_async<one_more>("w1", 1), UsageError,
                             "w1 has no function one_more: here (int32) -> int32");
    const char* const other =
        "w1 has another function scaled_by: here (Tensor, float64) -> Tensor, there (Tensor, int64) -> "
        "Tensor";
    const at::Tensor x = at::ones({2});
    COHORT_EXPECT_THROW_WITH(job[0].rpc_async<scaled_by>("w1", x, 2.0), UsageError, other);
    COHORT_EXPECT_THROW_WITH(job[0].remote<scaled_by>("w1", x, 2.0), UsageError, other);
    EXPECT_EQ(job[0].metrics().calls_made, 0U);
    EXPECT_TRUE(at::equal(job[0].rpc_sync<echo_and_count>("w1", x), x)) << "both have it";
    EXPECT_EQ(job[1].rpc_sync<one_more>("w0", 1), 2);
    for (std::size_t id = 0; id < 2; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
    job.shutdown();
  }
}

TEST_P(AgentFaultsTest, AnArgumentOf100MegabytesComesBackWhileSmallCallsRun) {
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    AgentOptions with_rings = options();
    with_rings.shared_cache = 0;  // by handle it would be there at once
    Job job(2, with_rings);
    const at::Tensor large = at::arange(25'000'000, at::kFloat);
    Future<at::Tensor> echo = job[0].rpc_async<echo_and_count>("w1", large);
    int num_small = 0;
    while (!echo.ready()) {
      ASSERT_EQ(job[0].rpc_sync<one_more>(to("w1").within(seconds(10)), num_small), num_small + 1);
      ASSERT_EQ(job[1].rpc_sync<one_more>(to("w0").within(seconds(10)), num_small), num_small + 1);
      ++num_small;
    }
    EXPECT_TRUE(at::equal(echo.get(), large));
    EXPECT_GE(num_small, 1) << "they pass the reply, not the argument, which takes the window";
    for (std::size_t id = 0; id < 2; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
    job.shutdown();
  }
}

TEST_P(AgentFaultsTest, ShutdownNamesTheCallThatRunsOnBothSides) {
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    Job job(2, options());
    test::Gate gate;
    fault_gate = &gate;
    num_at_fault_gate = 0;
    Future<int> call = job[0].rpc_async<pass_fault_gate>("w1");
    test::wait_until([] { return num_at_fault_gate == 1; });
    const base::Deadline begin(milliseconds(400));
    COHORT_EXPECT_THROW_WITH(job[0].shutdown(base::Deadline(milliseconds(200))), TimeoutError,
                             "pass_fault_gate on w1, call 1, which is not answered");
    COHORT_EXPECT_THROW_WITH(job[1].shutdown(base::Deadline(milliseconds(200))), TimeoutError,
                             "the handler of call 1 of w0");
    EXPECT_LT(begin.elapsed(), milliseconds(400) + test::deadline_slack());
    gate.open();
    EXPECT_EQ(call.get(), 1);
    for (std::size_t id = 0; id < 2; ++id) EXPECT_TRUE(has_nothing_left(job[id]));
    job.shutdown();
  }
}

TEST_P(AgentFaultsTest, ASecondThreadInShutdownHasADeadlineOfItsOwn) {
  Job job(2, options());
  std::thread first([&] { job[0].shutdown(patience()); });
  const base::Deadline begin(milliseconds(200));
  COHORT_EXPECT_THROW_WITH(job[0].shutdown(base::Deadline(milliseconds(200))), TimeoutError,
                           "w1, which has not come to shutdown()");
  EXPECT_LT(begin.elapsed(), milliseconds(200) + test::deadline_slack());
  job[1].shutdown(patience());
  first.join();
}

TEST_P(AgentFaultsTest, CallsThatAreMadeDuringShutdownAreAnsweredOrFail) {
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    Job job(2, options());
    std::atomic<int> num_answers{0};
    std::string text;
    std::thread caller([&] {
      try {
        while (true) {
          job[0].rpc_sync<one_more>("w1", 1);
          ++num_answers;
          base::sleep(milliseconds(1), patience());
        }
      } catch (const std::exception& error) {
        text = error.what();
      }
    });
    test::wait_until([&] { return num_answers > 2; });
    job.shutdown();
    caller.join();
    EXPECT_TRUE(message_contains(text, "one_more on w1, call "));
    EXPECT_TRUE(message_contains(text, ": this agent has been stopped") ||
                message_contains(text, ": w1 has left"))
        << text;
    EXPECT_EQ(job[0].metrics().calls_pending + job[1].metrics().calls_unanswered, 0U);
  }
}

TEST(AgentShutdownTest, TheProcessAgentIsShutDownByTwoThreadsWhileAnotherCalls) {
  test::run_ranks(1, "gloo", [](comm::Group& group) {
    COHORT_EXPECT_THROW_WITH(shutdown(seconds(1)), UsageError, "this process has no agent");
    for (int round = 0; round < 10 * test::num_faults(); ++round) {
      RpcOptions options;
      options.group = group;
      init_rpc("alone", options);
      std::atomic<int> num_answers{0};
      std::thread caller([&] {
        try {
          while (true) {
            rpc_sync<one_more>("alone", 1);
            ++num_answers;
            base::sleep(milliseconds(1), patience());
          }
        } catch (const UsageError&) {  // there is no agent any more
        }
      });
      test::wait_until([&] { return num_answers > 0; });
      std::vector<std::thread> threads;
      for (int i = 0; i < 2; ++i) threads.emplace_back([] { EXPECT_NO_THROW(shutdown(seconds(30))); });
      for (std::thread& thread : threads) thread.join();
      caller.join();
      COHORT_EXPECT_THROW_WITH(agent(), UsageError, "this process has no agent");
      EXPECT_NO_THROW(shutdown(seconds(1))) << "again";
    }
  });
}

}  // namespace
}  // namespace cohort::rpc
