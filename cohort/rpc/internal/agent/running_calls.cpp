#include "cohort/rpc/internal/agent/running_calls.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent/pending_calls.h"

namespace cohort::rpc {

bool CallArrivals::add(std::uint64_t sequence) {
  if (sequence >= next_) early_.insert(sequence);
  while (!early_.empty() && *early_.begin() == next_) {
    early_.erase(early_.begin());
    ++next_;
  }
  return cancelled_.erase(sequence) > 0;
}

void CallArrivals::cancel(std::uint64_t sequence) {
  if (sequence >= next_ && early_.count(sequence) == 0) cancelled_.insert(sequence);
}

std::optional<Encoded> WaitingArguments::take() {
  std::shared_ptr<void> credit;  // without the mutex
  const std::lock_guard lock(mutex_);
  credit = std::move(credit_);
  return std::exchange(arguments_, std::nullopt);
}

std::vector<std::shared_ptr<Reference>> WaitingArguments::references() const {
  const std::lock_guard lock(mutex_);
  return arguments_ ? arguments_->references : std::vector<std::shared_ptr<Reference>>();
}

std::string RunningCalls::function_of(const Key& key) const {
  const auto call = calls_.find(key);
  return call == calls_.end() ? "" : call->second.function;
}

bool RunningCalls::on_end(const Key& key, std::function<void()> fn) {
  const auto call = calls_.find(key);
  if (call == calls_.end()) return false;
  call->second.on_end.push_back(std::move(fn));
  return true;
}

std::optional<RunningCalls::RunningCall> RunningCalls::take(const Key& key) {
  auto call = calls_.extract(key);
  if (call.empty()) return std::nullopt;
  return std::move(call.mapped());
}

std::vector<RunningCalls::Key> RunningCalls::of_caller(const std::string& caller) const {
  std::vector<Key> keys;
  for (const auto& [key, call] : calls_) {
    if (key.first == caller && !call.is_kept) keys.push_back(key);
  }
  return keys;
}

std::vector<std::stop_source> RunningCalls::stop_sources() const {
  std::vector<std::stop_source> sources;
  for (const auto& [key, call] : calls_) sources.push_back(call.stop);
  return sources;
}

std::vector<std::string> RunningCalls::describe() const {
  std::vector<std::string> parts;
  for (const auto& [key, call] : calls_) {
    parts.push_back(base::concat("the handler of call ", shown_number(key.second), " of ", key.first));
  }
  return parts;
}

}  // namespace cohort::rpc
