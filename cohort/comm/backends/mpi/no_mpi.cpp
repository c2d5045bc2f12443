// In place of load.cpp where this build has no MPI; COHORT_NO_MPI says why.
#include "cohort/base/error.h"
#include "cohort/comm/internal/backend.h"

namespace cohort::comm {

std::string mpi_absent() {
  return COHORT_NO_MPI;
}

BackendInstance make_mpi(const BackendOptions&) {
  throw UsageError("comm.mpi", "backend mpi is not in this build: " + mpi_absent(),
                   "gloo, which works under mpirun too; or build with Open MPI (libopenmpi-dev)");
}

}  // namespace cohort::comm
