// The rendezvous of workers is two rounds over the store: which host each is on, then name, address and
// functions of each. The first round says which pairs use local sockets, and whether those are enough. A
// worker that has joined earlier may connect, call or die while this one still reads the store: WorkerTable
// and EarlyEvents keep that.
#include "cohort/rpc/internal/agent/agent_join.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/log.h"
#include "cohort/base/secret.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_members.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {
namespace {

using nlohmann::json;

// Each worker connects to those with a lower id, and waits for those with a higher one.
void connect_to_workers(AgentCore& core, const std::vector<std::string>& addresses, base::Deadline deadline) {
  CallTables& tables = core.tables;
  for (int id = 0; id < core.self.id; ++id) {
    const std::shared_ptr<net::Peer> peer =
        core.node->connect(addresses[static_cast<std::size_t>(id)], deadline);
    const std::lock_guard lock(tables.mutex);
    tables.workers.on_connected(id, peer);
  }
  std::unique_lock lock(tables.mutex);
  if (!base::wait(tables.changed, lock, [&] { return tables.workers.not_connected().empty(); }, deadline)) {
    throw RendezvousError(
        "rpc.join", base::concat("these workers did not connect within ", core.options.join_timeout.count(),
                                 " ms: ", base::join(tables.workers.not_connected())));
  }
}

}  // namespace

void make_node(AgentCore& core, int workers_of_host, const std::shared_ptr<net::Handler>& handler) {
  net::NodeOptions options;
  options.name = core.self.name;
  options.secret = core.options.secret;
  options.tls = core.options.tls;
  options.silence = core.options.silence;
  options.heartbeat = std::min(options.heartbeat, core.options.silence / 8);
  options.allocate = allocate_payload;
  options.shared_cache = core.options.shared_cache;
  const bool has_cores = workers_of_host <= base::CpuSet::of_process().size();
  options.spin = core.options.spin.value_or(std::chrono::microseconds(has_cores ? 50 : 0));
  core.node = std::make_unique<net::Node>(std::move(options), handler);
}

std::string listen_beyond_host(AgentCore& core) {
  if (core.options.listen != "auto") return core.node->listen(core.options.listen);
  return core.node->listen("0.0.0.0:0", core.options.host);
}

void warn_of_differences(const AgentCore& core, const std::string& worker,
                         const std::map<std::string, std::string>& signatures) {
  const std::string differ = differences(all_signatures(), signatures);
  if (differ.empty()) return;
  base::log_warning(base::concat(core.self.name, ": ", worker,
                                 " runs another version of the program, and calls of these functions will "
                                 "fail: ",
                                 differ));
}

void join_workers(AgentCore& core, int world_size, base::KeyValueStore& store,
                  const std::shared_ptr<net::Handler>& handler) {
  const base::Deadline deadline(core.options.join_timeout);
  check_group_kind(store, /*is_dynamic=*/false);
  // A second agent of this worker over the same store joins the second ones of the others.
  const std::int64_t round = store.add(base::concat("rpc/agents of ", core.self.id), 1);
  const auto gather = [&](const char* key, const std::string& word) {
    base::Words words = base::all_gather_words(store, base::concat("rpc/", round, '/', key), core.self.id,
                                               world_size, word, deadline);
    if (words.missing.empty()) return words.of_rank;
    throw RendezvousError(
        "rpc.join", base::concat("of ", world_size, " workers these did not come within ",
                                 core.options.join_timeout.count(), " ms: ", base::join(words.missing)));
  };
  const std::vector<std::string> hosts = gather("host", base::machine_id());
  const std::string& host = hosts[static_cast<std::size_t>(core.self.id)];
  const auto workers_of_host = static_cast<int>(std::count(hosts.begin(), hosts.end(), host));
  make_node(core, workers_of_host, handler);
  // Workers of one host use local sockets, and so shared memory. Where there are other hosts too, each has
  // two addresses.
  const auto listen_locally = [&] { return core.node->listen("unix:@cohort-" + base::random_word()); };
  const bool is_auto = core.options.listen == "auto", is_one_host = workers_of_host == world_size;
  const std::string local = is_auto && !is_one_host ? listen_locally() : "";
  const std::string address = is_auto && is_one_host ? listen_locally() : listen_beyond_host(core);
  const std::map<std::string, std::string> signatures = all_signatures();
  const json own = {{"name", core.self.name},
                    {"address", address},
                    {"local", local},
                    {"incarnation", core.node->incarnation()},
                    {"functions", signatures}};
  const std::vector<std::string> words = gather("join", own.dump());
  std::vector<std::string> addresses;
  std::vector<std::pair<std::string, std::map<std::string, std::string>>> functions_of_others;
  {
    CallTables& tables = core.tables;
    const std::lock_guard lock(tables.mutex);
    const auto size = static_cast<std::size_t>(world_size);
    tables.shutdown.set_num_workers(size);
    std::vector<KnownWorker> workers(size);
    for (int id = 0; id < world_size; ++id) {
      const json word = json::parse(words[static_cast<std::size_t>(id)]);
      const bool is_local = hosts[static_cast<std::size_t>(id)] == host && !word.value("local", "").empty();
      addresses.push_back(word.at(is_local ? "local" : "address"));
      KnownWorker& worker = workers[static_cast<std::size_t>(id)];
      worker.info = {word.at("name"), id};
      worker.incarnation = word.at("incarnation").get<std::string>();
      worker.signatures = word.at("functions").get<std::map<std::string, std::string>>();
      if (id != core.self.id) functions_of_others.emplace_back(worker.info.name, worker.signatures);
    }
    tables.workers.set(std::move(workers));
  }
  for (const auto& [name, functions] : functions_of_others) warn_of_differences(core, name, functions);
  connect_to_workers(core, addresses, deadline);
}

}  // namespace cohort::rpc
