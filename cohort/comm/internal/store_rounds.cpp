// The first rank to claim a round asks. Each rank that sees the question leaves its answer under its own
// number, and who asked logs the table. Ranks that fail soon after wait for that table instead of a table
// each. A rank that fails leaves a last answer too, since it may be gone when somebody asks. Always: round_
// grows by one for each question that this rank has asked or answered, and nowhere else.
#include "cohort/comm/internal/store_rounds.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPoll(250);         // how often a watch looks whether somebody asks
constexpr int kRanksThatLookOften = 1024;  // more look less often: one store answers them all
constexpr milliseconds kCollect(1500);     // how long the one who asks waits for answers
constexpr milliseconds kLeave(1000);       // how long rank 0 waits for the others to leave
constexpr milliseconds kAnswerSlack(500);  // for the store's own answers, where a wait is the sum of others
constexpr milliseconds kRepeat(10000);     // failures so soon after one table are of the same trouble

constexpr const char* kFailure = "rank ";  // how a question about a failure begins

}  // namespace

StoreRounds::StoreRounds(std::shared_ptr<GroupRegistry> registry,
                         const c10::intrusive_ptr<c10d::Store>& store)
    : registry_(std::move(registry)),
      store_(store->clone()),
      poll_time_(kPoll * std::max(1, registry_->size / kRanksThatLookOften)),
      failure_asked_(Clock::now() - 2 * kRepeat) {}

// Another rank's table may be waited for, and then the others.
milliseconds StoreRounds::end_time() const {
  return table_time() + kLeave + kAnswerSlack;
}

milliseconds StoreRounds::table_time() const {
  return kCollect + poll_time_ + kPoll;
}

std::string StoreRounds::key(const char* what, std::int64_t round, int rank) const {
  return base::concat("desync/", what, "/", round, rank < 0 ? "" : "/" + std::to_string(rank));
}

void StoreRounds::answer_questions() {
  while (store_->check({key("asked", round_)})) {
    store_->set(key("answer", round_, registry_->rank), write_answers(answers_of(*registry_)));
    if (store_->get_to_str(key("asked", round_)).starts_with(kFailure)) failure_asked_ = Clock::now();
    ++round_;
  }
}

void StoreRounds::ask_after_failure(const std::string& what) {
  // For those who ask later: this process may be gone by then.
  store_->set(base::concat("desync/last/", registry_->rank), write_answers(answers_of(*registry_)));
  answer_questions();
  if (Clock::now() - failure_asked_ < kRepeat) return wait_for_table(round_ - 1);
  ask(base::concat(kFailure, registry_->rank, ": ", what), base::LogLevel::kError);
}

// This process may keep the store that the one who asks needs, and that one may have begun a moment later.
// Calls that fail together wait for one table, and once.
void StoreRounds::wait_for_table(std::int64_t round) {
  if (round <= awaited_round_) return;
  awaited_round_ = round;
  base::poll_until([&] { return store_->check({key("table", round)}); }, base::Deadline(table_time()));
}

// Of ranks that ask at once, one gets to. Between looking who asked and this, nobody may look again: who
// lost would ask the next question.
void StoreRounds::ask(const std::string& why, base::LogLevel level) {
  const std::int64_t round = round_;
  if (store_->add(key("claim", round), 1) != 1) return wait_for_table(round);
  store_->set(key("asked", round), why);
  ++round_;
  if (why.starts_with(kFailure)) failure_asked_ = Clock::now();
  std::vector<std::optional<std::vector<Answer>>> answers(static_cast<std::size_t>(registry_->size));
  answers[static_cast<std::size_t>(registry_->rank)] = answers_of(*registry_);
  const auto have_all = [&] {
    bool all = true;
    for (int rank = 0; rank < registry_->size; ++rank) {
      auto& answer = answers[static_cast<std::size_t>(rank)];
      if (!answer) answer = fetch(key("answer", round, rank));
      if (!answer) answer = fetch(base::concat("desync/last/", rank));
      all = all && answer.has_value();
    }
    return all;
  };
  base::poll_until(have_all, base::Deadline(kCollect + poll_time_ - kPoll));
  base::log(level, base::concat("what the ranks were doing (", why, "):\n", join_answers(answers)));
  store_->set(key("table", round), "1");
}

std::optional<std::vector<Answer>> StoreRounds::fetch(const std::string& name) {
  if (!store_->check({name})) return std::nullopt;
  return read_answers(store_->get_to_str(name));
}

// The store often goes with rank 0, and LibTorch writes pages about a connection that breaks.
void StoreRounds::leave(bool wait_for_all) {
  store_->add("desync/left", 1);
  if (registry_->rank != 0 || !wait_for_all) return;
  base::poll_until([this] { return store_->add("desync/left", 0) % registry_->size == 0; },
                   base::Deadline(kLeave));
}

}  // namespace cohort::comm
