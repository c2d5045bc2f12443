#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/membership/generation.h"

/// What an agent and a rank that it has started tell each other. No LibTorch.
///
///     auto [here, there] = membership::RankLink::make_pair();      // the agent
///     start_rank(command, {{"COHORT_AGENT_FD", there.fd()}});
///     here.send(to_text(order), deadline);
///
///     auto link = membership::RankLink::of_process();              // the rank
///     membership::RankOrder order = membership::parse_rank_order(*link->receive(deadline));
namespace cohort::membership {

/// What the agent knows, whole each time.
struct RankOrder {
  std::uint64_t number = 0;    ///< of the orders of this rank; the first is 1
  std::uint64_t revision = 0;  ///< grows with what the agent knows
  std::string origin = {};  ///< RendezvousRecord::origin: another run has another one; empty: no record yet
  Generation generation;    ///< the newest that agents have agreed on; number 0: none yet
  /// This rank's number in it. None: it waits, and leaves the generation that it is in.
  std::optional<int> process;
  /// Its node leaves the run: a rank that has left its generation has nothing more to do.
  bool is_leaving = false;
  bool has_ended = false;  ///< the run is over
  std::string end_cause;
  bool has_succeeded = false;  ///< or it was stopped: what finished ranks had to do is done
  int stop_signal = 0;         ///< RendezvousRecord::stop_signal()

  bool operator==(const RankOrder&) const = default;
};

/// What the rank says, whole each time.
struct RankStatus {
  bool is_ready = false;         ///< it can enter a generation at once
  std::uint64_t timeout_ms = 0;  ///< for which it waits for another process that lives; 0: it does not say
  /// Number of the newest order, whatever it computes. A rank that does not say so hangs: it is stopped, for
  /// instance. 0: it never says so.
  std::uint64_t heard = 0;
  std::uint64_t entered = 0;    ///< number of the generation that it is in, or was in last
  std::uint64_t recovered = 0;  ///< of the last generation in which it had the newest state
  /// Number of the newest generation without it, once it has left the one before. Where an agent leaves the
  /// run, it waits for that of all its ranks.
  std::uint64_t left = 0;
  std::uint64_t stepped = 0;  ///< of the last generation in which it has committed a step
  std::uint64_t committed_steps = 0;
  std::uint64_t state_bytes = 0;     ///< of states that it has given to others, or got from them, so far
  std::vector<MemberId> lost_links;  ///< of `entered`: members to which it has lost its link
  bool is_state_lost = false;        ///< of `entered`: no process has the newest state
  bool is_finished = false;          ///< it has made the last step, and stays until the run has ended
  int stop_signal = 0;               ///< of `is_finished`: the signal by which it ends before the last step
  bool is_waiting = false;           ///< it has waited for other processes, or for its agent, for a second

  bool operator==(const RankStatus&) const = default;
};

std::string to_text(const RankOrder& order);
std::string to_text(const RankStatus& status);
/// Throws: CommError for a text of another version.
RankOrder parse_rank_order(std::string_view text);
RankStatus parse_rank_status(std::string_view text);

/// One end of the link between an agent and a rank: a socket pair, which the rank inherits.
/// Threads: one sends and one receives at a time. shutdown(): any.
class RankLink {
 public:
  /// The two ends. Both are closed by exec: who starts the rank takes that from the second one.
  static std::pair<RankLink, RankLink> make_pair();
  /// The end whose number the agent has put into COHORT_AGENT_FD; nothing where there is none. It is closed
  /// by exec from now on. Throws: UsageError for a descriptor that is no such socket.
  static std::optional<RankLink> of_process();
  explicit RankLink(base::Fd fd) : fd_(std::move(fd)) {}

  /// Returns whether the other side has room for all of it before the deadline. If not, it goes with a later
  /// send() or flush(). As texts are whole each time, a newer one takes the place of one that has not begun.
  /// Throws: CommError where the other side is gone.
  bool send(const std::string& text, base::Deadline deadline);
  /// Gives the other side a descriptor of its own for `file`. It comes before texts that are sent later.
  /// Returns and throws: as send().
  bool send_file(const base::Fd& file, base::Deadline deadline);
  /// Sends what is left. Returns and throws: as send().
  bool flush(base::Deadline deadline);
  bool has_unsent() const { return !unsent_.empty(); }
  /// The next text; nothing where the deadline passes first. Throws: CommError where the other side is gone.
  std::optional<std::string> receive(base::Deadline deadline);
  /// The last descriptor that came before what receive() has returned, closed by exec; once. Not open: none
  /// came.
  base::Fd take_file() { return std::move(file_); }
  /// Both sides see the link's end, also one that waits in receive().
  void shutdown();
  /// Readable where there is something to receive, or the other side is gone.
  int fd() const { return fd_.get(); }

 private:
  struct Packet {
    std::string bytes;
    base::Fd file = base::Fd();
  };
  bool wait_for(short events, base::Deadline deadline) const;

  base::Fd fd_;
  std::deque<Packet> unsent_;
  bool is_first_begun_ = false;  // of the text in unsent_ a packet is sent
  std::string received_;         // packets of a text that is not whole
  base::Fd file_;                // that came
};

}  // namespace cohort::membership
