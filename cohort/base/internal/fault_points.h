#pragma once

#include <functional>

/// Where tests stop or kill a process: points with names in ranks (elastic) and in agents (membership,
/// launch).
namespace cohort::base {

/// Called with the name of each point that the process reaches, on the thread that does. Null: nothing is
/// called. Set before there is a session, or an agent.
void set_fault_hook(std::function<void(const char* point)> hook);

void reach_fault_point(const char* point);

}  // namespace cohort::base
