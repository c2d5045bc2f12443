// MPI stands in a library of its own, loaded when a group over it is made: linked here, no program of Cohort
// would start on a machine without it. MPI_Init waits for all processes without a limit, and a process that
// no mpirun has started becomes a job of one. So the environment is checked before MPI is started. Afterwards
// the ranks exchange job and rank over the store, since a group may number its ranks in another way.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/comm/backends/mpi/internal/process.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/group_state.h"

namespace cohort::comm {
namespace {

constexpr const char* kHint = "mpirun -n RANKS ..., or backend gloo, which needs none";

struct Library {
  void (*start)(base::Deadline, mpi::Process&);
  void (*make)(const BackendOptions&, const std::vector<int>&, base::Deadline, BackendInstance&);
};

Library load() {
  Dl_info own{};
  ::dladdr(reinterpret_cast<const void*>(&mpi_absent), &own);
  const auto path = std::filesystem::path(own.dli_fname).parent_path() / COHORT_MPI_LIBRARY;
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw UsageError("comm.mpi", base::concat("cannot load ", path.string(), ": ", ::dlerror()),
                     "install Open MPI (libopenmpi3), or backend gloo");
  }
  return {reinterpret_cast<decltype(Library::start)>(::dlsym(handle, "cohort_mpi_start")),
          reinterpret_cast<decltype(Library::make)>(::dlsym(handle, "cohort_make_mpi"))};
}

void check_size(const std::string& world, int size) {
  if (std::atoi(world.c_str()) >= size) return;
  throw UsageError(
      "comm.mpi",
      base::concat("mpirun has started ", world, " process(es), and the group has ", size, " ranks"), kHint);
}

// MPI_Init does not fail in a process that no launcher of MPI has started: it makes a job of one, after a
// while. What the launchers that there are leave in the environment says so at once.
void check_launched(int size) {
  if (size == 1) return;
  if (const char* const world = std::getenv("OMPI_COMM_WORLD_SIZE")) return check_size(world, size);
  for (const char* const name : {"PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name) != nullptr) return;
  }
  throw UsageError(
      "comm.mpi",
      base::concat("a group of ", size, " ranks over MPI: this process was not started by mpirun"), kHint);
}

// The ranks of the group as MPI numbers them, which may be otherwise than the group does.
std::vector<int> gather_members(const BackendOptions& options, const mpi::Process& own_process,
                                base::Deadline deadline) {
  const base::Words words = gather_words(StoreAdapter(options.store), "rank", options.rank, options.size,
                                         base::concat(own_process.job, " ", own_process.rank), deadline);
  if (!words.missing.empty()) {
    throw TimeoutError(
        "comm.mpi",
        base::concat("no MPI on ", base::format_list("rank", words.missing), " of ", options.size, " after ",
                     std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count(),
                     " ms"));
  }
  std::vector<int> members;
  for (int rank = 0; rank < options.size; ++rank) {
    std::istringstream text(words.of_rank[static_cast<std::size_t>(rank)]);
    mpi::Process theirs;
    text >> theirs.job >> theirs.rank;
    if (theirs.job != own_process.job) {
      throw UsageError(
          "comm.mpi",
          base::concat("ranks ", options.rank, " and ", rank, " were not started by the same mpirun"), kHint);
    }
    members.push_back(theirs.rank);
  }
  if (std::set<int>(members.begin(), members.end()).size() != members.size()) {
    throw UsageError("comm.mpi", "two ranks of the group are one process", kHint);
  }
  return members;
}

// MPI says who has not started it by no word, so the ranks say at the store that they do.
void start(const Library& library, const BackendOptions& options, mpi::Process& process) {
  StoreAdapter kv_store(options.store);
  base::StoreBarrier barrier(kv_store, "starting", options.rank, options.size);
  if (options.size > 1) barrier.arrive();
  try {
    library.start(options.deadline, process);
  } catch (const TimeoutError& error) {
    const std::vector<int> missing = options.size > 1 ? barrier.missing() : std::vector<int>();
    if (missing.empty()) throw;
    throw TimeoutError("comm.mpi", base::concat(error.what(), "; ", base::format_list("rank", missing),
                                                " of ", options.size, " did not come to it"));
  }
}

// The making of a group comes between two calls, as MPI does nothing else meanwhile. A call that was made
// before, and is compared with the other ranks' first, is to come before it on all ranks: else each would
// wait for another one.
void wait_for_earlier_calls(const BackendOptions& options) {
  for (const auto& registry : all_group_registries()) {
    for (const auto& group : registry->groups()) {
      if (!group->shares_queue) continue;
      group->wait_until_begun(options.deadline, base::concat("a group that is made while group '",
                                                             group->name, "' compares calls"));
    }
  }
}

}  // namespace

std::string mpi_absent() {
  return "";
}

BackendInstance make_mpi(const BackendOptions& options) {
  const base::Deadline deadline = options.deadline;
  check_launched(options.size);
  static const Library library = load();
  mpi::Process process;
  start(library, options, process);
  wait_for_earlier_calls(options);
  check_size(base::concat(process.size), options.size);
  BackendInstance made;
  library.make(options, gather_members(options, process, deadline), deadline, made);
  return made;
}

}  // namespace cohort::comm
