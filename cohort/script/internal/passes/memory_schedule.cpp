// List scheduling by memory: of the steps that are ready, the one that adds the fewest bytes runs next. Ties
// go to the tape's order. Dependences are kept by storage: a read stays after the write before it, and a
// write after the reads before it. Steps that are not pure keep their order. The best order is NP-hard to
// find, so this one is greedy, and it is taken only if its peak is lower than the tape's. Always: each
// operator reads the same values as in the tape's order, so no bit changes.
#include "cohort/script/internal/passes/memory_schedule.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace cohort::script {
namespace {

constexpr std::size_t kMaxSteps = 20000;  // the search takes time in the square of it

// Bytes from the first element to the last.
std::int64_t extent_of(const Layout& layout) {
  std::int64_t last = 1;
  for (std::size_t i = 0; i < layout.sizes.size(); ++i) {
    if (layout.sizes[i] == 0) return 0;
    last += (layout.sizes[i] - 1) * layout.strides[i];
  }
  return last * static_cast<std::int64_t>(c10::elementSize(layout.dtype));
}

// What the search knows of a step, by storage.
struct Node {
  std::vector<std::size_t> uses;  // storages
  std::vector<std::size_t> next;  // steps that must come later
  std::size_t waits_for = 0;      // steps that must come first
  bool in_place = false;          // may write its result over an argument that it uses last
};

class Search {
 public:
  Search(const Tape& tape, const std::vector<bool>& kept, std::span<const PlannedStep> steps)
      : tape_(tape), nodes_(steps.size()), bytes_(tape.num_storages()), users_(tape.num_storages()) {
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const Value& value = tape.values()[i];
      bytes_[value.storage] = std::max(bytes_[value.storage], extent_of(value.layout));
      // Memory that outlives the part, or that others made, is not freed by a step.
      if (kept[i] || value.source != Source::kMade) stays_.insert(value.storage);
    }
    made_here_.resize(bytes_.size());
    for (std::size_t i = 0; i < steps.size(); ++i) add(i, steps[i]);
  }

  // The most bytes at once. Values that were there before the part count until they are released.
  std::int64_t peak(const std::vector<std::size_t>& order) {
    State state = begin();
    for (const std::size_t i : order) run(i, state);
    return state.peak;
  }

  std::vector<std::size_t> smallest_first() {
    State state = begin();
    std::vector<std::size_t> waits(nodes_.size()), ready, order;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      waits[i] = nodes_[i].waits_for;
      if (waits[i] == 0) ready.push_back(i);
    }
    while (!ready.empty()) {
      auto best = ready.begin();
      std::int64_t least = growth(*best, state).first;
      for (auto each = ready.begin() + 1; each != ready.end(); ++each) {
        const std::int64_t found = growth(*each, state).first;
        if (found < least || (found == least && *each < *best)) {
          least = found;
          best = each;
        }
      }
      const std::size_t step = *best;
      ready.erase(best);
      run(step, state);
      order.push_back(step);
      for (const std::size_t later : nodes_[step].next) {
        if (--waits[later] == 0) ready.push_back(later);
      }
    }
    return order;
  }

 private:
  struct State {
    std::vector<std::size_t> users_left;
    std::vector<bool> lives;
    std::int64_t now = 0, peak = 0;
  };

  void add(std::size_t number, const PlannedStep& step) {
    const OperatorCall& call = tape_.calls()[step.call];
    const bool is_view = step.view != kUndefined;
    Node& node = nodes_[number];
    std::unordered_set<std::size_t> reads, writes;
    const bool moves = is_view || is_pure(call);
    node.in_place = moves && !is_view && call.op.hasTag(at::Tag::pointwise);
    const auto add_to = [&](std::unordered_set<std::size_t>& storages) {
      return [&](int slot) { storages.insert(tape_.values()[at_slot(slot)].storage); };
    };
    if (is_view) {
      add_to(reads)(step.view_of);
    } else {  // what is not pure counts as writing all that it is handed: schemas of some are silent
      each_slot(call.inputs, add_to(moves ? reads : writes));
      std::unordered_set<std::size_t> made;
      each_slot(call.results, add_to(made));
      for (const std::size_t each : made) {
        // Its first use is as a result, so the part makes this storage.
        if (users_[each] == 0 && reads.count(each) == 0 && writes.count(each) == 0) made_here_[each] = true;
      }
      writes.insert(made.begin(), made.end());
    }
    for (const std::size_t each : writes) reads.erase(each);
    const auto after = [&](std::size_t earlier) {
      if (earlier == number) return;
      nodes_[earlier].next.push_back(number);
      ++node.waits_for;
    };
    const auto after_maker = [&](int slot) {
      if (const auto found = made_by_.find(slot); found != made_by_.end()) after(found->second);
    };
    if (is_view) {
      after_maker(step.view_of);
      made_by_[step.view] = number;
    } else {
      each_slot(call.inputs, after_maker);
      each_slot(call.results, [&](int slot) { made_by_.emplace(slot, number); });
    }
    for (const std::size_t each : reads) {
      if (const auto found = last_write_.find(each); found != last_write_.end()) after(found->second);
      reads_since_[each].push_back(number);
    }
    for (const std::size_t each : writes) {
      if (const auto found = last_write_.find(each); found != last_write_.end()) after(found->second);
      for (const std::size_t reader : reads_since_[each]) after(reader);
      reads_since_[each].clear();
      last_write_[each] = number;
    }
    // Effects that no schema shows, such as draws, keep their order by this chain.
    if (!moves) {
      if (last_fixed_) after(*last_fixed_);
      last_fixed_ = number;
    }
    reads.insert(writes.begin(), writes.end());
    for (const std::size_t each : reads) {
      node.uses.push_back(each);
      ++users_[each];
    }
  }

  State begin() const {
    State state{.users_left = users_, .lives = std::vector<bool>(users_.size())};
    for (std::size_t i = 0; i < made_here_.size(); ++i) state.lives[i] = !made_here_[i];
    return state;
  }

  // Bytes that a step adds in the end, and for a moment.
  std::pair<std::int64_t, std::int64_t> growth(std::size_t step, const State& state) const {
    std::int64_t made = 0, freed = 0;
    bool reuses = false;
    for (const std::size_t each : nodes_[step].uses) {
      if (!state.lives[each]) made += bytes_[each];
    }
    for (const std::size_t each : nodes_[step].uses) {
      if (state.users_left[each] != 1 || stays_.count(each) != 0) continue;
      freed += bytes_[each];
      // The result may take the argument's place, so both do not live at once.
      reuses |= nodes_[step].in_place && state.lives[each] && bytes_[each] == made;
    }
    return {made - freed, reuses ? 0 : made};
  }

  void run(std::size_t step, State& state) const {
    const auto [stays, meanwhile] = growth(step, state);
    state.peak = std::max(state.peak, state.now + meanwhile);
    state.now += stays;
    for (const std::size_t each : nodes_[step].uses) {
      state.lives[each] = true;
      --state.users_left[each];
    }
  }

  const Tape& tape_;
  std::vector<Node> nodes_;
  std::vector<std::int64_t> bytes_;                          // by storage
  std::vector<std::size_t> users_;                           // by storage: how many steps use it
  std::unordered_set<std::size_t> stays_;                    // storages that are kept, or are not the tape's
  std::vector<bool> made_here_;                              // storages that a step makes
  std::unordered_map<int, std::size_t> made_by_;             // steps, by slot
  std::unordered_map<std::size_t, std::size_t> last_write_;  // steps, by storage
  std::unordered_map<std::size_t, std::vector<std::size_t>> reads_since_;
  std::optional<std::size_t> last_fixed_;
};

}  // namespace

bool is_pure(const OperatorCall& call) {
  const c10::FunctionSchema& schema = call.op.schema();
  if (call.is_custom_op || schema.is_mutable()) return false;
  // A draw that moves would give other numbers to the draws that it passes.
  if (call.op.hasTag(at::Tag::nondeterministic_seeded) || schema.returns().size() != 1) return false;
  if (call.results.size() != 1 || call.results.front().kind != TensorPlace::ArgumentType::kTensor)
    return false;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr || argument.name() == "generator") return false;
  }
  return schema.returns().front().alias_info() == nullptr;
}

void order_for_memory(const Tape& tape, const std::vector<bool>& kept, std::span<PlannedStep> steps) {
  if (steps.size() < 3 || steps.size() > kMaxSteps) return;
  Search search(tape, kept, steps);
  std::vector<std::size_t> as_recorded(steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) as_recorded[i] = i;
  const std::vector<std::size_t> found = search.smallest_first();
  if (search.peak(found) >= search.peak(as_recorded)) return;
  std::vector<PlannedStep> moved;
  moved.reserve(steps.size());
  for (const std::size_t i : found) moved.push_back(std::move(steps[i]));
  std::move(moved.begin(), moved.end(), steps.begin());
}

}  // namespace cohort::script
