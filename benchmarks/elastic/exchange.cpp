// What the exchange over net costs beside that over a group: the bytes of ResNet-18's gradients (45 MB)
// alone, and a training step (forward, backward, SGD with momentum) with virtual ranks over each, in turn in
// one run. Each process has one thread, and a core of its own if there are enough.
//
// Run: elastic_exchange [processes, 2] [rounds, 15] [steps in a round, 2] [batch, 32] [size, 64] [backend,
// auto]
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/parallel/resnet18_step.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace cohort::bench {
namespace {

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

class StepOver {
 public:
  StepOver(const StepSizes& sizes, std::shared_ptr<parallel::SliceExchange> exchange)
      : sync_({}, parallel::VirtualRankOptions{.num_virtual_ranks = sizes.processes}), model_(sizes) {
    sync_.begin(model_.parts());
    sync_.set_exchange(std::move(exchange));
  }
  void run() {
    sync_.begin_step();
    sync_.begin_share(sync_.shares().first, model_.batch());
    sync_.end_shares();
    model_.step(sync_);
  }

 private:
  parallel::VirtualRankSync sync_;
  ResNet18 model_;
};

void compare_exchanges(const StepSizes& sizes) {
  const comm::Group group = begin_process(sizes);
  const NetRing ring(group);
  const auto over_group = parallel::make_slice_exchange(group);
  constexpr std::int64_t kBytes = std::int64_t{45} << 20;
  BytesOnly group_bytes(over_group, kBytes), net_bytes(ring.exchange(), kBytes);
  StepOver group_step(sizes, over_group), net_step(sizes, ring.exchange());
  for (int i = 0; i < 3; ++i) {
    group_bytes.run();
    net_bytes.run();
    group_step.run();
    net_step.run();
  }
  const bench::Comparison bytes =
      bench::compare({sample_step("group, bytes", group, sizes, [&] { group_bytes.run(); }),
                      sample_step("net, bytes", group, sizes, [&] { net_bytes.run(); })},
                     compare_options(sizes));
  const bench::Comparison steps =
      bench::compare({sample_step("group, step", group, sizes, [&] { group_step.run(); }),
                      sample_step("net, step", group, sizes, [&] { net_step.run(); })},
                     compare_options(sizes));
  if (group.rank() != 0) return;
  print_sizes(sizes, group);
  std::printf("%s%s", bytes.text().c_str(), steps.text().c_str());
}

}  // namespace
}  // namespace cohort::bench

int main(int argc, char** argv) {
  const auto sizes = cohort::bench::read_step_sizes(argc, argv);
  cohort::launch::spawn([&](int) { cohort::bench::compare_exchanges(sizes); }, sizes.processes);
  return 0;
}
