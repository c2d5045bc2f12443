#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

/// Nodes of a graph that wait for other threads.
///
/// LibTorch's engine runs a node whose gradients are on a GPU on a thread of its own for that GPU, and so
/// every backward of the process that comes to that GPU. A node that waits there for a thread whose backward
/// comes to the same GPU waits for ever. So such a node gets its gradients through an anchor: it runs where
/// backward() was called, wherever the gradients are.
///
///     at::Tensor anchor = autograd::make_anchor();
///     torch::autograd::set_history(anchor, node);          // or a result of torch::autograd::Function
///     autograd::attach_to_anchor(anchor, results);
///     ...
///     auto gradients = autograd::take_gradients(of_the_anchor);    // in the node's apply()
namespace cohort::autograd {

/// Returns a tensor on the CPU, without elements, whose history is to be what waits.
at::Tensor make_anchor();

/// Gives `results`, which have no history, one grad_fn, whose next function is the anchor's. Their gradients
/// come to the anchor's grad_fn all together.
void attach_to_anchor(const at::Tensor& anchor, const std::vector<at::Tensor>& results);

/// Returns the gradients of the results, undefined where there is none, given that of the anchor. Work that
/// the calling thread gives a GPU afterwards waits for them.
std::vector<at::Tensor> take_gradients(const at::Tensor& gradient_of_anchor);

/// Whether the calling thread is one of the engine's for a GPU: there backward() was called within a
/// backward, and what waits for another thread's backward on a GPU must not.
bool is_device_autograd_thread();

}  // namespace cohort::autograd
