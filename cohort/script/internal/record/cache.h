#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cohort/script/internal/execute/program.h"
#include "cohort/script/internal/record/guard.h"
#include "cohort/script/options.h"

namespace cohort::script {

/// What is known about calls under one guard: recordings so far, then a program, or why there is none.
/// Threads: any.
class CacheEntry {
 public:
  /// Whether calls are recorded, replayed, or run as the function is.
  enum class State : std::uint8_t { kRecording, kReady, kEager };

  /// `name`: what the log calls the function.
  CacheEntry(const Environment& environment, std::span<const at::Tensor> inputs, std::string name,
             const ScriptOptions& options);

  /// What a call of this entry does now.
  State state() const { return state_.load(std::memory_order_acquire); }
  /// True if a call under these modes, with these inputs, is one of the entry's.
  bool holds(const Environment& environment, std::span<const at::Tensor> inputs) const;
  /// True if a captured tensor is no more what it was, so that its program can never run again.
  bool is_dead() const;
  /// The program, once kReady; null otherwise.
  const std::shared_ptr<const Program>& program() const {
    static const std::shared_ptr<const Program> none;
    return state() == State::kReady ? program_ : none;
  }

  /// True where calls run the function itself: it stays eager, or its program is too short to gain anything.
  bool runs_body() const {
    const State now = state();
    return now == State::kEager || (now == State::kReady && is_short());
  }

  /// Says that a call records now; false where this one need not: after sixteen without a backward,
  /// only the 32nd, 64th, 128th and so on does.
  bool start_recording();
  /// True if a watched module has a parameter or buffer in the memory of an input; counts such calls.
  bool has_module_memory(std::span<const at::Tensor> inputs) const;
  /// Takes a recording that ended: equal to the one before, it becomes the program; else it waits for the
  /// next.
  void add_trace(Trace trace);
  /// Stays eager from now on.
  void mark_eager(std::string reason);
  /// True when a call of a program is to be recorded and compared with it instead: as ScriptOptions say, and
  /// where an input is the first that is not the tensor of all calls before.
  bool is_verification_due(std::span<const at::Tensor> inputs);
  /// Begins a recording: takes inputs down, and watches what the program or the last recording captured.
  void begin(Trace& trace, std::span<const at::Tensor> inputs) const;
  /// Says that the program must not run any more: the next call records anew.
  void retire() { is_retired_.store(true, std::memory_order_release); }
  /// Ends the forward of a verification: gives up where its operators are not the program's.
  void verify_forward(Trace& trace);
  /// Ends a verification: gives up where the recording differs from the program.
  void verify(Trace trace);
  /// Gives up, and says so in the log, if `difference` from the program is not empty. `is_alone`: false where
  /// other threads' random numbers or changes may be the reason; then the third difference in a row counts.
  void compare(const std::string& difference, bool is_alone = true);

  /// The modes that it was made under.
  const Environment& environment() const { return environment_; }
  /// True if its modules are as they were when it was made.
  bool modules_hold() const { return modules_.holds(); }
  /// Says what its guards are, and what was recorded or why not.
  std::string explain() const;

 private:
  bool is_short() const {
    return program_->trace().split < static_cast<std::size_t>(options_.min_operators());
  }
  void set_state(State state);
  std::string difference_of_captured(const Trace& now, const Trace& before) const;
  bool has_new_input(std::span<const at::Tensor> inputs) const;
  void find_same_inputs(const Trace& now, const Trace& before);
  void allow_inputs(const Trace& trace);
  void warn_if_unwatched() const;
  std::string guards() const;

  Environment environment_;
  InputGuard inputs_;
  ModuleGuard modules_;
  const std::string name_;
  const ScriptOptions options_;
  std::atomic<bool> is_retired_{false};
  std::atomic<State> state_{State::kRecording};
  std::atomic<std::int64_t> calls_{0};
  std::atomic<int> doubts_{0};
  mutable std::mutex mutex_;
  mutable std::atomic<std::int64_t> calls_with_module_memory_{0};
  int tried_ = 0;
  int num_recordings_ = 0;
  int changed_ = 0;  // recordings in a row during which captured tensors were changed
  // By input: where it lay in all recorded calls; null where it lay elsewhere in some.
  std::vector<std::atomic<const void*>> same_inputs_;
  std::atomic<bool> has_same_inputs_{false};
  std::unique_ptr<Trace> last_;
  std::shared_ptr<const Program> program_;  // set once, before the state says so: then read without a lock
  std::string difference_;                  // between the last two recordings
  std::string reason_;
};

/// The entries of one scripted function. Threads: any.
class Cache {
 public:
  /// Calls of the function after which an entry that none of them used may go.
  static constexpr std::uint64_t kStaleCalls = 256;

  /// `name` is what the log and explain() call the function.
  Cache(std::string name, ScriptOptions options);

  /// Returns the entry for these inputs, a new one if need be, for which one that was not asked for in the
  /// last kStaleCalls calls goes; null where there are too many, which is logged once.
  std::shared_ptr<CacheEntry> find(std::span<const at::Tensor> inputs);
  /// Options as they were given.
  const ScriptOptions& options() const { return options_; }
  /// Explains all entries, one after the other.
  std::string explain() const;
  /// Returns the entries that modules, as they are now, and captured tensors, where they lie, allow to run.
  std::vector<std::shared_ptr<CacheEntry>> live_entries() const;
  /// Forgets all entries; calls that run keep theirs.
  void clear();

 private:
  std::string name_;
  ScriptOptions options_;
  mutable std::mutex mutex_;
  struct LruEntry {
    std::shared_ptr<CacheEntry> entry;
    std::uint64_t last_call;  // that asked for it
  };
  std::vector<LruEntry> entries_;
  std::uint64_t calls_ = 0;
  bool was_full_ = false;
};

}  // namespace cohort::script
