// A flag comes from the command line, or else from torchrun's PET_ variables. Its value keeps the name that
// the user gave it by, and errors use that name. read_run_flags() turns texts into types. check() then tests
// what options mean together, and run_job() asks it again for options that a program has set itself. Always:
// options that have passed check() need no tests later on.
#include "cohort/launch/run_options.h"

#include <signal.h>
#include <string.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "cohort/base/cpu.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/launch/limits.h"
#include "cohort/launch/run_flags.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;

[[noreturn]] void reject(const std::string& what, const std::string& hint = "") {
  throw UsageError("launch.run", what, hint);
}

// The whole text must be the number: "2x" is a typing error.
template <typename T>
bool read_number(std::string_view text, T& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

// Keeps empty parts, which the reader of a part then rejects.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// A flag's value with the name that messages call it by: the flag, or the variable that it came from.
struct Given {
  std::string name;
  std::string text;

  [[noreturn]] void reject(const std::string& expected) const {
    launch::reject(concat(name, " is '", text, "', expected ", expected));
  }
  int integer(int low, int high) const {
    int value = 0;
    if (!read_number(text, value) || value < low || value > high) {
      reject(concat("a whole number from ", low, " to ", high));
    }
    return value;
  }
  milliseconds seconds(double low) const {
    double value = 0;
    // Not `value < low`: "nan" is read as a number, and compares with nothing.
    if (!read_number(text, value) || !(value >= low) || value > 1e6) {
      reject(concat("seconds, at least ", low));
    }
    return milliseconds(std::llround(value * 1000));
  }
};

class Flags {
 public:
  explicit Flags(const std::map<std::string, std::string>& given) : given_(given) {
    for (const RunFlag& flag : run_flags()) {
      // Before all else: a flag that cannot be had says more than what follows from its absence.
      const auto value = get(flag.name);
      if (value && !flag.instead.empty()) launch::reject(value->name + " is not available", flag.instead);
    }
  }

  std::optional<Given> get(const std::string& name) const {
    if (const auto at = given_.find(name); at != given_.end()) return Given{"--" + name, at->second};
    // torchrun's: PET_NNODES is --nnodes.
    std::string variable = "PET_" + name;
    std::transform(variable.begin(), variable.end(), variable.begin(),
                   [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
    const auto value = base::env_string(variable);
    if (!value) return std::nullopt;
    const RunFlag* flag = find_run_flag(name);
    // A switch: 0 is as if it were not given.
    if (flag->value.empty() && Given{variable, *value}.integer(0, 1) == 0) return std::nullopt;
    return Given{variable, *value};
  }

 private:
  const std::map<std::string, std::string>& given_;
};

// torchrun's MIN:MAX. Without elasticity both must be one number.
int read_nnodes(const Given& given) {
  const auto parts = split(given.text, ':');
  int low = 0, high = 0;
  if (parts.size() > 2 || !read_number(parts.front(), low) || !read_number(parts.back(), high) || low < 1) {
    given.reject("a number of nodes, such as 2");
  }
  if (low != high) {
    reject(concat(given.name, " is '", given.text, "': a number of nodes that changes is not available yet"),
           concat("--nnodes ", high, ", all of which come"));
  }
  return low;
}

int read_nproc(const Given& given, const std::function<int()>& num_gpus) {
  if (given.text == "cpu") return base::usable_cores();
  if (given.text == "auto") {
    const int gpus = num_gpus();
    return gpus > 0 ? gpus : base::usable_cores();
  }
  if (given.text == "gpu") {
    const int gpus = num_gpus();
    if (gpus == 0)
      reject(given.name + " is 'gpu', and no GPU can be used here", "cohort doctor; or cpu, auto, a number");
    return gpus;
  }
  int value = 0;
  if (!read_number(given.text, value) || value < 1 || value > kMaxLocalRanks) {
    given.reject(concat("auto, cpu, gpu or a number from 1 to ", kMaxLocalRanks));
  }
  return value;
}

std::uint16_t read_port(const Given& given) {
  return static_cast<std::uint16_t>(given.integer(1, 65535));
}

void read_endpoint(const Given& given, RunOptions& options) {
  // The last one, since an IPv6 address has colons of its own.
  const std::size_t colon = given.text.rfind(':');
  if (colon == std::string::npos || colon == 0) given.reject("HOST:PORT");
  const Given port{given.name, given.text.substr(colon + 1)};
  int number = 0;
  if (!read_number(port.text, number) || number < 1 || number > 65535) given.reject("HOST:PORT");
  options.master_addr = given.text.substr(0, colon);
  options.master_port = static_cast<std::uint16_t>(number);
}

int read_signal(const Given& given, const std::string& name) {
  const std::string shortened = name.starts_with("SIG") ? name.substr(3) : name;
  // Real-time signals have no names of their own.
  for (int number = 1; number < SIGRTMIN; ++number) {
    const char* known = ::sigabbrev_np(number);
    if (known == nullptr || shortened != known) continue;
    if (number == SIGKILL || number == SIGSTOP) break;
    return number;
  }
  given.reject("names of signals that can be handled, with commas between: SIGTERM,SIGINT");
}

struct RdzvKey {
  std::string_view name;
  void (*read)(const Given& value, RunOptions& options);
};

void read_rendezvous_timeout(const Given& value, RunOptions& options) {
  options.rendezvous_timeout = value.seconds(0.001);
}

void read_keep_alive_interval(const Given& value, RunOptions& options) {
  options.keep_alive_interval = value.seconds(0.001);
}

// With 1, a single keep-alive that comes late would end the job.
void read_keep_alive_max_attempt(const Given& value, RunOptions& options) {
  options.keep_alive_max_attempt = value.integer(2, 1'000'000);
}

// The keys of torchrun's --rdzv-conf that mean something without elasticity. torchrun's static rendezvous
// calls the time limit timeout, and its dynamic rendezvous calls it join_timeout.
constexpr RdzvKey kRdzvKeys[] = {{"timeout", read_rendezvous_timeout},
                                 {"join_timeout", read_rendezvous_timeout},
                                 {"keep_alive_interval", read_keep_alive_interval},
                                 {"keep_alive_max_attempt", read_keep_alive_max_attempt}};

// Reads key=value,key=value.
void read_rdzv_conf(const Given& given, RunOptions& options) {
  for (const std::string& part : split(given.text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    if (equals == std::string::npos) given.reject("KEY=VALUE,KEY=VALUE");
    const Given value{given.name + " " + key, part.substr(equals + 1)};
    const auto* const known = std::ranges::find(kRdzvKeys, key, &RdzvKey::name);
    if (known == std::end(kRdzvKeys)) {
      reject(concat(given.name, ": '", key, "' is not known"),
             "timeout, keep_alive_interval, keep_alive_max_attempt");
    }
    known->read(value, options);
  }
}

// Two flags that contradict each other are an error, because one of them would be ignored silently.
void read_where(const Flags& flags, RunOptions& options) {
  if (const auto given = flags.get("nnodes")) options.nnodes = read_nnodes(*given);
  if (const auto given = flags.get("node-rank")) options.node_rank = given->integer(0, kMaxNodes - 1);
  if (const auto given = flags.get("rdzv-backend"); given && given->text != "static") {
    reject(concat(given->name, " is '", given->text, "': only static is available yet"),
           "--nnodes N --node-rank K --master-addr HOST --master-port PORT, or --standalone on one node");
  }
  if (const auto given = flags.get("rdzv-endpoint")) {
    for (const char* other : {"master-addr", "master-port"}) {
      if (const auto beside = flags.get(other)) {
        reject(concat(given->name, " and ", beside->name, " both say where node 0 is"), "one of them");
      }
    }
    read_endpoint(*given, options);
  }
  if (const auto given = flags.get("master-addr")) options.master_addr = given->text;
  if (const auto given = flags.get("master-port")) options.master_port = read_port(*given);
  if (const auto given = flags.get("rdzv-id")) options.run_id = given->text;
  if (const auto given = flags.get("rdzv-conf")) read_rdzv_conf(*given, options);
  if (const auto given = flags.get("secret-file")) {
    options.secret_file = given->text;
  } else if (const auto path = base::env_string("COHORT_SECRET_FILE")) {
    options.secret_file = *path;
  }
  if (const auto given = flags.get("no-secret")) {
    options.no_secret = true;
    if (const auto beside = flags.get("secret-file")) {
      reject(concat(given->name, " and ", beside->name, " exclude each other"), "one of them");
    }
    // COHORT_SECRET_FILE may be set for all jobs of a user: the flag is stronger.
    options.secret_file.clear();
  }
  if (const auto given = flags.get("standalone")) {
    options.standalone = true;
    if (const auto beside = flags.get("rdzv-endpoint")) {
      reject(given->name + " takes a port of the system's choice, and " + beside->name + " names one",
             "one of them");
    }
  }
}

void read_output(const Flags& flags, RunOptions& options) {
  if (const auto given = flags.get("log-dir")) options.log_dir = given->text;
  if (const auto given = flags.get("redirects")) {
    options.redirects = StreamChoice::parse(given->text, given->name);
  }
  if (const auto given = flags.get("tee")) options.tee = StreamChoice::parse(given->text, given->name);
  if (const auto given = flags.get("local-ranks-filter")) {
    for (const std::string& part : split(given->text, ',')) {
      int rank = 0;
      if (!read_number(part, rank) || rank < 0) given->reject("local ranks with commas between: 0,2");
      options.local_ranks_filter.push_back(rank);
    }
  }
  if (const auto given = flags.get("prefix")) {
    if (given->text != "auto" && given->text != "on" && given->text != "off")
      given->reject("auto, on or off");
    options.prefix = given->text == "on" ? Prefix::kOn : given->text == "off" ? Prefix::kOff : Prefix::kAuto;
  }
}

}  // namespace

StreamChoice StreamChoice::parse(std::string_view text, const std::string& flag) {
  StreamChoice choice;
  const Given given{flag, std::string(text)};
  const auto bad = [&] {
    given.reject("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one for each local rank: 0:3,1:2");
  };
  const auto bits_of = [&](const std::string& part) {
    if (part.size() != 1 || part[0] < '0' || part[0] > '3') bad();
    return part[0] - '0';
  };
  if (text.find(':') == std::string_view::npos) {
    choice.all_ = bits_of(given.text);
    return choice;
  }
  for (const std::string& part : split(given.text, ',')) {
    const auto halves = split(part, ':');
    int rank = 0;
    if (halves.size() != 2 || !read_number(halves[0], rank) || rank < 0) bad();
    if (!choice.of_rank_.emplace(rank, bits_of(halves[1])).second) {
      reject(concat(flag, " is '", text, "': local rank ", rank, " stands there twice"));
    }
  }
  return choice;
}

int StreamChoice::bits(int local_rank) const {
  const auto at = of_rank_.find(local_rank);
  return at == of_rank_.end() ? all_ : at->second;
}

bool StreamChoice::any() const {
  return all_ != 0 ||
         std::any_of(of_rank_.begin(), of_rank_.end(), [](const auto& entry) { return entry.second != 0; });
}

std::vector<int> RunOptions::default_signals() {
  return {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
}

bool RunOptions::is_on_one_host() const {
  if (!master_addr) return nnodes == 1;
  return base::is_this_host(*master_addr);
}

// Messages name flags, also for a program that has set the fields: the documentation lists flags.
void check(const RunOptions& options) {
  const auto in_range = [](const char* flag, int value, int low, int high) {
    if (value < low || value > high) {
      reject(concat(flag, " is ", value, ", expected ", low, " to ", high));
    }
  };
  if (options.command.empty() || options.command.front().empty()) {
    reject("no program was given", "cohort run --nproc-per-node 2 -- PROGRAM ARGUMENTS");
  }
  in_range("--nnodes", options.nnodes, 1, kMaxNodes);
  in_range("--nproc-per-node", options.nproc_per_node, 1, kMaxLocalRanks);
  in_range("--node-rank", options.node_rank, 0, options.nnodes - 1);
  in_range("--max-restarts", options.max_restarts, 0, 1'000'000);
  in_range("keep_alive_max_attempt", options.keep_alive_max_attempt, 2, 1'000'000);
  const auto positive = [](const char* flag, milliseconds value) {
    if (value.count() <= 0) reject(concat(flag, " is ", value.count(), " ms, expected more than 0"));
  };
  positive("--monitor-interval", options.monitor_interval);
  positive("--rdzv-conf timeout", options.rendezvous_timeout);
  positive("keep_alive_interval", options.keep_alive_interval);
  if (options.shutdown_timeout.count() < 0) {
    reject(concat("--shutdown-timeout is ", options.shutdown_timeout.count(), " ms, expected at least 0"));
  }
  if (options.standalone && options.nnodes > 1) {
    reject(concat("--standalone is for one node, and --nnodes is ", options.nnodes), "one of them");
  }
  if (options.standalone && (options.master_addr || options.master_port)) {
    reject("--standalone takes a port of the system's choice, and --master-addr or --master-port names one",
           "one of them");
  }
  if (options.nnodes > 1 && !options.master_addr) {
    reject(concat("--nnodes is ", options.nnodes, ", and nothing says where node 0 is"),
           "--master-addr HOST --master-port PORT, the same on all nodes");
  }
  // Whoever reaches node 0's port would be believed.
  if (options.nnodes > 1 && !options.is_on_one_host() && options.secret_file.empty() && !options.no_secret) {
    reject("nodes on several hosts, and no secret by which they know each other",
           "--secret-file FILE, the same on all nodes (made by: (umask 077; head -c 32 /dev/urandom | base64 "
           "> FILE)); "
           "or --no-secret in a network of the job's own");
  }
  if (options.no_secret && !options.secret_file.empty()) reject("a secret, and --no-secret", "one of them");
  // A rank that is not there would be a typing error that redirects or shows nothing.
  const int highest = options.nproc_per_node - 1;
  const auto local_rank = [&](const char* flag, int rank) {
    if (rank > highest) reject(concat(flag, " names local rank ", rank, ", and the highest is ", highest));
  };
  local_rank("--redirects", options.redirects.highest_rank());
  local_rank("--tee", options.tee.highest_rank());
  for (const int rank : options.local_ranks_filter) local_rank("--local-ranks-filter", rank);
}

int read_nproc_per_node(const std::string& text, const std::function<int()>& num_gpus) {
  return read_nproc({"--nproc-per-node", text}, num_gpus);
}

RunOptions read_run_flags(const std::map<std::string, std::string>& given, std::vector<std::string> command,
                          const std::function<int()>& num_gpus) {
  const Flags flags(given);
  RunOptions options;
  options.command = std::move(command);
  read_where(flags, options);
  read_output(flags, options);
  if (const auto value = flags.get("nproc-per-node")) options.nproc_per_node = read_nproc(*value, num_gpus);
  if (const auto value = flags.get("role")) options.role = value->text;
  if (const auto value = flags.get("max-restarts")) options.max_restarts = value->integer(0, 1'000'000);
  if (const auto value = flags.get("monitor-interval")) options.monitor_interval = value->seconds(0.001);
  if (const auto value = flags.get("shutdown-timeout")) options.shutdown_timeout = value->seconds(0);
  if (const auto value = flags.get("signals-to-handle")) {
    options.signals_to_handle.clear();
    for (const std::string& name : split(value->text, ',')) {
      options.signals_to_handle.push_back(read_signal(*value, name));
    }
  }
  if (const auto value = flags.get("bind-to")) {
    if (value->text != "cores" && value->text != "none") value->reject("cores or none");
    options.bind_to = value->text == "cores" ? BindTo::kCores : BindTo::kNone;
  }
  check(options);
  return options;
}

}  // namespace cohort::launch
