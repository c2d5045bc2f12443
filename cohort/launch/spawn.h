#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

/// How spawn() starts ranks, and ends them.
struct SpawnOptions {
  /// For the whole call; nothing: as long as the ranks take.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  /// From SIGTERM to SIGKILL for the other ranks after the first failed.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// Arguments of the ranks, without the program's name; nothing: those of this process. With them main must
  /// come to the same call.
  std::optional<std::vector<std::string>> arguments = std::nullopt;
  /// Added to the environment of the ranks.
  std::vector<std::pair<std::string, std::string>> environment = {};
};

/// Runs fn(rank) in `num_ranks` fresh processes of this executable, in torchrun's environment, and returns
/// when all have ended. main runs again in each, up to this call, and does not come past it. What fn throws
/// ends its rank with status 1 and its message comes back here. A rank knows its call by where it stands in
/// the source, and how often that place was passed before. Blocking: until every rank is gone. Threads: call
/// it from the thread that outlives the ranks, as a rule main's. Throws: PeerError with rank and message of
/// the first failure; TimeoutError; UsageError inside a job that a launcher started; SystemError when a
/// process cannot be made.
void spawn(const std::function<void(int rank)>& fn, int num_ranks, const SpawnOptions& options = {},
           std::source_location call = std::source_location::current());

/// Runs fn(rank) once, as the rank that a launcher (cohort run, torchrun, srun, mpirun) has made this
/// process; where none has, spawns `num_ranks`. For a program that is started either way. Throws: what fn
/// throws; as spawn; RendezvousError where a launcher's variables make no sense.
void spawn_unless_launched(const std::function<void(int rank)>& fn, int num_ranks,
                           const SpawnOptions& options = {},
                           std::source_location call = std::source_location::current());

}  // namespace cohort::launch
