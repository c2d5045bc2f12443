#include "fake_agents.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/process.h"
#include "cohort/base/threads/wait.h"
#include "tests/support/slowdown.h"

namespace cohort::test {

using base::concat;
using membership::RankLink;
using std::chrono::milliseconds;

namespace {

const std::array<const char*, 14> kPoints = {"entered",     "hello",     "state copy", "copied",  "exchange",
                                             "changes",     "stepped",   "commit",     "moved",   "record",
                                             "before word", "committed", "taken over", "finished"};

}  // namespace

FakeAgents::FakeAgents(Zygote& zygote, const Options& options)
    : zygote_(zygote), options_(options), random_(options.seed) {}

FakeAgents::~FakeAgents() {
  for (const auto& child : children_) {
    if (child->has_ended) continue;
    ::kill(child->pid, SIGKILL);
    ::waitpid(child->pid, nullptr, 0);
  }
}

void FakeAgents::tell(const std::string& line) {
  story_ += line + "\n";
}

std::string FakeAgents::output_of(const Child& child) const {
  const auto path = folder_ / concat("output ", child.pid);
  return std::filesystem::exists(path) ? read_file(path) : "";
}

std::string FakeAgents::story() const {
  std::string text = story_;
  for (const auto& child : children_) text += concat("--- process ", child->pid, "\n", output_of(*child));
  return text;
}

std::vector<std::string> FakeAgents::results() const {
  std::vector<std::string> results;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
    if (entry.path().filename().string().starts_with("result")) results.push_back(read_file(entry.path()));
  }
  return results;
}

FakeAgents::Child& FakeAgents::start(const std::string& point, const std::string& initial_seed) {
  auto [own, theirs] = RankLink::make_pair();
  std::array<int, 2> control{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control.data()) != 0)
    throw std::runtime_error("socketpair");
  const base::Fd control_of_child(control[1]);
  children_.push_back(
      std::make_unique<Child>(Child{.link = std::move(own), .control = base::Fd(control[0])}));
  Child& child = *children_.back();
  const std::size_t number = children_.size();
  const std::string output = (folder_ / concat("output of ", number)).string();
  std::map<std::string, std::string> environment{
      {"TEST_FOLDER", folder_.path().string()},
      {"TEST_STEPS", std::to_string(options_.total_steps)},
      {"TEST_HIDDEN", std::to_string(options_.hidden)},
      {"TEST_BUCKET_BYTES", std::to_string(options_.bucket_bytes)},
      {"TEST_CHUNK_BYTES", std::to_string(options_.chunk_bytes)},
      {"TEST_PLANT", options_.plant.empty() ? "none" : options_.plant},
      {"TEST_POINT", point.empty() ? "none" : point},
      {"TEST_INITIAL_SEED", initial_seed.empty() ? "7" : initial_seed},
      {"COHORT_VIRTUAL_RANKS", std::to_string(options_.virtual_ranks)},
      {"COHORT_LOG", "info"}};
  environment.insert(variables.begin(), variables.end());
  child.pid = zygote_.start(
      environment, {{"COHORT_AGENT_FD", theirs.fd()}, {"TEST_CONTROL_FD", control_of_child.get()}}, output);
  std::filesystem::create_symlink(output, folder_ / concat("output ", child.pid));
  child.process = base::open_process(child.pid);
  child.agent = number;
  child.incarnation = concat("agent ", number);
  tell(concat("process ", child.pid, " starts", point.empty() ? "" : ", with the point ", point));
  return child;
}

std::vector<FakeAgents::Child*> FakeAgents::living() {
  std::vector<Child*> list;
  for (const auto& child : children_) {
    if (!child->has_ended) list.push_back(child.get());
  }
  return list;
}

std::vector<FakeAgents::Child*> FakeAgents::members() {
  std::vector<Child*> list = living();
  std::erase_if(list, [](const Child* child) { return !child->is_member; });
  return list;
}

bool FakeAgents::has_state(const Child& child) const {
  return !child.has_ended && !child.is_killed && !child.is_stopped && child.is_member &&
         child.status.recovered == generation_.number && generation_.number > 0;
}

// Another one has the state.
bool FakeAgents::may_lose(const Child& child) {
  const auto list = living();
  return std::ranges::any_of(list, [&](const Child* other) { return other != &child && has_state(*other); });
}

void FakeAgents::send_order(Child& child) {
  membership::RankOrder order;
  order.number = order.revision = revision_;
  order.origin = origin_;
  order.generation = generation_;
  order.has_ended = has_run_ended_;
  order.has_succeeded = has_succeeded_;
  order.end_cause = has_run_ended_ && !has_succeeded_ ? "a test ends it" : "";
  if (child.is_member) order.process = generation_.first_process(child.id) + child.index;
  try {
    child.link.send(to_text(order), base::Deadline(milliseconds(0)));
  } catch (const CommError&) {  // it has died
  }
}

void FakeAgents::decide(const std::vector<Child*>& members, bool is_planned, const std::string& cause) {
  ++generation_.number;
  generation_.is_planned = is_planned;
  generation_.virtual_ranks = options_.virtual_ranks;
  generation_.committed_steps = committed_;
  generation_.store = store_.address();
  generation_.cause = cause;
  generation_.members.clear();
  std::map<std::size_t, membership::MemberInfo> infos;  // by agent
  for (const auto& child : children_) {
    const bool was_member = child->is_member;
    child->is_member = std::ranges::find(members, child.get()) != members.end();
    if (!child->is_member) continue;
    const bool is_new = !infos.contains(child->agent);
    membership::MemberInfo& info = infos[child->agent];
    if (is_new) info.num_processes = 0;
    if (was_member) info.id = child->id;
    child->index = info.num_processes++;
  }
  for (auto& [agent, info] : infos) {
    if (info.id == 0) info.id = next_id_++;  // an id is never used again
    info.incarnation = concat("agent ", agent);
    info.address = "127.0.0.1:1";
    generation_.members.push_back(info);
  }
  for (Child* const child : members) child->id = infos.at(child->agent).id;
  std::ranges::sort(generation_.members, {}, &membership::MemberInfo::id);
  ++revision_;
  ++counts.generations;
  counts.planned += is_planned ? 1 : 0;
  std::string list;
  for (Child* const child : members) list += concat(" ", child->pid);
  tell(concat("generation ", generation_.number, is_planned ? ", planned" : "", " at ", committed_, ":", list,
              "; ", cause));
  for (Child* const child : members) {
    if (!child->region.is_open() && options_.has_regions) give_region(*child);
  }
  for (Child* const child : living()) send_order(*child);
}

void FakeAgents::read_link(Child& child) {
  try {
    if (child.link.has_unsent()) child.link.flush(base::Deadline(milliseconds(0)));
    while (const auto text = child.link.receive(base::Deadline(milliseconds(0)))) {
      child.status = membership::parse_rank_status(*text);
      committed_ = std::max(committed_, child.status.committed_steps);
      if (child.status.is_state_lost && child.status.entered == generation_.number && child.is_member) {
        const auto has_it = [&](const auto& other) { return holds_state(*other); };
        failure_ = options_.loses_last && std::ranges::none_of(children_, has_it)
                       ? kStateLost
                       : concat("process ", child.pid, " says that the state is lost");
      }
    }
  } catch (const CommError&) {  // its process says that it has ended
  }
}

void FakeAgents::on_end(Child& child) {
  ::waitpid(child.pid, &child.exit_status, 0);
  child.has_ended = true;
  const bool was_killed = WIFSIGNALED(child.exit_status) && WTERMSIG(child.exit_status) == SIGKILL;
  tell(concat("process ", child.pid, " has ended with ", child.exit_status));
  if (!was_killed && child.exit_status != 0)
    failure_ = concat("process ", child.pid, " ended with ", child.exit_status);
  if (child.is_member && !has_run_ended_) must_decide_ = true;
}

void FakeAgents::handle(milliseconds timeout) {
  const std::vector<Child*> list = living();
  std::vector<pollfd> files;
  for (Child* const child : list) {
    files.push_back(
        {child->link.fd(), static_cast<short>(child->link.has_unsent() ? POLLIN | POLLOUT : POLLIN), 0});
    files.push_back({child->control.get(), static_cast<short>(child->is_asking ? 0 : POLLIN), 0});
    files.push_back({child->process.get(), POLLIN, 0});
  }
  base::wait_for_files(files, base::Deadline(timeout));
  for (std::size_t i = 0; i < list.size(); ++i) {
    Child& child = *list[i];
    if (files[3 * i].revents != 0) read_link(child);
    char question = 0;
    if ((files[3 * i + 1].revents & POLLIN) != 0 &&
        ::recv(child.control.get(), &question, 1, MSG_DONTWAIT) == 1) {
      child.is_asking = true;
    }
    if (files[3 * i + 2].revents != 0) on_end(child);
  }
}

void FakeAgents::handle_until(const std::function<bool()>& condition, const std::string& what) {
  const base::Deadline deadline(kSlowdown * std::chrono::seconds(30));
  while (!condition()) {
    deadline.check("test.agents", what + "\n" + story());
    handle(milliseconds(20));
    if (!failure_.empty()) throw std::runtime_error(failure_ + "\n" + story());
  }
}

void FakeAgents::kill(Child& child) {
  tell(concat("process ", child.pid, " is killed"));
  ++counts.kills;
  child.is_killed = true;
  ::kill(child.pid, SIGKILL);
}

// Some of those that are ready, one of which has the state.
void FakeAgents::choose_members(bool is_planned, const std::string& cause) {
  using Group = std::vector<Child*>;  // of an agent
  std::map<std::size_t, Group> groups;
  for (Child* const child : living()) {
    if (!child->is_killed) groups[child->agent].push_back(child);
  }
  std::vector<Group> ready;
  for (const auto& [agent, group] : groups) {
    const auto is_ready = [](const Child* child) { return child->status.is_ready && !child->is_stopped; };
    if (std::ranges::all_of(group, is_ready)) ready.push_back(group);
  }
  Group all_ready;
  for (const Group& group : ready) all_ready.insert(all_ready.end(), group.begin(), group.end());
  const bool has_regions = options_.has_regions && generation_.number > 0;
  if (has_regions && !is_planned && !is_state_there(all_ready)) return;
  if (ready.empty()) return;
  const auto is_member = [](const Group& group) { return group.front()->is_member; };
  const auto holds = [&](const Group& group) {
    return std::ranges::any_of(group, [&](const Child* child) { return holds_state(*child); });
  };
  std::ranges::shuffle(ready, random_);
  // Holders first: none of them is left out but by notice, which a planned change is.
  if (generation_.number > 0) {
    if (!is_planned) std::ranges::stable_partition(ready, is_member);
    if (!is_planned) std::ranges::stable_partition(ready, holds);
    const auto holder = std::ranges::find_if(ready, [&](const Group& group) {
      return std::ranges::any_of(group, [&](const Child* child) { return has_state(*child); });
    });
    // Of an unplanned change all survivors are members, and who has the state.
    if (holder == ready.end() && is_planned) return;
    if (is_planned) std::iter_swap(ready.begin(), holder);
  }
  const std::size_t count = 1 + pick(static_cast<std::uint64_t>(options_.max_processes));
  Group chosen;
  for (const Group& group : ready) {
    const bool is_survivor = generation_.number > 0 && !is_planned && (is_member(group) || holds(group));
    if (chosen.size() >= count && !is_survivor) break;
    if (chosen.size() + group.size() > static_cast<std::size_t>(options_.virtual_ranks)) continue;
    chosen.insert(chosen.end(), group.begin(), group.end());
  }
  must_decide_ = false;
  decide(chosen, is_planned, cause);
}

void FakeAgents::make_event() {
  const std::vector<Child*> list = members();
  const std::uint64_t kind = pick(10);
  if (list.empty()) return;
  Child& victim = *list[pick(list.size())];
  if (kind < 4) {
    const bool may_die = may_lose(victim) || (options_.loses_last && has_state(victim));
    if (may_die && !victim.is_stopped && !victim.is_killed) kill(victim);
  } else if (kind < 7) {
    choose_members(/*is_planned=*/true, "another number of processes");
  } else if (kind < 8) {
    const auto is_other_with_state = [&](const Child* child) {
      return child->agent != victim.agent && has_state(*child);
    };
    if (!std::ranges::any_of(list, is_other_with_state) || victim.is_stopped) return;
    ++counts.stops;
    for (Child* const child : living()) {
      if (child->agent != victim.agent || child->is_killed) continue;
      tell(concat("process ", child->pid, " is stopped"));
      ::kill(child->pid, SIGSTOP);
      child->is_stopped = true;
    }
    must_decide_ = true;
  } else {
    continue_stopped();
  }
}

// They hear that they are out.
void FakeAgents::continue_stopped() {
  for (Child* const child : living()) {
    if (!child->is_stopped) continue;
    ::kill(child->pid, SIGCONT);
    child->is_stopped = false;
    child->is_member = false;
  }
}

void FakeAgents::release(Child& child) {
  child.is_asking = false;
  child.held_in = 0;
  static_cast<void>(::send(child.control.get(), "g", 1, MSG_NOSIGNAL));
}

// At its point a process is killed, continues, or waits there until others have left its generation.
void FakeAgents::answer(Child& child) {
  if (!child.is_asking || child.is_stopped || child.is_killed) return;
  if (child.held_in != 0) {
    if (child.held_until.expired() || (generation_.number > child.held_in && pick(3) == 0)) release(child);
    return;
  }
  const std::uint64_t kind = pick(5);
  if (kind == 0) return release(child);
  if (kind < 3) {
    tell(concat("process ", child.pid, " waits at its point"));
    ++counts.holds;
    child.held_in = std::max<std::uint64_t>(generation_.number, 1);
    child.held_until = base::Deadline(milliseconds(100 + pick(200)));
    return;
  }
  if (!may_lose(child) && !may_lose_last(child)) return release(child);
  tell(concat("process ", child.pid, " is at its point"));
  ++counts.kills_at_points;
  kill(child);
}

std::string FakeAgents::run() {
  const auto start_any = [&] {
    const auto max_ranks = static_cast<std::uint64_t>(options_.max_ranks);
    const std::uint64_t num_ranks = max_ranks == 1 ? 1 : 1 + pick(max_ranks);
    const std::size_t agent = children_.size() + 1;
    for (std::uint64_t i = 0; i < num_ranks; ++i) {
      const bool has_point = pick(2) == 0;
      Child& child = start(
          has_point ? concat(kPoints.at(pick(kPoints.size())), ":", 1 + pick(pick(2) == 0 ? 3 : 30)) : "");
      child.agent = agent;
      // The others get it with their place, as a process in reserve.
      if (options_.has_regions && pick(2) == 0) give_region(child);
    }
  };
  for (std::uint64_t i = 0; i < 2 + pick(3); ++i) start_any();
  try {
    handle_until(
        [&] {
          return std::ranges::any_of(living(), [](const Child* child) { return child->status.is_ready; });
        },
        "a process that is ready");
    must_decide_ = true;  // an agent may not have all its processes yet
    choose_members(false, "the start");
    const base::Deadline deadline(kSlowdown * std::chrono::seconds(60));
    int num_events = 0;
    base::Deadline next_event(milliseconds(2 + pick(20)));
    const auto is_finished = [&] {
      const auto list = members();
      return !list.empty() && !must_decide_ && std::ranges::all_of(list, [&](const Child* child) {
        return child->status.is_finished && child->status.recovered == generation_.number &&
               !child->is_killed;
      });
    };
    while (!is_finished()) {
      deadline.check("test.agents", "the end of the run");
      handle(milliseconds(std::min<int>(20, next_event.remaining_ms())));
      if (!failure_.empty()) return failure_;
      for (Child* const child : living()) answer(*child);
      // A death is known before others decide.
      if (must_decide_) choose_members(false, "a process is gone");
      if (living().size() < 2 || (living().size() < 6 && pick(40) == 0)) {
        start_any();
        ++counts.joins;
      }
      // A link to a process that lives: the same members, with new links.
      for (Child* const child : members()) {
        if (child->status.entered == generation_.number && !child->status.lost_links.empty() &&
            !child->is_stopped) {
          handle(milliseconds(1));  // its death may be known by now
          if (!must_decide_) choose_members(false, "a link is lost");
          break;
        }
      }
      if (next_event.expired()) {
        if (num_events < options_.num_events && generation_.number > 0) {
          ++num_events;
          make_event();
        } else if (num_events == options_.num_events) {
          continue_stopped();  // the end of the run waits for one that is stopped while it writes
        }
        next_event =
            base::Deadline(milliseconds(2 + pick(static_cast<std::uint64_t>(options_.max_event_ms))));
      }
    }
    end_run(true);
  } catch (const std::exception& error) {
    return error.what();
  }
  return failure_.empty() ? missing_step() : failure_;
}

std::string FakeAgents::missing_step() const {
  std::vector<bool> steps(options_.total_steps + 1, false);
  steps[0] = true;
  std::istringstream lines(read_file(folder_ / "ledger"));
  for (std::uint64_t step = 0; lines >> step;) steps.at(step) = true;
  const auto missing = std::ranges::find(steps, false);
  return missing == steps.end() ? "" : concat("the ledger lacks step ", missing - steps.begin());
}

void FakeAgents::end_run(bool has_succeeded) {
  has_run_ended_ = true;
  has_succeeded_ = has_succeeded;
  ++revision_;
  for (Child* const child : living()) {
    if (child->is_stopped) ::kill(child->pid, SIGCONT);
    if (child->is_asking) static_cast<void>(::send(child->control.get(), "g", 1, MSG_NOSIGNAL));
    child->is_asking = false;
    send_order(*child);
  }
  handle_until(
      [&] {
        for (Child* const child : living()) {
          if (!std::exchange(child->is_asking, false)) continue;
          static_cast<void>(::send(child->control.get(), "g", 1, MSG_NOSIGNAL));
        }
        return living().empty();
      },
      "the end of all processes");
}

}  // namespace cohort::test
