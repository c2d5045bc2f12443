// Each rank prints into two pipes. step() polls these, the ends of the ranks, and the console together. It
// reads a bounded amount from each pipe, so a rank that prints without end holds up no other. While the
// console is full the pipes are left alone, so the agent's memory stays bounded, and a rank that prints
// waits. Always: a rank counts as failed only where its failure came before stop(). Later ends are the
// agent's own doing.
#include "cohort/launch/internal/worker_group.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/process.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/error_file.h"
#include "cohort/launch/internal/cpu_affinity.h"
#include "cohort/launch/internal/survival.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;
using base::concat;

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

Fd open_log(const fs::path& path) {
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.is_open()) {
    throw SystemError("launch.log", concat("cannot write ", path.string(), ": ", std::strerror(errno)),
                      "--log-dir FOLDER that can be written to");
  }
  return file;
}

}  // namespace

// A rank, and what it prints.
struct WorkerGroup::Member {
  struct Channel {
    Fd pipe;
    Fd file = Fd();
    bool shown = true;
    bool raw = false;  // as it comes, without a prefix
    std::unique_ptr<LineSplitter> lines = nullptr;
  };

  int local_rank = 0;
  fs::path error_file;
  Channel out, err;
  Tail tail = {};
  std::unique_ptr<Worker> worker = nullptr;
};

WorkerGroup::WorkerGroup(const RunOptions& options, const WorkerGroupSpec& place, Display& display,
                         OrphanWatchdog& watchdog)
    : options_(options),
      place_(place),
      console_(display.console),
      warnings_(display.warnings),
      watchdog_(watchdog) {
  if (options.bind_to == BindTo::kCores) {
    cores_ = split_cores(base::CpuSet::of_process(), options.nproc_per_node);
  }
  const base::Deadline start_by(kStartTime);
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) start(local_rank, start_by);
}

WorkerGroup::~WorkerGroup() {
  // All first, so that they end side by side.
  kill();
  const base::Deadline deadline(kEndTime);
  for (auto& member : members_) {
    if (!member->worker->running()) continue;
    member->worker->end(deadline);
    watchdog_.forget(member->worker->pid());
  }
}

void WorkerGroup::start(int local_rank, base::Deadline start_by) {
  const int rank = place_.first_rank + local_rank;
  const fs::path folder = place_.log_folder / std::to_string(local_rank);
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (failed) {
    throw SystemError("launch.log", concat("cannot make ", folder.string(), ": ", failed.message()),
                      "--log-dir FOLDER that can be written to");
  }
  auto member = std::make_unique<Member>();
  member->local_rank = local_rank;
  member->error_file = folder / "error.json";
  fs::remove(member->error_file, failed);

  const auto& filter = options_.local_ranks_filter;
  const bool filtered =
      !filter.empty() && std::find(filter.begin(), filter.end(), local_rank) == filter.end();
  const bool prefixed =
      options_.prefix == Prefix::kOn || (options_.prefix == Prefix::kAuto && place_.world_size > 1);
  const std::string prefix = prefixed ? concat("[rank ", rank, "] ") : "";
  const auto open = [&](Member::Channel& channel, Stream stream, bool redirect, bool tee, const char* name) {
    if (redirect || tee) channel.file = open_log(folder / name);
    channel.shown = !filtered && (tee || !redirect);
    // One rank alone: its bytes go through as they come, so that progress bars look right.
    channel.raw = !prefixed && place_.world_size == 1;
    channel.lines = std::make_unique<LineSplitter>(
        [this, m = member.get(), &channel, stream, rank, prefix](std::string_view line) {
          m->tail.add(line);
          if (!channel.shown || channel.raw || (stream == Stream::kErr && !warnings_.shows(rank, line)))
            return;
          console_.write(stream, concat(prefix, line, "\n"));
        });
    Pipe pipe = make_pipe();
    channel.pipe = std::move(pipe.read);
    return std::move(pipe.write);
  };
  const Fd out = open(member->out, Stream::kOut, options_.redirects.out(local_rank),
                      options_.tee.out(local_rank), "stdout.log");
  const Fd err = open(member->err, Stream::kErr, options_.redirects.err(local_rank),
                      options_.tee.err(local_rank), "stderr.log");
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));

  Variables added = variables_of({.rank = rank,
                                  .local_rank = local_rank,
                                  .world_size = place_.world_size,
                                  .local_world_size = options_.nproc_per_node,
                                  .node_rank = options_.node_rank,
                                  .master_addr = place_.master_addr,
                                  .master_port = place_.master_port,
                                  .restart_count = place_.attempt});
  added.insert(added.end(), {{"GROUP_WORLD_SIZE", std::to_string(options_.nnodes)},
                             {"ROLE_NAME", options_.role},
                             {"ROLE_RANK", std::to_string(rank)},
                             {"ROLE_WORLD_SIZE", std::to_string(place_.world_size)},
                             {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options_.max_restarts)},
                             {"TORCHELASTIC_RUN_ID", place_.run_id},
                             {"TORCHELASTIC_ERROR_FILE", member->error_file.string()}});
  // Through a pipe Python would keep its lines to itself; torchrun passes -u.
  if (!base::env_string("PYTHONUNBUFFERED")) added.emplace_back("PYTHONUNBUFFERED", "1");
  // Empty is as if it were not there: what this agent was given itself is not for its ranks.
  added.emplace_back("COHORT_SECRET_FD", place_.secret_fd < 0 ? "" : std::to_string(place_.secret_fd));
  if (options_.no_secret || place_.secret_fd >= 0) added.emplace_back("COHORT_SECRET_FILE", "");
  added.insert(added.end(), options_.environment.begin(), options_.environment.end());
  member->worker = std::make_unique<Worker>(
      WorkerOptions{.program = find_program(options_.command.front()),
                    .arguments = options_.command,
                    .environment = environment_with(added),
                    .cpus = cores_.empty() ? base::CpuSet() : cores_[static_cast<std::size_t>(local_rank)],
                    .input = null.get(),
                    .output = out.get(),
                    .error = err.get(),
                    .keep = place_.secret_fd < 0 ? std::vector<int>() : std::vector<int>{place_.secret_fd},
                    .own_group = true,
                    .watchdog = &watchdog_,
                    .start_by = start_by});
  members_.push_back(std::move(member));
}

// Takes what is in the pipes, but not for ever: a rank that prints without end must not hold up the others.
void WorkerGroup::read(Member& member) {
  for (Member::Channel* channel : {&member.out, &member.err}) {
    std::array<char, 16384> buffer{};
    for (int i = 0; i < 16 && channel->pipe.is_open(); ++i) {
      const ssize_t count = ::read(channel->pipe.get(), buffer.data(), buffer.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) break;
      if (count == 0) {
        channel->pipe.close();
        break;
      }
      const std::string_view bytes(buffer.data(), static_cast<std::size_t>(count));
      if (channel->file.is_open()) write_all(channel->file.get(), bytes);
      channel->lines->feed(bytes);
      if (channel->raw && channel->shown) {
        console_.write(channel == &member.out ? Stream::kOut : Stream::kErr, bytes);
      }
    }
  }
}

void WorkerGroup::note_end(Member& member) {
  const double end = now();
  watchdog_.forget(member.worker->pid());
  // All that it will ever print is in the pipes now.
  for (Member::Channel* channel : {&member.out, &member.err}) {
    // Not until the end of the pipe: a process that the rank left behind may hold it open.
    for (int i = 0; i < 64 && channel->pipe.is_open(); ++i) read(member);
    channel->pipe.close();
    channel->lines->finish();
  }
  const int status = exit_status(member.worker->wait_status());
  if (status == 0) return;
  const int before = std::exchange(status_, status_ == 0 ? status : status_);
  RankFailure failure{.rank = place_.first_rank + member.local_rank,
                      .local_rank = member.local_rank,
                      .node = options_.node_rank,
                      .host = base::host_name(),
                      .pid = member.worker->pid(),
                      .attempt = place_.attempt,
                      .status = status,
                      .what = describe_exit(member.worker->wait_status()),
                      .message = {},
                      .details = {},
                      .time = end,
                      .last_lines = member.tail.lines()};
  // The error was written when it happened, and the process may have taken long to end.
  if (const auto error = read_error_file(member.error_file)) {
    failure.message = error->message;
    failure.details = error->details;
    failure.time = std::min(end, error->time);
  }
  // It had failed, and was on its way out when the others were ended: the signal is ours, no news of its own.
  if (stopped_at_ != 0 && failure.time < stopped_at_ &&
      (status == 128 + SIGTERM || status == 128 + SIGKILL)) {
    failure.what = "had failed, and was ended with the others";
    failure.status = before == 0 ? 1 : before;
  }
  if (stopped_at_ == 0 || failure.time < stopped_at_) failures_.push_back(std::move(failure));
}

void WorkerGroup::step(std::chrono::milliseconds most, const std::vector<int>& wake) {
  std::vector<pollfd> waits;
  for (const int fd : wake) waits.push_back({fd, POLLIN, 0});
  console_.add_waits(waits);
  const bool reading = !console_.full();
  for (const auto& member : members_) {
    if (!member->worker->running()) continue;
    waits.push_back({member->worker->end_fd(), POLLIN, 0});
    if (!reading) continue;
    for (const Member::Channel* channel : {&member->out, &member->err}) {
      if (channel->pipe.is_open()) waits.push_back({channel->pipe.get(), POLLIN, 0});
    }
  }
  base::wait_for_files(waits, base::Deadline(most));
  for (const auto& member : members_) {
    if (!member->worker->running()) continue;
    if (reading) read(*member);
    if (member->worker->reap()) note_end(*member);
  }
  console_.pump();
  reap_orphans();
}

// As a container's first process the program `cohort` is the parent of what ranks leave behind. Another
// program that runs a job may have children of its own, whose ends are its own to see.
void WorkerGroup::reap_orphans() {
  if (!options_.reaps_orphans) return;
  for (;;) {
    siginfo_t info{};
    // The end is seen but not reaped: a rank's end is its Worker's to see. What comes after a rank that has
    // ended is left to the next step.
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    const bool is_rank = std::ranges::any_of(members_, [&](const auto& member) {
      return member->worker->pid() == info.si_pid && member->worker->running();
    });
    if (is_rank) return;
    if (info.si_pid == watchdog_.pid()) {
      watchdog_.reap();  // killed; an end that stays would be the one that is seen each time
    } else {
      ::waitpid(info.si_pid, nullptr, WNOHANG);
    }
  }
}

bool WorkerGroup::running() const {
  return !running_ranks().empty();
}

std::vector<int> WorkerGroup::running_ranks() const {
  std::vector<int> ranks;
  for (const auto& member : members_) {
    if (member->worker->running()) ranks.push_back(member->local_rank);
  }
  return ranks;
}

void WorkerGroup::signal(int number) {
  for (const auto& member : members_) member->worker->signal(number);
}

std::string WorkerGroup::notify(int number) {
  std::vector<const Member*> alive;
  std::vector<pid_t> processes;
  for (const auto& member : members_) {
    if (!member->worker->running()) continue;
    alive.push_back(member.get());
    processes.push_back(member->worker->pid());
  }
  const std::vector<bool> survive = survives(processes, number);
  std::vector<int> spared;
  for (std::size_t i = 0; i < alive.size(); ++i) {
    if (survive[i]) {
      alive[i]->worker->signal(number);
    } else {
      spared.push_back(place_.first_rank + alive[i]->local_rank);
    }
  }
  // Logged once for each signal: a batch system may send it again and again.
  if (spared.empty() || !withheld_.insert(number).second) return "";
  return concat(base::describe_signal(number), " is not passed on to ", base::format_list("rank", spared),
                ", which would die of it");
}

void WorkerGroup::pause() {
  for (const auto& member : members_) member->worker->signal_group(SIGSTOP);
}

void WorkerGroup::resume() {
  for (const auto& member : members_) member->worker->signal_group(SIGCONT);
}

void WorkerGroup::stop() {
  if (stopped_at_ == 0) stopped_at_ = now();
  signal(SIGTERM);
}

void WorkerGroup::kill() {
  for (const auto& member : members_) member->worker->kill();
}

}  // namespace cohort::launch
