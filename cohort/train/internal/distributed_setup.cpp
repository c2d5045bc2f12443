// A process becomes a rank of its run in three steps: it gets a gradient sync, then a device, then threads.
//  - Names are checked before any rank waits for another, so an unknown name cannot hang a job.
//  - A process that is alone makes no group.
//  - Ranks compare the text of their configuration as soon as they have a group. Ranks with different
//    settings would make different calls later, and hang.
//  - Ranks on one host with the same cores divide these cores evenly. Each rank gathers host and cores of
//    all.
#include "cohort/train/internal/distributed_setup.h"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/cpu.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/log.h"
#include "cohort/base/text/choice.h"
#include "cohort/comm/init.h"
#include "cohort/comm/job.h"
#include "cohort/comm/object_collectives.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/core/device.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/train/internal/fit/compatibility.h"

namespace cohort::train {
namespace {

comm::ConsistencyCheck check_of(const std::string& name) {
  constexpr base::Choice<comm::ConsistencyCheck> kChecks[] = {{"first", comm::ConsistencyCheck::kFirst},
                                                              {"always", comm::ConsistencyCheck::kAlways},
                                                              {"off", comm::ConsistencyCheck::kOff}};
  return base::choose<ConfigError>("train.run", "comm.check_consistency", name, kChecks);
}

std::chrono::milliseconds timeout_of(const config::CommConfig& config) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(config.timeout * 1000));
}

std::int64_t bucket_bytes(const config::DistributedConfig& config) {
  return static_cast<std::int64_t>(config.bucket_cap_mb * (1 << 20));
}

std::shared_ptr<parallel::GradientSync> virtual_rank_sync(const comm::Group& group,
                                                          const config::DistributedConfig& config) {
  return parallel::make_virtual_rank_sync(config.gradients, group, virtual_rank_options(config));
}

parallel::ReducerOptions reducer_options(const config::DistributedConfig& config) {
  parallel::ReducerOptions options;
  options.find_unused_parameters = config.find_unused_parameters;
  options.bucket_cap_bytes = bucket_bytes(config);
  parallel::check_comm_hook_name(config.comm_hook);  // an unknown name ends here
  options.make_hook = [name = config.comm_hook] { return parallel::make_comm_hook(name); };
  return options;
}

}  // namespace

parallel::VirtualRankOptions virtual_rank_options(const config::DistributedConfig& config) {
  return {.num_virtual_ranks = config.virtual_ranks, .bucket_bytes = bucket_bytes(config)};
}

std::shared_ptr<parallel::GradientSync> join_ranks(const config::DistributedConfig& config,
                                                   const config::CommConfig& comm_config,
                                                   const std::string& same) {
  // Of an elastic run, whose processes no launcher's variables name.
  if (config.elastic) return virtual_rank_sync({}, config);
  const comm::Job job = comm::job_from_environment();
  const parallel::ModelRunnerType runner = parallel::model_runner_type(config.model);
  parallel::gradient_sync_type(config.gradients);  // an unknown name ends here
  if (const auto found = runner.unfit_gradients.find(config.gradients);
      found != runner.unfit_gradients.end()) {
    throw ConfigError("train.run",
                      base::concat("distributed.gradients is ", found->first, " and distributed.model is ",
                                   config.model, ": ", found->second),
                      base::concat("distributed.gradients=", runner.gradients, ", or auto"));
  }
  if (config.virtual_ranks > 0 && job.world_size > config.virtual_ranks) {
    throw ConfigError(
        "train.run",
        base::concat("distributed.virtual_ranks is ", config.virtual_ranks, ", and there are ",
                     job.world_size, " processes: some would have nothing to compute"),
        base::concat("at most ", config.virtual_ranks, " processes, or a new run with more virtual ranks"));
  }
  if (config.virtual_ranks > 0 && job.world_size == 1) return virtual_rank_sync({}, config);
  const std::string gradients =
      parallel::resolve_gradients(config.gradients, job.world_size, runner.gradients);
  if (job.world_size == 1 && !parallel::gradient_sync_type(gradients).needs_group) {
    return parallel::make_gradient_sync(gradients);
  }
  if (job.launcher != comm::Launcher::kNone && config.nproc_per_node > 1 &&
      config.nproc_per_node != job.local_world_size) {
    base::log_warning(base::concat("distributed.nproc_per_node is ", config.nproc_per_node,
                                   ", and this is one of ", job.local_world_size, " ranks that ",
                                   comm::to_string(job.launcher), " started here: it has no effect"));
  }
  comm::InitOptions options;
  options.backend = config.backend;
  options.timeout = timeout_of(comm_config);
  options.check_consistency = check_of(comm_config.check_consistency);
  comm::Group group = comm::init_process_group(options);
  comm::require_same(group, "the configuration", same);
  if (config.virtual_ranks > 0) return virtual_rank_sync(group, config);
  return parallel::make_gradient_sync(gradients, std::move(group), reducer_options(config));
}

std::shared_ptr<elastic::Session> join_elastic_run(const config::DistributedConfig& config,
                                                   const config::CommConfig& comm_config,
                                                   const std::string& command) {
  if (!config.elastic && base::env_string("COHORT_AGENT_FD")) {
    throw ConfigError("train.run",
                      "distributed.elastic is false, and cohort run --elastic has started this process: each "
                      "process would train alone",
                      "distributed.elastic=true; or cohort run without --elastic");
  }
  if (!config.elastic) return nullptr;
  std::shared_ptr<elastic::Session> session =
      elastic::session_of_process({.timeout = timeout_of(comm_config)});
  if (session == nullptr) {
    throw ConfigError("train.run", "distributed.elastic is true, and no agent has started this process",
                      base::concat("cohort run --elastic --nnodes 1:4 --nproc-per-node 2 -- ", command));
  }
  return session;
}

int elastic_processes_on_host() {
  return static_cast<int>(base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20).value_or(1));
}

std::int64_t elastic_threads(std::int64_t threads) {
  if (threads > 0 || base::env_string("OMP_NUM_THREADS")) return threads;
  return std::max(1, base::usable_cores() / elastic_processes_on_host());
}

std::string device_of_rank(const std::string& device) {
  const comm::Job job = comm::job_from_environment();
  if (job.local_world_size == 1 || (device != "auto" && device != "cuda")) return device;
  if (core::resolve_device(device).device.is_cpu()) return "cpu";
  const int num_visible = at::detail::getCUDAHooks().getNumGPUs();
  if (num_visible > 1 && job.local_rank == num_visible) {  // the first of those that share
    base::log_warning(
        base::concat("this host has ", job.local_world_size, " ranks and ", num_visible,
                     " GPUs: if all ranks see the same ones they share them, which NCCL rejects"));
  }
  return base::concat("cuda:", gpu_of_rank(job.local_rank, num_visible));
}

// A launcher may show each rank its own GPU alone (Slurm's --gpus-per-task), or a host have fewer than ranks.
int gpu_of_rank(int local_rank, int num_visible) {
  return local_rank % std::max(1, num_visible);
}

int ranks_on_host(const parallel::GradientSync& gradient_sync) {
  if (gradient_sync.size() == 1) return 1;
  const std::string host = base::host_name();
  return static_cast<int>(std::ranges::count(comm::all_gather_text(*gradient_sync.group(), host), host));
}

void check_same_arithmetic(parallel::GradientSync& gradient_sync) {
  if (gradient_sync.virtual_ranks() == nullptr || gradient_sync.size() == 1) return;
  comm::require_same(
      *gradient_sync.group(), "what virtual ranks are computed with",
      base::concat("threads ", at::get_num_threads(), "\ninstructions ", instruction_set(), "\n"));
}

int threads_of_rank(std::int64_t threads, const std::string& runner, parallel::GradientSync& gradient_sync) {
  // The placements' threads have the cores.
  if (threads == 0 && parallel::model_runner_type(runner).has_own_threads) return 1;
  // The user's number, or OMP_NUM_THREADS, wins: set_intra_op_threads() reads the latter where it gets 0.
  const bool is_given = threads > 0 || base::env_string("OMP_NUM_THREADS");
  if (const auto* const sync = gradient_sync.virtual_ranks(); sync != nullptr && !is_given) {
    return std::max(1, base::usable_cores() / static_cast<int>(sync->num_virtual_ranks()));
  }
  if (is_given || gradient_sync.size() == 1) return static_cast<int>(threads);
  const std::string host_and_cores = base::host_name() + " " + base::CpuSet::of_process().to_string();
  const std::vector<std::string> all = comm::all_gather_text(*gradient_sync.group(), host_and_cores);
  const auto sharers = static_cast<int>(std::count(all.begin(), all.end(), host_and_cores));
  return std::max(1, base::usable_cores() / sharers);
}

nlohmann::json run_on_rank0_and_broadcast(const parallel::GradientSync& gradient_sync,
                                          const std::function<nlohmann::json()>& make) {
  if (gradient_sync.size() == 1) return make();
  return comm::run_on_rank0_and_broadcast(*gradient_sync.group(), make);
}

}  // namespace cohort::train
