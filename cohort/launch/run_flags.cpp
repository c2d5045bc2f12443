// The flags of `cohort run` in one table, for whoever reads them or shows help. Names and meanings are
// torchrun's, so its users need not learn others. A flag of torchrun's that Cohort does not have stands here
// too, with what to do instead, so that it is rejected by name. Always: a flag with an empty `value` is a
// switch.
#include "cohort/launch/run_flags.h"

#include <algorithm>
#include <vector>

namespace cohort::launch {
namespace {

// A flag of torchrun's that Cohort does not have. `value` still says whether a word belongs to it, so that
// the words after it are read as torchrun would.
RunFlag rejected(std::string name, std::string value, std::string instead, char letter = 0) {
  return {std::move(name), letter, std::move(value), "", std::move(instead)};
}

}  // namespace

std::span<const RunFlag> run_flags() {
  static const std::vector<RunFlag> flags = {
      {"nproc-per-node", 0, "N",
       "Ranks on this node: a number, cpu (one per core), gpu (one per GPU), auto (GPUs, "
       "else cores). Default: 1",
       ""},
      {"nnodes", 0, "N|MIN:MAX",
       "Nodes of the job, or how many it has at least and at most, as nodes come and go. Default: 1", ""},
      {"node-rank", 0, "K", "Which node this is, from 0. Default: 0", ""},
      {"master-addr", 0, "HOST",
       "Address of node 0: a name, an IPv4 or an IPv6 address. The same on all nodes", ""},
      {"master-port", 0, "PORT", "Its port. Default: 29500, and with one node one that the system chooses",
       ""},
      {"standalone", 0, "", "One node, on a port that the system chooses", ""},
      {"rdzv-endpoint", 0, "HOST:PORT",
       "static: --master-addr and --master-port in one. c10d: the rendezvous; the agent of that host keeps "
       "the "
       "record, so that host must live. etcd: HOST:PORT,... of etcd",
       ""},
      {"rdzv-backend", 0, "static|c10d|etcd",
       "The rendezvous: static, a fixed number at node 0; c10d (or embedded), at the endpoint; etcd. "
       "Default: "
       "static for --nnodes N, c10d for MIN:MAX",
       ""},
      {"rdzv-id", 0, "ID", "The job's name; nodes with another one are turned away", ""},
      {"rdzv-conf", 0, "KEY=VALUE,...",
       "timeout, join_timeout: seconds for nodes to come (600). keep_alive_interval, keep_alive_max_attempt: "
       "a node "
       "without a sign for so many seconds (5), so often (3), is gone. c10d and etcd: last_call_timeout: "
       "seconds in "
       "which more than MIN nodes are waited for (0). c10d: is_host: this agent is the one at the endpoint",
       ""},
      {"spares", 0, "N", "Nodes beyond MAX that wait for the place of one that goes. Default: 0", ""},
      {"silence", 0, "MS",
       "c10d, etcd: a node that two others have not heard for so many milliseconds is gone. Default: 500",
       ""},
      {"local-addr", 0, "HOST",
       "c10d, etcd: by which name or address other nodes reach this one. Default: the one by which it "
       "reaches the "
       "endpoint",
       ""},
      {"notice-file", 0, "PATH", "c10d, etcd: this node leaves once the file is there, as after SIGTERM", ""},
      {"elastic", 0, "", "The program is elastic: ranks that live on are not started again", ""},
      {"virtual-ranks", 0, "V",
       "Virtual ranks of an elastic program, the same on all nodes. Default: MAX times --nproc-per-node", ""},
      {"warm-ranks", 0, "K",
       "Processes of an elastic program that wait, started, for the place of one that dies. Default: 0", ""},
      {"secret-file", 0, "FILE",
       "The job's secret, the same on all nodes, by which agents know each other; ranks get it too. Default: "
       "COHORT_SECRET_FILE, and with one node one that is made up",
       ""},
      {"no-secret", 0, "",
       "Several hosts without a secret: whoever reaches node 0's port is believed, and can end the job", ""},
      {"max-restarts", 0, "N",
       "How often ranks may fail, after which all are started again. Default: 0; with --elastic without a "
       "limit, but "
       "3 times in a row in one place without a step between",
       ""},
      {"monitor-interval", 0, "SECONDS",
       "How often nodes look at each other; c10d, etcd: how often for the notice file. Default: 0.1", ""},
      {"shutdown-timeout", 0, "SECONDS", "From the signal that ends ranks to SIGKILL. Default: 30", ""},
      {"signals-to-handle", 0, "NAMES",
       "Signals that end the job, passed on to each rank once. Default: "
       "SIGTERM,SIGINT,SIGHUP,SIGQUIT. SIGUSR1 and SIGUSR2 are passed on in any case, and end nothing",
       ""},
      {"log-dir", 0, "FOLDER", "Where files of --redirects and --tee and errors of ranks are kept", ""},
      {"redirects", 'r', "STREAMS",
       "Write into files instead: 0 none, 1 stdout, 2 stderr, 3 both; or for each local "
       "rank: 0:3,1:2",
       ""},
      {"tee", 't', "STREAMS", "Write into files as well as here; as --redirects", ""},
      {"local-ranks-filter", 0, "RANKS", "Show the output of these local ranks only: 0,2. Files hold all",
       ""},
      {"prefix", 0, "auto|on|off",
       "\"[rank K] \" before each line. Default: when there is more than one rank", ""},
      {"role", 0, "NAME", "ROLE_NAME of the ranks. Default: default", ""},
      {"bind-to", 0, "cores|none", "Give each rank cores of its own. Default: cores", ""},
      rejected("module", "", "the program itself: cohort run ... -- python -m MODULE", 'm'),
      rejected("no-python", "", "leave it out: the program is always executed as it is given"),
      rejected("run-path", "", "the program itself: cohort run ... -- python SCRIPT"),
      rejected("start-method", "METHOD", "leave it out: ranks are always fresh processes"),
      rejected("event-log-handler", "NAME",
               "leave it out: there are no event handlers; --log-dir keeps what ranks print"),
      rejected("logs-specs", "NAME", "--log-dir, --redirects and --tee"),
      rejected("duplicate-stdout-filters", "TEXTS", "--tee 1 --log-dir FOLDER, and grep"),
      rejected("duplicate-stderr-filters", "TEXTS", "--tee 2 --log-dir FOLDER, and grep"),
      rejected("numa-binding", "MODE", "--bind-to cores, which keeps each rank to cores that lie together"),
      rejected("virtual-local-rank", "", "leave it out: a rank takes the GPU of its LOCAL_RANK"),
  };
  return flags;
}

const RunFlag* find_run_flag(const std::string& name) {
  const auto flags = run_flags();
  const auto at =
      std::find_if(flags.begin(), flags.end(), [&](const RunFlag& flag) { return flag.name == name; });
  return at == flags.end() ? nullptr : &*at;
}

}  // namespace cohort::launch
