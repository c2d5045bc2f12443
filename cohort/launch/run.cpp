// Where members may change, agents join by a MemberLink, and the store of a generation is served by one of
// them. With a fixed number: one node alone serves the store and begins. Of several, node 0 serves it, and
// the rest wait until somebody listens there and join. Each node adds 1 to a count under its number: a higher
// count shows two agents with one number. Always: each wait until then ends at the deadline of the
// rendezvous, or on a signal. A host that has gone silent never answers, so the thread that asks its store
// for the count can be left behind.
#include "cohort/launch/run.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/comm/internal/tcp_store.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/launch/internal/agent.h"
#include "cohort/launch/internal/members/elastic_agent.h"
#include "cohort/launch/internal/members/endpoint_name.h"
#include "cohort/launch/internal/members/leave_request.h"
#include "cohort/launch/internal/members/member_link.h"
#include "cohort/launch/internal/members/restarting_agent.h"
#include "cohort/launch/internal/rendezvous.h"
#include "cohort/launch/internal/stop_request.h"
#include "cohort/launch/internal/store_agent_group.h"
#include "cohort/launch/read_options.h"
#include "cohort/membership/net_store.h"
#include "cohort/membership/run_settings.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;
using TcpStore = c10::intrusive_ptr<c10d::TCPStore>;

TcpStore serve_store(const RunOptions& options) {
  const std::uint16_t port = options.master_port.value_or(options.nnodes == 1 ? 0 : kDefaultPort);
  try {
    return comm::open_tcp_store(
        {.host = options.is_on_one_host() ? options.master_addr.value_or("127.0.0.1") : "127.0.0.1",
         .port = port,
         .serves = true,
         .is_local = options.is_on_one_host()});
  } catch (const std::exception& error) {
    throw RendezvousError("launch.run", concat("cannot listen on port ", port, ": ", base::message_of(error)),
                          options.nnodes == 1
                              ? "no --master-port: the system then chooses one that is free"
                              : "another --master-port, the same on all nodes; and end what is left "
                                "of an earlier job");
  }
}

// Returns nothing when `interrupted` says so.
TcpStore join(const RunOptions& options, const std::string& address, std::uint16_t port,
              base::Deadline deadline, const std::function<bool()>& interrupted) {
  try {
    return comm::open_tcp_store({.host = address,
                                 .port = port,
                                 .timeout = milliseconds(std::clamp(deadline.remaining_ms(), 100, 30'000)),
                                 .interrupted = interrupted});
  } catch (const std::exception& error) {
    throw RendezvousError("launch.run",
                          concat("somebody listens at ", *options.master_addr, ":", port,
                                 ", but is no agent of node 0: ", base::message_of(error)),
                          "another --master-port, the same on all nodes");
  }
}

// Takes this node's place, and returns how many have; nothing when `interrupted` says so. A store does not
// answer whose host has gone silent: the thread that asks is left behind then.
std::optional<std::int64_t> claim(const std::shared_ptr<base::KeyValueStore>& kv_store, int node,
                                  base::Deadline deadline, const std::function<bool()>& interrupted) {
  base::Future<std::int64_t> count =
      base::run_detached("a place", [kv_store, node] { return kv_store->add(concat("claim/", node), 1); });
  while (!count.wait(base::Deadline(milliseconds(50)).sooner(deadline))) {
    if (interrupted()) return std::nullopt;
    if (!deadline.expired()) continue;
    const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
    throw RendezvousError("launch.run",
                          concat("node 0 was there, but its store has not answered within ", waited, " ms"),
                          "look whether the host of node 0 is reached, and its agent runs");
  }
  try {
    return count.get(deadline);
  } catch (const std::exception& error) {
    throw RendezvousError("launch.run", concat("lost node 0: ", base::message_of(error)),
                          "look at node 0's output");
  }
}

// [::1] is how an IPv6 address stands before a port; alone it has no brackets.
std::string without_brackets(const std::string& host) {
  return host.size() > 2 && host.front() == '[' && host.back() == ']' ? host.substr(1, host.size() - 2)
                                                                      : host;
}

// What all nodes have, or what one node makes up.
std::optional<base::Secret> secret_of(const RunOptions& options) {
  if (!options.secret_file.empty()) return base::Secret::from_file(options.secret_file);
  if (options.is_alone() && !options.no_secret) return base::Secret::make();
  return std::nullopt;
}

int run_alone(const RunOptions& options, const AgentParts& parts) {
  const TcpStore store = serve_store(options);
  WorkerGroupSpec spec;
  spec.world_size = options.nproc_per_node;
  spec.master_addr = options.master_addr.value_or("127.0.0.1");
  spec.master_port = static_cast<std::uint16_t>(store->getPort());
  spec.run_id = options.run_id;
  SingleAgent agents(options);
  return Agent(options, spec, agents, parts).run();
}

int run_node(const RunOptions& options, const AgentParts& parts, const std::optional<base::Secret>& secret) {
  SignalQueue& signals = parts.signals;
  const base::Deadline deadline(options.rendezvous_timeout);
  const std::uint16_t port = options.master_port.value_or(kDefaultPort);
  std::string reached;
  TcpStore store;
  StopRequest stop;
  const auto interrupted = [&] {
    take_stop_signal(signals, stop);
    return stop.number() != 0;
  };
  if (options.node_rank == 0) {
    store = serve_store(options);
  } else {
    const auto address = base::wait_for_listener(
        *options.master_addr, port, deadline,
        {.where = "launch.run",
         .name = "node 0",
         .hint = "check that node 0 runs, and that --master-addr and --master-port name its host and port"},
        interrupted);
    if (!address) return 128 + stop.number();
    reached = *address;
    store = join(options, reached, port, deadline, interrupted);
    if (!store) return 128 + stop.number();
  }
  const auto kv_store =
      std::make_shared<comm::StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("/cohort/agents", store));
  const auto claimed = claim(kv_store, options.node_rank, deadline, interrupted);
  if (!claimed) return 128 + stop.number();
  if (*claimed > 1) {
    throw RendezvousError("launch.run",
                          concat("two agents say that they are node ", options.node_rank, " of the job at ",
                                 *options.master_addr, ":", port),
                          "--node-rank 0, 1, 2 ..., each once");
  }
  AgentStoreClient store_client(kv_store, {.node = options.node_rank,
                                           .nnodes = options.nnodes,
                                           .interval = options.monitor_interval,
                                           .keep_alive_interval = options.keep_alive_interval,
                                           .keep_alive_max_attempt = options.keep_alive_max_attempt,
                                           .secret = secret});
  int signal = 0;
  auto place = join_rendezvous(options, store_client, signals, reached, deadline, signal);
  if (!place) return 128 + signal;
  store_client.set_last_words_time(options.keep_alive_interval * options.keep_alive_max_attempt);
  place->master_port = port;
  StoreAgentGroup agents(options, store_client);
  return Agent(options, *place, agents, parts).run();
}

// A store for the ranks of one generation.
ServedStore serve_generation(const RunOptions& options, const std::string& host) {
  const TcpStore store =
      comm::open_tcp_store({.host = host, .port = 0, .serves = true, .is_local = options.is_on_one_host()});
  return {.address = endpoint_text({host, static_cast<std::uint16_t>(store->getPort())}),
          .keep = std::make_shared<TcpStore>(store)};
}

// Returns the signal that has ended the wait; 0: none has.
int wait_for_endpoint(const RunOptions& options, SignalQueue& signals) {
  StopRequest stop;
  const auto interrupted = [&] {
    take_stop_signal(signals, stop);
    return stop.number() != 0;
  };
  wait_for_endpoint_name(options.rendezvous.endpoint_host(), base::Deadline(options.rendezvous_timeout),
                         interrupted);
  return stop.number();
}

// Others hear that the agent ends, also where the run has failed: one that has the record waits until they
// have heard how. Its ranks end before that.
template <typename MakeAgent>
int run_member(MemberLink& member, const MakeAgent& make_agent) {
  try {
    const int status = make_agent()->run();
    member.close();
    return status;
  } catch (...) {
    member.close();
    throw;
  }
}

int run_elastic(const RunOptions& options, const AgentParts& parts,
                const std::optional<base::Secret>& secret) {
  membership::NetStoreServerOptions store_options{.listen = listen_address(options),
                                                  .host = own_host(options)};
  if (secret) store_options.secret = secret->for_ranks();
  store_options.tls = net::TlsOptions::of_process();  // as its ranks have
  // Later than ranks give it up, as agents do with each other.
  store_options.silence =
      std::max(store_options.silence, 2 * membership::kAloneFactor * options.rendezvous.silence);
  const membership::NetStoreServer store(std::move(store_options));
  membership::MemberStatus status;
  status.store = store.address();
  status.num_processes = options.nproc_per_node;
  status.is_ready = false;  // until its ranks are: nobody waits for them meanwhile
  MemberLink member(options, secret, status);
  return run_member(member, [&] { return std::make_unique<ElasticAgent>(options, member, parts); });
}

int run_restarting(const RunOptions& options, const AgentParts& parts,
                   const std::optional<base::Secret>& secret) {
  const std::string host = own_host(options);
  StoreOffers stores([&] { return serve_generation(options, host); });
  membership::MemberStatus status;
  status.store = stores.address();
  status.num_processes = options.nproc_per_node;
  MemberLink member(options, secret, status);
  return run_member(member,
                    [&] { return std::make_unique<RestartingAgent>(options, member, stores, parts); });
}

}  // namespace

int run_job(const RunOptions& given) {
  check(given);
  RunOptions options = given;
  find_program(options.command.front());  // before anybody waits for it
  LeaveRequest::check_notice_file(options);
  if (options.master_addr) options.master_addr = without_brackets(*options.master_addr);
  if (options.run_id.empty()) {
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    // All nodes must have the same, so nothing of this process can be in it. "none" is torchrun's.
    options.run_id = !options.is_alone() ? "none" : concat(std::hex, now, "-", ::getpid());
  }
  const std::optional<base::Secret> secret = secret_of(options);
  // A secret of their own, derived from the job's: a rank cannot speak as an agent.
  const base::Fd secret_fd = secret ? secret->for_ranks().to_fd() : base::Fd();
  // Before the folder is made: from here on a signal does not end the process, so the folder goes.
  SignalQueue signals(options.signals_to_handle, {SIGUSR1, SIGUSR2, SIGTSTP});
  LogFolder folder(options);
  OrphanWatchdog watchdog(folder.stays() ? "" : folder.path().string());
  const AgentParts parts{
      .folder = folder, .watchdog = watchdog, .signals = signals, .secret_fd = secret_fd.get()};
  if (options.rendezvous.is_dynamic()) {
    if (const int signal = wait_for_endpoint(options, signals)) return 128 + signal;
  }
  if (options.rendezvous.is_elastic) return run_elastic(options, parts, secret);
  if (options.rendezvous.is_dynamic()) return run_restarting(options, parts, secret);
  return options.nnodes == 1 ? run_alone(options, parts) : run_node(options, parts, secret);
}

}  // namespace cohort::launch
