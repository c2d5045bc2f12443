#pragma once

namespace cohort::core {

/// Tells glibc's malloc to keep large blocks instead of giving them back to the system on every step.
///
/// A training step allocates and frees the same large blocks again and again; by default each costs a system
/// call and a page fault per 4 KiB. Worth 1.4x to 1.5x on a convolutional step on CPU (docs/performance.md),
/// at the price of memory that stays with the process. Numbers do not change. The program calls this first in
/// main; a program of one's own should too. Does nothing, and returns false, when COHORT_ALLOCATOR is
/// `system`, when the user has set glibc's own variables (GLIBC_TUNABLES, MALLOC_MMAP_THRESHOLD_), and, which
/// it says once, with another malloc than glibc's. Throws: ConfigError when COHORT_ALLOCATOR is neither
/// `tuned` nor `system`.
bool tune_allocator();

}  // namespace cohort::core
