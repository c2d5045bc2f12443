#include "cohort/rpc/internal/agent/pending_calls.h"

#include "cohort/base/error.h"

namespace cohort::rpc {

void PendingCall::fail(const std::exception_ptr& error) {
  if (attached) attached->set_error(error);
  promise.set_error(error);
}

std::string PendingCall::describe(std::uint64_t id) const {
  return base::concat(function, " on ", worker, ", call ", shown_number(id));
}

const PendingCall* PendingCalls::find(std::uint64_t id) const {
  const auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : &found->second;
}

std::uint64_t PendingCalls::on_sent(std::uint64_t id, const std::string& worker) {
  const std::uint64_t sequence = ++num_sent_[worker];
  if (const auto found = calls_.find(id); found != calls_.end()) found->second.sequence = sequence;
  return sequence;
}

bool PendingCalls::on_queued(std::uint64_t id, QueuedCall& call) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return false;
  found->second.queued = std::move(call);
  return true;
}

QueuedCall PendingCalls::take_queued(std::uint64_t id) {
  const auto found = calls_.find(id);
  return found == calls_.end() ? QueuedCall() : std::exchange(found->second.queued, {});
}

PendingCalls::Node PendingCalls::take(std::uint64_t id) {
  Node call = calls_.extract(id);
  if (!call.empty()) ++num_finishing_;
  return call;
}

std::vector<std::pair<std::uint64_t, std::string>> PendingCalls::of_worker(const std::string& worker) const {
  std::vector<std::pair<std::uint64_t, std::string>> calls;
  for (const auto& [id, call] : calls_) {
    if (call.worker == worker) calls.emplace_back(id, call.describe(id));
  }
  return calls;
}

std::vector<std::string> PendingCalls::describe() const {
  std::vector<std::string> parts;
  for (const auto& [id, call] : calls_) parts.push_back(call.describe(id) + ", which is not answered");
  return parts;
}

}  // namespace cohort::rpc
