// Graphs of functions whose results lead to different leaves: Note [Leaves of some results]. Each result has
// a ResultNode, which hands its gradient to the shared Joint. Each set of leaves has a GradientsNode, which
// takes its gradients from there. The Joint runs the whole backward once in a task of autograd's, and again
// if a gradient came late. Always: no lock is held while it runs, and a Run lives until its task ends or
// throws.
#include "cohort/script/internal/passes/joint.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/core/torch_compat.h"
#include "cohort/script/internal/passes/gradients.h"

// Note [Leaves of some results]
// A leaf that only one of two results leads to is no part of a backward that begins at the other: its hooks
// do not run, and who looks for unused parameters does not find it. With one node for all results it would
// be. Where results lead to different leaves, each result has a node, and each set of results that lead to
// the same leaves has one that hands their gradients on. The first of those runs the whole backward, with all
// gradients that have come. On one device these are all, as autograd takes the node that was made last first;
// if another comes after it, the backward runs again for those whom it concerns. What backward needs goes
// when each result has been in a backward that frees its graph: until then another loss may begin at another
// one.
namespace cohort::script {
namespace {

using torch::autograd::Node;

class Joint {
 public:
  Joint(std::size_t num_results, WholeBackward whole)
      : num_results_(num_results), whole_(std::move(whole)), is_freed_(num_results) {}

  void take(std::size_t result, const at::Tensor& grad_output, const std::shared_ptr<Joint>& self) {
    const std::lock_guard lock(mutex_);
    const int task = torch::autograd::get_current_graph_task_id();
    if (is_freed_[result]) {  // by an earlier task: a task comes to each result once
      throw UsageError("script.function",
                       base::concat("a second backward goes through result ", result, " of the function"),
                       "retain_graph in the first one, or the sum of both losses");
    }
    const auto [run, is_new] = runs_.try_emplace(task, Run{Tensors(num_results_), {}, {}});
    run->second.grad_outputs[result] = grad_output;
    if (!torch::autograd::get_current_graph_task_keep_graph()) is_freed_[result] = true;
    if (!is_new) return;
    torch::autograd::Engine::get_default_engine().queue_callback([self, task] {
      bool is_last = false;
      {
        const std::lock_guard ends(self->mutex_);
        self->runs_.erase(task);
        is_last = std::ranges::all_of(self->is_freed_, std::identity());
      }
      if (is_last) self->whole_.release();
    });
  }
  Tensors gradients(const std::vector<std::size_t>& of, const std::vector<bool>& reached_from) {
    std::unique_lock lock(mutex_);
    Run& run = runs_.at(torch::autograd::get_current_graph_task_id());  // until the task ends
    bool is_found = !run.found.empty();
    for (std::size_t i = 0; is_found && i < num_results_; ++i) {
      is_found = !reached_from[i] || run.is_used[i] == run.grad_outputs[i].defined();
    }
    if (!is_found) {
      const Tensors grad_outputs = run.grad_outputs;
      lock.unlock();  // a thread of another device may wait in take() that this backward needs
      Tensors all = run_whole(grad_outputs);
      lock.lock();
      run.is_used = defined(grad_outputs);
      run.found = std::move(all);
    }
    Tensors found;
    for (const std::size_t gradient : of) found.push_back(std::move(run.found[gradient]));
    return found;
  }

 private:
  struct Run {
    Tensors grad_outputs;
    std::vector<bool> is_used;
    Tensors found;
  };
  // A backward that throws ends the task, and nothing is called at its end.
  Tensors run_whole(const Tensors& grad_outputs) {
    try {
      return whole_.backward(grad_outputs);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      runs_.erase(torch::autograd::get_current_graph_task_id());
      throw;
    }
  }

  const std::size_t num_results_;
  const WholeBackward whole_;
  std::mutex mutex_;
  std::vector<bool> is_freed_;  // results
  std::map<int, Run> runs_;     // by the number of autograd's task
};

class ResultNode : public Node {
 public:
  std::shared_ptr<Joint> joint;
  std::size_t result = 0;

  Tensors apply(Tensors&& gradients) override {
    joint->take(result, gradients.front(), joint);
    // A GradientsNode ignores what it gets: the edges only make it wait for its results.
    return {num_outputs(), gradients.front()};
  }
  std::string name() const override { return "cohort::script::ResultNode"; }
};

class GradientsNode : public Node {
 public:
  std::shared_ptr<Joint> joint;
  std::vector<std::size_t> gradients;
  std::vector<bool> reached_from;

  Tensors apply(Tensors&& /*grad_outputs*/) override { return joint->gradients(gradients, reached_from); }
  std::string name() const override { return "cohort::script::GradientsNode"; }
};

}  // namespace

void join(WholeBackward whole, const torch::autograd::edge_list& edges,
          const std::vector<std::vector<bool>>& reached_from, const std::vector<bool>& needs_gradient,
          Tensors& results) {
  Tensors ends;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (needs_gradient[i]) ends.push_back(results[i]);
  }
  const auto joint = std::make_shared<Joint>(ends.size(), std::move(whole));
  std::map<std::vector<bool>, std::vector<std::size_t>> sets;
  for (std::size_t i = 0; i < edges.size(); ++i) sets[reached_from[i]].push_back(i);
  std::vector<torch::autograd::edge_list> next(ends.size());
  for (const auto& [from, gradients] : sets) {
    auto node = COHORT_MAKE_NODE(GradientsNode);
    torch::autograd::edge_list own;
    for (const std::size_t gradient : gradients) own.push_back(edges[gradient]);
    node->set_next_edges(std::move(own));
    node->joint = joint;
    node->gradients = gradients;
    node->reached_from = from;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (from[i]) next[i].emplace_back(node, node->add_input_metadata(ends[i]));
    }
  }
  for (std::size_t i = 0, number = 0; i < results.size(); ++i) {
    if (!needs_gradient[i]) continue;
    auto node = COHORT_MAKE_NODE(ResultNode);
    node->set_next_edges(std::move(next[number]));
    node->joint = joint;
    node->result = number++;
    torch::autograd::set_history(results[i], node);
  }
}

}  // namespace cohort::script
