// Observers balance poles on carts. An agent on another worker tells them what to do, and learns from what
// happens. After PyTorch's tutorial "Getting Started with Distributed RPC Framework".
//
//   Run:      rpc_reinforcement [EPISODES]      or: cohort run --nproc-per-node 3 -- rpc_reinforcement
//   Expect:   a line per 10 episodes; then "the poles stand longer than in the beginning" and
//             "steps and parameters are those of one process, bit for bit"
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "cart_pole.h"
#include "cohort/comm/job.h"
#include "cohort/launch/spawn.h"
#include "cohort/rpc/init.h"
#include "policy_agent.h"

namespace {

namespace rpc = cohort::rpc;

constexpr std::int64_t kPart = 10;

class Observer {
 public:
  explicit Observer(std::int64_t id) : id_(id), game_(id) {}
  void run_episode(const rpc::RRef<PolicyAgent>& agent) {
    const rpc::RRef<PolicyAgent> in_order = agent.in_order("rewards");  // so it need not wait for each
    std::vector<rpc::Future<void>> reports;
    const auto select = [&](const at::Tensor& state) {
      return agent.rpc_sync<&PolicyAgent::select_action>(id_, state);
    };
    game_.play(select, [&](double reward) {
      reports.push_back(in_order.rpc_async<&PolicyAgent::report_reward>(id_, reward));
    });
    rpc::wait_all(reports);
  }

 private:
  const std::int64_t id_;
  CartPole game_;
};
COHORT_REMOTE(PolicyAgent::select_action);
COHORT_REMOTE(PolicyAgent::report_reward);
COHORT_REMOTE(rpc::make<Observer, std::int64_t>);
COHORT_REMOTE(Observer::run_episode);

// The same episode in this process.
double run_alone(PolicyAgent& agent, std::vector<CartPole>& games) {
  for (std::int64_t id = 0; id < kObservers; ++id) {
    const auto select = [&](const at::Tensor& state) { return agent.select_action(id, state); };
    games.at(std::size_t(id)).play(select, [&](double reward) { agent.report_reward(id, reward); });
  }
  return agent.finish_episode();
}

void train(std::int64_t episodes) {
  const auto agent = std::make_shared<PolicyAgent>();
  const auto rref = rpc::make_rref(agent);
  std::vector<rpc::RRef<Observer>> observers;
  for (std::int64_t id = 0; id < kObservers; ++id) {
    const std::string worker = "observer/" + std::to_string(id);
    observers.push_back(rpc::remote<&rpc::make<Observer, std::int64_t>>(worker, id));
  }
  PolicyAgent alone;
  std::vector<CartPole> games{CartPole(0), CartPole(1)};
  bool is_same = true;
  double first = 0, last = 0, sum = 0;  // steps of kPart episodes
  for (std::int64_t episode = 1; episode <= episodes; ++episode) {
    std::vector<rpc::Future<void>> calls;
    for (const auto& observer : observers) {
      calls.push_back(observer.rpc_async<&Observer::run_episode>(rref));
    }
    rpc::wait_all(calls);
    const double steps = agent->finish_episode();
    is_same = is_same && steps == run_alone(alone, games);
    sum += steps;
    if (episode % kPart != 0) continue;
    last = std::exchange(sum, 0);
    if (episode == kPart) first = last;
    std::printf("episode %ld  mean steps %.1f\n", long(episode), last / kPart);
  }
  const std::vector<at::Tensor> learned = agent->parameters(), expected = alone.parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) is_same = is_same && at::equal(learned[i], expected[i]);
  std::printf("the poles stand %slonger than in the beginning\n", last > first ? "" : "no ");
  std::printf("steps and parameters are %sthose of one process, bit for bit\n", is_same ? "" : "NOT ");
  TORCH_CHECK(is_same, "the numbers are not those of one process");
}

void work(std::int64_t episodes) {
  const int rank = cohort::comm::job_from_environment().rank;
  rpc::init_rpc(rank == 0 ? "agent" : "observer/" + std::to_string(rank - 1));
  if (rank == 0) train(episodes);
  rpc::shutdown();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::int64_t episodes = count > 1 ? std::atol(arguments[1]) : 40;
    cohort::launch::spawn_unless_launched([episodes](int) { work(episodes); }, kObservers + 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
