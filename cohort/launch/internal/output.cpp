// The console writes only where poll() says that it can, and at most PIPE_BUF bytes at a time. A pipe that is
// ready takes that much without waiting, so no write blocks the agent. Always: bytes of a stream leave in the
// order of write(), and those before `begin` are written. A line, the tail of a rank and the table of
// warnings are bounded, so a long job needs no more memory.
#include "cohort/launch/internal/output.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>

#include "cohort/base/threads/wait.h"

namespace cohort::launch {
namespace {

constexpr std::size_t kMaxLine = 64 * 1024;
constexpr std::size_t kMaxQueued = 1024 * 1024;

// The text of a line that reads "12:34:56 warning TEXT"; empty for all others.
std::string_view warning_text(std::string_view line) {
  constexpr std::string_view kPattern = "dd:dd:dd warning ";
  if (line.size() <= kPattern.size()) return {};
  for (std::size_t i = 0; i < kPattern.size(); ++i) {
    const bool fits = i < 8 && kPattern[i] == 'd' ? std::isdigit(static_cast<unsigned char>(line[i])) != 0
                                                  : kPattern[i] == line[i];
    if (!fits) return {};
  }
  return line.substr(kPattern.size());
}

}  // namespace

void LineSplitter::feed(std::string_view bytes) {
  for (const char c : bytes) {
    // \r\n is one end of a line, and \r alone is one too, as progress bars have it.
    const bool second_half = c == '\n' && after_return_;
    after_return_ = c == '\r';
    if (second_half) continue;
    if (c == '\n' || c == '\r') {
      end_line();
      continue;
    }
    partial_.push_back(c);
    if (partial_.size() >= kMaxLine) end_line();
  }
}

void LineSplitter::finish() {
  if (!partial_.empty()) end_line();
}

void LineSplitter::end_line() {
  line_(partial_);
  partial_.clear();
}

void Tail::add(std::string_view line) {
  if (line.empty()) return;
  lines_.emplace_back(line.substr(0, kMaxBytes));
  if (lines_.size() > kMaxLines) lines_.pop_front();
}

bool WarningFilter::shows(int rank, std::string_view line) {
  const std::string_view text = warning_text(line);
  if (text.empty()) return true;
  auto at = counts_.find(text);
  if (at == counts_.end()) {
    if (counts_.size() >= kMaxTexts) return true;
    at = counts_.emplace(text, Count{}).first;
  }
  Count& count = at->second;
  // Ranks warn alike: the k-th time that a text comes is shown for the first rank that comes to it.
  if (++count.of_rank[rank] <= count.shown) return false;
  ++count.shown;
  return true;
}

void Console::write(Stream stream, std::string_view text) {
  queues_[stream == Stream::kOut ? 0 : 1].bytes.append(text);
}

bool Console::full() const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [](const Queue& queue) { return queue.size() > kMaxQueued; });
}

bool Console::empty() const {
  return std::all_of(queues_.begin(), queues_.end(), [](const Queue& queue) { return queue.size() == 0; });
}

void Console::add_waits(std::vector<pollfd>& waits) const {
  for (const Queue& queue : queues_) {
    if (queue.size() > 0) waits.push_back({queue.fd, POLLOUT, 0});
  }
}

void Console::pump(Queue& queue) {
  while (queue.size() > 0) {
    if (base::ready_events(queue.fd, POLLOUT) == 0) break;
    // A pipe that is ready takes this much without waiting.
    const std::size_t size = std::min<std::size_t>(queue.size(), PIPE_BUF);
    const ssize_t count = ::write(queue.fd, queue.bytes.data() + queue.begin, size);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) break;
    if (count <= 0) {  // nobody reads any more
      queue.begin = queue.bytes.size();
      break;
    }
    queue.begin += static_cast<std::size_t>(count);
  }
  // Not after each write, so that a byte is moved about once in all.
  if (queue.begin > queue.bytes.size() / 2) {
    queue.bytes.erase(0, queue.begin);
    queue.begin = 0;
  }
}

void Console::pump() {
  for (Queue& queue : queues_) pump(queue);
}

bool Console::flush(base::Deadline deadline, const std::function<bool()>& stop) {
  for (pump(); !empty() && !deadline.expired() && !(stop && stop()); pump()) {
    std::vector<pollfd> waits;
    add_waits(waits);
    base::wait_for_files(waits, base::Deadline(std::chrono::milliseconds(100)).sooner(deadline));
  }
  return empty();
}

}  // namespace cohort::launch
