#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "cart_pole.h"
#include "cohort/optim/factory.h"

constexpr std::int64_t kObservers = 2;

/// Says what to do, and learns from the rewards (Williams's REINFORCE). Threads: observers call at the same
/// time.
class PolicyAgent {
 public:
  /// Whether to push to the right: what an observer asks. Each has random numbers of its own: so it does
  /// not matter who asks first.
  bool select_action(std::int64_t observer, const at::Tensor& state) {
    const std::lock_guard lock(mutex_);
    const at::NoGradGuard no_grad;  // finish_episode() computes it again, in a fixed order
    Episode& episode = episodes_.at(std::size_t(observer));
    const bool right = uniform(episode.random) < policy_->forward(state).softmax(0)[1].item<double>();
    episode.states.push_back(state);
    episode.actions.push_back(right);
    return right;
  }
  /// After each step, in the order of the steps.
  void report_reward(std::int64_t observer, double reward) {
    const std::lock_guard lock(mutex_);
    episodes_.at(std::size_t(observer)).rewards.push_back(reward);
  }
  /// Steps the policy with the gradients of all observers' episodes. Returns how many steps these had, in
  /// the mean.
  double finish_episode() {
    const std::lock_guard lock(mutex_);
    at::Tensor loss = torch::zeros({});
    double steps = 0;
    for (Episode& episode : episodes_) {
      for (std::size_t i = episode.rewards.size() - 1; i > 0; --i) {
        episode.rewards[i - 1] += 0.99 * episode.rewards[i];
      }
      steps += double(episode.rewards.size()) / kObservers;
      at::Tensor returns = torch::tensor(episode.rewards, at::kFloat);
      returns = (returns - returns.mean()) / (returns.std() + 1e-9);
      const at::Tensor logs = torch::log_softmax(policy_->forward(at::stack(episode.states)), 1);
      const at::Tensor actions = torch::tensor(episode.actions).unsqueeze(1);
      loss = loss - (logs.gather(1, actions).squeeze(1) * returns).sum();
      episode.states.clear(), episode.actions.clear(), episode.rewards.clear();
    }
    optimizer_->zero_grad();
    loss.backward();
    optimizer_->step();
    return steps;
  }
  std::vector<at::Tensor> parameters() const { return policy_->parameters(); }

 private:
  struct Episode {
    std::mt19937 random;
    std::vector<at::Tensor> states;
    std::vector<std::int64_t> actions;
    std::vector<double> rewards;
  };
  static torch::nn::Sequential make_policy() {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(4, 32), torch::nn::ReLU(), torch::nn::Linear(32, 2));
  }
  std::mutex mutex_;  // of all below
  std::vector<Episode> episodes_{{std::mt19937(1), {}, {}, {}}, {std::mt19937(2), {}, {}, {}}};
  torch::nn::Sequential policy_ = make_policy();
  std::unique_ptr<cohort::optim::Optimizer> optimizer_ =
      cohort::optim::make_optimizer({.name = "adam", .lr = 0.01}, {{.params = policy_->parameters()}});
};
