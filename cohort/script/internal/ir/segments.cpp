#include "cohort/script/internal/ir/segments.h"

#include <algorithm>

#include "cohort/script/internal/execute/program.h"

namespace cohort::script {
namespace {

// Of each storage: the call of backward after which none uses it, as the number of calls before and with it.
std::vector<std::size_t> last_uses(const Trace& trace) {
  const auto& calls = trace.tape.calls();
  std::vector<std::size_t> last(trace.tape.num_storages(), trace.split);
  for (std::size_t i = trace.split; i < calls.size(); ++i) {
    for (const auto* places : {&calls[i].inputs, &calls[i].results}) {
      for (const TensorPlace& place : *places) {
        for (const int slot : place.slots) {
          if (slot >= 0) last[trace.tape.values()[at_slot(slot)].storage] = i + 1;
        }
      }
    }
  }
  return last;
}

}  // namespace

std::vector<Segment> cut_backward(const Trace& trace, const std::vector<int>& leaves, std::int64_t bytes) {
  const std::size_t end = trace.tape.calls().size();
  const auto& values = trace.tape.values();
  const std::vector<std::size_t> last = last_uses(trace);
  // A hook may change the leaf when it gets the gradient, so backward must be done with the leaf too.
  const auto final_at = [&](std::size_t gradient) {
    const int slot = trace.gradients[gradient];
    const int leaf = gradient < leaves.size() ? leaves[gradient] : kUndefined;
    return std::max(slot < 0 ? trace.split : last[values[at_slot(slot)].storage],
                    leaf < 0 ? trace.split : last[values[at_slot(leaf)].storage]);
  };
  std::vector<std::size_t> order(trace.gradients.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Stable: gradients that are final after the same call keep their order.
  std::ranges::stable_sort(order, {}, final_at);

  std::vector<Segment> segments(1);
  std::int64_t waiting = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const int slot = trace.gradients[order[i]];
    segments.back().gradients.push_back(order[i]);
    if (slot >= 0) waiting += values[at_slot(slot)].layout.bytes();
    // Gradients that are final together are not cut apart, and no cut leaves an empty last segment.
    const bool is_complete = i + 1 == order.size() || final_at(order[i + 1]) > final_at(order[i]);
    if (bytes == 0 || waiting < bytes || !is_complete || final_at(order[i]) == end) continue;
    segments.back().end = final_at(order[i]);
    segments.emplace_back();
    waiting = 0;
  }
  segments.back().end = end;
  return segments;
}

}  // namespace cohort::script
