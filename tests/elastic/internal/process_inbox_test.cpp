#include "cohort/elastic/internal/process_inbox.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <thread>

#include "cohort/elastic/session.h"
#include "tests/elastic/ring.h"
#include "tests/support/comes_true.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

// In the kernel: it waits.
bool is_asleep(pid_t thread) {
  const std::string stat = test::read_file(base::concat("/proc/self/task/", thread, "/stat"));
  return stat.find(") S ") != std::string::npos;
}

TEST(ProcessInboxTest, WhoWaitsForTheEndHearsThatAProcessIsGivenUp) {
  ProcessInbox inbox([](membership::MemberId) {});
  inbox.on_order(test::order_of(1, 0, 2));
  inbox.enter([](const membership::Generation&) {});
  std::atomic<pid_t> waiting{0};
  std::exception_ptr end;
  std::thread waiter([&] {
    waiting = ::gettid();
    end = inbox.wait_for_end_of(1, base::Deadline(std::chrono::seconds(10)));
  });
  test::wait_until([&] { return waiting != 0 && is_asleep(waiting); });
  const ProcessInbox::WaitEnd late{.generation = 1,
                                   .is_in_step = true,
                                   .needed = {1},
                                   .deadline = base::Deadline(std::chrono::milliseconds(0)),
                                   .what = "process 1"};
  COHORT_EXPECT_THROW_WITH(inbox.give_up(late), GenerationEnded, "ms for process 1");
  const base::Deadline soon(std::chrono::seconds(5));
  waiter.join();
  EXPECT_FALSE(soon.expired()) << "it was not woken";
  ASSERT_NE(end, nullptr);
  COHORT_EXPECT_THROW_WITH(std::rethrow_exception(end), GenerationEnded, "process 1 is lost: waited");
}

}  // namespace
}  // namespace cohort::elastic
