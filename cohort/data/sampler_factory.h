#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/registry.h"
#include "cohort/base/text/named_options.h"
#include "cohort/data/sampler.h"

/// Samplers by name: Cohort's, and those that a program or a library given to `--load` registers.
///
///     COHORT_REGISTER_SAMPLER("reversed", [](const cohort::data::SamplerOptions& options) {
///       return std::make_shared<Reversed>(options.size);
///     });
namespace cohort::data {

/// A sampler by name, as a configuration file says it.
struct SamplerOptions {
  std::string name = "distributed";  ///< one of sampler_names()
  std::int64_t size = 0;             ///< samples of the data set
  std::int64_t world_size = 1;
  bool shuffle = true;
  std::uint64_t seed = 0;
  LastBatchPolicy last_batch = LastBatchPolicy::kPad;
  base::NamedOptions extra = {};  ///< of a registered sampler (data.sampler_options)
};

/// Makes a sampler of a configuration.
using SamplerFactory = std::function<std::shared_ptr<const Sampler>(const SamplerOptions& options)>;

/// Returns a sampler: "distributed" (DistributedSampler), "random" (RandomSampler, the same for any number of
/// ranks), "sequential", or a registered one. Throws: UsageError for an unknown name, naming the nearest and
/// all, or for one that two libraries registered; ConfigError for an option that the sampler does not have.
std::shared_ptr<const Sampler> make_sampler(const SamplerOptions& options);

/// Throws: UsageError for an unknown name other than `auto`, or one that two libraries registered.
void check_sampler_name(const std::string& name);
/// Returns all names, sorted.
std::vector<std::string> sampler_names();

/// Makes `factory` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_sampler(const std::string& name, SamplerFactory factory);

/// What COHORT_REGISTER_SAMPLER calls while a library loads: a name that is taken stays with the first, and
/// make_sampler throws, naming both places.
bool register_sampler_at_load(const char* name, SamplerFactory factory, const char* file, int line) noexcept;

}  // namespace cohort::data

/// Registers a sampler where it is written, at namespace scope.
#define COHORT_REGISTER_SAMPLER(name, ...) \
  COHORT_REGISTER_AT_LOAD(data::register_sampler_at_load, name, __VA_ARGS__)
