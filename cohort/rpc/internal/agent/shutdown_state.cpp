#include "cohort/rpc/internal/agent/shutdown_state.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::rpc {

void ShutdownState::set_num_workers(std::size_t size) {
  counts_ = {std::vector<std::uint64_t>(size), std::vector<std::uint64_t>(size)};
  reports_.resize(size);
}

void ShutdownState::add_worker(std::int32_t id) {
  const std::size_t size = std::max(counts_.sent.size(), static_cast<std::size_t>(id) + 1);
  counts_.sent.resize(size);
  counts_.received.resize(size);
  reports_.resize(size);
}

void ShutdownState::on_report(std::int32_t worker, std::optional<IdleReport> report) {
  in_shutdown_.insert(worker);
  reports_.set(static_cast<std::size_t>(worker), std::move(report));
}

void ShutdownState::begin_leaving() {
  is_leaving_ = true;
  last_report_.reset();
}

std::optional<IdleReport> ShutdownState::next_report(std::int32_t self) {
  if (last_report_ == counts_) return std::nullopt;
  last_report_ = counts_;
  reports_.set(static_cast<std::size_t>(self), counts_);
  return counts_;
}

std::vector<std::string> ShutdownState::describe_missing(const WorkerTable& workers,
                                                         std::int32_t self) const {
  std::vector<std::string> parts;
  for (const auto& [name, worker] : workers.by_name()) {
    if (worker.info.id == self || !worker.down.empty()) continue;
    if (in_shutdown_.count(worker.info.id) == 0) {
      parts.push_back(name + ", which has not come to shutdown()");
    } else if (!reports_.has(static_cast<std::size_t>(worker.info.id))) {
      parts.push_back(name + ", which has calls under way, or has given up");
    }
  }
  return parts;
}

std::string ShutdownState::describe_missing_call(const WorkerTable& workers) const {
  const auto call = reports_.find_call();
  if (!call) return "";
  return base::concat("a call of ", workers.names()[call->first], " that has not come to ",
                      workers.names()[call->second]);
}

}  // namespace cohort::rpc
