// Rendezvous: from an address to a store that all ranks of the job share, and from that to their group. The
// environment or the options say who this rank is and where the rendezvous is. Rank 0 serves a TCP store
// there, unless the launcher's agent has one. Each rank leaves a fingerprint (world size, backend, versions)
// and reads those of all. Ranks that did not come are named, and so are ranks that differ. Always: all of it
// ends by one deadline. Surprising: the backend of "auto" is chosen after the rendezvous. Only then is it
// known whether the ranks share a machine.
#include "cohort/comm/init.h"

#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <mutex>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/host.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/base/version.h"
#include "cohort/comm/backends/shm/shm.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/missing_ranks.h"
#include "cohort/comm/internal/tcp_store.h"
#include "cohort/comm/job.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/core/device.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

[[noreturn]] void fail(const std::string& what, const std::string& hint = "") {
  throw RendezvousError("comm.init", what, hint);
}

struct Address {
  std::string host;
  std::uint16_t port = 0;
};

// As it is written in a URL.
std::string to_string(const Address& address) {
  const bool six = address.host.find(':') != std::string::npos;
  return base::concat(six ? "[" : "", address.host, six ? "]:" : ":", address.port);
}

// host:port, [IPv6]:port.
Address parse_address(const std::string& method) {
  const std::string text = method.substr(std::string("tcp://").size());
  // The last one: an IPv6 address has colons of its own.
  const std::size_t colon = text.rfind(':');
  Address address;
  if (colon != std::string::npos) {
    address.host = text.substr(0, colon);
    if (address.host.starts_with('[') && address.host.ends_with(']')) {
      address.host = address.host.substr(1, address.host.size() - 2);
    }
    const char* const end = text.data() + text.size();
    const auto [next, error] = std::from_chars(text.data() + colon + 1, end, address.port);
    if (error != std::errc() || next != end) address.port = 0;
  }
  if (address.host.empty() || address.port == 0) {
    throw UsageError("comm.init", base::concat("'", method, "' is no address"), "tcp://HOST:PORT");
  }
  return address;
}

// For a connection that begins in the last moment.
constexpr milliseconds kLeastOpenTime(100);

Store tcp_store(const Address& address, const Job& job, milliseconds timeout) {
  const bool serves = job.rank == 0 && !job.agent_store;
  // Some launchers (Kubeflow's) give rank 0 localhost, and the others its name.
  const bool is_local =
      base::is_this_host(address.host) && (job.is_on_one_host || address.host != "localhost");
  const base::Deadline deadline(timeout);
  const auto at = [&] {
    return base::concat(to_string(address), " (rank ", job.rank, "/", job.world_size, ", ",
                        std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count(), " ms)");
  };
  const std::string reach_hint =
      "check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT name its host and port";
  if (!serves) {
    base::wait_for_listener(address.host, address.port, deadline,
                            {.where = "comm.init", .name = "rank 0", .hint = reach_hint});
  }
  try {
    const milliseconds left = std::chrono::duration_cast<milliseconds>(deadline.remaining());
    Store store = open_tcp_store({.host = address.host,
                                  .port = address.port,
                                  .serves = serves,
                                  .is_local = is_local,
                                  .timeout = std::clamp(left, kLeastOpenTime, kLongestTime)});
    // One that this process keeps always answers.
    if (!serves) store = c10::make_intrusive<DeadlineStore>(store, "the store at " + to_string(address));
    store->setTimeout(std::min(timeout, kLongestTime));
    return store;
  } catch (const TimeoutError&) {
    fail(base::concat("something listens on ", at(), ", but does not answer as rank 0 does"),
         "another MASTER_PORT; or look what listens there");
  } catch (const std::exception& error) {
    const std::string words = base::message_of(error);
    if (serves) {
      fail(base::concat("rank 0 cannot listen on ", at(), ": ", words),
           "another MASTER_PORT; and end what is left of an earlier run");
    }
    fail(base::concat("lost rank 0 at ", at(), ": ", words), reach_hint);
  }
}

// LibTorch's locks the file for each request, for the first one when it is made, and waits for whoever has
// the lock.
Store file_store(const std::string& path, const Job& job, milliseconds timeout) {
  base::Future<Store> made = base::run_detached(
      "a store in a file",
      [path, size = job.world_size]() -> Store { return c10::make_intrusive<c10d::FileStore>(path, size); });
  const base::Deadline deadline(timeout);
  if (!made.wait(deadline)) {
    fail(base::concat("rank ", job.rank, " cannot join the rendezvous in ", path,
                      ": somebody has locked it for ", timeout.count(), " ms"),
         "look at the ranks that use it, and at the file system; a new file for each job");
  }
  return c10::make_intrusive<DeadlineStore>(made.get(deadline), "the store in " + path,
                                            DeadlineStore::Waiting::kByAsking);
}

struct Rendezvous {
  Store store;
  std::string reach;
  std::string where;             // for messages
  bool is_kept_by_rank = false;  // the store: it goes with rank 0
  bool outlives = false;         // another group of these ranks may have its rendezvous there
};

Rendezvous join_rendezvous(const InitOptions& options, const Job& job) {
  if (options.init_method == "env://") {
    if (job.launcher == Launcher::kNone && job.world_size == 1) {
      // There is no other rank, so no port is opened.
      return {c10::make_intrusive<c10d::HashStore>(), "127.0.0.1", "alone"};
    }
    if (job.master_host.empty() || job.master_port == 0) {
      fail(base::concat("started by ", to_string(job.launcher), " as rank ", job.rank, " of ", job.world_size,
                        ", but ", job.master_host.empty() ? "MASTER_ADDR" : "MASTER_PORT", " is not set"),
           "MASTER_ADDR=HOST of rank 0 and MASTER_PORT=PORT, or start with: cohort run, torchrun, srun, "
           "mpirun");
    }
    const Address address{job.master_host, job.master_port};
    Store store = tcp_store(address, job, options.timeout);
    if (job.agent_store || job.restart_count > 0) {  // as torchrun keeps attempts apart
      store =
          c10::make_intrusive<c10d::PrefixStore>(base::concat("/worker/attempt_", job.restart_count), store);
    }
    return {store, address.host, to_string(address), !job.agent_store, job.agent_store};
  }
  if (options.init_method.starts_with("tcp://")) {
    const Address address = parse_address(options.init_method);
    return {tcp_store(address, job, options.timeout), address.host, to_string(address), !job.agent_store,
            job.agent_store};
  }
  if (options.init_method.starts_with("file://")) {
    const std::string path = options.init_method.substr(std::string("file://").size());
    if (!path.starts_with('/')) {
      throw UsageError("comm.init", base::concat("'", options.init_method, "' names no absolute path"),
                       "file:///shared/folder/new-file");
    }
    return {file_store(path, job, options.timeout), "", path};
  }
  throw UsageError("comm.init", base::concat("init_method is '", options.init_method, "'"),
                   "env://, tcp://HOST:PORT or file:///PATH");
}

// What all ranks must agree on, as text.
std::string consistency_fingerprint(const Job& job, const std::string& backend, ConsistencyCheck check) {
  const char* checks = check == ConsistencyCheck::kFirst    ? "first"
                       : check == ConsistencyCheck::kAlways ? "always"
                                                            : "off";
  return base::concat("world size ", job.world_size, ", backend ", backend, ", check ", checks, ", Cohort ",
                      base::version(), ", LibTorch ", TORCH_VERSION);
}

struct Agreement {
  bool is_one_machine = true;
  Store waits;  // a connection to the store for who waits
};

// Waits for all, and compares what they say of themselves.
Agreement agree_on(const Store& store, const Job& job, const std::string& fingerprint,
                   const std::string& where, base::Deadline deadline) {
  base::Words words;
  Agreement agreement;
  std::string error;
  try {
    const StoreDeadline until(deadline.later(kLastAnswerTime));
    // Waits have a connection of their own, so that other requests are answered meanwhile.
    agreement.waits = store->clone();
    StoreAdapter kv_store(store, agreement.waits);
    // Two processes of one rank would overwrite each other's words, and the group would hang later.
    if (kv_store.add(base::concat("claim/", job.rank), 1) > 1) {
      fail(base::concat("two processes say that they are rank ", job.rank, " of the rendezvous at ", where),
           "one process per rank; for file://, a new file for each job");
    }
    words = base::all_gather_words(kv_store, "here", job.rank, job.world_size,
                                   fingerprint + "\n" + base::machine_id(), deadline);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& failure) {
    error = base::message_of(failure);
  }
  const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
  if (!error.empty()) {
    fail(base::concat("rank ", job.rank, " lost the store at ", where, " after ", waited, " ms: ", error),
         "look at the rank that keeps it, rank 0 as a rule");
  }
  if (!words.missing.empty()) {
    throw MissingRanks<RendezvousError>(
        words.missing, "comm.init",
        base::concat(base::format_list("rank", words.missing), " of ", job.world_size, " did not come to ",
                     where, " within ", waited, " ms (this is rank ", job.rank, ")"),
        "look at their output, or raise the timeout");
  }
  for (std::size_t rank = 0; rank < words.of_rank.size(); ++rank) {
    const std::string& word = words.of_rank[rank];
    const std::size_t end = word.find('\n');
    if (word.substr(0, end) != fingerprint) {
      fail(base::concat("ranks disagree: rank ", job.rank, " has ", fingerprint, "; rank ", rank, " has ",
                        word.substr(0, end)),
           "start all ranks alike");
    }
    agreement.is_one_machine =
        agreement.is_one_machine && end != std::string::npos && word.substr(end + 1) == base::machine_id();
  }
  return agreement;
}

// For groups of this process that use one store, which may outlive the first group: each rendezvous has a
// prefix of its own.
Store with_own_prefix(const Store& store) {
  static std::atomic<int> num_rendezvous{0};
  const int number = num_rendezvous.fetch_add(1);
  return c10::make_intrusive<c10d::PrefixStore>(base::concat("cohort/rendezvous ", number), store);
}

void check_timeout(milliseconds timeout) {
  if (timeout.count() > 0) return;
  throw UsageError("comm.init", base::concat("timeout is ", timeout.count(), " ms, expected more than 0"));
}

void check_job(const Job& job) {
  if (job.world_size >= 1 && job.rank >= 0 && job.rank < job.world_size) return;
  throw UsageError("comm.init", base::concat("rank is ", job.rank, " and world_size ", job.world_size));
}

// Ranks meet in the store that `made` has, and choose the backend together.
Group make_agreed_group(const Job& job, const std::string& where, base::Deadline deadline,
                        StateOptions made) {
  core::ResolvedDevice device;
  const bool is_automatic = made.backend == "auto";
  if (made.owner != nullptr) {
    device.reason = "no call on a GPU could be ended";
  } else if (is_automatic) {
    device = core::resolve_device("auto");
  }
  // A rank without a GPU would choose another backend than the rest: the fingerprint shows it.
  const std::string on = is_automatic && device.device.is_cuda() ? " (for GPUs)" : "";
  Agreement agreement;
  try {
    agreement =
        agree_on(made.store, job, consistency_fingerprint(job, made.backend + on, made.check_consistency),
                 where, deadline);
  } catch (const NamesRanks& missing) {
    if (made.owner == nullptr) throw;
    // Where it is this rank that came too late, the others have given it up.
    const bool is_late = std::ranges::find(missing.ranks(), job.rank) != missing.ranks().end();
    const std::string making = base::concat("the making of group '", made.name, "'");
    const std::exception_ptr end =
        is_late ? made.owner->wait_for_end() : made.owner->give_up(missing.ranks(), deadline, making);
    if (end != nullptr) std::rethrow_exception(end);
    throw;
  }
  BackendChoice choice;
  if (is_automatic) {
    choice = choose_backend({.cuda = device.device.is_cuda(),
                             .one_host = agreement.is_one_machine && job.world_size <= kMaxShmRanks,
                             .device_reason = device.reason,
                             .ends_calls = made.owner != nullptr});
    made.backend = choice.backend;
  }
  // What listens need not be reached from elsewhere.
  if (agreement.is_one_machine) made.reach = "127.0.0.1";
  if (!choice.backend.empty() && job.rank == 0 && job.world_size > 1) {
    static std::once_flag is_choice_logged;
    std::call_once(is_choice_logged, [&] {
      base::log_info(base::concat("process group of ", job.world_size, " ranks over ", choice.backend, ": ",
                                  choice.reason));
    });
  }
  made.waits = std::move(agreement.waits);
  made.deadline = deadline;
  return Group(make_state(std::move(made)));
}

}  // namespace

Group init_process_group(const InitOptions& options) {
  check_timeout(options.timeout);
  const base::Deadline deadline(options.timeout);
  Job job = job_from_environment();
  if (options.rank || options.world_size) {
    if (!options.rank || !options.world_size) {
      throw UsageError("comm.init", "rank and world_size go together, and one of them is not given");
    }
    job.rank = *options.rank;
    job.world_size = *options.world_size;
    job.local_world_size = std::min(job.local_world_size, job.world_size);
    // The launcher's word about hosts is not about these ranks.
    job.is_on_one_host = false;
    check_job(job);
  }
  Rendezvous rendezvous = join_rendezvous(options, job);
  if (rendezvous.outlives) rendezvous.store = with_own_prefix(rendezvous.store);
  return make_agreed_group(job, rendezvous.where, deadline,
                           {.store = rendezvous.store,
                            .job_ranks = all_ranks(job.world_size),
                            .rank = job.rank,
                            .backend = options.backend,
                            .timeout = options.timeout,
                            .reach = rendezvous.reach,
                            .is_kept_by_rank = rendezvous.is_kept_by_rank,
                            .check_consistency = options.check_consistency});
}

Group join_process_group(const StoreInitOptions& options) {
  check_timeout(options.timeout);
  Job job;
  job.rank = options.rank;
  job.world_size = options.size;
  check_job(job);
  return make_agreed_group(job, options.where, base::Deadline(options.timeout),
                           {.store = options.store,
                            .name = options.name,
                            .title = options.title,
                            .job_ranks = all_ranks(job.world_size),
                            .rank = job.rank,
                            .backend = options.backend,
                            .timeout = options.timeout,
                            .reach = options.reach,
                            .is_kept_by_rank = false,
                            .check_consistency = options.check_consistency,
                            .owner = options.owner});
}

}  // namespace cohort::comm
