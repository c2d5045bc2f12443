#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cohort/comm/group.h"
#include "cohort/config/config.h"
#include "cohort/parallel/gradient_sync.h"

/// The ranks of a run that `cohort train` makes: who takes part, and what each of them computes on.
/// Internal to this module.
namespace cohort::train {

/// Meets the other ranks, where a launcher has started several, and returns the gradient sync of the
/// configuration. Collective. Throws: RendezvousError; UsageError for ranks with another configuration.
std::shared_ptr<parallel::GradientSync> join_ranks(const config::Config& config);

/// Returns train.device, or where this host has several ranks and the configuration names no number, one
/// of the GPUs that it sees: its own, where there are as many as ranks or the launcher shows it one alone.
std::string device_of_rank(const config::Config& config);
/// The GPU of a rank among those that it sees.
int gpu_of_rank(int local_rank, int num_visible);

/// Returns how many ranks of the job are on this machine, this one too. Collective.
int ranks_on_host(const parallel::GradientSync& gradient_sync);

/// Returns train.threads, or for 0 the cores of this process divided by the ranks that have the same ones; 0
/// where one process is alone, or OMP_NUM_THREADS is set. Collective.
int threads_of_rank(const config::Config& config, const parallel::GradientSync& gradient_sync);

/// comm::run_on_rank0_and_broadcast(), also where there is one rank.
nlohmann::json run_on_rank0_and_broadcast(const parallel::GradientSync& gradient_sync,
                                          const std::function<nlohmann::json()>& make);

}  // namespace cohort::train
