#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <unordered_set>

#include "cohort/autograd/detached_graph.h"
#include "cohort/script/internal/record/cache.h"

/// The nodes of the graph that scripted functions leave: one that records its backward, one that replays it.
namespace cohort::script {

class Verification;

/// How gradients of results are recorded, as far as what came before shows it. Threads: any.
struct GradOutputWants {
  std::atomic<bool> plain{false};     ///< those whose elements overlap are of no use: others came too
  std::atomic<bool> all{false};       ///< those that are missing as zeros: other losses use other results
  std::atomic<std::size_t> given{0};  ///< which were there last, as a hash
  std::atomic<bool> zeros{false};     ///< some had implicit zeros: gradients.h
};

/// A forward that was recorded, and the graph of it.
struct RecordedForward {
  std::shared_ptr<autograd::DetachedGraph> graph;  ///< of the forward
  std::shared_ptr<Trace> trace;                    ///< calls of the forward; those of backward are added
  std::shared_ptr<CacheEntry> entry;               ///< of the guards that hold: gets the trace
  std::int64_t gradient_chunk_bytes = 0;           ///< ScriptOptions::gradient_chunk_bytes
  std::shared_ptr<Verification> verify;            ///< of the program that backward is compared with, or null
  std::shared_ptr<GradOutputWants> wants;          ///< shared by all recordings of the function
};

/// Which leaves the graph of each result that needs a gradient ends at.
std::vector<std::unordered_set<const c10::TensorImpl*>> leaves_reached_from(const Tensors& results);

/// Makes `results` those of a node whose backward goes through `forward.graph`, recorded the first time.
void attach_recording(RecordedForward forward, const Tensors& inputs, Tensors& results);

/// Why a program cannot take the gradients of results.
enum class Misfit : std::uint8_t {
  kNone,
  kLayout,      ///< one cannot be laid out as the recorded one
  kWasMissing,  ///< one is there that was missing when backward was recorded
  kZeros,       ///< one is missing, and zeros in its place may not do: see Note [Gradients that do not fit]
};

/// Returns the gradients of inputs and captured tensors, given those of results, by running the function
/// again.
using Rerun = std::function<Tensors(const Tensors& grad_outputs, Misfit why)>;

/// Makes `results`, the outputs in `frame`, those of a node that replays the backward of `program`; takes
/// along what that reads. Where backward has several segments, there is a node for each, one after the
/// other: Note [A chain of nodes]. `rerun` is asked where a gradient comes that the program cannot take: Note
/// [Gradients that do not fit].
void attach_replay(std::shared_ptr<const Program> program, std::span<const at::Tensor> inputs,
                   Tensors& results, const Frame& frame, Rerun rerun);

/// Edges to what needs a gradient, inputs before captured tensors; `places` says which those are.
torch::autograd::edge_list edges_to(std::span<const at::Tensor> inputs, const Tensors& captured,
                                    std::vector<std::size_t>& places);

/// Calls fn() on the thread that LibTorch runs the backward of a tensor on `device` on: the calling one for
/// the CPU, a thread of the engine's for a GPU. A backward within fn() stays on that thread. Throws: what
/// fn() throws.
void run_where_backward_runs(c10::Device device, std::function<void()> fn);

/// Throws UsageError where a backward with create_graph comes to `what`.
void check_no_graph(const char* what);

/// Returns why the graph of `results` cannot be replayed: a hook on a tensor within it, or a part that is
/// recomputed in backward. Empty if it can.
std::string unrecordable_within(const Tensors& results);

}  // namespace cohort::script
