#pragma once

namespace cohort::core {

/// Sets how many threads an operator of the calling thread uses, and of no other: for a thread of one's own.
void set_own_threads(int threads);

}  // namespace cohort::core
