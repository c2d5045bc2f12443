// How a worker joins a dynamic group, whose store has for each worker that ever came: an id, which is a
// count, and an entry. Each worker connects to all with lower ids. So each pair has one connection, and two
// that join at the same time find each other: the one with the higher id has read the other one's entry. That
// one accepts it while it joins itself.
//
// A process may die between its id and its entry. After AgentOptions::silence a later worker claims the id in
// its place. The second claim has no effect: its maker skips the id, or takes another one.
//
// What messages lead to: MemberProtocol. The join is over when all have said that they list this worker.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/host.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/lookup_timeout.h"
#include "cohort/net/no_answer.h"
#include "cohort/net/unknown_host.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_join.h"
#include "cohort/rpc/internal/agent/agent_members.h"

namespace cohort::rpc {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr const char* kStaticKey = "rpc/static";
constexpr const char* kDynamicKey = "rpc/dynamic";
constexpr const char* kGivenUp = "this worker was too slow: other workers have skipped it each time";
// A peer that is down wakes nobody.
constexpr milliseconds kLookAtPeers(10);
// Of an address on the worker's own host: only its process listens there.
constexpr const char* kLocal = "unix:";
constexpr milliseconds kBetweenLookups(100);
// Of a worker that has not answered for the silence.
constexpr milliseconds kLastTry(100);
constexpr const char* kCure = "set AgentOptions::host on that worker, or open its port";
// One that does not hear it sees a silence.
constexpr milliseconds kGoodbyeTime(200);

std::string member_key(std::int32_t id, const char* what) {
  return base::concat(kDynamicKey, '/', id, '/', what);
}

}  // namespace

void check_group_kind(base::KeyValueStore& store, bool is_dynamic) {
  const char* const other = is_dynamic ? kStaticKey : kDynamicKey;
  const auto check = [&] {
    if (!store.has(other)) return;
    throw UsageError("rpc.join",
                     base::concat("this store has a ", is_dynamic ? "static" : "dynamic",
                                  " group, and static and dynamic groups do not mix"),
                     is_dynamic ? "a store of its own for the dynamic group" : "Agent(name, store)");
  };
  check();
  store.set(is_dynamic ? kDynamicKey : kStaticKey, "1");
  check();
}

int claim_worker_id(base::KeyValueStore& store) {
  return static_cast<int>(store.add(base::concat(kDynamicKey, "/ids"), 1) - 1);
}

// What a worker leaves on the store about itself.
struct AgentMembers::PublishedWorker {
  KnownWorker worker;
  std::string address, ticket;
};

std::string AgentMembers::join(base::KeyValueStore& store, const std::shared_ptr<net::Handler>& handler,
                               base::Deadline deadline) {
  listen_and_publish(store, handler);
  if (store.add(member_key(core_.self.id, "claims"), 1) != 1) return kGivenUp;
  run([&] { return protocol_.claim_id(); });
  // The last that came first: it is the likeliest to live, and says who is gone.
  for (std::int32_t id = core_.self.id - 1; id >= 0; --id) {
    if (!may_be_gone(id, store)) {
      join_worker(id, store, deadline);
    } else {
      const std::lock_guard lock(tables_.mutex);
      protocol_.skip(id);
    }
  }
  if (std::string why = give_up_missing(store, deadline); !why.empty()) return why;
  // While this process was stopped, others may have joined without it.
  if (store.has(member_key(core_.self.id, "gone"))) return kGivenUp;
  become_ready(deadline);
  return "";
}

void AgentMembers::say_goodbye() {
  if (core_.node) core_.node->close(base::Deadline(kGoodbyeTime));
}

void AgentMembers::listen_and_publish(base::KeyValueStore& store,
                                      const std::shared_ptr<net::Handler>& handler) {
  make_node(core_, core_.self.id + 1, handler);
  const std::string ticket = base::random_word();
  KnownWorker self;
  self.info = core_.self;
  self.incarnation = core_.node->incarnation();
  self.signatures = all_signatures();
  const json functions = self.signatures;
  {
    const std::lock_guard lock(tables_.mutex);
    protocol_.begin(std::move(self), ticket);
  }
  // Workers of other hosts may come later. They need the job's secret.
  const bool is_auto = core_.options.listen == "auto";
  std::string local, address;
  if (is_auto) local = core_.node->listen("unix:@cohort-" + base::random_word());
  if (!is_auto || core_.options.secret) address = listen_beyond_host(core_);
  const json entry = {{"name", core_.self.name}, {"host", base::machine_id()},
                      {"local", local},          {"address", address},
                      {"ticket", ticket},        {"incarnation", core_.node->incarnation()},
                      {"functions", functions}};
  store.set(member_key(core_.self.id, "entry"), entry.dump());
}

bool AgentMembers::may_be_gone(std::int32_t id, base::KeyValueStore& store) const {
  {
    const std::lock_guard lock(tables_.mutex);
    if (protocol_.is_told_gone(id)) return true;
  }
  return store.has(member_key(id, "gone"));
}

// Afterwards the worker has accepted this one, or is gone, or is in unreached_.
void AgentMembers::join_worker(std::int32_t id, base::KeyValueStore& store, base::Deadline deadline) {
  const std::optional<PublishedWorker> entry = read_entry(id, store, deadline);
  if (!entry) return add_gone(id, base::concat("worker ", id));
  const std::string& name = entry->worker.info.name;
  Unreached unreached;
  const std::string& why = unreached.why;
  unreached.name = name;
  Peer peer = connect(*entry, deadline, unreached);
  if (peer != nullptr) {
    if (is_accepted_by(peer, *entry, store, deadline)) {
      warn_of_differences(core_, name, entry->worker.signatures);
      is_accepted_ = true;
      return;
    }
    if (peer->is_down())
      peer = connect(*entry, deadline, unreached);  // has it ended, or is the connection lost?
  }
  if (peer == nullptr && why.empty()) {
    store.set(member_key(id, "gone"), "1");
    return add_gone(id, name);
  }
  if (deadline.expired()) {
    throw RendezvousError(
        "rpc.join", base::concat(name, " (worker ", id, ") did not answer within ",
                                 core_.options.join_timeout.count(), " ms", why.empty() ? "" : ": ", why));
  }
  if (peer != nullptr) unreached.why = "it does not accept this worker";
  unreached_[id] = std::move(unreached);
  const std::lock_guard lock(tables_.mutex);
  protocol_.add_unreached(id, peer != nullptr);
}

bool AgentMembers::is_accepted_by(const Peer& peer, const PublishedWorker& entry, base::KeyValueStore& store,
                                  base::Deadline deadline) {
  const base::Deadline others_see_deaths = base::Deadline(2 * core_.options.silence).sooner(deadline);
  while (true) {
    const MemberMessage answer = ask_to_join(peer, entry, deadline);
    if (answer.type == MemberMessageType::kAccepted) return true;
    if (answer.why.empty()) return false;
    // A process that begins anew comes before the others know of its death.
    if (answer.id == entry.worker.info.id || others_see_deaths.expired() ||
        !is_dead(answer.id, store, deadline)) {
      throw UsageError("rpc.join", base::concat(core_.self.name, " cannot join: ", answer.why),
                       "a name of its own for each worker that runs");
    }
    base::sleep(kLookAtPeers, others_see_deaths);
  }
}

// Workers that this one has not joined are gone, unless a worker that has accepted this one hears them.
// Returns "", or whom this worker cannot join.
std::string AgentMembers::give_up_missing(base::KeyValueStore& store, base::Deadline deadline) {
  std::unique_lock lock(tables_.mutex);
  while (const std::optional<std::int32_t> id = protocol_.take_heard()) {
    lock.unlock();
    join_worker(*id, store, deadline);  // which may say that it hears further ones
    lock.lock();
  }
  const std::optional<std::int32_t> unreached = protocol_.find_unreached();
  const std::set<std::int32_t> skipped = protocol_.skipped();
  lock.unlock();
  for (const auto& [id, worker] : unreached_) {
    if (worker.error && (!is_accepted_ || id == unreached)) std::rethrow_exception(worker.error);
  }
  if (unreached) {
    const Unreached& worker = unreached_.at(*unreached);
    base::sleep(kLookAtPeers, deadline);
    return base::concat(worker.name, " (worker ", *unreached,
                        ") runs, and this worker cannot join it: ", worker.why);
  }
  // The others were asked meanwhile: one that was stopped may run again, and they may not have heard it then.
  for (const auto& [id, worker] : unreached_) {
    if (answers_now(id, worker, store, deadline)) {
      return base::concat(worker.name, " (worker ", id, ") did not answer at first: ", worker.why);
    }
  }
  for (const std::int32_t id : skipped) add_gone(id, base::concat("worker ", id));
  for (const auto& [id, worker] : unreached_) {
    // It may run all the same: under a name that this host's name servers do not know, or behind a firewall.
    base::log(worker.is_rejected ? base::LogLevel::kInfo : base::LogLevel::kWarning,
              base::concat(core_.self.name, ": ", describe_unreached(id, worker), ". If it runs, ", kCure));
    store.set(member_key(id, "gone"), "1");
    add_gone(id, worker.name);
  }
  return "";
}

std::string AgentMembers::describe_unreached(std::int32_t id, const Unreached& worker) {
  return base::concat(worker.name, " (worker ", id, ") is taken for dead: ", worker.why);
}

void AgentMembers::wait_for_workers(base::Deadline deadline) {
  const auto wanted = static_cast<std::size_t>(std::max(core_.options.min_workers, 1));
  std::unique_lock lock(tables_.mutex);
  const auto all_are_there = [&] { return tables_.workers.infos().size() >= wanted; };
  while (!base::wait(tables_.changed, lock, all_are_there, base::Deadline(kLookAtPeers).sooner(deadline))) {
    if (!deadline.expired()) continue;
    std::vector<std::string> here, gone;
    for (const WorkerInfo& info : tables_.workers.infos()) here.push_back(info.name);
    for (const auto& [id, worker] : unreached_) gone.push_back(describe_unreached(id, worker));
    if (const std::size_t num_others = gone_.size() - unreached_.size(); num_others > 0) {
      gone.push_back(base::concat(num_others, " were gone before this worker joined"));
    }
    throw RendezvousError(
        "rpc.join",
        base::concat(here.size(), " of ", wanted, " workers came within ", core_.options.join_timeout.count(),
                     " ms: ", base::join(here), gone.empty() ? "" : "; ", base::join(gone)),
        gone.empty() ? "a longer AgentOptions::join_timeout" : kCure);
  }
}

bool AgentMembers::answers_now(std::int32_t id, Unreached unreached, base::KeyValueStore& store,
                               base::Deadline deadline) const {
  const std::optional<PublishedWorker> entry = read_entry(id, store, deadline);
  if (!entry) return false;
  if (connect(*entry, base::Deadline(kLastTry).sooner(deadline), unreached) != nullptr) return true;
  // A name server may take longer than a worker that answers.
  if (unreached.is_lookup_late && connect(*entry, deadline, unreached) != nullptr) return true;
  if (unreached.error && !is_accepted_) std::rethrow_exception(unreached.error);
  return false;
}

// None: the worker has never come so far.
std::optional<AgentMembers::PublishedWorker> AgentMembers::read_entry(std::int32_t id,
                                                                      base::KeyValueStore& store,
                                                                      base::Deadline deadline) const {
  const std::string key = member_key(id, "entry");
  if (!store.has(key) && !store.wait({key}, base::Deadline(core_.options.silence).sooner(deadline))) {
    store.add(member_key(id, "claims"), 1);
    if (!store.has(key)) {
      store.set(member_key(id, "gone"), "1");
      return std::nullopt;
    }
  }
  const json fields = json::parse(store.get(key));
  PublishedWorker entry;
  entry.worker.info = {fields.at("name"), id};
  entry.worker.incarnation = fields.at("incarnation").get<std::string>();
  entry.worker.signatures = fields.at("functions").get<std::map<std::string, std::string>>();
  entry.ticket = fields.at("ticket").get<std::string>();
  const bool is_local = fields.at("host") == base::machine_id() && fields.at("local") != "";
  entry.address = fields.at(is_local ? "local" : "address").get<std::string>();
  return entry;
}

// Of a worker that has joined.
void AgentMembers::compare_functions(const Peer& peer) {
  std::map<std::string, std::string> signatures;
  {
    const std::lock_guard lock(tables_.mutex);
    const KnownWorker* const worker = tables_.workers.find_by_peer(peer);
    if (worker == nullptr) return;
    signatures = worker->signatures;
  }
  warn_of_differences(core_, peer->name(), signatures);
}

// Null without `why`: its process is not there. Null with it: it could not be reached, which proves nothing.
// An address of TCP may lead elsewhere, or be closed to this host alone. What does not answer, or has no
// address any more, is tried for AgentOptions::silence. With `error`: a process is there, as one with another
// secret, certificate, version or user. Or this process has no means to connect: no descriptor, no network,
// or no name server that answers. Where others accept this worker it may be a stranger, at the port of a
// worker that has ended.
AgentMembers::Peer AgentMembers::connect(const PublishedWorker& entry, base::Deadline deadline,
                                         Unreached& unreached) const {
  if (entry.address.empty()) {
    throw RendezvousError(
        "rpc.join", base::concat(entry.worker.info.name, " is on another host, and listens for its own"),
        "the job's secret on all workers");
  }
  const base::Deadline attempt = base::Deadline(core_.options.silence).sooner(deadline);
  std::string& why = unreached.why;
  unreached.error = nullptr;
  unreached.is_lookup_late = unreached.is_rejected = false;
  while (true) {
    try {
      why.clear();
      Peer peer = core_.node->connect(entry.address, attempt, net::WhenRejected::kGiveUp);
      if (peer != nullptr && peer->incarnation() == entry.worker.incarnation) return peer;
      if (!entry.address.starts_with(kLocal)) {
        why = base::concat(peer == nullptr ? "nobody listens at " : "another process listens at ",
                           entry.address);
      }
      unreached.is_rejected = true;
      return nullptr;
    } catch (const net::UnknownHost& error) {
      why = base::message_of(error);
      unreached.was_unknown = true;
      if (attempt.remaining() <= kBetweenLookups) return nullptr;
    } catch (const net::LookupTimeout& error) {
      why = base::message_of(error);
      unreached.is_lookup_late = !unreached.was_unknown;
      if (unreached.is_lookup_late) unreached.error = std::current_exception();
      return nullptr;
    } catch (const net::NoAnswer& error) {
      why = base::message_of(error);
      unreached.was_unknown = false;
      return nullptr;
    } catch (const RendezvousError& error) {
      why = base::message_of(error);
      unreached.error = std::current_exception();
      return nullptr;
    }
    base::sleep(kBetweenLookups, attempt);
  }
}

MemberMessage AgentMembers::ask_to_join(const Peer& peer, const PublishedWorker& entry,
                                        base::Deadline deadline) {
  KnownWorker worker = entry.worker;
  worker.peer = peer;
  run([&] { return protocol_.ask(worker, entry.ticket); });
  std::unique_lock lock(tables_.mutex);
  const auto has_answer = [&] { return protocol_.answer_of(peer) != nullptr; };
  while (!base::wait(tables_.changed, lock, has_answer, base::Deadline(kLookAtPeers).sooner(deadline))) {
    if (!peer->is_down() && !deadline.expired()) continue;
    protocol_.forget(peer);
    MemberMessage none;
    none.type = MemberMessageType::kRejected;
    return none;
  }
  return *protocol_.answer_of(peer);
}

bool AgentMembers::is_dead(std::int32_t id, base::KeyValueStore& store, base::Deadline deadline) const {
  if (may_be_gone(id, store)) return true;
  const std::optional<PublishedWorker> entry = read_entry(id, store, deadline);
  Unreached unreached;
  // One that rejects this worker runs.
  return !entry || (connect(*entry, deadline, unreached) == nullptr && !unreached.error);
}

void AgentMembers::add_gone(std::int32_t id, const std::string& name) {
  gone_[id] = name + " was gone before this worker joined";
  const std::lock_guard lock(tables_.mutex);
  protocol_.add_gone(id, name, gone_[id]);
}

void AgentMembers::become_ready(base::Deadline deadline) {
  MemberProtocol::Messages messages;
  run([&] { return messages = protocol_.become_ready(); });
  std::unique_lock lock(tables_.mutex);
  std::vector<std::string> missing;
  const auto all_know = [&] {
    missing.clear();
    for (const auto& [peer, message] : messages) {
      if (!protocol_.is_known_by(peer) && !peer->is_down()) missing.push_back(peer->name());
    }
    return missing.empty();
  };
  while (!base::wait(tables_.changed, lock, all_know, base::Deadline(kLookAtPeers).sooner(deadline))) {
    if (!deadline.expired()) continue;
    throw RendezvousError(
        "rpc.join", base::concat("these workers did not answer within ", core_.options.join_timeout.count(),
                                 " ms: ", base::join(missing)));
  }
}

}  // namespace cohort::rpc
