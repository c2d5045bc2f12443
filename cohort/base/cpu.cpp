// The cores of the process are read once, when the library is loaded, before any thread can have been pinned.
// So core K of a placement stays the same core. A set of the kernel's may be longer than cpu_set_t: reading
// tries larger sets until the kernel takes one.
#include "cohort/base/cpu.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/internal/cgroup.h"
#include "cohort/base/text/format_list.h"

namespace cohort::base {
namespace {

constexpr int kMaxCpus = 1 << 20;  // far above any machine; keeps "0-999999999" from filling memory

// A kernel's cpu_set_t has 1,024 bits; larger machines need a larger one, and the system says so by EINVAL.
struct FreeCpuSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuBits = std::unique_ptr<cpu_set_t, FreeCpuSet>;

int parse_cpu(std::string_view part, std::string_view text) {
  int id = -1;
  // Digits and no more: std::stoi() would read "2x" as 2.
  const auto result = std::from_chars(part.data(), part.data() + part.size(), id);
  if (result.ec != std::errc() || result.ptr != part.data() + part.size() || id < 0 || id >= kMaxCpus) {
    throw ConfigError("base.cpu_set",
                      concat("cores \"", text, "\": got \"", part, "\", expected a core number"),
                      "numbers and ranges with commas between, such as 0 or 2-3,5");
  }
  return id;
}

}  // namespace

CpuSet::CpuSet(std::vector<int> ids) : ids_(std::move(ids)) {
  std::sort(ids_.begin(), ids_.end());
  ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
}

CpuSet CpuSet::parse(std::string_view text) {
  std::vector<int> ids;
  std::string_view rest = text;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const std::size_t dash = part.find('-');
    const int first = parse_cpu(part.substr(0, dash), text);
    const int last = dash == std::string_view::npos ? first : parse_cpu(part.substr(dash + 1), text);
    if (last < first) {
      throw ConfigError("base.cpu_set", concat("cores \"", text, "\": range ", part, " runs backwards"),
                        concat(last, "-", first));
    }
    for (int id = first; id <= last; ++id) ids.push_back(id);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return CpuSet(std::move(ids));
}

CpuSet CpuSet::of_current_thread() {
  for (int count = 1024; count <= kMaxCpus; count *= 2) {
    const CpuBits bits(CPU_ALLOC(count));
    const std::size_t bytes = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(bytes, bits.get());
    if (::sched_getaffinity(0, bytes, bits.get()) == 0) {
      std::vector<int> ids;
      for (int id = 0; id < count; ++id) {
        if (CPU_ISSET_S(id, bytes, bits.get())) ids.push_back(id);
      }
      return CpuSet(std::move(ids));
    }
    if (errno != EINVAL) break;
  }
  throw SystemError("base.cpu_set",
                    concat("cannot read which cores this thread may use: ", std::strerror(errno)));
}

const CpuSet& CpuSet::of_process() {
  static const CpuSet cpus = of_current_thread();
  return cpus;
}

namespace {
// It is read when the library is loaded, before any thread can have been pinned.
[[maybe_unused]] const CpuSet& kAtLoad = CpuSet::of_process();
}  // namespace

void CpuSet::pin_current_thread() const {
  if (empty()) throw UsageError("base.pin", "the set of cores is empty", "at least one core");
  // Ids are sorted, so the last one says how large the set must be.
  const int count = ids_.back() + 1;
  const CpuBits bits(CPU_ALLOC(count));
  const std::size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, bits.get());
  for (const int id : ids_) CPU_SET_S(id, bytes, bits.get());
  if (::sched_setaffinity(0, bytes, bits.get()) != 0) {
    throw SystemError("base.pin",
                      concat("cannot pin a thread to cores ", to_string(), ": ", std::strerror(errno)),
                      concat("cores out of ", of_process().to_string(), ", which this process may use"));
  }
}

bool CpuSet::contains(int id) const {
  return std::binary_search(ids_.begin(), ids_.end(), id);
}

bool CpuSet::intersects(const CpuSet& other) const {
  return std::any_of(ids_.begin(), ids_.end(), [&](int id) { return other.contains(id); });
}

std::string CpuSet::to_string() const {
  TextList list(",");
  for (std::size_t i = 0; i < ids_.size();) {
    // The kernel's own notation, as in /proc and taskset: 0-3,8.
    std::size_t end = i;
    while (end + 1 < ids_.size() && ids_[end + 1] == ids_[end] + 1) ++end;
    list.add(ids_[i], end > i ? concat("-", ids_[end]) : "");
    i = end + 1;
  }
  return list.text();
}

ScopedPin::~ScopedPin() {
  try {
    before_.pin_current_thread();
  } catch (const Error&) {
    // The allowed cores changed meanwhile (a cpuset was narrowed): the system has moved the thread already.
  }
}

int CoreLimits::usable() const {
  int cores = std::min(online, affinity);
  // Rounded up: with one thread for a quota of 1.5 cores, half a core would stay idle.
  if (quota) cores = std::min(cores, static_cast<int>(std::ceil(std::min(*quota, 1e6))));
  return std::max(1, cores);
}

CoreLimits core_limits(const std::filesystem::path& root) {
  CoreLimits limits;
  limits.affinity = CpuSet::of_process().size();
  limits.online = std::max(limits.affinity, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
  if (const std::optional<CgroupQuota> quota = cgroup_cpu_quota(root)) {
    limits.quota = quota->cores;
    limits.quota_source = quota->source;
  }
  return limits;
}

int usable_cores() {
  if (const auto cores = env_int("COHORT_CORES", 1, kMaxCpus)) return static_cast<int>(*cores);
  return core_limits().usable();
}

}  // namespace cohort::base
