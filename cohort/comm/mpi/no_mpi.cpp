// There is no MPI backend yet: ranks that mpirun starts meet through its environment and speak over Gloo.
#include "cohort/comm/backend.h"
#include "cohort/core/error.h"

namespace cohort::comm {

std::string mpi_absent() {
  return "Cohort has no MPI backend yet";
}

MadeBackend make_mpi(const BackendOptions&) {
  throw UsageError("comm.mpi", "backend mpi is not in this build: " + mpi_absent(),
                   "gloo, which works under mpirun too");
}

}  // namespace cohort::comm
