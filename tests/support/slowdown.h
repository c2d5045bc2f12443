#pragma once

/// How much longer a test waits for processes that are to succeed: under a sanitizer several of them, which
/// spin, may share a core.
namespace cohort::test {

#ifdef COHORT_IS_SANITIZED
inline constexpr int kSlowdown = 5;
#else
inline constexpr int kSlowdown = 1;
#endif

}  // namespace cohort::test
