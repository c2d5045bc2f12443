#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/contains.h"
#include "tests/support/random/random_program.h"

/// Calls of random programs: what is handed in and goes back, and what may change in between.
namespace cohort::test {

using Run = std::function<Tensors(const Tensors&)>;

/// What differs from call to call beside the numbers. Nothing here changes in the first three calls.
struct RandomCallsOptions {
  int calls = 5;
  bool changes_grad_outputs = false;     ///< gradients of the results: their layout, and which there are
  bool changes_before_backward = false;  ///< something is written to between forward and backward
  bool changes_inputs = false;           ///< which inputs need a gradient, or have a graph
  bool shares_captured = false;   ///< an input is a captured buffer, in the first calls or in later ones
  bool has_duals = false;         ///< inputs with forward-mode gradients
  bool updates_in_hooks = false;  ///< a hook steps its parameter; eager mode may reject that, and need not
  std::function<void(int call, Draw& draw)> before_call = {};  ///< for both calls of a number
};

namespace random_calls {

struct Seen {
  Tensors results, inputs, gradients, tangents;
  Tensors given;  ///< to the backward of the results
  std::string form, error;
  at::Tensor drawn;
};

inline std::string form_of(const Tensors& results, const Tensors& inputs, const Captured& captured) {
  Tensors all = results;
  for (const Tensors* some : {&inputs, &captured.parameters, &captured.buffers}) {
    all.insert(all.end(), some->begin(), some->end());
  }
  std::ostringstream form;
  for (const at::Tensor& tensor : all) {
    form << tensor.sizes() << tensor.strides();
    // A view that was taken without gradients says that it needs one where its base does, and has none.
    if (tensor.requires_grad() && (!tensor.is_view() || tensor.grad_fn() != nullptr)) form << " grad";
    for (std::size_t k = 0; k < all.size(); ++k) {
      if (all[k].is_alias_of(tensor))
        form << " " << k << "+" << tensor.storage_offset() - all[k].storage_offset();
    }
    form << "\n";
  }
  return form.str();
}

// `kind`: two bits for each of the inputs, and one for whether the first two are the same.
inline Tensors make_inputs(unsigned kind, Tensors& leaves) {
  Tensors inputs;
  for (unsigned i = 0; i < 3; ++i) {
    at::Tensor input = i == 2 ? at::randn({4}) : at::randn({4, 4});
    const unsigned how = (kind >> (2 * i)) & 3U;
    if (how == 1 || how == 2) leaves.push_back(input.requires_grad_());
    if (how == 2) input = input * 1.0;
    if (how == 3 && i < 2) input = at::randn({4, 8}).slice(1, 0, 8, 2);
    inputs.push_back(input);
  }
  if (((kind >> 6) & 1U) != 0) inputs[1] = inputs[0];
  return inputs;
}

// A gradient for `result` in one of several layouts; undefined for none.
inline at::Tensor grad_output_of(const at::Tensor& result, int layout) {
  const at::Tensor values = result.detach().resolve_conj().resolve_neg().clone() + 0.5;
  switch (layout) {
    case 1:
      return values.flatten()[0].expand(values.sizes());
    case 2:
      return values.dim() > 1 ? values.transpose(0, -1).contiguous().transpose(0, -1) : values;
    case 3:
      return values.dim() > 0 ? at::cat({values, values}, -1).narrow(-1, 1, values.size(-1)) : values;
    case 4:
      return values.is_complex() ? values.conj() : values._neg_view();
    case 5:
      return at::Tensor();
    default:
      return values;
  }
}

// One side of the comparison: the plain program, or what was made of it.
struct Side {
  Run run;
  Captured captured;
};

struct RandomCall {
  unsigned seed;
  int number;
  bool gradients;
  unsigned kind;
  const RandomCallsOptions& options;
  const Tensors* given = nullptr;  ///< instead of gradients that depend on the results' values

  bool is_early() const { return number < 3; }
  Draw draw(unsigned salt) const {
    return Draw(seed * 7919 + 1000 + static_cast<unsigned>(number) * 10 + salt);
  }
};

inline void change(const RandomCall& call, Seen& seen, const Side& side) {
  if (seen.results.empty()) return;
  Draw draw = call.draw(1);
  const at::NoGradGuard no_grad;
  const auto pick = [&](const Tensors& some) {
    return some[static_cast<std::size_t>(draw(static_cast<int>(some.size())))];
  };
  const int which = draw(4);
  at::Tensor changed = which == 0   ? pick(seen.inputs)
                       : which == 1 ? pick(side.captured.parameters)
                       : which == 2 ? pick(side.captured.buffers)
                                    : pick(seen.results);
  if (!RandomProgram::may_write(changed)) return;
  if (draw(2) == 0 && changed.dim() > 0 && changed.size(0) > 0) changed = changed.select(0, 0);
  changed.mul_(0.5);
}

inline void run_backward(const RandomCall& call, Seen& seen, const Side& side) {
  if (call.seed % 2 != 0) {
    at::Tensor result = seen.results[call.seed / 2 % seen.results.size()];
    call.seed % 4 == 1 ? result.mul_(side.captured.parameters[0].sum()) : result.sigmoid_();
  }
  if (call.options.changes_before_backward && !call.is_early() && call.number % 2 == 1)
    change(call, seen, side);
  Draw draw(call.seed * 7919 + (call.options.changes_grad_outputs && !call.is_early()
                                    ? 50 + static_cast<unsigned>(call.number)
                                    : 50));
  Tensors roots, grad_outputs;
  for (const at::Tensor& result : seen.results) {
    if (!result.requires_grad() || (result.is_view() && result.grad_fn() == nullptr)) continue;
    const bool is_given = call.given != nullptr && seen.given.size() < call.given->size();
    const at::Tensor grad_output =
        is_given ? (*call.given)[seen.given.size()]
                 : grad_output_of(result, call.options.changes_grad_outputs ? draw(7) : 0);
    seen.given.push_back(grad_output);
    if (!grad_output.defined()) continue;
    roots.push_back(result);
    grad_outputs.push_back(grad_output);
  }
  for (const at::Tensor& input : seen.inputs) {
    if (!input.requires_grad()) continue;
    roots.push_back(input * 0.7);
    grad_outputs.push_back(at::ones(input.sizes()));
  }
  if (!roots.empty()) torch::autograd::backward(roots, grad_outputs);
}

// Forward-mode gradients of `results`; the level ends.
inline Tensors leave_level(const Tensors& results, std::uint64_t level) {
  Tensors tangents;
  for (const at::Tensor& result : results) {
    const at::Tensor tangent = std::get<1>(at::_unpack_dual(result, level));
    tangents.push_back(tangent.defined() ? tangent.detach().clone() : at::Tensor());
  }
  torch::autograd::forward_ad::exit_dual_level(level);
  return tangents;
}

inline Tensors run_with_duals(const Run& run, Tensors& inputs, Tensors& tangents) {
  const std::uint64_t level = torch::autograd::forward_ad::enter_dual_level();
  Tensors duals;
  for (const at::Tensor& input : inputs)
    duals.push_back(at::_make_dual(input, at::ones_like(input) * 0.5, level));
  try {
    const Tensors results = run(duals);
    tangents = leave_level(results, level);
    Tensors primals;
    for (const at::Tensor& result : results) primals.push_back(result.detach());
    return primals;
  } catch (...) {
    torch::autograd::forward_ad::exit_dual_level(level);
    throw;
  }
}

inline Seen make_call(const RandomCall& call, const Side& side) {
  Seen seen;
  Tensors leaves;
  at::manual_seed(call.seed * 100 + static_cast<unsigned>(call.number));
  seen.inputs = make_inputs(call.kind, leaves);
  if (call.options.shares_captured &&
      (call.seed % 3 == 0 ? call.number < 3 : call.number >= 4 && call.number % 2 == 0)) {
    seen.inputs[0] = call.seed % 2 == 0 ? side.captured.buffers[0] : side.captured.buffers[0].view({4, 4});
  }
  for (const at::Tensor& parameter : side.captured.parameters) parameter.mutable_grad().reset();
  const bool is_dual =
      call.options.has_duals && (call.seed % 2 == 0 ? call.number >= 3 : call.number % 3 == 1);
  if (call.options.before_call) {
    Draw draw = call.draw(2);
    call.options.before_call(call.number, draw);
  }
  try {
    const at::AutoGradMode mode(call.gradients);
    if (is_dual) {
      seen.results = run_with_duals(side.run, seen.inputs, seen.tangents);
    } else {
      seen.results = side.run(seen.inputs);
      seen.form = form_of(seen.results, seen.inputs, side.captured);
      if (call.gradients) run_backward(call, seen, side);
    }
  } catch (const std::exception& error) {
    seen.error = error.what();
  }
  leaves.insert(leaves.end(), side.captured.parameters.begin(), side.captured.parameters.end());
  for (const at::Tensor& leaf : leaves) seen.gradients.push_back(leaf.grad());
  seen.drawn = at::rand({3});
  return seen;
}

// Zero tolerance: NaNs are equal, and so are 0 and -0.
inline bool near(const Tensors& a, const Tensors& b, double tolerance) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [&](const at::Tensor& x, const at::Tensor& y) {
           if (x.defined() != y.defined()) return false;
           return !x.defined() || (x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
                                   at::allclose(x.detach(), y.detach(), tolerance, tolerance, true));
         });
}

// `tolerance`: of values; those that gradients went into may come of another order of sums.
inline std::string difference(const Seen& expected, const Seen& found, const Side& ours, const Side& theirs,
                              double tolerance) {
  if (!near(expected.results, found.results, tolerance)) return "other results";
  if (!near(expected.inputs, found.inputs, tolerance)) return "other effects on inputs";
  if (!near(ours.captured.parameters, theirs.captured.parameters, tolerance))
    return "other effects on parameters";
  if (!near(ours.captured.buffers, theirs.captured.buffers, tolerance)) return "other effects on buffers";
  if (!near(expected.gradients, found.gradients, 1e-4)) return "other gradients";  // another order of sums
  if (!near(expected.tangents, found.tangents, 0)) return "other forward-mode gradients";
  if (!at::equal(expected.drawn, found.drawn)) return "other random numbers";
  return expected.form == found.form ? "" : "other shapes, strides or shared memory";
}

}  // namespace random_calls

/// How a program fared: `difference` is empty if none was found.
struct RandomOutcome {
  std::string difference = {};
  int compared = 0;  ///< calls
};

/// Makes of a program what is compared with it; `captured` is what it captured.
using Wrap = std::function<Run(RandomProgram program, const Captured& captured)>;

inline void update_in_hook(const Captured& captured) {
  const at::Tensor& parameter = captured.parameters[0];
  parameter.register_hook([alias = parameter.detach()](const at::Tensor& gradient) {
    const at::NoGradGuard no_grad;
    at::Tensor(alias).sub_(gradient * 0.1);
    return gradient;
  });
}

/// The gradients of call `number` of the plain program if nothing had changed before its backward.
inline Tensors gradients_without_change(const random_calls::RandomCall& call, const random_calls::Seen& found,
                                        const std::vector<unsigned>& kinds,
                                        const RandomProgramOptions& program) {
  RandomCallsOptions unchanged = call.options;
  unchanged.changes_before_backward = false;
  random_calls::Side side{{}, Captured::make(call.seed)};
  side.run = RandomProgram(call.seed, side.captured, program);
  for (int number = 0; number < call.number; ++number) {
    random_calls::make_call(
        {call.seed, number, call.gradients, kinds[static_cast<std::size_t>(number)], call.options}, side);
  }
  return random_calls::make_call({call.seed, call.number, call.gradients, call.kind, unchanged, &found.given},
                                 side)
      .gradients;
}

/// Calls the program of `seed`, and in turn what `wrap` makes of it, on inputs that are leaves, have a graph,
/// are views or each other, with and without gradients; writes to a result and goes back. Expects the same
/// values, effects, gradients, random numbers, and shared memory. Where either throws, the other must, or the
/// error be one of `rejections`.
inline RandomOutcome compare_with_plain(unsigned seed, const Wrap& wrap,
                                        const std::vector<std::string>& rejections,
                                        const RandomProgramOptions& program,
                                        const RandomCallsOptions& options) {
  std::mt19937 draw(seed * 7919 + 1);
  // may_write() asks whether an input is a leaf, which no guard does: either all or none have a graph.
  const auto draw_kind = [&] {
    unsigned kind = static_cast<unsigned>(draw()) & 127U;
    for (unsigned i = 0; options.changes_inputs && i < 3; ++i) {
      if (((kind >> (2 * i)) & 3U) == 2) kind ^= 3U << (2 * i);
    }
    return kind;
  };
  const unsigned kind = draw_kind();
  const bool gradients = draw() % 4 != 0 || options.updates_in_hooks || options.changes_before_backward;
  random_calls::Side ours{{}, Captured::make(seed)}, theirs{{}, Captured::make(seed)};
  if (options.updates_in_hooks) update_in_hook(ours.captured), update_in_hook(theirs.captured);
  ours.run = RandomProgram(seed, ours.captured, program);
  theirs.run = wrap(RandomProgram(seed, theirs.captured, program), theirs.captured);
  RandomOutcome outcome;
  std::vector<unsigned> kinds;
  for (int number = 0; number < options.calls; ++number) {
    const unsigned other_kind = options.changes_inputs && number >= 3 ? draw_kind() : kind;
    const random_calls::RandomCall call{seed, number, gradients, number % 2 == 0 ? kind : other_kind,
                                        options};
    kinds.push_back(call.kind);
    const auto expected = random_calls::make_call(call, ours);
    const auto found = random_calls::make_call(call, theirs);
    if (contains_one_of(found.error, rejections)) return outcome;
    const bool may_differ =
        number < 3 || options.updates_in_hooks;  // LibTorch rejects some writes to aliases
    // A result of a recorded or replayed call is a tensor of one node: no leaf, no view of many, and no view
    // that was taken without gradients.
    const bool is_of_results =
        contains_one_of(expected.error, {"a leaf Variable that requires grad",
                                         "is the output of a function that returns multiple views",
                                         "A view was created in no_grad mode"});
    if (!expected.error.empty() && (may_differ || is_of_results || !found.error.empty())) return outcome;
    ++outcome.compared;
    // LibTorch complains of a node, too, whose gradients go nowhere.
    if (contains_one_of(expected.error, {"modified by an inplace operation"}) && found.error.empty()) {
      if (options.changes_before_backward &&
          !random_calls::near(gradients_without_change(call, found, kinds, program), found.gradients, 1e-4)) {
        outcome.difference =
            "does not throw " + expected.error + ", with other gradients than without the change";
      }
    } else if (expected.error.empty() != found.error.empty()) {
      outcome.difference =
          expected.error.empty() ? "throws " + found.error : "does not throw " + expected.error;
    } else {
      outcome.difference =
          random_calls::difference(expected, found, ours, theirs, options.updates_in_hooks ? 1e-4 : 0);
    }
    if (outcome.difference.empty() && expected.error.empty()) continue;
    if (outcome.difference.empty()) return outcome;
    outcome.difference = "call " + std::to_string(number) + ": " + outcome.difference;
    return outcome;
  }
  return outcome;
}

/// As compare_with_plain(). Reports a difference with as few steps as still show it. Returns how many calls
/// were compared.
inline int expect_like_plain(unsigned seed, const Wrap& wrap, const std::vector<std::string>& rejections,
                             RandomProgramOptions program = {}, const RandomCallsOptions& options = {}) {
  RandomOutcome outcome = compare_with_plain(seed, wrap, rejections, program, options);
  const int compared = outcome.compared;
  if (outcome.difference.empty()) return compared;
  for (int step = RandomProgram::steps_of(seed) - 1; step >= 0; --step) {
    program.left_out.insert(step);
    const RandomOutcome without = compare_with_plain(seed, wrap, rejections, program, options);
    if (without.difference.empty()) {
      program.left_out.erase(step);
    } else {
      outcome = without;
    }
  }
  std::ostringstream steps;
  for (int step = 0; step < RandomProgram::steps_of(seed); ++step) {
    if (program.left_out.count(step) == 0) steps << " " << step;
  }
  ADD_FAILURE() << "program " << seed << ", of its " << RandomProgram::steps_of(seed) << " steps only"
                << steps.str() << ", " << outcome.difference;
  return compared;
}

}  // namespace cohort::test
