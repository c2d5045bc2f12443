// A registry from names to factories, for data.sampler of a configuration. Each factory gets all of
// SamplerOptions; text options of a sampler's own come beside them. An option that nobody read is an error,
// so a misspelt one is never without effect in silence.
#include "cohort/data/sampler_factory.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/make_named.h"

namespace cohort::data {
namespace {

using base::concat;
constexpr const char* kOptions = "data.sampler_options";

// Cohort's own have no other options than SamplerOptions'.
template <typename Make>
SamplerFactory built_in_sampler(Make make) {
  return base::without_extra("sampler", kOptions, std::move(make));
}

// What the factory throws says which sampler it was, and no option is ignored.
SamplerFactory checked(const std::string& name, SamplerFactory factory) {
  return [name, factory = std::move(factory)](const SamplerOptions& given) {
    const std::string owner = concat("sampler '", name, "'");
    // Registration while a library loads cannot throw, so an empty factory is found on its first use.
    if (!factory) throw UsageError("data.registry", concat(owner, " was registered without a factory"));
    const auto make = [&](const base::NamedOptions& extra) {
      SamplerOptions options = given;
      options.extra = extra;
      return factory(options);
    };
    return base::make_named<UsageError>("data.registry", kOptions, owner, given.extra, make);
  };
}

std::shared_ptr<const Sampler> make_distributed(const SamplerOptions& options) {
  return std::make_shared<DistributedSampler>(
      options.size,
      DistributedSamplerOptions{options.world_size, options.shuffle, options.seed, options.last_batch});
}

std::shared_ptr<const Sampler> make_random(const SamplerOptions& options) {
  return std::make_shared<RandomSampler>(options.size, options.seed);
}

std::shared_ptr<const Sampler> make_sequential(const SamplerOptions& options) {
  return std::make_shared<SequentialSampler>(options.size);
}

base::Registry<SamplerFactory>& sampler_registry() {
  static auto* instance =
      new base::Registry<SamplerFactory>("sampler", "data.make_sampler",
                                         {{"distributed", built_in_sampler(make_distributed)},
                                          {"random", built_in_sampler(make_random)},
                                          {"sequential", built_in_sampler(make_sequential)}},
                                         {"auto"});
  return *instance;
}

}  // namespace

std::shared_ptr<const Sampler> make_sampler(const SamplerOptions& options) {
  return sampler_registry().get(options.name)(options);
}

void check_sampler_name(const std::string& name) {
  sampler_registry().check(name);
  // "auto" is no sampler: the trainer resolves it.
  if (name != "auto") sampler_registry().get(name);
}

std::vector<std::string> sampler_names() {
  return sampler_registry().names();
}

void register_sampler(const std::string& name, SamplerFactory factory) {
  if (!factory) throw UsageError("data.registry", "a sampler needs a factory");
  sampler_registry().add(name, checked(name, std::move(factory)), "register_sampler");
}

bool register_sampler_at_load(const char* name, SamplerFactory factory, const char* file, int line) noexcept {
  return sampler_registry().add_at_load(name, checked(name, std::move(factory)), file, line);
}

}  // namespace cohort::data
