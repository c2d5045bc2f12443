#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

/// Sleeping on a word of memory that processes share (futex(2)).
namespace cohort::comm::shm {

/// Blocks while `word` holds `expected`, at most `timeout`. May come back early: look again.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout);

/// Wakes every thread, of any process, that sleeps on `word`.
void futex_wake(const std::atomic<std::uint32_t>& word);

}  // namespace cohort::comm::shm
