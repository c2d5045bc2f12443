#include "cohort/membership/etcd/internal/problems.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::membership::etcd {

void Problems::note(const std::string& subject, const std::string& operation, const std::string& problem) {
  std::map<std::string, std::string>& known = problems_[subject];
  const bool is_known =
      std::any_of(known.begin(), known.end(), [&](const auto& entry) { return entry.second == problem; });
  known[operation] = problem;
  if (is_known) return;
  base::log_warning(base::concat("[membership.etcd] ", subject, ", ", operation, ": ", problem));
}

void Problems::clear(const std::string& subject, const std::string& operation) {
  const auto found = problems_.find(subject);
  if (found == problems_.end() || found->second.erase(operation) == 0 || !found->second.empty()) return;
  problems_.erase(found);
  base::log_info(base::concat("[membership.etcd] ", subject, ": all is well again"));
}

}  // namespace cohort::membership::etcd
