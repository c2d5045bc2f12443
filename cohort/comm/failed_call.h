#pragma once

#include <exception>
#include <functional>
#include <string>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/group.h"

/// For who begins calls on a group's process_group() himself, or ends a group.
namespace cohort::comm {

/// Whether an error of such a call's future is the backend's, and not one of what was chained to it.
bool is_of_backend(const std::exception& error);

/// Ends a call that has failed with `error` at its deadline as one of the group's own ends: the group is
/// broken, and nothing continues in the backend. `is_over` says whether the call has ended there. At the
/// deadline the group's owner gives up the ranks that are stuck. Throws: what the owner throws; TimeoutError,
/// PeerError or CommError, which names `what`, and the ranks that have not failed too.
[[noreturn]] void fail_call(const Group& group, const std::exception& error, const std::string& what,
                            base::Deadline deadline, const std::function<bool()>& is_over);

/// The group's owner has ended (group_owner.h): calls that are under way end within milliseconds, also those
/// of subgroups. Blocks until they do, a second at most. Threads: any.
void end_calls(const Group& group);

}  // namespace cohort::comm
