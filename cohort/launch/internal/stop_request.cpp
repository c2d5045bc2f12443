#include "cohort/launch/internal/stop_request.h"

#include <signal.h>

#include "cohort/base/signals.h"
#include "cohort/launch/internal/signal_queue.h"

namespace cohort::launch {

StopRequest::SignalType StopRequest::receive(int number) {
  if (number_ == 0) {
    number_ = number;
    return SignalType::kFirst;
  }
  // Where the request came from another node, the first signal here repeats it, however late it is.
  if (number == number_ && !repeat_until_.expired()) return SignalType::kRepeat;
  must_kill_ = true;
  return SignalType::kSecond;
}

void StopRequest::begin_repeat_time() {
  if (repeat_until_.is_never()) repeat_until_ = base::Deadline(base::kSameSignalTime);
}

bool StopRequest::adopt(int number) {
  if (number == 0 || number_ != 0) return false;
  number_ = number;
  return true;
}

bool take_stop_signal(SignalQueue& signals, StopRequest& stop) {
  while (const int number = signals.take()) {
    if (number == SIGTSTP) ::raise(SIGSTOP);
    if (number == SIGUSR1 || number == SIGUSR2 || number == SIGTSTP) continue;
    const StopRequest::SignalType type = stop.receive(number);
    stop.begin_repeat_time();
    if (type != StopRequest::SignalType::kRepeat) return true;
  }
  return false;
}

}  // namespace cohort::launch
