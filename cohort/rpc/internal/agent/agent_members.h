#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/net/peer.h"
#include "cohort/rpc/internal/agent/agent_core.h"
#include "cohort/rpc/internal/agent/member_protocol.h"

namespace cohort::rpc {

/// Messages of joins and leaves have a channel of their own, which is read also before the join is over.
inline constexpr std::uint32_t kMemberChannel = net::kAnswerChannels + 3'000'000;

/// Throws: UsageError where the store has a group of the other kind. Leaves there which kind this one is.
void check_group_kind(base::KeyValueStore& store, bool is_dynamic);
/// Returns an id that no worker of the store's dynamic group has had.
int claim_worker_id(base::KeyValueStore& store);

/// Has a worker join a dynamic group and leave it, and answer those that join and leave. Threads: any,
/// without the mutex of CallTables.
class AgentMembers {
 public:
  using Peer = std::shared_ptr<net::Peer>;
  explicit AgentMembers(AgentCore& core)
      : core_(core), protocol_(core.tables.workers, core.tables.shutdown) {}

  /// Joins: makes the node, and connects to all workers. Returns "", or why it has to join again under
  /// another id. Blocking. Throws: UsageError for a name that a worker has; RendezvousError that names who
  /// does not answer.
  std::string join(base::KeyValueStore& store, const std::shared_ptr<net::Handler>& handler,
                   base::Deadline deadline);
  /// After join(): returns once AgentOptions::min_workers are there. Blocking. Throws: RendezvousError that
  /// names those that are there, and those that were taken for dead.
  void wait_for_workers(base::Deadline deadline);
  /// After a join that has failed: those that have accepted this worker know at once that it does not come.
  void say_goodbye();
  /// Ids of workers that were gone before this one knew them, and why. After join().
  const std::map<std::int32_t, std::string>& gone() const { return gone_; }

  /// A message of kMemberChannel. On the node's thread.
  void on_message(const Peer& peer, net::Message message);

  /// Waits until no call of this worker, or to it, is under way, and no further call will come. Throws:
  /// TimeoutError that says what it waits for; then the others call this worker again.
  void leave(base::Deadline deadline);
  /// What leave() waits for. Under the mutex.
  std::vector<std::string> describe_missing() const;

 private:
  struct PublishedWorker;
  struct Unreached {
    std::string name, why;
    std::exception_ptr error;     // a process may be there, and there is no connection with it
    bool was_unknown = false;     // its host, to the last name server that has answered
    bool is_lookup_late = false;  // no name server has answered in time
    bool is_rejected = false;     // by its host: it has ended, as a rule
  };
  void listen_and_publish(base::KeyValueStore& store, const std::shared_ptr<net::Handler>& handler);
  bool may_be_gone(std::int32_t id, base::KeyValueStore& store) const;
  void join_worker(std::int32_t id, base::KeyValueStore& store, base::Deadline deadline);
  bool is_accepted_by(const Peer& peer, const PublishedWorker& entry, base::KeyValueStore& store,
                      base::Deadline deadline);
  std::string give_up_missing(base::KeyValueStore& store, base::Deadline deadline);
  static std::string describe_unreached(std::int32_t id, const Unreached& worker);
  std::optional<PublishedWorker> read_entry(std::int32_t id, base::KeyValueStore& store,
                                            base::Deadline deadline) const;
  Peer connect(const PublishedWorker& entry, base::Deadline deadline, Unreached& unreached) const;
  bool answers_now(std::int32_t id, Unreached unreached, base::KeyValueStore& store,
                   base::Deadline deadline) const;
  bool is_dead(std::int32_t id, base::KeyValueStore& store, base::Deadline deadline) const;
  MemberMessage ask_to_join(const Peer& peer, const PublishedWorker& entry, base::Deadline deadline);
  void add_gone(std::int32_t id, const std::string& name);
  void compare_functions(const Peer& peer);
  bool may_leave() const;
  void become_ready(base::Deadline deadline);
  void send(const MemberProtocol::Messages& messages) const;

  /// Calls `step` under the mutex, and sends what it returns.
  template <typename Step>
  void run(const Step& step) {
    MemberProtocol::Messages messages;
    {
      const std::lock_guard lock(tables_.mutex);
      messages = step();
    }
    tables_.changed.notify_all();
    send(messages);
  }

  AgentCore& core_;
  CallTables& tables_ = core_.tables;
  std::map<std::int32_t, std::string> gone_;
  std::map<std::int32_t, Unreached> unreached_;  // workers with lower ids that have not accepted this one
  bool is_accepted_ = false;                     // by one of them at least
  MemberProtocol protocol_;                      // under the mutex of the tables
};

}  // namespace cohort::rpc
