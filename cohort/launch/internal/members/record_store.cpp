#include "cohort/launch/internal/members/record_store.h"

#include "cohort/base/error.h"

namespace cohort::launch {

std::shared_ptr<membership::RecordStore> make_record_store(const RunOptions& options) {
  if (options.rendezvous.backend == RendezvousBackend::kEtcd) {
    throw UsageError("launch.run", "--rdzv-backend etcd is not in this build", "--rdzv-backend c10d");
  }
  return nullptr;
}

}  // namespace cohort::launch
