#pragma once

#include <memory>
#include <string>

#include "cohort/membership/etcd_options.h"
#include "cohort/membership/record_store.h"

/// The part that needs libcurl: load.cpp where it was built, else no_curl.cpp.
namespace cohort::membership::etcd {

/// Why it is not there; empty where it is.
std::string library_absent();
/// Throws: UsageError where it cannot be loaded.
std::shared_ptr<RecordStore> make_store(const EtcdOptions& options);

}  // namespace cohort::membership::etcd
