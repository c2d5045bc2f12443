#pragma once

/// The system calls that list folders, of which one can fail. folder_calls.cpp has the C library's functions
/// of these names in its place.
namespace cohort::test {

/// The `number`-th call from now on, counted from 0 on, fails with `error`; a negative number: none.
void fail_folder_call(int number, int error);

}  // namespace cohort::test
