// One rank of a job, whoever starts it: all ranks sum their numbers.
#include <ATen/ATen.h>

#include <cstdio>
#include <exception>

#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/launch/error_file.h"

int main() {
  try {
    auto group = cohort::comm::init_process_group({.timeout = std::chrono::seconds(60)});
    at::Tensor sum = at::full({1}, group.rank() + 1, at::kFloat);
    group.all_reduce(sum).wait();
    std::printf("rank %d of %d: sum %g\n", group.rank(), group.size(), sum.item<double>());
    group.barrier();
    return 0;
  } catch (const std::exception& error) {
    cohort::launch::record_error(error.what());
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
