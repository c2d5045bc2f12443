#pragma once

#include <functional>
#include <string>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/rendezvous_options.h"

namespace cohort::launch {

/// Waits until this host has a way to the host of the rendezvous endpoint: its name may not be known yet, as
/// that of a pod which is starting. Tries ten times a second, and says in the log after 5 s that it waits.
/// `find_way`: as address_towards(). Returns false where `interrupted` says so. Throws: RendezvousError at
/// the deadline. Not for users of the library.
bool wait_for_endpoint_name(const std::string& host, base::Deadline deadline,
                            const std::function<bool()>& interrupted,
                            const std::function<std::string(const std::string&)>& find_way = address_towards);

}  // namespace cohort::launch
