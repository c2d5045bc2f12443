#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cohort/comm/group.h"
#include "cohort/config/types.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

/// The ranks of a run that `cohort train` makes: who takes part, and what each of them computes on.
/// Internal to this module.
namespace cohort::train {

/// Virtual ranks of a configuration that has them.
parallel::VirtualRankOptions virtual_rank_options(const config::DistributedConfig& config);

/// Meets the other ranks, where a launcher has started several, and returns the gradient sync of `config`.
/// With distributed.elastic it is one process's, and the session says who the others are.
/// `same`: what all ranks must have alike, as text: the configuration but for what may differ by host.
/// Collective. Throws: ConfigError for a gradient sync that does not fit the runner, and for more ranks than
/// distributed.virtual_ranks; RendezvousError;
/// UsageError for ranks with another `same`.
std::shared_ptr<parallel::GradientSync> join_ranks(const config::DistributedConfig& config,
                                                   const config::CommConfig& comm_config,
                                                   const std::string& same);

/// Returns the session with the agent that has started this process, where distributed.elastic is true; else
/// null. It waits for others as long as comm.timeout says. `command`: of this process, for the message.
/// Throws: ConfigError where no agent has started it.
std::shared_ptr<elastic::Session> join_elastic_run(const config::DistributedConfig& config,
                                                   const config::CommConfig& comm_config,
                                                   const std::string& command);

/// Returns `device` (train.device), or where this host has several ranks and it names no number, one of the
/// GPUs that the host sees: its own, where there are as many as ranks or the launcher shows it one alone.
std::string device_of_rank(const std::string& device);
/// The GPU of a rank among those that it sees.
int gpu_of_rank(int local_rank, int num_visible);

/// Throws on all ranks: UsageError where there are virtual ranks, and processes have other numbers of threads
/// or other instructions. Collective.
void check_same_arithmetic(parallel::GradientSync& gradient_sync);

/// Returns how many ranks of the job are on this machine, this one too. Collective.
int ranks_on_host(const parallel::GradientSync& gradient_sync);
/// Returns how many processes of an elastic run the agent of this machine starts.
int elastic_processes_on_host();
/// Returns `threads` (train.threads), or for 0 the cores of this process divided by those processes; 0 where
/// OMP_NUM_THREADS is set. It does not depend on the number of processes that train.
std::int64_t elastic_threads(std::int64_t threads);

/// Returns `threads` (train.threads), or for 0 the cores of this process divided by the ranks that have the
/// same ones; 0 where one process is alone, or OMP_NUM_THREADS is set. 1 for 0 where `runner`
/// (distributed.model) has threads of its own. With virtual ranks, 0 is the cores of this process divided by
/// the virtual ranks, so that it does not depend on the number of processes. Collective.
int threads_of_rank(std::int64_t threads, const std::string& runner, parallel::GradientSync& gradient_sync);

/// comm::run_on_rank0_and_broadcast(), also where there is one rank.
nlohmann::json run_on_rank0_and_broadcast(const parallel::GradientSync& gradient_sync,
                                          const std::function<nlohmann::json()>& make);

}  // namespace cohort::train
