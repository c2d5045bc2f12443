#include "cohort/launch/internal/members/record_store.h"

#include "cohort/membership/etcd_store.h"

namespace cohort::launch {

std::shared_ptr<membership::RecordStore> make_record_store(const RunOptions& options) {
  if (options.rendezvous.backend != RendezvousBackend::kEtcd) return nullptr;
  membership::EtcdOptions etcd = options.rendezvous.etcd;
  etcd.run_id = options.run_id;
  return membership::make_etcd_store(etcd);
}

}  // namespace cohort::launch
