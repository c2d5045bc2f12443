#pragma once

/// The system calls with which this program changes files, counted, so that a child process can be killed at
/// each of them in turn. file_calls.cpp has the C library's functions of these names in its place: a program
/// that links it calls them from Cohort's libraries and from the C++ library alike.
namespace cohort::test {

/// What a file system rejects.
struct FileCallLimits {
  bool can_exchange = true;  ///< renameat2() with RENAME_EXCHANGE
  bool can_link = true;      ///< symlink()
};

void set_file_call_limits(const FileCallLimits& limits);

/// This process is killed (SIGKILL) at the `number`-th call from now on, counted from 0 on, before the call
/// has an effect. (What files hold after a call they hold before the next one.) A negative number: never.
void kill_at_file_call(int number);

}  // namespace cohort::test
