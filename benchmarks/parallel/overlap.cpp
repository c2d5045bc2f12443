// How much of the communication of gradients a step hides behind its backward, on an emulated link: each
// all-reduce takes latency + bytes / bandwidth, one after the other, and no core. Side by side in one run:
// Reducer, Reducer without overlap, c10d::Reducer with Python's bucket sizes, and no communication at all.
//
// Run: parallel_overlap [mlp|vgg16|resnet50|all] [steps measured, 10] [latency in us, 100]
//
// The link is set so that bytes / bandwidth is 25, 50 and 100 % of backward's time.
// "hidden": (compute + communication - step) / communication, communication being one message of all bytes.
// "limit": what no order can beat: the gradients that come last cannot be sent before backward is over.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "cohort/core/allocator.h"
#include "cohort/models/registry.h"
#include "cohort/parallel/reducer.h"
#include "tests/support/slow_link.h"

namespace {

namespace comm = cohort::comm;
namespace parallel = cohort::parallel;
using Clock = std::chrono::steady_clock;
using cohort::test::SlowLink;

constexpr int kSettle = 16;  // steps until buckets stay

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Times {
  double min = 0, median = 0, p99 = 0;
};

Times times_of(std::vector<double> list) {
  std::sort(list.begin(), list.end());
  return {list.front(), list[list.size() / 2],
          list[static_cast<std::size_t>(0.99 * static_cast<double>(list.size() - 1))]};
}

struct Workload {
  const char* name;
  const char* model;
  std::int64_t batch, size;
};

class Net {
 public:
  explicit Net(const Workload& work) {
    at::manual_seed(1);
    cohort::models::ModelOptions options{.name = work.model, .num_classes = 1000, .extra = {}};
    options.image_size = work.size;
    model_ = cohort::models::make_model(options);
    input_ = at::rand({work.batch, 3, work.size, work.size});
    target_ = at::randint(1000, {work.batch}, at::kLong);
  }
  std::vector<at::Tensor> parameters() { return model_.ptr()->parameters(); }
  const torch::nn::Module& module() { return *model_.ptr(); }
  at::Tensor loss() { return at::cross_entropy_loss(model_.forward<at::Tensor>(input_), target_); }
  void zero_grad() { model_.ptr()->zero_grad(); }

 private:
  torch::nn::AnyModule model_;
  at::Tensor input_, target_;
};

// Steps with `before` between forward and backward. Returns their times, and those of backward alone.
std::pair<Times, Times> run(Net& net, int steps, const std::function<void(const at::Tensor&)>& before) {
  std::vector<double> whole, back;
  for (int step = 0; step < kSettle + steps; ++step) {
    const auto start = Clock::now();
    net.zero_grad();
    const at::Tensor loss = net.loss();
    before(loss);
    const auto middle = Clock::now();
    loss.backward();
    if (step < kSettle) continue;
    back.push_back(seconds_since(middle));
    whole.push_back(seconds_since(start));
  }
  return {times_of(whole), times_of(back)};
}

comm::Group make_group() {
  return comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "fake", std::chrono::minutes(5),
                          "127.0.0.1", comm::Check::kOff);
}

Times run_ours(Net& net, int steps, SlowLink::Cost cost, bool overlap) {
  comm::Group group = make_group();
  SlowLink::under(group, cost);
  parallel::Reducer reducer(group, parallel::parameters_to_reduce(net.module()), {.overlap = overlap});
  return run(net, steps, [&](const at::Tensor&) { reducer.prepare(); }).first;
}

Times run_c10d(Net& net, int steps, SlowLink::Cost cost) {
  comm::Group group = make_group();
  SlowLink::under(group, cost);
  const auto parameters = net.parameters();
  constexpr std::int64_t kFirst = 1 << 20, kCap = 25 << 20;
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {kFirst, kCap});
  std::reverse(buckets.begin(), buckets.end());
  c10d::Reducer reducer(parameters, buckets, group.process_group(),
                        std::vector<bool>(parameters.size(), false), kCap, false, true, {}, kFirst, false,
                        false, {});
  return run(net, steps,
             [&](const at::Tensor&) {
               reducer.prepare_for_forward();
               if (reducer.should_rebuild_buckets()) reducer.rebuild_buckets();
               reducer.prepare_for_backward({});
             })
      .first;
}

void compare(const Workload& work, int steps, std::chrono::microseconds latency) {
  Net net(work);
  const auto parameters = net.parameters();
  double bytes = 0;
  for (const at::Tensor& parameter : parameters) bytes += static_cast<double>(parameter.nbytes());
  const auto [compute, backward] = run(net, steps, [](const at::Tensor&) {});
  std::printf(
      "\n%s: %zu gradients, %.1f MiB; step %.1f ms (min %.1f, p99 %.1f), backward %.1f ms, one thread\n",
      work.name, parameters.size(), bytes / (1 << 20), compute.median * 1e3, compute.min * 1e3,
      compute.p99 * 1e3, backward.median * 1e3);
  std::printf("%8s %10s  %-28s %9s %9s %9s %8s\n", "share", "comm ms", "", "min ms", "median ms", "p99 ms",
              "hidden");
  for (const double share : {0.25, 0.5, 1.0}) {
    const SlowLink::Cost cost{.latency = latency, .bytes_per_second = bytes / (share * backward.median)};
    const double communication = share * backward.median + std::chrono::duration<double>(latency).count();
    const auto report = [&](const char* name, const Times& times) {
      std::printf("%7.0f%% %10.1f  %-28s %9.1f %9.1f %9.1f %7.1f%%\n", share * 100, communication * 1e3, name,
                  times.min * 1e3, times.median * 1e3, times.p99 * 1e3,
                  100 * (compute.median + communication - times.median) / communication);
      std::fflush(stdout);
    };
    report("Reducer", run_ours(net, steps, cost, true));
    report("c10d::Reducer", run_c10d(net, steps, cost));
    report("Reducer without overlap", run_ours(net, steps, cost, false));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "all";
  const int steps = argc > 2 ? std::atoi(argv[2]) : 10;
  const std::chrono::microseconds latency(argc > 3 ? std::atoi(argv[3]) : 100);
  cohort::core::tune_allocator();
  at::set_num_threads(1);
  for (const Workload& work : {Workload{"mlp", "mlp", 256, 32}, Workload{"vgg16", "vgg16", 8, 64},
                               Workload{"resnet50", "resnet50", 4, 128}}) {
    if (which == "all" || which == work.name) compare(work, steps, latency);
  }
}
