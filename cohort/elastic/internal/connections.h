#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/secret.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/elastic/internal/process_inbox.h"
#include "cohort/membership/generation.h"
#include "cohort/net/node.h"

namespace cohort::elastic {

class StoreClient;
struct ConnectAttempt;

/// After how long without a sign of life a process gives up another one: 2 s, or kAloneFactor times what its
/// agent was given as `silence` (COHORT_SILENCE_MS), where that is more. Throws: ConfigError.
std::chrono::milliseconds link_silence_of_process();

/// Returns the host of "n1:29400" and "[::1]:29400", without brackets.
std::string host_of(const std::string& address);

/// How the processes of a generation find and reach each other. Links last from one generation to the next,
/// as long as both processes live. Threads: one.
class Connections {
 public:
  explicit Connections(std::shared_ptr<ProcessInbox> inbox);
  /// Says goodbye to all peers, so that none takes this process for dead.
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  /// Connects this process with all others of the inbox's generation. Blocks until it is. Throws: as
  /// ProcessInbox::wait().
  void connect_all(const membership::Generation& generation, int process, base::Deadline deadline);

  const std::shared_ptr<net::Node>& node() const { return node_; }
  /// Attempts to connect that are kept: those under way, and those that have ended since connect_all().
  std::size_t num_attempts() const { return attempts_.size(); }

 private:
  std::string own_entry(const membership::Generation& generation, int process);
  void connect(const std::string& incarnation, const std::string& address, std::uint64_t generation, int to);
  std::vector<std::string> exchange_entries(const membership::Generation& generation, int process,
                                            base::Deadline deadline);

  const std::shared_ptr<ProcessInbox> inbox_;
  const std::optional<base::Secret> secret_;
  const std::chrono::milliseconds silence_;  // of a link
  const std::shared_ptr<StoreClient> store_;
  std::shared_ptr<net::Node> node_;
  std::string local_, remote_;  // addresses; `remote_` is empty until a generation has two members
  std::map<std::string, std::shared_ptr<ConnectAttempt>> attempts_;  // by incarnation
  base::ThreadPool store_thread_, pool_;
};

}  // namespace cohort::elastic
