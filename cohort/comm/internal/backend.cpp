// Backends are entries of a registry: how one is made, how well it fits a situation, and why it may be
// absent. choose_backend() takes the one that fits best and is in the build. If an absent one would fit
// better, the reason says so. Always: a backend without a fit, or with preference 0, is used only by its
// name. Preferences leave gaps (10, 20, 30), so that a registered backend can stand between.
#include "cohort/comm/internal/backend.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/registry.h"
#include "cohort/comm/call_types.h"

namespace cohort::comm {
namespace {

BackendFit fit_of_gloo(const BackendSituation& situation) {
  return {.preference = 10, .reason = "tensors are on the CPU: " + situation.device_reason};
}

BackendFit fit_of_shm(const BackendSituation& situation) {
  if (situation.cuda || !situation.one_host) return {};
  return {.preference = 20,
          .reason = "all ranks are on this host, and tensors on the CPU: " + situation.device_reason};
}

BackendFit fit_of_nccl(const BackendSituation& situation) {
  if (!situation.cuda) return {};
  return {.preference = 30, .reason = situation.device_reason};
}

base::Registry<BackendType>& registry() {
  // It is made on first use: plugins register while statics are being made.
  static auto* instance = new base::Registry<BackendType>(
      "backend", "comm.group",
      {{"gloo", {.make = make_gloo, .fit = fit_of_gloo, .ends_calls = true}},
       {"shm", {.make = make_shm, .fit = fit_of_shm, .ends_calls = true}},
       {"nccl", {.make = make_nccl, .absent = nccl_absent, .fit = fit_of_nccl, .device = c10::kCUDA}},
       {"mpi", {.make = make_mpi, .absent = mpi_absent}},
       {"fake", {.make = make_fake, .is_for_tests = true, .ends_calls = true}}},
      {"auto"});
  return *instance;
}

std::string absence_of(const BackendType& type) {
  return type.absent ? type.absent() : "";
}

}  // namespace

BackendType backend_type(const std::string& name) {
  return registry().get(name);
}

BackendInstance make_backend(const std::string& name, const BackendOptions& options) {
  const BackendType type = backend_type(name);
  if (!type.make) {
    throw UsageError("comm.group", base::concat("the backend '", name, "' was registered without make"));
  }
  // Cohort's own say it themselves, with what to do.
  BackendInstance made = type.make(options);
  if (made.backend == nullptr) {
    const std::string absence = absence_of(type);
    throw UsageError("comm.group",
                     base::concat("backend ", name, " was not made", absence.empty() ? "" : ": " + absence));
  }
  return made;
}

void check_backend_name(const std::string& name) {
  registry().check(name);
  if (name != "auto") registry().get(name);
}

std::map<std::string, BackendType> backend_types() {
  std::map<std::string, BackendType> types;
  for (const std::string& name : registry().names()) {
    if (auto type = registry().find(name)) types.emplace(name, *std::move(type));
  }
  return types;
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const auto& [name, type] : backend_types()) {
    if (absence_of(type).empty()) names.push_back(name);
  }
  return names;
}

BackendChoice choose_backend(const BackendSituation& situation,
                             const std::map<std::string, BackendType>* types) {
  const std::map<std::string, BackendType> all = types == nullptr ? backend_types() : *types;
  BackendChoice choice;
  BackendFit best, best_absent;
  std::string missing;
  for (const auto& [name, type] : all) {
    const BackendFit fit = type.fit ? type.fit(situation) : BackendFit{};
    if (fit.preference == 0 || (situation.ends_calls && !type.ends_calls)) continue;
    const std::string absence = absence_of(type);
    if (!absence.empty() && fit.preference > best_absent.preference) {
      best_absent = fit;
      missing = base::concat(name, " would suit better, but ", absence);
    }
    // Of two that fit equally well, the first by name.
    if (!absence.empty() || fit.preference <= best.preference) continue;
    best = fit;
    choice.backend = name;
  }
  choice.reason = best_absent.preference > best.preference ? missing : best.reason;
  return choice;
}

void register_backend(const std::string& name, BackendType type) {
  if (!type.make) throw UsageError("comm.group", "a backend needs make");
  registry().add(name, std::move(type), "register_backend");
}

bool register_backend_at_load(const char* name, BackendType type, const char* file, int line) noexcept {
  return registry().add_at_load(name, std::move(type), file, line);
}

}  // namespace cohort::comm
