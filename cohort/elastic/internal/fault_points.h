#pragma once

#include <functional>

/// Where tests stop or kill a process.
namespace cohort::elastic {

/// Called with the name of each point that the process reaches, on the thread that does. Null: nothing is
/// called. Set before there is a session.
void set_fault_hook(std::function<void(const char* point)> hook);

void reach_fault_point(const char* point);

}  // namespace cohort::elastic
