#pragma once

#include <string>
#include <string_view>
#include <vector>

/// The cores that this process may use, which is not the number that the machine has.
namespace cohort::core {

/// A set of processor ids, in rising order.
class CpuSet {
 public:
  CpuSet() = default;
  explicit CpuSet(std::vector<int> ids);

  /// Reads "2-3,5". Throws: UsageError showing the text.
  static CpuSet parse(std::string_view text);
  /// The cores of this process's affinity mask.
  static CpuSet available();

  const std::vector<int>& ids() const { return ids_; }
  int size() const { return static_cast<int>(ids_.size()); }
  bool empty() const { return ids_.empty(); }
  /// "2-3,5".
  std::string str() const;
  /// Binds the calling thread to these cores. Throws: SystemError.
  void pin_this_thread() const;

 private:
  std::vector<int> ids_;
};

/// Cores that may be kept busy at once: the affinity mask, or less where a container's quota (cgroup version
/// 1 or 2) grants less; a fraction counts as one more. At least 1.
int usable_cores();

/// The quota of the cgroup under `root` ("/sys/fs/cgroup" in life) in cores, or 0 for none. `process_cgroups`
/// is the text of /proc/self/cgroup.
double cgroup_cores(const std::string& root, const std::string& process_cgroups);

}  // namespace cohort::core
