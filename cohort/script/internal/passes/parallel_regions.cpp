// A forked part of the tape becomes a region: steps that another thread runs while the caller continues
// after them. The caller waits at the first later step that touches what the region writes, or writes what
// it touches. Where the function called wait() does not matter. Steps are compared by sets of storages and
// slots. What is not known to be pure counts as writing all its arguments. Always: steps that run at the same
// time share only what all of them read. Surprising: values that two threads use are released late, after
// all regions that overlap.
#include "cohort/script/internal/passes/parallel_regions.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "cohort/script/internal/execute/execution_plan.h"
#include "cohort/script/internal/passes/memory_schedule.h"

namespace cohort::script {
namespace {

// Storages by their numbers, and slots numbered after all storages.
using MemoryIds = std::unordered_set<std::size_t>;

template <typename Fn>
void each_slot_of(const Tape& tape, const PlannedStep& step, const Fn& fn) {
  if (step.view != kUndefined) {
    fn(step.view);
    fn(step.view_of);
  } else {
    each_slot(tape.calls()[step.call].inputs, fn);
    each_slot(tape.calls()[step.call].results, fn);
  }
}

// What a step, or several, touch: storages, and after them the slots of the frame, as a view has one that it
// fills, of memory that it only reads. What is not pure counts as writing all that it is handed.
struct Touched {
  void add(const Touched& other) {
    all.insert(other.all.begin(), other.all.end());
    written.insert(other.written.begin(), other.written.end());
  }
  MemoryIds all, written;
};

Touched touched_by(const Tape& tape, const PlannedStep& step) {
  Touched touched;
  const OperatorCall& call = tape.calls()[step.call];
  const auto storage = [&](int slot) { return tape.values()[at_slot(slot)].storage; };
  const auto slot_id = [&](int slot) { return tape.num_storages() + at_slot(slot); };
  const bool only_reads = step.view != kUndefined || is_pure(call);
  each_slot_of(tape, step, [&](int slot) {
    touched.all.insert(storage(slot));
    touched.all.insert(slot_id(slot));
    if (!only_reads) touched.written.insert(storage(slot));
  });
  if (step.view != kUndefined) {
    touched.written.insert(slot_id(step.view));
  } else {
    each_slot(call.results, [&](int slot) {
      touched.written.insert(storage(slot));
      touched.written.insert(slot_id(slot));
    });
  }
  return touched;
}

bool intersect(const MemoryIds& a, const MemoryIds& b) {
  const MemoryIds& less = a.size() < b.size() ? a : b;
  const MemoryIds& more = a.size() < b.size() ? b : a;
  return std::any_of(less.begin(), less.end(), [&](std::size_t each) { return more.count(each) != 0; });
}

// The first step at or after region.end that must wait for the region.
std::size_t join_of(std::span<const Touched> steps, const ParallelRegion& region) {
  Touched part;
  for (std::size_t i = region.begin; i < region.end; ++i) part.add(steps[i]);
  for (std::size_t i = region.end; i < steps.size(); ++i) {
    if (intersect(steps[i].all, part.written) || intersect(steps[i].written, part.all)) return i;
  }
  return steps.size();
}

}  // namespace

std::vector<ParallelRegion> find_regions(const Tape& tape, std::span<const PlannedStep> steps) {
  std::vector<ParallelRegion> regions;
  if (tape.forked().empty()) return regions;
  std::vector<Touched> touched;
  touched.reserve(steps.size());
  for (const PlannedStep& step : steps) touched.push_back(touched_by(tape, step));
  const auto step_at = [&](std::size_t call) {
    return static_cast<std::size_t>(std::ranges::lower_bound(steps, call, {}, &PlannedStep::call) -
                                    steps.begin());
  };
  for (const ForkedCalls& forked : tape.forked()) {
    ParallelRegion region{step_at(forked.begin), step_at(forked.end), 0};
    // A part may consist of views that were made once and for all.
    if (region.begin == region.end) continue;
    region.join = join_of(touched, region);
    regions.push_back(region);
  }
  // Who starts a region is who waits, so a region is waited for before another begins that needs it.
  for (ParallelRegion& region : regions) {
    for (const ParallelRegion& later : regions) {
      if (later.begin < region.join && region.join < later.end) region.join = later.begin;
    }
  }
  return regions;
}

std::vector<Concurrent> concurrent_steps(std::span<const ParallelRegion> regions) {
  std::vector<Concurrent> found;
  for (const ParallelRegion& region : regions) {
    // Regions are in order, so only the last stretch can reach into this one.
    if (!found.empty() && region.begin < found.back().end) {
      found.back().end = std::max(found.back().end, region.join);
    } else {
      found.push_back({region.begin, region.join});
    }
  }
  return found;
}

std::vector<int> defer_release(const Tape& tape, std::span<const ParallelRegion> regions,
                               std::span<PlannedStep> steps) {
  std::vector<int> at_the_end;
  for (const Concurrent& all : concurrent_steps(regions)) {
    constexpr std::size_t kCaller = SIZE_MAX, kSeveral = SIZE_MAX - 1;
    const auto thread_of = [&](std::size_t step) {
      for (std::size_t i = 0; i < regions.size(); ++i) {
        if (regions[i].begin <= step && step < regions[i].end) return i;
      }
      return kCaller;
    };
    std::unordered_map<int, std::size_t> users;  // threads, by slot
    for (std::size_t i = all.begin; i < all.end; ++i) {
      const std::size_t thread = thread_of(i);
      each_slot_of(tape, steps[i], [&](int slot) {
        const auto [known, is_new] = users.try_emplace(slot, thread);
        if (!is_new && known->second != thread) known->second = kSeveral;
      });
    }
    // To release is to reset a slot of the frame, which two threads must not do at once.
    std::vector<int>& released_after = all.end < steps.size() ? steps[all.end].releases : at_the_end;
    for (std::size_t i = all.begin; i < all.end; ++i) {
      std::erase_if(steps[i].releases, [&](int slot) {
        // Others were put here after the steps before these.
        const auto found = users.find(slot);
        if (found == users.end() || found->second != kSeveral) return false;
        released_after.push_back(slot);
        return true;
      });
    }
  }
  return at_the_end;
}

}  // namespace cohort::script
