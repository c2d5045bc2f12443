// The backend shm, for groups of this module.
#include "cohort/comm/backends/shm/shm.h"
#include "cohort/comm/internal/backend.h"

namespace cohort::comm {

BackendInstance make_shm(const BackendOptions& options) {
  return {.backend = make_shm_backend_until(options.store, options.rank, options.size, options.timeout,
                                            options.deadline),
          .deterministic_rank_order = true,
          .may_raise_sigpipe = false};
}

}  // namespace cohort::comm
