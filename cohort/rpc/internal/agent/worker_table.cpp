// A peer's name is what the peer says. So each worker leaves its incarnation on the store, and the first peer of this
// incarnation is heard under the worker's name. Any other process is ignored, whenever it connects and whatever its
// name is. Who knows an incarnation may have it from the handshake: against strangers there is the job's secret.
//
// Each worker connects to those with a lower id, and waits for those with a higher one. So each pair has one
// connection, and no two connects cross.
#include "cohort/rpc/internal/agent/worker_table.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/rpc/function.h"

namespace cohort::rpc {

void KnownWorker::check_function(const char* function) const {
  const std::string& signature = find_function(function).signature;
  const auto there = signatures.find(function);
  if (there != signatures.end() && there->second == signature) return;
  const bool is_unknown = there == signatures.end();
  throw UsageError("rpc.call",
                   base::concat(info.name, is_unknown ? " has no function " : " has another function ",
                                function, ": here ", signature, is_unknown ? "" : ", there " + there->second),
                   "the same program on all workers");
}

void WorkerTable::set(std::vector<KnownWorker> workers) {
  for (KnownWorker& worker : workers) {
    const std::string name = worker.info.name;
    names_.push_back(name);
    if (!workers_.emplace(name, std::move(worker)).second) {
      throw UsageError("rpc.join", base::concat("two workers are named '", name, "'"),
                       "a name of its own for each");
    }
  }
  for (const Peer& peer : std::exchange(early_, {})) on_connect(peer);
}

void WorkerTable::on_connect(const Peer& peer) {
  if (workers_.empty()) return early_.push_back(peer);  // it may know all workers before this one does
  const auto found = workers_.find(peer->name());
  if (found == workers_.end()) return;
  KnownWorker& worker = found->second;
  if (worker.peer != nullptr || worker.info.id <= self_ || worker.incarnation != peer->incarnation()) return;
  worker.peer = peer;
}

void WorkerTable::on_connected(std::int32_t id, const Peer& peer) {
  const auto found = workers_.find(peer->name());
  if (found == workers_.end() || found->second.info.id != id ||
      found->second.incarnation != peer->incarnation()) {
    throw RendezvousError(
        "rpc.join", base::concat("at the address of worker ", id, " is another process: ", peer->name()));
  }
  found->second.peer = peer;
}

std::vector<std::string> WorkerTable::not_connected() const {
  std::vector<std::string> names;
  for (const auto& [name, worker] : workers_) {
    if (worker.info.id > self_ && worker.peer == nullptr) names.push_back(name);
  }
  return names;
}

bool WorkerTable::is_worker(const Peer& peer) const {
  const KnownWorker* const worker = find_if_known(peer->name());
  return worker != nullptr && worker->peer == peer;
}

std::optional<std::int32_t> WorkerTable::on_down(const Peer& peer, const std::string& why) {
  const auto found = workers_.find(peer->name());
  if (found == workers_.end() || found->second.peer != peer) return std::nullopt;
  found->second.down = why;
  return found->second.info.id;
}

const KnownWorker& WorkerTable::find(const std::string& name) const {
  const KnownWorker* const worker = find_if_known(name);
  if (worker != nullptr) return *worker;
  throw UsageError("rpc.call",
                   base::concat("there is no worker '", name, "'; the workers are ", base::join(names_)));
}

const KnownWorker* WorkerTable::find_if_known(const std::string& name) const {
  const auto found = workers_.find(name);
  return found == workers_.end() ? nullptr : &found->second;
}

const std::string& WorkerTable::name_of_target(int id) const {
  if (is_known(id)) return names_[static_cast<std::size_t>(id)];
  throw UsageError("rpc.call",
                   base::concat("there is no worker ", id, "; the ids are 0 to ", names_.size() - 1));
}

WorkerInfo WorkerTable::received(std::int32_t id) const {
  if (is_known(id)) return {names_[static_cast<std::size_t>(id)], id};
  throw CommError("rpc.receive", base::concat("there is no worker ", id), "the same program on all workers");
}

std::vector<WorkerInfo> WorkerTable::infos() const {
  std::vector<WorkerInfo> infos;
  for (std::size_t id = 0; id < names_.size(); ++id) infos.push_back({names_[id], static_cast<int>(id)});
  return infos;
}

}  // namespace cohort::rpc
