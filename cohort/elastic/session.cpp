#include "cohort/elastic/session.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cohort/comm/group_owner.h"
#include "cohort/comm/init.h"

namespace cohort::elastic {

namespace {

/// So that a process that is alone gets a group as those of a generation are: for tensors on the CPU.
struct OwnerOfAlone : comm::GroupOwner {
  std::exception_ptr end() const override { return nullptr; }
  std::exception_ptr wait_for_end() const override { return nullptr; }
};

}  // namespace

comm::Group Session::make_group(const GroupOptions& /*options*/) {
  throw UsageError("elastic.session", "this session makes no groups");
}

c10::intrusive_ptr<c10d::Store> Session::store() {
  throw UsageError("elastic.session", "this session has no store");
}

comm::Group make_group(const std::shared_ptr<Session>& session, const GroupOptions& options) {
  if (session != nullptr) return session->make_group(options);
  const auto timeout = options.timeout.count() == 0 ? SessionOptions().timeout : options.timeout;
  return comm::join_process_group({.store = c10::make_intrusive<c10d::HashStore>(),
                                   .where = "this process",
                                   .backend = options.backend,
                                   .timeout = timeout,
                                   .check_consistency = options.check_consistency,
                                   .owner = std::make_shared<OwnerOfAlone>()});
}

}  // namespace cohort::elastic
