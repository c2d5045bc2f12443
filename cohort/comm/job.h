#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Which process of a job this one is, as its launcher says in the environment. No LibTorch.
namespace cohort::comm {

/// Who has started this process; kNone: nobody who says so.
enum class Launcher { kNone, kTorchrun, kSlurm, kOpenMpi };

/// Returns "torchrun", "Slurm", "Open MPI", or "no launcher".
std::string_view to_string(Launcher launcher);

/// A process's place in its job, and where the job's rendezvous is.
struct Job {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;             ///< among the ranks of this host
  int local_world_size = 1;       ///< ranks of this host
  bool is_on_one_host = false;    ///< its launcher has said so
  std::string master_host;        ///< where the store is; empty when alone
  std::uint16_t master_port = 0;  ///< of the store
  Launcher launcher = Launcher::kNone;
  /// torchrun's agent keeps the store: rank 0 is a client too.
  bool agent_store = false;
  /// How often the launcher has started the ranks again; 0 at first.
  int restart_count = 0;

  bool operator==(const Job&) const = default;
};

/// Reads torchrun's variables, else Slurm's, else Open MPI's; without any the process is alone.
/// Throws: RendezvousError naming the variable that is missing or makes no sense.
Job job_from_environment();

/// Expands Slurm's notation: "n[01-03,7],gpu1" is n01 n02 n03 n7 gpu1.
/// Throws: RendezvousError for anything else, and for more than a million hosts.
std::vector<std::string> expand_hostlist(std::string_view text);

/// Expands Slurm's counts per node: "2(x3),1" is 2 2 2 1. Throws: RendezvousError.
std::vector<int> expand_counts(std::string_view text);

}  // namespace cohort::comm
