#include "cohort/launch/internal/agent_output.h"

#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/process.h"
#include "cohort/base/threads/wait.h"

namespace cohort::launch {
namespace {

using base::concat;

bool is_regular_file(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

}  // namespace

// A line of the log waits for who reads stderr (a pager, a terminal that is stopped); ending ranks does not.
// A pipe that is ready takes so much and no more.
void AgentOutput::log(base::LogLevel level, const std::string& text) {
  constexpr std::size_t kHead = 64;  // what the log puts before it
  const bool fits = text.size() + kHead <= PIPE_BUF || is_regular_file(STDERR_FILENO);
  if (fits && base::ready_events(STDERR_FILENO, POLLOUT) != 0) {
    base::log(level, text);
  } else {
    console().write(Stream::kErr, text + "\n");
  }
}

void AgentOutput::report(const AttemptReport& result, int world_size, int attempt, int max_restarts) {
  flush(base::Deadline(std::chrono::seconds(1)));  // the report comes after what ranks have printed
  if (!result.failures.empty()) {
    std::string text = describe(result.failures, world_size);
    if (result.restart) {
      text += concat("\n  all ranks are started again: restart ", attempt + 1, " of ", max_restarts);
    }
    log(result.restart ? base::LogLevel::kWarning : base::LogLevel::kError, text);
  }
  if (result.signal != 0) {
    log(base::LogLevel::kInfo,
        concat("ended by ", base::describe_signal(result.signal), ", with status ", result.status));
  }
}

}  // namespace cohort::launch
