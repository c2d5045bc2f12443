#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/autograd/detached_graph.h"
#include "cohort/rpc/context_id.h"
#include "cohort/rpc/internal/gradient_nodes.h"

/// What a worker knows of contexts of distributed autograd: the parts of their graphs that lie here, and the gradients of
/// leaves here.
namespace cohort::rpc {

using dist_autograd::ContextId;

/// Where a call stands in a context: the place of its caller's handler, and then its number among the calls of that handler. The same
/// whichever workers there are and however fast they run.
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
  using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // of each leaf
  /// A backward of the context: they are numbered from 1 on.
  struct Backward {
    std::uint64_t number = 0;
    bool keep_graph = false;
  };
  /// Which call a part answers: the caller's id and its number there.
  using PartKey = std::pair<std::int32_t, std::uint64_t>;
  struct Part {
    std::shared_ptr<autograd::DetachedGraph> graph;
    std::vector<bool> inputs_with_gradient;
    CallPath path;
  };

  ContextState(ContextId id, std::weak_ptr<const void> home);

  ContextId id() const { return id_; }
  /// Whether the agent with this mark has it.
  bool is_of(const void* home) const { return home_.lock().get() == home; }
  const at::Tensor& anchor() const { return anchor_; }

  /// Before a call is recorded. False where the context has ended: it is not.
  bool note_callee(const std::string& worker);
  /// No call is recorded any more. Returns whom this worker has called.
  std::set<std::string> end();

  void add_part(PartKey key, Part part);
  /// Goes backward through a part; returns the gradients of its inputs, where they need one.
  /// Throws: UsageError where there is no such part.
  std::vector<at::Tensor> backward_part(PartKey key, Backward backward,
                                        const std::vector<at::Tensor>& gradients);
  /// Goes backward from the roots, through this worker's graph and all parts that it leads to.
  void backward(const std::vector<at::Tensor>& roots, bool keep_graph);
  /// Throws: UsageError where none runs: the roots of another context's lead through a call of this one.
  Backward current_backward() const;

  /// Sums, in an order that does not depend on when they came.
  Gradients gradients() const;

 private:
  class Running;
  using Order = std::pair<std::uint64_t, CallPath>;  // the backward, and the part; the root's own has no path
  struct Earlier {
    bool operator()(const Order& a, const Order& b) const;
  };
  void add_gradients(Order order, const Gradients& gradients);

  const ContextId id_;
  const std::weak_ptr<const void> home_;
  const at::Tensor anchor_;
  mutable std::mutex mutex_;  // of all below
  std::set<std::string> callees_;
  std::map<PartKey, Part> parts_;
  std::map<Order, Gradients, Earlier> gradients_;
  Backward backward_;
  int num_running_ = 0;  // backwards, here and of parts
  bool has_ended_ = false;
};

/// Makes a context the current one of this thread while it lives.
class ContextScope {
 public:
  ContextScope(std::shared_ptr<ContextState> context, CallPath path);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  /// The current one; null where there is none.
  static const std::shared_ptr<ContextState>& current();
  /// A sequence number below those of all nodes that this thread made since the scope began, while there are such.
  static std::uint64_t next_low_number();
  /// The place of the next call that this thread makes.
  static RecordedPlace next_place();

 private:
  const std::shared_ptr<ContextState> context_;
  const CallPath path_;
  ContextScope* outer_;
  std::uint32_t num_calls_ = 0;
  std::uint64_t next_low_ = 0, last_low_ = 0;
};

/// The contexts of a worker. Threads: any.
class Contexts {
 public:
  explicit Contexts(std::int32_t self) : self_(self) {}
  std::shared_ptr<ContextState> create();
  /// For a call that came. Of a context that has ended nothing is kept.
  std::shared_ptr<ContextState> find_or_make(ContextId id);
  /// Throws: UsageError for one that is not here, or has ended.
  std::shared_ptr<ContextState> find(ContextId id) const;
  /// The same; null, where find() throws.
  std::shared_ptr<ContextState> find_if_here(ContextId id) const;
  /// Forgets it, and sets `callees` to those whom this worker has called in it, who are to forget theirs. Returns what is left
  /// of it, graphs and tensors, for whoever may take the time to free them.
  std::shared_ptr<void> end(ContextId id, std::set<std::string>& callees);
  /// The contexts of a worker that is dead, likewise.
  std::shared_ptr<void> on_down(std::int32_t worker);
  std::size_t size() const;
  const void* mark() const { return mark_.get(); }

 private:
  const std::int32_t self_;
  const std::shared_ptr<const void> mark_ = std::make_shared<char>();
  mutable std::mutex mutex_;  // of all below
  std::uint64_t next_number_ = 1;
  std::map<ContextId, std::shared_ptr<ContextState>> contexts_;
  // For calls that come after the end: contexts of late, and workers that are dead.
  std::deque<ContextId> ended_;
  std::set<std::int32_t> down_;
};

/// The part of a graph that a call makes on its callee, while the handler runs.
class RecordedPart {
 public:
  /// Cuts the arguments off: the handler gets leaves.
  RecordedPart(std::shared_ptr<ContextState> context, ContextState::PartKey key, CallPath path,
               Encoded& arguments);
  /// Ends the part: the results travel without their graph, and those that need a gradient say so; none, where the handler
  /// answers later.
  void end(Encoded& results, bool answers_later);

 private:
  const std::shared_ptr<ContextState> context_;
  const ContextState::PartKey key_;
  const std::thread::id thread_ = std::this_thread::get_id();
  ContextState::Part part_;
};

}  // namespace cohort::rpc
