#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/parallel/gradient_sync_base.h"
#include "cohort/parallel/virtual_ranks/slice_exchange.h"

/// The same bits at any number of processes: docs/guide/elastic.md.
namespace cohort::parallel {

class ShareBuffers;
class TreeReducer;

/// How a run has virtual ranks.
struct VirtualRankOptions {
  /// Fixed for the run; at least as many as processes.
  std::int64_t num_virtual_ranks = 1;
  /// Of gradients that travel together. Part of no result.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
};

/// What processes tell each other in a step beside gradients, and when the step can no longer fail.
struct StepHooks {
  /// Returns what this process tells all. Called once in a step, in the first average().
  std::function<std::string()> text;
  /// All transfers of the step have ended. `texts` are those of all processes, in their order. After it
  /// buffers change. What it throws gives up the step.
  std::function<void(const std::vector<std::string>& texts)> before_changes;
};

/// Makes a step of V virtual ranks on W processes, W = 1 to V, with bits that do not depend on W. Process p
/// has the virtual ranks [p V / W, (p + 1) V / W) and computes one after the other. Gradients are added in
/// the order of a fixed tree over the virtual ranks, each weighted by its samples. Buffers are those of
/// virtual rank 0.
///
///     sync.begin_step();
///     do {
///       sync.begin_share(batch.share, batch.whole_size);  // seed generators by (seed, step, share) here
///       ...                                               // forward and backward
///     } while (batch.advance());                          // LoaderOptions::num_shares
///     sync.end_shares();
///     sync.average(optimizer, batch.whole_size, finite);
///     optimizer.step();
///
/// Trainer makes these calls but for average(). Task makes average().
/// The same bits need the same number of threads and the same instruction set in each process.
/// Ownership: keeps two copies of the gradients where V = W, one of them the gradients themselves, and at
/// most 3 log2(V) else; and two of the buffers. Gradients lie in its memory from average() to the next
/// begin_step(). Threads: one caller at a time.
class VirtualRankSync : public GradientSync {
 public:
  /// `group`: null for one process alone. Throws: UsageError for more processes than virtual ranks.
  VirtualRankSync(comm::Group group, VirtualRankOptions options);
  ~VirtualRankSync() override;

  std::string name() const override { return "virtual_ranks"; }
  const comm::Group* group() const override { return group_ ? &group_ : nullptr; }
  VirtualRankSync* virtual_ranks() override { return this; }
  std::int64_t num_virtual_ranks() const { return options_.num_virtual_ranks; }
  ShareRange shares() const override;
  /// This process, and how many there are, of the group or of set_exchange().
  int process() const { return exchange_ == nullptr ? 0 : exchange_->rank(); }
  int num_processes() const { return exchange_ == nullptr ? 1 : exchange_->size(); }

  /// The step counts from here on: abandon_step() does nothing until the next begin_step().
  void commit_step();
  /// The step under way is given up, also one that has its average: buffers are those of its begin again, and
  /// parameters have no gradient. Does nothing after commit_step(), and where no step has begun. Other
  /// processes may still read memory of the step, so set_exchange() must follow before the next one.
  void abandon_step();

  /// From the next step on the processes of `exchange` compute the virtual ranks; null: this one alone.
  /// Processes that are new to the run need the state of the others first. Throws: UsageError for more
  /// processes than virtual ranks, or within a step. Memory for sums is made anew, by `exchange`.
  void set_exchange(std::shared_ptr<SliceExchange> exchange);
  /// With hooks a step is a transaction: it has one average(), all of whose transfers end before anything but
  /// gradients changes. Between two steps.
  void set_step_hooks(StepHooks hooks) { hooks_ = std::move(hooks); }

  /// Throws: UsageError for a module that computes statistics over processes (SyncBatchNorm).
  void begin(const TaskParts& parts) override;

  /// A step begins. Gradients of before are dropped.
  void begin_step();
  /// What is computed from here on is of virtual rank `share`, which has `samples`. Virtual ranks of this
  /// process come in their order; those without samples may be left out. Buffers are those of the step's
  /// begin.
  void begin_share(std::int64_t share, std::int64_t samples);
  /// No virtual rank of this process follows in this step.
  void end_shares();

  /// Where `finite` is false the virtual rank that is computed now is the one that the report names.
  void prepare(const optim::Optimizer& optimizer, double samples, bool finite) override;
  /// `samples`: of the last virtual rank, or of all of this process. They only check: the weights are those
  /// of begin_share(). The first call of a step sets buffers too. Throws: UsageError where virtual ranks were
  /// not computed, for other samples, and where gradients came after the first call of the step.
  AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override;

 private:
  struct Step;
  void check_processes(int count) const;
  void check_known(const optim::Optimizer& optimizer) const;
  void check_samples(double samples) const;
  void close_share();
  void finish_shares();
  TreeReducer& reducer_of(const optim::Optimizer& optimizer);
  void send_header();
  AverageReport receive_header();

  const comm::Group group_;
  const VirtualRankOptions options_;
  std::shared_ptr<SliceExchange> exchange_;  // null: one process
  std::map<const optim::Optimizer*, std::unique_ptr<TreeReducer>> reducers_;
  std::set<const at::TensorImpl*> known_;  // parameters of all reducers
  std::unique_ptr<ShareBuffers> buffers_;
  std::unique_ptr<Step> step_;  // null: none is being made
  StepHooks hooks_;
};

/// Returns the share of time in which the average process has nothing to compute: 0 where the processes
/// divide the virtual ranks.
double idle_share(std::int64_t num_virtual_ranks, int num_processes);
/// Returns "8 virtual ranks on 3 processes", with the share of time in which a process has nothing to
/// compute.
std::string describe_virtual_ranks(std::int64_t num_virtual_ranks, int num_processes);

}  // namespace cohort::parallel
