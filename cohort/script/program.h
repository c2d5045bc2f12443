#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cohort/script/tape.h"

/// A tape made ready to run again: docs/script.md, "Replay".
namespace cohort::script {

/// A recording and what its caller knows about it. Slots are the tape's.
struct Recorded {
  Tape tape;
  std::vector<int> inputs;
  std::vector<int> outputs;
  std::size_t split = 0;  ///< how many calls belong to forward; the rest is backward
  bool has_backward = false;
  std::vector<int> tangents;  ///< gradients of the outputs that backward starts from; kUndefined: no gradient
  std::vector<int> gradients;        ///< what backward returns; kUndefined: no gradient
  std::vector<bool> needs_gradient;  ///< which outputs do
  Tensors leaves;  ///< captured tensors that backward returns a gradient of, after the inputs'
  std::vector<std::vector<bool>> reached_from;  ///< of each gradient: by which tangents
};

/// The values of one run.
struct Frame {
  Tensors values;  ///< by slot
  torch::jit::Stack stack;
};

/// Runs the operators of a tape in their order on what is in a frame.
/// Values are let go after their last use, views are made without an operator, those of captured tensors once
/// for all runs. Threads: any number, each with a frame of its own.
class Program {
 public:
  explicit Program(Recorded recorded);

  const Recorded& recorded() const { return recorded_; }
  /// Slots that forward makes and backward reads.
  const std::vector<int>& saved() const { return saved_; }
  /// Captured tensors and inputs that backward reads, by slot.
  const std::vector<int>& read_by_backward() const { return read_by_backward_; }
  /// Inputs and captured tensors, by slot, that the tape writes to.
  const std::vector<int>& written() const { return written_; }
  std::size_t num_steps() const { return steps_.size(); }

  /// True if every captured tensor still lies where it lay: set_data() and the like move it.
  bool captured_in_place() const;

  /// Returns a frame that holds the captured tensors; give it back after a run, or let it go.
  std::unique_ptr<Frame> borrow() const;
  void give_back(std::unique_ptr<Frame> frame) const;

  /// Runs forward or backward; whoever calls it has put inputs, saved values and tangents into the frame.
  void forward(Frame& frame) const;
  void backward(Frame& frame) const;
  /// Tells autograd that what the tape writes to has changed.
  void bump_versions(const Frame& frame) const;

 private:
  struct Step {
    std::size_t call = 0;
    int view_of = kUndefined;  // the base of a view, which needs no operator
    int view = kUndefined;
    std::int64_t offset = 0;  // from the base's
    std::vector<int> drop;    // values that nobody uses afterwards
  };

  void plan();
  bool plan_views(std::size_t call, std::vector<Step>& steps);
  bool is_elided(const Call& call) const;
  void plan_lives();
  void find_effects();
  void run(Frame& frame, std::size_t begin, std::size_t end) const;
  void run_call(const Call& call, Frame& frame, bool find_kernels) const;
  at::Tensor view_of(const at::Tensor& base, const Layout& layout, std::int64_t offset) const;

  Recorded recorded_;
  std::vector<Step> steps_;
  std::size_t split_ = 0;  // of steps_
  std::vector<bool> hoisted_;
  Tensors fixed_;  // captured tensors, constants and their views, by slot
  std::vector<std::pair<at::Tensor, const c10::StorageImpl*>> homes_;
  std::vector<int> saved_, read_by_backward_, written_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Frame>> frames_;
};

}  // namespace cohort::script
