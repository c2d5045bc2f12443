// Each part runs as a detached graph on its worker, and all parts of a call are a single node of the caller's
// graph. In backward that node starts the backwards of all parts at once, and waits for all, also where a
// part throws. Gradients of a shared parameter are added pairwise in the order of the parts: the bits do not
// depend on time. Large sums are shared out over the parts' workers, which are idle then; small sums end
// before a thread would wake.
#include "cohort/parallel/graph_boundary.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <unordered_map>

#include "cohort/autograd/anchor_node.h"
#include "cohort/autograd/input_proxies.h"
#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/timeline.h"
#include "cohort/core/nested.h"
#include "cohort/core/torch_compat.h"

namespace cohort::parallel {
namespace {

using torch::autograd::Node;

constexpr const char* kWhereBoundary = "parallel.graph_boundary";
constexpr std::int64_t kAloneBytes = 256 << 10;  // less than this is summed before another thread has woken

template <typename... Types>
[[noreturn]] void rethrow_as(const Error& error, const std::string& text) {
  (..., [&] {
    if (dynamic_cast<const Types*>(&error) != nullptr) throw Types(kWhereBoundary, text);
  }());
  throw Error(kWhereBoundary, text);
}

// The same error, of the same type, with the part's name.
[[noreturn]] void rethrow_named(const std::exception_ptr& error, const char* name) {
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& caught) {
    caught.add_context(base::concat("in ", name));
    throw;
  } catch (const Error& caught) {
    rethrow_as<UsageError, ConfigError, DataError, SystemError, NumericError, TimeoutError, PeerError,
               RendezvousError, CommError>(caught, base::concat(name, ": ", caught.what()));
  } catch (const std::exception& caught) {
    throw Error(kWhereBoundary, base::concat(name, ": ", base::message_of(caught)));
  } catch (...) {
    throw Error(kWhereBoundary, base::concat(name, ": something that is no std::exception"));
  }
}

// What is under way on several workers. One that is the calling thread's own runs when it is waited for, and
// so does a GPU's on a thread that does that GPU's backwards.
template <typename T>
class Jobs {
 public:
  explicit Jobs(std::chrono::milliseconds timeout) : deadline_(timeout) {}

  template <typename Fn>
  void start(PlacementWorker& worker, const char* part, const char* what, Fn fn) {
    Job& job = jobs_.emplace_back();
    job.part = part;
    if (worker.is_current() || (!worker.device().is_cpu() && autograd::is_device_autograd_thread())) {
      job.here = std::move(fn);
    } else {
      job.pending = worker.submit(what, std::move(fn));
    }
  }
  // Throws the first error in the order of the parts, once all have ended.
  std::vector<T> finish() {
    std::vector<T> values(jobs_.size());
    std::exception_ptr first_error;
    const char* failed = nullptr;
    // This thread's own first: the workers run meanwhile.
    for (const bool here : {true, false}) {
      for (std::size_t i = 0; i < jobs_.size(); ++i) {
        if ((jobs_[i].here != nullptr) != here) continue;
        try {
          values[i] = here ? jobs_[i].here() : jobs_[i].pending.get(deadline_);
        } catch (...) {
          if (failed != nullptr && i > failed_place_) continue;
          first_error = std::current_exception();
          failed = jobs_[i].part;
          failed_place_ = i;
        }
      }
    }
    if (failed != nullptr) rethrow_named(first_error, failed);
    return values;
  }

 private:
  struct Job {
    const char* part = nullptr;
    base::Future<T> pending;
    std::function<T()> here;
  };
  base::Deadline deadline_;
  std::vector<Job> jobs_;
  std::size_t failed_place_ = 0;
};

struct Forward {
  Tensors results;
  std::shared_ptr<autograd::DetachedGraph> graph;
  std::optional<autograd::InputProxies> input_proxies;
};

// `random`: what random operators of the part draw from; none: what the caller's do.
Forward run_forward(const DevicePart& part, const std::optional<core::RandomKey>& random,
                    autograd::InputProxies::Counts counts) {
  const c10::Device device = part.worker->device();
  std::optional<core::RandomScope> scope;
  if (random) scope.emplace(*random, device);
  const auto here = [&](const Tensors& tensors) {
    return core::to_device(tensors, device, /*non_blocking=*/true);
  };
  if (!at::GradMode::is_enabled()) return {part.run(here(part.inputs)), nullptr, std::nullopt};
  auto graph = std::make_shared<autograd::DetachedGraph>(part.inputs);
  autograd::InputProxies input_proxies(kWhereBoundary, part.inputs, graph->leaves(), counts);
  Tensors results = part.run(here(input_proxies.tensors()));
  input_proxies.observe(results);
  results = graph->end(results);
  return {std::move(results), std::move(graph), std::move(input_proxies)};
}

// The parts of one call, as one node of the caller's graph: LibTorch's engine runs the nodes of a backward
// one after the other, so only one node can start them all. An anchor brings it its gradients, as it waits
// for other threads.
class PartsBackward : public Node {
 public:
  struct GradientSource {
    std::size_t part, place;
  };
  struct Graph {
    PartName name;
    std::shared_ptr<PlacementWorker> worker;
    std::shared_ptr<autograd::DetachedGraph> graph;
    std::size_t num_results;
    std::vector<std::size_t> edges;  // of each input and captured tensor; kNone: no gradient goes there
    std::vector<autograd::ScopedVersionCounter> counts;  // of the inputs
  };
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::vector<Graph> graphs;
  std::vector<std::vector<GradientSource>> contributions;       // to each edge, in the order of the parts
  std::vector<std::pair<at::Tensor, std::uint32_t>> originals;  // that others stand for, with their versions
  std::chrono::milliseconds timeout{};

  Tensors apply(Tensors&& gradients) override;
  std::string name() const override { return "cohort::parallel::PartsBackward"; }
  void will_release_variables() override { is_last_ = true; }
  void release_variables() override {
    for (Graph& graph : graphs) graph.graph->release();
  }

 private:
  void check() const;
  std::vector<Tensors> run_backwards(Tensors&& gradients);
  Tensors reduce(std::vector<Tensors>&& found);

  bool is_last_ = false;
};

void PartsBackward::check() const {
  if (at::GradMode::is_enabled()) {
    throw UsageError(kWhereBoundary,
                     "backward with create_graph goes through a part on a placement, which is cut off there",
                     "the plain module where second derivatives are taken");
  }
  for (const auto& [tensor, version] : originals) {
    if (tensor._version() == version) continue;
    throw UsageError(kWhereBoundary,
                     base::concat("a parameter ", tensor.scalar_type(), tensor.sizes(),
                                  " was changed between the replicas' forward and their backward"),
                     "step the optimizer after backward");
  }
}

std::vector<Tensors> PartsBackward::run_backwards(Tensors&& gradients) {
  Jobs<Tensors> jobs(timeout);
  std::size_t first = 0;
  for (Graph& graph : graphs) {
    for (autograd::ScopedVersionCounter& count : graph.counts) count.propagate();
    Tensors own(
        std::make_move_iterator(gradients.begin() + static_cast<std::ptrdiff_t>(first)),
        std::make_move_iterator(gradients.begin() + static_cast<std::ptrdiff_t>(first + graph.num_results)));
    first += graph.num_results;
    std::vector<bool> wanted;
    for (const std::size_t edge : graph.edges) {
      wanted.push_back(edge != kNone && task_should_compute_output(edge));
    }
    jobs.start(*graph.worker, graph.name.name, graph.name.backward,
               [part = graph.graph, own = std::move(own), wanted = std::move(wanted), keep = !is_last_]() {
                 return part->backward(own, keep, wanted);
               });
  }
  // Each part alone holds its gradients now, and frees them as it goes.
  gradients.clear();
  return jobs.finish();
}

// Adds up what several parts found for one parameter, on the parts' workers, which are idle now.
Tensors PartsBackward::reduce(std::vector<Tensors>&& found) {
  Tensors result(contributions.size());
  struct Sum {
    std::size_t edge;
    Tensors values;
  };
  std::vector<std::vector<Sum>> shares(graphs.size());
  std::vector<std::int64_t> loads(graphs.size(), 0);
  std::int64_t bytes = 0;
  for (std::size_t edge = 0; edge < contributions.size(); ++edge) {
    Tensors values;
    for (const GradientSource& place : contributions[edge]) {
      at::Tensor& value = found[place.part][place.place];
      if (value.defined()) values.push_back(std::move(value));
    }
    if (values.size() == 1) result[edge] = std::move(values.front());
    if (values.size() < 2) continue;
    // The worker with the least to add. Each sum stays whole, so this choice changes no bits.
    const auto least = std::min_element(loads.begin(), loads.end());
    const std::int64_t size = values.front().is_sparse() ? 1 : std::int64_t(values.front().nbytes());
    *least += size;
    bytes += size;
    shares[static_cast<std::size_t>(least - loads.begin())].push_back({edge, std::move(values)});
  }
  const auto sum = [](std::vector<Sum> share) {
    Tensors sums;
    for (Sum& of_edge : share) sums.push_back(autograd::pairwise_sum(std::move(of_edge.values)));
    return sums;
  };
  std::vector<std::vector<std::size_t>> edges(shares.size());
  for (std::size_t i = 0; i < shares.size(); ++i) {
    for (const Sum& of_edge : shares[i]) edges[i].push_back(of_edge.edge);
  }
  std::vector<Tensors> sums(shares.size());
  if (bytes < kAloneBytes) {
    for (std::size_t i = 0; i < shares.size(); ++i) sums[i] = sum(std::move(shares[i]));
  } else {
    Jobs<Tensors> jobs(timeout);
    for (std::size_t i = 0; i < shares.size(); ++i) {
      // A function of functions must be copyable, and a copy would have others hold the gradients.
      jobs.start(*graphs[i].worker, graphs[i].name.name, "sum of gradients",
                 [share = std::make_shared<std::vector<Sum>>(std::move(shares[i])), sum] {
                   return sum(std::move(*share));
                 });
    }
    sums = jobs.finish();
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    for (std::size_t j = 0; j < sums[i].size(); ++j) result[edges[i][j]] = std::move(sums[i][j]);
  }
  return result;
}

Tensors PartsBackward::apply(Tensors&& gradients) {
  // The node's own: two backwards through one graph take turns.
  const std::lock_guard lock(mutex_);
  check();
  return reduce(run_backwards(autograd::take_gradients(gradients.front())));
}

// Collects the edges of one call's node.
class Edges {
 public:
  // The edge of an input: its own, as inputs may be views of one tensor.
  std::size_t add(const at::Tensor& tensor, PartsBackward::GradientSource from) {
    auto edge = torch::autograd::impl::gradient_edge(tensor);
    if (!edge.is_valid()) return PartsBackward::kNone;
    list_.push_back(std::move(edge));
    contributions_.push_back({from});
    return list_.size() - 1;
  }
  // The edge of a parameter, which several parts may use.
  std::size_t add_shared(const at::Tensor& tensor, PartsBackward::GradientSource from) {
    const auto [found, is_new] = shared_.try_emplace(tensor.unsafeGetTensorImpl(), PartsBackward::kNone);
    if (is_new) {
      found->second = add(tensor, from);
    } else if (found->second != PartsBackward::kNone) {
      contributions_[found->second].push_back(from);
    }
    return found->second;
  }
  torch::autograd::edge_list take() { return std::move(list_); }
  std::vector<std::vector<PartsBackward::GradientSource>> take_contributions() {
    return std::move(contributions_);
  }

 private:
  torch::autograd::edge_list list_;
  std::vector<std::vector<PartsBackward::GradientSource>> contributions_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> shared_;
};

void write_back_inputs(std::vector<Forward>& forwards) {
  for (Forward& forward : forwards) {
    if (forward.input_proxies) forward.input_proxies->write_back(forward.results);
  }
}

void attach(const std::vector<std::shared_ptr<DevicePart>>& parts, std::vector<Forward>& forwards,
            const BoundaryOptions& options) {
  auto node = COHORT_MAKE_NODE(PartsBackward);
  node->timeout = options.timeout;
  Edges edges;
  std::unordered_map<const c10::TensorImpl*, const at::Tensor*> originals;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const DevicePart& part = *parts[i];
    autograd::DetachedGraph& graph = *forwards[i].graph;
    PartsBackward::Graph own{part.name, part.worker, forwards[i].graph, 0, {}, {}};
    std::unordered_map<const c10::TensorImpl*, const at::Tensor*> meant;
    if (part.source_of) {
      for (const auto& [leaf, original] : *part.source_of) meant[leaf.unsafeGetTensorImpl()] = &original;
    }
    for (std::size_t j = 0; j < part.inputs.size(); ++j) {
      const at::Tensor& input = part.inputs[j];
      const bool needs = input.defined() && input.requires_grad();
      own.edges.push_back(needs ? edges.add(input, {i, j}) : PartsBackward::kNone);
    }
    for (std::size_t j = 0; j < graph.captured().size(); ++j) {
      const at::Tensor* tensor = &graph.captured()[j];
      if (const auto found = meant.find(tensor->unsafeGetTensorImpl()); found != meant.end()) {
        tensor = found->second;
        originals[tensor->unsafeGetTensorImpl()] = tensor;
      }
      own.edges.push_back(edges.add_shared(*tensor, {i, part.inputs.size() + j}));
    }
    own.num_results = static_cast<std::size_t>(
        std::count(graph.needs_gradient().begin(), graph.needs_gradient().end(), true));
    node->graphs.push_back(std::move(own));
  }
  node->set_next_edges(edges.take());
  node->contributions = edges.take_contributions();
  for (const auto& [impl, tensor] : originals) node->originals.emplace_back(*tensor, tensor->_version());
  const at::Tensor anchor = autograd::make_anchor();
  torch::autograd::set_history(anchor, node);
  Tensors ends;
  for (Forward& forward : forwards) {
    for (std::size_t j = 0; j < forward.results.size(); ++j) {
      if (forward.graph->needs_gradient()[j]) ends.push_back(forward.results[j]);
    }
  }
  autograd::attach_to_anchor(anchor, ends);
  write_back_inputs(forwards);
  for (std::size_t i = 0; i < forwards.size(); ++i) {
    node->graphs[i].counts = forwards[i].input_proxies->counts();
  }
}

}  // namespace

PartName::PartName(const std::string& text)
    : name(base::Timeline::intern(text)),
      forward(base::Timeline::intern(text + " forward")),
      backward(base::Timeline::intern(text + " backward")) {}

std::vector<Tensors> run_on_devices(std::vector<DevicePart> given, const BoundaryOptions& options) {
  std::vector<std::shared_ptr<DevicePart>> parts;
  for (DevicePart& part : given) parts.push_back(std::make_shared<DevicePart>(std::move(part)));
  given.clear();
  std::optional<core::RandomKey> random = options.random;
  // Parts that run at once would draw from one generator in the order of time.
  if (!random && parts.size() > 1) random = core::RandomKey::draw();
  const auto counts =
      parts.size() > 1 ? autograd::InputProxies::Counts::kOwn : autograd::InputProxies::Counts::kOfInputs;
  Jobs<Forward> jobs(options.timeout);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& part = parts[i];
    if (random) random->part = i;
    jobs.start(*part->worker, part->name.name, part->name.forward,
               [part, random, counts] { return run_forward(*part, random, counts); });
  }
  std::vector<Forward> forwards = jobs.finish();
  const bool needs_gradient = std::any_of(forwards.begin(), forwards.end(), [](const Forward& forward) {
    if (!forward.graph) return false;
    const auto& needs = forward.graph->needs_gradient();
    return std::find(needs.begin(), needs.end(), true) != needs.end();
  });
  needs_gradient ? attach(parts, forwards, options) : write_back_inputs(forwards);
  std::vector<Tensors> results;
  for (Forward& forward : forwards) results.push_back(std::move(forward.results));
  return results;
}

}  // namespace cohort::parallel
