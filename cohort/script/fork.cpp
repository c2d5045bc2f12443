// A forked part is a task that runs once: on a thread of the pool, or on the worker that waits for it first.
// Where gradients are enabled it computes on inputs of its own, in a graph of its own; wait() joins that
// graph to the caller's by one node, whose backward runs the part's graph. Always: a part sees the
// thread-local state of whoever forked it, and draws no random number from a generator that other parts draw
// from.
#include "cohort/script/fork.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/input_proxies.h"
#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/base/timeline.h"
#include "cohort/core/random_scope.h"
#include "cohort/core/thread_settings.h"
#include "cohort/core/torch_compat.h"
#include "cohort/script/internal/passes/backward.h"
#include "cohort/script/internal/record/recorder.h"

namespace cohort::script {
namespace {

using base::concat;
using torch::autograd::Node;

// A generator for random operators that were given none, which says whether any drew from it.
class Watched {
 public:
  void check() const {
    if (generator_.get<at::CPUGeneratorImpl>()->engine().data().next_ == 0) return;  // as it was made
    throw UsageError("script.fork",
                     "random operators ran in a forked part, where threads would decide their order",
                     "a core::RandomScope in it");
  }

 private:
  const at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(0);
  const core::RandomScope scope_{generator_};
};

// LibTorch's thread-local state lacks this switch of autocast.
class CacheOfCasts {
 public:
  explicit CacheOfCasts(bool is_on) : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(is_on);
  }
  ~CacheOfCasts() { at::autocast::set_autocast_cache_enabled(before_); }
  CacheOfCasts(const CacheOfCasts&) = delete;
  CacheOfCasts& operator=(const CacheOfCasts&) = delete;

 private:
  bool before_;
};

// The backward of a part: through its own graph, on the thread that calls it.
class ForkedBackward : public Node {
 public:
  std::shared_ptr<autograd::DetachedGraph> graph;
  std::vector<std::size_t> places;
  std::size_t num_leaves = 0;

  Tensors apply(Tensors&& gradients) override {
    check_no_graph("a forked part");
    std::vector<bool> wanted(num_leaves);
    for (std::size_t i = 0; i < places.size(); ++i) wanted[places[i]] = task_should_compute_output(i);
    Tensors found = graph->backward(gradients, !is_last_, wanted), result;
    for (const std::size_t place : places) result.push_back(std::move(found[place]));
    return result;
  }
  std::string name() const override { return "cohort::script::ForkedBackward"; }
  void will_release_variables() override { is_last_ = true; }
  void release_variables() override { graph->release(); }

 private:
  bool is_last_ = false;
};

thread_local bool is_worker = false;

}  // namespace

struct ForkedPart::Task {
  Task(Run function, Tensors tensors, Graph with)
      : run(std::move(function)), inputs(std::move(tensors)), with_graph(with) {}

  // Runs it, unless somebody has begun to.
  void begin() {
    if (!has_begun.test_and_set()) ended.run([this] { compute(); });
  }

  void compute() {
    const Run function = std::exchange(run, nullptr);  // what it captured is destroyed on this thread
    const at::ThreadLocalStateGuard as_the_caller(state);
    const CacheOfCasts cache(caches_casts);
    const Watched random;
    if (with_graph == Graph::kAsCaller && at::GradMode::is_enabled()) {
      graph = std::make_shared<autograd::DetachedGraph>(
          inputs,
          autograd::DetachedGraph::Words{.where = "script.fork", .as_input = "hand it over as an input"});
      input_proxies.emplace("script.fork", inputs, graph->leaves());
      results = function(input_proxies->tensors());
      input_proxies->observe(results);
      results = graph->end(results);
    } else {
      results = function(inputs);
    }
    random.check();
  }

  // Joins the part to the caller's graph.
  void attach() {
    if (graph == nullptr) return;
    const auto& needs = graph->needs_gradient();
    if (std::find(needs.begin(), needs.end(), true) != needs.end()) {
      auto node = COHORT_MAKE_NODE(ForkedBackward);
      node->num_leaves = inputs.size() + graph->captured().size();
      node->set_next_edges(edges_to(inputs, graph->captured(), node->places));
      for (std::size_t i = 0; i < results.size(); ++i) {
        if (needs[i]) torch::autograd::set_history(results[i], node);
      }
      node->graph = std::move(graph);
    }
    input_proxies->write_back(results);
    input_proxies.reset();
  }

  Run run;
  const Tensors inputs;
  const Graph with_graph;
  const at::ThreadLocalState state;
  const bool caches_casts = at::autocast::is_autocast_cache_enabled();
  std::atomic_flag has_begun;
  base::Promise<void> ended{"a forked part"};
  Tensors results;  // once it has ended, as what follows
  std::shared_ptr<autograd::DetachedGraph> graph;
  std::optional<autograd::InputProxies> input_proxies;
};

namespace {

// Never more threads than usable cores, but for those that are stuck in a part.
base::ThreadPool& pool() {
  static base::ThreadPool& instance = *new base::ThreadPool({
      // leaked: its threads may outlive statics
      .name = "fork",
      .max_threads = base::usable_cores(),
      .start =
          [] {
            core::set_num_threads_this_thread(1);
            is_worker = true;
          },
  });
  return instance;
}

}  // namespace

ForkedPart::ForkedPart(Run run, Tensors inputs, Graph graph)
    : task_(std::make_shared<Task>(std::move(run), std::move(inputs), graph)) {
  if (Tape* const tape = Recording::tape()) {  // operators of other threads are not seen
    const int threads = at::get_num_threads();
    if (threads != 1) core::set_num_threads_this_thread(1);
    const base::TimelineScope timeline("fork");
    tape->begin_fork();
    task_->begin();
    tape->end_fork();
    if (threads != 1) core::set_num_threads_this_thread(threads);
    return;
  }
  on_pool_ = pool().submit("fork", [task = task_] { task->begin(); });
}

ForkedPart::ForkedPart(ForkedPart&&) noexcept = default;

ForkedPart::~ForkedPart() {
  if (task_ == nullptr || !task_->has_begun.test_and_set() || is_late_) return;
  if (!task_->ended.future().wait(base::Deadline(kForkTimeout))) {
    base::log_warning("[script.fork] a part that nobody waits for has not ended, and is left behind");
  }
}

bool ForkedPart::ends_by(base::Deadline deadline) {
  // A worker does what it waits for itself where nobody has begun, so that nested parts always find a thread.
  // Other callers do not: their operators may use more threads, whose numbers can differ in the last bit.
  if (is_worker && !task_->has_begun.test()) {
    const base::TimelineScope timeline("fork");
    task_->begin();
  }
  return task_->ended.future().wait(deadline);
}

Tensors ForkedPart::wait(base::Deadline deadline) {
  if (task_ == nullptr) {
    throw UsageError("script.wait", "the result was taken before, and is there once", "a copy of it");
  }
  if (!ends_by(deadline)) {
    const bool runs = task_->has_begun.test();
    // The pool replaces the thread that it is on.
    if (runs && !std::exchange(is_late_, true) && on_pool_.valid()) on_pool_.abandon();
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count();
    throw TimeoutError("script.wait",
                       concat("waited ", waited, " ms for a forked part, which ",
                              runs ? "is running" : "has not begun, as all cores are busy with others"),
                       "a later deadline where it is slow and not stuck");
  }
  const std::shared_ptr<Task> task = std::move(task_);
  task->ended.future().get(deadline);
  task->attach();
  return std::move(task->results);
}

}  // namespace cohort::script
