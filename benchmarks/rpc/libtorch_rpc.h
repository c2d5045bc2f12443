#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

/// LibTorch's RPC from C++, between two processes, as something to compare with.
class LibtorchRpc {
 public:
  /// Whether this LibTorch has it.
  static bool is_there();
  /// `transports`: "all" that LibTorch chooses from, or "tcp".
  LibtorchRpc(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& transports);
  ~LibtorchRpc();
  LibtorchRpc(const LibtorchRpc&) = delete;
  LibtorchRpc& operator=(const LibtorchRpc&) = delete;

  /// Calls of rank 1, by rank 0. They call operators, for which no interpreter is needed.
  void add_integers();
  void add_integers_in_burst(int calls);
  at::Tensor echo(const at::Tensor& x);
  /// A distributed backward through the product of both. Returns the gradient of `x`.
  at::Tensor step(const at::Tensor& x, const at::Tensor& y);
  /// Waits for the other rank. Collective.
  void shutdown();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
