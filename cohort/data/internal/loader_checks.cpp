// All that can be wrong with a loader's options is found before the first batch, on the thread that makes
// the loader. What a sampler says is found when an epoch begins. Each error names the option and its value.
#include "cohort/data/internal/loader_checks.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>

#include "cohort/base/error.h"

namespace cohort::data {

void require_of_loader(bool condition, const std::string& what, const std::string& hint) {
  if (!condition) throw UsageError("data.loader", what, hint);
}

void check_shares(std::int64_t rank, std::int64_t num_shares, std::int64_t world_size) {
  using base::concat;
  require_of_loader(rank >= 0 && rank < world_size,
                    concat("rank is ", rank, ", expected 0 to ", world_size - 1));
  require_of_loader(num_shares >= 1 && num_shares <= world_size - rank,
                    concat("num_shares is ", num_shares, ", expected 1 to ", world_size - rank, " from rank ",
                           rank, " of world_size ", world_size));
}

void check_loader_options(const Dataset& dataset, const LoaderOptions& o) {
  using base::concat;
  require_of_loader(o.batch_size >= 1, concat("batch_size is ", o.batch_size, ", expected at least 1"));
  require_of_loader(o.global_batch_size >= 0,
                    concat("global_batch_size is ", o.global_batch_size, ", expected 0 or more"));
  require_of_loader(o.workers >= 0 && o.workers <= 1024,
                    concat("workers is ", o.workers, ", expected 0 to 1024"));
  require_of_loader(o.prefetch >= 1 || (o.workers == 0 && o.prefetch == 0),
                    concat("prefetch is ", o.prefetch, ", expected at least 1"),
                    "workers: 0 to read nothing ahead");
  require_of_loader(o.world_size >= 1, concat("world_size is ", o.world_size, ", expected at least 1"));
  check_shares(o.rank, o.num_shares, o.world_size);
  require_of_loader(o.parts >= 1, concat("parts is ", o.parts, ", expected at least 1"));
  require_of_loader(
      o.parts == 1 || o.on_error == OnError::kRaise,
      "parts are asked for together with on_error: skip, which changes how many samples a batch has while "
      "it is used",
      "on_error: raise, or one part");
  require_of_loader(o.timeout.count() > 0,
                    concat("timeout is ", o.timeout.count(), " ms, expected more than 0"));
  require_of_loader(o.stop_grace.count() >= 0,
                    concat("stop_grace is ", o.stop_grace.count(), " ms, expected 0 or more"));
  require_of_loader(dataset.size() > 0, "the dataset has no samples");
  const std::vector<Field> fields = dataset.fields();
  require_of_loader(!fields.empty(), "the dataset has no fields");
  for (const Field& field : fields) {
    require_of_loader(!field.channels_last || field.shape.size() == 3,
                      concat("field '", field.name, "' is channels_last and has ", field.shape.size(),
                             " dimensions, expected 3"));
  }
}

std::shared_ptr<const Sampler> sampler_of(std::int64_t size, const LoaderOptions& options) {
  if (options.sampler != nullptr) return options.sampler;
  return std::make_shared<DistributedSampler>(
      size, DistributedSamplerOptions{options.world_size, options.shuffle, options.seed, options.last_batch});
}

// The order of an epoch, which a sampler of the user's may have got wrong: an index beyond the dataset would
// be read from foreign memory.
std::vector<std::int64_t> checked_order(const Sampler& sampler, std::int64_t epoch, std::int64_t samples) {
  std::vector<std::int64_t> order = sampler.order(epoch);
  const auto wrong = [&](const auto&... what) {
    return UsageError("data.loader", base::concat("sampler ", c10::demangle(typeid(sampler).name()), ": ",
                                                  "order(", epoch, ") ", what...));
  };
  if (std::ssize(order) != sampler.size()) {
    throw wrong("has ", order.size(), " indices, expected ", sampler.size(), ", its size()");
  }
  const auto outside = [samples](std::int64_t index) { return index < 0 || index >= samples; };
  if (const auto bad = std::ranges::find_if(order, outside); bad != order.end()) {
    throw wrong("has index ", *bad, " at position ", bad - order.begin(), ", expected 0 to ", samples - 1,
                ": the dataset has ", samples, " samples");
  }
  return order;
}

LoaderOptions with_both_sizes(LoaderOptions options) {
  if (options.global_batch_size == 0) {
    options.global_batch_size = options.batch_size * options.world_size;
  } else {
    options.batch_size = (options.global_batch_size + options.world_size - 1) / options.world_size;
  }
  return options;
}

}  // namespace cohort::data
