#pragma once

#include <torch/nn/module.h>

#include <chrono>
#include <string>
#include <vector>

#include "cohort/comm/group.h"

/// The same model on every rank.
namespace cohort::parallel {

struct BroadcastOptions {
  /// Parameters and buffers, by name, that stay each rank's own.
  std::vector<std::string> ignored = {};
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

}  // namespace cohort::parallel
