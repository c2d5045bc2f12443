#pragma once

#include <string>

namespace cohort::net {

/// Returns the numeric address of this host by which it reaches `host`, a name or an address without brackets; empty where `host`
/// has no address or no way leads there. Sends nothing.
/// Blocking: it may ask the name server.
std::string address_towards(const std::string& host);

}  // namespace cohort::net
