// A flag comes from the command line, or else from torchrun's PET_ variables. Its value keeps the name that
// the user gave it by, and errors use that name. read_run_flags() turns texts into types. check() then tests
// what options mean together, and run_job() asks it again for options that a program has set itself. Always:
// options that have passed check() need no tests later on.
#include "cohort/launch/read_options.h"

#include <signal.h>
#include <string.h>

#include <algorithm>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/launch/internal/flags/flag_values.h"
#include "cohort/launch/internal/flags/rendezvous_flags.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;

int read_nproc(const FlagValue& given, const std::function<int()>& num_gpus) {
  if (given.text == "cpu") return base::usable_cores();
  if (given.text == "auto") {
    const int gpus = num_gpus();
    return gpus > 0 ? gpus : base::usable_cores();
  }
  if (given.text == "gpu") {
    const int gpus = num_gpus();
    if (gpus == 0)
      reject_options(given.name + " is 'gpu', and no GPU can be used here",
                     "cohort doctor; or cpu, auto, a number");
    return gpus;
  }
  int value = 0;
  if (!read_number(given.text, value) || value < 1 || value > kMaxLocalRanks) {
    given.reject(concat("auto, cpu, gpu or a number from 1 to ", kMaxLocalRanks));
  }
  return value;
}

int read_signal(const FlagValue& given, const std::string& name) {
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

void read_output(const FlagValues& flags, RunOptions& options) {
  if (const auto given = flags.get("log-dir")) options.log_dir = given->text;
  if (const auto given = flags.get("redirects")) {
    options.redirects = StreamChoice::parse(given->text, given->name);
  }
  if (const auto given = flags.get("tee")) options.tee = StreamChoice::parse(given->text, given->name);
  if (const auto given = flags.get("local-ranks-filter")) {
    for (const std::string& part : split_text(given->text, ',')) {
      int rank = 0;
      if (!read_number(part, rank) || rank < 0) given->reject("local ranks with commas between: 0,2");
      options.local_ranks_filter.push_back(rank);
    }
  }
  if (const auto given = flags.get("prefix")) {
    constexpr base::Choice<Prefix> kPrefixes[] = {
        {"auto", Prefix::kAuto}, {"on", Prefix::kOn}, {"off", Prefix::kOff}};
    options.prefix = given->choose(kPrefixes);
  }
}

}  // namespace

// Messages name flags, also for a program that has set the fields: the documentation lists flags.
void check(const RunOptions& options) {
  const auto in_range = [](const char* flag, int value, int low, int high) {
    if (value < low || value > high) {
      reject_options(concat(flag, " is ", value, ", expected ", low, " to ", high));
    }
  };
  if (options.command.empty() || options.command.front().empty()) {
    reject_options("no program was given", "cohort run --nproc-per-node 2 -- PROGRAM ARGUMENTS");
  }
  in_range("--nnodes", options.nnodes, 1, kMaxNodes);
  in_range("--nproc-per-node", options.nproc_per_node, 1, kMaxLocalRanks);
  in_range("--node-rank", options.node_rank, 0, options.nnodes - 1);
  in_range("--max-restarts", options.max_restarts, 0, kUnlimitedRestarts);
  in_range("keep_alive_max_attempt", options.keep_alive_max_attempt, 2, 1'000'000);
  const auto positive = [](const char* flag, milliseconds value) {
    if (value.count() <= 0) reject_options(concat(flag, " is ", value.count(), " ms, expected more than 0"));
  };
  positive("--monitor-interval", options.monitor_interval);
  positive("--rdzv-conf timeout", options.rendezvous_timeout);
  positive("keep_alive_interval", options.keep_alive_interval);
  if (options.shutdown_timeout.count() < 0) {
    reject_options(
        concat("--shutdown-timeout is ", options.shutdown_timeout.count(), " ms, expected at least 0"));
  }
  check_rendezvous(options);
  // A rank that is not there would be a typing error that redirects or shows nothing.
  const int highest = options.nproc_per_node - 1;
  const auto local_rank = [&](const char* flag, int rank) {
    if (rank > highest)
      reject_options(concat(flag, " names local rank ", rank, ", and the highest is ", highest));
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
  const FlagValues flags(given);
  RunOptions options;
  options.command = std::move(command);
  read_rendezvous(flags, options);
  read_output(flags, options);
  if (const auto value = flags.get("nproc-per-node")) options.nproc_per_node = read_nproc(*value, num_gpus);
  if (const auto value = flags.get("role")) options.role = value->text;
  if (options.rendezvous.is_elastic) options.max_restarts = kUnlimitedRestarts;
  if (const auto value = flags.get("max-restarts"))
    options.max_restarts = value->integer(0, kUnlimitedRestarts);
  if (const auto value = flags.get("monitor-interval")) options.monitor_interval = value->seconds(0.001);
  if (const auto value = flags.get("shutdown-timeout")) options.shutdown_timeout = value->seconds(0);
  if (const auto value = flags.get("signals-to-handle")) {
    options.signals_to_handle.clear();
    for (const std::string& name : split_text(value->text, ',')) {
      options.signals_to_handle.push_back(read_signal(*value, name));
    }
  }
  if (const auto value = flags.get("bind-to")) {
    constexpr base::Choice<BindTo> kBindings[] = {{"cores", BindTo::kCores}, {"none", BindTo::kNone}};
    options.bind_to = value->choose(kBindings);
  }
  check(options);
  return options;
}

}  // namespace cohort::launch
