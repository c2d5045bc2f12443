#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// The cores that this process may use, and threads pinned to them.
///
/// The number of cores of the machine is not what a process may use: its affinity (taskset, Slurm, a cpuset)
/// and the quota of its cgroup (a container with `--cpus=2` on a machine with 64) are below it, and threads
/// above that number collapse: two threads that spin on one core ran at a third of the speed of one.
namespace cohort::base {

/// A set of the machine's cores, by the numbers that the system gives them.
///
///     CpuSet::parse("2-3,5").pin_current_thread();
class CpuSet {
 public:
  CpuSet() = default;
  explicit CpuSet(std::vector<int> ids);

  /// Reads the system's own notation: numbers and ranges with commas between, "0", "2-3,5".
  /// Throws: ConfigError showing the text and the part that is wrong.
  static CpuSet parse(std::string_view text);
  /// The cores that the process was allowed to use when this library was loaded. Pinning a thread later does
  /// not change them, so core K stays core K.
  static const CpuSet& of_process();
  /// The cores that the calling thread may run on now.
  static CpuSet of_current_thread();

  /// Lets the calling thread run on these cores only; threads that it starts afterwards inherit that.
  /// Throws: UsageError when the set is empty, SystemError when the system rejects.
  void pin_current_thread() const;

  const std::vector<int>& ids() const { return ids_; }  ///< ascending
  int size() const { return static_cast<int>(ids_.size()); }
  bool empty() const { return ids_.empty(); }
  /// Whether `id`, the system's number of a core, is in the set.
  bool contains(int id) const;
  /// Whether a core is in both.
  bool intersects(const CpuSet& other) const;
  /// Writes the set as parse() reads it.
  std::string to_string() const;

  bool operator==(const CpuSet&) const = default;

 private:
  std::vector<int> ids_;
};

/// Pins the calling thread for as long as this object lives, then restores what was.
/// Threads: ends on the thread that made it.
class ScopedPin {
 public:
  explicit ScopedPin(const CpuSet& cpus) : before_(CpuSet::of_current_thread()) { cpus.pin_current_thread(); }
  ~ScopedPin();
  ScopedPin(const ScopedPin&) = delete;
  ScopedPin& operator=(const ScopedPin&) = delete;

 private:
  CpuSet before_;
};

/// What bounds the number of cores, each bound with its own number: `cohort doctor` prints it.
struct CoreLimits {
  int online = 1;               ///< cores of the machine
  int affinity = 1;             ///< cores that the process may be scheduled on
  std::optional<double> quota;  ///< cores' worth of time that the tightest cgroup grants; may be a fraction
  std::string quota_source;     ///< the file that says so

  /// The least of them, a fraction rounded up, at least 1.
  int usable() const;
};

/// Reads the limits. `root` stands before /proc and /sys, for tests.
CoreLimits core_limits(const std::filesystem::path& root = "/");

/// Returns how many threads are worth running: core_limits().usable(), or COHORT_CORES when it is set.
/// Throws: ConfigError when COHORT_CORES is no number above zero.
int usable_cores();

}  // namespace cohort::base
