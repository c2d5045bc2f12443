#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/elastic/session.h"
#include "cohort/train/internal/elastic/step_words.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/task.h"

namespace cohort::train {

/// The processes of an elastic run. Which they are changes: set_info(). What is agreed on after a step
/// travels within the step's transaction, so that each process that has the step has that too.
class ElasticCoordinator : public RankCoordinator {
 public:
  /// `change_wait`: how long a planned change waits for an evaluation. It waits twice as long for one that is
  /// made for the second time, and so on: nodes that come and go cannot keep the run from ending it.
  explicit ElasticCoordinator(std::shared_ptr<elastic::Session> session,
                              std::chrono::milliseconds change_wait = std::chrono::seconds(30))
      : session_(std::move(session)), change_wait_(change_wait) {}

  /// -1 before it has entered one.
  int rank() const override { return info_.process; }
  int size() const override { return info_.num_processes; }
  bool may_write() const override { return true; }
  bool reports() const override { return is_first(); }
  bool agrees_late() const override { return true; }
  bool has_all_steps() const override { return true; }
  bool begins_again() const override { return true; }

  void check_members() const override;
  void check_evaluation() override;
  /// This process's timeline, on process 0.
  void write_trace(const std::filesystem::path& path) const override;
  /// Keeps the text: processes compare it when they enter a generation.
  void require_same(const std::string& what, const std::string& text) override { same_[what] = text; }
  ControlRequests agree_on(const ControlRequests& requests) override;
  MetricSums total(MeterSet& meters) const override;
  /// This process's own.
  double mean(double value) const override { return value; }
  std::optional<Metrics> find_evaluation(std::int64_t step) override;
  void keep_evaluation(std::int64_t step, const Metrics& metrics) override;
  void run_on_first(const std::function<void()>& fn) const override {
    if (is_first()) fn();
  }
  /// All read the files that process 0 has found: they share a file system. From here on the state changes.
  /// Throws: what a process throws, on that process; PeerError with its text on the others.
  std::optional<checkpoint::LoadedCheckpoint> load(
      const std::function<std::optional<checkpoint::LoadedCheckpoint>()>& load) const override;

  elastic::Session& session() const { return *session_; }
  const elastic::GenerationInfo& info() const { return info_; }
  void set_info(const elastic::GenerationInfo& info);
  /// Throws: UsageError on the processes whose text of require_same() is another one than process 0's.
  /// Collective.
  void compare() const;

  /// Returns the text that process 0 gives. Collective.
  std::string text_of_first(const std::string& text) const;

  /// This process asks for `requests`: until a step is made with them, which all hear.
  void request(const ControlRequests& requests);

  /// A step begins.
  void begin_step() { own_.samples.clear(); }
  void add_part(const data::Batch& part);
  /// The lines of so many steps are on disk in the ledger: the others need not keep them.
  void set_listed(std::int64_t steps) { own_.num_listed = steps; }
  /// The files of the run are open, and what earlier starts wrote after this one's first step is cut.
  void set_opened() { own_.is_opened = true; }
  /// Returns what this process tells of its part of the step.
  std::string own_words(const StepMetrics& metrics);
  /// The step is made, and `words` are those of all processes.
  void hear(StepWords words);
  /// What was heard of the last step.
  const StepWords& heard() const { return heard_; }
  /// The fit goes back to where it had heard `words`.
  void go_back_to(StepWords words);

 private:
  void run_on_all(const std::string& what, const std::function<void()>& fn) const;
  parallel::SliceExchange* exchange() const { return exchange_.get(); }

  const std::shared_ptr<elastic::Session> session_;
  const std::chrono::milliseconds change_wait_;
  elastic::GenerationInfo info_{.process = -1};
  std::shared_ptr<parallel::SliceExchange> exchange_;  // null: not in a generation
  std::map<std::string, std::string> same_;
  StepWords own_, heard_;
  bool is_answered_ = true;  // agree_on() has told the requests of heard_
  std::int64_t evaluated_step_ = -1;
  Metrics evaluated_;
  std::int64_t begun_step_ = -1;                // of the evaluation that was begun last
  int num_begun_ = 0;                           // how often it was begun, by any process
  std::optional<base::Deadline> change_limit_;  // of the planned change that waits for it
};

}  // namespace cohort::train
