#include "cohort/rpc/agent.h"

#include <algorithm>
#include <cctype>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent_state.h"

namespace cohort::rpc {
namespace {

constexpr std::size_t kMaxNameBytes = 127;

void check_name(const std::string& name) {
  const auto is_allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("_-:./").find(c) != std::string_view::npos;
  };
  if (name.empty() || name.size() > kMaxNameBytes || !std::all_of(name.begin(), name.end(), is_allowed)) {
    throw UsageError("rpc.join", base::concat("'", name, "' is no name of a worker"),
                     "1 to 127 letters, digits and _-:./");
  }
  for (const std::string_view device : {"cpu", "cuda", "mps", "xpu", "meta"}) {
    if (name == device ||
        (name.starts_with(device) && name.size() > device.size() && name[device.size()] == ':')) {
      throw UsageError("rpc.join", base::concat("the worker's name '", name, "' is that of a device"),
                       "worker/" + name);
    }
  }
}

// '*' stands for any text.
bool matches(std::string_view name, std::string_view pattern) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*')
    return !name.empty() && name[0] == pattern[0] && matches(name.substr(1), pattern.substr(1));
  for (std::size_t i = 0; i <= name.size(); ++i) {
    if (matches(name.substr(i), pattern.substr(1))) return true;
  }
  return false;
}

}  // namespace

Agent::Agent(std::string name, int id, int world_size, base::KeyValueStore& store, AgentOptions options) {
  check_name(name);
  state_ = std::make_shared<AgentState>(WorkerInfo{std::move(name), id}, std::move(options));
  try {
    state_->join(world_size, store);
  } catch (...) {
    state_->stop();
    throw;
  }
}

Agent::~Agent() {
  state_->stop();
}

const WorkerInfo& Agent::self() const {
  return state_->self();
}

std::vector<WorkerInfo> Agent::workers(const std::string& pattern) const {
  std::vector<WorkerInfo> found;
  for (WorkerInfo& worker : state_->workers()) {
    if (matches(worker.name, pattern)) found.push_back(std::move(worker));
  }
  return found;
}

base::Future<Encoded> Agent::call(const Target& target, const char* function, Encoded arguments) {
  return state_->call(target, function, std::move(arguments));
}

void Agent::shutdown(base::Deadline deadline) {
  state_->shutdown(deadline);
}

AgentMetrics Agent::metrics() const {
  return state_->metrics();
}

}  // namespace cohort::rpc
