// The part of the graph that a handler makes. Its arguments become leaves, so the graph ends there, and its
// results are cut off: their gradients come as another call, which runs this part's own backward. Values of
// objects that the handler made are kept as leaves too. Always: only what the handler's own thread computed
// until it returned belongs to the part. A handler that answers later has no graph, and its results have no
// gradient.
#include "cohort/rpc/internal/recorded_part.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/recomputed_calls.h"

namespace cohort::rpc {
namespace {

using Tensors = ContextState::Tensors;

[[maybe_unused]] const bool calls_are_repeated = autograd::set_run_state(take_state_of_calls);

void check_may_be_replaced(const ObjectValue& value) {
  if (value.decode != nullptr) return;
  throw UsageError(
      "rpc.context",
      "an object that is kept by pointer, or a module, holds a tensor that was computed in the context",
      "an object that is returned by value, or detach()");
}

}  // namespace

RecordedPart::RecordedPart(std::shared_ptr<ContextState> context, ContextState::CallKey key, CallPath path,
                           Encoded& arguments, bool answers_later)
    : context_(std::move(context)), key_(key) {
  record_.path = path;
  // Another trainer may step a parameter meanwhile. Where its value was saved LibTorch rejects that.
  static constexpr autograd::DetachedGraph::Words kWords{"rpc.context",
                                                         "pass it as an argument, or detach() it", nullptr};
  for (const at::Tensor& tensor : arguments.tensors) {
    record_.inputs_with_gradient.push_back(autograd::needs_gradient(tensor));
  }
  record_.graph = std::make_shared<autograd::DetachedGraph>(arguments.tensors, kWords);
  arguments.tensors = record_.graph->leaves();
  for (const at::Tensor& leaf : arguments.tensors) {
    if (autograd::needs_gradient(leaf)) context_->mark_argument(leaf);
  }
  if (!answers_later) scope_.emplace(context_, std::move(path), arguments.tensors);
}

// The detached graph knows only what this thread computed while the handler ran.
bool RecordedPart::may_record() const {
  return scope_ && std::this_thread::get_id() == thread_;
}

// Ends the graph of the handler. Returns its results cut off.
Tensors RecordedPart::end_graph(Tensors results) {
  const std::size_t num_results = results.size();
  const Tensors late = scope_->late();
  record_.num_late = late.size();
  results.insert(results.end(), late.begin(), late.end());
  results = record_.graph->end(results);
  for (const at::Tensor& leaf : record_.graph->captured()) context_->check_leaf(leaf);
  results.resize(num_results);
  for (at::Tensor& result : results) result = result.detach();
  return results;
}

bool RecordedPart::end(Encoded& results) {
  if (!may_record()) {
    for (at::Tensor& tensor : results.tensors) tensor = tensor.detach();
    return false;
  }
  results.tensors = end_graph(std::move(results.tensors));
  bool needs_gradient = false;
  for (std::size_t i = 0; i < results.tensors.size(); ++i) {
    if (!record_.graph->needs_gradient()[i]) continue;
    results.tensors[i].requires_grad_();
    needs_gradient = true;
  }
  const bool is_late = record_.num_late > 0;
  if (needs_gradient || is_late) context_->add_record(key_, std::move(record_));
  return is_late;
}

// What a handler computed that answers later has no gradient. A parameter stays itself.
void RecordedPart::cut_off(ObjectValue& value) const {
  if (value.encode == nullptr || value.decode == nullptr) return;
  Encoded encoded = value.encode(value.pointer.get());
  const Tensors& arguments = record_.graph->leaves();
  bool is_changed = false;
  for (at::Tensor& tensor : encoded.tensors) {
    const bool is_argument = std::any_of(arguments.begin(), arguments.end(), [&](const at::Tensor& argument) {
      return argument.is_same(tensor);
    });
    if (!tensor.requires_grad() || (tensor.is_leaf() && !is_argument)) continue;
    tensor = tensor.detach();
    is_changed = true;
  }
  if (is_changed) value.pointer = value.decode(encoded);
}

void RecordedPart::end(ObjectValue& value) {
  if (!may_record()) return cut_off(value);
  Encoded encoded = value.encode == nullptr ? Encoded() : value.encode(value.pointer.get());
  const Tensors given = encoded.tensors;
  const Tensors cut = end_graph(given);
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!record_.graph->needs_gradient()[i]) continue;
    at::Tensor& tensor = record_.values.emplace_back();
    // A parameter stays itself: the gradients of its users are its own.
    if (!scope_->has_history(given[i])) continue;
    check_may_be_replaced(value);
    encoded.tensors[i] = tensor = cut[i].requires_grad_();
    context_->mark_value(tensor);
  }
  if (any_defined(record_.values)) value.pointer = value.decode(encoded);
  if (any_defined(record_.values) || record_.num_late > 0) context_->add_record(key_, std::move(record_));
}

void record_object(ContextScope& scope, ContextState::CallKey key, ObjectValue& value) {
  if (value.encode == nullptr) return;
  Encoded encoded = value.encode(value.pointer.get()), with_history;
  std::vector<at::Tensor*> places;
  for (at::Tensor& tensor : encoded.tensors) {
    if (!autograd::needs_gradient(tensor) || !scope.has_history(tensor)) continue;
    with_history.tensors.push_back(tensor);
    places.push_back(&tensor);
  }
  if (places.empty()) return;
  check_may_be_replaced(value);
  ContextState::CallRecord record;
  record.path = scope.next_place().path;
  const std::shared_ptr<ContextState>& context = scope.context();
  SendGradients send = [weak = std::weak_ptr(context), key](const Tensors& /*none*/) {
    const std::shared_ptr<ContextState> known = weak.lock();
    if (known == nullptr) throw UsageError("rpc.backward", "the context of an object has ended");
    base::Promise<Encoded> gradients("the gradients of an object");
    gradients.run([&] { return encode_gradients(known->backward_part(key, known->current_backward(), {})); });
    return gradients.future();
  };
  scope.record(with_history, {std::move(send)})->make_late();
  for (std::size_t i = 0; i < places.size(); ++i) *places[i] = with_history.tensors[i];
  value.pointer = value.decode(encoded);
  record.values = std::move(with_history.tensors);
  for (const at::Tensor& leaf : record.values) context->mark_value(leaf);
  context->add_record(key, std::move(record));
}

}  // namespace cohort::rpc
