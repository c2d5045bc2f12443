#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/codec.h"
#include "cohort/rpc/internal/agent/shutdown_state.h"
#include "cohort/rpc/internal/agent/worker_table.h"

/// How workers of a dynamic group join and leave. No thread, clock or socket, so a simulator runs it.
namespace cohort::rpc {

enum class MemberMessageType : std::uint8_t {
  kJoin = 1,     ///< id, ticket, functions
  kAccepted,     ///< gone, live, is_ready: the sender knows the worker that joins
  kRejected,     ///< why, id
  kReady,        ///< all have accepted the sender
  kKnown,        ///< the sender lists the worker that is ready
  kLeaving,      ///< the sender takes no further calls
  kStaying,      ///< it takes calls again
  kLeavingSeen,  ///< num_calls
};

/// What workers of a dynamic group tell each other about themselves.
struct MemberMessage {
  MemberMessageType type = MemberMessageType::kJoin;
  std::int32_t id = -1;  ///< kJoin: of the sender; kRejected: of the worker that has the name
  std::string ticket;    ///< of the receiver: who joins has it from the store
  std::map<std::string, std::string> functions;
  std::string why;                 ///< empty: the receiver is not the worker that was meant
  std::vector<std::int32_t> gone;  ///< workers that the sender knows to be gone
  std::vector<std::int32_t> live;  ///< workers that the sender hears
  bool is_ready = false;
  std::uint64_t num_calls = 0;  ///< that the sender has made to the worker that leaves
};
COHORT_NESTED(MemberMessage, type, id, ticket, functions, why, gone, live, is_ready, num_calls)

/// The part of one worker. Each function returns the messages that it leads to. Threads: one at a time.
class MemberProtocol {
 public:
  using Peer = std::shared_ptr<net::Peer>;
  using Messages = std::vector<std::pair<Peer, MemberMessage>>;
  MemberProtocol(WorkerTable& workers, ShutdownState& shutdown) : workers_(workers), shutdown_(shutdown) {}

  /// Before the first message. `ticket`: of this worker.
  void begin(KnownWorker self, std::string ticket);
  /// The id is this worker's. Workers that have asked to join get their answers now.
  Messages claim_id();
  /// Asks `worker`, which has a lower id, to accept this one. Also again, after a rejection.
  Messages ask(const KnownWorker& worker, const std::string& ticket);
  /// Its answer has no effect any more.
  void forget(const Peer& peer) { asked_.erase(peer.get()); }
  /// Null: it has not answered.
  const MemberMessage* answer_of(const Peer& peer) const;
  /// Somebody says that worker `id`, which has a lower id, is gone. This one has not asked it.
  void skip(std::int32_t id) { skipped_.insert(id); }
  /// Worker `id` was asked and has not accepted this one. `runs`: it is there.
  void add_unreached(std::int32_t id, bool runs) { unreached_[id] = runs; }
  /// Takes out a skipped worker that another one hears: this one is to ask it.
  std::optional<std::int32_t> take_heard();
  /// A worker that runs, or that others hear, and that has not accepted this one: this one has to join again.
  std::optional<std::int32_t> find_unreached() const;
  /// Those that were skipped, and nobody hears.
  const std::set<std::int32_t>& skipped() const { return skipped_; }
  /// A worker with a lower id that is gone.
  void add_gone(std::int32_t id, const std::string& name, const std::string& why);
  /// Whether one that has accepted this worker said that worker `id` is gone.
  bool is_told_gone(std::int32_t id) const { return told_gone_.count(id) > 0; }
  /// All with lower ids have accepted this worker, or are gone.
  Messages become_ready();
  /// Whether it lists this worker.
  bool is_known_by(const Peer& peer) const { return known_by_.count(peer.get()) > 0; }

  /// This worker is to leave.
  Messages begin_leaving();
  /// Asks the others again which calls are to come.
  Messages repeat_leaving() const { return to_all(MemberMessageType::kLeaving); }
  Messages stay();
  /// Whether all calls of others have come, and no further one will.
  bool may_leave() const;
  /// What may_leave() waits for.
  std::vector<std::string> describe_missing() const;

  /// Throws: CommError for a message of an unknown kind.
  Messages on_message(const Peer& peer, MemberMessage message);

 private:
  void on_join(const Peer& peer, const MemberMessage& message, Messages& answers);
  void on_answer(const Peer& peer, MemberMessage message);
  Messages to_all(MemberMessageType type) const;

  WorkerTable& workers_;
  ShutdownState& shutdown_;
  std::int32_t self_ = -1;
  std::string ticket_;
  bool is_claimed_ = false, is_ready_ = false, is_leaving_ = false;
  Messages early_;                                 // joins that came before claim_id()
  std::map<const net::Peer*, KnownWorker> asked_;  // whom this worker joins
  std::map<const net::Peer*, MemberMessage> answers_;
  std::set<std::int32_t> told_gone_, told_live_, skipped_;
  std::map<std::int32_t, bool> unreached_;
  std::set<const net::Peer*> known_by_;
  std::map<std::int32_t, std::uint64_t> seen_;  // calls of each worker to this one, which leaves
};

}  // namespace cohort::rpc
