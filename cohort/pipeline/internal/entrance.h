#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cohort/pipeline/stage.h"

namespace cohort::pipeline {

/// Where a graph that is cut off begins: its leaves get gradients in its own backward alone. A later backward
/// reaches them where somebody kept a tensor with its graph, such as a state that goes from one micro-batch
/// to the next. What lies behind a leaf would miss that gradient without a word, so it throws. Threads: one
/// at a time.
class Entrance {
 public:
  /// What stands for `leaves`: autograd::entered(). For a leaf that stands there twice it is one tensor, so
  /// that its gradient is added up in the order of its uses, as without a cut.
  Tensors enter(const Tensors& leaves);

  /// While it lives the graph's own backward runs.
  class Open {
   public:
    explicit Open(const Entrance& entrance) : is_open_(*entrance.is_open_) { is_open_ = true; }
    ~Open() { is_open_ = false; }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    std::atomic<bool>& is_open_;
  };

 private:
  std::shared_ptr<std::atomic<bool>> is_open_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace cohort::pipeline
