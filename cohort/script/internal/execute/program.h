#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cohort/script/internal/execute/compiled_phase.h"
#include "cohort/script/internal/ir/boxed.h"

/// A tape made ready to run again: docs/design/script.md, "Replay".
namespace cohort::script {

class WarmUp;

/// Storages, told by address. Asked before every replay: most answers take one look at a table of bits.
class StorageSet {
 public:
  /// Adds a storage, by its address.
  void insert(const c10::StorageImpl* storage);
  /// Whether it was added.
  bool holds(const c10::StorageImpl* storage) const {
    const std::uint64_t hash = hash_of(storage);
    return (bits_[hash / 64] >> (hash % 64) & 1) != 0 && is_among(storage);
  }

 private:
  static std::uint64_t hash_of(const c10::StorageImpl* storage) {
    return (reinterpret_cast<std::uintptr_t>(storage) * 0x9E3779B97F4A7C15ULL) >> 52;
  }
  bool is_among(const c10::StorageImpl* storage) const;

  std::array<std::uint64_t, 64> bits_{};
  std::vector<const c10::StorageImpl*> sorted_;
};

/// The values of one run, and the memory of those that do not leave it.
struct Frame {
  Tensors values;                                     ///< by slot
  torch::jit::Stack stack;                            ///< arguments and results of the operator that runs
  c10::intrusive_ptr<Arena> arena;                    ///< null where no part has needed one yet
  std::array<const CompiledPhase*, 2> prepared = {};  ///< by part: whose residents `values` holds
  std::size_t num_resident_blocks = 0;                ///< of the arena, held by values that stay
  bool is_recorded = false;                           ///< its operators are, on the thread that borrowed it
  const CompiledPhase* compiled = nullptr;  ///< of the part that runs; null: this run is its warm-up
  std::shared_ptr<WarmUp> warm_up;          ///< that continues with the next segment
};

/// Runs the operators of a tape on what is in a frame, forked parts of forward on other threads
/// (parallel_regions.h). The first run of a part is a warm-up: it allocates as eager mode does, and shows how
/// later runs need not. From then on what does not leave a run lies in its frame's arena, and operators write
/// into tensors that are there. Views are made without an operator, those of captured tensors once for all
/// runs. Memory: at most kMaxIdleFrames frames are kept between runs, each with its arena. Threads: any
/// number, each with a frame of its own.
class Program {
 public:
  /// Frames that are kept between runs, at most.
  static constexpr std::size_t kMaxIdleFrames = 4;

  explicit Program(Trace trace);
  ~Program();

  /// The trace that it runs.
  const Trace& trace() const { return trace_; }
  /// Slots that forward makes and backward reads.
  const std::vector<int>& saved() const { return plan_.saved; }
  /// Whether backward writes to the memory of each saved value.
  const std::vector<bool>& saved_is_written() const { return plan_.saved_is_written; }
  /// Captured tensors and inputs that backward reads, by slot.
  const std::vector<int>& read_by_backward() const { return plan_.read_by_backward; }
  /// The last call of backward that reads the slot or a view of it.
  std::size_t last_read_by_backward(int slot) const { return plan_.last_read_by_backward[at_slot(slot)]; }
  /// Steps of both parts.
  std::size_t num_steps() const { return plan_.steps.size(); }
  /// Bytes of a frame's arena, and operators that write into it, as far as parts have been warmed up.
  std::size_t arena_bytes() const;
  /// How many operators write into that memory.
  std::size_t num_outs() const;

  /// Whether a gradient that came to it had implicit zeros (gradients.h): the function may have to run again.
  bool has_met_zeros() const { return trace_.has_met_zeros != nullptr && *trace_.has_met_zeros; }
  /// Says that one came, for has_met_zeros().
  void meet_zeros() const {
    if (trace_.has_met_zeros != nullptr) *trace_.has_met_zeros = true;
  }

  /// Whether it uses tensors that are no inputs.
  bool has_captured() const { return !captured_.empty(); }
  /// True if every captured tensor is what it was, but for its values: where it lies, its type, sizes,
  /// strides and requires_grad, which set_data(), t_() and the like change.
  bool captures_valid() const;
  /// True if an input shares memory with a captured tensor, and did not when it was recorded: which of both
  /// is read after a write is then another question.
  bool meets_captured(std::span<const at::Tensor> inputs) const;

  /// Returns a frame that holds the captured tensors, and these inputs; give it back after a run, or let it
  /// go. While the calling thread records, a new one, which runs without an arena and is not kept: no
  /// operator makes an arena's tensors, and a recorder would take them for captured ones.
  std::unique_ptr<Frame> borrow(std::span<const at::Tensor> inputs = {}) const;
  /// Takes a frame back, to be borrowed again, or frees it where enough are kept.
  void give_back(std::unique_ptr<Frame> frame) const;
  /// Drops these values of a frame, but for captured ones.
  void release(Frame& frame, const std::vector<int>& slots) const;

  /// Runs forward, or the calls of backward from `begin` up to `end`, which are the tape's, one segment after
  /// the other in the same frame; whoever calls it has put inputs, saved values and grad_outputs into the
  /// frame.
  void forward(Frame& frame) const { run(frame, Phase::kForward, 0, trace_.split); }
  void backward(Frame& frame, std::size_t begin, std::size_t end) const {
    run(frame, Phase::kBackward, begin, end);
  }
  /// Tells autograd that what a part writes to has changed. To be called when it has run.
  void bump_versions(const Frame& frame, Phase phase) const;

 private:
  // A captured tensor, as it was.
  struct Captured {
    const Value* value;
    const c10::StorageImpl* storage;
    const void* memory;
    std::size_t storage_bytes;
    bool requires_grad;
  };
  // A part as it runs without an arena, and, once it has been warmed up, with one.
  struct PhaseCode {
    CompiledPhase plain;
    mutable std::atomic<bool> is_warmed_up{false};             // or is being
    mutable std::atomic<const CompiledPhase*> ready{nullptr};  // in arena
    mutable std::unique_ptr<const CompiledPhase> arena;
    mutable std::atomic<bool> is_trusted{true};
  };

  void run(Frame& frame, Phase phase, std::size_t first_call, std::size_t end_call) const;
  void begin(Frame& frame, Phase phase) const;
  void warm_up_run(Frame& frame, Phase phase, std::size_t first, std::size_t last,
                   KernelCallOptions options) const;
  void run_phase(Frame& frame, const CompiledPhase& compiled, const PhaseCode& code,
                 KernelCallOptions options) const;
  void run_regions(Frame& frame, const CompiledPhase& compiled, const PhaseCode& code,
                   KernelCallOptions options) const;
  void run_instructions(Frame& frame, torch::jit::Stack& stack, std::span<const Instruction> instructions,
                        const PhaseCode& code, KernelCallOptions options) const;
  void run_instruction(const Instruction& instruction, Frame& frame, torch::jit::Stack& stack,
                       KernelCallOptions options) const;
  bool is_placed(const Instruction& instruction, Frame& frame) const;
  void prepare(Frame& frame, Phase phase, const CompiledPhase& compiled) const;
  void store_results(const OperatorCall& call, Frame& frame, torch::jit::Stack& stack) const;
  void check_results(const OperatorCall& call, const Frame& frame) const;
  std::unique_ptr<Frame> idle_frame() const;
  std::unique_ptr<Frame> new_frame() const;

  Trace trace_;
  ExecutionPlan plan_;
  std::array<PhaseCode, 2> parts_;
  std::vector<Captured> captured_;
  StorageSet captured_storages_;                // but for inputs' own
  std::vector<int> handed_over_;                // slots that give_back() clears
  mutable std::atomic<Frame*> spare_{nullptr};  // the frame of the last run, found without a lock
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Frame>> frames_;  // further ones
};

}  // namespace cohort::script
