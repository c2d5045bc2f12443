#include "cohort/launch/run_options.h"

#include <signal.h>

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/launch/internal/flags/flag_values.h"

namespace cohort::launch {

using base::concat;

StreamChoice StreamChoice::parse(std::string_view text, const std::string& flag) {
  StreamChoice choice;
  const FlagValue given{flag, std::string(text)};
  const auto bad = [&] {
    given.reject("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one for each local rank: 0:3,1:2");
  };
  const auto bits_of = [&](const std::string& part) {
    if (part.size() != 1 || part[0] < '0' || part[0] > '3') bad();
    return part[0] - '0';
  };
  if (text.find(':') == std::string_view::npos) {
    choice.all_ = bits_of(given.text);
    return choice;
  }
  for (const std::string& part : split_text(given.text, ',')) {
    const auto halves = split_text(part, ':');
    int rank = 0;
    if (halves.size() != 2 || !read_number(halves[0], rank) || rank < 0) bad();
    if (!choice.of_rank_.emplace(rank, bits_of(halves[1])).second) {
      reject_options(concat(flag, " is '", text, "': local rank ", rank, " stands there twice"));
    }
  }
  return choice;
}

int StreamChoice::bits(int local_rank) const {
  const auto at = of_rank_.find(local_rank);
  return at == of_rank_.end() ? all_ : at->second;
}

bool StreamChoice::any() const {
  return all_ != 0 ||
         std::any_of(of_rank_.begin(), of_rank_.end(), [](const auto& entry) { return entry.second != 0; });
}

std::vector<int> RunOptions::default_signals() {
  return {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
}

bool RunOptions::is_on_one_host() const {
  if (rendezvous.is_dynamic()) {
    const bool may_be_far = rendezvous.backend == RendezvousBackend::kEtcd && !is_alone() && !no_secret;
    return base::is_this_host(rendezvous.endpoint_host()) && rendezvous.local_addr.empty() && !may_be_far;
  }
  if (!master_addr) return nnodes == 1;
  return base::is_this_host(*master_addr);
}

}  // namespace cohort::launch
