// A rank prints into two pipes. While the console is full the caller leaves them alone, so the agent's memory
// stays bounded, and a rank that prints waits. At its end all that it will ever print is in the pipes; they
// are not read until their end, as a process that the rank has left behind may hold them open.
#include "cohort/launch/internal/rank_process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/process.h"
#include "cohort/base/text/format_list.h"
#include "cohort/launch/error_file.h"
#include "cohort/launch/internal/survival.h"

namespace cohort::launch {
namespace {

using base::concat;
namespace fs = std::filesystem;

Fd open_log(const fs::path& path) {
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.is_open()) {
    throw SystemError("launch.log", concat("cannot write ", path.string(), ": ", std::strerror(errno)),
                      "--log-dir FOLDER that can be written to");
  }
  return file;
}

}  // namespace

RankProcess::RankProcess(const RunOptions& options, RankSpec spec, Display& display, OrphanWatchdog& watchdog)
    : options_(options),
      spec_(std::move(spec)),
      console_(display.console),
      warnings_(display.warnings),
      watchdog_(watchdog) {
  std::error_code failed;
  fs::create_directories(spec_.folder, failed);
  if (failed) {
    throw SystemError("launch.log", concat("cannot make ", spec_.folder.string(), ": ", failed.message()),
                      "--log-dir FOLDER that can be written to");
  }
  const fs::path error_file = spec_.folder / "error.json";
  fs::remove(error_file, failed);
  direct_output();
  const Fd out = open(out_, Stream::kOut);
  const Fd err = open(err_, Stream::kErr);
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  Variables added = spec_.environment;
  added.emplace_back("TORCHELASTIC_ERROR_FILE", error_file.string());
  // Through a pipe Python would keep its lines to itself; torchrun passes -u.
  if (!base::env_string("PYTHONUNBUFFERED")) added.emplace_back("PYTHONUNBUFFERED", "1");
  added.insert(added.end(), options.environment.begin(), options.environment.end());
  worker_.emplace(WorkerOptions{.program = find_program(options.command.front()),
                                .arguments = options.command,
                                .environment = environment_with(added),
                                .cpus = spec_.cpus,
                                .input = null.get(),
                                .output = out.get(),
                                .error = err.get(),
                                .keep = spec_.keep,
                                .own_group = true,
                                .watchdog = &watchdog_,
                                .start_by = spec_.start_by});
}

RankProcess::~RankProcess() {
  end(base::Deadline(kEndTime));
}

void RankProcess::take_place(int local_rank, std::string prefix) {
  spec_.rank = spec_.local_rank = local_rank;
  spec_.prefix = std::move(prefix);
  direct_output();
}

void RankProcess::direct_output() {
  const int local = spec_.local_rank;
  direct(out_, options_.redirects.out(local), options_.tee.out(local), "stdout.log");
  direct(err_, options_.redirects.err(local), options_.tee.err(local), "stderr.log");
}

void RankProcess::direct(Channel& channel, bool is_redirected, bool is_teed, const char* name) const {
  const bool has_file = is_redirected || is_teed;
  if (!has_file) {
    channel.file.close();
  } else if (!channel.file.is_open()) {
    channel.file = open_log(spec_.folder / name);
  }
  const auto& filter = options_.local_ranks_filter;
  const bool is_filtered =
      !filter.empty() && std::find(filter.begin(), filter.end(), spec_.local_rank) == filter.end();
  channel.is_shown = !is_filtered && (is_teed || !is_redirected);
}

// Returns the rank's end of the pipe.
Fd RankProcess::open(Channel& channel, Stream stream) {
  channel.lines.emplace([this, &channel, stream](std::string_view line) {
    tail_.add(line);
    if (!channel.is_shown || spec_.is_raw || (stream == Stream::kErr && !warnings_.shows(spec_.rank, line)))
      return;
    console_.write(stream, concat(spec_.prefix, line, "\n"));
  });
  Pipe pipe = make_pipe();
  channel.pipe = std::move(pipe.read);
  return std::move(pipe.write);
}

void RankProcess::add_waits(std::vector<pollfd>& waits, bool with_output) const {
  waits.push_back({worker_->end_fd(), POLLIN, 0});
  if (!with_output) return;
  for (const Channel* channel : {&out_, &err_}) {
    if (channel->pipe.is_open()) waits.push_back({channel->pipe.get(), POLLIN, 0});
  }
}

void RankProcess::read() {
  for (Channel* channel : {&out_, &err_}) {
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
      if (spec_.is_raw && channel->is_shown) {
        console_.write(channel == &out_ ? Stream::kOut : Stream::kErr, bytes);
      }
    }
  }
}

bool RankProcess::reap() {
  if (!running() || !worker_->reap()) return false;
  ended_at_ = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  watchdog_.forget(worker_->pid());
  for (Channel* channel : {&out_, &err_}) {
    for (int i = 0; i < 64 && channel->pipe.is_open(); ++i) read();
    channel->pipe.close();
    channel->lines->finish();
  }
  return true;
}

void RankProcess::end(base::Deadline deadline) {
  if (!running()) return;
  worker_->end(deadline);
  watchdog_.forget(worker_->pid());
}

std::optional<RankFailure> RankProcess::failure(int node, int attempt) const {
  const int status = exit_status(worker_->wait_status());
  if (status == 0) return std::nullopt;
  RankFailure failure{.rank = spec_.rank,
                      .local_rank = spec_.local_rank,
                      .node = node,
                      .host = base::host_name(),
                      .pid = worker_->pid(),
                      .attempt = attempt,
                      .status = status,
                      .what = describe_exit(worker_->wait_status()),
                      .message = {},
                      .details = {},
                      .time = ended_at_,
                      .last_lines = tail_.lines()};
  // The error was written when it happened, and the process may have taken long to end.
  if (const auto error = read_error_file(spec_.folder / "error.json")) {
    failure.message = error->message;
    failure.details = error->details;
    failure.time = std::min(ended_at_, error->time);
  }
  return failure;
}

Variables secret_variables(const RunOptions& options, int secret_fd) {
  // Empty is as if it were not there: what this agent was given itself is not for its ranks.
  Variables variables{{"COHORT_SECRET_FD", secret_fd < 0 ? "" : std::to_string(secret_fd)}};
  if (options.no_secret || secret_fd >= 0) variables.emplace_back("COHORT_SECRET_FILE", "");
  return variables;
}

std::string notify_ranks(const std::vector<const RankProcess*>& ranks, int number, std::set<int>& withheld) {
  std::vector<const RankProcess*> alive;
  std::vector<pid_t> processes;
  for (const RankProcess* const rank : ranks) {
    if (!rank->running()) continue;
    alive.push_back(rank);
    processes.push_back(rank->worker().pid());
  }
  const std::vector<bool> survive = survives(processes, number);
  std::vector<int> spared;
  for (std::size_t i = 0; i < alive.size(); ++i) {
    if (survive[i]) {
      alive[i]->worker().signal(number);
    } else {
      spared.push_back(alive[i]->rank());
    }
  }
  // Logged once for each signal: a batch system may send it again and again.
  if (spared.empty() || !withheld.insert(number).second) return "";
  return concat(base::describe_signal(number), " is not passed on to ", base::format_list("rank", spared),
                ", which would die of it");
}

void reap_orphans(OrphanWatchdog& watchdog, const std::function<bool(pid_t)>& is_rank) {
  for (;;) {
    siginfo_t info{};
    // The end is seen but not reaped: a rank's end is its Worker's to see. What comes after a rank that has
    // ended is left to the next time.
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    if (is_rank(info.si_pid)) return;
    if (info.si_pid == watchdog.pid()) {
      watchdog.reap();  // killed; an end that stays would be the one that is seen each time
    } else {
      ::waitpid(info.si_pid, nullptr, WNOHANG);
    }
  }
}

}  // namespace cohort::launch
