#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cohort/pipeline/stage.h"

namespace cohort::pipeline {

/// Lets gradients reach the leaves of a detached graph only while the graph's own backward runs. Another
/// backward reaches the leaves where a stage kept a tensor with its graph, such as a state that goes from one
/// micro-batch to the next. The graph before the leaf would silently miss that gradient, so the backward
/// throws UsageError. Threads: one at a time.
class BackwardGate {
 public:
  /// Returns autograd::non_leaf_proxies() of `leaves`. A leaf that occurs twice has one proxy, so that its
  /// gradient is added up in the order of its uses, as in one graph.
  Tensors attach(const Tensors& leaves);

  /// The gate is open while it lives: around the graph's own backward.
  class Open {
   public:
    explicit Open(const BackwardGate& entrance) : is_open_(*entrance.is_open_) { is_open_ = true; }
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
