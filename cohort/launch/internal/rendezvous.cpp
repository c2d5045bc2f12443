// Node 0 posts a session; each node posts a hello with a random word of its own; node 0 answers all with one
// "go". The go repeats each node's word, and says how many ranks each node has, or why there will be no job.
// Always: a node believes a go only where that repeats its own word, so the record of an earlier rendezvous
// is worth nothing. The store goes with node 0, so after a rejection node 0 waits, some seconds at most,
// until the nodes have read it.
#include "cohort/launch/internal/rendezvous.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/base/version.h"
#include "cohort/launch/internal/stop_request.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

using base::concat;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kHeardTime(5);  // for those that have come to read why there is no job
// After a node's deadline: for node 0 to say who has not come, and else to look who that is.
constexpr milliseconds kTellTime(250), kLookTime(1000);

[[noreturn]] void fail(const std::string& what, const std::string& hint) {
  throw RendezvousError("launch.run", what, hint);
}

std::string key_of(int node) {
  return concat("here/", node);
}

// A node has read that there will be no job, or has given up itself.
std::string heard_key_of(int node) {
  return concat("heard/", node);
}

// What nodes must agree on, as text.
std::string consistency_fingerprint(const RunOptions& options) {
  return concat("--nnodes ", options.nnodes, ", --rdzv-id ", options.run_id, ", --master-addr ",
                *options.master_addr, ", --master-port ", options.master_port.value_or(kDefaultPort),
                ", --max-restarts ", options.max_restarts, ", Cohort ", base::version());
}

// What a node says of itself.
struct Hello {
  std::string fingerprint;
  int nproc = 0;
  std::string reached;  // where it has found node 0
  std::string word;     // chosen for this rendezvous
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Hello, fingerprint, nproc, reached, word)

// What node 0 tells all: how many ranks each node has, or why there will be no job.
struct Go {
  std::string error = {};
  std::vector<int> ranks = {};
  std::string reached = {};
  // The nodes' own, of those that have come: this is no record of an earlier rendezvous.
  std::vector<std::string> words = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Go, error, ranks, reached, words)

template <typename Message>
std::string text_of(const Message& message) {
  return json(message).dump(-1, ' ', false, json::error_handler_t::replace);
}

// What cannot be read leaves the message as it was made, with `error` saying so.
template <typename Message>
Message read(const std::string& text, int node, std::string& error) {
  try {
    return json::parse(text).get<Message>();
  } catch (const json::exception& failure) {
    error = concat("what node ", node, " says cannot be read, as by another version of cohort, or with a ",
                   "secret where others have none: ", failure.what());
    return {};
  }
}

// Why there will be no job, to those who have come.
Go rejection(const RunOptions& options, const AgentStoreClient& store_client, const std::string& why) {
  Go go{.error = why};
  for (int node = 0; node < options.nnodes; ++node) {
    std::string unread;
    go.words.push_back(read<Hello>(store_client.received(key_of(node)).value_or("{}"), node, unread).word);
  }
  return go;
}

Go assemble(const RunOptions& options, const AgentStoreClient& store_client) {
  Go go;
  for (int node = 0; node < options.nnodes; ++node) {
    const auto hello = read<Hello>(*store_client.received(key_of(node)), node, go.error);
    if (!go.error.empty()) break;
    if (hello.fingerprint != consistency_fingerprint(options)) {
      go.error = concat("nodes disagree: node 0 has ", consistency_fingerprint(options), "; node ", node,
                        " has ", hello.fingerprint);
    }
    if (hello.nproc < 1 || hello.nproc > kMaxLocalRanks) {
      go.error = concat("node ", node, " says that it has ", hello.nproc, " ranks");
    }
    go.ranks.push_back(hello.nproc);
    go.words.push_back(hello.word);
    if (go.reached.empty() && node > 0 && base::is_far_address(hello.reached)) go.reached = hello.reached;
  }
  return go.error.empty() ? go : rejection(options, store_client, go.error);
}

WorkerGroupSpec spec_in(const RunOptions& options, const Go& go) {
  WorkerGroupSpec spec;
  spec.node_rank = options.node_rank;
  spec.num_nodes = options.nnodes;
  spec.world_size = 0;
  for (int node = 0; node < options.nnodes; ++node) {
    const int num_ranks = go.ranks[static_cast<std::size_t>(node)];
    if (node < options.node_rank) spec.first_rank += num_ranks;
    spec.world_size += num_ranks;
  }
  spec.run_id = options.run_id;
  spec.master_addr = *options.master_addr;
  // On many a machine its own name leads to 127.0.1.1: true, but no address for others to come to.
  if (options.node_rank == 0 && !go.reached.empty() && base::is_loopback(spec.master_addr))
    spec.master_addr = go.reached;
  return spec;
}

// How one node takes part in the rendezvous.
class Rendezvous {
 public:
  Rendezvous(const RunOptions& options, AgentStoreClient& store_client, SignalQueue& signals,
             base::Deadline deadline)
      : options_(options), store_client_(store_client), signals_(signals), deadline_(deadline) {}

  // Node 0 begins the session, hears all, and tells all. Nothing when a signal came.
  std::optional<Go> join_as_leader(Hello own_hello) {
    const std::string session = base::random_word();
    store_client_.post("hello", session);
    store_client_.begin_session(session);
    store_client_.post(key_of(0), text_of(own_hello));
    for (int node = 0; node < options_.nnodes; ++node) store_client_.watch(key_of(node));
    const auto missing = [&] {
      std::vector<int> nodes;
      for (int node = 0; node < options_.nnodes; ++node) {
        if (!store_client_.received(key_of(node))) nodes.push_back(node);
      }
      return nodes;
    };
    const auto all_have_come = [&] {
      for (int node = 1; node < options_.nnodes; ++node) {
        if (store_client_.received(key_of(node))) store_client_.expect_signs(node);
      }
      return missing().empty();
    };
    const auto who_is_missing = [&] {
      return concat(base::format_list("node", missing()), " of ", options_.nnodes, " did not come");
    };
    std::optional<Go> go;
    if (wait(all_have_come, deadline_, who_is_missing)) go = assemble(options_, store_client_);
    if (!go) {
      reject(concat("node 0 was ended by signal ", stop_.number()));
    } else {
      store_client_.post("go", text_of(*go));
      if (!go->error.empty()) wait_until_heard();
    }
    return go;
  }

  std::optional<Go> join_as_follower(Hello own_hello) {
    // Node 0 says at its own deadline who has not come, which may be later than this one's.
    const base::Deadline until = deadline_.later(kTellTime);
    const auto wait_for_word = [&](const char* key) {
      store_client_.watch(key);
      return wait([&] { return store_client_.received(key).has_value(); }, until,
                  [&] { return who_is_silent(); });
    };
    if (!wait_for_word("hello")) return std::nullopt;
    store_client_.begin_session(*store_client_.received("hello"));
    is_in_session_ = true;
    store_client_.expect_signs(0);
    own_hello.word = base::random_word();
    store_client_.post(key_of(options_.node_rank), text_of(own_hello));
    if (!wait_for_word("go")) {
      give_up();
      return std::nullopt;
    }
    return checked(*store_client_.received("go"), own_hello.word);
  }

  int signal() const { return stop_.number(); }

 private:
  // Each node asks once, since a node that looks for each other makes n^2 requests. Where all are here node
  // 0 may have told so between the requests for its word, which comes first, and theirs.
  std::string who_is_silent() {
    std::vector<int> missing;
    if (is_in_session_) {  // before it, what the others have signed cannot be read
      const base::Deadline until(kLookTime);
      for (int node = 0; node < options_.nnodes; ++node) store_client_.watch(key_of(node));
      const bool have_polled = store_client_.poll_now(until);
      for (int node = 0; node < options_.nnodes; ++node) {
        if (node != options_.node_rank && !store_client_.received(key_of(node))) missing.push_back(node);
      }
      if (!have_polled || (missing.empty() && !store_client_.poll_now(until))) {
        return "node 0 was there, but its store has not answered";
      }
    }
    if (missing.empty()) return "node 0 was there, but did not say who else is";
    return concat(base::format_list("node", missing), " of ", options_.nnodes, " did not come");
  }

  // What node 0 tells all, where it repeats this node's word: no record of an earlier rendezvous does.
  Go checked(const std::string& text, const std::string& word) const {
    std::string error;
    Go go = read<Go>(text, 0, error);
    if (!go.error.empty()) store_client_.post(heard_key_of(options_.node_rank), "1");
    if (!error.empty()) fail(error, "the same version of cohort on all nodes");
    const auto node = static_cast<std::size_t>(options_.node_rank);
    const auto nodes = static_cast<std::size_t>(options_.nnodes);
    if (go.words.size() != nodes || go.words[node] != word) {
      // One that comes too late finds the same as one to whom a record is played.
      const bool is_left_out = !go.error.empty() && go.words.size() == nodes && go.words[node].empty();
      fail(is_left_out ? "node 0 gave up before it heard this node: " + go.error
                       : "what node 0 says is not of this rendezvous",
           is_left_out ? "start cohort run on all nodes within --rdzv-conf timeout=SECONDS"
                       : "a port that nobody else writes to");
    }
    const auto can_be = [](int ranks) { return ranks >= 1 && ranks <= kMaxLocalRanks; };
    if (go.error.empty() && (go.ranks.size() != nodes || !std::ranges::all_of(go.ranks, can_be))) {
      fail("node 0 says numbers of ranks that cannot be", "a port that nobody else writes to");
    }
    return go;
  }

  // On node 0: tells those who have come that there will be no job.
  void reject(const std::string& why) {
    store_client_.post("go", text_of(rejection(options_, store_client_, why)));
    wait_until_heard();
  }

  // On another node: node 0 need not wait until this one has read why there will be no job.
  void give_up() {
    if (store_client_.received("hello")) store_client_.post(heard_key_of(options_.node_rank), "1");
  }

  // The store goes with node 0: those who have come, and live, are to read there first why there will be no
  // job. A signal ends the wait.
  void wait_until_heard() {
    std::vector<int> nodes;
    for (int node = 1; node < options_.nnodes; ++node) {
      if (!store_client_.received(key_of(node)) || store_client_.is_lost(node)) continue;
      nodes.push_back(node);
      store_client_.watch(heard_key_of(node));
    }
    const base::Deadline until(kHeardTime);
    const auto is_done = [&](int node) {
      return store_client_.received(heard_key_of(node)).has_value() || store_client_.is_lost(node);
    };
    while (!std::ranges::all_of(nodes, is_done) && !until.expired() && !take_signal()) {
      std::array<pollfd, 2> waits{pollfd{signals_.fd(), POLLIN, 0}, pollfd{store_client_.fd(), POLLIN, 0}};
      base::wait_for_files(waits, until);
      store_client_.acknowledge();
    }
  }

  // Whether a signal has come that ends the rendezvous, or the wait after it: the first one is the reason.
  bool take_signal() { return take_stop_signal(signals_, stop_); }

  // False when a signal came. Throws: RendezvousError saying what is missing.
  bool wait(const std::function<bool()>& ready, base::Deadline until,
            const std::function<std::string()>& missing) {
    for (;;) {
      // Both before the look at what has come: this thread may stand still between any two lines.
      const bool is_over = until.expired();
      const std::string lost = store_client_.lost();
      if (ready()) return true;
      if (is_over) {
        std::string text = missing();
        if (ready()) return true;  // it came meanwhile: to ask who is missing takes a while
        const auto waited = std::chrono::duration_cast<milliseconds>(deadline_.elapsed()).count();
        text += concat(" within ", waited, " ms");
        if (const auto rejected = store_client_.rejected(); !rejected.empty()) {
          text += concat("; a word under '", rejected.front(), "' was not signed with this job's secret");
        }
        end(text,
            "start cohort run on every node, each with its --node-rank, all with one --secret-file; or raise "
            "--rdzv-conf timeout=SECONDS");
      }
      if (!lost.empty()) {
        end(lost, options_.node_rank == 0 ? "look at that node's output" : "look at node 0's output");
      }
      std::array<pollfd, 2> waits{pollfd{signals_.fd(), POLLIN, 0}, pollfd{store_client_.fd(), POLLIN, 0}};
      base::wait_for_files(waits, base::Deadline(milliseconds(100)).sooner(until));
      store_client_.acknowledge();
      if (take_signal()) return false;
    }
  }

  [[noreturn]] void end(const std::string& why, const std::string& hint) {
    if (options_.node_rank == 0) {
      reject(why);
    } else {
      give_up();
    }
    fail(why, hint);
  }

  const RunOptions& options_;
  AgentStoreClient& store_client_;
  SignalQueue& signals_;
  const base::Deadline deadline_;
  bool is_in_session_ = false;  // of a node that follows
  StopRequest stop_;
};

}  // namespace

std::optional<WorkerGroupSpec> join_rendezvous(const RunOptions& options, AgentStoreClient& store_client,
                                               SignalQueue& signals, const std::string& reached,
                                               base::Deadline deadline, int& signal) {
  Rendezvous rendezvous(options, store_client, signals, deadline);
  const Hello own_hello{.fingerprint = consistency_fingerprint(options),
                        .nproc = options.nproc_per_node,
                        .reached = reached,
                        .word = ""};
  const std::optional<Go> go =
      options.node_rank == 0 ? rendezvous.join_as_leader(own_hello) : rendezvous.join_as_follower(own_hello);
  signal = rendezvous.signal();
  if (!go) return std::nullopt;
  if (!go->error.empty()) fail(go->error, "start cohort run alike on all nodes");
  return spec_in(options, *go);
}

}  // namespace cohort::launch
