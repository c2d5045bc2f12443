#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cohort/base/secret.h"
#include "cohort/membership/record.h"
#include "cohort/membership/record_store.h"
#include "cohort/membership/status.h"
#include "cohort/net/tls_options.h"

/// What a member is given, and what it knows (cohort/membership/member.h).
namespace cohort::membership {

/// How an agent takes part.
struct MemberOptions {
  RunSettings settings;  ///< the same for all agents of the run
  /// Where the agent listens that has the record, "host:port". Empty: `store` has it.
  std::string endpoint;
  bool is_endpoint = false;  ///< this agent listens there
  /// Where it does so, as on all of its interfaces: "0.0.0.0:29400". Empty: at `endpoint` itself.
  std::string endpoint_listen;
  std::string listen = "127.0.0.1:0";  ///< where this agent listens, if it is another one
  std::string host;  ///< by which others reach it there, where `listen` is all addresses of this host
  std::optional<base::Secret> secret;
  std::optional<net::TlsOptions> tls;
  /// That all agents reach by themselves; null: the agent at `endpoint` has the record.
  std::shared_ptr<RecordStore> store;
  MemberStatus status;  ///< at first
  /// Without a call of Member::note_alive() for so long this agent falls silent, so that others continue
  /// without it: a thread of its own would give signs of life for a program that hangs. 0: never.
  std::chrono::milliseconds program_timeout{0};
  /// Called on a thread of the member after view() has changed. Must not wait.
  std::function<void()> on_change;
};

/// What a member knows.
struct MemberView {
  std::uint64_t revision = 0;              ///< grows with each change of the view
  std::optional<RendezvousRecord> record;  ///< the newest; nothing before the first
  MemberId id = 0;                         ///< of this agent in the record; 0: it is not in it (any more)
  std::string failure;                     ///< why it can have no part any more; empty while it can
  bool is_deciding = false;

  /// Whether this agent is a member of the newest generation, and the run is not over.
  bool is_member() const {
    return record && record->state == RunState::kRunning && record->generation.find(id) != nullptr;
  }
};

}  // namespace cohort::membership
