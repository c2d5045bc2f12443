#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/secret.h"
#include "cohort/core/nested.h"
#include "cohort/net/tls_options.h"

/// Workers, whom to call, and what can be chosen. Include cohort/rpc/agent.h.
namespace cohort::rpc {

/// A worker as the others know it. Travels as an argument.
struct WorkerInfo {
  std::string name;
  int id = 0;  ///< from 0 on
  auto operator<=>(const WorkerInfo&) const = default;
};
COHORT_NESTED(WorkerInfo, name, id)

/// Whom to call, and how long to wait. Knows the line that made it.
struct Target {
  /// Where in the caller's source the call stands: messages and AgentMetrics::objects say it.
  using Line = std::source_location;
  Target(const char* name, Line line = Line::current())
      : worker(name), line(line) {}  // NOLINT: a name is a target
  Target(std::string name, Line line = Line::current()) : worker(std::move(name)), line(line) {}
  Target(int id, Line line = Line::current()) : id(id), line(line) {}  // NOLINT: so is its number
  Target(const WorkerInfo& info, Line line = Line::current()) : worker(info.name), line(line) {}
  /// Returns a target whose calls end after `time` instead of the agent's timeout; zero: never.
  Target within(std::chrono::milliseconds time) const {
    Target target = *this;
    target.timeout = time;
    return target;
  }
  /// Returns a target whose calls run one after the other, in the order in which this worker makes them:
  /// each begins once the handler of the one before has answered. A call that fails or expires before it
  /// begins leaves its place. Calls of other workers, of other channels, and without one do not wait. A
  /// handler must not wait for a call of its own channel.
  Target in_order(std::string name) const {
    Target target = *this;
    target.channel = std::move(name);
    return target;
  }
  std::string worker;
  std::optional<int> id;                             ///< in place of the name
  std::optional<std::chrono::milliseconds> timeout;  ///< else the agent's
  std::optional<std::string> channel;                ///< of calls that have an order
  Line line;
};
/// The worker of that name as a target, which knows the line of this call.
inline Target to(std::string worker, Target::Line line = Target::Line::current()) {
  return Target(std::move(worker), line);
}
/// The same, by the worker's id.
inline Target to(int id, Target::Line line = Target::Line::current()) {
  return Target(id, line);
}

/// How a worker joins, listens and runs handlers.
struct AgentOptions {
  /// Of a call that has none of its own; zero: none. Agent::set_timeout() changes it.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Handlers at a time; those that wait for calls do not count. Where it is above 1, one more may run that
  /// is quick.
  int num_threads = 16;
  /// Where the other workers reach this one, as net::Node::listen() takes it. auto: those of this host by a
  /// local socket, to which only processes of this user may connect, and those of other hosts by a port of
  /// all addresses of this one.
  std::string listen = "auto";
  /// By which name or address workers of other hosts reach this one, where `listen` is auto. Empty: the
  /// host's name; for init_rpc() of a group the address by which this host reaches the group's rank 0, on
  /// other hosts than that one.
  std::string host;
  std::optional<base::Secret> secret = base::Secret::of_process();  ///< of the job; needed beyond loopback
  /// Encrypts what goes over TCP, and takes only workers with a certificate. All workers have it, or none.
  /// Else the files that the environment names: COHORT_TLS_CERTIFICATE, COHORT_TLS_KEY and
  /// COHORT_TLS_AUTHORITIES.
  std::optional<net::TlsOptions> tls = net::TlsOptions::of_process();
  /// After which a worker is given up. The same on all workers: each gives eight or more signs of life in it.
  std::chrono::milliseconds silence = std::chrono::seconds(2);
  /// How long a thread looks for an answer, or for the next call, before it sleeps. It takes a core
  /// meanwhile, and saves the time of waking one. None: 50 us where the host has a core for each of its
  /// workers, else 0. A dynamic group counts all workers that ever came, on any host.
  std::optional<std::chrono::microseconds> spin;
  /// Of memory that the workers of this host share: the most bytes of free blocks that keep their pages.
  /// Tensors of 64 KiB or more are copied once, into it, while copies take at most so many bytes; above that
  /// they are copied twice.
  std::size_t shared_cache = std::size_t{256} << 20;
  std::chrono::milliseconds join_timeout = std::chrono::seconds(60);  ///< for all workers to come
  /// Of a dynamic group: a join ends once so many workers are there, this one included. After join_timeout it
  /// throws, and names whom it has taken for dead. So two parts of a job that cannot reach each other do not
  /// begin a group each.
  int min_workers = 1;
};

/// The calls of one function that a worker made and that have ended.
struct FunctionMetrics {
  std::string name;
  std::uint64_t num_calls = 0, num_errors = 0;
  /// From the call to its end, of the last 1,024 calls or up to twice as many. p50 and p99 may be too long by
  /// an eighth.
  std::chrono::nanoseconds p50{0}, p99{0}, max{0};
};

/// What is exchanged with another worker.
struct WorkerTraffic {
  std::string worker;
  std::string transport;  ///< net::Peer::transport(), such as "shared memory"
  std::uint64_t bytes_sent = 0, bytes_received = 0;
  std::uint64_t bytes_on_the_way = 0;  ///< of calls: sent, and not yet taken on there
  std::uint64_t bytes_queued = 0;      ///< that wait until that worker has room, or the connection
  std::size_t messages_queued = 0;
  /// Of tensors that the worker has in this one's memory. They are no part of bytes_sent.
  std::uint64_t bytes_by_handle = 0;
};

/// The workers by transport: "2 workers over shared memory (ps/0, ps/1), 1 over TCP (ps/2)".
std::string describe_transports(const std::vector<WorkerTraffic>& traffic);

/// Totals of a worker since it joined, and what is under way.
struct AgentMetrics {
  /// Calls that this worker began, and calls of others that it took on.
  std::uint64_t calls_made = 0, calls_handled = 0;
  /// Over the last ten seconds.
  double calls_made_per_second = 0, calls_handled_per_second = 0;
  std::size_t calls_pending = 0;           ///< made, and not answered
  std::size_t calls_unanswered = 0;        ///< of others: handlers wait, run, or will answer later
  std::size_t handlers_queued = 0;         ///< that wait for a thread, or for owners of their arguments
  std::size_t handlers_on_threads = 0;     ///< that run now
  std::vector<FunctionMetrics> functions;  ///< that this worker called, by name; not by remote()
  /// With each other worker; of a dynamic group: with those that are there.
  std::vector<WorkerTraffic> traffic;
  /// The sums of `traffic`.
  std::uint64_t bytes_sent = 0, bytes_received = 0, bytes_on_the_way = 0, bytes_queued = 0;
  std::size_t messages_queued = 0;
  std::uint64_t bytes_by_handle = 0;
  /// Of the memory that this worker shares with those of its host: blocks that somebody holds, and free ones
  /// that are kept.
  std::size_t shared_bytes_in_use = 0, shared_bytes_cached = 0;
  /// Of distributed autograd, that this worker takes part in. One that has ended counts until its calls have
  /// come.
  std::size_t contexts = 0;
  std::size_t backwards = 0;   ///< that run: those of this worker, and those of calls that it answered
  std::size_t references = 0;  ///< that this worker has, to objects of any worker
  /// Each reference that is in use here: to which object, and which line made it or who sent it.
  std::vector<std::string> rrefs;
  /// Of this worker, that references point to: which line made each, and who holds it.
  std::vector<std::string> objects;
};

/// As lines for a log.
std::string to_string(const AgentMetrics& metrics);

}  // namespace cohort::rpc
