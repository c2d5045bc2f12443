#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/net/peer.h"
#include "cohort/rpc/agent_types.h"

/// The workers of a job, as one of them knows them. No thread and no socket.
namespace cohort::rpc {

/// What is known of a worker. Names, ids and signatures stay as they are after its join.
struct KnownWorker {
  /// Its name is the one by which this agent's tables know it: its own, or "ps/0#7" where an earlier worker
  /// had the name ps/0.
  WorkerInfo info;
  std::string incarnation;                        ///< of its process
  std::map<std::string, std::string> signatures;  ///< of its functions, by their names
  /// Null: this worker, or one that has not connected yet, or has left a dynamic group.
  std::shared_ptr<net::Peer> peer;
  std::string down;         ///< why it is gone, or that it is leaving; empty: neither
  bool is_leaving = false;  ///< it is not gone, and answers the calls that it has
  bool is_ready = true;     ///< of a dynamic group: its join is over

  bool is_gone() const { return (!down.empty() && !is_leaving) || (peer != nullptr && peer->is_down()); }

  /// Throws: UsageError where the worker has not the function that this program calls.
  void check_function(const char* function) const;
};

/// A worker's own name.
inline std::string public_name(const std::string& name) {
  return name.substr(0, name.find('#'));
}

/// All workers by name and by id, and which process is heard as which of them. Threads: one at a time.
class WorkerTable {
 public:
  using Peer = std::shared_ptr<net::Peer>;
  explicit WorkerTable(std::int32_t self) : self_(self) {}

  /// Takes over the workers in the order of their ids, and hears those that have connected already.
  /// Throws: UsageError for two of one name.
  void set(std::vector<KnownWorker> workers);

  /// In place of set(): workers come and go. `self` is not ready.
  void begin_dynamic(KnownWorker self);
  bool is_dynamic() const { return is_dynamic_; }
  /// The worker that keeps `joiner` from having a name; none: it can have it. Of two that join under one name
  /// the lower id has it.
  std::optional<std::int32_t> holder_of(const std::string& name, std::int32_t joiner) const;
  /// A worker that joins, or that this one joins, under its own name.
  void add(KnownWorker worker);
  /// A worker that was gone before this one knew it.
  void add_gone(std::int32_t id, const std::string& name, const std::string& why);
  /// Its join is over: it is listed and may be called.
  void set_ready(std::int32_t id) { by_id(id).is_ready = true; }
  /// It answers the calls that it has. It gets no further calls.
  void set_leaving(std::int32_t id, bool is_leaving);
  /// Ids of those that are gone.
  std::vector<std::int32_t> gone_ids() const;
  /// The others of a dynamic group that are not gone, also those that join.
  std::vector<const KnownWorker*> live_others() const;
  /// The name under which find() finds the worker that has this own name now, or had it last; or worker 7 for
  /// "ps/0#7", as this or another agent may know it. Throws: UsageError for an unknown name.
  std::string resolve(const std::string& name) const;

  /// A process has connected. It is heard as the worker of its name, if that has a higher id and this
  /// incarnation.
  void on_connect(const Peer& peer);
  /// This worker has connected to the address of worker `id`. Throws: RendezvousError where another process
  /// is there.
  void on_connected(std::int32_t id, const Peer& peer);
  /// Names of the workers with higher ids that have not connected yet.
  std::vector<std::string> not_connected() const;
  /// The worker that the process is heard as; null: it is not heard.
  const KnownWorker* find_by_peer(const Peer& peer) const;
  bool is_worker(const Peer& peer) const { return find_by_peer(peer) != nullptr; }
  /// The process is gone. Returns the id of its worker; none where it was not heard as one. A dynamic group
  /// keeps no gone peers.
  std::optional<std::int32_t> on_down(const Peer& peer, const std::string& why);

  /// Throws: UsageError for an unknown name. The worker lives as long as the table.
  const KnownWorker& find(const std::string& name) const;
  /// The same; null for an unknown name.
  const KnownWorker* find_if_known(const std::string& name) const;
  /// Of a known worker.
  std::int32_t id_of(const std::string& name) const { return workers_.at(name).info.id; }
  /// Throws: UsageError for an unknown id.
  const std::string& name_of_target(int id) const;
  /// Throws: CommError for an unknown id, which another worker has sent.
  WorkerInfo received(std::int32_t id) const;

  /// Whether the worker is known.
  bool is_known(std::int32_t id) const {
    return id >= 0 && static_cast<std::size_t>(id) < names_.size() &&
           !names_[static_cast<std::size_t>(id)].empty();
  }
  const KnownWorker& worker_of(std::int32_t id) const {
    return workers_.at(names_.at(static_cast<std::size_t>(id)));
  }

  /// In the order of their ids, with their own names. Of a dynamic group: those that are ready and not gone.
  std::vector<WorkerInfo> infos() const;
  const std::map<std::string, KnownWorker>& by_name() const { return workers_; }
  const std::vector<std::string>& names() const { return names_; }

 private:
  KnownWorker& by_id(std::int32_t id) { return workers_.at(names_.at(static_cast<std::size_t>(id))); }
  bool is_listed(const KnownWorker& worker) const {
    return worker.is_ready && !worker.is_leaving && !worker.is_gone();
  }

  const std::int32_t self_;
  bool is_dynamic_ = false;
  std::map<std::string, KnownWorker> workers_;
  std::vector<std::string> names_;  // by id; empty: not known
  std::vector<Peer> early_;         // connected before set()
};

}  // namespace cohort::rpc
