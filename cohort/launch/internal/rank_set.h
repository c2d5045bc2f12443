#pragma once

#include <string>
#include <vector>

namespace cohort::launch {

/// The ranks of one node, for whoever ends them and passes signals on. Threads: one caller. Not for users of
/// the library.
class RankSet {
 public:
  virtual ~RankSet() = default;

  /// Local ranks that run still.
  virtual std::vector<int> running_ranks() const = 0;
  bool running() const { return !running_ranks().empty(); }
  /// Each rank gets the signal.
  virtual void signal(int number) = 0;
  /// Each rank that would not die of it gets the signal. Returns what there is to say, once, where one does
  /// not get it; else nothing.
  virtual std::string notify(int number) = 0;
  /// Each rank and what it has started stops, or continues: for Ctrl-Z.
  virtual void pause() = 0;
  virtual void resume() = 0;
  /// From here on ranks end because they are told to: SIGTERM for each.
  virtual void stop() = 0;
  /// SIGKILL for each and for what it has started.
  virtual void kill() = 0;
};

}  // namespace cohort::launch
