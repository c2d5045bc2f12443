// A peer's name is what the peer says. So each worker leaves its incarnation on the store, and the first peer
// of this incarnation is heard under the worker's name. Any other process is ignored, whenever it connects
// and whatever its name is. Who knows an incarnation may have it from the handshake: against strangers there
// is the job's secret.
//
// Each worker connects to those with a lower id, and waits for those with a higher one. So each pair has one
// connection, and no two connects cross.
//
// In a dynamic group a name may have had several workers. Entries stay, since calls and handlers under way
// refer to them. So the entry of a later worker has a name of its own, with the worker's id: '#' is in no
// worker's name. Programs get such names, and pass them on to workers that have others. So resolve() takes
// the id from it.
#include "cohort/rpc/internal/agent/worker_table.h"

#include <charconv>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/rpc/function.h"

namespace cohort::rpc {
namespace {

// The 7 of "ps/0#7".
std::optional<std::int32_t> id_in(const std::string& name) {
  const std::size_t mark = name.find('#');
  if (mark == std::string::npos) return std::nullopt;
  std::int32_t id = 0;
  const char* const end = name.data() + name.size();
  const std::from_chars_result read = std::from_chars(name.data() + mark + 1, end, id);
  return read.ec == std::errc() && read.ptr == end ? std::optional(id) : std::nullopt;
}

}  // namespace

void KnownWorker::check_function(const char* function) const {
  if (signatures.empty() && !down.empty()) return;  // it was gone before this worker joined: the call says so
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

void WorkerTable::begin_dynamic(KnownWorker self) {
  is_dynamic_ = true;
  self.is_ready = false;
  add(std::move(self));
}

std::optional<std::int32_t> WorkerTable::holder_of(const std::string& name, std::int32_t joiner) const {
  for (const auto& [key, worker] : workers_) {
    if (public_name(key) != name || worker.is_gone()) continue;
    if (worker.is_ready || worker.info.id < joiner) return worker.info.id;
  }
  return std::nullopt;
}

void WorkerTable::add(KnownWorker worker) {
  const std::int32_t id = worker.info.id;
  if (workers_.count(worker.info.name) > 0) worker.info.name += base::concat('#', id);
  const auto place = static_cast<std::size_t>(id);
  if (names_.size() <= place) names_.resize(place + 1);
  names_[place] = worker.info.name;
  workers_.emplace(names_[place], std::move(worker));
}

void WorkerTable::add_gone(std::int32_t id, const std::string& name, const std::string& why) {
  if (is_known(id)) return;
  KnownWorker worker;
  worker.info = {base::concat(name, '#', id), id};  // the name is for a worker that is there
  worker.down = why;
  worker.is_ready = false;
  add(std::move(worker));
}

void WorkerTable::set_leaving(std::int32_t id, bool is_leaving) {
  KnownWorker& worker = by_id(id);
  if (!worker.down.empty() && !worker.is_leaving) return;  // it is gone
  worker.is_leaving = is_leaving;
  worker.down = is_leaving ? worker.info.name + " is leaving" : "";
}

std::vector<std::int32_t> WorkerTable::gone_ids() const {
  std::vector<std::int32_t> ids;
  for (const auto& [name, worker] : workers_) {
    if (worker.is_gone()) ids.push_back(worker.info.id);
  }
  return ids;
}

std::vector<const KnownWorker*> WorkerTable::live_others() const {
  std::vector<const KnownWorker*> live;
  for (const auto& [name, worker] : workers_) {
    if (worker.info.id != self_ && worker.peer != nullptr && !worker.is_gone()) live.push_back(&worker);
  }
  return live;
}

std::string WorkerTable::resolve(const std::string& name) const {
  if (!is_dynamic_) return name;
  if (const auto id = id_in(name); id && is_known(*id)) return names_[static_cast<std::size_t>(*id)];
  const KnownWorker* found = nullptr;
  for (auto next = workers_.lower_bound(name); next != workers_.end() && next->first.starts_with(name);
       ++next) {
    const KnownWorker& worker = next->second;
    if (public_name(next->first) != name || !worker.is_ready) continue;
    const bool is_better = found == nullptr || (found->is_gone() && !worker.is_gone()) ||
                           (found->is_gone() == worker.is_gone() && worker.info.id > found->info.id);
    if (is_better) found = &worker;
  }
  if (found != nullptr) return found->info.name;
  std::vector<std::string> names;
  for (const WorkerInfo& info : infos()) names.push_back(info.name);
  throw UsageError("rpc.call",
                   base::concat("there is no worker '", name, "'; the workers are ", base::join(names)));
}

void WorkerTable::on_connect(const Peer& peer) {
  if (is_dynamic_) return;                              // it is heard once it has joined
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

const KnownWorker* WorkerTable::find_by_peer(const Peer& peer) const {
  const std::string& name = peer->name();
  const auto found = workers_.find(name);
  if (found != workers_.end() && found->second.peer == peer) return &found->second;
  if (!is_dynamic_) return nullptr;
  const std::string later = name + '#';
  for (auto next = workers_.lower_bound(later); next != workers_.end() && next->first.starts_with(later);
       ++next) {
    if (next->second.peer == peer) return &next->second;
  }
  return nullptr;
}

std::optional<std::int32_t> WorkerTable::on_down(const Peer& peer, const std::string& why) {
  const KnownWorker* const found = find_by_peer(peer);
  if (found == nullptr) return std::nullopt;
  KnownWorker& worker = by_id(found->info.id);
  worker.down = why;
  worker.is_leaving = false;
  if (is_dynamic_)
    worker.peer.reset();  // it maps the memory of its process, and many workers may come and leave
  return worker.info.id;
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
  if (is_known(id) && worker_of(id).is_ready) return names_[static_cast<std::size_t>(id)];
  if (!is_dynamic_) {
    throw UsageError("rpc.call",
                     base::concat("there is no worker ", id, "; the ids are 0 to ", names_.size() - 1));
  }
  std::vector<int> ids;
  for (const WorkerInfo& info : infos()) ids.push_back(info.id);
  throw UsageError("rpc.call", base::concat("there is no worker ", id, "; the ids are ", base::join(ids)));
}

WorkerInfo WorkerTable::received(std::int32_t id) const {
  if (is_known(id)) return {names_[static_cast<std::size_t>(id)], id};
  throw CommError("rpc.receive", base::concat("there is no worker ", id), "the same program on all workers");
}

std::vector<WorkerInfo> WorkerTable::infos() const {
  std::vector<WorkerInfo> infos;
  for (std::size_t id = 0; id < names_.size(); ++id) {
    if (names_[id].empty() || (is_dynamic_ && !is_listed(workers_.at(names_[id])))) continue;
    infos.push_back({public_name(names_[id]), static_cast<int>(id)});
  }
  return infos;
}

}  // namespace cohort::rpc
