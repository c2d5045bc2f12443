// What callers get where a process fails: docs/design/rpc.md, "What can go wrong". w0 is this process and
// calls; w1 is another one, which is killed, stopped, or has no descriptors left. Both over TCP and over
// local sockets. COHORT_FAULTS: how often each fault is injected.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/rref.h"
#include "tests/rpc/faults.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::has_nothing_left;
using test::patience;

constexpr int kFirstDescriptor = 3;  // after those that every process has

std::atomic<int> num_hanging{0}, num_slow{0}, num_losses{0};
void hangs() {
  ++num_hanging;
  const std::stop_token stop = stop_token();
  test::wait_until([&] { return stop.stop_requested(); });
}
int hanging_now() {
  return num_hanging;
}
int takes_a_while(int ms) {
  base::sleep(milliseconds(ms), patience());
  return ++num_slow;
}
at::Tensor tripled(const at::Tensor& x) {
  return x * 3;
}
std::mutex borrowed_mutex;
std::vector<RRef<at::Tensor>> borrowed;
void borrow(const RRef<at::Tensor>& x) {
  const std::lock_guard lock(borrowed_mutex);
  borrowed.push_back(x);
}
// With `has_none` no file can be opened, and no connection be made or taken, until it is false.
void set_descriptors(bool has_none) {
  static rlimit before{};
  if (before.rlim_cur == 0) ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit limit = before;
  if (has_none) limit.rlim_cur = static_cast<rlim_t>(kFirstDescriptor);
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw SystemError("test", "the limit cannot be set");
}
// Here there are no others than those of the agent.
void break_connections() {
  for (int fd = kFirstDescriptor; fd < 1024; ++fd) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0) ::shutdown(fd, SHUT_RDWR);
  }
}

// The connection breaks, and there are no descriptors for another one for so long, or as long as somebody
// waits.
int lose_descriptors(int ms) {
  const std::stop_token stop = stop_token();
  set_descriptors(true);
  break_connections();
  base::poll_until([&] { return stop.stop_requested(); }, base::Deadline(milliseconds(ms)));
  set_descriptors(false);
  return ++num_losses;
}

COHORT_REMOTE(hangs);
COHORT_REMOTE(hanging_now);
COHORT_REMOTE(takes_a_while);
COHORT_REMOTE(tripled);
COHORT_REMOTE(borrow);
COHORT_REMOTE(lose_descriptors);

AgentOptions options_of_faults(const std::string& transport, milliseconds silence) {
  AgentOptions options = test::options_over(transport);
  options.silence = silence;
  return options;
}

// w1: answers until w0 is gone, and says what it saw of that.
TEST(AgentFaultsChild, DISABLED_Worker) {
  test::FolderStore store(std::getenv("TEST_FOLDER"));
  const milliseconds silence(std::atoi(std::getenv("TEST_SILENCE")));
  Agent agent("w1", 1, 2, store, options_of_faults(std::getenv("TEST_TRANSPORT"), silence));
  EXPECT_TRUE(base::poll_until(
      [&] {
        try {
          agent.rpc_sync<hanging_now>("w0");
          return false;
        } catch (const PeerError& error) {
          std::printf("%s\n", error.what());
          return true;
        }
      },
      patience(), milliseconds(50)));
}

struct HangingCall {
  Future<void> result;
  std::string name;  // in messages
};

// w0 and w1.
class TwoProcesses {
 public:
  TwoProcesses(const std::string& transport, milliseconds silence)
      : callee_("AgentFaultsChild", 1,
                {{"TEST_TRANSPORT", transport}, {"TEST_SILENCE", std::to_string(silence.count())}}),
        store_(callee_.folder()),
        agent_(std::make_unique<Agent>("w0", 0, 2, store_, options_of_faults(transport, silence))) {}

  Agent& agent() { return *agent_; }
  /// How messages will name the next call.
  std::string next_call(const char* function) const {
    return base::concat("[rpc.call] ", function, " on w1, call ", agent_->metrics().calls_made + 1, ": ");
  }
  /// A call that w1 handles, and does not answer.
  HangingCall hanging_call() {
    const int before = agent_->rpc_sync<hanging_now>("w1");
    const std::string name = next_call("hangs");
    Future<void> result = agent_->rpc_async<hangs>("w1");
    test::wait_until([&] { return agent_->rpc_sync<hanging_now>("w1") > before; });
    return {std::move(result), name};
  }
  void send(int signal) { callee_.send(0, signal); }
  bool is_stopped() const { return callee_.is_stopped(0); }
  /// The exit status of w1; -1: a signal ended it.
  int wait() { return callee_.wait(seconds(20)).at(0); }
  /// What w1 said.
  std::string output() const { return callee_.output(0); }

 private:
  test::RankProcesses callee_;
  test::FolderStore store_;
  std::unique_ptr<Agent> agent_;
};

class AgentFaultsProcessesTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, AgentFaultsProcessesTest, testing::Values("tcp", "local"),
                         test::name_of_transport);

// Long before its silence is noticed.
TEST_P(AgentFaultsProcessesTest, AKilledCalleeEndsTheCallAndFreesWhatItHeld) {
  constexpr milliseconds kSilence(20'000);
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    TwoProcesses job(GetParam(), kSilence);
    Agent& agent = job.agent();
    {
      const RRef<at::Tensor> there = agent.remote<tripled>("w1", at::ones({2}));
      agent.rpc_sync<borrow>("w1", agent.make_rref(at::ones({2})));
      EXPECT_EQ(agent.metrics().objects.size(), 1U);
      dist_autograd::Context context(agent);
      const at::Tensor y = agent.rpc_sync<tripled>("w1", at::ones({2}).requires_grad_());
      HangingCall call = job.hanging_call();
      const base::Deadline begin(kSilence);
      job.send(SIGKILL);
      COHORT_EXPECT_THROW_WITH(call.result.get(), PeerError, call.name + "w1 died (process ");
      EXPECT_LT(begin.elapsed(), milliseconds(10) + test::deadline_slack());
      EXPECT_TRUE(test::comes_true([&] { return agent.metrics().objects.empty(); })) << "w1 held it";
      COHORT_EXPECT_THROW_WITH(there.to_here(), OwnerLostError, " of w1: w1 died (process ");
      COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y.sum()}), PeerError,
                               "rpc::backward_part on w1, call ");
    }
    EXPECT_TRUE(has_nothing_left(agent));
    EXPECT_NO_THROW(agent.shutdown(base::Deadline(seconds(5)))) << "it does not wait for the dead";
    EXPECT_EQ(job.wait(), -1);
  }
}

// The soonest of several deaths: on a machine that is busy each may be seen later.
TEST_P(AgentFaultsProcessesTest, ADeathOnThisHostIsSeenWithin10Ms) {
  base::Deadline::Clock::duration soonest = seconds(1);
  for (int death = 0; death < 40 && soonest > milliseconds(10); ++death) {
    TwoProcesses job(GetParam(), seconds(20));
    HangingCall call = job.hanging_call();
    const base::Deadline begin(seconds(20));
    job.send(SIGKILL);
    EXPECT_THROW(call.result.get(), PeerError);
    soonest = std::min(soonest, begin.elapsed());
    EXPECT_EQ(job.wait(), -1);
  }
  EXPECT_LE(soonest, milliseconds(10));
}

TEST_P(AgentFaultsProcessesTest, AStoppedCalleeIsGivenUpAfterItsSilence) {
  constexpr milliseconds kSilence(1500), kTime(300);
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    TwoProcesses job(GetParam(), kSilence);
    Agent& agent = job.agent();
    HangingCall call = job.hanging_call();
    job.send(SIGSTOP);
    test::wait_until([&] { return job.is_stopped(); });
    const base::Deadline begin(kSilence);
    const std::string late = job.next_call("hangs");
    COHORT_EXPECT_THROW_WITH(agent.rpc_sync<hangs>(to("w1").within(kTime)), TimeoutError,
                             late + "no answer within 300 ms");
    EXPECT_LT(begin.elapsed(), kTime + test::deadline_slack());
    COHORT_EXPECT_THROW_WITH(call.result.get(), PeerError, call.name + "w1 has been silent for 1500 ms");
    EXPECT_GT(begin.elapsed(), kSilence / 2);
    EXPECT_LT(begin.elapsed(), kSilence + test::deadline_slack());
    EXPECT_TRUE(has_nothing_left(agent));
    job.send(SIGCONT);
    EXPECT_EQ(job.wait(), 0) << job.output();
    EXPECT_TRUE(test::message_contains(job.output(), "w0 has given this process up"));
  }
}

TEST_P(AgentFaultsProcessesTest, ACalleeWithoutDescriptorsConnectsAgainOrIsGivenUp) {
#ifdef COHORT_IS_SANITIZED
  return;  // the sanitizers need descriptors themselves
#endif
  constexpr milliseconds kSilence(1500);
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    TwoProcesses job(GetParam(), kSilence);
    Agent& agent = job.agent();
    EXPECT_EQ(agent.rpc_sync<lose_descriptors>("w1", 200), 1) << "once, over the next connection";
    const std::string name = job.next_call("lose_descriptors");
    const base::Deadline begin(kSilence);
    COHORT_EXPECT_THROW_WITH(agent.rpc_sync<lose_descriptors>("w1", 20'000), PeerError,
                             name + "w1 could not be reached for 1500 ms");
    EXPECT_LT(begin.elapsed(), kSilence + test::deadline_slack());
    EXPECT_TRUE(has_nothing_left(agent));
    EXPECT_EQ(job.wait(), 0) << job.output();
  }
}

TEST_P(AgentFaultsProcessesTest, ACallerWithoutDescriptorsIsReachedAgainOrGivesUp) {
#ifdef COHORT_IS_SANITIZED
  return;  // the sanitizers need descriptors themselves
#endif
  constexpr milliseconds kSilence(1500);
  for (int fault = 0; fault < test::num_faults(); ++fault) {
    TwoProcesses job(GetParam(), kSilence);
    Agent& agent = job.agent();
    set_descriptors(true);
    EXPECT_EQ(agent.rpc_sync<takes_a_while>("w1", 0), 1) << "a connection that is there takes no more";
    Future<int> call = agent.rpc_async<takes_a_while>("w1", 300);
    break_connections();
    base::sleep(milliseconds(200), patience());
    set_descriptors(false);
    EXPECT_EQ(call.get(), 2) << "once, over the next connection";
    HangingCall hanging = job.hanging_call();
    set_descriptors(true);
    const base::Deadline begin(kSilence);
    break_connections();
    COHORT_EXPECT_THROW_WITH(hanging.result.get(), PeerError,
                             hanging.name + "w1 could not be reached for 1500 ms");
    EXPECT_LT(begin.elapsed(), kSilence + test::deadline_slack());
    set_descriptors(false);
    EXPECT_TRUE(has_nothing_left(agent));
    EXPECT_EQ(job.wait(), 0) << job.output();
  }
}

}  // namespace
}  // namespace cohort::rpc
