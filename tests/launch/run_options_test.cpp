#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/launch/internal/members/member_link.h"
#include "cohort/launch/read_options.h"
#include "cohort/launch/run_flags.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using Values = std::map<std::string, std::string>;

RunOptions read(const Values& given, int gpus = 0) {
  return read_run_flags(given, {"prog", "arg"}, [gpus] { return gpus; });
}

TEST(RunOptionsTest, DefaultsAreTorchruns) {
  const RunOptions options = read({});
  EXPECT_EQ(options.nnodes, 1);
  EXPECT_EQ(options.nproc_per_node, 1);
  EXPECT_EQ(options.max_restarts, 0);
  EXPECT_EQ(options.monitor_interval, milliseconds(100));
  EXPECT_EQ(options.shutdown_timeout, milliseconds(30'000));
  EXPECT_EQ(options.rendezvous_timeout, milliseconds(600'000));
  EXPECT_EQ(options.role, "default");
  EXPECT_EQ(options.signals_to_handle, (std::vector<int>{SIGTERM, SIGINT, SIGHUP, SIGQUIT}));
  EXPECT_EQ(options.command, (std::vector<std::string>{"prog", "arg"}));
  EXPECT_FALSE(options.master_port);
}

TEST(RunOptionsTest, EveryFlagIsRead) {
  const RunOptions options =
      read({{"nnodes", "3:3"},
            {"nproc-per-node", "4"},
            {"node-rank", "2"},
            {"master-addr", "[::1]"},
            {"master-port", "1234"},
            {"rdzv-backend", "static"},
            {"rdzv-id", "job"},
            {"secret-file", "key"},
            {"rdzv-conf", "timeout=1.5,keep_alive_interval=2,keep_alive_max_attempt=7"},
            {"max-restarts", "5"},
            {"monitor-interval", "0.25"},
            {"shutdown-timeout", "2"},
            {"signals-to-handle", "SIGTERM,INT"},
            {"log-dir", "logs"},
            {"redirects", "0:3,2:1"},
            {"tee", "2"},
            {"local-ranks-filter", "0,3"},
            {"prefix", "off"},
            {"role", "trainer"},
            {"bind-to", "none"}});
  EXPECT_EQ(options.nnodes, 3);
  EXPECT_EQ(options.secret_file, "key");
  EXPECT_EQ(options.nproc_per_node, 4);
  EXPECT_EQ(options.node_rank, 2);
  EXPECT_EQ(options.master_addr, "[::1]");
  EXPECT_EQ(options.master_port, 1234);
  EXPECT_EQ(options.run_id, "job");
  EXPECT_EQ(options.rendezvous_timeout, milliseconds(1500));
  EXPECT_EQ(options.keep_alive_interval, milliseconds(2000));
  EXPECT_EQ(options.keep_alive_max_attempt, 7);
  EXPECT_EQ(options.max_restarts, 5);
  EXPECT_EQ(options.monitor_interval, milliseconds(250));
  EXPECT_EQ(options.shutdown_timeout, milliseconds(2000));
  EXPECT_EQ(options.signals_to_handle, (std::vector<int>{SIGTERM, SIGINT}));
  EXPECT_EQ(options.log_dir, "logs");
  EXPECT_TRUE(options.redirects.out(0) && options.redirects.err(0) && options.redirects.out(2));
  EXPECT_FALSE(options.redirects.out(1) || options.redirects.err(2));
  EXPECT_TRUE(options.tee.err(3) && !options.tee.out(3));
  EXPECT_EQ(options.local_ranks_filter, (std::vector<int>{0, 3}));
  EXPECT_EQ(options.prefix, Prefix::kOff);
  EXPECT_EQ(options.role, "trainer");
  EXPECT_EQ(options.bind_to, BindTo::kNone);
  EXPECT_TRUE(read({{"standalone", "1"}}).standalone);
  const RunOptions endpoint = read({{"rdzv-endpoint", "[fe80::1]:77"}});
  EXPECT_EQ(endpoint.master_addr, "[fe80::1]");
  EXPECT_EQ(endpoint.master_port, 77);
}

TEST(RunOptionsTest, EveryFlagInTheTableIsReadOrRejected) {
  for (const RunFlag& flag : run_flags()) {
    if (flag.instead.empty()) {
      EXPECT_FALSE(flag.meaning.empty()) << flag.name;
    } else {
      COHORT_EXPECT_THROW_WITH(read({{flag.name, "1"}}), UsageError,
                               "--" + flag.name + " is not available. Try: ");
    }
  }
}

TEST(RunOptionsTest, WordsCountProcesses) {
  const test::ScopedEnv cores("COHORT_CORES", "3");
  EXPECT_EQ(read({{"nproc-per-node", "cpu"}}, 2).nproc_per_node, 3);
  EXPECT_EQ(read({{"nproc-per-node", "auto"}}, 2).nproc_per_node, 2);
  EXPECT_EQ(read({{"nproc-per-node", "auto"}}, 0).nproc_per_node, 3);
  EXPECT_EQ(read({{"nproc-per-node", "gpu"}}, 2).nproc_per_node, 2);
  COHORT_EXPECT_THROW_WITH(read({{"nproc-per-node", "gpu"}}), UsageError, "no GPU can be used here");
  for (const char* bad : {"0", "-1", "2x", "xpu", "99999"}) {
    COHORT_EXPECT_THROW_WITH(
        read({{"nproc-per-node", bad}}), UsageError,
        std::string("--nproc-per-node is '") + bad + "', expected auto, cpu, gpu or a number");
  }
}

TEST(RunOptionsTest, TheEnvironmentGivesDefaults) {
  const test::ScopedEnv nproc("PET_NPROC_PER_NODE", "3"), restarts("PET_MAX_RESTARTS", "2"),
      standalone("PET_STANDALONE", "1");
  EXPECT_EQ(read({}).nproc_per_node, 3);
  EXPECT_EQ(read({}).max_restarts, 2);
  EXPECT_TRUE(read({}).standalone);
  EXPECT_EQ(read({{"nproc-per-node", "4"}}).nproc_per_node, 4) << "a flag wins";
  const test::ScopedEnv off("PET_STANDALONE", "0"), bad("PET_MAX_RESTARTS", "many");
  COHORT_EXPECT_THROW_WITH(read({}), UsageError, "PET_MAX_RESTARTS is 'many', expected a whole number");
  EXPECT_FALSE(read({{"max-restarts", "0"}}).standalone);
  const test::ScopedEnv module("PET_MODULE", "1");
  COHORT_EXPECT_THROW_WITH(read({{"max-restarts", "0"}}), UsageError, "PET_MODULE is not available");
}

TEST(RunOptionsTest, AChangingNumberOfNodesMeetsAtTheEndpoint) {
  const RunOptions options = read({{"nnodes", "2:4"},
                                   {"rdzv-endpoint", "localhost"},
                                   {"rdzv-conf", "join_timeout=7,last_call_timeout=0.5,is_host=True"},
                                   {"spares", "1"},
                                   {"silence", "250"},
                                   {"notice-file", "/tmp/notice"}});
  EXPECT_EQ(options.rendezvous.backend, RendezvousBackend::kEmbedded);
  EXPECT_EQ(options.rendezvous.min_nodes, 2);
  EXPECT_EQ(options.nnodes, 4);
  EXPECT_EQ(options.rendezvous.num_spares, 1);
  EXPECT_EQ(options.rendezvous.endpoint, "localhost:29400");
  EXPECT_EQ(options.rendezvous_timeout, milliseconds(7'000));
  EXPECT_EQ(options.rendezvous.last_call_timeout, milliseconds(500));
  EXPECT_EQ(options.rendezvous.silence, milliseconds(250));
  EXPECT_EQ(options.rendezvous.is_host, true);
  EXPECT_EQ(options.rendezvous.notice_file, "/tmp/notice");
  EXPECT_FALSE(options.rendezvous.is_elastic);
  const RunOptions plain = read({{"nnodes", "1:2"}, {"rdzv-endpoint", "[::1]:77"}});
  EXPECT_EQ(plain.rendezvous.endpoint, "[::1]:77");
  EXPECT_EQ(plain.rendezvous.last_call_timeout, milliseconds(0));
  EXPECT_EQ(plain.rendezvous.silence, milliseconds(500));
  EXPECT_EQ(plain.rendezvous.is_host, std::nullopt);
  EXPECT_EQ(read({{"nnodes", "1:2"}, {"rdzv-endpoint", "[::1]"}, {"rdzv-conf", "keep_alive_interval=0.5"}})
                .rendezvous.silence,
            milliseconds(1'500));
}

TEST(RunOptionsTest, ABackendIsChosenByNameOrByWhatNeedsIt) {
  const auto backend = [](Values given) {
    given.emplace("rdzv-endpoint", "127.0.0.1:1");
    return read(given).rendezvous.backend;
  };
  EXPECT_EQ(backend({{"nnodes", "2"}}), RendezvousBackend::kStatic);
  EXPECT_EQ(backend({{"nnodes", "2:2"}}), RendezvousBackend::kStatic);
  EXPECT_EQ(backend({{"nnodes", "1:2"}}), RendezvousBackend::kEmbedded);
  EXPECT_EQ(backend({{"spares", "1"}}), RendezvousBackend::kEmbedded);
  EXPECT_EQ(backend({{"elastic", "1"}}), RendezvousBackend::kEmbedded);
  for (const char* name : {"c10d", "embedded"}) {
    EXPECT_EQ(backend({{"nnodes", "2"}, {"rdzv-backend", name}}), RendezvousBackend::kEmbedded) << name;
  }
  EXPECT_EQ(backend({{"nnodes", "2"}, {"rdzv-backend", "etcd"}, {"rdzv-id", "job"}, {"no-secret", "1"}}),
            RendezvousBackend::kEtcd);
  EXPECT_EQ(read({{"rdzv-backend", "etcd"}, {"rdzv-endpoint", "localhost"}, {"rdzv-id", "job"}})
                .rendezvous.endpoint,
            "localhost:2379");
  const RunOptions etcd =
      read({{"nnodes", "1:2"},
            {"rdzv-backend", "etcd"},
            {"secret-file", "key"},
            {"rdzv-id", "job"},
            {"rdzv-endpoint", "localhost,e2:77"},
            {"rdzv-conf",
             "protocol=https,ca_cert=ca,ssl_cert=cert,ssl_cert_key=private,etcd_prefix=/x/,user=me,"
             "password_file=word,read_timeout=2"}});
  EXPECT_EQ(etcd.rendezvous.endpoint, "e2:77") << "agents reach each other as they reach it";
  EXPECT_EQ(etcd.rendezvous.etcd.endpoints, (std::vector<std::string>{"localhost:2379", "e2:77"}));
  EXPECT_TRUE(etcd.rendezvous.etcd.is_tls);
  EXPECT_EQ(etcd.rendezvous.etcd.authorities, "ca");
  EXPECT_EQ(etcd.rendezvous.etcd.certificate, "cert");
  EXPECT_EQ(etcd.rendezvous.etcd.key, "private");
  EXPECT_EQ(etcd.rendezvous.etcd.prefix, "/x/");
  EXPECT_EQ(etcd.rendezvous.etcd.user, "me");
  EXPECT_EQ(etcd.rendezvous.etcd.password_file, "word");
  EXPECT_EQ(etcd.rendezvous.etcd.request_timeout, milliseconds(2'000));
  EXPECT_EQ(etcd.rendezvous.etcd.swap_timeout, milliseconds(6'000));
  // One node needs no address.
  EXPECT_EQ(read({{"rdzv-backend", "c10d"}}).rendezvous.endpoint, "127.0.0.1:0");
  const RunOptions alone = read({{"standalone", "1"},
                                 {"elastic", "1"},
                                 {"virtual-ranks", "8"},
                                 {"warm-ranks", "2"},
                                 {"rdzv-conf", "enter_timeout=20,progress_timeout=0"}});
  EXPECT_EQ(alone.rendezvous.endpoint, "127.0.0.1:0");
  EXPECT_TRUE(alone.rendezvous.is_elastic);
  EXPECT_EQ(alone.rendezvous.virtual_ranks, 8);
  EXPECT_EQ(alone.rendezvous.warm_ranks, 2);
  EXPECT_EQ(alone.rendezvous.enter_timeout, milliseconds(20'000));
  EXPECT_EQ(alone.rendezvous.progress_timeout, milliseconds(0));
}

// A proxy of etcd listens on each host, so its address says nothing of where the other nodes are.
TEST(RunOptionsTest, EtcdAtThisHostIsNotOneHost) {
  Values given{{"nnodes", "1:2"}, {"rdzv-backend", "etcd"}, {"rdzv-endpoint", "localhost"}};
  COHORT_EXPECT_THROW_WITH(read(given), UsageError, "nothing says which one this is. Try: --rdzv-id NAME");
  given.emplace("rdzv-id", "job");
  COHORT_EXPECT_THROW_WITH(read(given), UsageError, "or --no-secret, if all nodes are on this host");
  Values here = given, far = given;
  here.emplace("no-secret", "1");
  EXPECT_TRUE(read(here).is_on_one_host());
  far.emplace("secret-file", "key");
  EXPECT_FALSE(read(far).is_on_one_host());
  EXPECT_EQ(own_host(read(far)), base::host_name());
  EXPECT_EQ(listen_address(read(far)), "0.0.0.0:0");
  far.emplace("local-addr", "[fd00::7]");
  EXPECT_EQ(own_host(read(far)), "fd00::7");
  EXPECT_EQ(listen_address(read(far)), "[fd00::7]:0");
  for (const char* const bad : {"n1:77", "fd00::7", ""}) {
    far.insert_or_assign("local-addr", bad);
    COHORT_EXPECT_THROW_WITH(read(far), UsageError, "a host without a port");
  }
}

TEST(RunOptionsTest, WhatABackendHasNoUseForIsRejectedByName) {
  const auto rejected = [](Values given, const std::string& part) {
    COHORT_EXPECT_THROW_WITH(read(given), UsageError, part);
  };
  const auto dynamic = [&](const std::string& flag, const std::string& value, const std::string& part) {
    rejected({{"nnodes", "1:4"}, {"rdzv-endpoint", "127.0.0.1:1"}, {flag, value}}, part);
  };
  dynamic("node-rank", "1", "--node-rank is for --rdzv-backend static: ");
  dynamic("master-addr", "n1", "--master-addr is for --rdzv-backend static: ");
  dynamic("master-port", "1", "--master-port is for --rdzv-backend static: ");
  dynamic("rdzv-backend", "static",
          "--nnodes 1:4 needs members that may change, and --rdzv-backend is 'static'");
  dynamic("rdzv-backend", "etcd-v2", "Cohort speaks etcd's version 3. Try: --rdzv-backend etcd");
  dynamic("rdzv-backend", "redis", "--rdzv-backend is 'redis', expected static, c10d (embedded) or etcd");
  dynamic("rdzv-conf", "store_type=file", "--rdzv-conf store_type is not available. Try: leave it out");
  dynamic("rdzv-conf", "close_timeout=3", "--rdzv-conf close_timeout is not available. Try: leave it out");
  dynamic("rdzv-conf", "heartbeat_timeout=3",
          "--rdzv-conf heartbeat_timeout is not available. Try: --silence MS");
  dynamic("rdzv-conf", "read_timeout=3", "--rdzv-conf read_timeout is for --rdzv-backend etcd. Try: timeout");
  dynamic("rdzv-conf", "enter_timeout=3",
          "--rdzv-conf enter_timeout is for elastic programs. Try: --elastic beside it");
  dynamic("rdzv-conf", "progress_timeout=3", "--rdzv-conf progress_timeout is for elastic programs");
  dynamic("rdzv-conf", "is_host=maybe", "--rdzv-conf is_host is 'maybe', expected true or false");
  dynamic(
      "rdzv-conf", "jointimeout=1",
      "'jointimeout' is not known. Try: timeout, join_timeout, keep_alive_interval, keep_alive_max_attempt, "
      "last_call_timeout, enter_timeout, progress_timeout, is_host");
  dynamic("silence", "5", "--silence is '5', expected a whole number from 20");
  dynamic("virtual-ranks", "8", "--virtual-ranks is for elastic programs. Try: --elastic");
  dynamic("warm-ranks", "1", "--warm-ranks is for elastic programs. Try: --elastic");
  dynamic("standalone", "1", "--rdzv-endpoint names one");
  rejected({{"nnodes", "1:2"}},
           "there may be 2 nodes, and nothing says where their rendezvous is. Try: --rdzv-endpoint");
  rejected({{"nnodes", "2"}, {"rdzv-backend", "etcd"}}, "Try: --rdzv-endpoint HOST:PORT,... of etcd");
  rejected({{"rdzv-backend", "etcd"}, {"rdzv-endpoint", "e:x"}}, "an endpoint of etcd is \"e:x\"");
  rejected({{"rdzv-backend", "etcd"}, {"rdzv-endpoint", "e"}, {"rdzv-conf", "protocol=ftp"}},
           "expected http or https");
  dynamic("rdzv-conf", "ca_cert=x", "--rdzv-conf ca_cert is for --rdzv-backend etcd");
  rejected({{"nnodes", "1:2"}, {"standalone", "1"}}, "--standalone is for one node");
  rejected({{"nnodes", "1:2"}, {"rdzv-endpoint", "localhost:0"}}, "--rdzv-endpoint has port 0");
  rejected({{"nnodes", "1:2"}, {"rdzv-endpoint", "n1:x"}}, "--rdzv-endpoint is 'n1:x', expected HOST:PORT");
  rejected({{"nnodes", "1:2"}, {"rdzv-endpoint", "192.0.2.1:1"}}, "no secret by which they know each other");
  rejected({{"nnodes", "1:2"}, {"rdzv-endpoint", "192.0.2.1:1"}, {"no-secret", "1"}},
           "agents of several hosts that take part in a rendezvous prove who they are");
  rejected({{"nnodes", "1:2"},
            {"rdzv-endpoint", "localhost:1"},
            {"silence", "100"},
            {"rdzv-conf", "keep_alive_interval=1"}},
           "--silence and --rdzv-conf keep_alive_... both say when a node is gone");
  rejected({{"silence", "100"}}, "--silence is for members that may change. Try: --rdzv-backend c10d");
  rejected({{"notice-file", "x"}}, "--notice-file is for members that may change");
  rejected({{"rdzv-conf", "last_call_timeout=1"}},
           "--rdzv-conf last_call_timeout is for --rdzv-backend c10d or etcd. Try: timeout, join_timeout");
  RunOptions options;
  options.command = {"true"};
  options.rendezvous.is_elastic = true;
  COHORT_EXPECT_THROW_WITH(check(options), UsageError, "--elastic and --spares need members that may change");
}

TEST(RunOptionsTest, WhatCannotBeIsRejected) {
  const auto rejected = [](const Values& given, const std::string& part) {
    COHORT_EXPECT_THROW_WITH(read(given), UsageError, part);
  };
  rejected({{"nnodes", "two"}}, "--nnodes is 'two', expected a number of nodes");
  rejected({{"nnodes", "0"}}, "--nnodes is '0'");
  rejected({{"nnodes", "2"}, {"node-rank", "2"}, {"master-addr", "h"}}, "--node-rank is 2, expected 0 to 1");
  rejected({{"node-rank", "1"}}, "--node-rank is 1, expected 0 to 0");
  rejected({{"nnodes", "2"}}, "nothing says where node 0 is");
  rejected({{"master-port", "0"}}, "--master-port is '0', expected a whole number from 1 to 65535");
  rejected({{"rdzv-endpoint", "host"}}, "--rdzv-endpoint is 'host', expected HOST:PORT");
  rejected({{"rdzv-endpoint", "host:0"}}, "expected HOST:PORT");
  rejected({{"rdzv-endpoint", "host:1"}, {"master-port", "2"}}, "both say where node 0 is");
  rejected({{"rdzv-conf", "timeout"}}, "expected KEY=VALUE");
  rejected({{"rdzv-conf", "timeout=-1"}}, "--rdzv-conf timeout is '-1', expected seconds");
  rejected({{"rdzv-conf", "keep_alive_max_attempt=1"}}, "keep_alive_max_attempt");
  rejected({{"rdzv-conf", "tiemout=1"}},
           "'tiemout' is not known. Try: timeout, join_timeout, keep_alive_interval");
  rejected({{"standalone", "1"}, {"nnodes", "2"}}, "--standalone is for one node");
  rejected({{"standalone", "1"}, {"master-port", "29500"}},
           "--standalone takes a port of the system's choice");
  rejected({{"standalone", "1"}, {"rdzv-endpoint", "h:1"}},
           "--standalone takes a port of the system's choice");
  rejected({{"max-restarts", "-1"}}, "--max-restarts is '-1'");
  rejected({{"monitor-interval", "0"}}, "--monitor-interval is '0', expected seconds");
  rejected({{"shutdown-timeout", "nan"}}, "--shutdown-timeout is 'nan'");
  rejected({{"signals-to-handle", "SIGKILL"}}, "names of signals that can be handled");
  rejected({{"signals-to-handle", "SIGNONE"}}, "names of signals that can be handled");
  rejected({{"tee", "4"}}, "--tee is '4', expected 0 (none), 1 (stdout)");
  rejected({{"redirects", "0:1,0:2"}}, "local rank 0 stands there twice");
  rejected({{"redirects", "0:1,"}}, "--redirects is '0:1,'");
  rejected({{"redirects", "1:3"}}, "--redirects names local rank 1, and the highest is 0");
  rejected({{"local-ranks-filter", "0,x"}}, "--local-ranks-filter is '0,x'");
  rejected({{"local-ranks-filter", "5"}}, "--local-ranks-filter names local rank 5");
  rejected({{"prefix", "maybe"}}, "--prefix is 'maybe', expected auto, on or off");
  rejected({{"bind-to", "socket"}}, "--bind-to is 'socket', expected cores or none");
  COHORT_EXPECT_THROW_WITH(read_run_flags({}, {}), UsageError, "no program was given");
}

// Of several hosts each proves who it is, unless one says that it need not.
TEST(RunOptionsTest, NodesOnSeveralHostsHaveASecretOrSayThatTheyHaveNone) {
  const test::ScopedEnv none("COHORT_SECRET_FILE", std::nullopt);
  const std::map<std::string, std::string> hosts{{"nnodes", "2"}, {"master-addr", "n1"}};
  const auto with = [&](std::map<std::string, std::string> more) {
    more.insert(hosts.begin(), hosts.end());
    return read(more);
  };
  COHORT_EXPECT_THROW_WITH(with({}), UsageError,
                           "no secret by which they know each other. Try: --secret-file FILE");
  EXPECT_EQ(with({{"secret-file", "key"}}).secret_file, "key");
  EXPECT_TRUE(with({{"no-secret", "1"}}).no_secret);
  COHORT_EXPECT_THROW_WITH(with({{"no-secret", "1"}, {"secret-file", "key"}}), UsageError,
                           "exclude each other");
  EXPECT_FALSE(with({{"no-secret", "1"}}).is_on_one_host());
  for (const char* loopback : {"127.0.0.1", "localhost", "::1", "[::1]"}) {
    EXPECT_TRUE(read({{"nnodes", "2"}, {"master-addr", loopback}}).is_on_one_host());
  }
  EXPECT_TRUE(read({}).is_on_one_host());
  EXPECT_FALSE(read({{"master-addr", "n1"}}).is_on_one_host());
  const test::ScopedEnv file("COHORT_SECRET_FILE", "from/environment");
  EXPECT_EQ(with({}).secret_file, "from/environment");
  EXPECT_EQ(with({{"secret-file", "key"}}).secret_file, "key");
  EXPECT_EQ(with({{"no-secret", "1"}}).secret_file, "");
}

}  // namespace
}  // namespace cohort::launch
