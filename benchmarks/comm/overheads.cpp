// What Cohort adds to a collective of LibTorch's Gloo: the call through c10d alone, through Group, and
// through Group with every call compared between the ranks (Check::kAlways, what the first steps of a job
// pay). Two ranks, threads of one process over loopback, each variant in turn. Run: OMP_NUM_THREADS=1
// comm_overheads
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "cohort/comm/group.h"

namespace {

using Clock = std::chrono::steady_clock;
namespace comm = cohort::comm;

constexpr int kRounds = 301;

struct Figures {
  double min = 0;
  double median = 0;
  double p99 = 0;
};

Figures figures(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[static_cast<std::size_t>(share * (static_cast<double>(times.size()) - 1))];
  };
  return {times.front(), at(0.5), at(0.99)};
}

struct Variant {
  const char* name;
  comm::Check check;
  std::function<void(comm::Group&, at::Tensor&)> call;
};

const std::vector<Variant>& variants() {
  const auto ours = [](comm::Group& group, at::Tensor& tensor) { group.all_reduce(tensor).wait(); };
  static const std::vector<Variant> all = {{"c10d alone", comm::Check::kOff,
                                            [](comm::Group& group, at::Tensor& tensor) {
                                              std::vector<at::Tensor> list{tensor};
                                              group.process_group()->allreduce(list)->wait();
                                            }},
                                           {"Group", comm::Check::kOff, ours},
                                           {"Group, every call compared", comm::Check::kAlways, ours}};
  return all;
}

// Microseconds per all_reduce of `numel` floats, as rank 0 sees them, for each variant.
std::vector<std::vector<double>> measure(std::int64_t numel, int calls) {
  std::vector<std::vector<double>> times(variants().size());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto rank_body = [&](int rank) {
    std::vector<comm::Group> groups;
    for (std::size_t i = 0; i < variants().size(); ++i) {
      const auto own =
          c10::make_intrusive<c10d::PrefixStore>(std::to_string(numel) + "/" + std::to_string(i), store);
      groups.push_back(
          comm::make_group(own, rank, 2, "gloo", std::chrono::seconds(60), "127.0.0.1", variants()[i].check));
    }
    at::Tensor tensor = at::zeros({numel});
    for (int round = -5; round < kRounds; ++round) {
      for (std::size_t i = 0; i < variants().size(); ++i) {
        variants()[i].call(groups[i], tensor);  // begin together
        const auto begin = Clock::now();
        for (int call = 0; call < calls; ++call) variants()[i].call(groups[i], tensor);
        const std::chrono::duration<double, std::micro> spent = Clock::now() - begin;
        if (rank == 0 && round >= 0) times[i].push_back(spent.count() / calls);
      }
    }
  };
  std::thread other(rank_body, 1);
  rank_body(0);
  other.join();
  return times;
}

}  // namespace

int main() {
  at::set_num_threads(1);
  std::printf("%-52s %10s %10s %10s %9s\n", "all_reduce, 2 ranks, microseconds per call", "min", "median",
              "p99", "ratio");
  for (const std::int64_t numel : {std::int64_t{1}, std::int64_t{16384}, std::int64_t{262144}}) {
    const auto times = measure(numel, numel > 100000 ? 5 : 20);
    const Figures base = figures(times[0]);
    for (std::size_t i = 0; i < times.size(); ++i) {
      const Figures one = figures(times[i]);
      std::printf("%9lld floats, %-36s %10.1f %10.1f %10.1f %8.2fx\n", static_cast<long long>(numel),
                  variants()[i].name, one.min, one.median, one.p99, one.median / base.median);
    }
  }
}
