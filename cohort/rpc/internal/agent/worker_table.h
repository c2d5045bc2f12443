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

/// What is known of a worker. Names, ids and signatures stay as they are after the join.
struct KnownWorker {
  WorkerInfo info;
  std::string incarnation;                        ///< of its process
  std::map<std::string, std::string> signatures;  ///< of its functions, by their names
  std::shared_ptr<net::Peer> peer;                ///< null: this worker, or one that has not connected yet
  std::string down;                               ///< why it is gone; empty: it is not

  /// Throws: UsageError where the worker has not the function that this program calls.
  void check_function(const char* function) const;
};

/// All workers by name and by id, and which process is heard as which of them. Threads: one at a time.
class WorkerTable {
 public:
  using Peer = std::shared_ptr<net::Peer>;
  explicit WorkerTable(std::int32_t self) : self_(self) {}

  /// Takes over the workers in the order of their ids, and hears those that have connected already.
  /// Throws: UsageError for two of one name.
  void set(std::vector<KnownWorker> workers);

  /// A process has connected. It is heard as the worker of its name, if that has a higher id and this incarnation.
  void on_connect(const Peer& peer);
  /// This worker has connected to the address of worker `id`. Throws: RendezvousError where another process is there.
  void on_connected(std::int32_t id, const Peer& peer);
  /// Names of the workers with higher ids that have not connected yet.
  std::vector<std::string> not_connected() const;
  /// Whether the process is heard as a worker.
  bool is_worker(const Peer& peer) const;
  /// The process is gone. Returns the id of its worker; none where it was not heard as one.
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

  /// In the order of their ids.
  std::vector<WorkerInfo> infos() const;
  const std::map<std::string, KnownWorker>& by_name() const { return workers_; }
  const std::vector<std::string>& names() const { return names_; }

 private:
  bool is_known(std::int32_t id) const { return id >= 0 && static_cast<std::size_t>(id) < names_.size(); }

  const std::int32_t self_;
  std::map<std::string, KnownWorker> workers_;
  std::vector<std::string> names_;  // by id
  std::vector<Peer> early_;         // connected before set()
};

}  // namespace cohort::rpc
