#pragma once

namespace cohort::memory {

/// Has memory of large tensors, and large blocks of glibc's malloc, stay with the process instead of going
/// back to the system on every step.
///
/// A training step allocates and frees the same large blocks again and again; by default each costs a system
/// call and a page fault per 4 KiB. Worth 1.4x to 1.8x on a convolutional step on CPU
/// (docs/measurements/performance.md), at the price of memory that stays with the process. Numbers do not
/// change. Two parts: tensors from 1 MiB on come from one pool for all threads, which bounds what it keeps;
/// glibc's malloc keeps large blocks too. The program calls this first in main; a program of one's own
/// should too. Does nothing, and returns false, when COHORT_ALLOCATOR is `system`, when
/// the user has set glibc's own variables (GLIBC_TUNABLES, MALLOC_MMAP_THRESHOLD_), and, which it says once,
/// with another malloc than glibc's; leaves tensors alone where LibTorch has another CPU allocator than its
/// own. Throws: ConfigError when COHORT_ALLOCATOR is neither `tuned` nor `system`.
bool tune_allocator();

}  // namespace cohort::memory
