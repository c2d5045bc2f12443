// Each process leaves its incarnation and addresses in the generation's store, and reads those of all others.
// A process that is connected already stays so. Of two others the one with the lower number connects.
// Processes of one host use a local socket, and so shared memory.
//
// To reach a store or a process may take long, where its host is gone. So other threads do it, and the
// training thread waits in the inbox, where it hears of the next generation. Work that is left behind owns
// what it uses, and ends with its deadline. It takes no thread from the work of the next generation: what has
// not begun is dropped, and what runs is abandoned.
#include "cohort/elastic/internal/connections.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/host.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/elastic/internal/store_client.h"
#include "cohort/membership/net_store.h"
#include "cohort/membership/run_settings.h"

namespace cohort::elastic {

using base::concat;
using nlohmann::json;

namespace {

constexpr const char* kWhereConnect = "elastic.connect";
constexpr std::chrono::seconds kConnectTime(5), kGoodbyeTime(1);
constexpr std::chrono::milliseconds kStoreTime(2'000), kStorePause(100), kLeastLinkSilence(2'000);

struct ProcessEntry {
  std::string incarnation, machine, local, remote;
};

ProcessEntry parse_entry(const std::string& text, int process) {
  const auto value = base::parse_bounded_json(text);
  ProcessEntry entry;
  try {
    entry = {value.value().at("incarnation"), value.value().at("machine"), value.value().at("local"),
             value.value().at("remote")};
  } catch (const std::exception&) {
    throw CommError(kWhereConnect, concat("the address of process ", process, " cannot be read"),
                    "the same version of Cohort on all hosts");
  }
  return entry;
}

/// Listens for processes of other hosts, at all addresses of this one: its agent's may be a name that leads
/// this host to itself. By that name or address the others have reached the agent. Returns the address for
/// them.
std::string listen_beside_agent(net::Node& node, const std::string& agent_address) {
  const std::string host = host_of(agent_address);
  const bool is_ipv6 = host.find(':') != std::string::npos;
  // By its text: a name that leads this host to 127.0.1.1 leads others here.
  if (base::is_this_host(host) || host.starts_with("127."))
    return node.listen(is_ipv6 ? "[::1]:0" : "127.0.0.1:0");
  return node.listen(is_ipv6 ? "[::]:0" : "0.0.0.0:0", host);
}

}  // namespace

std::string host_of(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return host;
}

/// An attempt to connect, which may outlast the generation that it began for.
struct ConnectAttempt {
  ConnectAttempt(std::uint64_t generation, int to) : generation(generation), to(to) {}
  /// Its result is that of process `to` of the generation; false where it has ended.
  bool continues_for(std::uint64_t number, int process) {
    const std::lock_guard lock(mutex);
    generation = number;
    to = process;
    return !has_ended;
  }
  /// A thread has come to it. False: nobody needs it any more.
  bool begin() {
    const std::lock_guard lock(mutex);
    has_begun = !has_ended;
    return has_begun;
  }
  std::pair<std::uint64_t, int> end() {
    const std::lock_guard lock(mutex);
    has_ended = true;
    return {generation, to};
  }
  bool is_over() {
    const std::lock_guard lock(mutex);
    return has_ended;
  }
  /// The process has left the run. An attempt that has begun ends by itself, and another thread takes the
  /// place of its own.
  void cancel() {
    {
      const std::lock_guard lock(mutex);
      has_ended = has_ended || !has_begun;
    }
    future.abandon();
  }
  base::Future<void> future;  // of the thread that makes attempts
  std::mutex mutex;           // of all below
  std::uint64_t generation;
  int to;
  bool has_begun = false, has_ended = false;
};

// Whoever lets agents be silent for long has hosts that stand still for long, and ranks with them. Agents
// find a host that is gone before.
std::chrono::milliseconds link_silence_of_process() {
  const auto most =
      static_cast<std::int64_t>(std::chrono::milliseconds(std::chrono::hours(24 * 365)).count());
  const std::chrono::milliseconds silence(base::env_int("COHORT_SILENCE_MS", 1, most).value_or(0));
  return std::max(kLeastLinkSilence, membership::kAloneFactor * silence);
}

Connections::Connections(std::shared_ptr<ProcessInbox> inbox)
    : inbox_(std::move(inbox)),
      secret_(base::Secret::of_process()),
      silence_(link_silence_of_process()),
      store_(std::make_shared<StoreClient>(kStoreTime, silence_)),
      store_thread_({.name = "elastic addresses"}),
      pool_({.name = "elastic connect", .max_threads = 8}) {
  net::NodeOptions options;
  options.name = "rank";
  options.secret = secret_;
  options.tls = net::TlsOptions::of_process();
  options.silence = silence_;
  node_ = std::make_shared<net::Node>(std::move(options), inbox_);
  local_ = node_->listen("unix:@cohort-" + base::random_word());
}

Connections::~Connections() {
  node_->close(base::Deadline(kGoodbyeTime));
  store_thread_.stop(std::chrono::milliseconds(0));
  pool_.stop(std::chrono::milliseconds(0));
}

std::string Connections::own_entry(const membership::Generation& generation, int process) {
  if (remote_.empty() && generation.members.size() > 1) {
    const membership::MemberInfo* own = nullptr;
    for (const membership::MemberInfo& member : generation.members) {
      if (generation.first_process(member.id) <= process) own = &member;
    }
    remote_ = listen_beside_agent(*node_, own->address);
  }
  return json({{"incarnation", node_->incarnation()},
               {"machine", base::machine_id()},
               {"local", local_},
               {"remote", remote_}})
      .dump();
}

std::vector<std::string> Connections::exchange_entries(const membership::Generation& generation, int process,
                                                       base::Deadline deadline) {
  struct Job {
    bool is_done = false;  // these under the inbox's lock
    std::vector<std::string> entries;
    std::vector<int> missing;  // processes that have left no address in time
    std::string failure;
    std::atomic<bool> is_left{false};  // nobody waits for it any more
  };
  const auto job = std::make_shared<Job>();
  const auto key = [number = generation.number](int of) {
    return concat("generation/", number, "/address/", of);
  };
  std::vector<std::string> keys;
  for (int of = 0; of < generation.num_processes(); ++of) keys.push_back(key(of));
  const auto future = store_thread_.submit(
      "addresses", [job, keys, inbox = inbox_, store = store_, address = generation.store,
                    own_key = key(process), own = own_entry(generation, process), deadline] {
        std::vector<std::string> entries;
        std::vector<int> missing;
        std::string failure;
        const auto is_over = [&] { return job->is_left || deadline.expired(); };
        do {
          if (!failure.empty())
            base::poll_until([&] { return job->is_left.load(); }, base::Deadline(kStorePause));
          failure.clear();
          missing.clear();
          try {
            const auto client = store->at(address);
            client->set(own_key, own);
            // In pieces, as nobody may wait for it any more.
            bool has_all = false;
            while (!has_all && !is_over())
              has_all = client->wait(keys, deadline.sooner(base::Deadline(kStoreTime)));
            if (has_all) {
              entries = client->get_all(keys);
            } else if (!job->is_left) {
              for (std::size_t of = 0; of < keys.size(); ++of) {
                if (!client->has(keys[of])) missing.push_back(static_cast<int>(of));
              }
            }
          } catch (const membership::StaleGeneration& error) {
            failure = base::message_of(error);
            break;
          } catch (const Error& error) {
            failure = base::message_of(error);
          }
          // Its agent may be about to listen again, be slow, or have given this process up, which was
          // stopped.
        } while (!failure.empty() && !is_over());
        inbox->post([&] {
          job->is_done = true;
          job->entries = std::move(entries);
          job->missing = std::move(missing);
          job->failure = std::move(failure);
        });
      });
  const auto leave = [&](void*) {
    job->is_left = true;
    future.abandon();  // the next one has a thread at once
  };
  const std::unique_ptr<Job, decltype(leave)> guard(job.get(), leave);
  ProcessInbox::WaitEnd end{
      .generation = generation.number,
      .deadline = deadline.later(2 * kStoreTime),  // who is missing is asked for when the deadline has passed
      .what =
          concat("the addresses of generation ", generation.number, " in the store at ", generation.store)};
  // A store that fails is news of its agent's end: the next generation has another one.
  inbox_->wait([&] { return job->is_done && job->failure.empty(); }, end);
  if (job->entries.size() != keys.size()) {
    end.needed = job->missing;
    end.what =
        concat("the address of process ", base::join(job->missing), " of generation ", generation.number);
    inbox_->give_up(end);
  }
  return job->entries;
}

// One attempt at a time: of two connections the other side would take the second one for a process that has
// lost the first.
void Connections::connect(const std::string& incarnation, const std::string& address,
                          std::uint64_t generation, int to) {
  std::shared_ptr<ConnectAttempt>& attempt = attempts_[incarnation];
  if (attempt != nullptr && attempt->continues_for(generation, to)) return;
  attempt = std::make_shared<ConnectAttempt>(generation, to);
  attempt->future =
      pool_.submit("connect", [node = node_, inbox = inbox_, attempt, incarnation, address,
                               time = std::max<std::chrono::milliseconds>(kConnectTime, silence_)] {
        if (!attempt->begin()) return;
        std::string failure = concat("nobody listens at ", address);
        std::shared_ptr<net::Peer> peer;
        try {
          peer = node->connect(address, base::Deadline(time), net::WhenRejected::kGiveUp);
          if (peer != nullptr && peer->incarnation() != incarnation) {
            failure = concat("another process listens at ", address);
            peer = nullptr;
          }
        } catch (const Error& error) {
          failure = base::message_of(error);
        }
        if (peer != nullptr) inbox->on_connect(peer);
        const auto [number, process] = attempt->end();
        if (peer == nullptr || peer->is_down()) inbox->lose_process(number, process, failure);
      });
}

void Connections::connect_all(const membership::Generation& generation, int process,
                              base::Deadline deadline) {
  std::vector<ProcessEntry> entries;
  std::vector<std::string> incarnations;
  for (const std::string& text : exchange_entries(generation, process, deadline)) {
    entries.push_back(parse_entry(text, static_cast<int>(entries.size())));
    incarnations.push_back(entries.back().incarnation);
  }
  inbox_->set_processes(incarnations);
  std::erase_if(attempts_, [](const auto& entry) { return entry.second->is_over(); });
  for (const auto& [incarnation, attempt] : attempts_) {
    if (std::ranges::find(incarnations, incarnation) == incarnations.end()) attempt->cancel();
  }
  for (int to = process + 1; to < generation.num_processes(); ++to) {
    const ProcessEntry& entry = entries[static_cast<std::size_t>(to)];
    if (inbox_->find_peer(entry.incarnation) != nullptr) continue;
    const bool is_here = entry.machine == base::machine_id();
    connect(entry.incarnation, is_here ? entry.local : entry.remote, generation.number, to);
  }
  // Those with lower numbers connect to this one.
  ProcessInbox::WaitEnd end{.generation = generation.number,
                            .deadline = deadline,
                            .what = concat("the connections of generation ", generation.number)};
  const auto has_all = [&] {
    end.needed.clear();  // to be lost when the deadline passes
    for (int other = 0; other < generation.num_processes(); ++other) {
      const std::string& incarnation = incarnations[static_cast<std::size_t>(other)];
      if (other != process && inbox_->find_peer_locked(incarnation) == nullptr) end.needed.push_back(other);
    }
    return end.needed.empty();
  };
  inbox_->wait(has_all, end);
}

}  // namespace cohort::elastic
