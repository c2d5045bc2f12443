#include "cohort/parallel/model_runner.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/error_context.h"

namespace cohort::parallel {
namespace {

ModelRunner make_plain(torch::nn::AnyModule model, const ModelRunnerOptions& /*options*/) {
  return {[model = std::move(model)](const at::Tensor& input) mutable {
    return model.forward<at::Tensor>(input);
  }};
}

base::Registry<ModelRunnerType>& runner_registry() {
  static auto* instance = new base::Registry<ModelRunnerType>("model runner", "parallel.model_runner",
                                                              {{"plain", {.make = make_plain}}});
  return *instance;
}

// What `make` throws says which runner it was.
ModelRunnerType checked(const std::string& name, ModelRunnerType type) {
  type.make = [name, make = std::move(type.make)](torch::nn::AnyModule model,
                                                  const ModelRunnerOptions& options) {
    const std::string owner = base::concat("model runner '", name, "'");
    if (!make) throw UsageError("parallel.model_runner", owner + " was registered without make");
    return base::with_context<UsageError>("parallel.model_runner", "making " + owner,
                                          [&] { return make(std::move(model), options); });
  };
  return type;
}

}  // namespace

ModelRunnerType model_runner_type(const std::string& name) {
  return runner_registry().get(name);
}

ModelRunner make_model_runner(torch::nn::AnyModule model, const ModelRunnerOptions& options) {
  ModelRunner runner = model_runner_type(options.name).make(std::move(model), options);
  // Said here and by name, and not at the first batch.
  if (!runner.forward) {
    throw UsageError("parallel.model_runner",
                     base::concat("the model runner '", options.name, "' was made without forward"));
  }
  return runner;
}

std::vector<std::string> model_runner_names() {
  return runner_registry().names();
}

void register_model_runner(const std::string& name, ModelRunnerType type) {
  if (!type.make) throw UsageError("parallel.model_runner", "a model runner needs make");
  runner_registry().add(name, checked(name, std::move(type)), "register_model_runner");
}

bool register_model_runner_at_load(const char* name, ModelRunnerType type, const char* file,
                                   int line) noexcept {
  return runner_registry().add_at_load(name, checked(name, std::move(type)), file, line);
}

}  // namespace cohort::parallel
