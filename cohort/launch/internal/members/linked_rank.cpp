// An order or a region that the rank has no room for goes with a later exchange(). One that has closed its
// end is ending: its process says so.
#include "cohort/launch/internal/members/linked_rank.h"

#include <chrono>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"

namespace cohort::launch {
namespace {

using membership::RankLink;

const base::Deadline at_once() {
  return base::Deadline(std::chrono::milliseconds(0));
}

RankSpec with_link(RankSpec spec, int fd) {
  spec.environment.emplace_back("COHORT_AGENT_FD", std::to_string(fd));
  spec.keep.push_back(fd);
  return spec;
}

}  // namespace

LinkedRank::LinkedRank(const RunOptions& options, RankSpec spec, Display& display, OrphanWatchdog& watchdog)
    : LinkedRank(options, std::move(spec), display, watchdog, RankLink::make_pair()) {}

LinkedRank::LinkedRank(const RunOptions& options, RankSpec spec, Display& display, OrphanWatchdog& watchdog,
                       std::pair<RankLink, RankLink> ends)
    : link_(std::move(ends.first)),
      process_(options, with_link(std::move(spec), ends.second.fd()), display, watchdog) {}

template <typename Send>
void LinkedRank::send_unless_gone(const Send& send) {
  if (is_gone_) return;
  try {
    send();
  } catch (const CommError&) {
    is_gone_ = true;
  }
}

void LinkedRank::send(membership::RankOrder order) {
  order.number = ++num_orders_;
  send_unless_gone([&] { link_.send(to_text(order), at_once()); });
}

void LinkedRank::give_region(const Fd& region) {
  try {
    send_unless_gone([&] { link_.send_file(region, at_once()); });
  } catch (const SystemError& error) {
    base::log_warning(base::concat("local rank ", process_.local_rank(),
                                   " has no memory that outlives it: ", base::message_of(error)));
  }
}

void LinkedRank::exchange() {
  if (is_gone_) return;
  try {
    if (link_.has_unsent()) link_.flush(at_once());
    while (const auto text = link_.receive(at_once())) {
      try {
        status_ = membership::parse_rank_status(*text);
      } catch (const CommError& error) {
        base::log_error(base::concat("local rank ", process_.local_rank(),
                                     " is killed, as it is of another version: ", base::message_of(error)));
        process_.worker().kill();
        is_gone_ = true;
        return;
      }
    }
  } catch (const CommError&) {
    is_gone_ = true;
  }
}

void LinkedRank::add_waits(std::vector<pollfd>& waits) const {
  if (is_gone_) return;
  waits.push_back({link_.fd(), static_cast<short>(POLLIN | (link_.has_unsent() ? POLLOUT : 0)), 0});
}

}  // namespace cohort::launch
