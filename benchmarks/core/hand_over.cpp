// What handing a function to another thread costs, from the call to its first line there: base::SerialQueue
// with threads that have a core each, with two threads on one core, and to a thread that sleeps; beside that
// the least that Linux takes to wake a thread, a bare futex, in turn; and a std::async of the same.
// Run: core_hand_over [rounds]
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "cohort/base/threads/serial_queue.h"
#include "cohort/bench/compare.h"

namespace {

namespace bench = cohort::bench;
namespace base = cohort::base;
using Clock = std::chrono::steady_clock;
const base::Deadline kDeadline(std::chrono::seconds(150));

struct Way {
  const char* name;
  std::function<Clock::time_point()> hand_over;  // returns when the function began
};

// In turn, each after a pause in which the other thread may fall asleep.
void report(int rounds, std::chrono::microseconds pause, const std::vector<Way>& ways) {
  std::vector<bench::Variant> variants;
  for (const Way& way : ways) {
    variants.push_back(bench::Variant::sampled(way.name, [pause, hand_over = way.hand_over] {
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
      const auto begin = Clock::now();
      return std::chrono::duration<double>(hand_over() - begin).count();
    }));
  }
  const auto options = bench::CompareOptions().timeit(bench::TimeitOptions().rounds(rounds));
  std::puts(bench::compare(variants, options).text().c_str());
}

Clock::time_point give(base::SerialQueue& thread) {
  return thread.submit("now", [] { return Clock::now(); }).get(kDeadline);
}

// A thread that sleeps in a futex until it is told to read the clock.
class BareFutex {
 public:
  explicit BareFutex(const base::CpuSet& cpus)
      : thread_([this, cpus] {
          cpus.pin_current_thread();
          for (int seen = 0;; ++seen) {
            while (asked_.load() == seen) call(FUTEX_WAIT_PRIVATE, seen);
            if (stopping_) return;
            time_ = Clock::now();
            answered_.store(seen + 1);
          }
        }) {}
  ~BareFutex() {
    stopping_ = true;
    ask();
    thread_.join();
  }
  BareFutex(const BareFutex&) = delete;
  BareFutex& operator=(const BareFutex&) = delete;

  Clock::time_point now() {
    const int number = ask();
    while (answered_.load() != number) std::this_thread::yield();
    return time_;
  }

 private:
  int ask() {
    const int number = asked_.fetch_add(1) + 1;
    call(FUTEX_WAKE_PRIVATE, 1);
    return number;
  }
  void call(int operation, int value) {
    ::syscall(SYS_futex, &asked_, operation, value, nullptr, nullptr, 0);
  }

  std::atomic<int> asked_{0}, answered_{0};
  std::atomic<bool> stopping_{false};
  Clock::time_point time_;
  std::thread thread_;
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5000;
  const std::chrono::microseconds none(0), pause(1000);
  const std::vector<int> cores = base::CpuSet::of_process().ids();
  const base::CpuSet first({cores.front()}), last({cores.back()});
  std::printf("From the call to the function; %zu cores, %d rounds\n", cores.size(), rounds);
  {
    base::SerialQueue a({.name = "a", .cpus = first}), b({.name = "b", .cpus = last});
    BareFutex bare(last);
    a.submit("rounds", [&] {
       report(rounds, none, {{"thread to thread, a core each, at once", [&] { return give(b); }}});
       report(rounds / 5, pause,
              {{"the same after 1 ms, in which it fell asleep", [&] { return give(b); }},
               {"a bare futex, after 1 ms", [&] { return bare.now(); }}});
     }).get(kDeadline);
    report(rounds, none, {{"from outside, at once", [&] { return give(a); }}});
  }
  {
    base::SerialQueue a({.name = "a", .cpus = first}), b({.name = "b", .cpus = first});
    a.submit("rounds", [&] {
       report(rounds, none, {{"thread to thread, one core for both", [&] { return give(b); }}});
     }).get(kDeadline);
  }
  report(rounds / 5, none, {{"std::async (a thread each time)", [] {
                               return std::async(std::launch::async, [] { return Clock::now(); }).get();
                             }}});
  return 0;
}
