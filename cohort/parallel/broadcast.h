#pragma once

#include <torch/nn/module.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "cohort/comm/group.h"

/// The same model on every rank.
namespace cohort::parallel {

/// What is sent, from which rank.
struct BroadcastOptions {
  /// Parameters and buffers, by name, that stay each rank's own.
  std::vector<std::string> ignored = {};
  /// The rank, within the group, whose values the others get.
  int root = 0;
  /// Of each collective; 0 is the group's.
  std::chrono::milliseconds timeout{0};
};

/// Gives parameters and buffers the values of the root's. Collective.
/// Throws: UsageError naming the first name, shape or type in which a rank differs from rank 0.
void broadcast_module(const comm::Group& group, const torch::nn::Module& module,
                      const BroadcastOptions& options = {});
/// The same for buffers alone, such as the running statistics of batch norm.
void broadcast_buffers(const comm::Group& group, const torch::nn::Module& module,
                       const BroadcastOptions& options = {});

/// A module's buffers on their way from the root while backward runs, which may read them: they get the
/// root's values at the end.
///
///     buffers.stage();        // after forward; nothing travels
///     buffers.begin();        // collective
///     ...                     // the root's buffers may change: what was staged travels
///     buffers.end();
///
/// Ownership: refers to the module. Threads: one at a time.
class BufferBroadcast {
 public:
  BufferBroadcast(comm::Group group, const torch::nn::Module& module, BroadcastOptions options = {});
  /// From the next stage() on.
  void set_root(int rank) { options_.root = rank; }
  /// Copies the root's buffers as they are now; on the other ranks makes room for them.
  void stage();
  /// Begins the collectives. Every rank calls it after stage().
  void begin();
  /// Blocks until the root's values are in the buffers of every rank. Throws: what Group throws.
  void end();

 private:
  struct Flat {
    std::vector<at::Tensor> buffers;
    at::Tensor values;  // of all of them, as one
    comm::Pending pending;
  };

  comm::Group group_;
  const torch::nn::Module& module_;
  BroadcastOptions options_;
  std::vector<Flat> flats_;
  std::map<std::string, at::Tensor> values_;  // by type and device: memory that is used again
};

}  // namespace cohort::parallel
