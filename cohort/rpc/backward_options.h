#pragma once

namespace cohort::rpc::dist_autograd {

/// How a backward goes.
struct BackwardOptions {
  bool keep_graph = false;  ///< a later backward will go through the same calls
  /// Gradients of the leaves that this program itself used are added to their grad(), as a local backward
  /// does it: hooks run, and DistributedDataParallel averages. Those of calls stay in the context, also where
  /// they ran on this worker.
  bool into_grad = false;
};

}  // namespace cohort::rpc::dist_autograd
