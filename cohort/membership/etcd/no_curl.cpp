// In place of load.cpp where this build has no libcurl; COHORT_NO_CURL says why.
#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/library.h"

namespace cohort::membership::etcd {

std::string library_absent() {
  return COHORT_NO_CURL;
}

std::shared_ptr<RecordStore> make_store(const EtcdOptions&) {
  throw UsageError("membership.etcd", "rendezvous over etcd is not in this build: " + library_absent(),
                   "build with libcurl (libcurl4-openssl-dev), or --rdzv-backend embedded");
}

}  // namespace cohort::membership::etcd
