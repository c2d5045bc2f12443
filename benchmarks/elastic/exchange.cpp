// What the exchange over net costs beside that over a group: the bytes of ResNet-18's gradients (45 MB) alone, and a training
// step (forward, backward, SGD with momentum) with virtual ranks over each, in turn in one run. Each process has one thread,
// and a core of its own if there are enough.
//
// Run: elastic_exchange [processes, 2] [rounds, 15] [steps in a round, 2] [batch, 32] [size, 64] [backend, auto]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/bench/compare.h"
#include "cohort/comm/init.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/launch/spawn.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/resnet.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace {

using namespace cohort;

struct StepSizes {
  int processes, rounds, steps, batch, size;
  std::string backend;
};

/// The exchange of a generation that no agent has decided.
class NetRing {
 public:
  explicit NetRing(const comm::Group& group)
      : inbox_(std::make_shared<elastic::ProcessInbox>([](membership::MemberId) {})) {
    net::NodeOptions options;
    options.name = "rank";
    node_ = std::make_shared<net::Node>(options, inbox_);
    const std::string own = node_->listen("unix:@cohort-" + base::random_word());
    const std::vector<std::string> addresses = comm::all_gather_text(group, own);
    const std::vector<std::string> incarnations = comm::all_gather_text(group, node_->incarnation());
    membership::RankOrder order;
    order.revision = order.generation.number = 1;
    order.generation.members = {{1, "agent", "127.0.0.1:1", group.size()}};
    order.process = group.rank();
    inbox_->on_order(order);
    inbox_->enter([](const membership::Generation&) {});
    inbox_->set_processes(incarnations);
    for (int to = group.rank() + 1; to < group.size(); ++to) {
      inbox_->on_connect(
          node_->connect(addresses[static_cast<std::size_t>(to)], base::Deadline(std::chrono::seconds(30))));
    }
    const auto is_connected = [&] {
      for (int other = 0; other < group.size(); ++other) {
        if (other != group.rank() && inbox_->peer_of(other) == nullptr) return false;
      }
      return true;
    };
    base::poll_until(is_connected, base::Deadline(std::chrono::seconds(30)));
    exchange_ = std::make_shared<elastic::NetSliceExchange>(
        node_, inbox_, elastic::ExchangePlace{1, group.rank(), group.size()});
  }
  const std::shared_ptr<elastic::NetSliceExchange>& exchange() const { return exchange_; }

 private:
  std::shared_ptr<elastic::ProcessInbox> inbox_;
  std::shared_ptr<net::Node> node_;
  std::shared_ptr<elastic::NetSliceExchange> exchange_;
};

/// Sends each process its slice of a bucket, and gathers slices, as TreeReducer does.
class BytesOnly {
 public:
  BytesOnly(std::shared_ptr<parallel::SliceExchange> exchange, std::int64_t bytes)
      : exchange_(std::move(exchange)), slice_(bytes / exchange_->size()) {
    flat_ = exchange_->empty(slice_ * exchange_->size(), at::TensorOptions().dtype(at::kByte)).zero_();
    received_ = exchange_->empty(slice_ * exchange_->size(), flat_.options()).zero_();
  }
  void run() {
    const std::vector<std::int64_t> sizes(static_cast<std::size_t>(exchange_->size()), slice_);
    exchange_->all_to_all(received_, flat_, sizes, sizes)();
    exchange_->all_gather(flat_, flat_.narrow(0, exchange_->rank() * slice_, slice_))();
  }

 private:
  std::shared_ptr<parallel::SliceExchange> exchange_;
  std::int64_t slice_;
  at::Tensor flat_, received_;
};

class ResNetStep {
 public:
  ResNetStep(const StepSizes& sizes, std::shared_ptr<parallel::SliceExchange> exchange)
      : sync_({}, parallel::VirtualRankOptions{.num_virtual_ranks = sizes.processes}) {
    at::manual_seed(1);
    models::ModelOptions options;
    options.name = "resnet18";
    options.num_classes = 10;
    net_ = models::ResNet(options);
    models::set_memory_format(*net_, at::MemoryFormat::ChannelsLast);
    optimizer_ = std::make_shared<optim::SGD>(net_->parameters(), optim::SGDOptions(1e-3).momentum(0.9));
    sync_.begin({.modules = {{"", net_.ptr()}}, .optimizers = {{"", optimizer_, nullptr}}});
    sync_.set_exchange(std::move(exchange));
    input_ = at::randn({sizes.batch, 3, sizes.size, sizes.size}).contiguous(at::MemoryFormat::ChannelsLast);
    target_ = at::arange(sizes.batch).remainder(10);
  }
  void run() {
    const auto samples = static_cast<double>(input_.size(0));
    sync_.begin_step();
    sync_.begin_share(sync_.shares().first, input_.size(0));
    sync_.end_shares();
    const at::Tensor loss = at::cross_entropy_loss(net_->forward(input_), target_);
    sync_.prepare(*optimizer_, samples, true);
    loss.backward();
    sync_.average(*optimizer_, samples, true);
    optimizer_->step();
  }

 private:
  parallel::VirtualRankSync sync_;
  models::ResNet net_{nullptr};
  std::shared_ptr<optim::SGD> optimizer_;
  at::Tensor input_, target_;
};

void measure(const StepSizes& sizes) {
  memory::tune_allocator();
  at::set_num_threads(1);
  const comm::Group group =
      comm::init_process_group({.backend = sizes.backend, .check_consistency = comm::ConsistencyCheck::kOff});
  const std::vector<int>& cores = base::CpuSet::of_process().ids();
  base::CpuSet({cores[static_cast<std::size_t>(group.rank()) % cores.size()]}).pin_current_thread();
  const NetRing ring(group);
  const auto over_group = parallel::make_slice_exchange(group);
  constexpr std::int64_t kBytes = std::int64_t{45} << 20;
  BytesOnly group_bytes(over_group, kBytes), net_bytes(ring.exchange(), kBytes);
  ResNetStep group_step(sizes, over_group), net_step(sizes, ring.exchange());
  for (int i = 0; i < 3; ++i) {
    group_bytes.run();
    net_bytes.run();
    group_step.run();
    net_step.run();
  }
  const auto sample = [&](const char* name, auto run) {
    return bench::Variant::sampled(name, [&group, &sizes, run] {
      group.barrier();
      return bench::seconds_of([&] {
               for (int i = 0; i < sizes.steps; ++i) run();
             }) /
             sizes.steps;
    });
  };
  const auto options = bench::CompareOptions().timeit(
      bench::TimeitOptions().rounds(sizes.rounds).calls(sizes.steps).warm_up(0));
  const bench::Comparison bytes = bench::compare(
      {sample("group, bytes", [&] { group_bytes.run(); }), sample("net, bytes", [&] { net_bytes.run(); })},
      options);
  const bench::Comparison steps = bench::compare(
      {sample("group, step", [&] { group_step.run(); }), sample("net, step", [&] { net_step.run(); })},
      options);
  if (group.rank() != 0) return;
  std::printf(
      "ResNet-18, %d processes of one thread over %s, %d images of %d x %d each, %d rounds of %d steps\n",
      sizes.processes, group.backend().c_str(), sizes.batch, sizes.size, sizes.size, sizes.rounds,
      sizes.steps);
  std::printf("%s%s", bytes.text().c_str(), steps.text().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  const StepSizes sizes{.processes = number(1, 2),
                        .rounds = number(2, 15),
                        .steps = number(3, 2),
                        .batch = number(4, 32),
                        .size = number(5, 64),
                        .backend = argc > 6 ? argv[6] : "auto"};
  launch::spawn([&](int) { measure(sizes); }, sizes.processes);
  return 0;
}
