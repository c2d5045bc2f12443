#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/train/metrics.h"

/// What the ranks of a run tell each other besides gradients. Internal to this module.
namespace cohort::train {

/// The ranks of a fit, which is one process, a group of ranks (GroupCoordinator), or the processes of an
/// elastic run (ElasticCoordinator). Collective, with several: each function but the getters.
class RankCoordinator {
 public:
  /// What a rank would like to happen after a step.
  struct ControlRequests {
    int stop_signal = 0;    ///< a signal asked to stop
    bool save_now = false;  ///< a signal asked to save
    bool save_due = false;  ///< enough time has passed since the last checkpoint
  };
  using MetricSums = std::map<std::string, MeterSet::Sum>;
  using Metrics = std::map<std::string, double>;

  RankCoordinator() = default;
  virtual ~RankCoordinator() = default;
  RankCoordinator(const RankCoordinator&) = delete;
  RankCoordinator& operator=(const RankCoordinator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  bool is_first() const { return rank() == 0; }
  /// This rank writes what is written once, or may come to write it.
  virtual bool may_write() const { return is_first(); }
  /// The callbacks of this rank hear reports.
  virtual bool reports() const { return true; }
  /// agree_on() tells what was requested at the call before.
  virtual bool agrees_late() const { return size() > 1; }
  /// Each rank has the metrics of the steps of all ranks.
  virtual bool has_all_steps() const { return false; }

  /// A run that has failed is begun again by the same command: where it goes back to counts for its first
  /// start.
  virtual bool begins_again() const { return false; }

  /// Throws: elastic::GenerationEnded where the processes of the run change.
  virtual void check_members() const {}
  /// Between two batches of an evaluation, which find_evaluation() has begun. Throws: as check_members(), but
  /// a planned change waits for the evaluation for a while.
  virtual void check_evaluation() { check_members(); }
  /// Tells the ranks that a step of all of them is over.
  virtual void step_done() const {}
  /// Writes the timelines of all ranks into one file, on rank 0.
  virtual void write_trace(const std::filesystem::path& path) const = 0;
  /// Throws on all ranks where `text` differs: comm::require_same.
  virtual void require_same(const std::string& what, const std::string& text) = 0;
  /// Returns what all ranks are to do now, the same on each: with several ranks what any of them requested
  /// at the call before, so that a step never waits for the reduction.
  virtual ControlRequests agree_on(const ControlRequests& requests) = 0;

  /// Sums over ranks.
  virtual MetricSums total(MeterSet& meters) const = 0;
  /// The mean over ranks; of a figure that is only shown.
  virtual double mean(double value) const = 0;
  /// The metrics of the evaluation after `step`, where a rank has made it already.
  virtual std::optional<Metrics> find_evaluation(std::int64_t /*step*/) { return std::nullopt; }
  virtual void keep_evaluation(std::int64_t /*step*/, const Metrics& /*metrics*/) {}

  /// Runs `fn` on rank 0. Throws: on rank 0 what `fn` throws; on the others an error with its text.
  virtual void run_on_first(const std::function<void()>& fn) const = 0;
  /// Reads the checkpoint that a run resumes from. Returns what rank 0's `load` returns, on every rank.
  virtual std::optional<checkpoint::LoadedCheckpoint> load(
      const std::function<std::optional<checkpoint::LoadedCheckpoint>()>& load) const = 0;
};

}  // namespace cohort::train
