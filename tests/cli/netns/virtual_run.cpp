#include "tests/cli/netns/virtual_run.h"

#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::test {
namespace {

using base::concat;

constexpr std::chrono::seconds kPatience(60);

bool comes_to_be(const std::function<bool()>& condition) {
  return base::poll_until(condition, base::Deadline(kPatience));
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

std::vector<std::pair<std::uint64_t, std::string>> read_steps(const std::filesystem::path& file) {
  std::vector<std::pair<std::uint64_t, std::string>> steps;
  std::ifstream stream(file);
  std::string hash;
  for (std::uint64_t number = 0; stream >> number >> hash;) steps.emplace_back(number, hash);
  return steps;
}

}  // namespace

VirtualRun::VirtualRun(const Options& options) : options_(options), hosts_(options.num_hosts, options.seed) {
  write_file(folder_ / "secret", "a secret of the tests");
  std::filesystem::permissions(folder_ / "secret", std::filesystem::perms::owner_read);
  std::filesystem::create_directories(folder_ / "points");
}

// Before the folder goes.
VirtualRun::~VirtualRun() {
  agents_.clear();
  ended_.clear();
}

std::vector<std::string> VirtualRun::command(int host) const {
  std::vector<std::string> words{"--elastic",
                                 concat("--nnodes=", options_.min_nodes, ":", options_.num_hosts),
                                 concat("--virtual-ranks=", options_.num_hosts + 1),
                                 "--rdzv-endpoint=" + options_.endpoint,
                                 "--rdzv-conf=" + options_.rdzv_conf,
                                 "--secret-file=" + (folder_ / "secret").string(),
                                 concat("--silence=", options_.silence_ms),
                                 "--max-restarts=100",
                                 "--bind-to=none",
                                 "--shutdown-timeout=20"};
  words.insert(words.end(), options_.flags.begin(), options_.flags.end());
  words.insert(words.end(), {"--", COHORT_MLP_PROGRAM, std::to_string(options_.num_steps),
                             std::to_string(options_.num_hosts + 1), std::to_string(host)});
  return words;
}

void VirtualRun::start(int host) {
  std::unique_ptr<Job>& agent = agents_[host];
  if (agent) {
    agent->wait();
    ended_.emplace_back(host, std::move(agent));
  }
  const ScopedEnv name("POINTS_HOST", std::to_string(host));
  std::vector<std::string> before;
  if (options_.has_agent_points) before.emplace_back(COHORT_POINTS_LAUNCHER);
  hosts_.enter(host, [&] { agent = std::make_unique<Job>(folder_.path(), command(host), before); });
}

void VirtualRun::fail_host(int host) {
  hosts_.isolate(host);
  agent(host).worker().kill();
  agent(host).wait();
}

VirtualRun::Generation VirtualRun::newest() const {
  struct Entered {
    std::size_t num_processes = 0;
    std::map<int, std::pair<int, pid_t>> ranks;  // host and process id by process
  };
  std::map<std::uint64_t, Entered> generations;
  for (const std::string& name : names_in(folder_ / "entered")) {
    std::istringstream words(name);
    std::uint64_t number = 0;
    std::size_t num_processes = 0;
    int process = 0, host = 0;
    pid_t pid = 0;
    words >> number >> process >> num_processes >> host >> pid;
    generations[number].num_processes = num_processes;
    generations[number].ranks[process] = {host, pid};
  }
  std::erase_if(generations,
                [](const auto& entry) { return entry.second.ranks.size() < entry.second.num_processes; });
  if (generations.empty()) return {};
  Generation newest{generations.rbegin()->first};
  for (const auto& [process, rank] : generations.rbegin()->second.ranks)
    newest.ranks[rank.first] = rank.second;
  newest.first_host = generations.rbegin()->second.ranks.begin()->second.first;
  return newest;
}

std::int64_t VirtualRun::time_of_entry(int host) const {
  const Generation generation = newest();
  const std::string begin = concat(generation.number, " "),
                    end = concat(" ", host, " ", generation.ranks.at(host));
  for (const std::string& name : names_in(folder_ / "entered")) {
    if (name.starts_with(begin) && name.ends_with(end))
      return std::stoll(read_file(folder_ / "entered" / name));
  }
  throw std::runtime_error("no such entry");
}

std::uint64_t VirtualRun::steps() const {
  std::uint64_t newest = 0;
  for (const auto& [number, hash] : read_steps(folder_ / "steps")) newest = std::max(newest, number);
  return newest;
}

std::uint64_t VirtualRun::step_begun_by(int host) const {
  return std::stoull(read_file(folder_ / "begun" / std::to_string(host))) - 1'000'000;
}

bool VirtualRun::does_train(const Hosts& hosts, std::uint64_t& number, std::uint64_t& steps_before) const {
  const Generation generation = newest();
  Hosts found;
  for (const auto& [host, pid] : generation.ranks) found.insert(host);
  if (found != hosts) return false;
  // What was under way is not a step of this generation for sure.
  if (std::exchange(number, generation.number) != generation.number) steps_before = steps();
  return steps() >= steps_before + 2;
}

bool VirtualRun::come_to_train(const Hosts& hosts) const {
  std::uint64_t number = 0, steps_before = 0;
  return comes_to_be([&] { return does_train(hosts, number, steps_before); });
}

VirtualRun::Outcome VirtualRun::outcome_of(const Hosts& hosts) {
  std::uint64_t number = 0, steps_before = 0;
  Outcome outcome = Outcome::kNeither;
  comes_to_be([&] {
    if (std::ranges::all_of(hosts, [&](int host) { return agent(host).worker().reap(); })) {
      outcome = Outcome::kEnds;
    } else if (does_train(hosts, number, steps_before)) {
      outcome = Outcome::kTrains;
    }
    return outcome != Outcome::kNeither;
  });
  return outcome;
}

bool VirtualRun::make_steps(std::uint64_t more) const {
  const std::uint64_t before = steps();
  return comes_to_be([&] { return steps() >= before + more; });
}

void VirtualRun::act_at(int host, const std::string& point, const std::string& action) {
  const std::filesystem::path partial = folder_ / "point";
  write_file(partial, action);
  std::filesystem::rename(partial, folder_ / "points" / concat(host, " ", point));
}

bool VirtualRun::has_acted(int host, const std::string& point) const {
  const std::filesystem::path file = folder_ / "points" / concat(host, " ", point);
  return comes_to_be([&] { return !std::filesystem::exists(file); });
}

void VirtualRun::forget_points() {
  for (const std::string& name : names_in(folder_ / "points"))
    std::filesystem::remove(folder_ / "points" / name);
}

std::string VirtualRun::begin_anew() {
  std::string wrong = wrong_bits();
  for (const char* const name : {"steps", "entered", "begun", "ended", "fast"})
    std::filesystem::remove_all(folder_ / name);
  forget_points();
  return wrong;
}

std::string VirtualRun::finish(const Hosts& hosts) {
  write_file(folder_ / "fast", "");
  std::string wrong;
  for (const int host : hosts) {
    const int status = agent(host).wait();
    if (status != 0) wrong += concat("the agent of host ", host, " ended with status ", status, "\n");
  }
  const auto total = static_cast<std::uint64_t>(options_.num_steps);
  std::set<std::uint64_t> committed;
  for (const auto& [number, hash] : read_steps(folder_ / "steps")) committed.insert(number);
  for (std::uint64_t number = 1; number <= total; ++number) {
    if (!committed.contains(number)) wrong += concat("step ", number, " was not committed\n");
  }
  wrong += wrong_bits();
  const std::vector<std::string> ends = names_in(folder_ / "ended");
  if (ends.empty()) wrong += "no rank has ended\n";
  for (const std::string& name : ends) {
    if (read_file(folder_ / "ended" / name) != expected_[total])
      wrong += concat("rank ", name, " ended with other bits\n");
  }
  return wrong;
}

std::string VirtualRun::wrong_bits() const {
  if (expected_.empty()) {
    const TempDir alone;
    launch::Worker program({.program = COHORT_MLP_PROGRAM,
                            .arguments = {COHORT_MLP_PROGRAM, std::to_string(options_.num_steps),
                                          std::to_string(options_.num_hosts + 1), "0"},
                            .environment = launch::environment_with({{"FOLDER", alone.path().string()}}),
                            .own_group = true});
    if (!comes_to_be([&] { return program.reap(); }) || launch::exit_status(program.wait_status()) != 0)
      throw std::runtime_error("the run of one process alone has failed");
    for (auto& [number, hash] : read_steps(alone / "steps")) expected_[number] = std::move(hash);
  }
  for (const auto& [number, hash] : read_steps(folder_ / "steps")) {
    if (expected_[number] != hash) return concat("step ", number, " has other bits\n");
  }
  return "";
}

std::string VirtualRun::story() const {
  std::string story;
  const auto add = [&](int host, const Job& job) {
    story += concat("---- host ", host, "\n", job.out(), job.err());
  };
  for (const auto& [host, job] : ended_) add(host, *job);
  for (const auto& [host, job] : agents_) {
    if (job) add(host, *job);
  }
  return story + concat("---- ", steps(), " steps were committed\n");
}

}  // namespace cohort::test
