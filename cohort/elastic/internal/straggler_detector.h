#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace cohort::elastic {

/// When a process is slow.
struct StragglerOptions {
  int window = 50;              ///< steps that are looked at together
  int check_every = 10;         ///< steps from one look to the next
  double least_slowdown = 0.1;  ///< the median step is longer than that of the others by this share
  double least_share = 0.7;     ///< of the steps in which it is late, by half of `least_slowdown`
  double least_errors = 6;      ///< the median slowdown is so many standard errors above none
};

/// A process of the generation.
struct StragglerProcess {
  std::string name;           ///< the same process has it in each generation
  int num_virtual_ranks = 1;  ///< that it computes in a step
};

/// A process is slow, or not any more.
struct StragglerNews {
  int process = 0;
  bool is_slow = true;
  double seconds = 0;        ///< in which it works in the median step
  double extra_seconds = 0;  ///< of them, by which it is later than the others
  double slowdown = 0;       ///< 0.3: 30 % longer than the others
};

/// Finds processes for which all others wait, by the time in which each of them works in a step, without its
/// waits. The same times give the same news on each process. No clock, log or message. Threads: one at a
/// time.
class StragglerDetector {
 public:
  explicit StragglerDetector(const StragglerOptions& options = {}) : options_(options) {}

  /// The next steps are of these processes, in order. Steps of before are forgotten. Who was slow stays so
  /// until there is news.
  void set_processes(std::vector<StragglerProcess> processes);
  /// One step: seconds in which each process has worked. A step with a time that is not above 0 is left out.
  /// Returns what is new, mostly nothing.
  std::vector<StragglerNews> add_step(std::span<const double> seconds);
  bool is_slow(int process) const { return tracks_[static_cast<std::size_t>(process)].is_slow; }
  std::size_t num_slow() const;

 private:
  struct Track {
    StragglerProcess process;
    int num_late = 0;  // steps of the window
    bool is_slow = false;
  };
  void note(std::size_t process, double seconds, double expected);
  bool check(std::size_t process, StragglerNews& news);
  std::vector<double> window_of(const std::vector<double>& ring, std::size_t process) const;

  const StragglerOptions options_;
  std::vector<Track> tracks_;
  std::vector<double> scaled_, middle_;
  // Step i of process p is at (i % window) * processes + p.
  std::vector<double> seconds_, ratios_;
  std::size_t num_steps_ = 0;
};

}  // namespace cohort::elastic
