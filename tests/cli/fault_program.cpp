// A rank that sums with the others for ever, until it does what it was asked to: FAULT RANK STEP
// BACKEND.
#include <ATen/ATen.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>

#include "cohort/comm/group.h"
#include "cohort/launch/error_file.h"

namespace {

void inject(const std::string& fault, cohort::comm::Group& group, at::Tensor& sum) {
  std::ofstream("injected") << group.rank();
  if (fault == "sigkill") ::raise(SIGKILL);
  if (fault == "sigstop") ::raise(SIGSTOP);
  if (fault == "exit") std::_Exit(3);
  if (fault == "exception") throw std::runtime_error("a mistake on purpose");
  if (fault == "shape") sum = at::ones({999}, at::kFloat);
  if (fault == "collective") group.broadcast(sum, 0).wait();
}

int run(const std::string& fault, int rank, int step, const std::string& backend) {
  if (fault == "missing" && std::to_string(rank) == std::getenv("RANK")) {
    std::ofstream("injected") << rank;
    ::sleep(60);
  }
  auto group = cohort::comm::init_process_group({.backend = backend, .timeout = std::chrono::seconds(4)});
  for (int i = 0; i < 100'000'000; ++i) {
    at::Tensor sum = at::ones({1000}, at::kFloat);
    if (i == step && group.rank() == rank) inject(fault, group, sum);
    group.all_reduce(sum).wait();
  }
  return 0;
}

}  // namespace

int main(int, char** argv) {
  try {
    return run(argv[1], std::atoi(argv[2]), std::atoi(argv[3]), argv[4]);
  } catch (const std::exception& error) {
    cohort::launch::record_error(error.what());
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
