// Calls between two processes, beside LibTorch's own RPC from C++: empty calls one after the other and in
// bursts, large tensors there and back, kept or moved, and a step of distributed autograd. Each round makes
// two fresh processes, so that no thread of the other library is there. A round's figure is its median. Run:
// OMP_NUM_THREADS=1 rpc_calls [ROUNDS [PART OF A NAME]]
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/bench/timeit.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/dist_autograd.h"
#include "libtorch_rpc.h"
#include "two_processes.h"

namespace {

namespace bench = cohort::bench;
namespace rpc = cohort::rpc;
using bench_rpc::in_two_processes;
using bench_rpc::Store;

constexpr int kBurst = 64;

std::int64_t add_integers(std::int64_t a, std::int64_t b) {
  return a + b;
}
at::Tensor echo(const at::Tensor& x) {
  return x;
}
at::Tensor multiply(const at::Tensor& x, const at::Tensor& y) {
  return x * y;
}
COHORT_REMOTE(add_integers);
COHORT_REMOTE(echo);
COHORT_REMOTE(multiply);

// What rank 0 repeats, by either library.
struct Workload {
  const char* name;
  int repeats, calls;  // measured, after a tenth of them; calls of one
  std::function<void(rpc::Agent&)> by_cohort;
  std::function<void(LibtorchRpc&)> by_libtorch;
  bool has_rings = false;  // also measured through a link's rings alone
};

// The caller keeps the tensor.
Workload work_of_echo(const char* name, int repeats, std::int64_t num_bytes) {
  const at::Tensor large = at::ones({num_bytes / 4});
  return {name,
          repeats,
          1,
          [large](rpc::Agent& agent) { agent.rpc_sync<echo>("w1", large); },
          [large](LibtorchRpc& agent) { agent.echo(large); },
          true};
}
// The caller moves it in, and gets it back.
Workload work_of_moved_echo(const char* name, int repeats, std::int64_t num_bytes) {
  const auto large = std::make_shared<at::Tensor>();
  return {name, repeats, 1,
          [large, num_bytes](rpc::Agent& agent) {
            if (!large->defined()) *large = agent.shared_empty({num_bytes / 4}).fill_(1);
            *large = agent.rpc_sync<echo>("w1", std::move(*large));
          },
          [large, num_bytes](LibtorchRpc& agent) {
            if (!large->defined()) *large = at::ones({num_bytes / 4});
            *large = agent.echo(*large);
          }};
}

std::vector<Workload> workloads() {
  const at::Tensor x = at::randn({8, 8}).requires_grad_(), y = at::randn({8, 8}).requires_grad_();
  const auto burst = [](rpc::Agent& agent) {
    std::vector<rpc::Future<std::int64_t>> futures;
    for (int i = 0; i < kBurst; ++i) futures.push_back(agent.rpc_async<add_integers>("w1", 1, 2));
    for (auto& future : futures) future.get();
  };
  const auto step = [x, y](rpc::Agent& agent) {
    rpc::dist_autograd::Context context(agent);
    rpc::dist_autograd::backward(context, {agent.rpc_sync<multiply>("w1", x, y).sum()});
    rpc::dist_autograd::get_gradients(context);
  };
  return {{"empty call", 2000, 1, [](rpc::Agent& agent) { agent.rpc_sync<add_integers>("w1", 1, 2); },
           [](LibtorchRpc& agent) { agent.add_integers(); }},
          {"empty call in a burst of 64", 100, kBurst, burst,
           [](LibtorchRpc& agent) { agent.add_integers_in_burst(kBurst); }},
          work_of_echo("4 MB there and back", 200, 4 << 20),
          work_of_moved_echo("4 MB there and back, moved", 500, 4 << 20),
          work_of_echo("256 KB there and back", 500, 256 << 10),
          work_of_echo("64 MB there and back", 20, 64 << 20),
          {"step: a remote product of 8 x 8, and its backward", 500, 1, step,
           [x, y](LibtorchRpc& agent) { agent.step(x, y); }}};
}

double median_time(const Workload& workload, const std::function<void()>& once) {
  for (int i = 0; i < workload.repeats / 10; ++i) once();
  std::vector<double> times;
  for (int i = 0; i < workload.repeats; ++i) times.push_back(bench::seconds_of(once) / workload.calls);
  return bench::percentile(times, 0.5);
}

double run_cohort(const Workload& workload, int rank, const Store& store, const rpc::AgentOptions& options) {
  return bench_rpc::run_agent(rank, store, options, [&](rpc::Agent& agent) {
    return median_time(workload, [&] { workload.by_cohort(agent); });
  });
}

double run_libtorch(const Workload& workload, int rank, const Store& store, const std::string& transports) {
  LibtorchRpc agent(store, rank, transports);
  const double time = rank == 0 ? median_time(workload, [&] { workload.by_libtorch(agent); }) : 0;
  agent.shutdown();
  return time;
}

void compare(const Workload& workload, int rounds) {
  const auto variant = [&](const char* name, const std::function<double(int, const Store&)>& body) {
    return bench::Variant::sampled(name, [body] { return in_two_processes(body); });
  };
  std::vector<bench::Variant> variants;
  if (LibtorchRpc::is_there()) {
    for (const char* transports : {"all", "tcp"}) {
      variants.push_back(
          variant(transports == std::string("tcp") ? "LibTorch, TCP" : "LibTorch, all transports",
                  [&workload, transports](int rank, const Store& store) {
                    return run_libtorch(workload, rank, store, transports);
                  }));
    }
  }
  const auto add_cohort = [&](const char* name, const rpc::AgentOptions& options) {
    variants.push_back(variant(name, [&workload, options](int rank, const Store& store) {
      return run_cohort(workload, rank, store, options);
    }));
  };
  rpc::AgentOptions options;
  add_cohort("Cohort, local socket", options);
  if (workload.has_rings) {
    options.shared_cache = 0;
    add_cohort("Cohort, local socket, rings alone", options);
  }
  options.listen = "127.0.0.1:0";
  add_cohort("Cohort, TCP", options);
  const auto figures = bench::compare(
      variants, bench::CompareOptions().timeit(bench::TimeitOptions().label(workload.name).rounds(rounds)));
  std::printf("%s\n%s\n", workload.name, figures.text().c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  return bench_rpc::run_workloads(count, arguments, workloads, compare);
}
