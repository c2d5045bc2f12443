#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/elastic/internal/wire.h"
#include "cohort/membership/generation_change.h"
#include "cohort/membership/rank_link.h"
#include "cohort/net/peer.h"

namespace cohort::elastic {

/// A message of this process's generation.
struct Letter {
  Wire wire;
  net::Message message;
};

/// What has come for a process: orders of its agent, messages and ends of other processes. Other threads put
/// it in. The training thread takes it out, and waits for it. Threads: any; functions with a deadline, and
/// enter(): the training thread.
class ProcessInbox : public net::Handler {
 public:
  /// `on_lost_link`: called on a thread of net's; must not wait.
  explicit ProcessInbox(std::function<void(membership::MemberId)> on_lost_link)
      : on_lost_link_(std::move(on_lost_link)) {}
  /// `tell` is called where this process has waited for others for a second, and when that wait has ended.
  /// Must not wait. Before anything waits.
  void on_long_wait(std::function<void(bool is_waiting)> notify) { notify_long_wait_ = std::move(notify); }
  /// The same for a wait that is not in the inbox.
  void tell_long_wait(bool is_waiting) const {
    if (notify_long_wait_) notify_long_wait_(is_waiting);
  }

  // What other threads put in.

  void on_order(membership::RankOrder order);
  void on_agent_end(std::string why);
  void on_region(base::Fd file);
  void on_connect(const std::shared_ptr<net::Peer>& peer) override;
  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) override;
  void on_down(const std::shared_ptr<net::Peer>& peer, net::Down down) override;
  /// A process of the generation could not be reached.
  void lose_process(std::uint64_t generation, int process, const std::string& why);
  /// Makes a change that somebody waits for.
  void post(const std::function<void()>& change);
  /// The session is being destroyed: its generation ends.
  void close();

  // What any thread may ask.

  /// Why a call that needs all processes of the generation cannot end any more, as wait() would throw it;
  /// null: it can. A planned change does not end it while they are in their step.
  std::exception_ptr end_of(std::uint64_t generation) const;
  /// Waits until there is such an error; returns null after the deadline. `is_lost`: the call has lost a
  /// process, so a planned change ends it, too.
  std::exception_ptr wait_for_end_of(std::uint64_t generation, base::Deadline deadline, bool is_lost = false);

  // Of the generation that this process is in.

  /// Waits for a generation to enter, or for memory to be taken. Throws: RunEnded; CommError where the agent
  /// is gone.
  void wait_for_next();
  /// Waits until the run is over, or there is a generation to enter; returns whether it is over. Throws: as
  /// wait_for_next(), but not RunEnded where the run has succeeded.
  bool wait_for_end();
  bool must_enter() const;
  /// As Session::must_leave().
  bool must_leave() const;
  bool has_next() const;
  /// The next generation is that of this process from here on. Letters of the one before are dropped.
  /// `on_entered` runs before a link of the generation can be lost.
  void enter(const std::function<void(const membership::Generation&)>& on_entered);
  membership::Generation generation() const;
  /// Of the run; empty before the first order.
  std::string origin() const;
  std::optional<int> process() const;
  /// Whether this process has a part in the next generation.
  bool has_process_next() const;
  std::uint64_t newest() const;
  /// The memory for the state that has come, once. Not open: none has.
  base::Fd take_region();
  /// All hellos have come: a process that connects again is lost from here on, as messages to it may be.
  void keep_links();
  /// The incarnations of the generation's processes, in order.
  void set_processes(std::vector<std::string> incarnations);
  /// The peer that has this incarnation, if it is connected.
  std::shared_ptr<net::Peer> find_peer(const std::string& incarnation) const;
  /// The same within a condition of wait().
  std::shared_ptr<net::Peer> find_peer_locked(const std::string& incarnation) const;
  /// Peers of the processes, but for this one. Empty before set_processes(), and where one is gone.
  std::shared_ptr<net::Peer> peer_of(int process) const;

  /// The state is that after so many steps, so the next one is under way.
  void set_committed(std::uint64_t steps);

  /// When a wait ends without what it waits for.
  struct WaitEnd {
    std::uint64_t generation = 0;  ///< that the caller is in
    bool is_in_step = false;       ///< a planned change does not end it
    /// Whose messages it waits for. A lost link ends it; in a step only those of these processes do.
    std::vector<int> needed = {};
    base::Deadline deadline;
    std::string what = {};  ///< for the message: "the covers of processes 1, 2"
  };
  /// Waits until `condition()`, which is called under the inbox's lock. Throws: GenerationEnded, RunEnded,
  /// CommError where the agent is gone; after the deadline as give_up().
  void wait(const std::function<bool()>& condition, const WaitEnd& end);
  /// The deadline has passed: links to processes of `needed` are lost from here on. Throws: GenerationEnded;
  /// TimeoutError where there are none.
  [[noreturn]] void give_up(const WaitEnd& end);
  /// Waits for letters of these kinds, and takes all of them.
  std::vector<Letter> take(const std::set<WireType>& types, const WaitEnd& end);
  /// The same without waiting: may be none.
  std::vector<Letter> take_now(const std::set<WireType>& types);

 private:
  bool has_left_with_node() const;
  bool wait_long(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition,
                 base::Deadline deadline);
  void throw_if_over() const;
  void throw_if_ended(const WaitEnd& end) const;
  std::exception_ptr find_end(std::uint64_t generation, bool is_in_step) const;
  void notify_all();
  [[noreturn]] void throw_late(const WaitEnd& end);
  [[noreturn]] static void throw_ended(std::uint64_t generation, const std::string& why);
  std::vector<Letter> extract(const std::set<WireType>& types);
  void lose(int process, const std::string& why);
  std::optional<int> process_of(const std::string& incarnation) const;

  const std::function<void(membership::MemberId)> on_lost_link_;
  std::function<void(bool is_waiting)> notify_long_wait_;

  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::condition_variable may_have_ended_;  // not for each letter
  bool is_closed_ = false;
  membership::GenerationChange change_;
  membership::RankOrder order_;
  std::string agent_end_;
  base::Fd region_;
  std::uint64_t committed_ = 0;
  std::map<std::string, std::shared_ptr<net::Peer>> peers_;  // by incarnation
  std::vector<std::string> incarnations_;                    // by process; empty: not known yet
  std::map<int, std::string> lost_;                          // processes, and why
  std::map<int, base::Deadline::Clock::time_point> heard_;   // last message of each process of the generation
  bool keeps_links_ = false;
  struct Received {
    Letter letter;
    std::string incarnation;  // of the sender
  };
  std::deque<Received> received_;  // of the generation
  std::deque<Received> early_;     // hellos of later ones
};

}  // namespace cohort::elastic
