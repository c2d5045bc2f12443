#include "cohort/train/check_parts.h"

#include <string>

#include "cohort/base/error.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"

namespace cohort::train {
namespace {

void check_script(const config::Config& config) {
  const std::string& runner = config.distributed.model;
  if (!config.train.script || !parallel::model_runner_type(runner).has_own_threads) return;
  throw ConfigError(
      "train.run",
      base::concat("train.script is true and distributed.model is ", runner,
                   ", whose operators run on threads of its own, where they cannot be recorded"),
      "train.script=false, or distributed.model=plain");
}

// A process computes one virtual rank after the other, and adds their gradients itself.
void check_virtual_ranks(const config::DistributedConfig& distributed) {
  if (distributed.virtual_ranks == 0 && !distributed.elastic) return;
  const std::string own = distributed.elastic
                              ? std::string("distributed.elastic is true")
                              : base::concat("distributed.virtual_ranks is ", distributed.virtual_ranks);
  const char* const off = distributed.elastic ? "distributed.elastic=false" : "distributed.virtual_ranks=0";
  const auto reject = [&](const char* key, const auto& value, const char* why, const std::string& hint) {
    throw ConfigError("train.run", base::concat(own, " and ", key, " is ", value, ", ", why),
                      base::concat(hint, ", or ", off));
  };
  if (!parallel::model_runner_type(distributed.model).supports_virtual_ranks) {
    reject("distributed.model", distributed.model, "which does not support virtual ranks",
           "distributed.model=plain");
  }
  if (!parallel::gradient_sync_type(distributed.gradients).make_virtual_ranks) {
    reject("distributed.gradients", distributed.gradients, "which does not add gradients over virtual ranks",
           "distributed.gradients=auto");
  }
  // Sums of virtual ranks travel without a hook, so the only one that fits is empty.
  if (parallel::make_comm_hook(distributed.comm_hook)) {
    reject("distributed.comm_hook", distributed.comm_hook, "which changes gradients on their way",
           "distributed.comm_hook=none");
  }
  const std::int64_t processes = distributed.nproc_per_node;
  if (distributed.elastic && processes > 1) {
    reject("distributed.nproc_per_node", processes, "which starts processes that no agent looks after",
           base::concat("cohort run --elastic --nproc-per-node ", processes, " -- cohort train ..."));
  }
  if (!distributed.elastic && processes > distributed.virtual_ranks) {
    reject("distributed.nproc_per_node", processes, "so some processes would have nothing to compute",
           base::concat("distributed.nproc_per_node=", distributed.virtual_ranks, " at most"));
  }
}

}  // namespace

void check_parts(const config::Config& config) {
  check_script(config);
  check_virtual_ranks(config.distributed);
}

}  // namespace cohort::train
