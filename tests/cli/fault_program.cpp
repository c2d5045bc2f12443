// A rank that works with the others for ever, until it does what it was asked to: FAULT RANK STEP BACKEND
// MOMENT. Moment "collective": it sums, and the fault comes between two sums. "backward": it trains with DDP,
// and the fault comes in the middle of a backward, while buckets travel.
#include <ATen/ATen.h>
#include <signal.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <string>

#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/launch/error_file.h"
#include "cohort/parallel/distributed.h"

namespace {

struct Fault {
  std::string name;
  int rank;
  int step;
};

void inject(const Fault& fault, cohort::comm::Group& group, int step) {
  if (group.rank() != fault.rank || step != fault.step) return;
  std::ofstream("injected") << group.rank();
  if (fault.name == "sigkill") ::raise(SIGKILL);
  if (fault.name == "sigstop") ::raise(SIGSTOP);
  if (fault.name == "exit") std::_Exit(3);
  if (fault.name == "exception") throw std::runtime_error("a mistake on purpose");
  at::Tensor sum = at::ones({fault.name == "shape" ? 999 : 1000});
  if (fault.name == "shape") group.all_reduce(sum).wait();
  if (fault.name == "collective") group.broadcast(sum, 0).wait();
}

[[noreturn]] void sum(cohort::comm::Group& group, const Fault& fault) {
  for (int step = 0;; ++step) {
    inject(fault, group, step);
    at::Tensor ones = at::ones({1000});
    group.all_reduce(ones).wait();
  }
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::function<void()> in_backward) : in_backward(std::move(in_backward)) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor middle = second->forward(first->forward(x));
    middle.register_hook([this](const at::Tensor& /*gradient*/) { in_backward(); });
    return fourth->forward(third->forward(middle));
  }
  torch::nn::Linear layer(const char* name, int from, int to) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(false)));
  }
  const std::function<void()> in_backward;
  torch::nn::Linear first = layer("first", 25, 40), second = layer("second", 40, 25);
  torch::nn::Linear third = layer("third", 25, 40), fourth = layer("fourth", 40, 25);
};
TORCH_MODULE(Net);

[[noreturn]] void train(cohort::comm::Group& group, const Fault& fault) {
  int step = 0;
  cohort::parallel::DistributedOptions options;
  // Each gradient, 1,000 floats, goes alone, from the first step to the last.
  options.first_bucket_bytes = options.bucket_cap_bytes = 1;
  options.plan = cohort::parallel::BucketPlan::kDefinition;
  cohort::parallel::DistributedDataParallel<Net> model(Net([&] { inject(fault, group, step); }), group,
                                                       options);
  for (;; ++step) {
    model->zero_grad();
    model.forward(at::ones({4, 25})).sum().backward();
  }
}

void run(const Fault& fault, const std::string& backend, const std::string& moment) {
  if (fault.name == "missing" && std::to_string(fault.rank) == std::getenv("RANK")) {
    std::ofstream("injected") << fault.rank;
    ::sleep(60);
  }
  // Ranks need not begin within a few seconds of each other, where the fault does not end at the deadline.
  const bool ends_at_deadline = fault.name == "sigstop" || fault.name == "missing";
  auto group =
      cohort::comm::init_process_group({.backend = backend,
                                        .timeout = std::chrono::seconds(ends_at_deadline ? 4 : 60),
                                        .check_consistency = cohort::comm::ConsistencyCheck::kAlways});
  if (moment == "backward") train(group, fault);
  sum(group, fault);
}

}  // namespace

int main(int, char** argv) {
  try {
    run({.name = argv[1], .rank = std::atoi(argv[2]), .step = std::atoi(argv[3])}, argv[4], argv[5]);
  } catch (const std::exception& error) {
    cohort::launch::record_error(error.what());
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
