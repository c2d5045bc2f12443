#include "cohort/launch/run_options.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
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

TEST(RunOptionsTest, WhatComesWithElasticityIsRejectedByName) {
  COHORT_EXPECT_THROW_WITH(read({{"nnodes", "1:4"}}), UsageError,
                           "a number of nodes that changes is not available yet. Try: --nnodes 4");
  for (const char* backend : {"c10d", "etcd", "etcd-v2"}) {
    COHORT_EXPECT_THROW_WITH(read({{"rdzv-backend", backend}}), UsageError,
                             "only static is available yet. Try: --nnodes");
  }
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
  rejected({{"rdzv-conf", "tiemout=1"}}, "'tiemout' is not known. Try: timeout, keep_alive_interval");
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
