// Launchers are tried in a fixed order, and the first whose variables are there decides: torchrun, Slurm,
// Open MPI. RANK without WORLD_SIZE, or the reverse, is an error: the process is not taken to be alone. With
// Slurm, and with Open MPI on one host, ranks hash the job's id to a port, so all find the same port without
// asking. Always: MASTER_ADDR and MASTER_PORT, where the user has set them, win over what a launcher implies.
#include "cohort/comm/job.h"

#include <charconv>
#include <functional>
#include <optional>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort::comm {
namespace {

constexpr int kMaxRanks = 1 << 20;
constexpr std::size_t kMaxHosts = 1'000'000;

[[noreturn]] void fail(const std::string& what, const std::string& hint = "") {
  throw RendezvousError("comm.job", what, hint);
}

std::optional<int> number(const std::string& name, std::int64_t low, std::int64_t high) {
  try {
    if (const auto value = base::env_int(name, low, high)) return static_cast<int>(*value);
  } catch (const ConfigError& error) {
    fail(error.what());
  }
  return std::nullopt;
}

int required(const std::string& name, std::int64_t low, std::int64_t high, const std::string& beside) {
  const auto value = number(name, low, high);
  if (!value) fail(base::concat(beside, " is set but ", name, " is not"), base::concat("set ", name));
  return *value;
}

// Host and port that the user gave, which win over what a launcher implies.
void read_master(Job& job) {
  if (const auto host = base::env_string("MASTER_ADDR")) job.master_host = *host;
  if (const auto port = number("MASTER_PORT", 1, 65535)) job.master_port = static_cast<std::uint16_t>(*port);
}

// The same port on every rank of a job, and another for the next job: above the well-known ones and below
// those that the system hands out (32768).
std::uint16_t port_of(const std::string& job_id) {
  std::uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : job_id) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return static_cast<std::uint16_t>(20000 + hash % 12000);
}

void check(const Job& job) {
  const auto below = [](const char* what, int value, const char* whole, int limit) {
    if (value >= limit)
      fail(base::concat(what, " is ", value, ", expected 0 to ", limit - 1, " (", whole, ")"));
  };
  below("rank", job.rank, "world size", job.world_size);
  below("local rank", job.local_rank, "local world size", job.local_world_size);
  if (job.local_world_size > job.world_size) {
    fail(base::concat("local world size is ", job.local_world_size, ", and the world size only ",
                      job.world_size));
  }
}

std::optional<Job> torchrun() {
  const auto rank = number("RANK", 0, kMaxRanks);
  const auto world = number("WORLD_SIZE", 1, kMaxRanks);
  if (!rank && !world) return std::nullopt;
  Job job;
  job.launcher = Launcher::kTorchrun;
  job.rank = rank ? *rank : required("RANK", 0, kMaxRanks, "WORLD_SIZE");
  job.world_size = world ? *world : required("WORLD_SIZE", 1, kMaxRanks, "RANK");
  job.local_rank = number("LOCAL_RANK", 0, kMaxRanks).value_or(job.rank);
  const auto local = number("LOCAL_WORLD_SIZE", 1, kMaxRanks);
  job.local_world_size = local.value_or(job.world_size);
  // Without LOCAL_WORLD_SIZE nothing is known of hosts: an empty optional equals no number.
  job.is_on_one_host = local == job.world_size;
  job.restart_count = number("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks).value_or(0);
  job.agent_store = base::env_string("TORCHELASTIC_USE_AGENT_STORE") == "True";
  read_master(job);
  return job;
}

std::optional<Job> slurm() {
  const auto rank = number("SLURM_PROCID", 0, kMaxRanks);
  const auto world = number("SLURM_NTASKS", 1, kMaxRanks);
  // sbatch and salloc set SLURM_NTASKS for the shell of the allocation too; a step has an id.
  const auto step = base::env_string("SLURM_STEP_ID");
  // salloc's shell may be a step of its own (use_interactive_step), with the allocation's number of tasks:
  // what is started there by hand is alone.
  constexpr const char* kInteractiveStep = "4294967290";
  if (!rank || !step || *step == kInteractiveStep) return std::nullopt;
  Job job;
  job.launcher = Launcher::kSlurm;
  job.rank = *rank;
  job.world_size = world ? *world : required("SLURM_NTASKS", 1, kMaxRanks, "SLURM_PROCID");
  job.local_rank = required("SLURM_LOCALID", 0, kMaxRanks, "SLURM_PROCID");
  job.local_world_size = job.world_size;
  auto tasks = base::env_string("SLURM_STEP_TASKS_PER_NODE");
  if (!tasks) tasks = base::env_string("SLURM_TASKS_PER_NODE");
  if (tasks) {
    const std::vector<int> counts = expand_counts(*tasks);
    const auto node = static_cast<std::size_t>(number("SLURM_NODEID", 0, kMaxRanks).value_or(0));
    if (node >= counts.size()) {
      fail(base::concat("SLURM_NODEID is ", node, ", and '", *tasks, "' names ", counts.size(), " node(s)"));
    }
    job.local_world_size = counts[node];
    job.is_on_one_host = counts.size() == 1 && counts[0] == job.world_size;
  }
  auto nodes = base::env_string("SLURM_STEP_NODELIST");
  if (!nodes) nodes = base::env_string("SLURM_JOB_NODELIST");
  // As a rule Slurm puts task 0 on the first node of the list.
  if (nodes) job.master_host = expand_hostlist(*nodes).front();
  if (job.is_on_one_host) job.master_host = "127.0.0.1";
  job.master_port = port_of(base::env_string("SLURM_JOB_ID").value_or("") + "." +
                            base::env_string("SLURM_STEP_ID").value_or(""));
  read_master(job);
  return job;
}

std::optional<Job> open_mpi() {
  const auto rank = number("OMPI_COMM_WORLD_RANK", 0, kMaxRanks);
  if (!rank) return std::nullopt;
  Job job;
  job.launcher = Launcher::kOpenMpi;
  const std::string beside = "OMPI_COMM_WORLD_RANK";
  job.rank = *rank;
  job.world_size = required("OMPI_COMM_WORLD_SIZE", 1, kMaxRanks, beside);
  job.local_rank = required("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxRanks, beside);
  job.local_world_size = required("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxRanks, beside);
  job.is_on_one_host = job.local_world_size == job.world_size;
  // With several hosts, Open MPI does not say where rank 0 is: MASTER_ADDR has to.
  if (job.is_on_one_host) {
    job.master_host = "127.0.0.1";
    auto id = base::env_string("PMIX_NAMESPACE");
    if (!id) id = base::env_string("OMPI_MCA_ess_base_jobid");
    if (id) job.master_port = port_of(*id);
  }
  read_master(job);
  return job;
}

}  // namespace

std::string_view to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kSlurm:
      return "Slurm";
    case Launcher::kOpenMpi:
      return "Open MPI";
    case Launcher::kNone:
      break;
  }
  return "no launcher";
}

Job job_from_environment() {
  std::optional<Job> job = torchrun();
  if (!job) job = slurm();
  if (!job) job = open_mpi();
  if (!job) return Job{};
  check(*job);
  return *job;
}

std::vector<std::string> expand_hostlist(std::string_view text) {
  const auto bad = [&](const std::string& why) {
    fail(base::concat("'", text, "' is no list of hosts: ", why), "MASTER_ADDR=HOST of rank 0");
  };
  std::vector<std::string> hosts;
  const auto add = [&](std::string host) {
    if (host.empty()) bad("a name is empty");
    if (hosts.size() >= kMaxHosts) bad("more than a million hosts");
    hosts.push_back(std::move(host));
  };
  // One name, whose brackets are expanded from the left: a[1-2]b[3,4] is a1b3 a1b4 a2b3 a2b4.
  const std::function<void(const std::string&, std::string_view)> expand = [&](const std::string& before,
                                                                               std::string_view rest) {
    const std::size_t open = rest.find('[');
    if (open == std::string_view::npos) return add(before + std::string(rest));
    const std::size_t close = rest.find(']', open);
    if (close == std::string_view::npos) bad("a bracket is not closed");
    const std::string prefix = before + std::string(rest.substr(0, open));
    std::string_view ranges = rest.substr(open + 1, close - open - 1);
    while (true) {
      const std::string_view range = ranges.substr(0, ranges.find(','));
      const std::string_view low = range.substr(0, range.find('-'));
      const std::string_view high = low.size() == range.size() ? low : range.substr(low.size() + 1);
      std::uint32_t first = 0, last = 0;
      const auto parse = [](std::string_view digits, std::uint32_t& out) {
        const auto end = digits.data() + digits.size();
        return !digits.empty() && std::from_chars(digits.data(), end, out).ptr == end;
      };
      // Before the loop: a range such as 0-4000000000 must not fill the memory.
      if (!parse(low, first) || !parse(high, last) || last < first || last - first >= kMaxHosts) {
        bad(base::concat("'", range, "' is no range of numbers"));
      }
      for (std::uint32_t i = first; i <= last; ++i) {
        std::string digits = std::to_string(i);
        // node[08-11] is node08, node09, node10: the first number gives the width.
        if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
        expand(prefix + digits, rest.substr(close + 1));
      }
      if (range.size() == ranges.size()) return;
      ranges.remove_prefix(range.size() + 1);
    }
  };
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && text[i] == '[') ++depth;
    if (i < text.size() && text[i] == ']') --depth;
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      expand("", text.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  return hosts;
}

std::vector<int> expand_counts(std::string_view text) {
  std::vector<int> counts;
  const auto bad = [&] { fail(base::concat("'", text, "' is no list of tasks per node, such as 2(x3),1")); };
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto integer = [&](int& out) {
    const auto [next, error] = std::from_chars(at, end, out);
    if (error != std::errc() || out < 1 || out > kMaxRanks) bad();
    at = next;
  };
  const auto take = [&](std::string_view expected) {
    if (!std::string_view(at, static_cast<std::size_t>(end - at)).starts_with(expected)) return false;
    at += expected.size();
    return true;
  };
  do {
    int count = 0, times = 1;
    integer(count);
    if (take("(x")) {
      integer(times);
      if (!take(")")) bad();
    }
    if (counts.size() + static_cast<std::size_t>(times) > kMaxHosts) bad();
    counts.insert(counts.end(), static_cast<std::size_t>(times), count);
  } while (take(","));
  if (at != end) bad();
  return counts;
}

}  // namespace cohort::comm
