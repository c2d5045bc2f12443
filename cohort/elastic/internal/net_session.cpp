// enter() is a loop: wait for a generation, connect, say hello, copy the state, and begin again where news
// ends one of these. What happens in which order is membership::GenerationChange and Recovery, as in
// StepProtocol, which a simulator tests.
//
// Always: a process whose state is being changed, by a step or by a copy, says that it has none until the
// change is done. Its region says the same. Between begin_changes() and commit() nothing waits for another
// process, so a step whose sum is there is committed whatever happens.
//
// Who has the newest state waits until all others have it too. It could compute meanwhile, but a step changes
// running statistics before it has its sum.
#include "cohort/elastic/internal/net_session.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/timeline.h"
#include "cohort/elastic/internal/arithmetic.h"
#include "cohort/elastic/internal/hellos.h"

namespace cohort::elastic {
namespace {

using base::concat;
using base::Timeline;
using membership::Generation;
using membership::RankStatus;
using membership::Recovery;
using Clock = base::Deadline::Clock;

constexpr std::uint32_t kHelloChannel = 1;

// Of a row of its own: a step that is made again is longer than what it is in on the thread's row.
void mark_part(const char* part, Clock::time_point begin) {
  if (Timeline::enabled()) Timeline::complete(part, begin, {.track = Timeline::track("elastic changes")});
}

double ms_between(Clock::time_point begin, Clock::time_point end) {
  return std::round(std::chrono::duration<double, std::milli>(end - begin).count() * 10) / 10;
}

}  // namespace

/// Of one change, for its line in the log.
struct NetSession::Times {
  Clock::time_point begin = Clock::now(), heard = begin, connected = begin, recovered = begin;
  double dropped_ms = 0;  // time that went into a step which nobody finishes
  std::uint64_t bytes = 0;
  std::size_t num_holders = 0;
};

NetSession::NetSession(membership::RankLink link, int virtual_ranks, const SessionOptions& options)
    : virtual_ranks_(virtual_ranks), options_(options) {
  // Attempts to connect may outlive the session.
  const auto agent = std::make_shared<std::weak_ptr<AgentLink>>();
  inbox_ = std::make_shared<ProcessInbox>([agent](membership::MemberId member) {
    const auto link = agent->lock();
    if (link == nullptr) return;
    link->update([&](RankStatus& status) {
      if (std::ranges::find(status.lost_links, member) == status.lost_links.end()) {
        status.lost_links.push_back(member);
      }
    });
  });
  agent_ = std::make_shared<AgentLink>(
      std::move(link),
      AgentLink::Listener{
          .on_order = [inbox = inbox_](membership::RankOrder order) { inbox->on_order(std::move(order)); },
          .on_region = [inbox = inbox_](base::Fd file) { inbox->on_region(std::move(file)); },
          .on_end = [inbox = inbox_](std::string why) { inbox->on_agent_end(std::move(why)); }});
  *agent = agent_;
  inbox_->on_long_wait([agent](bool is_waiting) {
    if (const auto link = agent->lock()) {
      link->update([&](RankStatus& status) { status.is_waiting = is_waiting; });
    }
  });
  connections_ = std::make_unique<Connections>(inbox_);
  step_began_ = Clock::now();
}

// The node first: its thread tells the agent of lost links.
NetSession::~NetSession() {
  exchange_.reset();
  scope_.reset();
  inbox_->close();
  connections_.reset();
}

GenerationScope& NetSession::scope(const char* wanted) {
  if (exchange_ == nullptr) {
    throw UsageError("elastic.session", concat(wanted, " of a process that is in no generation"),
                     "Session::enter() first, and not after finish()");
  }
  if (scope_ == nullptr) {
    scope_ = GenerationScope::make(inbox_, {.generation = info_.generation,
                                            .process = info_.process,
                                            .num_processes = info_.num_processes,
                                            .store = inbox_->generation().store,
                                            .is_over_hosts = inbox_->generation().members.size() > 1,
                                            .timeout = options_.timeout,
                                            .exchange = exchange_});
    scope_->set_changing(is_changing_);
  }
  scope_->check_call();
  return *scope_;
}

comm::Group NetSession::make_group(const GroupOptions& options) {
  return scope("a group").make_group(options);
}

c10::intrusive_ptr<c10d::Store> NetSession::store() {
  return scope("the store").store();
}

void NetSession::begin_changes() {
  is_changing_ = true;
  if (scope_ != nullptr) scope_->set_changing(true);
  if (region_ != nullptr) region_->mark_changing(committed_ + 1);
  base::reach_fault_point("changes");
}

void NetSession::commit(std::uint64_t steps) {
  base::reach_fault_point("commit");
  if (region_ != nullptr) {
    const base::TimelineScope scope("elastic commit");
    region_->commit(steps, state_to_keep());
  }
  is_changing_ = false;
  if (scope_ != nullptr) scope_->set_changing(false);
  committed_ = steps;
  end_step();
  inbox_->set_committed(steps);
  agent_->update(
      [&](RankStatus& status) {
        status.committed_steps = steps;
        status.stepped = info_.generation;
      },
      std::exchange(is_first_step_, false) ? AgentLink::When::kNow : AgentLink::When::kSoon);
}

void NetSession::end_step() {
  if (is_first_step_) mark_part("redo", step_began_);
  const auto now = Clock::now();
  if (exchange_ != nullptr) stragglers_.add_step(exchange_->end_step(now - step_began_));
  step_began_ = now;
}

GenerationInfo NetSession::enter(std::uint64_t committed_steps) {
  if (!state_.save || !state_.load) {
    throw UsageError("elastic.session", "a session without a state enters", "Session::set_state()");
  }
  if (has_ended_) {
    throw UsageError("elastic.session", "the run of this process has ended, and a session is of one run",
                     "one elastic::run or Trainer::fit for each process that cohort run has started");
  }
  const base::TimelineScope scope("elastic change");
  committed_ = committed_steps;
  if (!first_committed_) first_committed_ = committed_steps;
  first_hash_.reset();
  inbox_->set_committed(committed_steps);
  say_ready();
  Times times;
  // Nobody will finish what was computed in the step. Between two steps nothing is dropped, whatever is
  // exchanged there.
  if (exchange_ != nullptr && exchange_->step_began())
    times.dropped_ms = ms_between(*exchange_->step_began(), times.begin);
  is_first_step_ = false;
  for (bool has_taken_over = take_region();;) {
    hash_first_state();
    try {
      inbox_->wait_for_next();
    } catch (const RunEnded&) {
      has_ended_ = true;
      throw;
    }
    has_taken_over = take_region() || has_taken_over;
    if (!inbox_->has_next()) continue;
    times.heard = Clock::now();
    mark_part("agree", times.begin);
    exchange_.reset();
    scope_.reset();  // groups that the user has still end when the next generation is entered
    say_goodbye();
    if (!inbox_->has_process_next()) {
      inbox_->enter([&](const Generation& generation) {
        agent_->update([&](RankStatus& status) { status.left = generation.number; });
      });
      continue;
    }
    try {
      enter_generation(times);
      info_.has_copied = info_.has_copied || has_taken_over;
      return info_;
    } catch (const GenerationEnded& ended) {
      base::log_debug(ended.what());
    }
  }
}

// Memory has come that is to hold the state. Returns whether the state of the process before in this one's
// place is this one's now.
bool NetSession::take_region() {
  base::Fd file = inbox_->take_region();
  if (!file.is_open()) return false;
  try {
    region_ = std::make_unique<StateRegion>(std::move(file));
  } catch (const SystemError& error) {
    base::log_warning(concat("the state of this process dies with it: ", base::message_of(error)));
    return false;
  }
  if (take_over()) return true;
  const bool had_process = region_->found() != CommitWord{};
  region_->forget();
  // Ahead of the first generation, where nobody waits. All wait for a successor.
  if (!had_process && has_first_state() && !inbox_->has_process_next()) region_->prepare(state_.save());
  return false;
}

bool NetSession::take_over() {
  using Phase = CommitWord::Phase;
  const Clock::time_point begin = Clock::now();
  const CommitWord found = region_->found();
  if (found.phase == Phase::kChanging) {
    base::log_info(concat("the process before this one died while it made step ", found.steps,
                          ": its state is of no use"));
  }
  // What this process has itself, as of a checkpoint, may be newer.
  const bool is_new = info_.generation == 0 && !is_changing_;
  if (found.phase != Phase::kCommitted || !is_new || found.steps <= committed_) return false;
  const base::TimelineScope scope("elastic state of the process before");
  std::optional<StateSnapshot> state = region_->read();
  if (!state) return false;
  try {
    const std::size_t end = state->text.find('\n');
    const Arithmetic arithmetic = Arithmetic::parse(state->text.substr(0, end));
    state->text.erase(0, end + 1);
    is_changing_ = true;
    first_hash_.reset();
    state_.load(*state);
    // Last: a process without the state computes as others, from which it copies the state.
    compute_as(arithmetic, "the process before it");
  } catch (const std::exception& error) {
    base::log_warning(
        concat("the state that the process before has left does not fit: ", base::message_of(error)));
    return false;  // it may be half written
  }
  is_changing_ = false;
  has_state_of_run_ = true;  // the agent has the memory for this run alone
  committed_ = found.steps;
  inbox_->set_committed(committed_);
  base::reach_fault_point("taken over");
  agent_->update([&](RankStatus& status) { status.committed_steps = committed_; });
  base::log_info(concat("has the state after ", committed_, " steps of the process before it, in ",
                        ms_between(begin, Clock::now()), " ms"));
  return true;
}

// Of the first hello: others wait for it from the generation's begin on.
void NetSession::hash_first_state() {
  if (has_first_state() && !first_hash_ && !inbox_->has_process_next()) first_hash_ = hash_of(state_.save());
}

// A successor computes with as many threads as this process, whatever it would begin with.
StateSnapshot NetSession::state_to_keep() const {
  StateSnapshot state = state_.save();
  state.text.insert(0, Arithmetic::of_thread().to_text() + "\n");
  return state;
}

// Before others get the state: what moves to the region must not move while they read it.
void NetSession::hold_state() {
  if (region_ != nullptr) region_->commit(committed_, state_to_keep());
}

// Who is still in the generation hears that this process makes no step of it any more. Its hello would come
// too late: it needs the addresses of all, and they come only when all have left.
void NetSession::say_goodbye() {
  const Generation before = inbox_->generation();
  const auto process = inbox_->process();
  if (!process) return;
  for (int to = 0; to < before.num_processes(); ++to) {
    net::Message message;
    message.channel = kHelloChannel;
    message.header = encode({.type = WireType::kGoodbye,
                             .from = static_cast<std::uint32_t>(*process),
                             .generation = before.number,
                             .number = committed_});
    if (const auto peer = inbox_->peer_of(to)) peer->send(std::move(message));
  }
}

void NetSession::enter_generation(Times& times) {
  inbox_->enter([&](const Generation& generation) {
    agent_->update([&](RankStatus& status) {
      status.entered = generation.number;
      status.lost_links.clear();
      status.is_state_lost = false;
    });
  });
  const Generation generation = inbox_->generation();
  const int process = *inbox_->process();
  if (generation.virtual_ranks != virtual_ranks_) {
    throw UsageError(
        "elastic.session",
        concat("the run has ", generation.virtual_ranks, " virtual ranks, and this process ", virtual_ranks_),
        "COHORT_VIRTUAL_RANKS as the agent sets it");
  }
  const base::Deadline until = deadline();
  base::reach_fault_point("entered");
  connections_->connect_all(generation, process, until);
  times.connected = Clock::now();
  mark_part("rebuild", times.heard);
  const bool has_copied = recover(generation, exchange_hellos(generation, process, until), process, times);
  times.recovered = Clock::now();
  has_state_of_run_ = true;
  mark_part("state", times.connected);
  inbox_->set_committed(committed_);
  agent_->update([&](RankStatus& status) {
    status.recovered = generation.number;
    status.committed_steps = committed_;
  });
  exchange_ = std::make_shared<NetSliceExchange>(
      connections_->node(), inbox_,
      ExchangePlace{generation.number, process, generation.num_processes(), options_.timeout});
  log_change(generation, process, times);
  stragglers_.enter(generation, process);
  step_began_ = Clock::now();
  is_first_step_ = true;
  info_ = {.generation = generation.number,
           .process = process,
           .num_processes = generation.num_processes(),
           .steps = committed_,
           .has_copied = has_copied,
           .origin = inbox_->origin()};
}

Recovery NetSession::exchange_hellos(const Generation& generation, int process, base::Deadline deadline) {
  // Initial states may differ, where a program draws its parameters without a seed, or reads another
  // checkpoint. Later ones cannot.
  const bool is_initial = has_first_state();
  if (is_initial && !first_hash_) first_hash_ = hash_of(state_.save());
  const auto self = static_cast<std::uint32_t>(process);
  const Wire hello{.type = WireType::kHello,
                   .from = self,
                   .generation = generation.number,
                   .number = committed_,
                   .value = (is_changing_ ? 0 : kIsWhole) | (has_state_of_run_ ? kIsOfRun : 0),
                   .hash = is_initial ? *first_hash_ : 0,
                   .text = Arithmetic::of_thread().to_text()};
  const auto send_hello = [&](int to) {
    net::Message message;
    message.channel = kHelloChannel;
    message.header = encode(hello);
    if (const auto peer = inbox_->peer_of(to); to != process && peer) peer->send(std::move(message));
  };
  for (int to = 0; to < generation.num_processes(); ++to) send_hello(to);
  base::reach_fault_point("hello");
  std::map<int, Wire> hellos{{process, hello}};
  while (hellos.size() < static_cast<std::size_t>(generation.num_processes())) {
    std::vector<int> missing;
    for (int other = 0; other < generation.num_processes(); ++other) {
      if (!hellos.contains(other)) missing.push_back(other);
    }
    const auto letters = inbox_->take({WireType::kHello, WireType::kNewLink},
                                      {.generation = generation.number,
                                       .is_in_step = false,
                                       .needed = missing,
                                       .deadline = deadline,
                                       .what = concat("the hello of process ", base::join(missing))});
    for (const Letter& letter : letters) {
      const int from = static_cast<int>(letter.wire.from);
      if (letter.wire.type == WireType::kNewLink) {
        send_hello(from);
      } else {
        hellos[from] = letter.wire;
      }
    }
  }
  inbox_->keep_links();
  if (const int other = process_to_compute_as(hellos); other != process) {
    compute_as(Arithmetic::parse(hellos.at(other).text), concat("process ", other));
  }
  return recovery_of(generation, hellos);
}

// Returns whether the state came from others.
bool NetSession::recover(const Generation& generation, const Recovery& recovery, int process, Times& times) {
  if (recovery.is_state_lost()) {
    agent_->update([](RankStatus& status) { status.is_state_lost = true; });
    base::log_error(concat("no process has the state after ", generation.committed_steps,
                           " steps any more: generation ", generation.number, " makes none"));
    // The agents end the run, or a process that has the state comes.
    inbox_->wait([] { return false; }, {.generation = generation.number,
                                        .is_in_step = false,
                                        .needed = {},
                                        .deadline = deadline(),
                                        .what = "the end of a run whose state is lost"});
  }
  const TransferPlace place{.generation = generation.number,
                            .process = process,
                            .holders = recovery.holders(),
                            .behind = recovery.behind(),
                            .chunk_bytes = options_.chunk_bytes,
                            .timeout = options_.timeout,
                            .on_bytes = [this](std::uint64_t bytes) {
                              agent_->update([&](RankStatus& status) { status.state_bytes += bytes; },
                                             AgentLink::When::kSoon);
                            }};
  times.num_holders = place.holders.size();
  if (recovery.has_newest(process)) {
    hold_state();
    if (place.behind.empty()) return false;
    const base::TimelineScope scope("elastic state for others");
    serve_state(*inbox_, place, state_.save());
    return false;
  }
  const base::TimelineScope scope("elastic state copy");
  const PulledState pulled = pull_state(*inbox_, place, state_.save(), [&] {
    is_changing_ = true;
    first_hash_.reset();
    if (region_ != nullptr) region_->mark_changing(recovery.newest());
  });
  state_.load(pulled.state);
  base::reach_fault_point("copied");
  is_changing_ = false;
  committed_ = recovery.newest();
  times.bytes = pulled.bytes;
  confirm_state(*inbox_, place);
  hold_state();
  return true;
}

void NetSession::log_change(const Generation& generation, int process, const Times& times) const {
  const bool has_copied = times.bytes > 0;
  if (process != 0 && !has_copied) return;
  std::string text = concat("generation ", generation.number, ", process ", process, " of ",
                            generation.num_processes(), ", at step ", committed_, " (", generation.cause,
                            "): agree ", ms_between(times.begin, times.heard), " ms, rebuild ",
                            ms_between(times.heard, times.connected), " ms, ");
  if (has_copied) {
    text += concat("copy of ", static_cast<double>(times.bytes) / 1e6, " MB from ", times.num_holders,
                   times.num_holders == 1 ? " process " : " processes ");
  } else {
    text += "state ";
  }
  text += concat(ms_between(times.connected, times.recovered), " ms, dropped step ", times.dropped_ms,
                 " ms, total ", ms_between(times.begin, times.recovered) + times.dropped_ms, " ms");
  base::log_info(text);
}

GenerationInfo NetSession::finish() {
  const auto say_finished = [&] {
    agent_->update([&](RankStatus& status) {
      status.is_finished = true;
      status.stop_signal = stop_signal_;
      status.committed_steps = committed_;
    });
  };
  say_finished();
  exchange_.reset();  // no step is made again from here on
  base::reach_fault_point("finished");
  while (!inbox_->wait_for_end()) {
    try {
      enter(committed_);
    } catch (const RunEnded& ended) {
      if (!ended.has_succeeded()) throw;
      break;
    }
    say_finished();
  }
  has_ended_ = true;
  return info_;
}

}  // namespace cohort::elastic
