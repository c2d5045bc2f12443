#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/membership/generation.h"

/// The rules by which a process goes from one generation to the next, and knows who has the state. No thread,
/// clock or socket: StepProtocol, which a simulator runs, and elastic::Session have the same ones.
namespace cohort::membership {

/// When a process leaves its generation: at once, or after the step that is under way. Threads: one at a
/// time.
class GenerationChange {
 public:
  /// The agents have agreed on a generation, in which this process has a number, or none. Returns whether it
  /// is news.
  bool announce(const Generation& generation, std::optional<int> process);
  /// A process has entered a generation that this one has not, with so many committed steps.
  void on_hello(std::uint64_t generation, int from, std::uint64_t steps);
  /// A process of this generation has left it, for another one or none, with so many committed steps. All
  /// that it sent has come.
  void on_goodbye(int from, std::uint64_t steps);
  bool has_left(int process) const { return goodbyes_.contains(process); }
  /// A process of this generation cannot be reached any more; some process, where it is not known which.
  void on_link_lost(std::optional<int> process);

  bool has_next() const { return next_.has_value(); }
  /// Whether this process has a part in the next generation; where there is none, in this one.
  bool has_process_next() const { return (next_ ? next_->process : process_).has_value(); }
  /// Number of the newest generation that is known.
  std::uint64_t newest() const { return next_ ? next_->generation.number : generation_.number; }
  /// Whether there is a generation to enter, and nobody will finish the step that is under way: the one after
  /// `committed` steps. Where there is none to enter yet, who waits for a lost process waits for the
  /// generation.
  bool drops_step(std::uint64_t committed) const;
  /// The next generation is that of this process from here on.
  void enter();

  const Generation& generation() const { return generation_; }
  /// In generation(); none: this process has no part in it.
  std::optional<int> process() const { return process_; }

 private:
  struct Next {
    Generation generation;
    std::optional<int> process;
    bool may_finish_step = false;
  };
  bool was_here(int process_of_next) const;

  Generation generation_;
  std::optional<int> process_;
  std::optional<Next> next_;
  bool has_lost_link_ = false;
  std::map<int, std::uint64_t> goodbyes_;                          // committed steps by process
  std::map<std::pair<std::uint64_t, int>, std::uint64_t> hellos_;  // of generations that are not entered
};

/// Who has the newest state, by what processes of a generation say when they enter it.
class Recovery {
 public:
  Recovery() = default;
  /// `committed_steps`: Generation::committed_steps.
  Recovery(int num_processes, std::uint64_t committed_steps)
      : num_processes_(num_processes), committed_steps_(committed_steps) {}
  explicit Recovery(const Generation& generation)
      : Recovery(generation.num_processes(), generation.committed_steps) {}

  /// A process has the state after so many steps; none: it has no state that is whole.
  void on_hello(int process, std::optional<std::uint64_t> steps) { hellos_[process] = steps; }
  /// Processes that have not said it, in order.
  std::vector<int> missing() const;
  bool has_all() const { return hellos_.size() >= static_cast<std::size_t>(num_processes_); }

  // Once has_all().

  /// No process has a state, or it is too old: the one before the newest may be that of a step whose news was
  /// under way.
  bool is_state_lost() const;
  std::uint64_t newest() const;
  bool has_newest(int process) const;
  /// Processes that have the newest state, or that lack it, in order.
  std::vector<int> holders() const { return list(true); }
  std::vector<int> behind() const { return list(false); }

 private:
  std::vector<int> list(bool has_state) const;

  int num_processes_ = 0;
  std::uint64_t committed_steps_ = 0;
  std::map<int, std::optional<std::uint64_t>> hellos_;
};

}  // namespace cohort::membership
