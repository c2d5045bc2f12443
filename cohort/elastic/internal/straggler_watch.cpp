#include "cohort/elastic/internal/straggler_watch.h"

#include <cmath>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/timeline.h"

namespace cohort::elastic {
namespace {

using base::concat;
using base::Timeline;

double tenths_of_ms(double seconds) {
  return std::round(seconds * 1e4) / 10;
}

}  // namespace

void StragglerWatch::enter(const membership::Generation& generation, int process) {
  std::vector<StragglerProcess> processes;
  names_.clear();
  for (const membership::MemberInfo& member : generation.members) {
    for (int local_rank = 0; local_rank < member.num_processes; ++local_rank) {
      const auto number = static_cast<int>(processes.size());
      const membership::VirtualBlock block = generation.block(number);
      processes.push_back({.name = concat(member.incarnation, "/", local_rank),
                           .num_virtual_ranks = block.end - block.first});
      names_.push_back(concat("process ", number, " (local rank ", local_rank, " of agent ", member.id,
                              " at ", member.address, ")"));
    }
  }
  is_first_ = process == 0;
  detector_.set_processes(std::move(processes));
  marks_.assign(names_.size(), nullptr);
}

void StragglerWatch::add_step(std::span<const double> seconds) {
  const std::vector<StragglerNews> news = detector_.add_step(seconds);
  if (is_first_) {
    for (const StragglerNews& entry : news) log(entry);
  }
  // In each step of an episode: a trace may have been started since it began.
  if (detector_.num_slow() == 0 || !Timeline::enabled()) return;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    if (!detector_.is_slow(static_cast<int>(i))) continue;
    if (marks_[i] == nullptr) marks_[i] = Timeline::intern(concat("slow: ", names_[i]));
    Timeline::instant(marks_[i]);
  }
}

void StragglerWatch::log(const StragglerNews& news) const {
  const std::string& name = names_[static_cast<std::size_t>(news.process)];
  const double ms = tenths_of_ms(news.seconds);
  if (!news.is_slow) {
    base::log_info(concat(name, " is not slow any more: its median step takes ", ms, " ms"));
    return;
  }
  base::log_warning(
      concat(name, " is slow: its median step takes ", ms, " ms, ", tenths_of_ms(news.extra_seconds), " ms (",
             std::round(news.slowdown * 100),
             " %) longer than that of the other processes, which wait for it. Try: look at the load, the "
             "clock rate, the memory and the disk of that host; or send SIGTERM to its cohort run, and the "
             "run continues without it"));
}

}  // namespace cohort::elastic
