#include "cohort/rpc/internal/contexts.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::rpc {
namespace {

// Contexts that have ended are remembered, so that a call which was on its way does not make one anew.
constexpr std::size_t kMaxEnded = 256;

}  // namespace

std::shared_ptr<ContextState> Contexts::create() {
  const std::lock_guard lock(mutex_);
  const ContextId id{self_, next_number_++};
  return contexts_[id] = std::make_shared<ContextState>(id, mark_);
}
std::shared_ptr<ContextState> Contexts::find_or_make(ContextId id) {
  const std::lock_guard lock(mutex_);
  if (const auto found = contexts_.find(id); found != contexts_.end()) return found->second;
  const auto context = std::make_shared<ContextState>(id, mark_);
  if (down_.count(id.creator) > 0 || std::find(ended_.begin(), ended_.end(), id) != ended_.end()) {
    context->end();
  } else {
    contexts_.emplace(id, context);
  }
  return context;
}
std::shared_ptr<ContextState> Contexts::find_if_here(ContextId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(id);
  return found != contexts_.end() ? found->second : nullptr;
}
std::shared_ptr<ContextState> Contexts::find(ContextId id) const {
  if (std::shared_ptr<ContextState> found = find_if_here(id)) return found;
  throw UsageError("rpc.context", base::concat("context ", id.number, " of worker ", id.creator,
                                               " has ended, or no call of it came here"));
}
std::shared_ptr<void> Contexts::end(ContextId id, std::set<std::string>& callees) {
  const std::lock_guard lock(mutex_);
  if (std::find(ended_.begin(), ended_.end(), id) == ended_.end()) ended_.push_back(id);
  if (ended_.size() > kMaxEnded) ended_.pop_front();
  const auto found = contexts_.find(id);
  if (found == contexts_.end()) return nullptr;
  std::shared_ptr<ContextState> context = std::move(found->second);
  contexts_.erase(found);
  callees = context->end();
  return context;
}
std::shared_ptr<void> Contexts::on_down(std::int32_t worker) {
  auto ended = std::make_shared<std::vector<std::shared_ptr<ContextState>>>();
  const std::lock_guard lock(mutex_);
  down_.insert(worker);
  for (auto at = contexts_.begin(); at != contexts_.end();) {
    if (at->first.creator != worker) {
      ++at;
      continue;
    }
    at->second->end();
    ended->push_back(std::move(at->second));
    at = contexts_.erase(at);
  }
  return ended;
}
std::size_t Contexts::size() const {
  const std::lock_guard lock(mutex_);
  return contexts_.size();
}
std::size_t Contexts::num_backwards() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [id, context] : contexts_) sum += static_cast<std::size_t>(context->num_running());
  return sum;
}

}  // namespace cohort::rpc
