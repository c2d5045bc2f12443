// What Cohort adds to a collective of LibTorch's Gloo: the call through c10d alone, through Group, and
// through Group with every call compared between the ranks (ConsistencyCheck::kAlways, what the first steps
// of a job pay). Two ranks, threads of one process over loopback, each variant in turn. Run:
// OMP_NUM_THREADS=1 comm_overheads [ROUNDS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/comm/group.h"

namespace {

namespace bench = cohort::bench;
namespace comm = cohort::comm;

struct Way {
  const char* name;
  comm::ConsistencyCheck check;
  std::function<void(comm::Group&, at::Tensor&)> call;
};

const std::vector<Way>& ways() {
  const auto ours = [](comm::Group& group, at::Tensor& tensor) { group.all_reduce(tensor).wait(); };
  static const std::vector<Way> all = {{"c10d alone", comm::ConsistencyCheck::kOff,
                                        [](comm::Group& group, at::Tensor& tensor) {
                                          std::vector<at::Tensor> list{tensor};
                                          group.process_group()->allreduce(list)->wait();
                                        }},
                                       {"Group", comm::ConsistencyCheck::kOff, ours},
                                       {"Group, every call compared", comm::ConsistencyCheck::kAlways, ours}};
  return all;
}

// An all_reduce of `numel` floats, as rank 0 sees it.
bench::Comparison measure(std::int64_t numel, int calls, int rounds) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto rank_body = [&](int rank) {
    at::Tensor tensor = at::zeros({numel});
    std::vector<bench::Variant> variants;
    for (const Way& way : ways()) {
      const auto own = c10::make_intrusive<c10d::PrefixStore>(way.name, store);
      comm::Group group =
          comm::make_group(own, rank, 2, "gloo", std::chrono::seconds(60), "127.0.0.1", way.check);
      variants.push_back(bench::Variant::sampled(way.name, [&way, group, tensor, calls]() mutable {
        way.call(group, tensor);  // begin together
        return bench::seconds_of([&] {
                 for (int call = 0; call < calls; ++call) way.call(group, tensor);
               }) /
               calls;
      }));
    }
    return bench::compare(variants, bench::CompareOptions().timeit(
                                        bench::TimeitOptions().rounds(rounds).warm_up(5).calls(calls)));
  };
  std::thread other(rank_body, 1);
  bench::Comparison figures = rank_body(0);
  other.join();
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 301;
  at::set_num_threads(1);
  for (const std::int64_t numel : {1, 16384, 262144}) {
    std::printf("all_reduce of %ld floats, 2 ranks\n%s\n", numel,
                measure(numel, numel > 100000 ? 5 : 20, rounds).text().c_str());
  }
}
