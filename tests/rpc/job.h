#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/rpc/agent.h"
#include "tests/support/patience.h"
#include "tests/support/stores/map_store.h"

namespace cohort::test {

/// The agents of this process by name, for functions that call on.
class Agents {
 public:
  static Agents& all() {
    static Agents agents;
    return agents;
  }
  void add(rpc::Agent* agent) {
    const std::lock_guard lock(mutex_);
    agents_[agent->self().name] = agent;
  }
  rpc::Agent& get(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return *agents_.at(name);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, rpc::Agent*> agents_;
};
inline rpc::Agent& agent_of(const std::string& name) {
  return Agents::all().get(name);
}

/// Agents w0, w1 ... of one process.
class Job {
 public:
  explicit Job(int size, rpc::AgentOptions options = {},
               std::unique_ptr<MapStore> store = std::make_unique<MapStore>())
      : store_(std::move(store)) {
    std::vector<std::thread> threads;
    members_.resize(static_cast<std::size_t>(size));
    for (int id = 0; id < size; ++id) {
      threads.emplace_back([&, id] {
        members_[static_cast<std::size_t>(id)] =
            std::make_unique<rpc::Agent>("w" + std::to_string(id), id, size, *store_, options);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& agent : members_) Agents::all().add(agent.get());
  }
  rpc::Agent& operator[](std::size_t id) { return *members_.at(id); }
  MapStore& store() { return *store_; }
  void drop(std::size_t id) { members_.at(id).reset(); }
  void shutdown() {
    std::vector<std::thread> threads;
    for (const auto& agent : members_) {
      threads.emplace_back([&agent] { agent->shutdown(patience()); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const std::unique_ptr<MapStore> store_;
  std::vector<std::unique_ptr<rpc::Agent>> members_;
};

}  // namespace cohort::test
