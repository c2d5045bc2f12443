#pragma once

#include <sys/types.h>

#include <chrono>
#include <fstream>
#include <string>

#include "cohort/base/threads/wait.h"

/// What /proc says of a process.
namespace cohort::test {

/// The state letter of proc(5), such as 'R'; 'X' where there is no such process.
inline char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const std::size_t name_end = text.rfind(") ");  // the program's name may hold a parenthesis
  return name_end == std::string::npos ? 'X' : text.at(name_end + 2);
}

/// Whether it has ended; what is left may wait for its parent.
inline bool has_ended(pid_t pid) {
  const char state = process_state(pid);
  return state == 'X' || state == 'Z';
}

/// Whether it has ended before `timeout` is over.
inline bool ends_within(pid_t pid, std::chrono::milliseconds timeout) {
  return base::poll_until([&] { return has_ended(pid); }, base::Deadline(timeout));
}

/// Whether SIGSTOP holds it.
inline bool is_stopped(pid_t pid) {
  return process_state(pid) == 'T';
}

/// Whether it has a handler for the signal.
inline bool catches(pid_t pid, int signal) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("SigCgt:", 0) == 0)
      return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace cohort::test
