// Names and meanings are torchrun's. Two flags that contradict each other are an error, and so is one that
// the chosen backend has no use for: one of them would be ignored silently.
#include "cohort/launch/internal/flags/rendezvous_flags.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/launch/limits.h"
#include "cohort/membership/etcd_store.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;
using Backend = RendezvousBackend;
using Etcd = membership::EtcdOptions;

constexpr int kMinSilence = 20, kMaxSilence = 3'600'000;  // ms
constexpr int kMaxVirtualRanks = 1'000'000;

struct BackendName {
  std::string_view name;
  Backend backend;
};
constexpr std::array<BackendName, 4> kBackends = {{{"static", Backend::kStatic},
                                                   {"c10d", Backend::kEmbedded},
                                                   {"embedded", Backend::kEmbedded},
                                                   {"etcd", Backend::kEtcd}}};

// Bits of a set of backends.
constexpr unsigned kOnlyStatic = 1U << static_cast<unsigned>(Backend::kStatic);
constexpr unsigned kOnlyEmbedded = 1U << static_cast<unsigned>(Backend::kEmbedded);
constexpr unsigned kOnlyEtcd = 1U << static_cast<unsigned>(Backend::kEtcd);
constexpr unsigned kDynamic = kOnlyEmbedded | kOnlyEtcd;
constexpr unsigned kAll = kOnlyStatic | kDynamic;

struct RdzvKey {
  std::string_view name;
  unsigned backends;  // that it has a meaning for
  void (*read)(const FlagValue& value, RunOptions& options);
  std::string_view instead = {};  // why it is rejected, and what to use
};

void read_timeout_of_all(const FlagValue& value, RunOptions& options) {
  options.rendezvous_timeout = value.seconds(0.001);
}
void read_last_call(const FlagValue& value, RunOptions& options) {
  options.rendezvous.last_call_timeout = value.seconds(0);
}
void read_keep_alive_interval(const FlagValue& value, RunOptions& options) {
  options.keep_alive_interval = value.seconds(0.001);
}
// With 1, a single keep-alive that comes late would end the job.
void read_keep_alive_max_attempt(const FlagValue& value, RunOptions& options) {
  options.keep_alive_max_attempt = value.integer(2, 1'000'000);
}
void read_is_host(const FlagValue& value, RunOptions& options) {
  options.rendezvous.is_host = value.truth();
}
void read_enter_timeout(const FlagValue& value, RunOptions& options) {
  options.rendezvous.enter_timeout = value.seconds(0.001);
}
void read_progress_timeout(const FlagValue& value, RunOptions& options) {
  options.rendezvous.progress_timeout = value.seconds(0);
}
void read_read_timeout(const FlagValue& value, RunOptions& options) {
  Etcd& etcd = options.rendezvous.etcd;
  const Etcd defaults;
  etcd.request_timeout = value.seconds(0.001);
  // A swap has time for as many requests as without the key.
  etcd.swap_timeout = etcd.request_timeout * (defaults.swap_timeout / defaults.request_timeout);
}
void read_protocol(const FlagValue& value, RunOptions& options) {
  constexpr base::Choice<bool> kProtocols[] = {{"http", false}, {"https", true}};
  options.rendezvous.etcd.is_tls = value.choose(kProtocols);
}
template <auto kField>
void read_etcd_text(const FlagValue& value, RunOptions& options) {
  if (value.text.empty()) value.reject("a text");
  options.rendezvous.etcd.*kField = value.text;
}

// torchrun's static rendezvous calls the time limit timeout, and its dynamic rendezvous calls it
// join_timeout.
constexpr RdzvKey kRdzvKeys[] = {
    {"timeout", kAll, read_timeout_of_all},
    {"join_timeout", kAll, read_timeout_of_all},
    {"keep_alive_interval", kAll, read_keep_alive_interval},
    {"keep_alive_max_attempt", kAll, read_keep_alive_max_attempt},
    {"last_call_timeout", kDynamic, read_last_call},
    {"enter_timeout", kDynamic, read_enter_timeout},
    {"progress_timeout", kDynamic, read_progress_timeout},
    {"is_host", kOnlyEmbedded, read_is_host},
    {"read_timeout", kOnlyEtcd, read_read_timeout},
    {"protocol", kOnlyEtcd, read_protocol},
    {"ca_cert", kOnlyEtcd, read_etcd_text<&Etcd::authorities>},
    {"ssl_cert", kOnlyEtcd, read_etcd_text<&Etcd::certificate>},
    {"ssl_cert_key", kOnlyEtcd, read_etcd_text<&Etcd::key>},
    {"etcd_prefix", kOnlyEtcd, read_etcd_text<&Etcd::prefix>},
    {"user", kOnlyEtcd, read_etcd_text<&Etcd::user>},
    {"password_file", kOnlyEtcd, read_etcd_text<&Etcd::password_file>},
    {"store_type", 0, nullptr,
     "leave it out: the record is in the agent at the endpoint (--rdzv-backend c10d), or in etcd"},
    {"close_timeout", 0, nullptr, "leave it out: a run is over when the ranks of all members have ended"},
    {"heartbeat_timeout", 0, nullptr, "--silence MS"},
};

std::string names_of(unsigned backends) {
  std::vector<std::string> names;
  for (const auto& [name, backend] : kBackends) {
    if (((backends >> static_cast<unsigned>(backend)) & 1U) != 0 && name != "embedded")
      names.emplace_back(name);
  }
  return base::join(names, " or ");
}

std::string known_keys(Backend backend) {
  std::vector<std::string> names;
  for (const RdzvKey& key : kRdzvKeys) {
    if (((key.backends >> static_cast<unsigned>(backend)) & 1U) != 0) names.emplace_back(key.name);
  }
  return base::join(names, ", ");
}

// Reads key=value,key=value. Returns the names of the keys.
std::vector<std::string> read_rdzv_conf(const FlagValue& given, RunOptions& options) {
  std::vector<std::string> keys;
  for (const std::string& part : split_text(given.text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    if (equals == std::string::npos) given.reject("KEY=VALUE,KEY=VALUE");
    const FlagValue value{given.name + " " + key, part.substr(equals + 1)};
    const auto* const known = std::ranges::find(kRdzvKeys, key, &RdzvKey::name);
    const Backend backend = options.rendezvous.backend;
    if (known == std::end(kRdzvKeys)) {
      reject_options(concat(given.name, ": '", key, "' is not known"), known_keys(backend));
    }
    if (known->read == nullptr) {
      reject_options(concat(value.name, " is not available"), std::string(known->instead));
    }
    if (((known->backends >> static_cast<unsigned>(backend)) & 1U) == 0) {
      reject_options(concat(value.name, " is for --rdzv-backend ", names_of(known->backends)),
                     known_keys(backend));
    }
    known->read(value, options);
    keys.push_back(key);
  }
  return keys;
}

// torchrun's MIN:MAX.
void read_nnodes(const FlagValue& given, RunOptions& options) {
  const auto parts = split_text(given.text, ':');
  int low = 0, high = 0;
  if (parts.size() > 2 || !read_number(parts.front(), low) || !read_number(parts.back(), high) || low < 1 ||
      high < low) {
    given.reject("a number of nodes, such as 2, or MIN:MAX");
  }
  options.rendezvous.min_nodes = low;
  options.nnodes = high;
}

Backend read_backend(const FlagValues& flags, bool needs_dynamic, const std::string& why) {
  const auto given = flags.get("rdzv-backend");
  if (!given) return needs_dynamic ? Backend::kEmbedded : Backend::kStatic;
  const auto* const known = std::ranges::find(kBackends, given->text, &BackendName::name);
  if (known == kBackends.end()) {
    if (given->text == "etcd-v2") {
      reject_options(concat(given->name, " is 'etcd-v2', and Cohort speaks etcd's version 3"),
                     "--rdzv-backend etcd");
    }
    given->reject("static, c10d (embedded) or etcd");
  }
  if (known->backend == Backend::kStatic && needs_dynamic) {
    reject_options(concat(why, " needs members that may change, and ", given->name, " is 'static'"),
                   "--rdzv-backend c10d");
  }
  return known->backend;
}

void read_static_place(const FlagValues& flags, RunOptions& options) {
  if (const auto given = flags.get("node-rank")) options.node_rank = given->integer(0, kMaxNodes - 1);
  if (const auto given = flags.get("rdzv-endpoint")) {
    for (const char* other : {"master-addr", "master-port"}) {
      if (const auto beside = flags.get(other)) {
        reject_options(concat(given->name, " and ", beside->name, " both say where node 0 is"),
                       "one of them");
      }
    }
    // The last colon, since an IPv6 address has colons of its own.
    const std::size_t colon = given->text.rfind(':');
    int port = 0;
    if (colon == std::string::npos || colon == 0 || !read_number(given->text.substr(colon + 1), port) ||
        port < 1 || port > 65535) {
      given->reject("HOST:PORT");
    }
    options.master_addr = given->text.substr(0, colon);
    options.master_port = static_cast<std::uint16_t>(port);
  }
  if (const auto given = flags.get("master-addr")) options.master_addr = given->text;
  if (const auto given = flags.get("master-port")) {
    options.master_port = static_cast<std::uint16_t>(given->integer(1, 65535));
  }
  if (const auto given = flags.get("local-addr")) {
    reject_options(given->name + " is for members that may change",
                   "COHORT_INTERFACE=eth1 in the environment, which names the way between hosts");
  }
  for (const char* dynamic : {"silence", "notice-file"}) {
    if (const auto given = flags.get(dynamic)) {
      reject_options(concat(given->name, " is for members that may change"), "--rdzv-backend c10d");
    }
  }
}

// Agents reach each other as they reach etcd: one of its members may be on this host, and others not.
std::string far_endpoint(const std::vector<std::string>& endpoints) {
  const auto found = std::ranges::find_if(endpoints, [](const std::string& endpoint) {
    return !base::is_this_host(split_endpoint(endpoint).host);
  });
  return found == endpoints.end() ? endpoints.front() : *found;
}

void read_dynamic_place(const FlagValues& flags, RunOptions& options) {
  for (const char* fixed : {"node-rank", "master-addr", "master-port"}) {
    if (const auto given = flags.get(fixed)) {
      reject_options(concat(given->name,
                            " is for --rdzv-backend static: here the rendezvous numbers nodes, and "
                            "serves the ranks' store"),
                     "--rdzv-endpoint HOST:PORT alone");
    }
  }
  RendezvousOptions& rendezvous = options.rendezvous;
  if (const auto given = flags.get("rdzv-endpoint")) {
    if (rendezvous.backend == Backend::kEtcd) {
      rendezvous.etcd.endpoints = membership::parse_etcd_endpoints(given->text);
      rendezvous.endpoint = far_endpoint(rendezvous.etcd.endpoints);
    } else {
      const auto endpoint = read_endpoint_text(given->text, kDefaultEndpointPort);
      if (!endpoint) given->reject("HOST:PORT");
      rendezvous.endpoint = *endpoint;
    }
  }
  if (const auto given = flags.get("silence")) {
    rendezvous.silence = milliseconds(given->integer(kMinSilence, kMaxSilence));
  }
  if (const auto given = flags.get("notice-file")) rendezvous.notice_file = given->text;
  if (const auto given = flags.get("local-addr")) {
    const bool has_port = given->text.find(':') != std::string::npos && !given->text.ends_with(']');
    if (has_port || !read_endpoint_text(given->text, 1))
      given->reject("a host without a port: a name, an IPv4 address or [IPV6]");
    rendezvous.local_addr = split_endpoint(given->text + ":1").host;
  }
}

void read_rdzv_keys(const FlagValues& flags, RunOptions& options) {
  const auto given = flags.get("rdzv-conf");
  if (!given) return;
  const std::vector<std::string> keys = read_rdzv_conf(*given, options);
  for (const char* elastic : {"enter_timeout", "progress_timeout"}) {
    if (options.rendezvous.is_elastic || std::ranges::find(keys, elastic) == keys.end()) continue;
    reject_options(concat(given->name, " ", elastic, " is for elastic programs"), "--elastic beside it");
  }
  const auto keeps_alive = [](const std::string& key) { return key.starts_with("keep_alive_"); };
  if (!options.rendezvous.is_dynamic() || std::ranges::none_of(keys, keeps_alive)) return;
  if (const auto beside = flags.get("silence")) {
    reject_options(concat(beside->name, " and ", given->name, " keep_alive_... both say when a node is gone"),
                   "one of them");
  }
  options.rendezvous.silence = options.keep_alive_interval * options.keep_alive_max_attempt;
}

void read_secret(const FlagValues& flags, RunOptions& options) {
  if (const auto given = flags.get("secret-file")) {
    options.secret_file = given->text;
  } else if (const auto path = base::env_string("COHORT_SECRET_FILE")) {
    options.secret_file = *path;
  }
  if (const auto given = flags.get("no-secret")) {
    options.no_secret = true;
    if (const auto beside = flags.get("secret-file")) {
      reject_options(concat(given->name, " and ", beside->name, " exclude each other"), "one of them");
    }
    // COHORT_SECRET_FILE may be set for all jobs of a user: the flag is stronger.
    options.secret_file.clear();
  }
}

void read_elastic(const FlagValues& flags, RendezvousOptions& rendezvous) {
  rendezvous.is_elastic = flags.get("elastic").has_value();
  for (const char* elastic : {"virtual-ranks", "warm-ranks"}) {
    const auto given = flags.get(elastic);
    if (given && !rendezvous.is_elastic)
      reject_options(given->name + " is for elastic programs", "--elastic beside it");
  }
  if (const auto given = flags.get("virtual-ranks")) {
    rendezvous.virtual_ranks = given->integer(1, kMaxVirtualRanks);
  }
  if (const auto given = flags.get("warm-ranks")) {
    rendezvous.warm_ranks = given->integer(0, kMaxLocalRanks);
  }
}

void check_dynamic(const RunOptions& options) {
  const RendezvousOptions& rendezvous = options.rendezvous;
  if (rendezvous.min_nodes < 1 || rendezvous.min_nodes > options.nnodes) {
    reject_options(concat("--nnodes is ", rendezvous.min_nodes, ":", options.nnodes,
                          ", expected MIN:MAX with 1 <= MIN <= MAX"));
  }
  if (rendezvous.silence < milliseconds(kMinSilence)) {
    reject_options(concat("--silence is ", rendezvous.silence.count(), ", expected at least ", kMinSilence,
                          ": a busy host may be late"));
  }
  if (rendezvous.is_elastic && options.num_virtual_ranks() < options.nnodes * options.nproc_per_node) {
    reject_options(concat("--virtual-ranks is ", rendezvous.virtual_ranks, ", and ", options.nnodes,
                          " nodes have ", options.nnodes * options.nproc_per_node, " ranks"),
                   "at least one virtual rank for each rank");
  }
  if (rendezvous.endpoint.empty()) {
    reject_options(concat("there may be ", options.nnodes + rendezvous.num_spares,
                          " nodes, and nothing says where their rendezvous is"),
                   rendezvous.backend == Backend::kEtcd
                       ? "--rdzv-endpoint HOST:PORT,... of etcd"
                       : "--rdzv-endpoint HOST:PORT, the same on all nodes, with the host of one of them");
  }
  if (rendezvous.backend == Backend::kEtcd && options.run_id.empty()) {
    reject_options("--rdzv-backend is etcd, which has many runs, and nothing says which one this is",
                   "--rdzv-id NAME, the same on all nodes, and another one for each run");
  }
  if (!options.is_alone() && rendezvous.endpoint.ends_with(":0")) {
    reject_options("--rdzv-endpoint has port 0, which other nodes cannot know", "a port, such as 29400");
  }
  if (!options.is_on_one_host() && options.no_secret) {
    reject_options("--no-secret: agents of several hosts that take part in a rendezvous prove who they are",
                   "--secret-file FILE, the same on all nodes; or --rdzv-backend static");
  }
}

}  // namespace

void read_rendezvous(const FlagValues& flags, RunOptions& options) {
  RendezvousOptions& rendezvous = options.rendezvous;
  if (const auto given = flags.get("nnodes")) read_nnodes(*given, options);
  if (const auto given = flags.get("spares")) rendezvous.num_spares = given->integer(0, kMaxNodes);
  read_elastic(flags, rendezvous);
  const bool may_change = rendezvous.min_nodes < options.nnodes;
  const bool needs_dynamic = may_change || rendezvous.num_spares > 0 || rendezvous.is_elastic;
  rendezvous.backend =
      read_backend(flags, needs_dynamic,
                   may_change              ? concat("--nnodes ", rendezvous.min_nodes, ":", options.nnodes)
                   : rendezvous.is_elastic ? "--elastic"
                                           : "--spares");
  if (const auto given = flags.get("standalone")) {
    options.standalone = true;
    if (const auto beside = flags.get("rdzv-endpoint")) {
      reject_options(given->name + " takes a port of the system's choice, and " + beside->name + " names one",
                     "one of them");
    }
  }
  if (rendezvous.is_dynamic()) {
    read_dynamic_place(flags, options);
    if (rendezvous.endpoint.empty() && rendezvous.backend == Backend::kEmbedded && options.is_alone()) {
      rendezvous.endpoint = "127.0.0.1:0";
    }
  } else {
    read_static_place(flags, options);
  }
  if (const auto given = flags.get("rdzv-id")) options.run_id = given->text;
  read_rdzv_keys(flags, options);
  read_secret(flags, options);
}

void check_rendezvous(const RunOptions& options) {
  const RendezvousOptions& rendezvous = options.rendezvous;
  if (!rendezvous.is_dynamic() && (rendezvous.is_elastic || rendezvous.num_spares != 0)) {
    reject_options("--elastic and --spares need members that may change", "--rdzv-backend c10d");
  }
  if (rendezvous.num_spares < 0 || rendezvous.num_spares > kMaxNodes || rendezvous.warm_ranks < 0 ||
      rendezvous.virtual_ranks < 0) {
    reject_options("a number of spares, warm ranks or virtual ranks is out of its range", "0 or more");
  }
  if (options.standalone && !options.is_alone()) {
    reject_options(concat("--standalone is for one node, and --nnodes is ", options.nnodes), "one of them");
  }
  if (options.standalone && (options.master_addr || options.master_port)) {
    reject_options(
        "--standalone takes a port of the system's choice, and --master-addr or --master-port names one",
        "one of them");
  }
  if (rendezvous.is_dynamic()) {
    check_dynamic(options);
  } else if (options.nnodes > 1 && !options.master_addr) {
    reject_options(concat("--nnodes is ", options.nnodes, ", and nothing says where node 0 is"),
                   "--master-addr HOST --master-port PORT, the same on all nodes");
  }
  // Whoever reaches node 0's port would be believed.
  if (!options.is_alone() && !options.is_on_one_host() && options.secret_file.empty() && !options.no_secret) {
    const char* const otherwise = !rendezvous.is_dynamic() ? "; or --no-secret in a network of the job's own"
                                  : base::is_this_host(rendezvous.endpoint_host())
                                      ? "; or --no-secret, if all nodes are on this host"
                                      : "";
    reject_options("nodes on several hosts, and no secret by which they know each other",
                   concat("--secret-file FILE, the same on all nodes (made by: (umask 077; head -c 32 "
                          "/dev/urandom | base64 "
                          "> FILE))",
                          otherwise));
  }
  if (options.no_secret && !options.secret_file.empty())
    reject_options("a secret, and --no-secret", "one of them");
}

}  // namespace cohort::launch
