// /proc says for each thread which signals it blocks, ignores or handles. A process that handles the signal
// survives, and a process with a thread that would take it as the kernel does by default does not. Where
// every thread blocks it, a single look proves nothing, since a shell blocks all signals for a moment as it
// forks. So these are looked at again and again. Always: a process counts as safe only where no look has
// shown it otherwise.
#include "cohort/launch/internal/survival.h"

#include <sys/syscall.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::launch {
namespace {

// A set of signals is a bit for each, the lowest for signal 1.
struct SignalMasks {
  std::uint64_t blocked = 0, ignored = 0, caught = 0;
};

// Of /proc/PID/task/TID/status; nothing where it cannot be read.
std::optional<SignalMasks> masks_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  SignalMasks masks;
  int found = 0;
  for (std::string line; std::getline(file, line);) {
    std::uint64_t* const mask = line.starts_with("SigBlk:")   ? &masks.blocked
                                : line.starts_with("SigIgn:") ? &masks.ignored
                                : line.starts_with("SigCgt:") ? &masks.caught
                                                              : nullptr;
    if (mask != nullptr && std::istringstream(line.substr(7)) >> std::hex >> *mask) ++found;
  }
  return found == 3 ? std::optional(masks) : std::nullopt;
}

// What a thread waits for in sigwait() or sigtimedwait(). While it does, the kernel does not show these
// signals as blocked.
std::uint64_t awaited_signals(const std::filesystem::path& process, const std::filesystem::path& task) {
  std::ifstream file(task / "syscall");
  long number = -1;
  std::streamoff address = 0;
  if (!(file >> number >> std::hex >> address) || number != SYS_rt_sigtimedwait) return 0;
  std::ifstream memory(process / "mem", std::ios::binary);
  std::uint64_t signals = 0;
  memory.seekg(address);
  memory.read(reinterpret_cast<char*>(&signals), sizeof signals);
  return memory ? signals : 0;
}

}  // namespace

SignalFate fate_of(pid_t process, int signal) {
  const std::uint64_t bit = std::uint64_t{1} << (signal - 1);
  const std::filesystem::path folder = base::concat("/proc/", process);
  std::error_code failed;
  bool has_threads = false, is_awaited = false;
  for (const auto& task : std::filesystem::directory_iterator(folder / "task", failed)) {
    const std::optional<SignalMasks> masks = masks_in(task.path() / "status");
    if (!masks) continue;  // the thread has ended
    if (((masks->caught | masks->ignored) & bit) != 0) return SignalFate::kHandled;
    const bool awaits = (awaited_signals(folder, task.path()) & bit) != 0;
    if (!awaits && (masks->blocked & bit) == 0) return SignalFate::kEnds;
    has_threads = true;
    is_awaited = is_awaited || awaits;
  }
  if (!has_threads) return SignalFate::kEnds;
  return is_awaited ? SignalFate::kAwaited : SignalFate::kBlocked;
}

std::vector<bool> survives(const std::vector<pid_t>& processes, int signal) {
  const base::Deadline deadline(std::chrono::seconds(1));
  return survives(
      processes.size(), [&](std::size_t at) { return fate_of(processes[at], signal); },
      [&] {
        base::sleep(std::chrono::milliseconds(5), base::Deadline::never());
        return !deadline.expired();
      });
}

// A shell that forks blocks all signals for a moment, which is long where cores are busy. A program that
// reads signals from a signalfd has them blocked at each look. Where a thread waits for one, another may
// still be starting a program: a second look tells. All processes are looked at in each round, so that many
// ranks take no longer than one. Looks at thousands of threads take long themselves, and then fewer rounds
// are as far apart.
std::vector<bool> survives(std::size_t count, const std::function<SignalFate(std::size_t)>& fate_of,
                           const std::function<bool()>& pause) {
  constexpr int kRounds = 20, kLeastRounds = 4;
  std::vector<bool> result(count, true);
  std::vector<std::size_t> unclear(count);
  std::iota(unclear.begin(), unclear.end(), std::size_t{0});
  for (int round = 0; round < kRounds && !unclear.empty(); ++round) {
    const bool has_time = round == 0 || pause();
    if (!has_time && round >= kLeastRounds) break;
    std::erase_if(unclear, [&](std::size_t at) {
      const SignalFate fate = fate_of(at);
      if (fate == SignalFate::kEnds) result[at] = false;
      return fate == SignalFate::kEnds || fate == SignalFate::kHandled ||
             (fate == SignalFate::kAwaited && round > 0);
    });
  }
  return result;
}

}  // namespace cohort::launch
