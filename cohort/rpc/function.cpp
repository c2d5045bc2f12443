#include "cohort/rpc/function.h"

#include "cohort/base/error.h"
#include "cohort/base/registry.h"

namespace cohort::rpc {
namespace {

base::Registry<RemoteFunction>& functions() {
  static auto* const registry = new base::Registry<RemoteFunction>("remote function", "rpc.functions", {});
  return *registry;
}

}  // namespace

bool add_function_at_load(const char* name, RemoteFunction function, const char* file, int line) noexcept {
  functions().add_at_load(name, std::move(function), file, line);
  return true;
}

RemoteFunction find_function(const std::string& name) {
  return functions().get(name);
}

std::map<std::string, std::string> all_signatures() {
  std::map<std::string, std::string> signatures;
  for (const std::string& name : functions().names()) signatures[name] = functions().get(name).signature;
  return signatures;
}

std::string differences(const std::map<std::string, std::string>& here,
                        const std::map<std::string, std::string>& there) {
  std::string lines;
  for (const auto& [name, signature] : here) {
    const auto found = there.find(name);
    if (found == there.end() || found->second == signature) continue;
    lines += base::concat(lines.empty() ? "" : "\n", name, ": here ", signature, ", there ", found->second);
  }
  return lines;
}

void function_detail::throw_not_registered(const std::string& signature) {
  throw UsageError("rpc.functions",
                   base::concat("a function ", signature, " is called that is not registered"),
                   "COHORT_REMOTE(function) in a source of this program");
}

}  // namespace cohort::rpc
