// Messages about joins and leaves, and how a worker leaves. One join: agent_members_join.cpp. What messages
// lead to: MemberProtocol.
#include "cohort/rpc/internal/agent/agent_members.h"

#include <chrono>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;

// A worker that leaves looks so often whether calls are under way, and asks after so many looks.
constexpr milliseconds kLookOfLeaver(2);
constexpr int kLooksPerQuestion = 25;

}  // namespace

void AgentMembers::on_message(const Peer& peer, net::Message message) {
  try {
    const auto [encoded, wires] = to_encoded(message);
    Reader in(encoded);
    const MemberMessage decoded = decode<MemberMessage>(in);
    in.finish();
    run([&] { return protocol_.on_message(peer, decoded); });
    if (decoded.type == MemberMessageType::kReady) compare_functions(peer);
  } catch (const std::exception& error) {
    base::log_error(
        base::concat("a message of ", peer->name(), " about joins is dropped: ", base::message_of(error)));
  }
}

void AgentMembers::send(const MemberProtocol::Messages& messages) const {
  for (const auto& [peer, message] : messages) {
    Writer out;
    encode(out, message);
    net::Message sent = to_message(kMemberChannel, out.take());
    add_references(sent, {});
    peer->send(std::move(sent));
  }
}

void AgentMembers::leave(base::Deadline deadline) {
  run([&] { return protocol_.begin_leaving(); });
  for (int look = 1;; ++look) {
    if (look % kLooksPerQuestion == 0) run([&] { return protocol_.repeat_leaving(); });
    std::unique_lock lock(tables_.mutex);
    const bool is_idle = base::wait(
        tables_.changed, lock, [&] { return may_leave(); }, base::Deadline(kLookOfLeaver).sooner(deadline));
    const bool is_late = deadline.expired();
    std::vector<std::string> missing;
    if (is_late) missing = describe_missing();
    lock.unlock();
    // Without the mutex: References calls the agent.
    if (is_idle && core_.references->num_passed_on() == 0) return;
    if (is_idle) base::sleep(kLookOfLeaver, deadline);
    if (!is_late) continue;
    if (missing.empty()) missing.emplace_back("owners of references that this worker has passed on");
    run([&] { return protocol_.stay(); });
    const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
    throw TimeoutError("rpc.shutdown", base::concat("waited ", waited, " ms for ", base::join(missing)));
  }
}

// Under the mutex.
bool AgentMembers::may_leave() const {
  return tables_.pending.is_idle() && tables_.running.is_idle() && *tables_.num_unsent == 0 &&
         protocol_.may_leave();
}

std::vector<std::string> AgentMembers::describe_missing() const {
  std::vector<std::string> missing = tables_.pending.describe();
  for (std::string& handler : tables_.running.describe()) missing.push_back(std::move(handler));
  if (tables_.pending.is_finishing()) missing.emplace_back("a function that a result of a call leads to");
  if (*tables_.num_unsent > 0) {
    missing.emplace_back("a message that is sent once the owners of its references know of them");
  }
  for (std::string& part : protocol_.describe_missing()) missing.push_back(std::move(part));
  return missing;
}

}  // namespace cohort::rpc
