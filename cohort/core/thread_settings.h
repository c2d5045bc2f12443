#pragma once

namespace cohort::core {

/// Sets how many threads an operator of the calling thread uses, and of no other: for a thread of one's own.
void set_num_threads_this_thread(int threads);

}  // namespace cohort::core
