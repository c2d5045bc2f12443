// A process of an elastic run that notes in a file when it is ready, with the processor time that its start
// has taken in ms, when it enters a generation, and when a step is committed. recovery.py starts it under
// `cohort run --elastic`, kills it, and reads the file.
//
// Run: elastic_recovery_worker EVENTS STEPS HIDDEN      HIDDEN: width of an MLP with two hidden layers; 0:
// ResNet-18, batch of 32
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/random.h"
#include "cohort/elastic/run.h"
#include "cohort/elastic/state_of.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/resnet.h"
#include "cohort/optim/sgd.h"

namespace cohort::bench {
namespace {

constexpr std::uint64_t kSeed = 1;

/// Appends lines "NAME NANOSECONDS PID NUMBERS", each in one write. The time is that of CLOCK_MONOTONIC.
class EventFile {
 public:
  explicit EventFile(const char* path)
      : file_(::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {
    if (file_ < 0)
      throw UsageError("bench.recovery", base::concat("cannot write ", path),
                       "a file in a folder that is there");
  }
  ~EventFile() { ::close(file_); }
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  template <typename... Numbers>
  void add(const char* name, Numbers... numbers) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::string line = base::concat(name, " ", std::chrono::nanoseconds(now).count(), " ", ::getpid());
    ((line += base::concat(" ", numbers)), ...);
    line += "\n";
    if (::write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
  }

 private:
  int file_;
};

struct Net {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> forward;
  at::Tensor input, target;
};

Net make_mlp(int hidden) {
  constexpr std::int64_t kBatch = 16;
  torch::nn::Sequential net(torch::nn::Linear(64, hidden), torch::nn::ReLU(),
                            torch::nn::Linear(hidden, hidden), torch::nn::ReLU(),
                            torch::nn::Linear(hidden, 10));
  return {net.ptr(), [net](const at::Tensor& x) mutable { return net->forward(x); }, at::randn({kBatch, 64}),
          at::arange(kBatch).remainder(10)};
}

Net make_resnet() {
  constexpr std::int64_t kBatch = 32, kSize = 64;
  models::ModelOptions options;
  options.name = "resnet18";
  options.num_classes = 10;
  models::ResNet net(options);
  models::set_memory_format(*net, at::MemoryFormat::ChannelsLast);
  return {net.ptr(), [net](const at::Tensor& x) mutable { return net->forward(x); },
          at::randn({kBatch, 3, kSize, kSize}).contiguous(at::MemoryFormat::ChannelsLast),
          at::arange(kBatch).remainder(10)};
}

void work(const char* events_path, std::uint64_t steps, int hidden) {
  memory::tune_allocator();
  at::set_num_threads(1);
  at::manual_seed(kSeed);
  EventFile events(events_path);
  const Net net = hidden > 0 ? make_mlp(hidden) : make_resnet();
  const auto optimizer =
      std::make_shared<optim::SGD>(net.module->parameters(), optim::SGDOptions(1e-3).momentum(0.9));
  const auto session = elastic::session_of_process();
  parallel::VirtualRankSync sync({}, {.num_virtual_ranks = session ? session->virtual_ranks() : 2});
  sync.begin({.modules = {{"", net.module}}, .optimizers = {{"", optimizer, nullptr}}});
  const auto samples = static_cast<double>(net.input.size(0));

  const auto make_step = [&](elastic::StepContext& context) {
    sync.begin_step();
    const parallel::ShareRange shares = sync.shares();
    for (std::int64_t share = shares.first; share < shares.first + shares.count; ++share) {
      at::manual_seed(base::generator_seed(kSeed, context.step(), static_cast<std::uint64_t>(share)));
      sync.begin_share(share, net.input.size(0));
      const at::Tensor loss = at::cross_entropy_loss(net.forward(net.input), net.target);
      if (share + 1 == shares.first + shares.count) {
        sync.end_shares();
        sync.prepare(*optimizer, samples, true);
      }
      loss.backward();
    }
    sync.average(*optimizer, samples, true);
    context.begin_changes();
    optimizer->step();
  };
  events.add("ready", 1000 * std::clock() / CLOCKS_PER_SEC);
  elastic::run({.total_steps = steps,
                .session = session,
                .sync = &sync,
                .on_enter =
                    [&](const elastic::GenerationInfo& info) {
                      events.add("enter", info.generation, info.process, info.num_processes, info.steps,
                                 info.has_copied ? 1 : 0);
                    },
                .on_commit = [&](const elastic::GenerationInfo& info) { events.add("commit", info.steps); }},
               elastic::state_of(net.module, optimizer), make_step);
}

}  // namespace
}  // namespace cohort::bench

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("elastic_recovery_worker EVENTS STEPS HIDDEN\n", stderr);
    return 2;
  }
  try {
    cohort::bench::work(argv[1], std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "elastic_recovery_worker: %s\n", error.what());
    return 1;
  }
}
