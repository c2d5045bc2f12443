#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "cohort/pipeline/internal/run.h"

namespace cohort::pipeline {

/// The actions of one placement in a run. What a stage has computed waits here for the action that sends it,
/// or, where the next stage is on this placement too, for that one's action. Internal to Pipeline.
class PlacementRun {
 public:
  PlacementRun(Run& run, int placement);
  /// Does them, until the end or until the run has failed. Throws: StageError; as Channel does.
  void work();

 private:
  void act(const Action& action);
  void send(Run::Edge to, const Action& action);
  void receive(Run::Edge at, const Action& action);
  Message take(Run::Edge at, int micro_batch);

  void compute(const Action& action);
  void forward(const Action& action);
  void check_written(const std::vector<std::size_t>& written, const Tensors& tensors,
                     const std::vector<bool>& wanted, int stage);
  void loss(const Action& action, const Tensors& outputs);
  void backward(const Action& action);
  Tensors gradients_of_outputs(const Action& action, Tensors& carried);
  void release(const Action& action);

  Batch::Held& held(const Action& action);
  bool is_last(int stage) const { return stage + 1 == static_cast<int>(setup_.stages.size()); }
  at::Tensor here(const at::Tensor& tensor) const;
  std::string message(const Action& action, const std::string& what) const;

  Run& run_;
  const Setup& setup_;
  Batch& batch_;
  const int placement_;
  Run::OfPlacement& own_;
  Tensors inputs_;  // of a forward, for messages
  std::map<Run::Edge, std::deque<Message>> waiting_;
};

/// Does what the plan says for this placement, on the calling thread, until the end or until the run has
/// failed. What it throws is the run's failure.
void run_placement(Run& run, int placement);

}  // namespace cohort::pipeline
