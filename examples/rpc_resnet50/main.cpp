// ResNet-50 in two shards on two workers, trained by a third one. A batch is split into micro-batches, so
// that both shards work at the same time. After "Distributed pipeline parallelism using RPC", one of
// PyTorch's tutorials.
//
//   Run:      rpc_resnet50 [IMAGES [SIZE [STEPS [SPLITS]]]]
//             or: cohort run --nproc-per-node 3 -- rpc_resnet50
//   Expect:   a line for "splits 1", "splits 2", "splits 4" and "splits 8" with the seconds of a step and the
//             losses of the first and the last step; each ends with "numbers are those of one process, bit
//             for bit": losses, parameters, and the running statistics of batch norm. The first step is not
//             timed. With SPLITS: only these, to measure, and nothing is compared
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "cohort/comm/job.h"
#include "cohort/launch/spawn.h"
#include "cohort/rpc/remote_module.h"
#include "trainers.h"

namespace {

namespace rpc = cohort::rpc;

COHORT_REMOTE(make_shard);
COHORT_REMOTE_MODULE(ShardImpl);
COHORT_REMOTE(ShardImpl::statistics);

Batch make_batch(std::int64_t images, std::int64_t size, std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + step));
  return {at::randn({images, 3, size, size}),
          at::one_hot(at::randint(kClasses, {images}, at::kLong), kClasses).to(at::kFloat)};
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// IMAGES, SIZE, STEPS, and SPLITS or 0.
using Numbers = std::array<std::int64_t, 4>;

void train(const Numbers& numbers) {
  const auto& [images, size, steps, only] = numbers;
  Remote remote;
  Alone alone;
  bool all_same = true;
  for (const std::int64_t splits : {1, 2, 4, 8}) {
    if (only != 0 && splits != only) continue;
    double seconds = 0, seconds_alone = 0, losses[2]{};  // losses of the first step and of the last
    bool is_same = true;
    for (std::int64_t step = 0; step < steps; ++step) {
      const Batch batch = make_batch(images, size, step);
      const auto begin = Clock::now();
      const double loss = losses[step > 0] = remote.step(batch, splits);
      const bool is_timed = step > 0 || steps == 1;
      if (is_timed) seconds += seconds_since(begin);
      if (only != 0) continue;
      const auto begin_alone = Clock::now();
      is_same = alone.step(batch, splits) == loss && is_same;
      if (is_timed) seconds_alone += seconds_since(begin_alone);
    }
    const double timed = double(std::max<std::int64_t>(steps - 1, 1));
    std::printf("splits %ld  %.3f s a step, loss %.6f to %.6f", long(splits), seconds / timed, losses[0],
                losses[steps > 1]);
    if (only != 0) {
      std::printf("\n");
      continue;
    }
    const State there = remote.state(), here = alone.state();
    is_same = is_same && there.size() == here.size();
    for (std::size_t i = 0; is_same && i < here.size(); ++i) is_same = at::equal(there[i], here[i]);
    std::printf("; in one process %.3f s; numbers are %sthose of one process, bit for bit\n",
                seconds_alone / timed, is_same ? "" : "NOT ");
    all_same = all_same && is_same;
  }
  TORCH_CHECK(all_same, "the numbers are not those of one process");
}

void work(const Numbers& numbers) {
  const int rank = cohort::comm::job_from_environment().rank;
  rpc::RpcOptions options;
  // One micro-batch at a time: the other shard gets what is done while the next one runs.
  if (rank != 0) options.agent.num_threads = 1;
  rpc::init_rpc(rank == 0 ? "trainer/0" : "shard/" + std::to_string(rank), options);
  if (rank == 0) train(numbers);
  rpc::shutdown();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    Numbers numbers{120, 128, 3, 0};
    for (int i = 1; i < std::min(count, 5); ++i) numbers.at(std::size_t(i - 1)) = std::atol(arguments[i]);
    cohort::launch::spawn_unless_launched([&](int) { work(numbers); }, 3);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
