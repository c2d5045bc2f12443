// A task that is abandoned before it begins does not run.
#include "cohort/base/threads/task.h"

#include "cohort/base/error.h"
#include "cohort/base/timeline.h"

namespace cohort::base::future_detail {

void Task::run() noexcept {
  std::exception_ptr error;
  bool is_wanted = false;
  {
    const std::lock_guard lock(mutex_);
    is_running_ = true;
    is_wanted = on_begin();
  }
  if (!is_wanted) {
    return end(std::make_exception_ptr(
        TimeoutError("base.future", concat(what(), " was given up before it began, and did not run"))));
  }
  try {
    const TimelineScope scope(timeline_name());
    execute();
  } catch (...) {
    error = std::current_exception();
  }
  end(std::move(error));
}

void Task::end(std::exception_ptr error) noexcept {
  drop();
  finish(std::move(error));
}

}  // namespace cohort::base::future_detail
