#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/autograd/output_aliases.h"
#include "cohort/script/internal/ir/segments.h"
#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

/// What a replay returns for an output: the value itself, other tensors with its memory for what is an alias
/// of an input, a captured tensor or another output. kView: a view of `base`, an input or a captured tensor,
/// by autograd::view_like().
struct Handle {
  /// How the output is related to what it has its memory from.
  enum class AliasType : std::uint8_t { kItself, kDetached, kView };
  AliasType kind = AliasType::kItself;
  int base = -1;  ///< slot that a kView is a view of
  bool operator==(const Handle&) const = default;
};

/// The tape of one call, and what its caller knows about it. Slots are the tape's.
struct Trace {
  Tape tape;                              ///< calls and values
  std::vector<int> inputs;                ///< slots, by argument
  std::vector<const void*> input_places;  ///< where each input's first element lay; null: nowhere
  std::vector<int> outputs;               ///< slots, by result
  std::vector<Handle> handles;            ///< of the outputs
  std::size_t split = 0;                  ///< how many calls belong to forward; the rest is backward
  bool has_backward = false;              ///< whether the calls from `split` on are known
  /// Gradients of the outputs that backward starts from; kUndefined: no gradient.
  std::vector<int> grad_outputs;
  std::vector<int> gradients;        ///< what backward returns; kUndefined: no gradient
  std::vector<bool> needs_gradient;  ///< which outputs do
  autograd::OutputAliases views;     ///< outputs that are made of others
  Tensors leaves;  ///< captured tensors that backward returns a gradient of, after the inputs'
  std::vector<std::vector<bool>> reached_from;  ///< of each gradient: by which grad_outputs
  bool reach_differs = false;                   ///< not every grad_output leads to all of them
  std::vector<Segment> segments;                ///< of backward; at least one where there is a backward
  bool may_run_again = false;                   ///< its function may, once more: function.cpp
  bool grad_outputs_overlap = false;  ///< elements of one share memory, as those of an expanded tensor do
  /// Of the function: whether a gradient that came to it had implicit zeros (gradients.h). Null: no backward.
  std::shared_ptr<std::atomic<bool>> has_met_zeros;
  std::shared_ptr<const void> structure;  ///< what the function returns apart from tensors: script.h
};

}  // namespace cohort::script
