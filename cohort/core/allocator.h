#pragma once

namespace cohort::core {

/// Tells glibc's malloc to keep large blocks instead of giving them back to the system on every step.
///
/// A training step allocates and frees the same large blocks again and again; by default each costs a system
/// call and a page fault per 4 KiB. Worth 1.4x to 1.5x on a convolutional step on CPU (docs/performance.md),
/// at the price of memory that stays with the process. Numbers do not change. The program calls this first in
/// main; a program of one's own should too. Does nothing, and returns false, with another allocator than
/// glibc's, or when the user has set GLIBC_TUNABLES or MALLOC_MMAP_THRESHOLD_.
bool tune_allocator();

}  // namespace cohort::core
