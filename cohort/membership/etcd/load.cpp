// libcurl stands in a library of its own, loaded when a store is made: with it come forty others, which no
// rank needs, and without it no program of Cohort would start.
#include <dlfcn.h>

#include <filesystem>

#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/library.h"
#include "cohort/membership/record.h"

namespace cohort::membership::etcd {
namespace {

bool has_run_ended(const std::string& text) {
  try {
    return parse_record(text).has_ended();
  } catch (const CommError&) {
    return false;
  }
}

}  // namespace

std::string library_absent() {
  return "";
}

std::shared_ptr<RecordStore> make_store(const EtcdOptions& options) {
  Dl_info own{};
  ::dladdr(reinterpret_cast<const void*>(&library_absent), &own);
  const auto path = std::filesystem::path(own.dli_fname).parent_path() / COHORT_ETCD_LIBRARY;
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw UsageError("membership.etcd", base::concat("cannot load ", path.string(), ": ", ::dlerror()),
                     "install libcurl (libcurl4), or --rdzv-backend embedded");
  }
  using Make = void(const EtcdOptions&, bool (*)(const std::string&), std::shared_ptr<RecordStore>&);
  auto* const make = reinterpret_cast<Make*>(::dlsym(handle, "cohort_make_etcd_store"));
  if (make == nullptr) {
    throw UsageError("membership.etcd", base::concat(path.string(), " is of another version of Cohort"),
                     "one version in the folder of its libraries");
  }
  std::shared_ptr<RecordStore> store;
  make(options, has_run_ended, store);
  return store;
}

}  // namespace cohort::membership::etcd
