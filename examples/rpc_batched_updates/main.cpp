// A parameter server updates its model once for the gradients of all trainers, and then answers all their
// calls. After PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions".
//
//   Run:      rpc_batched_updates [STEPS]      or: cohort run --nproc-per-node 4 -- rpc_batched_updates
//   Expect:   a line per 5 steps with a falling loss; then
//             "losses and parameters are those of one process, bit for bit"
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>

#include "cohort/comm/job.h"
#include "cohort/launch/spawn.h"
#include "cohort/optim/factory.h"
#include "cohort/rpc/init.h"

namespace {

namespace optim = cohort::optim;
namespace rpc = cohort::rpc;
using Tensors = std::vector<at::Tensor>;
constexpr std::int64_t kFeatures = 8, kClasses = 4, kBatch = 8, kTrainers = 3;

torch::nn::Linear make_model() {
  torch::manual_seed(1);
  return torch::nn::Linear(kFeatures, kClasses);
}

// A trainer's part of a step: its loss. The gradients are those of the model's parameters then.
double backward(torch::nn::Linear& model, std::int64_t trainer, std::int64_t step) {
  const at::Tensor classes = at::remainder(at::arange(kBatch, at::kLong) + step + trainer, kClasses);
  const at::Tensor waves = at::arange(1, kFeatures + 1, at::kFloat) * (0.7 + 0.05 * double(trainer));
  model->zero_grad();
  const at::Tensor loss = at::cross_entropy_loss(model(at::sin(classes.unsqueeze(1) * waves)), classes);
  loss.backward();
  return loss.item<double>();
}
Tensors gradients_of(const torch::nn::Linear& model) {
  return {model->weight.grad().clone(), model->bias.grad().clone()};
}

// A model and its optimizer.
struct Learner {
  // A step with the mean of the trainers' gradients. It takes them in the order of the trainers, whichever of
  // them called first: so each run has the same bits.
  void step(const std::vector<Tensors>& of_trainers) {
    for (std::size_t i = 0; i < 2; ++i) {
      Tensors parts;
      for (const Tensors& gradients : of_trainers) parts.push_back(gradients.at(i));
      model->parameters().at(i).mutable_grad() = at::stack(parts).mean(0);
    }
    optimizer->step();
  }
  // Copies: what is on its way must not change.
  Tensors parameters() const { return {model->weight.detach().clone(), model->bias.detach().clone()}; }
  torch::nn::Linear model = make_model();
  std::unique_ptr<optim::Optimizer> optimizer =
      optim::make_optimizer({.name = "sgd", .lr = 0.2}, {{.params = model->parameters()}});
};

class ParameterServer {
 public:
  // The updated parameters, once all trainers have called. Meanwhile no thread waits.
  rpc::Future<Tensors> update(std::int64_t trainer, const Tensors& gradients) {
    const std::lock_guard lock(mutex_);
    rpc::Future<Tensors> updated = updated_->future();
    gradients_.at(std::size_t(trainer)) = gradients;
    if (++num_calls_ % kTrainers == 0) {
      learner_.step(gradients_);
      updated_->set_value(learner_.parameters());  // answers the calls of all trainers
      updated_.emplace();                          // for the next step
    }
    return updated;
  }

 private:
  std::mutex mutex_;  // of all below
  Learner learner_;
  std::vector<Tensors> gradients_ = std::vector<Tensors>(kTrainers);
  std::optional<rpc::Promise<Tensors>> updated_{std::in_place};
  std::int64_t num_calls_ = 0;
};

using Outcome = std::pair<std::vector<double>, Tensors>;  // losses, and the parameters in the end
Outcome train(const rpc::RRef<ParameterServer>& server, std::int64_t trainer, std::int64_t steps) {
  torch::nn::Linear model = make_model();
  std::vector<double> losses;
  for (std::int64_t step = 0; step < steps; ++step) {
    losses.push_back(backward(model, trainer, step));
    const Tensors updated = server.rpc_sync<&ParameterServer::update>(trainer, gradients_of(model));
    const at::NoGradGuard no_grad;
    model->weight.copy_(updated.at(0));
    model->bias.copy_(updated.at(1));
  }
  return {losses, {model->weight.detach(), model->bias.detach()}};
}
COHORT_REMOTE(ParameterServer::update);
COHORT_REMOTE(train);

void serve(std::int64_t steps) {
  const auto server = rpc::make_rref(std::make_shared<ParameterServer>());
  std::vector<rpc::Future<Outcome>> calls;
  for (std::int64_t trainer = 0; trainer < kTrainers; ++trainer) {
    const auto whole_run = rpc::to("trainer/" + std::to_string(trainer)).within(std::chrono::hours(1));
    calls.push_back(rpc::rpc_async<train>(whole_run, server, trainer, steps));
  }
  std::vector<Outcome> outcomes;
  for (rpc::Future<Outcome>& call : calls) outcomes.push_back(call.get());
  Learner alone;  // the same in this process
  bool is_same = true;
  for (std::int64_t step = 0; step < steps; ++step) {
    std::vector<Tensors> of_trainers;
    for (const Outcome& outcome : outcomes) {
      const double loss = backward(alone.model, std::ssize(of_trainers), step);
      is_same = is_same && loss == outcome.first.at(std::size_t(step));
      of_trainers.push_back(gradients_of(alone.model));
      if (of_trainers.size() == 1 && step % 5 == 4) std::printf("step %ld  loss %.4f\n", step + 1, loss);
    }
    alone.step(of_trainers);
  }
  for (const Outcome& outcome : outcomes) {
    is_same = is_same && at::equal(outcome.second.at(0), alone.model->weight) &&
              at::equal(outcome.second.at(1), alone.model->bias);
  }
  std::printf("losses and parameters are %sthose of one process, bit for bit\n", is_same ? "" : "NOT ");
  TORCH_CHECK(is_same, "the numbers are not those of one process");
}

void work(std::int64_t steps) {
  const int rank = cohort::comm::job_from_environment().rank;
  rpc::init_rpc(rank == kTrainers ? "server" : "trainer/" + std::to_string(rank));
  if (rank == kTrainers) serve(steps);
  rpc::shutdown();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::int64_t steps = count > 1 ? std::atol(arguments[1]) : 20;
    cohort::launch::spawn_unless_launched([steps](int) { work(steps); }, kTrainers + 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
