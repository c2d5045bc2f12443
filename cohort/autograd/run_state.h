#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

/// State of a thread that both runs of a recompute() begin with, and that a module above autograd keeps: what
/// remote calls are recorded in.
namespace cohort::autograd {

/// While it lives, this thread runs the function of a recompute(). Threads: the one that made it.
class RunScope {
 public:
  virtual ~RunScope() = default;
  /// Once the function has returned: tensors at which each backward of this run begins too, besides its
  /// results.
  virtual std::vector<at::Tensor> end() = 0;
};

/// What the thread has as the first run begins. Both runs get it, so that they do the same. It lives as long
/// as the graph of the results.
class RunState {
 public:
  virtual ~RunState() = default;
  /// On the thread whose state it is. `inputs`: what the function gets.
  virtual std::unique_ptr<RunScope> begin_first_run(const std::vector<at::Tensor>& inputs) = 0;
  /// In backward, on any thread; perhaps several times. Throws: what keeps the function from running again.
  virtual std::unique_ptr<RunScope> begin_second_run(const std::vector<at::Tensor>& inputs) = 0;
};

/// From now on each recompute() calls `take` before its first run. Null: none does. Returns true, so that a
/// module can call it as it is loaded. Threads: any.
bool set_run_state(std::unique_ptr<RunState> (*take)());

}  // namespace cohort::autograd
