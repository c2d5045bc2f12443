// all_reduce of floats on the ranks of one host: Gloo, shm with tensors of their own and with tensors of
// shared_empty(), through ProcessGroup::allreduce(...)->wait(), side by side in one run; and shm's collective
// itself, without c10d. Ranks are processes, each on a core of its own if there are enough.
//
// Run: comm_all_reduce [ranks, 2 if not given] [largest in MiB, 256] [mpi: under mpirun, Open MPI's too]
//
// "bound": the time that 2 n M bytes take (n ranks, M bytes) at the bandwidth of all cores together, which is
// measured first: what a sum that is read from and written to memory once on each rank cannot beat.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/bench/timeit.h"
#include "cohort/comm/backends/shm/internal/collectives.h"
#include "cohort/comm/backends/shm/internal/communicator.h"
#include "cohort/comm/backends/shm/shm.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/launch/spawn.h"

namespace {

namespace bench = cohort::bench;
namespace comm = cohort::comm;
namespace shm = cohort::comm::shm;

std::string size_text(std::size_t bytes) {
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1 << 10) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

// Bytes read and written a second by all ranks together.
double bandwidth(const comm::Group& group) {
  constexpr std::size_t kBytes = std::size_t{128} << 20;
  const std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes, 0);
  const auto slowest_rank = [&] {
    group.barrier();
    const double own_seconds = bench::seconds_of([&] { std::memcpy(to.data(), from.data(), kBytes); });
    at::Tensor took = at::full({1}, own_seconds, at::kDouble);
    group.all_reduce(took, comm::ReduceOp::MAX).wait();
    return took.item<double>();
  };
  return 2.0 * kBytes * group.size() / bench::sample(slowest_rank, bench::TimeitOptions().rounds(5)).best();
}

struct Variant {
  std::string name;
  comm::Group group;
  bool shared = false;
};

// The ranks begin each call together.
bench::Measurement measure(const Variant& variant, std::int64_t numel, int calls) {
  at::Tensor tensor = variant.shared ? comm::shared_empty({numel}) : at::empty({numel});
  tensor.fill_(1);
  std::vector<at::Tensor> list{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = comm::ReduceOp::MAX;  // the numbers stay as they are
  return bench::sample(
      [&] {
        variant.group.process_group()->barrier()->wait();
        return bench::seconds_of([&] { variant.group.process_group()->allreduce(list, options)->wait(); });
      },
      bench::TimeitOptions().label(variant.name).rounds(calls).warm_up(2));
}

// The collective, spun on by this thread.
bench::Measurement measure_itself(shm::Communicator& ranks, std::size_t numel, int calls) {
  std::vector<float> numbers(numel, 1);
  const auto run = [](shm::Task task) {
    while (!task.advance()) {
    }
  };
  return bench::sample(
      [&] {
        run(shm::barrier(ranks));
        return bench::seconds_of([&] {
          run(shm::all_reduce(ranks, reinterpret_cast<std::byte*>(numbers.data()), numel, comm::Dtype::kFloat,
                              comm::Op::kMax));
        });
      },
      bench::TimeitOptions().label("itself").rounds(calls));
}

void run_rank(std::size_t largest, bool with_mpi) {
  at::set_num_threads(1);
  comm::Group gloo =
      comm::init_process_group({.backend = "gloo", .check_consistency = comm::ConsistencyCheck::kOff});
  const auto& cores = cohort::base::CpuSet::of_process().ids();
  if (static_cast<int>(cores.size()) >= gloo.size()) {
    cohort::base::CpuSet({cores[static_cast<std::size_t>(gloo.rank())]}).pin_current_thread();
  }
  const auto timeout = std::chrono::minutes(1);
  const auto make = [&](const char* backend) {
    return comm::make_group(gloo.store(), gloo.rank(), gloo.size(), backend, timeout, "127.0.0.1",
                            comm::ConsistencyCheck::kOff);
  };
  const comm::Group ours = make("shm");
  std::vector<Variant> variants{{"gloo", gloo}, {"shm", ours}, {"shm, shared", ours, true}};
  if (with_mpi) variants.insert(variants.begin() + 1, {"mpi", make("mpi")});
  comm::StoreAdapter kv_store(gloo.store());
  shm::Communicator alone(kv_store, gloo.rank(), gloo.size(), cohort::base::Deadline(timeout));
  const bool speaks = gloo.rank() == 0;
  const double bytes_per_second = bandwidth(gloo);
  if (speaks) {
    std::printf("%d ranks, one thread each, %zu cores, %s loops, memory %.1f GB/s\n", gloo.size(),
                cores.size(), comm::kernels().name, bytes_per_second * 1e-9);
    std::printf("%8s  %-12s %9s %9s %9s   %7s  %s\n", "bytes", "", "min us", "median", "p99", "x gloo",
                "share of the bound");
  }
  for (std::size_t bytes = 4; bytes <= largest; bytes *= 4) {
    const auto numel = static_cast<std::int64_t>(bytes / 4);
    const int calls = bytes <= 64 << 10 ? 2000 : bytes <= 4 << 20 ? 200 : 20;
    const double bound = 2.0 * gloo.size() * static_cast<double>(bytes) / bytes_per_second;
    double base = 0;
    const auto say = [&](const bench::Measurement& measurement) {
      if (base == 0) base = measurement.median();
      if (!speaks) return;
      std::printf("%8s  %-12s %9.2f %9.2f %9.2f   %6.1fx  %.2f\n", size_text(bytes).c_str(),
                  measurement.label.c_str(), 1e6 * measurement.best(), 1e6 * measurement.median(),
                  1e6 * measurement.percentile(0.99), base / measurement.median(),
                  bound / measurement.median());
      std::fflush(stdout);
    };
    for (const Variant& variant : variants) {
      say(measure(variant, numel, variant.name == "gloo" ? std::min(calls, 300) : calls));
    }
    if (static_cast<int>(cores.size()) >= gloo.size()) {
      say(measure_itself(alone, static_cast<std::size_t>(numel), calls));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::size_t largest = static_cast<std::size_t>(argc > 2 ? std::atoi(argv[2]) : 256) << 20;
  if (argc > 3 && std::string(argv[3]) == "mpi") {
    run_rank(largest, true);
  } else {
    cohort::launch::spawn([&](int) { run_rank(largest, false); }, ranks);
  }
}
