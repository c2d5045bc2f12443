// Who is the endpoint: the agent whose host the endpoint names, and which can listen there. Of two agents on
// that host the second one finds the port taken, and joins the first. This is how torchrun's c10d backend
// chooses, and `is_host` overrides it.
#include "cohort/launch/internal/members/member_link.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/host.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/launch/internal/members/record_store.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::seconds;

constexpr auto kGoodbyeTime = seconds(5);
constexpr auto kLoopTime =
    seconds(40);  // an agent that starts ranks, for 30 s at most, does not look meanwhile

membership::RunSettings settings_of(const RunOptions& options) {
  const RendezvousOptions& rendezvous = options.rendezvous;
  membership::RunSettings settings;
  settings.run_id = options.run_id;
  settings.min_nodes = rendezvous.min_nodes;
  settings.max_nodes = options.nnodes;
  settings.num_spares = rendezvous.num_spares;
  settings.max_restarts = options.max_restarts;
  settings.virtual_ranks = options.num_virtual_ranks();
  settings.join_timeout = options.rendezvous_timeout;
  settings.last_call_timeout = rendezvous.last_call_timeout;
  settings.silence = rendezvous.silence;
  return settings;
}

// On all interfaces: the endpoint's name may lead to 127.0.1.1 on its own host. Others know the endpoint by
// the text that they were given.
std::string endpoint_listen_address(const RendezvousOptions& rendezvous) {
  const HostPort place = split_endpoint(rendezvous.endpoint);
  if (place.port == 0) return "";  // alone: nobody needs to know it
  if (base::is_this_host(place.host)) return rendezvous.endpoint;
  const bool is_ipv6 = place.host.find(':') != std::string::npos;
  return endpoint_text({is_ipv6 ? "::" : "0.0.0.0", place.port});
}

std::unique_ptr<membership::Member> make_member(const RunOptions& options,
                                                membership::MemberOptions member_options) {
  using membership::Member;
  const RendezvousOptions& rendezvous = options.rendezvous;
  member_options.listen = listen_address(options);
  member_options.host = own_host(options);
  if (auto store = make_record_store(options)) {
    member_options.store = std::move(store);
    return std::make_unique<Member>(std::move(member_options));
  }
  member_options.endpoint = rendezvous.endpoint;
  if (rendezvous.is_host.value_or(names_this_host(rendezvous.endpoint_host()))) {
    membership::MemberOptions at_endpoint = member_options;
    at_endpoint.is_endpoint = true;
    at_endpoint.endpoint_listen = endpoint_listen_address(rendezvous);
    try {
      return std::make_unique<Member>(std::move(at_endpoint));
    } catch (const RendezvousError& error) {
      if (rendezvous.is_host) throw;
      base::log_info(
          concat("this agent joins the one at ", rendezvous.endpoint, ": ", base::message_of(error)));
    }
  }
  base::log_info(concat("the agent at ", rendezvous.endpoint, " has the only record of run ", options.run_id,
                        ": the run ends if that host dies"));
  return std::make_unique<Member>(std::move(member_options));
}

}  // namespace

std::string listen_address(const RunOptions& options) {
  const std::string host = options.rendezvous.endpoint_host();
  if (!options.rendezvous.local_addr.empty()) return endpoint_text({options.rendezvous.local_addr, 0});
  if (options.is_on_one_host()) return host == "::1" ? "[::1]:0" : "127.0.0.1:0";
  if (base::is_this_host(host)) return "0.0.0.0:0";
  const std::string own = address_towards(host);
  // Many a host's own name leads it to 127.0.1.1, which is no address for others to come to.
  return base::is_loopback(own) ? "0.0.0.0:0" : endpoint_text({own, 0});
}

std::string own_host(const RunOptions& options) {
  const std::string host = options.rendezvous.endpoint_host();
  if (!options.rendezvous.local_addr.empty()) return options.rendezvous.local_addr;
  if (base::is_this_host(host) && !options.is_on_one_host()) return base::host_name();
  return names_this_host(host) ? host : address_towards(host);
}

MemberLink::MemberLink(const RunOptions& options, const std::optional<base::Secret>& secret,
                       membership::MemberStatus status)
    : is_embedded_(options.rendezvous.backend == RendezvousBackend::kEmbedded),
      changed_(std::make_shared<ChangeSignal>()),
      status_(std::move(status)) {
  membership::MemberOptions member;
  member.settings = settings_of(options);
  member.secret = secret;
  member.tls = net::TlsOptions::of_process();
  member.status = status_;
  member.program_timeout = kLoopTime;
  member.on_change = [changed = changed_] { changed->set(); };
  member_ = make_member(options, std::move(member));
}

bool MemberLink::update() {
  member_->note_alive();
  changed_->clear();
  membership::MemberView view = member_->view();
  if (view.revision == view_.revision) return false;
  view_ = std::move(view);
  return true;
}

void MemberLink::set_status(const membership::MemberStatus& status) {
  if (status == status_) return;
  status_ = status;
  member_->set_status(status);
}

bool MemberLink::is_needed() const {
  if (!view_.is_member()) return false;
  const membership::RendezvousRecord& record = *view_.record;
  // The agent that has the record decides: members do not hear who waits.
  if (record.settings.is_embedded) return view_.is_deciding;
  return record.generation.members.size() == 1 && record.waiting.empty() && record.spares.empty();
}

bool MemberLink::has_state_of_forming_run() const {
  if (!view_.record || view_.record->state != membership::RunState::kForming) return false;
  return std::ranges::count(view_.record->holders, view_.id) > 0;
}

std::string MemberLink::waits_for() const {
  using membership::RunState;
  if (is_over()) return "";
  if (!view_.record || view_.id == 0) return "waits for the rendezvous to take this node in";
  const membership::RendezvousRecord& record = *view_.record;
  if (record.state == RunState::kForming) {
    return concat("waits for nodes: ", record.waiting.size(), " of at least ", record.settings.min_nodes,
                  " are there", record.end_cause.empty() ? "" : "; ", record.end_cause);
  }
  if (view_.is_member()) return "";
  for (const membership::MemberInfo& spare : record.spares) {
    if (spare.id == view_.id) return concat("is a spare of ", record.generation.members.size(), " nodes");
  }
  return concat("waits for a place: ", record.generation.members.size(), " of at most ",
                record.settings.max_nodes, " nodes are there");
}

std::string MemberLink::new_wait() {
  const std::string before = std::exchange(wait_, waits_for());
  return wait_ == before ? "" : wait_;
}

void MemberLink::close() {
  member_->close(base::Deadline(kGoodbyeTime));
}

}  // namespace cohort::launch
