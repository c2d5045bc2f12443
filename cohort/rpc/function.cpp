#include "cohort/rpc/function.h"

#include <memory>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/registry.h"
#include "cohort/base/text/format_list.h"

namespace cohort::rpc {
namespace {

// The registry gives out copies. It keeps each pointer for ever, so its function may be used without a copy
// of one's own: each call looks for its function twice.
using FunctionPointer = std::shared_ptr<const RemoteFunction>;

base::Registry<FunctionPointer>& functions() {
  static auto* const registry = new base::Registry<FunctionPointer>("remote function", "rpc.functions", {});
  return *registry;
}

}  // namespace

bool add_function_at_load(const char* name, RemoteFunction function, const char* file, int line) noexcept {
  functions().add_at_load(name, std::make_shared<const RemoteFunction>(std::move(function)), file, line);
  return true;
}

const RemoteFunction& find_function(const std::string& name) {
  return *functions().get(name);
}

std::map<std::string, std::string> all_signatures() {
  std::map<std::string, std::string> signatures;
  for (const std::string& name : functions().names()) signatures[name] = find_function(name).signature;
  return signatures;
}

std::string differences(const std::map<std::string, std::string>& here,
                        const std::map<std::string, std::string>& there) {
  base::TextList lines("; ");
  for (const auto& [name, signature] : here) {
    const auto found = there.find(name);
    if (found == there.end() || found->second == signature) continue;
    lines.add(name, ": here ", signature, ", there ", found->second);
  }
  return lines.text();
}

void function_detail::throw_not_registered(const std::string& signature) {
  throw UsageError("rpc.functions",
                   base::concat("a function ", signature, " is called that is not registered"),
                   "COHORT_REMOTE(function) in a source of this program");
}

}  // namespace cohort::rpc
