#pragma once

#include <chrono>
#include <string>

/// What a run is given.
namespace cohort::membership {

/// What all agents of a run must have been given alike. The first agent's are the run's.
struct RunSettings {
  std::string run_id = "none";
  int min_nodes = 1, max_nodes = 1;
  int num_spares = 0;     ///< agents beyond max_nodes that take the places of those that are gone
  int max_restarts = 0;   ///< how often ranks may fail, over all agents
  int virtual_ranks = 0;  ///< 0: the program is not elastic
  /// How long fewer than min_nodes agents may be there.
  std::chrono::milliseconds join_timeout = std::chrono::minutes(10);
  /// How long a generation waits for more agents once min_nodes are there. A later agent costs little.
  std::chrono::milliseconds last_call_timeout{0};
  /// An agent that two observers have not heard for so long is given up; a second member need not agree after
  /// kAloneFactor times as long.
  std::chrono::milliseconds silence{500};
  bool is_embedded = true;  ///< the record is in the agent at the rendezvous endpoint, which decides

  bool operator==(const RunSettings&) const = default;
};

/// How many times `silence` an agent must be silent for the one that decides to give it up without a second
/// observer.
inline constexpr int kAloneFactor = 4;

/// Names the first setting in which two differ, with both values; empty where none does.
std::string difference(const RunSettings& given, const RunSettings& of_run);

}  // namespace cohort::membership
