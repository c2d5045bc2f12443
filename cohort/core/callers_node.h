#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

/// Nodes of a graph that wait for other threads.
///
/// LibTorch's engine runs a node whose gradients are on a GPU on a thread of its own for that GPU, and so
/// every backward of the process that comes to that GPU. A node that waits there for a thread whose backward
/// comes to the same GPU waits for ever. So such a node gets its gradients through a door: it runs where
/// backward() was called, wherever the gradients are.
///
///     at::Tensor door = core::make_door();
///     torch::autograd::set_history(door, node);          // or a result of torch::autograd::Function
///     core::come_through(door, results);
///     ...
///     Tensors gradients = core::arrived(of_the_door);    // in the node's apply()
namespace cohort::core {

/// Returns a tensor on the CPU, without elements, whose history is to be what waits.
at::Tensor make_door();

/// Makes `results`, which have no history, those of a node behind the door. Their gradients come to what is
/// the door's history, all together.
void come_through(const at::Tensor& door, const std::vector<at::Tensor>& results);

/// Returns the gradients of the results, undefined where there is none, given that of the door. Work that the
/// calling thread gives a GPU afterwards waits for them.
std::vector<at::Tensor> arrived(const at::Tensor& gradient_of_door);

/// Whether the calling thread is one of the engine's for a GPU: there backward() was called within a
/// backward, and what waits for another thread's backward on a GPU must not.
bool is_gpus_thread();

}  // namespace cohort::core
