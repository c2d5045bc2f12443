// step() polls the ends of the ranks, what they print, and the console together. While the console is full
// what ranks print is left alone, so a rank that prints waits. Always: a rank counts as failed only where
// its failure came before stop(). Later ends are the agent's own doing.
#include "cohort/launch/internal/worker_group.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/cpu_affinity.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

using base::concat;

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

WorkerGroup::WorkerGroup(const RunOptions& options, const WorkerGroupSpec& spec, Display& display,
                         OrphanWatchdog& watchdog)
    : options_(options), spec_(spec), display_(display), watchdog_(watchdog) {
  if (options.bind_to == BindTo::kCores) {
    cores_ = split_cores(base::CpuSet::of_process(), options.nproc_per_node);
  }
  const base::Deadline start_by(kStartTime);
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) start(local_rank, start_by);
}

WorkerGroup::~WorkerGroup() {
  // All first, so that they end side by side.
  WorkerGroup::kill();
  const base::Deadline deadline(kEndTime);
  for (auto& member : members_) member->end(deadline);
}

void WorkerGroup::start(int local_rank, base::Deadline start_by) {
  const int rank = spec_.first_rank + local_rank;
  const bool is_prefixed =
      options_.prefix == Prefix::kOn || (options_.prefix == Prefix::kAuto && spec_.world_size > 1);
  Variables added = variables_of({.rank = rank,
                                  .local_rank = local_rank,
                                  .world_size = spec_.world_size,
                                  .local_world_size = options_.nproc_per_node,
                                  .node_rank = spec_.node_rank,
                                  .master_addr = spec_.master_addr,
                                  .master_port = spec_.master_port,
                                  .restart_count = spec_.attempt});
  added.insert(added.end(), {{"GROUP_WORLD_SIZE", std::to_string(spec_.num_nodes)},
                             {"ROLE_NAME", options_.role},
                             {"ROLE_RANK", std::to_string(rank)},
                             {"ROLE_WORLD_SIZE", std::to_string(spec_.world_size)},
                             {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options_.max_restarts)},
                             {"TORCHELASTIC_RUN_ID", spec_.run_id}});
  const Variables secret = secret_variables(options_, spec_.secret_fd);
  added.insert(added.end(), secret.begin(), secret.end());
  RankSpec spec;
  spec.rank = rank;
  spec.local_rank = local_rank;
  spec.prefix = is_prefixed ? concat("[rank ", rank, "] ") : "";
  // One rank alone: its bytes go through as they come, so that progress bars look right.
  spec.is_raw = !is_prefixed && spec_.world_size == 1;
  spec.folder = spec_.log_folder / std::to_string(local_rank);
  spec.environment = std::move(added);
  if (!cores_.empty()) spec.cpus = cores_[static_cast<std::size_t>(local_rank)];
  if (spec_.secret_fd >= 0) spec.keep = {spec_.secret_fd};
  spec.start_by = start_by;
  members_.push_back(std::make_unique<RankProcess>(options_, std::move(spec), display_, watchdog_));
}

void WorkerGroup::note_end(const RankProcess& member) {
  std::optional<RankFailure> failure = member.failure(spec_.node_rank, spec_.attempt);
  if (!failure) return;
  const int status = failure->status;
  const int before = std::exchange(status_, status_ == 0 ? status : status_);
  // It had failed, and was on its way out when the others were ended: the signal is ours, no news of its own.
  if (stopped_at_ != 0 && failure->time < stopped_at_ &&
      (status == 128 + SIGTERM || status == 128 + SIGKILL)) {
    failure->what = "had failed, and was ended with the others";
    failure->status = before == 0 ? 1 : before;
  }
  if (stopped_at_ == 0 || failure->time < stopped_at_) failures_.push_back(*std::move(failure));
}

void WorkerGroup::step(std::chrono::milliseconds most, const std::vector<int>& wake) {
  std::vector<pollfd> waits;
  for (const int fd : wake) waits.push_back({fd, POLLIN, 0});
  Console& console = display_.console;
  console.add_waits(waits);
  const bool reads = !console.full();
  for (const auto& member : members_) {
    if (member->running()) member->add_waits(waits, reads);
  }
  base::wait_for_files(waits, base::Deadline(most));
  for (const auto& member : members_) {
    if (!member->running()) continue;
    if (reads) member->read();
    if (member->reap()) note_end(*member);
  }
  console.pump();
  if (!options_.reaps_orphans) return;
  reap_orphans(watchdog_, [&](pid_t pid) {
    return std::ranges::any_of(members_, [&](const auto& member) { return member->is_process(pid); });
  });
}

std::vector<int> WorkerGroup::running_ranks() const {
  std::vector<int> ranks;
  for (const auto& member : members_) {
    if (member->running()) ranks.push_back(member->local_rank());
  }
  return ranks;
}

void WorkerGroup::signal(int number) {
  for (const auto& member : members_) member->worker().signal(number);
}

std::string WorkerGroup::notify(int number) {
  std::vector<const RankProcess*> ranks;
  for (const auto& member : members_) ranks.push_back(member.get());
  return notify_ranks(ranks, number, withheld_);
}

void WorkerGroup::pause() {
  for (const auto& member : members_) member->worker().signal_group(SIGSTOP);
}

void WorkerGroup::resume() {
  for (const auto& member : members_) member->worker().signal_group(SIGCONT);
}

void WorkerGroup::stop() {
  if (stopped_at_ == 0) stopped_at_ = now();
  signal(SIGTERM);
}

void WorkerGroup::kill() {
  for (const auto& member : members_) member->worker().kill();
}

}  // namespace cohort::launch
