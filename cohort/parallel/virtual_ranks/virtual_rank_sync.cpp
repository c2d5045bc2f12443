// A step goes through the virtual ranks of this process. Between two of them their gradients are taken away
// as a leaf, and buffers are restored. The first average() closes the last virtual rank, for all optimizers:
// what comes later could not be of all virtual ranks. Then all processes tell each other samples and the
// first virtual rank that is not finite, and only if there is none do gradients travel. Where prepare() comes
// before the last backward, this header travels meanwhile, and then the first buckets. All transfers of a
// first average end before buffers change, so a step that fails has changed nothing.
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/parallel/broadcast.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "cohort/parallel/virtual_ranks/internal/share_buffers.h"
#include "cohort/parallel/virtual_ranks/internal/tree_reducer.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"

namespace cohort::parallel {
namespace {

constexpr const char* kWhereVirtual = "parallel.virtual_ranks";

bool has_gradient_to_add(const at::Tensor& parameter) {
  return parameter.requires_grad() && parameter.numel() > 0;
}

void check_no_sync_batch_norm(const std::vector<NamedModule>& modules) {
  for (const NamedModule& entry : modules) {
    for (const auto& layer : entry.module->modules()) {
      if (layer->as<SyncBatchNorm1dImpl>() == nullptr && layer->as<SyncBatchNorm2dImpl>() == nullptr &&
          layer->as<SyncBatchNorm3dImpl>() == nullptr) {
        continue;
      }
      throw UsageError(kWhereVirtual,
                       base::concat(layer->name(),
                                    " computes statistics over processes, and a process computes "
                                    "one virtual rank after the other"),
                       "BatchNorm, or no virtual ranks");
    }
  }
}

}  // namespace

/// What is known of the step that is being made.
struct VirtualRankSync::Step {
  explicit Step(ShareRange range, std::int64_t num_virtual_ranks)
      : range(range),
        next(range.first),
        header(at::empty({num_virtual_ranks + 1}, at::kDouble)),
        weights(header.mutable_data_ptr<double>() + 1) {
    std::fill_n(header.mutable_data_ptr<double>(), header.numel(), 0.0);
  }
  /// The header tells `bad` from now on.
  void write_bad() { header.mutable_data_ptr<double>()[0] = bad ? 1 + static_cast<double>(*bad) : 0; }

  const ShareRange range;               // of this process
  std::int64_t next;                    // first virtual rank that was not closed
  std::optional<std::int64_t> current;  // that is computed now
  std::optional<std::int64_t> bad;      // first one that is not finite
  double own_samples = 0;               // of all virtual ranks so far
  bool is_ended = false, is_averaged = false;
  bool is_committed = false;               // nothing gives it up any more
  at::Tensor header;                       // [1 + the virtual rank that is not finite | samples of each]
  double* weights;                         // in it
  at::Tensor headers;                      // of all processes
  SliceExchange::Transfer header_arrived;  // null: not sent, or received
  bool is_header_sent = false;
  std::optional<AverageReport> report;  // where the header was received before average()
};

VirtualRankSync::VirtualRankSync(comm::Group group, VirtualRankOptions options)
    : group_(std::move(group)), options_(options) {
  if (options_.num_virtual_ranks < 1) {
    throw UsageError(kWhereVirtual, base::concat("num_virtual_ranks: got ", options_.num_virtual_ranks,
                                                 ", expected at least 1"));
  }
  set_exchange(group_ && group_.size() > 1 ? make_slice_exchange(group_) : nullptr);
}

VirtualRankSync::~VirtualRankSync() = default;

void VirtualRankSync::check_processes(int count) const {
  if (count <= options_.num_virtual_ranks) return;
  throw UsageError(kWhereVirtual,
                   base::concat("there are ", count, " processes and ", options_.num_virtual_ranks,
                                " virtual ranks: a process would have none"),
                   base::concat("at most ", options_.num_virtual_ranks,
                                " processes, or a new run with more virtual ranks"));
}

void VirtualRankSync::set_exchange(std::shared_ptr<SliceExchange> exchange) {
  if (step_ != nullptr && !step_->is_averaged && !step_->is_committed) {
    throw UsageError(kWhereVirtual, "processes change within a step", "set_exchange() between two steps");
  }
  check_processes(exchange == nullptr ? 1 : exchange->size());
  step_.reset();  // a further average() of it would be of processes that have left
  exchange_ = exchange != nullptr && exchange->size() > 1 ? std::move(exchange) : nullptr;
  for (auto& [optimizer, reducer] : reducers_) reducer->release_memory();
  if (buffers_ != nullptr) buffers_->release_result();
}

void VirtualRankSync::abandon_step() {
  if (step_ == nullptr || step_->is_committed) return;
  buffers_->restore();
  for (auto& [optimizer, reducer] : reducers_) reducer->abandon();
  step_.reset();
}

void VirtualRankSync::commit_step() {
  if (step_ != nullptr) step_->is_committed = true;
}

ShareRange VirtualRankSync::shares() const {
  const LeafRange block = block_of(process(), num_processes(), options_.num_virtual_ranks);
  return {.first = block.begin, .count = block.size(), .of = options_.num_virtual_ranks};
}

void VirtualRankSync::begin(const TaskParts& parts) {
  check_no_sync_batch_norm(parts.modules);
  if (group_ && group_.size() > 1) {
    comm::require_same(group_, "the virtual ranks",
                       base::concat("virtual ranks ", options_.num_virtual_ranks, "\nbytes of a bucket ",
                                    options_.bucket_bytes, "\n"));
    for (const NamedModule& entry : parts.modules) broadcast_module(group_, *entry.module);
  }
  step_.reset();
  reducers_.clear();  // of an earlier fit() with the same sync
  known_.clear();
  for (const NamedOptimizer& entry : parts.optimizers) {
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& parameter : entry.optimizer->parameters()) {
      if (!has_gradient_to_add(parameter)) continue;
      if (!known_.insert(parameter.unsafeGetTensorImpl()).second) {
        throw UsageError(kWhereVirtual,
                         base::concat("a parameter ", parameter.sizes(), " has two optimizers"));
      }
      parameters.push_back(parameter);
    }
    reducers_[entry.optimizer.get()] = std::make_unique<TreeReducer>(
        std::move(parameters), options_.num_virtual_ranks, options_.bucket_bytes);
  }
  buffers_ = std::make_unique<ShareBuffers>(parts.modules);
}

// A parameter that was unfrozen since begin() would have the gradients of this process's virtual ranks alone.
void VirtualRankSync::check_known(const optim::Optimizer& optimizer) const {
  for (const at::Tensor& parameter : optimizer.parameters()) {
    if (!has_gradient_to_add(parameter) || known_.contains(parameter.unsafeGetTensorImpl())) continue;
    throw UsageError(kWhereVirtual,
                     base::concat("a parameter ", parameter.sizes(),
                                  " of an optimizer requires a gradient, and did not when the run began: it "
                                  "would not be added over virtual ranks"),
                     "unfreeze it, or add it to the optimizer, before fit()");
  }
}

void VirtualRankSync::begin_step() {
  if (buffers_ == nullptr) throw UsageError(kWhereVirtual, "a step begins before begin()");
  step_ = std::make_unique<Step>(shares(), options_.num_virtual_ranks);
  if (exchange_ != nullptr) exchange_->begin_step();
  for (auto& [optimizer, reducer] : reducers_) {
    check_known(*optimizer);
    reducer->begin(exchange_.get());
  }
  buffers_->begin();
}

void VirtualRankSync::begin_share(std::int64_t share, std::int64_t samples) {
  const std::int64_t end = step_ == nullptr ? 0 : step_->range.first + step_->range.count;
  const std::int64_t least = step_ == nullptr ? 0 : step_->next + (step_->current ? 1 : 0);
  if (step_ == nullptr || step_->is_ended || share < least || share >= end) {
    throw UsageError(kWhereVirtual, base::concat("virtual rank ", share, " begins, expected ", least, " to ",
                                                 end - 1, " of this process, in a step"));
  }
  if (step_->current) {
    close_share();
    buffers_->restore();
  }
  while (step_->next < share) close_share();  // without a sample
  step_->current = share;
  step_->weights[share] = static_cast<double>(samples);
  step_->own_samples += static_cast<double>(samples);
}

// Takes what was computed of virtual rank step_->next; nothing, where it was left out.
void VirtualRankSync::close_share() {
  const double weight = step_->weights[step_->next];
  // Where one is not finite nobody makes the step.
  for (auto& [optimizer, reducer] : reducers_) {
    if (!step_->bad) reducer->add_leaf(weight);
  }
  if (step_->next == 0) {
    if (!step_->current) buffers_->restore();
    buffers_->keep_result();
  }
  step_->current.reset();
  ++step_->next;
}

void VirtualRankSync::end_shares() {
  if (step_ == nullptr) throw UsageError(kWhereVirtual, "virtual ranks end, and no step has begun");
  step_->is_ended = true;
}

void VirtualRankSync::check_samples(double samples) const {
  const double last = step_->current ? step_->weights[*step_->current] : 0;
  if (samples == last || samples == step_->own_samples) return;
  throw UsageError(kWhereVirtual,
                   base::concat("gradients are averaged for ", samples, " samples, expected ", last,
                                ", those of the last virtual rank: its share of the batch"),
                   "batch.whole_size, after while (batch.advance())");
}

void VirtualRankSync::finish_shares() {
  while (step_->next < step_->range.first + step_->range.count) close_share();
}

TreeReducer& VirtualRankSync::reducer_of(const optim::Optimizer& optimizer) {
  const auto found = reducers_.find(&optimizer);
  if (found != reducers_.end()) return *found->second;
  throw UsageError(kWhereVirtual,
                   "gradients of an optimizer are to be averaged that was not added to the task",
                   "Task::add_optimizer");
}

void VirtualRankSync::prepare(const optim::Optimizer& optimizer, double samples, bool finite) {
  if (step_ == nullptr || step_->is_averaged) return;
  if (!finite && !step_->bad) step_->bad = step_->current.value_or(step_->range.first);
  // Before the last backward of the process; else average() sends it.
  const bool is_last = finite && step_->is_ended && !step_->bad && !step_->is_header_sent;
  if (!is_last || exchange_ == nullptr || !step_->current) return;
  check_samples(samples);
  send_header();
  // Of several optimizers the order in which gradients come is not that of their averages.
  if (reducers_.size() > 1) return;
  reducer_of(optimizer).send_early(step_->weights[*step_->current], [this] {
    if (!step_->report) step_->report = receive_header();
    return step_->report->ok() ? step_->report->weight : 0;
  });
}

void VirtualRankSync::send_header() {
  step_->is_header_sent = true;
  step_->write_bad();
  const std::int64_t bytes = static_cast<std::int64_t>(step_->header.nbytes());
  step_->headers = at::empty({num_processes() * bytes}, at::kByte);
  step_->header_arrived = exchange_->all_gather(step_->headers, step_->header.view(at::kByte));
}

// Everything but AverageReport::bytes.
AverageReport VirtualRankSync::receive_header() {
  const auto v = static_cast<std::size_t>(options_.num_virtual_ranks);
  AverageReport report;
  std::vector<double> weights(v, 0);
  const auto read = [&](int process, const double* header) {
    if (header[0] != 0 && !report.bad_virtual_rank) {
      report.bad_virtual_rank = static_cast<std::int64_t>(header[0]) - 1;
      report.bad_rank = process;
    }
    // Each virtual rank is of one process, and 0 in the headers of the others.
    for (std::size_t share = 0; share < v; ++share) weights[share] += header[1 + share];
  };
  if (exchange_ == nullptr) {
    step_->write_bad();
    read(0, step_->header.const_data_ptr<double>());
  } else {
    if (!step_->header_arrived) send_header();
    std::exchange(step_->header_arrived, nullptr)();
    const at::Tensor all = step_->headers.view(at::kDouble);
    for (int process = 0; process < num_processes(); ++process) {
      read(process, all.const_data_ptr<double>() + static_cast<std::size_t>(process) * (1 + v));
    }
  }
  for (const double weight : weights) report.weight += weight;
  return report;
}

AverageReport VirtualRankSync::average(const optim::Optimizer& optimizer, double samples, bool finite) {
  TreeReducer& reducer = reducer_of(optimizer);
  if (step_ == nullptr || !step_->is_ended) {
    throw UsageError(kWhereVirtual,
                     base::concat("gradients are averaged before all ", shares().count,
                                  " virtual ranks of this process were computed"),
                     "while (batch.advance()) before average_gradients()");
  }
  const bool is_first = !step_->is_averaged;
  if (!is_first && hooks_.text) {
    throw UsageError(kWhereVirtual,
                     "gradients are averaged twice in a step that is a transaction: the second average could "
                     "fail when parameters have changed",
                     "one optimizer, with one average_gradients() in a step");
  }
  if (is_first && !finite && step_->is_header_sent) {
    throw UsageError(kWhereVirtual,
                     "average() says that a loss is not finite, and prepare() said that it is");
  }
  if (!finite && !step_->bad) step_->bad = step_->current.value_or(step_->next - 1);
  if (is_first) {
    check_samples(samples);
    finish_shares();
  } else if (reducer.gradients().has_gradients()) {
    throw UsageError(
        kWhereVirtual,
        "gradients came after the first average_gradients() of the step: they would be of the last "
        "virtual rank alone",
        "all backwards before the first average_gradients(), or no virtual ranks");
  }
  AverageReport report = step_->report ? *std::exchange(step_->report, std::nullopt) : receive_header();
  step_->is_averaged = true;
  // All processes have read the same headers, so all do the same here.
  const bool has_sum = report.ok() && report.weight > 0;
  if (has_sum) reducer.send(report.weight);
  if (is_first && report.ok()) buffers_->send_result(exchange_.get());
  // After the buckets, of which some may have been sent during backward: the order is that of all processes.
  std::optional<TextGather> texts;
  if (hooks_.text) {
    texts.emplace(exchange_.get(), hooks_.text());
    texts->send_text();
  }
  if (has_sum) report.bytes = reducer.finish(report.weight);
  if (is_first && report.ok()) buffers_->receive_result();
  if (texts) hooks_.before_changes(texts->receive());
  if (is_first && report.ok()) buffers_->set_result();
  if (is_first && !report.ok()) buffers_->restore();
  return report;
}

double idle_share(std::int64_t num_virtual_ranks, int num_processes) {
  const std::int64_t rounds = (num_virtual_ranks + num_processes - 1) / num_processes;
  return 1 - static_cast<double>(num_virtual_ranks) / static_cast<double>(rounds * num_processes);
}

std::string describe_virtual_ranks(std::int64_t num_virtual_ranks, int num_processes) {
  std::string text =
      base::concat(num_virtual_ranks, num_virtual_ranks == 1 ? " virtual rank on " : " virtual ranks on ",
                   num_processes, num_processes == 1 ? " process" : " processes");
  const double idle = idle_share(num_virtual_ranks, num_processes);
  if (idle > 0) {
    text +=
        base::concat(": a process is idle for ", std::round(idle * 1000) / 10, " % of a step on average, as ",
                     num_processes, " does not divide ", num_virtual_ranks);
  }
  return text;
}

}  // namespace cohort::parallel
