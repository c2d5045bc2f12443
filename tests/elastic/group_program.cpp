// A rank of an elastic run that calls a group of its generation in each step. Process 1 of the first
// generation kills itself before a call, in which process 0 then waits for it.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <signal.h>

#include <cstdio>
#include <exception>

#include "cohort/elastic/run.h"

namespace {

using namespace cohort;

void make_steps() {
  const std::shared_ptr<elastic::Session> session = elastic::session_of_process();
  at::Tensor parameter = at::zeros({1});
  comm::Group group;
  elastic::RunOptions options;
  options.total_steps = 10;
  options.session = session;
  options.on_enter = [&](const elastic::GenerationInfo&) { group = elastic::make_group(session); };
  const elastic::StateAccess state{
      .save = [&] { return elastic::StateSnapshot{"", {parameter}}; },
      .load = [&](const elastic::StateSnapshot& newest) { parameter = newest.tensors.at(0); }};
  const auto last = elastic::run(options, state, [&](elastic::StepContext& context) {
    const elastic::GenerationInfo& info = context.info();
    if (info.generation == 1 && info.process == 1 && context.step() == 5) ::raise(SIGKILL);
    at::Tensor sum = at::ones({1});
    group.all_reduce(sum).wait();
    context.begin_changes();
    parameter.add_(sum, 1.0 / group.size());
  });
  if (last) std::printf("process %d: %g steps\n", last->process, parameter.item<double>());
}

}  // namespace

int main() {
  try {
    make_steps();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
