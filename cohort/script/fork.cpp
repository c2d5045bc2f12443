#include "cohort/script/fork.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/input_proxies.h"
#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"
#include "cohort/core/random_scope.h"
#include "cohort/core/thread_settings.h"
#include "cohort/core/torch_compat.h"
#include "cohort/script/passes/backward.h"
#include "cohort/script/record/internal/recorder.h"

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
    if (has_begun.test_and_set()) return;
    try {
      const base::TimelineScope timeline("fork");
      compute();
    } catch (...) {
      error = std::current_exception();
    }
    run = nullptr;
    {
      const std::lock_guard lock(mutex);
      is_done = true;
    }
    done.notify_all();
  }

  void compute() {
    const at::ThreadLocalStateGuard as_the_caller(state);
    const Watched random;
    if (with_graph == Graph::kAsCaller && at::GradMode::is_enabled()) {
      graph = std::make_shared<autograd::DetachedGraph>(
          inputs,
          autograd::DetachedGraph::Words{.where = "script.fork", .as_input = "hand it over as an input"});
      input_proxies.emplace("script.fork", inputs, graph->leaves());
      results = run(input_proxies->tensors());
      input_proxies->observe(results);
      results = graph->end(results);
    } else {
      results = run(inputs);
    }
    random.check();
  }

  bool wait_until(base::Deadline deadline) {
    std::unique_lock lock(mutex);
    const auto ended = [this] { return is_done; };
    return base::wait(done, lock, ended, deadline);
  }

  bool was_late() {
    const std::lock_guard lock(mutex);
    return is_late;
  }
  // Returns whether it runs and nobody was late before.
  bool become_late() {
    const std::lock_guard lock(mutex);
    return has_begun.test() && !is_done && !std::exchange(is_late, true);
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
  std::atomic_flag has_begun;
  std::mutex mutex;
  std::condition_variable done;
  bool is_late = false;  // somebody's deadline passed while it ran; under mutex
  bool is_done = false;  // under mutex; what follows is written before
  Tensors results;
  std::shared_ptr<autograd::DetachedGraph> graph;
  std::optional<autograd::InputProxies> input_proxies;
  std::exception_ptr error;
};

namespace {

// Threads that run parts in the order in which they were forked. They are made when they are needed, stay,
// and never outnumber the usable cores but for those that are stuck in a part.
class Pool {
 public:
  using ThreadStep = std::function<bool()>;  // returns whether the thread continues

  static Pool& instance() {
    static Pool& pool = *new Pool;  // leaked: its threads may outlive statics
    return pool;
  }
  void submit(ThreadStep work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    if (num_idle_ < queue_.size() && num_threads_ < limit_) start();
    changed_.notify_one();
  }
  // One thread more is allowed, as one is stuck, or one less, as it is no longer.
  void allow(int more) {
    const std::lock_guard lock(mutex_);
    limit_ += more;
    if (!queue_.empty() && num_threads_ < limit_) start();
  }

 private:
  void start() {
    std::thread([this] { loop(); }).detach();
    ++num_threads_;
  }
  void loop() {
    ::pthread_setname_np(::pthread_self(), "fork");
    base::Timeline::name_thread("fork");
    core::set_num_threads_this_thread(1);
    is_worker = true;
    for (bool go_on = true; go_on;) go_on = take()();
    const std::lock_guard lock(mutex_);
    --num_threads_;
  }
  ThreadStep take() {
    std::unique_lock lock(mutex_);
    ++num_idle_;
    base::wait_for_task(changed_, lock, [this] { return !queue_.empty(); });
    --num_idle_;
    ThreadStep work = std::move(queue_.front());
    queue_.pop_front();
    return work;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ThreadStep> queue_;
  std::size_t num_idle_ = 0;
  int num_threads_ = 0;
  int limit_ = base::usable_cores();
};

}  // namespace

ForkedPart::ForkedPart(Run run, Tensors inputs, Graph graph)
    : task_(std::make_shared<Task>(std::move(run), std::move(inputs), graph)) {
  if (Tape* const tape = Recording::tape()) {  // operators of other threads are not seen
    const int threads = at::get_num_threads();
    if (threads != 1) core::set_num_threads_this_thread(1);
    tape->begin_fork();
    task_->begin();
    tape->end_fork();
    if (threads != 1) core::set_num_threads_this_thread(threads);
    return;
  }
  Pool::instance().submit([task = task_] {
    task->begin();
    if (!task->was_late()) return true;
    Pool::instance().allow(-1);
    return false;
  });
}

ForkedPart::ForkedPart(ForkedPart&&) noexcept = default;

ForkedPart::~ForkedPart() {
  if (task_ == nullptr || !task_->has_begun.test_and_set() || task_->was_late()) return;
  if (!task_->wait_until(base::Deadline(kForkTimeout))) {
    base::log_warning("[script.fork] a part that nobody waits for has not ended, and is left behind");
  }
}

bool ForkedPart::ends_by(base::Deadline deadline) {
  // A worker does what it waits for itself where nobody has begun, so that nested parts always find a thread.
  // Other callers do not: their operators may use more threads, whose numbers can differ in the last bit.
  if (is_worker) task_->begin();
  return task_->wait_until(deadline);
}

Tensors ForkedPart::wait(base::Deadline deadline) {
  if (task_ == nullptr) {
    throw UsageError("script.wait", "the result was taken before, and is there once", "a copy of it");
  }
  if (!ends_by(deadline)) {
    const bool runs = task_->has_begun.test();
    if (task_->become_late()) Pool::instance().allow(1);
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count();
    throw TimeoutError("script.wait",
                       concat("waited ", waited, " ms for a forked part, which ",
                              runs ? "is running" : "has not begun, as all cores are busy with others"),
                       "a later deadline where it is slow and not stuck");
  }
  const std::shared_ptr<Task> task = std::move(task_);
  if (task->error) std::rethrow_exception(task->error);
  task->attach();
  return std::move(task->results);
}

}  // namespace cohort::script
