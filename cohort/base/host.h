#pragma once

#include <string>

namespace cohort::base {

/// Returns this host's name; "localhost" where the system has none. No LibTorch.
std::string host_name();

/// The same for processes that can share memory and reach each other's local sockets: of one boot of one
/// machine, and of one network namespace. Where /proc does not say, no other process has it. No LibTorch.
std::string machine_id();

/// Returns the numeric address of this host by which it reaches `host`, a name or an address without
/// brackets; empty where `host` has no address or no way leads there. Sends nothing. Blocking: it may ask the
/// name server. No LibTorch.
std::string address_towards(const std::string& host);

}  // namespace cohort::base
