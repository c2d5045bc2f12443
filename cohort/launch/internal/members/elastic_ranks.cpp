// A place is a rank's: with its number on this node and its cores. A process in reserve has neither until it
// takes a place. It has a lower priority until then: all ranks wait for one whose core it takes as it starts.
//
// A successor may not enter a generation that the process before it was told of: others may hold links to
// that process, and the store of the generation has its address. It waits for the next one, which the end of
// its predecessor brings.
//
// The region of a place is memory that lives here. An agent is of one run, and the region ends with it: so no
// state of another run is ever found there.
#include "cohort/launch/internal/members/elastic_ranks.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/files/memory_file.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/cpu_affinity.h"
#include "cohort/launch/internal/members/start_priority.h"

namespace cohort::launch {
namespace {

using base::concat;
using membership::RankOrder;
using membership::RankStatus;

constexpr auto kPauseTime = std::chrono::milliseconds(1);  // at least, between two looks

// What an elastic rank finds: the generation tells it the rest.
Variables variables_of_elastic_rank(const RunOptions& options, int local_rank, int secret_fd) {
  RankPlace place;
  place.local_rank = local_rank;
  place.local_world_size = options.nproc_per_node;
  Variables variables;
  for (const auto& [name, value] : variables_of(place)) {
    if (name == "LOCAL_RANK" || name == "LOCAL_WORLD_SIZE" || name == "OMP_NUM_THREADS")
      variables.emplace_back(name, value);
  }
  variables.insert(variables.end(),
                   {{"COHORT_VIRTUAL_RANKS", std::to_string(options.num_virtual_ranks())},
                    {"COHORT_SILENCE_MS", std::to_string(options.rendezvous.silence.count())},
                    {"ROLE_NAME", options.role},
                    {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
                    {"TORCHELASTIC_RUN_ID", options.run_id}});
  const Variables secret = secret_variables(options, secret_fd);
  variables.insert(variables.end(), secret.begin(), secret.end());
  return variables;
}

Fd make_region(int local_rank) {
  Fd region = base::make_memory_file("cohort state");
  if (!region.is_open()) {
    base::log_warning(concat("the state of local rank ", local_rank,
                             " dies with it, as there is no memory for it: ", std::strerror(errno)));
  }
  return region;
}

}  // namespace

ElasticRanks::ElasticRanks(const RunOptions& options, const AgentParts& parts, Display& display)
    : options_(options),
      parts_(parts),
      display_(display),
      max_reserve_(static_cast<std::size_t>(options.rendezvous.warm_ranks)) {
  if (options.bind_to == BindTo::kCores) {
    cores_ = split_cores(base::CpuSet::of_process(), options.nproc_per_node);
  }
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    places_.emplace_back();
    places_.back().region = make_region(local_rank);
    places_.back().rank = start(local_rank, places_.back().region);
  }
}

ElasticRanks::~ElasticRanks() {
  // All first, so that they end side by side.
  ElasticRanks::kill();
  const base::Deadline deadline(kEndTime);
  for (LinkedRank* const rank : all()) rank->process().end(deadline);
}

std::unique_ptr<LinkedRank> ElasticRanks::start(int local_rank, const Fd& region) {
  const bool is_prefixed = options_.prefix != Prefix::kOff;
  RankSpec spec;
  spec.rank = spec.local_rank = local_rank;
  spec.prefix = is_prefixed ? concat("[local rank ", local_rank, "] ") : "";
  // Each process has a folder of its own: what one has recorded is not that of its successor.
  spec.folder = parts_.folder.attempt(num_started_++) / std::to_string(local_rank);
  spec.environment = variables_of_elastic_rank(options_, local_rank, parts_.secret_fd);
  if (static_cast<std::size_t>(local_rank) < cores_.size()) {
    spec.cpus = cores_[static_cast<std::size_t>(local_rank)];
  }
  if (parts_.secret_fd >= 0) spec.keep = {parts_.secret_fd};
  auto rank = std::make_unique<LinkedRank>(options_, std::move(spec), display_, parts_.watchdog);
  base::reach_fault_point("rank started");
  if (region.is_open()) rank->give_region(region);
  base::reach_fault_point("region given");
  RankOrder order = order_;
  order.process.reset();
  rank->send(order);
  return rank;
}

void ElasticRanks::fill_reserve() {
  while (!is_ending_ && reserve_.size() < max_reserve_) {
    try {
      int number = options_.nproc_per_node;
      const auto has_number = [&](const auto& rank) { return rank->process().local_rank() == number; };
      while (std::ranges::any_of(reserve_, has_number)) ++number;
      reserve_.push_back(start(number, Fd()));
      lower_priority(reserve_.back()->process().worker().pid());
    } catch (const SystemError& error) {
      // Ranks in their places need no reserve.
      base::log_warning(concat("no process is kept in reserve any more: ", base::message_of(error)));
      max_reserve_ = 0;
    }
  }
}

std::vector<LinkedRank*> ElasticRanks::all() const {
  std::vector<LinkedRank*> ranks;
  for (const Place& place : places_) {
    if (place.rank) ranks.push_back(place.rank.get());
  }
  for (const auto& rank : reserve_) ranks.push_back(rank.get());
  return ranks;
}

std::vector<ElasticRanks::End> ElasticRanks::step(std::chrono::milliseconds most,
                                                  const std::vector<int>& wake) {
  std::vector<pollfd> waits;
  for (const int fd : wake) waits.push_back({fd, POLLIN, 0});
  Console& console = display_.console;
  console.add_waits(waits);
  const bool reads = !console.full();
  for (const LinkedRank* const rank : all()) {
    rank->process().add_waits(waits, reads);
    rank->add_waits(waits);
  }
  base::wait_for_files(waits, base::Deadline(std::max(most, kPauseTime)));
  std::vector<End> ends;
  for (LinkedRank* const rank : all()) {
    if (reads) rank->process().read();
    rank->exchange();
  }
  const auto alive_at = std::exchange(looked_at_, std::chrono::steady_clock::now());
  for (std::size_t i = 0; i < places_.size(); ++i) {
    std::unique_ptr<LinkedRank>& rank = places_[i].rank;
    if (!rank || !rank->process().reap()) continue;
    base::reach_fault_point("reaped");
    End& end = ends.emplace_back();
    end.place = i;
    end.alive_at = alive_at;
    end.committed_steps = rank->status().committed_steps;
    if (!places_[i].is_dropped) {
      end.status = exit_status(rank->process().worker().wait_status());
      end.failure = rank->process().failure(0, 0);
    }
    rank.reset();
  }
  std::erase_if(reserve_, [&](const auto& rank) {
    if (!rank->process().reap()) return false;
    const auto failure = rank->process().failure(0, 0);
    if (!is_ending_) {
      base::log_warning(concat("in reserve, local ",
                               failure ? summarize(*failure) : "rank ended with status 0",
                               "; no process is kept in reserve any more"));
      max_reserve_ = 0;  // it would end again and again
    }
    return true;
  });
  console.pump();
  if (options_.reaps_orphans) {
    reap_orphans(parts_.watchdog, [&](pid_t pid) {
      const auto ranks = all();
      return std::ranges::any_of(ranks, [&](LinkedRank* rank) { return rank->process().is_process(pid); });
    });
  }
  return ends;
}

void ElasticRanks::replace(std::size_t number) {
  if (is_ending_) return;
  Place& place = places_[number];
  place.first = place.told + 1;
  // The first one that is ready, else the first.
  auto next = std::ranges::find_if(reserve_, [](const auto& rank) { return rank->status().is_ready; });
  if (next == reserve_.end()) next = reserve_.begin();
  if (next == reserve_.end()) {
    place.rank = start(static_cast<int>(number), place.region);
  } else {
    place.rank = std::move(*next);
    reserve_.erase(next);
    restore_priority(place.rank->process().worker().pid());
    if (place.region.is_open()) place.rank->give_region(place.region);
    const std::string prefix = options_.prefix != Prefix::kOff ? concat("[local rank ", number, "] ") : "";
    place.rank->process().take_place(static_cast<int>(number), prefix);
    if (!cores_.empty()) bind_process(place.rank->process().worker().pid(), cores_[number]);
  }
  base::reach_fault_point("successor");
  publish_to(number);
}

void ElasticRanks::publish(const RankOrder& order) {
  order_ = order;
  is_ending_ = is_ending_ || order.is_leaving;
  for (std::size_t i = 0; i < places_.size(); ++i) publish_to(i);
  for (const auto& rank : reserve_) {
    RankOrder waits = order_;
    waits.process.reset();
    rank->send(waits);
  }
}

void ElasticRanks::publish_to(std::size_t number) {
  Place& place = places_[number];
  if (!place.rank) return;
  RankOrder order = order_;
  if (order.process && order.generation.number >= place.first) {
    *order.process += static_cast<int>(number);
    place.told = order.generation.number;
  } else {
    order.process.reset();
  }
  place.rank->send(order);
  if (order.process) base::reach_fault_point("order sent");
}

void ElasticRanks::drop_unfinished() {
  is_ending_ = true;
  for (Place& place : places_) {
    if (!place.rank || place.rank->status().is_finished) continue;
    place.is_dropped = true;
    place.rank->process().worker().kill();
  }
  for (const auto& rank : reserve_) rank->process().worker().kill();
}

std::vector<ObservedRank> ElasticRanks::observe() const {
  std::vector<ObservedRank> ranks;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    ObservedRank& seen = ranks.emplace_back();
    if (!place.rank) continue;
    seen.told = place.rank->num_orders();
    seen.status = place.rank->status();
    seen.pid = static_cast<int>(place.rank->process().worker().pid());
    if (!order_.process || order_.has_ended || order_.generation.number < place.first) continue;
    seen.to_enter = order_.generation.number;
    seen.process = *order_.process + static_cast<int>(i);
  }
  return ranks;
}

void ElasticRanks::end_place(std::size_t place) {
  if (places_[place].rank) places_[place].rank->process().worker().kill();
}

std::vector<int> ElasticRanks::running_ranks() const {
  std::vector<int> ranks;
  for (const LinkedRank* const rank : all()) {
    if (rank->process().running()) ranks.push_back(rank->process().local_rank());
  }
  return ranks;
}

void ElasticRanks::signal(int number) {
  is_ending_ = true;
  for (const LinkedRank* const rank : all()) rank->process().worker().signal(number);
}

std::string ElasticRanks::notify(int number) {
  std::vector<const RankProcess*> ranks;
  for (const LinkedRank* const rank : all()) ranks.push_back(&rank->process());
  return notify_ranks(ranks, number, withheld_);
}

void ElasticRanks::pause() {
  for (const LinkedRank* const rank : all()) rank->process().worker().signal_group(SIGSTOP);
}

void ElasticRanks::resume() {
  for (const LinkedRank* const rank : all()) rank->process().worker().signal_group(SIGCONT);
}

void ElasticRanks::stop() {
  signal(SIGTERM);
}

void ElasticRanks::kill() {
  is_ending_ = true;
  for (const LinkedRank* const rank : all()) rank->process().worker().kill();
}

}  // namespace cohort::launch
