#pragma once

#include <map>
#include <string>

#include "cohort/comm/backend.h"

/// Cohort's backends, and the choice among all.
namespace cohort::comm {

BackendInstance make_gloo(const BackendOptions& options);
BackendInstance make_shm(const BackendOptions& options);
BackendInstance make_fake(const BackendOptions& options);
/// Throw UsageError saying why, where the backend is not in this build.
BackendInstance make_nccl(const BackendOptions& options);
BackendInstance make_mpi(const BackendOptions& options);

/// Why the backend is not in this build; empty when it is.
std::string nccl_absent();
std::string mpi_absent();

/// Makes the backend of that name. Throws: as backend_type(); UsageError where it cannot be used here; what
/// its `make` throws.
BackendInstance make_backend(const std::string& name, const BackendOptions& options);

/// Why `auto` is which backend.
struct BackendChoice {
  std::string backend;
  std::string reason;
};

/// Returns what fits best of what can be used. `types`: null for all that are registered.
BackendChoice choose_backend(const BackendSituation& situation,
                             const std::map<std::string, BackendType>* types = nullptr);
/// All that are registered, by name.
std::map<std::string, BackendType> backend_types();

}  // namespace cohort::comm
