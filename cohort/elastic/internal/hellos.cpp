#include "cohort/elastic/internal/hellos.h"

#include <algorithm>
#include <optional>

namespace cohort::elastic {

using membership::Recovery;

Recovery recovery_of(const membership::Generation& generation, const std::map<int, Wire>& hellos) {
  const auto is_whole_of_run = [](const Wire& wire) { return wire.value == (kIsWhole | kIsOfRun); };
  const bool has_run =
      std::ranges::any_of(hellos, [&](const auto& hello) { return is_whole_of_run(hello.second); });
  std::map<std::uint64_t, std::uint64_t> hashes;  // by steps
  for (const auto& [from, wire] : hellos) {
    const bool is_trusted = has_run ? is_whole_of_run(wire) : (wire.value & kIsWhole) != 0;
    if (is_trusted && wire.hash != 0) hashes.try_emplace(wire.number, wire.hash);
  }
  Recovery recovery(generation);
  for (const auto& [from, wire] : hellos) {
    const auto hash = hashes.find(wire.number);
    const bool is_same = hash != hashes.end() && wire.hash == hash->second;
    const bool is_known = hash == hashes.end() || wire.hash == 0 || is_same;
    const bool counts = (wire.value & kIsWhole) != 0 && (is_whole_of_run(wire) ? is_known : is_same);
    recovery.on_hello(from, counts ? std::optional(wire.number) : std::nullopt);
  }
  return recovery;
}

int process_to_compute_as(const std::map<int, Wire>& hellos) {
  for (const auto& [from, wire] : hellos) {
    if ((wire.value & kIsOfRun) != 0) return from;
  }
  return hellos.begin()->first;
}

}  // namespace cohort::elastic
