#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cohort/membership/generation_change.h"

/// How the processes of a generation make steps, each of which is a transaction. No tensor, thread, clock or
/// socket, so a test runs it with messages in any order.
namespace cohort::membership {

/// What processes of a generation send each other.
struct StepMessage {
  enum class Type : std::uint8_t {
    kHello,    ///< the sender has entered the generation, with `step` steps committed
    kState,    ///< the state after `step` steps, to a process that lacks it
    kCover,    ///< the receiver's slice of what the sender's virtual ranks give
    kSum,      ///< the sender's slice of the sum over all virtual ranks
    kGoodbye,  ///< the sender leaves the generation, with `step` steps committed
  };
  Type type = Type::kHello;
  std::uint64_t generation = 0;
  int from = 0;  ///< number of the sending process in the generation
  std::uint64_t step = 0;
  std::string payload;
};

/// What a process does for the protocol.
class StepHost {
 public:
  virtual ~StepHost() = default;
  virtual void send(int process, StepMessage message) = 0;
  /// Parameters and all else that steps change, after the committed steps.
  virtual std::string state() = 0;
  virtual void copy_state(const std::string& state, std::uint64_t steps) = 0;
  /// Begins to compute what its virtual ranks give for a step; StepProtocol::on_computed() follows. What it
  /// computed before is not needed. Returns false where all steps are made: then the process enters the next
  /// generation at once.
  virtual bool compute(std::uint64_t step) = 0;
  /// A slice of what was computed; process `slice` adds it.
  virtual std::string cover(std::uint64_t step, int slice) = 0;
  /// Adds the covers of all processes, in their order: this process's own slice.
  virtual std::string add(std::uint64_t step, const std::vector<std::string>& covers) = 0;
  /// Begins to change the state; StepProtocol::on_applied() follows.
  virtual void apply(std::uint64_t step, const std::vector<std::string>& sums) = 0;
  /// The process is in the generation now.
  virtual void on_entered(const Generation& generation) = 0;
  /// The process is in no generation any more, and makes no step.
  virtual void on_left() = 0;
  /// No process of the generation has the state that was committed before.
  virtual void on_state_lost() = 0;
};

/// A process's side of the steps. Threads: one at a time.
class StepProtocol {
 public:
  /// `committed_steps`: of the state that the process has. Ownership: refers to the host.
  StepProtocol(StepHost& host, std::uint64_t committed_steps) : host_(host), committed_(committed_steps) {}

  /// The agents have agreed on a generation, in which this process has a number, or none: what
  /// Generation::for_ranks() gives. It enters at once, or after the step that is under way where the change
  /// is planned.
  void announce(const Generation& generation, std::optional<int> process);
  /// From a process of this generation, or of one that this process has not entered yet.
  void on_message(StepMessage message);
  void on_computed(std::uint64_t generation, std::uint64_t step);
  void on_applied();
  /// A process of this generation cannot be reached any more: no step will be finished with it.
  void on_link_lost();

  std::uint64_t committed_steps() const { return committed_; }
  /// Of the generation that it is in; 0: it is in none.
  std::uint64_t generation() const { return is_in() ? change_.generation().number : 0; }
  /// Whether the state is being changed: a process that dies now leaves no state.
  bool is_applying() const { return phase_ == Phase::kApplying; }

 private:
  enum class Phase : std::uint8_t { kIdle, kRecovering, kComputing, kExchanging, kApplying };
  int size() const { return change_.generation().num_processes(); }
  bool is_in() const { return change_.process().has_value(); }
  int process() const { return *change_.process(); }
  void enter_if_due();
  void enter_next();
  void recover();
  void begin_step();
  void exchange();
  void send_to_all(StepMessage::Type type, std::uint64_t step, const std::string& payload);
  StepMessage message_of(StepMessage::Type type, std::uint64_t step, std::string payload) const;

  StepHost& host_;
  std::uint64_t committed_;
  Phase phase_ = Phase::kIdle;
  bool has_added_ = false;
  GenerationChange change_;
  Recovery recovery_;
  // By step, then by process: those of the next step come before this one has ended here.
  std::map<std::uint64_t, std::map<int, std::string>> covers_, sums_;
  std::vector<StepMessage> early_;  // of generations that this process has not entered
};

}  // namespace cohort::membership
