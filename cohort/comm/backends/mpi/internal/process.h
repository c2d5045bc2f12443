#pragma once

#include <cstdint>

/// What passes between load.cpp and the library that it loads. Free of MPI's header.
namespace cohort::comm::mpi {

/// This process in the job that mpirun has started, as MPI knows it.
struct Process {
  std::uint64_t job = 0;  ///< a number that all processes of the job share, and no others
  int rank = 0;
  int size = 1;
  int largest_tag = 32767;
  bool is_owner = false;  ///< MPI was started here and ends here
};

}  // namespace cohort::comm::mpi
