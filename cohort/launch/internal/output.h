#pragma once

#include <poll.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/threads/deadline.h"

/// What ranks print: lines, their prefixes, their last ones, and the way to the terminal. No LibTorch.
namespace cohort::launch {

enum class Stream { kOut, kErr };

/// Cuts bytes into lines and calls `line` with each, without its end. "\n", "\r\n" and "\r" end a line, so a
/// progress bar becomes lines; one above 64 KiB is cut.
class LineSplitter {
 public:
  explicit LineSplitter(std::function<void(std::string_view)> line) : line_(std::move(line)) {}

  void feed(std::string_view bytes);
  /// What has come without an end is a line too.
  void finish();

 private:
  void end_line();

  std::function<void(std::string_view)> line_;
  std::string partial_;
  bool after_return_ = false;
};

/// The last lines of a rank.
class Tail {
 public:
  static constexpr std::size_t kMaxLines = 20;
  static constexpr std::size_t kMaxBytes = 2000;  ///< of one line; the rest is cut

  void add(std::string_view line);
  std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

 private:
  std::deque<std::string> lines_;
};

/// Says which warnings have been shown for another rank: N ranks that warn of the same thing need one line.
///
/// A warning is a line of Cohort's log, "12:34:56 warning TEXT". The n-th time that a rank writes one, it is
/// shown if no rank has written it n times before, so what one rank says twice is seen twice.
class WarningFilter {
 public:
  bool shows(int rank, std::string_view line);

 private:
  static constexpr std::size_t kMaxTexts = 1000;  // then all are shown: no memory without bound

  struct Count {
    int shown = 0;
    std::map<int, int> of_rank;
  };
  std::map<std::string, Count, std::less<>> counts_;
};

/// The way to stdout and stderr of this process. Writing never waits: what the reader cannot take yet stays
/// here. A reader that is gone loses the rest. Threads: one caller at a time.
class Console {
 public:
  explicit Console(int out = 1, int err = 2) : queues_{{out, {}}, {err, {}}} {}

  void write(Stream stream, std::string_view text);
  /// More than 1 MiB waits: read no more from ranks until it is less.
  bool full() const;
  bool empty() const;
  /// Adds what poll() must wait for so that pump() can continue.
  void add_waits(std::vector<pollfd>& waits) const;
  /// Writes what can be written now.
  void pump();
  /// Writes all; gives up at the deadline, or when `stop` says so. True when nothing is left.
  bool flush(base::Deadline deadline, const std::function<bool()>& stop = {});

 private:
  struct Queue {
    int fd;
    std::string bytes;
    std::size_t begin = 0;  // what stands before is written

    std::size_t size() const { return bytes.size() - begin; }
  };
  static void pump(Queue& queue);

  std::vector<Queue> queues_;
};

/// Where what ranks print is shown.
struct Display {
  Console console;
  WarningFilter warnings;
};

}  // namespace cohort::launch
