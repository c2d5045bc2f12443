#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "cohort/base/threads/deadline.h"

/// Waits until somebody listens at an address of TCP. What connects afterwards (c10d's store) waits up to
/// a minute and a half between two attempts, and does not see its own deadline meanwhile.
namespace cohort::base {

/// Who is waited for: the words of the error at the deadline.
struct ListenTarget {
  std::string where;  ///< the module that seeks, for errors
  std::string name;   ///< who listens there: rank 0
  std::string hint;   ///< what to do when nobody does
};

/// Returns the numeric address at which somebody listens, once somebody does; or nothing when `interrupted`
/// says so. Tries ten times a second; says in the log after 5 s that it waits. `host` is a name or an
/// address without brackets. Throws: RendezvousError at the deadline, with what the last attempt came to.
std::optional<std::string> wait_for_listener(const std::string& host, std::uint16_t port, Deadline deadline,
                                             const ListenTarget& target,
                                             const std::function<bool()>& interrupted = nullptr);

/// Returns true when `host` is an address or a name of this host alone.
bool is_loopback(const std::string& host);

/// Returns true when `text` is a numeric address that is not of this host alone. Looks no name up.
bool is_far_address(const std::string& text);

/// Returns true for 127.0.0.1, localhost, ::1 and [::1]: whoever listens there is on this host. Looks no name
/// up.
bool is_this_host(const std::string& host);

}  // namespace cohort::base
