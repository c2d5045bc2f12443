#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cohort/autograd/detached_graph.h"
#include "cohort/rpc/backward_options.h"
#include "cohort/rpc/codec_values.h"
#include "cohort/rpc/encoded.h"
#include "cohort/rpc/internal/backward_failures.h"
#include "cohort/rpc/internal/protocol/context_protocol.h"
#include "cohort/rpc/internal/untaken_gradients.h"

/// What a worker knows of one context of distributed autograd: the parts of its graph that lie here, and the
/// gradients of leaves here.
namespace cohort::rpc {

/// Where a call stands in a context: the place of its caller's handler, and then its number among the calls
/// of that handler. The same whichever workers there are and however fast they run.
using CallPath = std::vector<std::uint32_t>;

/// What a call within a context takes along.
struct RecordedPlace {
  ContextId context;
  CallPath path;
};
COHORT_NESTED(RecordedPlace, context, path)

/// One context on one worker. Threads: any.
class ContextState {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // of each leaf
  /// A backward of the context: they are numbered from 1 on.
  struct Backward {
    std::uint64_t number = 0;
    bool keep_graph = false;
  };
  /// Which call a part answers: the caller's id and its number there.
  using CallKey = std::pair<std::int32_t, std::uint64_t>;
  /// What a call left here.
  struct CallRecord {
    CallPath path;
    std::shared_ptr<autograd::DetachedGraph> graph;  ///< null: each result is an input, or one of `fetched`
    std::vector<bool> inputs_with_gradient;
    std::size_t num_late = 0;  ///< Note [Late calls]: of its handler. The last results of `graph`
    Tensors values;            ///< of an object: its tensors, undefined for those that stand for themselves
    Tensors fetched;           ///< leaves whose values the call returned
  };

  ContextState(ContextId id, ContextProtocol::CopyId copy, std::weak_ptr<const void> home);

  ContextId id() const { return id_; }
  ContextProtocol::CopyId copy() const { return copy_; }
  /// Whether the agent with this mark has it.
  bool is_of(const void* home) const { return home_.lock().get() == home; }
  const at::Tensor& anchor() const { return anchor_; }

  bool has_ended() const { return has_ended_; }
  /// Results that come now have no gradient.
  void end() { has_ended_ = true; }

  void add_record(CallKey key, CallRecord record);
  /// The answer to a fetch of an object's value: gradients continue to the leaves that it has.
  void add_fetch(CallKey key, CallPath path, Encoded& value);
  /// Says of what a leaf is that stands for a tensor with a history, as long as the leaf lives.
  void mark_argument(const at::Tensor& leaf) const;
  void mark_value(const at::Tensor& leaf) const;
  /// Throws: UsageError for a marked leaf at which a gradient of this context would end.
  void check_leaf(const at::Tensor& leaf) const;
  /// Whether it is of an object that was made in this context, so that gradients continue from it.
  bool is_value(const at::Tensor& tensor) const;

  /// Goes backward through a part; returns the gradients of its inputs, where they need one. Nothing, where
  /// no gradient came. Throws: UsageError where there is no such part.
  Tensors backward_part(CallKey key, Backward backward, Tensors gradients);
  /// Goes backward from the roots, through this worker's graph and all parts that it leads to. `late`:
  /// late_calls().
  void backward(const Tensors& roots, const Tensors& late, dist_autograd::BackwardOptions options);
  /// Throws: UsageError where none runs: the roots of another context's lead through a call of this one. The
  /// error of one that has failed.
  Backward current_backward() const;

  /// The backward with this number has failed, here or elsewhere. The first error counts. No further part of
  /// the backward runs here, and what BackwardFailures::on_failure() got is called.
  void fail(std::uint64_t backward, const std::exception_ptr& error) { failures_->fail(backward, error); }
  const std::shared_ptr<BackwardFailures>& failures() const { return failures_; }

  /// Adds what an answer says of the backward with this number.
  void add_untaken(std::uint64_t backward, const UntakenGradients& more);
  /// Takes out what was added since the last call, here and by answers.
  UntakenGradients take_untaken(std::uint64_t backward);

  /// Backwards that run: of the context, and of parts here.
  int num_running() const;

  /// Which gradients: of leaves that the root's program used, or that calls used here.
  enum class Of : std::uint8_t { kAll, kProgram, kCalls };
  /// Sums, in an order that does not depend on when they came. A sum is the context's own tensor: it is the
  /// tensor that a node returned where nobody else has that. The next call returns it again, unless further
  /// gradients have come. But a leaf that the root's program used, and calls too, has a new sum each time.
  Gradients gradients(Of of = Of::kAll);

 private:
  class Running;
  using Order = std::pair<std::uint64_t, CallPath>;  // the backward, and the part; the root's own has no path
  struct Earlier {
    bool operator()(const Order& a, const Order& b) const;
  };
  // A tensor of an object.
  struct Value {
    at::Tensor tensor;
    std::uint64_t last_gradient = 0;  // the backward in which one came
    std::uint64_t last_backward = 0;  // in which its gradients were taken
    bool has_graph = true;
  };
  // A gradient of a leaf, of one part of the graph, or a sum of several.
  struct Collected {
    at::Tensor leaf, gradient;
    bool is_own = false;  // nobody but the context and who asked has it
  };
  struct SumOfLeaf;
  void add_gradients(Order order, const Gradients& gradients);
  void count_untaken(std::uint64_t backward, const UntakenGradients& more);
  void check_all_taken(std::uint64_t backward);
  std::vector<SumOfLeaf> collect_by_leaf(Of of);
  void check_not_failed(std::uint64_t backward) const;
  Tensors run_part(CallKey key, Backward backward, Tensors gradients);
  void run(std::uint64_t number, const Tensors& roots, const Tensors& late,
           dist_autograd::BackwardOptions options);
  Tensors take_gradients(const CallRecord& record, std::uint64_t number, bool keep_graph);
  Tensors backward_graph(const CallRecord& record, bool keep_graph, Tensors gradients,
                         Gradients& of_leaves) const;

  const ContextId id_;
  const ContextProtocol::CopyId copy_;
  const std::weak_ptr<const void> home_;
  const at::Tensor anchor_;
  const std::shared_ptr<BackwardFailures> failures_ = std::make_shared<BackwardFailures>();
  std::atomic<bool> has_ended_{false};
  mutable std::mutex mutex_;  // of all below
  std::map<CallKey, CallRecord> records_;
  std::unordered_map<const c10::TensorImpl*, Value> values_;
  std::map<Order, std::vector<Collected>, Earlier> gradients_;
  Backward backward_;
  UntakenGradients untaken_;      // that nobody has been told of,
  std::uint64_t untaken_in_ = 0;  // in this backward
  int num_running_ = 0;           // backwards, here and of parts
};

/// Whether some of them are defined: of gradients, whether any came.
bool any_defined(const std::vector<at::Tensor>& tensors);

}  // namespace cohort::rpc
